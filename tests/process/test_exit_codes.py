"""Errors that nobody catches, in any script: one line and a code of its own."""

from __future__ import annotations

import pathlib
import subprocess
import sys

from tests import nursery

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = """
from tfpar.config import ConfigError
from tfpar.config.errors import TrainingError
from tfpar.process.exit_codes import install_exit_code_hook
install_exit_code_hook()
try:
    raise RuntimeError("the cause")
except RuntimeError as error:
    raise {what} from error
"""


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("ConfigError('nothing to do.')", 2, "error: nothing to do.\n"),
        (
            "ConfigError('--steps=0: no. Name a --workdir, not --steps.')",
            2,
            "error: --steps=0: no. Name a --workdir, not --steps. In Python, options are keyword arguments: "
            "steps=..., workdir=...\n",
        ),
        ("KeyboardInterrupt", 130, "interrupted\n"),
        ("SystemExit(3)", 3, ""),
    ],
)
def test_it_is_one_line(what, code, said):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{what}", what)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (done.returncode, done.stderr) == (code, said)


def test_ctrl_c_outside_of_training_waits_for_no_other_worker():
    """Whatever scheduler has started them: TensorFlow's shutdown, which would wait, runs with Python's."""
    program = (
        "import atexit\nfrom tfpar.process.exit_codes import install_exit_code_hook, join_cluster\n"
        "atexit.register(print, 'shutdown')\ninstall_exit_code_hook()\nJOIN\nraise KeyboardInterrupt"
    )
    for join, printed in (("join_cluster(is_chief=False)", ""), ("pass", "shutdown\n")):
        command = [sys.executable, "-c", program.replace("JOIN", join)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (130, printed, "interrupted\n")


@pytest.mark.parametrize(("what", "code"), [("TrainingError('bad')", 1), ("ValueError('bad')", 1)])
def test_defects_and_failures_keep_their_traceback(what, code):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{what}", what)], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert done.returncode == code
    assert "Traceback" in done.stderr


def test_an_optimizer_object_before_the_strategy_is_a_plain_message(tmp_path):
    """TensorFlow can no longer set up several devices then."""
    script = tmp_path / "own.py"
    script.write_text(
        "import keras, tfpar\n"
        "model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "tfpar.Trainer(model, keras.optimizers.SGD(0.1), 'mse', strategy='mirrored', devices=2)\n"
    )
    done = nursery.run([sys.executable, str(script)], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: --strategy=mirrored must be set up before TensorFlow runs")
