"""Pipelines over workers whose optimizer state or gradients are sharded: the weights and losses of one device."""

from __future__ import annotations

from typing import Any

from tests.integration.scripts import divided
from tests.integration.test_pipeline import PIPELINED, assert_has_shares_of_sums, assert_two_pipelines
from tests.integration.test_tensor_parallel import assert_close, on_workers
from tests.training.test_tensor_parallel import alone

import numpy as np
import pytest

pytestmark = pytest.mark.cluster


def test_four_workers_hold_two_pipelines_and_shards_of_their_state(tmp_path):
    """With moving averages, which are evaluated; stopped, resumed there, and on one device."""
    mesh, common = {"mesh": "data:2,pipeline:2", "shard": "gradients"}, {"accumulate_steps": 2, "steps": 9}
    options, folder = {**common, "ema": 0.9}, {"workdir": str(tmp_path / "run")}
    run = {**mesh, **options, **folder}
    _, found = on_workers(4, tmp_path / "out", {**run, "stop_after": 7}, run)
    assert_has_shares_of_sums(found, alone("dense", **options)[0])
    assert_close_with_loss([found], [options])
    further = divided.here(**folder, **{**options, "steps": 10})
    assert int(further.optimizer.iterations.numpy()) == 10


@pytest.mark.proof
def test_shards_where_a_stage_has_nothing_to_train_and_with_batch_statistics(tmp_path):
    """The chief's stage has nothing to train; workers with the same stage synchronise the statistics. Also with a loss
    whose denominator the last stage alone knows, and no clipping, which would hide a wrong one."""
    mesh, last = {"mesh": "data:2,pipeline:2"}, {"accumulate_steps": 2, "steps": 9, "trainable": "/(fourth|last)/"}
    batches = {"model": "synchronised", "accumulate_steps": 2, "steps": 6}
    masked = {"model": "uneven_vocabulary", "clip_norm": 0.0, "accumulate_steps": 2, "steps": 3}
    runs = {**last, "ema": 0.9, "shard": "optimizer"}, *({**each, "shard": "gradients"} for each in (batches, masked))
    found = on_workers(4, tmp_path / "out", *({**mesh, **run} for run in runs))
    assert_close_with_loss(found, [{**last, "ema": 0.9}, batches, masked])


def assert_close_with_loss(found: list[dict[str, np.ndarray]], options: list[dict[str, Any]]) -> None:
    for each, how in zip(found, options, strict=True):
        weights, results, _ = alone(**{"model": "dense", **how})
        assert_close(each, {**weights, "eval loss": np.array(results["loss"])})


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (4, {"mesh": "data:2,pipeline:2"}),
        (4, {"mesh": "data:2,pipeline:2,model:2", "devices": 2}),
        (8, {"mesh": "data:2,pipeline:2,model:2"}),
    ],
    ids=str,
)
def test_shards_beside_pipelines_over_workers(tmp_path, workers, options, shard):
    """With int4 too; a weight of two stages, stages without anything to train, an example without a gradient in the
    first stage, optimizers that need whole tensors."""
    sharded = {**options, "shard": shard}
    assert_two_pipelines(tmp_path, workers=workers, **sharded)
    cases = [{"model": "large_vocabulary", "clip_norm": 0.05}, {"trainable": "/(fourth|last)/"}, {"model": "spoiled"}]
    if "model" not in options["mesh"]:
        cases += [{"optimizer": name} for name in ("muon", "lamb")]
        cases.append({"model": "language_model", "stages_per_device": 2, "pipeline_schedule": "eager_1f1b"})
    common = {"accumulate_steps": 2, "steps": 6}
    results = on_workers(workers, tmp_path / "more", *({**sharded, **common, **case} for case in cases))
    for found, case in zip(results, cases, strict=True):
        own = {name: value for name, value in case.items() if name not in PIPELINED}
        assert_close(found, alone(**{"model": "dense", **common, **own})[0])
