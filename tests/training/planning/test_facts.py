"""Facts about a model are found while as many processes as will train are busy, each where its worker will run."""

from __future__ import annotations

import functools
import json
import os
import time
from pathlib import Path

from tfpar.training.planning import facts

import pytest


def note_cores(folder: Path) -> None:
    (folder / str(os.getpid())).write_text(json.dumps(sorted(os.sched_getaffinity(0))))
    time.sleep(60)  # until it is ended


@pytest.mark.parametrize("shared_out", [True, False])
def test_others_are_busy_on_the_cores_of_other_workers(tmp_path, monkeypatch, shared_out):
    usable = sorted(os.sched_getaffinity(0))
    others = [usable[:1], usable[-1:]]
    monkeypatch.setattr(facts, "cores_of_others", lambda: others if shared_out else [])
    with facts._beside(2, functools.partial(note_cores, tmp_path)):
        deadline = time.monotonic() + 30
        while len(found := [each.read_text() for each in tmp_path.iterdir()]) < 2 or not all(found):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert sorted(map(json.loads, found)) == sorted(others if shared_out else [usable, usable])
