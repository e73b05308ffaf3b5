"""The implementations of the codecs as fixtures. These tests build no Keras model: nothing to reset between them."""

from __future__ import annotations

from tests.tfpar_ops import implementations

import pytest


@pytest.fixture(autouse=True)
def _fresh_keras_state() -> None:
    """Replaces the one of the conftest above."""


@pytest.fixture(scope="session", params=["reference", "native"])
def ops(request: pytest.FixtureRequest) -> implementations.Implementation:
    """An implementation that takes any shapes at the cost of a call; XLA, which compiles for each, is not one."""
    return implementations.get(request.param)
