"""Parameter servers and their workers: lost in a run that no launcher looks after, and ended by a launcher."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from tests import nursery
from tfpar.launch import free_ports
from tfpar.process.exit_codes import PEER_LOST, PREEMPTED

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]
ROOT = pathlib.Path(__file__).parents[2]
FLAGS = [
    *("--strategy=parameter_server", "--dataset=digits", "--model=mlp", "--optimizer=sgd", "--jit_compile=false"),
    *("--schedule=constant", "--checkpoint_every=20", "--peer_timeout=8", "--start_timeout=120"),
]


class Tasks:
    """A chief, a worker and a server, as a scheduler starts them."""

    def __init__(self, folder, stack):
        chief, worker, server = (f"127.0.0.1:{port}" for port in free_ports(3))
        self.cluster = {"chief": [chief], "worker": [worker], "ps": [server]}
        self._folder, self._stack = folder, stack

    def start(self, job, *flags):
        config = {"cluster": self.cluster, "task": {"type": job, "index": 0}}
        with open(self._folder / job, "wb") as output:
            process = nursery.Popen(
                [sys.executable, "-u", "experiments/image_classification.py", *FLAGS, *flags],
                cwd=ROOT,
                env={**os.environ, "TF_CONFIG": json.dumps(config)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def said(self, job):
        return (self._folder / job).read_text()


@pytest.fixture
def tasks(tmp_path):
    with contextlib.ExitStack() as stack:
        yield Tasks(tmp_path, stack)


@pytest.mark.parametrize(
    ("job", "how"), [("ps", signal.SIGSTOP), ("ps", signal.SIGKILL), ("worker", signal.SIGSTOP)], ids=str
)
def test_the_chief_names_who_is_lost_and_ends(tmp_path, tasks, job, how):
    workdir = f"--workdir={tmp_path}/run"
    others = {name: tasks.start(name) for name in ("worker", "ps")}
    chief = tasks.start("chief", "--steps=10000000", workdir)
    # The first evaluation may be traced meanwhile: TensorFlow 2.21 tells all workers of a new function, and while one
    # does not answer it keeps Python's lock.
    while not any((tmp_path / "run" / "checkpoints").glob("step-*")):
        assert chief.poll() is None, tasks.said("chief")
        time.sleep(0.05)
    others[job].send_signal(how)
    assert chief.wait(timeout=300) == PEER_LOST, tasks.said("chief")
    (lost,) = (line for line in tasks.said("chief").splitlines() if line.startswith("error: "))
    assert lost.startswith(f"error: lost {job} 0 ({tasks.cluster[job][0]}): ended, hanging or not reachable. The chief")
    assert "Traceback" not in tasks.said("chief")
    if job == "worker":  # servers outlive their chief, and one that comes again goes on with them
        step = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
        others[job].send_signal(signal.SIGCONT)
        chief = tasks.start("chief", f"--steps={step + 20}", workdir)
        assert chief.wait(timeout=300) == 0, tasks.said("chief")
        assert f"resumed from step {step} " in tasks.said("chief")


@pytest.mark.parametrize(("job", "absent"), [("chief", ("worker", "ps")), ("ps", ("chief",)), ("worker", ("chief",))])
def test_who_does_not_come_is_named(tasks, job, absent):
    process = tasks.start(job, "--steps=20", "--start_timeout=3")
    assert process.wait(timeout=300) == PEER_LOST, tasks.said(job)
    names = ", ".join(f"{name} 0 ({tasks.cluster[name][0]})" for name in absent)
    assert f"error: {names} did not join within 3 s (--start_timeout)" in tasks.said(job)
    assert "Traceback" not in tasks.said(job)


def test_sigterm_to_the_launcher_loses_no_step(tmp_path):
    command = [sys.executable, "-m", "tfpar.launch", "--workers=1", "--ps=1", "--grace_period=120", "--"]
    command += ["experiments/image_classification.py", *FLAGS, "--steps=10000000", f"--workdir={tmp_path}/run"]
    command += ["--checkpoint_every=1000000", "--eval_every=1000000"]
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launcher = nursery.Popen(command, cwd=ROOT, env=environ, **output)
    try:
        printed = iter(launcher.stdout.readline, "")
        said = list(itertools.takewhile(lambda line: "[chief 0] step " not in line, printed))
        launcher.terminate()
        said += printed
        assert launcher.wait(timeout=300) == PREEMPTED, "".join(said)
    finally:
        launcher.kill()
        launcher.wait()
    (stopped,) = (line for line in said if "asked to end (SIGTERM): stopped after step" in line)
    step = stopped.partition("stopped after step ")[2].split()[0]
    assert f"the newest checkpoint is of step {step};" in stopped
    assert [int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == [int(step)]
