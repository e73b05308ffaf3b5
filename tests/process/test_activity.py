"""What a terminal and a log file show of long work."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import select
import sys
import threading

from tfpar.process import activity as module
from tfpar.process import exit_codes, logs
from tfpar.process.activity import activity, describe
from tfpar.process.terminal_line import TerminalLine

import pytest


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("compiling the step", 12.2, 0, 0), "compiling the step ...  0:12"),
        (("evaluating digits", 3.0, 120, 360), "evaluating digits [=======             ] 120/360  0:03, 0:06 left"),
        (("evaluating digits", 3.0, 0, 360), "evaluating digits [                    ] 0/360  0:03"),
        (("evaluating digits", 3.0, 361, 360), "evaluating digits [====================] 361/360  0:03, 0:00 left"),
    ],
)
def test_an_activity_in_one_line(arguments, expected):
    assert describe(*arguments, bar=True) == expected


@contextlib.contextmanager
def pseudo_terminal(monkeypatch):
    """Standard output on a pseudo-terminal. Yields a function that returns what was written once a pattern is there."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.delenv("TF_CONFIG", raising=False)
    # What other tests of this process may have left.
    monkeypatch.setattr(logs, "_live_line", None)
    monkeypatch.setattr(module, "_running", [])
    monkeypatch.setattr(logging.getLogger("tfpar"), "level", logging.INFO)
    monkeypatch.setattr(module, "_LIVE_SECONDS", (0.01, 0.01))
    master, slave = pty.openpty()
    written = ""

    def read(pattern):
        nonlocal written
        while not re.search(pattern, written, re.DOTALL):
            assert select.select([master], [], [], 60)[0], f"no {pattern!r} in {written!r}"
            written += os.read(master, 1 << 16).decode()
        return written

    with os.fdopen(slave, "w") as stream, contextlib.redirect_stdout(stream):
        yield read
    os.close(master)


def test_a_terminal_shows_it_live_and_is_clean_afterwards(monkeypatch):
    done = 0
    with pseudo_terminal(monkeypatch) as terminal:
        with activity("evaluating", count=lambda: done, total=4):
            terminal(r"evaluating \[ {20}\] 0/4  0:\d\d")
            done = 2
            terminal(r"evaluating \[={10} {10}\] 2/4")
            line = logs.live_line()
            assert line is not None
            line.message("above it")
            terminal("above it\r\n")
        print("after")
        assert terminal("after\r\n").splitlines()[-1].rpartition("\r")[2] == "after"
    assert logs.live_line() is None


def test_it_covers_the_progress_line_and_the_inner_one_is_shown(monkeypatch):
    with pseudo_terminal(monkeypatch) as terminal:
        line = TerminalLine(sys.stdout)
        logs.attach(line)
        line.show("step 5/10")
        with activity("saving"):
            terminal(r"saving \.\.\.")
            with activity("waiting for worker 1"):
                terminal(r"waiting for worker 1 \.\.\.")
                line.show("step 6/10")  # not shown yet
                assert "step 6/10" not in terminal("(waiting.*){5}")
            terminal("waiting.*saving")
        terminal("step 6/10")
        line.close()
        logs.detach(line)


def test_a_log_file_has_a_line_now_and_then(monkeypatch, capsys):
    monkeypatch.setattr(module, "_PLAIN_SECONDS", (0.01, 0.01))
    asked = threading.Semaphore(0)

    def count():
        asked.release()
        return 3

    with activity("evaluating", count=count, total=4):
        for _ in range(3):
            asked.acquire()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("evaluating ... 3/4  0:00, 0:00 left") for line in lines)


def is_running(what):
    """By name: threads that other tests have left may end meanwhile."""
    return any(thread.name == f"activity: {what}" for thread in threading.enumerate())


@pytest.mark.parametrize("stop", ["not shown", "short", "level"])
def test_nothing_is_shown_of_what_is_short_or_not_asked_for(monkeypatch, capsys, stop):
    logger = logging.getLogger("tfpar")
    if stop != "short":
        monkeypatch.setattr(module, "_PLAIN_SECONDS", (0.0, 0.0))
    if stop == "level":
        monkeypatch.setattr(logger, "level", logging.WARNING)
        logger.manager._clear_cache()
    with activity("compiling", shown=stop != "not shown"):
        assert is_running("compiling") == (stop == "short")
    logger.manager._clear_cache()
    assert capsys.readouterr().out == ""


def test_an_error_in_the_block_ends_the_activity():
    with pytest.raises(ValueError, match="wrong"), activity("compiling"):
        raise ValueError("wrong")
    assert not is_running("compiling")


def test_a_line_that_is_closed_while_covered_leaves_its_own_text():
    stream = io.StringIO()
    line = TerminalLine(stream)
    line.show("step 5/10")
    line.cover("saving ...")
    line.close()
    assert stream.getvalue() == "\rstep 5/10\rsaving ...\rstep 5/10 \n"


def test_the_first_process_is_the_chief_of_the_cluster_that_it_has_joined(monkeypatch):
    """Slurm and Kubernetes set no `TF_CONFIG`."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setattr(exit_codes, "_is_chief", [])
    assert module._is_first_process()
    for is_chief in (False, True):
        exit_codes.join_cluster(is_chief=is_chief)
        assert module._is_first_process() == is_chief
