"""These tests build no Keras model: nothing to reset between them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_keras_state() -> None:
    """Replaces the one of the conftest above, which takes longer than most of these tests."""
