"""A process whose program hangs ends itself, and says where; one that is only slow does not."""

from __future__ import annotations

import pathlib
import signal
import subprocess
import sys
import time

from tests import nursery
from tfpar.process.exit_codes import PEER_LOST

import pytest

ROOT = pathlib.Path(__file__).parents[2]
HANGS = """
import threading, time
from tfpar.guards.watchdog import Watchdog

def waits_for_ever():
    threading.Event().wait()

with Watchdog(2.0, "worker 3") as watchdog:
    time.sleep(3)  # the first step may take five times as long
    watchdog.progress("step 7")
    watchdog.progress("evaluation after step 7", patient=True)
    time.sleep(3)
    for _ in range(6):  # a second and a half late would not matter
        watchdog.progress("step 8")
        time.sleep(0.5)
    print("so far", flush=True)
    waits_for_ever()
"""
HANGS_AT_ONCE = HANGS[: HANGS.index("    time.sleep(3)  #")].replace("2.0", "0.2") + "    waits_for_ever()\n"


def run(program, *arguments):
    return nursery.run(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


def test_a_hang_ends_the_process_with_its_stacks():
    done = run(HANGS)
    assert done.stdout == "so far\n"
    assert done.returncode == PEER_LOST
    assert "waits_for_ever" in done.stderr
    assert "error: worker 3 made no progress for 2 s (--stall_timeout), in step 8." in done.stderr


@pytest.mark.parametrize(
    ("after", "what"),
    [
        ("", "the startup and the first step"),
        ("watchdog.progress('evaluation', patient=True)", "evaluation"),
    ],
)
def test_a_hang_where_nothing_shows_progress_has_a_bound_too(after, what):
    done = run(HANGS_AT_ONCE.replace("    waits_for_ever()\n", f"    {after}\n    waits_for_ever()\n"))
    assert done.returncode == PEER_LOST
    assert "waits_for_ever" in done.stderr
    assert f"error: worker 3 made no progress for 1 s (5 times --stall_timeout), in {what}." in done.stderr


def test_a_call_that_hangs_with_pythons_lock_held_ends_too():
    program = (
        HANGS[: HANGS.index("    time.sleep(3)  #")].replace("2.0", "0.4")
        + "    import ctypes\n    time.sleep(0.3)\n    ctypes.PyDLL(None).sleep(100)\n"
    )
    done = run(program)
    assert done.returncode == 1
    assert done.stderr.startswith("Timeout (0:00:02)!"), done.stderr


@pytest.mark.parametrize("stream", ["io.StringIO()", "None"])
def test_a_stream_without_a_descriptor_as_in_a_notebook(stream):
    """The stacks go to the process's own standard error."""
    done = run(
        HANGS_AT_ONCE.replace("import threading", f"import io, sys, threading\nsys.stderr = {stream}\nimport threading")
    )
    assert done.returncode == PEER_LOST
    assert "waits_for_ever" in done.stderr
    assert "UnsupportedOperation" not in done.stderr


SOURCE_HANGS = """
import dataclasses, sys, threading
import tfpar
from tfpar import inputs
import keras, numpy as np, tensorflow as tf

def hangs(source):
    def wait(indices):
        threading.Event().wait()

    def read(indices):
        with tf.control_dependencies([tf.py_function(wait, [indices], [])]):
            return tuple(map(tf.identity, source.read(indices)))

    return dataclasses.replace(source, read=read, portable=False)

def model():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])

train = inputs.from_arrays(np.zeros([16, 3], np.float32), np.zeros([16], np.int32))
validation = hangs(train) if sys.argv[1] in ("evaluation", "evaluate", "predict") else train
train = hangs(train) if sys.argv[1] == "first" else train
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
options = {"strategy": "one_device", "jit_compile": "false", "cache": "none", "global_batch_size": 8, "steps": 2}
trainer = tfpar.Trainer(model, loss=loss, stall_timeout=float(sys.argv[2]), **options)
if sys.argv[1] in ("evaluate", "predict"):
    getattr(trainer, sys.argv[1])(validation)
trainer.fit(train, validation=validation)
"""


@pytest.mark.parametrize(
    ("where", "timeout", "what"),
    [
        ("first", 0.5, "the startup and the first step"),
        ("evaluation", 3, "evaluating arrays"),  # within five times that the steps are done
        ("evaluate", 0.5, "evaluating arrays"),
        ("predict", 0.5, "predicting arrays"),
    ],
)
def test_a_source_that_hangs_is_noticed(where, timeout, what):
    done = run(SOURCE_HANGS, where, str(timeout))
    assert done.returncode == PEER_LOST, done.stderr
    assert (
        f"error: worker 0 made no progress for {5 * timeout:g} s (5 times --stall_timeout), in {what}." in done.stderr
    )


def test_what_can_be_counted_may_take_long_as_a_whole():
    program = """
import itertools, time
from tfpar.guards.watchdog import Watchdog

with Watchdog(0.2, "worker 3", first="evaluating", count=itertools.count().__next__):
    time.sleep(3)
print("done")
"""
    done = run(program)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_part_of_the_work_is_watched_in_place_of_the_whole():
    program = """
import itertools, time
from tfpar.guards.watchdog import Watchdog

with Watchdog(0.4, "worker 3") as whole:
    with Watchdog(0.4, "worker 3", first="evaluating", count=itertools.count().__next__):
        time.sleep(4)
    whole.progress("step 7", patient=True)
    with Watchdog(0.4, "worker 3", first="predicting"):
        time.sleep(4)
"""
    done = run(program)
    assert done.returncode == PEER_LOST
    assert done.stderr.count("no progress") == 1
    assert "error: worker 3 made no progress for 2 s (5 times --stall_timeout), in predicting." in done.stderr


def test_a_process_that_was_stopped_for_a_while_goes_on():
    program = """
import time
from tfpar.guards.watchdog import Watchdog

with Watchdog(4.0, "worker 3") as watchdog:
    watchdog.progress("step 7")
    print("begun", flush=True)
    for _ in range(5):
        time.sleep(0.1)
print("done")
"""
    command = [sys.executable, "-c", program]
    with nursery.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(5)
        process.send_signal(signal.SIGCONT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "done\n"), errors


def test_switched_off_it_does_nothing():
    done = run(
        HANGS.replace("Watchdog(2.0,", "Watchdog(0.0,")
        .replace("sleep(3)", "sleep(0.5)")
        .replace("    waits_for_ever()\n", "")
    )
    assert (done.returncode, done.stdout) == (0, "so far\n"), done.stderr
