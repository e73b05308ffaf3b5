"""Sharded optimizer state on devices and real workers: the weights of one device, a share of the bytes, resumed."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from typing import Any

import tfpar
from tests.integration.scripts import sharded
from tests.integration.test_multi_worker import launch
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

import numpy as np
import pytest


def on_workers(workers: int, folder: pathlib.Path, *cases: dict[str, Any]) -> list[list[dict[str, np.ndarray]]]:
    """Weights and bytes of state of each worker, for each case."""
    folder.mkdir()
    result = launch(workers, "-m", "tests.integration.scripts.sharded", str(folder), json.dumps(cases), timeout=600.0)
    assert result.returncode == 0, result.stdout + result.stderr
    return [
        [dict(np.load(folder / f"{number}-{worker}.npz")) for worker in range(workers)] for number in range(len(cases))
    ]


def on_one_device(**options: Any) -> dict[str, np.ndarray]:
    return weights_of(here("one_device", **options))


def here(strategy: str, devices: int = 0, **options: Any) -> tfpar.Trainer:
    """Trains in this process."""
    runtime = strategies.build(choose_topology(StrategyConfig(strategy=strategy, devices=devices)))
    # Workers compile with XLA; here it would take most of the time.
    return sharded.train({"strategy": strategy, "devices": devices, "jit_compile": "false", **options}, runtime)


def weights_of(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {variable.path: variable.numpy() for variable in trainer.model.variables}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-4) -> None:
    for name, value in expected.items():
        if name != "slots":
            np.testing.assert_allclose(found[name], value, rtol=rtol, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_devices_that_divide_the_state_equal_one(optimizer, tmp_path):
    """What one layout of devices saved, another resumes."""
    options = {"optimizer": optimizer, "shard": "optimizer", "workdir": str(tmp_path / "run"), "steps": 9}
    shares = here("mirrored", 2, stop_after=3, **options).program.share.replicas
    if optimizer == "adamw":
        devices = [variable.value.device[-5:] for share in shares for variable in share.variables[:1]]
        assert devices == ["CPU:0", "CPU:1"]
    here("one_device", stop_after=3, **options)
    assert_close(weights_of(here("mirrored", 3, **options)), on_one_device(optimizer=optimizer, steps=9))


def test_weights_that_are_assigned_before_fit_count():
    def train(strategy: str, devices: int = 0) -> dict[str, np.ndarray]:
        trainer = here(strategy, devices, shard="optimizer", steps=2)
        trainer.model.set_weights([0.5 * value for value in trainer.model.get_weights()])
        trainer.fit(*sharded.data(), steps=2)
        return weights_of(trainer)

    assert_close(train("mirrored", 2), train("one_device"))


@pytest.mark.cluster
def test_three_workers_equal_one_device(tmp_path):
    """With clipping, weight decay of some weights, uneven batches and micro-batches."""
    shard = {"shard": "optimizer", "accumulate_steps": 2}
    even, muon, int8 = on_workers(
        3,
        tmp_path / "out",
        {**shard, "optimizer": "adamw"},
        {**shard, "optimizer": "muon"},
        {**shard, "optimizer": "adamw", "exchange": "int8:min_elements=64"},
    )
    for workers in (even, muon, int8):
        for other in workers[1:]:
            for name, value in workers[0].items():
                assert name == "slots" or np.array_equal(other[name], value), name
    expected = on_one_device(optimizer="adamw", accumulate_steps=2)
    assert_close(even[0], expected)
    assert_close(muon[0], on_one_device(optimizer="muon", accumulate_steps=2))
    distance = math.sqrt(sum(float(np.sum((int8[0][name] - value) ** 2)) for name, value in expected.items()))
    assert 0.0 < distance < 0.02 * math.sqrt(sum(float(np.sum(value**2)) for value in expected.values()))
    # Two moments: of a third of the one large matrix, and of all that is small, with learning rate and step.
    sizes = {name: value.size for name, value in expected.items()}
    large = [size for size in sizes.values() if size >= 1024]
    assert large == [72 * 97]
    share = 8 * math.ceil(large[0] / 3) + 8 * (sum(sizes.values()) - large[0])
    assert all(share - 8 <= int(worker["slots"]) - 12 <= share for worker in even)


@pytest.mark.cluster
def test_resumed_by_any_workers(tmp_path):
    """Where a codec is in use to the same bits by as many workers; else to the weights of one device."""
    int4 = {"shard": "optimizer", "exchange": "int4", "steps": 12}
    dense = {"shard": "optimizer", "steps": 24, "stop_after": 6, "workdir": str(tmp_path / "dense")}
    whole, _, resumed, _ = on_workers(
        2,
        tmp_path / "two",
        int4,
        {**int4, "stop_after": 5, "workdir": str(tmp_path / "int4")},
        {**int4, "workdir": str(tmp_path / "int4")},
        dense,
    )
    for name, value in whole[0].items():
        np.testing.assert_array_equal(resumed[0][name], value, err_msg=name)
    # Whole state out of shares: what has not been sent yet takes effect, also where shards have no codec.
    shutil.copytree(tmp_path / "int4", tmp_path / "devices")
    alone = on_one_device(exchange="int4", steps=13, workdir=str(tmp_path / "int4"))
    options = {"shard": "optimizer", "steps": 13, "workdir": str(tmp_path / "devices")}
    assert_close(weights_of(here("mirrored", 2, **options)), alone)
    differences = [np.abs(alone[name] - value).max() for name, value in whole[0].items() if name != "slots"]
    assert 0.0 < max(differences) < 0.05
    on_workers(3, tmp_path / "three", dense)
    on_one_device(steps=24, stop_after=6, workdir=str(tmp_path / "dense"))
    [[last, _]] = on_workers(2, tmp_path / "again", {**dense, "devices": 2, "stop_after": 0})
    assert_close(last, on_one_device(steps=24))
