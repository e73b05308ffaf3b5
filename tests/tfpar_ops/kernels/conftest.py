"""The operations of the native library; without it there is nothing to test here."""

from __future__ import annotations

import tfpar_ops

import pytest


@pytest.fixture(autouse=True)
def _native() -> None:
    if not tfpar_ops.uses_library():
        pytest.skip(f"the native operations are not in use here: {tfpar_ops.library_status()}")
