"""Ctrl-C in a script with a Trainer of its own: a line that says how to resume, exit code 130, no traceback."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import time

from tests import nursery

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
import sys
import tfpar
from tfpar.config import ExperimentConfig

options = {"global_batch_size": 48, "checkpoint_every": 20, "jit_compile": "false", "workdir": sys.argv[1]}
config = ExperimentConfig.from_flat_dict(options)
runtime = tfpar.initialize(config)
import keras

train = tfpar.inputs.load("digits", "train")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
build = lambda: tfpar.models.build("mlp", tfpar.task_spec(train))
tfpar.Trainer(build, keras.optimizers.SGD(0.01), loss, config=config, runtime=runtime).fit(train, steps=10**6)
"""


@pytest.mark.cluster
@pytest.mark.parametrize("launcher", [[], ["-m", "tfpar.launch", "--workers=2", "--grace_period=60", "--"]])
def test_ctrl_c_ends_a_run_with_a_line_on_how_to_resume(tmp_path, launcher):
    script, workdir = tmp_path / "own.py", tmp_path / "run"
    script.write_text(SCRIPT)
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launcher, str(script), str(workdir)]
    with nursery.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ) as process:
        deadline = time.monotonic() + 240
        while not list(workdir.glob("checkpoints/step-*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert "killed" not in output
    newest = max(int(path.name.split("-")[1]) for path in workdir.glob("checkpoints/step-*"))
    said = re.findall(r"interrupted \(Ctrl-C\): the newest checkpoint is of step (\d+); run the same command", output)
    assert len(said) == 1, output
    assert 0 < int(said[0]) <= newest
