"""A process whose program hangs ends itself, and says where; one that is only slow does not."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from tfpar.endings import PEER_LOST

ROOT = pathlib.Path(__file__).parents[2]
HANGS = """
import threading, time
from tfpar.training.watchdog import Watchdog

def waits_for_ever():
    threading.Event().wait()

with Watchdog(1.0, "worker 3") as watchdog:
    time.sleep(2)  # before the first progress nothing is due
    watchdog.progress("update 7")
    with watchdog.paused():
        time.sleep(2)
    for _ in range(4):
        time.sleep(0.5)
        watchdog.progress("update 8")
    print("so far", flush=True)
    waits_for_ever()
"""


def test_a_hang_ends_the_process_with_its_stacks():
    done = subprocess.run(
        [sys.executable, "-c", HANGS], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "so far\n"
    assert done.returncode == PEER_LOST
    assert "waits_for_ever" in done.stderr
    assert "error: worker 3 made no progress for 1 s (--stall_timeout), in update 8." in done.stderr


def test_switched_off_it_does_nothing():
    program = HANGS.replace("Watchdog(1.0,", "Watchdog(0.0,").replace("    waits_for_ever()\n", "    time.sleep(2)\n")
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "so far\n"), done.stderr
