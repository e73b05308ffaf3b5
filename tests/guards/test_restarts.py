"""The counts of starts and of steps done again."""

from __future__ import annotations

import json

from tfpar.guards import restarts as journal
from tfpar.guards.restarts import RestartLog

import pytest


def counts(entry):
    return entry.restarts, entry.steps_redone


def test_a_first_start_is_no_restart(tmp_path):
    entry = RestartLog(str(tmp_path), writes=True)
    entry.begin(0)
    entry.reached(10)
    entry.end("finished")
    assert counts(RestartLog(str(tmp_path), writes=False)) == (0, 0)


@pytest.mark.parametrize("ended", ["finished", "stopped"])
def test_going_on_after_a_clean_end_is_none_either(tmp_path, ended):
    first = RestartLog(str(tmp_path), writes=True)
    first.begin(0)
    first.end(ended)
    second = RestartLog(str(tmp_path), writes=True)
    second.begin(10)
    assert counts(second) == (0, 0)


def test_failures_and_what_they_cost_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_WRITE_SECONDS", 0.0)
    first = RestartLog(str(tmp_path), writes=True)
    first.begin(0)
    first.reached(17)  # and then it is killed
    second = RestartLog(str(tmp_path), writes=True)
    second.begin(10)
    second.reached(30)
    second.end("preempted")  # at a checkpoint: nothing is done again
    third = RestartLog(str(tmp_path), writes=True)
    third.begin(30)
    assert counts(third) == (2, 7)
    third.reached(40)
    third.end("finished")
    fourth = RestartLog(str(tmp_path), writes=True)
    fourth.begin(35)  # the checkpoint of 40 was found damaged: no restart, but work done again
    assert counts(fourth) == (2, 12)
    assert json.loads((tmp_path / "restarts.json").read_text())["starts"] == 4


def test_only_the_chief_writes(tmp_path):
    entry = RestartLog(str(tmp_path), writes=False)
    entry.begin(0)
    entry.end("finished")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"starts": "many"}', '{"starts": 1}', '{"starts": 1e999}', "[" * 9999]
)
def test_a_damaged_file_is_passed_over(tmp_path, content):
    (tmp_path / "restarts.json").write_text(content)
    entry = RestartLog(str(tmp_path), writes=True)
    entry.begin(5)
    assert counts(entry) == (0, 0)


@pytest.mark.parametrize(("environ", "expected"), [(None, 0), ("", 0), ("0", 0), ("3", 3), ("x", 0)])
def test_without_a_workdir_the_launcher_knows(monkeypatch, environ, expected):
    monkeypatch.delenv("TFPAR_RESTARTS", raising=False)
    if environ is not None:
        monkeypatch.setenv("TFPAR_RESTARTS", environ)
    entry = RestartLog("", writes=True)
    entry.begin(0)
    assert counts(entry) == (expected, 0)


def test_the_counts_of_an_older_version_are_read(tmp_path):
    """Version 0.1.0 named the file `starts.json`."""
    state = {"starts": 3, "restarts": 2, "steps_redone": 7, "reached": 40, "ended": ""}
    (tmp_path / "starts.json").write_text(json.dumps(state))
    entry = RestartLog(str(tmp_path), writes=True)
    assert counts(entry) == (2, 7)
    entry.begin(30)
    assert counts(RestartLog(str(tmp_path), writes=False)) == (3, 17)
    assert json.loads((tmp_path / "restarts.json").read_text())["starts"] == 4
