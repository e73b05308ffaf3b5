"""SIGTERM while training: a checkpoint, an exit code of its own, and the same weights in the end."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import tfpar
from tests import nursery
from tfpar.guards.preemption import PreemptionFlag
from tfpar.monitor import summary as results
from tfpar.process.exit_codes import INTERRUPTED, PREEMPTED, Preempted, install_sigterm_handler, restore_default_signals

import keras
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]


def test_a_request_is_noted_and_the_handler_given_back():
    with PreemptionFlag() as request:
        assert not request.received
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.received
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_request_that_comes_too_late_stops_the_next_run():
    def told_at_the_end(logs: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    x = np.ones([8, 2], np.float32)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    options = {"strategy": "one_device", "global_batch_size": 8, "jit_compile": False, "verbose": 0}
    trainer = tfpar.Trainer(model, "sgd", "mse", **options)
    callback = keras.callbacks.LambdaCallback(on_train_end=told_at_the_end)
    assert trainer.fit(x, x[:, :1], steps=2, callbacks=[callback])["steps"] == 2
    with pytest.raises(Preempted):
        trainer.fit(x, x[:, :1], steps=9)
    assert trainer.fit(x, x[:, :1], steps=2)["steps"] == 2  # it was answered


def test_a_program_keeps_its_own_handler():
    came = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        with PreemptionFlag() as request:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (came, request.received) == ([1], False)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_in_another_thread_nothing_is_handled():
    requests = []

    def enter():
        with PreemptionFlag() as request:
            requests.append(request)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not requests[0].received


def test_a_second_request_ends_the_process_but_not_one_that_is_sent_twice():
    """systemd and srun send the signal to every process, and their launcher forwards it."""
    code = "\n".join(
        [
            "import os, signal, time",
            "from tfpar.guards import preemption",
            "with preemption.PreemptionFlag() as request:",
            "    for _ in range(3):",
            "        os.kill(os.getpid(), signal.SIGTERM)",
            "    print(request.received, flush=True)",
            "    preemption._ONE_REQUEST_S = 0.1",
            "    time.sleep(0.2)",
            "    os.kill(os.getpid(), signal.SIGTERM)",
            "    print('still here')",
        ]
    )
    done = nursery.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n"), done


FORKS = """
import multiprocessing, os, signal, time
from tfpar.guards.interruption import ExitOnInterrupt
from tfpar.guards.preemption import PreemptionFlag
from tfpar.process.exit_codes import install_sigterm_handler

def work(started):
    try:
        started.set()
        time.sleep(600)
    except KeyboardInterrupt:
        os._exit(3)

install_sigterm_handler()
fork = multiprocessing.get_context("fork")
with PreemptionFlag() as request, ExitOnInterrupt(lambda: print("interrupted")):
    for number in (signal.SIGTERM, signal.SIGINT):
        started = fork.Event()
        child = fork.Process(target=work, args=[started])
        child.start()
        started.wait()
        os.kill(child.pid, number)
        child.join(60)
        print(child.exitcode, request.received, flush=True)
        child.kill()
    os.kill(os.getpid(), signal.SIGTERM)
    print(request.received, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
"""


def test_a_fork_can_be_ended_and_the_run_goes_on():
    """A hook may start a `multiprocessing.Process`, terminate it and join it."""
    done = nursery.run([sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout == "-15 False\n3 False\nTrue\ninterrupted\n", done
    assert done.returncode == INTERRUPTED


def test_before_training_nothing_is_lost():
    code = "\n".join(
        [
            "import os, signal",
            "from tfpar.process.exit_codes import install_sigterm_handler",
            "install_sigterm_handler()",
            "install_sigterm_handler()",
            "print('unfinished', end='')",
            "os.kill(os.getpid(), signal.SIGTERM)",
            "print('still here')",
        ]
    )
    done = nursery.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (PREEMPTED, "unfinished"), done
    assert done.stderr.startswith("asked to end (SIGTERM) while not training")


def test_training_takes_over_and_gives_back():
    install_sigterm_handler()
    before = signal.getsignal(signal.SIGTERM)
    assert before != signal.SIG_DFL
    with PreemptionFlag() as request:
        os.kill(os.getpid(), signal.SIGTERM)
        assert request.received
    assert signal.getsignal(signal.SIGTERM) == before
    restore_default_signals()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_program_keeps_its_own_handler_before_training_too():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    install_sigterm_handler()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    restore_default_signals()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


@pytest.mark.cluster
def test_workers_told_to_end_before_they_train(tmp_path):
    """Nothing is lost, so it is a preemption, though a worker may notice its lost peer before the signal."""
    command = [
        *(sys.executable, "-u", "-m", "tfpar.launch", "--workers=2", "--"),
        *("experiments/image_classification.py", "--model=mlp", "--steps=2000", f"--workdir={tmp_path}"),
        "--jit_compile=false",
    ]
    with nursery.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        assert launcher.stdout is not None
        try:
            lines = [next(line for line in launcher.stdout if "strategy multi_worker" in line)]
            launcher.terminate()
            lines += launcher.stdout
            launcher.wait(timeout=300)
        finally:
            launcher.kill()
    output = "".join(lines)
    assert launcher.returncode == PREEMPTED, output
    assert "asked to end (SIGTERM) while not training" in output
    assert "all processes were asked to end and did so (exit code 85)" in output


def start(workdir):
    command = [
        *(sys.executable, "-u", "experiments/image_classification.py", "--model=mlp", "--steps=2000"),
        *("--eval_every=1000", "--deterministic", "--jit_compile=false", f"--workdir={workdir}"),
    ]
    return nursery.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_told_to_end_saves_and_goes_on_there(tmp_path):
    whole, told = start(tmp_path / "whole"), start(tmp_path / "told")
    while told.poll() is None and not (tmp_path / "told" / "restarts.json").exists():
        time.sleep(0.05)
    time.sleep(1.0)
    told.send_signal(signal.SIGTERM)
    output, _ = told.communicate(timeout=300)
    assert told.returncode == PREEMPTED, output
    assert "asked to end (SIGTERM): stopped after step" in output
    again = start(tmp_path / "told")
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert "resumed from step" in output
    assert whole.communicate(timeout=300)
    assert whole.returncode == 0
    summary, expected = results.read_summary(str(tmp_path / "told")), results.read_summary(str(tmp_path / "whole"))
    assert summary["params_sha256"] == expected["params_sha256"]
    assert (summary["restarts"], summary["steps_redone"]) == (1, 0)
