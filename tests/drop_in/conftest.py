"""Processes that believe to be one of several."""

from __future__ import annotations

import json

from tests.drop_in.alone import TWO_WORKERS, Alone
from tfpar.drop_in import workers

import pytest


@pytest.fixture
def worker_1_of_2(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO_WORKERS))


@pytest.fixture
def alone(monkeypatch) -> Alone:
    """A process that believes to be one of several, so that optimizers are distributed."""
    found = Alone()
    monkeypatch.setattr(workers, "_workers", found)
    return found
