"""The launcher on actor.py, for all tests that start processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from tests.launch.actors import Actors

import pytest


@pytest.fixture
def actors(tmp_path: Path) -> Iterator[Actors]:
    """Fails a test that leaves a process behind."""
    made = Actors(tmp_path)
    yield made
    left = made.alive(wait=0)
    for pid in made.pids().values():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert left == [], f"left behind: {left}"
