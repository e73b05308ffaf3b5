"""The implementations of the codecs, and the built library, as fixtures.

These tests build no Keras model: nothing to reset between them.
"""

from __future__ import annotations

from tests.tfpar_ops import implementations
from tests.tfpar_ops.checkout import PACKAGE
from tfpar_ops import library

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Properties of the reference are left to `make proofs` where the native library, which is faster, shows them."""
    if not (PACKAGE / library.FILE).exists():
        return
    for item in items:
        if item.path.name == "test_properties.py" and item.callspec.params.get("ops") == "reference":
            item.add_marker(pytest.mark.proof)


@pytest.fixture(autouse=True)
def _fresh_keras_state() -> None:
    """Replaces the one of the conftest above."""


@pytest.fixture(scope="session", params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> implementations.Implementation:
    """An implementation that takes any shapes at the cost of a call; XLA, which compiles for each, is not one."""
    return implementations.get(request.param)


@pytest.fixture
def built() -> None:
    """Skips the test where the native library was not built, whether or not it is in use."""
    if not (PACKAGE / library.FILE).exists():
        pytest.skip("the native library is not built here")
