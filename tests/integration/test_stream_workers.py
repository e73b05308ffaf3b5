"""A tf.data.Dataset on real workers: shared by rows or by worker, and resumed where it stopped."""

from __future__ import annotations

import json
import pathlib

from tests.integration.scripts.stream_workers import EXAMPLES, STEPS
from tests.integration.test_multi_worker import launch

import pytest

pytestmark = pytest.mark.cluster


def run(workers: int, sharding: str, workdir: pathlib.Path, stop_after: int = 0) -> tuple[dict, dict, str]:
    """The run's summary (empty if it was stopped), what it evaluated to, and its output."""
    strategy = "multi_worker" if workers > 1 else "one_device"
    script = "tests.integration.scripts.stream_workers"
    result = launch(workers, "-m", script, strategy, sharding, str(stop_after), str(workdir))
    assert result.returncode == 0, result.stdout + result.stderr
    evaluated = json.loads((workdir / "evaluated.json").read_text())
    summary = {} if stop_after else json.loads((workdir / "summary.json").read_text())
    return summary, evaluated, result.stdout + result.stderr


@pytest.mark.parametrize("sharding", ["example", pytest.param("worker", marks=pytest.mark.proof)])
def test_two_workers_resume_where_the_stream_stopped(tmp_path, sharding):
    whole, evaluated, _ = run(2, sharding, tmp_path / "whole")
    assert evaluated["examples"] == EXAMPLES
    run(2, sharding, tmp_path / "cut", stop_after=6)
    resumed, _, output = run(2, sharding, tmp_path / "cut")
    assert resumed["steps"] == whole["steps"] == STEPS
    assert "the stream continues where it stopped" in output
    assert resumed["params_sha256"] == whole["params_sha256"]
    if sharding == "example":  # the same batches on one worker, whose sums differ by rounding alone
        _, expected, _ = run(1, sharding, tmp_path / "one")
        assert evaluated["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert evaluated["examples"] == expected["examples"]
