"""The probes of parameter servers, and how a process ends that hears of a loss."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time

from tests import nursery
from tfpar.process.exit_codes import PEER_LOST

import pytest

_TEXT = "lost worker 0 (a listener): it does not answer"
# Nothing answers the probes. `PyDLL` keeps Python's lock, as a call of TensorFlow does that waits for a worker.
_PROGRAM = """
import ctypes, logging, sys, time
from tfpar.cluster import heartbeat
from tfpar_ops.library import library
address, native, locked = sys.argv[1:]
logging.basicConfig(format="error: %(message)s")
core = library().core if native == "native" else None
heartbeat.start_heartbeat(
    {"worker 0 (a listener)": address}, peer_timeout=1, start_timeout=0.5, text="lost {}: it does not answer", core=core
)
print("watching", flush=True)
(ctypes.PyDLL(None).sleep if locked == "locked" else time.sleep)(100)
"""


@pytest.fixture
def silent_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("native", "locked", "code"),
    [
        ("native", "locked", PEER_LOST),
        ("reference", "locked", -signal.SIGKILL),
        ("reference", "free", PEER_LOST),
    ],
)
def test_a_process_ends_with_one_line_even_where_python_does_not_run(silent_address, native, locked, code):
    if native == "native":
        from tfpar_ops.library import library

        if library().core is None:
            pytest.skip("the native library is not built")
    command = [sys.executable, "-c", _PROGRAM, silent_address, native, locked]
    done = nursery.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    assert [line for line in done.stderr.splitlines() if _TEXT in line] == [f"error: {_TEXT}"]


def test_the_process_that_probes_ends_with_the_one_it_watches(silent_address):
    """However that ends, and whether or not it is told."""
    program = _PROGRAM.replace("peer_timeout=1", "peer_timeout=3000")
    command = [sys.executable, "-c", program, silent_address, "reference", "free"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        (watcher,) = _children(process.pid)
        process.kill()
    deadline = time.monotonic() + 300
    while _runs(watcher):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return [int(child) for child in children.read().split()]


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
