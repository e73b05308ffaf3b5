"""Two runs that want the same workdir, as users start them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

from tests import nursery
from tests.integration.test_experiments import script
from tests.integration.test_multi_worker import ROOT, launch

import pytest

pytestmark = [pytest.mark.without_keras, pytest.mark.cluster]
FLAGS = ["--dataset=digits", "--model=mlp", "--optimizer=sgd", "--checkpoint_every=50", "--jit_compile=false"]


def test_the_second_is_refused_and_the_third_takes_over_from_a_killed_first(tmp_path):
    flags = [*FLAGS, f"--workdir={tmp_path}/run"]
    with (
        open(tmp_path / "output", "wb") as output,
        nursery.Popen(
            [sys.executable, "experiments/image_classification.py", *flags, "--steps=100000000"],
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as first,
    ):
        try:
            while not any((tmp_path / "run" / "checkpoints").glob("step-*")):
                assert first.poll() is None, (tmp_path / "output").read_text()
                time.sleep(0.05)
            first.send_signal(signal.SIGSTOP)  # it would only take the time of the second
            second = script("image_classification", *flags, "--steps=100")
            assert second.returncode == 2
            assert f"error: --workdir={tmp_path}/run is in use by process {first.pid} on " in second.stderr
            assert "image_classification.py" in second.stderr  # its command
            assert first.poll() is None
        finally:
            first.kill()
    step = max(int(path.name[5:]) for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    third = launch(2, "experiments/image_classification.py", *flags, f"--steps={step + 100}")
    assert third.returncode == 0, third.stdout
    assert f"took over a stale lock left by process {first.pid} " in third.stdout
    assert re.search(rf"resumed from step {step} ", third.stdout)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step + 100
    assert not (tmp_path / "run" / ".lock").read_text().strip()
