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
