"""The README's Python example as a reader would run it: pasted, on two devices, and on two workers."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

from tests import nursery
from tests.integration.test_multi_worker import ROOT, launch

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.grappler]


def example(tmp_path, options: str = "") -> str:
    """A script of the README's example of the Trainer, for two epochs. The other one: tests/drop_in/test_drop_in.py."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    blocks = [block for block in blocks if "tfpar.Trainer(" in block]
    assert len(blocks) == 1
    text = blocks[0].replace("epochs=10", "epochs=2")
    assert "epochs=2" in text
    text = text.replace("    optimizer=", f"    {options}\n    optimizer=", 1)
    path = tmp_path / "script.py"
    path.write_text(text)
    return str(path)


def check(result: subprocess.CompletedProcess, layout: str) -> None:
    assert result.returncode == 0, result.stdout + result.stderr
    assert layout in result.stdout
    printed = [line for line in result.stdout.splitlines() if "{" in line][-1]
    assert ast.literal_eval(printed[printed.index("{") :])["accuracy"] > 0.85


def run(path: str) -> subprocess.CompletedProcess:
    environ = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")}
    return nursery.run(
        [sys.executable, path], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )


def test_alone(tmp_path):
    check(run(example(tmp_path)), "strategy one_device")


def test_on_two_devices(tmp_path):
    check(run(example(tmp_path, 'strategy="mirrored", devices=2,')), "strategy mirrored: 1 worker x 2 CPU")


def test_on_two_workers(tmp_path):
    check(launch(2, example(tmp_path)), "strategy multi_worker: 2 workers x 1 CPU")


@pytest.mark.parametrize("workers", [1, 2])
def test_objects_made_too_early_are_a_plain_error(tmp_path, workers):
    path = example(tmp_path, 'strategy="mirrored", devices=2,' if workers == 1 else "")
    text = (tmp_path / "script.py").read_text()
    early = "[keras.metrics.SparseCategoricalAccuracy()]"
    (tmp_path / "script.py").write_text(text.replace('["accuracy"]', early))
    result = run(path) if workers == 1 else launch(2, path)
    assert result.returncode == 2
    output = result.stdout + result.stderr
    assert "error: --strategy=m" in output
    assert "metrics=['accuracy']" in output
    assert "runtime = tfpar.initialize(config)" in output
