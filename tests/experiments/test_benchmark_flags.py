"""Flags of the benchmarks that choose what is measured: a name that chooses nothing is refused at once."""

from __future__ import annotations

import pathlib
import re
import sys

from tests import nursery

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    "name", ["exchange_tensorflow", "exchange_torch", "end_to_end_worker", "slow_link_worker", "federated_flower"]
)
def test_programs_that_another_one_starts_say_so(name):
    """Also without what they need: PyTorch, Flower, a cluster."""
    command = [sys.executable, "-m", f"experiments.benchmarks.{name}", "--help"]
    done = nursery.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"another program starts it|started by it", done.stdout)


@pytest.mark.parametrize(
    ("name", "flag", "known"),
    [
        ("convergence", "--tasks=digit", "digits, language"),
        ("inputs", "--only=nonesuch", "--dataset=digits"),
        ("step_overhead", "--only=nonesuch", "small MLP, digits, batch 64; ResNet-18"),
    ],
)
def test_what_is_not_there_is_not_measured(name, flag, known):
    command = [sys.executable, f"experiments/benchmarks/{name}.py", flag]
    done = nursery.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith(f"error: {flag}")
    assert known in done.stderr
    assert done.stdout == ""
