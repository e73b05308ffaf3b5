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
from tests.integration.test_tensor_parallel import on_workers as divided_on_workers
from tests.training.test_tensor_parallel import alone
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.split import split_of, whole
from tfpar.parallel.topology import choose_topology

import keras
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
    return {variable.path: whole(variable) for variable in trainer.model.variables}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], rtol: float = 1e-4) -> None:
    for name, value in expected.items():
        if name not in ("slots", "wire"):
            np.testing.assert_allclose(found[name], value, rtol=rtol, atol=1e-5, err_msg=name)


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    return norm({name: found[name] - value for name, value in expected.items()})


def norm(values: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(value**2)) for value in values.values()))


@pytest.mark.parametrize(("optimizer", "shard"), [("adamw", "optimizer"), ("lamb", "gradients")])
def test_devices_that_divide_the_state_equal_one(optimizer, shard, tmp_path):
    """What one layout of devices saved, another resumes."""
    options = {"optimizer": optimizer, "shard": shard, "workdir": str(tmp_path / "run"), "steps": 9}
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


def test_a_replica_may_own_only_weights_without_decay():
    options = {"optimizer": "adamw", "weight_decay_exclude": "bias,norm,second", "steps": 4}
    assert_close(weights_of(here("mirrored", 2, shard="optimizer", **options)), on_one_device(**options))


@pytest.mark.xla
def test_scattered_gradients_of_micro_batches_equal_one_device():
    """With an example that has no gradient, whose step is left out on all replicas; and with a loss scale."""
    options: dict[str, Any] = {"optimizer": "adamw", "accumulate_steps": 2, "steps": 12}
    spoiled = {**options, "spoiled": 40}
    trainer = here("mirrored", 3, shard="gradients", **spoiled)
    expected = on_one_device(**spoiled)
    assert all(np.isfinite(value).all() for value in expected.values())
    assert_close(weights_of(trainer), expected)
    assert "--shard=gradients" in trainer.program.xla_disabled_reason
    half = {**options, "precision": "mixed_float16"}
    try:
        expected = on_one_device(**half)
        assert distance(weights_of(here("mirrored", 2, shard="gradients", **half)), expected) < 1e-3 * norm(expected)
    finally:
        keras.config.set_dtype_policy("float32")


def test_gathered_weights_equal_one_device(tmp_path):
    """With micro-batches, an example that has no gradient, and what one layout of devices saved read by others."""
    options: dict[str, Any] = {"optimizer": "adamw", "accumulate_steps": 2, "spoiled": 40, "steps": 12}
    folder = {"workdir": str(tmp_path / "run")}
    trainer = here("mirrored", 3, shard="weights", stop_after=4, **folder, **options)
    large = [each for each in trainer.model.trainable_variables if split_of(each)]
    assert [tuple(each.shape) for each in large] == [(72 // 3, 97)]
    slots = [each for each in trainer.optimizer.variables if split_of(each)]
    assert [tuple(each.shape) for each in slots] == 2 * [(72 // 3, 97)]
    here("mirrored", 2, shard="optimizer", stop_after=8, **folder, **options)
    found = here("mirrored", 2, shard="weights", **folder, **options)
    alone = here("one_device", **options)
    assert_close(weights_of(found), weights_of(alone))
    x, y = sharded.data()
    np.testing.assert_allclose(found.evaluate(x, y)["loss"], alone.evaluate(x, y)["loss"], rtol=1e-4)
    np.testing.assert_allclose(found.predict(x), alone.predict(x), rtol=1e-3, atol=1e-4)


@pytest.mark.cluster
def test_three_workers_equal_one_device(tmp_path):
    """With clipping, weight decay of some weights, uneven batches and micro-batches."""
    shard = {"shard": "optimizer", "accumulate_steps": 2}
    int8 = {**shard, "optimizer": "adamw", "exchange": "int8:min_elements=64"}
    even, muon, int8, scattered, spoiled, gathered = on_workers(
        3,
        tmp_path / "out",
        {**shard, "optimizer": "adamw"},
        {**shard, "optimizer": "muon"},
        int8,
        {**shard, "optimizer": "adamw", "shard": "gradients"},
        {**int8, "shard": "gradients", "spoiled": 40},
        {**shard, "optimizer": "adamw", "shard": "weights"},
    )
    for workers in (even, muon, int8, scattered, spoiled, gathered):
        for other in workers[1:]:
            for name, value in workers[0].items():
                assert name in ("slots", "wire") or np.array_equal(other[name], value), name
    expected = on_one_device(optimizer="adamw", accumulate_steps=2)
    assert_close(even[0], expected)
    assert_close(scattered[0], expected)
    assert_close(gathered[0], expected)
    assert_close(muon[0], on_one_device(optimizer="muon", accumulate_steps=2))
    without = on_one_device(optimizer="adamw", accumulate_steps=2, spoiled=40)
    for found, dense in ((int8[0], expected), (spoiled[0], without)):
        assert 0.0 < distance(found, dense) < 0.02 * norm(dense)
    # Two moments: of a third of the one large matrix, and of all that is small, with learning rate and step.
    sizes = {name: value.size for name, value in expected.items()}
    large = [size for size in sizes.values() if size >= 1024]
    assert large == [72 * 97]
    shard_bytes = 4 * math.ceil(large[0] / 3)
    assert (
        int(scattered[0]["wire"]) - int(even[0]["wire"]) == 2 * shard_bytes
    )  # of the second micro-batch, to each peer
    share = 8 * math.ceil(large[0] / 3) + 8 * (sum(sizes.values()) - large[0])
    assert all(share - 8 <= int(worker["slots"]) - 12 <= share for worker in [*even, *gathered])
    # Weights to every peer in both passes, and gradients back, of both micro-batches; and small tensors.
    small = 2 * 4 * (sum(sizes.values()) - large[0])
    assert int(gathered[0]["wire"]) == 3 * 2 * 2 * shard_bytes + 2 * small // 3


def resumed(folder: pathlib.Path, options: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """What two workers leave in one go, which a run that goes on from its step 5 must end with as well."""
    whole = {**options, "workdir": str(folder / "whole run"), "checkpoint_every": 5}
    again = {**options, "workdir": str(folder / "run"), "takes_over": (5, whole["workdir"])}
    once, again = on_workers(2, folder / "two", whole, again)
    for name, value in once[0].items():
        np.testing.assert_array_equal(again[0][name], value, err_msg=name)
    return once


def exported(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """The weights in `model.keras`, by their paths in the runs here."""
    model = keras.saving.load_model(workdir / "model.keras", compile=False)
    return {f"sequential/{variable.path}": variable.numpy() for variable in model.variables}


@pytest.mark.cluster
def test_resumed_with_a_codec(tmp_path):
    """To the same bits by as many workers. Others make whole state out of shares: what has not been sent yet takes
    effect, also where shards have no codec. The exported weights are the moving averages."""
    options = {"shard": "optimizer", "exchange": "int4", "steps": 12, "ema": 0.8, "jit_compile": "false"}
    once = resumed(tmp_path, options)
    shutil.copytree(tmp_path / "run", tmp_path / "devices")
    averages = exported(tmp_path / "run")
    assert distance(averages, {name: once[0][name] for name in averages}) > 0.1
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    (tmp_path / "whole" / "model.keras").unlink()  # a run that is finished writes it again
    on_one_device(exchange="int4", steps=12, ema=0.8, workdir=str(tmp_path / "whole"))
    assert_close(averages, exported(tmp_path / "whole"), rtol=0.0)
    alone = on_one_device(exchange="int4", steps=13, ema=0.8, workdir=str(tmp_path / "run"))
    options = {"shard": "optimizer", "steps": 13, "ema": 0.8, "workdir": str(tmp_path / "devices")}
    assert_close(weights_of(here("mirrored", 2, **options)), alone)
    assert_close(exported(tmp_path / "devices"), exported(tmp_path / "run"))
    differences = [
        np.abs(alone[name] - value).max() for name, value in once[0].items() if name not in ("slots", "wire")
    ]
    assert 0.0 < max(differences) < 0.05


@pytest.mark.cluster
def test_workers_that_leave_a_codec_and_return_to_it_call_the_same_collectives(tmp_path):
    """Worker 0 alone gets the residual, but all must have one, or the others wait where a step is left out, and later
    where they count exchanges, as warm-up does."""
    options = {"workdir": str(tmp_path / "run"), "spoiled": 40, "steps": 14, "jit_compile": "false"}
    *_, last = on_workers(
        2,
        tmp_path / "out",
        {**options, "shard": "optimizer", "exchange": "int8", "stop_after": 3},
        {**options, "shard": "optimizer", "stop_after": 9},
        {**options, "exchange": "int8:warmup_steps=4"},
    )
    for name, value in last[0].items():
        np.testing.assert_array_equal(last[1][name], value, err_msg=name)
    expected = on_one_device(spoiled=40, steps=14)
    assert 0.0 < distance(last[0], expected) < 0.02 * norm(expected)


def test_rows_and_columns_of_adafactor(tmp_path):
    """Whose names Keras repeats: as on one device, also where a run was resumed by more replicas."""
    options = {"optimizer": "adafactor", "steps": 9}
    run = {**options, "shard": "optimizer", "workdir": str(tmp_path / "run")}
    here("mirrored", 2, stop_after=4, **run)
    assert_close(weights_of(here("mirrored", 3, **run)), on_one_device(**options))


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_rows_and_columns_of_adafactor_are_resumed_to_the_same_bits(shard, tmp_path):
    options = {"shard": shard, "optimizer": "adafactor", "steps": 9}
    once = weights_of(here("mirrored", 2, **options))
    folder = {"workdir": str(tmp_path / "run")}
    here("mirrored", 2, stop_after=4, **options, **folder)
    shutil.copytree(tmp_path / "run", tmp_path / "three")
    resumed = weights_of(here("mirrored", 2, **options, **folder))
    assert_close(weights_of(here("mirrored", 3, **options, workdir=str(tmp_path / "three"))), once)
    for name, value in once.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@pytest.mark.cluster
def test_sharded_weights_are_resumed_and_exported(tmp_path):
    """Each worker writes its own parts of weights and optimizer state, under the same names; those of frozen weights
    are one file of each."""
    weights_once = resumed(tmp_path, {"shard": "weights", "steps": 12, "trainable": "second|last", "ahead": 1})
    assert any(name.startswith("sequential_1/") for name in weights_once[1])
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    first, second = (path.stat().st_size for path in sorted(newest.glob("state-0*-of-00002.safetensors")))
    large = 3 * 4 * 72 * 97  # with two moments
    assert large / 2 < second < large / 2 + 2000 < first  # the first also has what both have
    assert first < large / 2 + 24_000
    saved = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(saved) >= 2
    for name in ("state-frozen-00001-of-00002.safetensors", "state-frozen-00002-of-00002.safetensors"):
        assert len({(path / name).stat().st_ino for path in saved}) == 1
    assert_close(weights_once[0], exported(tmp_path / "run"), rtol=0.0)


@pytest.mark.proof
@pytest.mark.cluster
def test_resumed_by_any_workers(tmp_path):
    """Of 2, 3, 1 and 2 workers, with one device and two: the weights of one device."""
    dense = {"shard": "optimizer", "steps": 24, "stop_after": 6, "workdir": str(tmp_path / "dense")}
    on_workers(2, tmp_path / "two", dense)
    on_workers(3, tmp_path / "three", {**dense, "shard": "weights"})
    on_one_device(steps=24, stop_after=6, workdir=str(tmp_path / "dense"))
    [[last, _]] = on_workers(2, tmp_path / "again", {**dense, "devices": 2, "stop_after": 0, "shard": "weights"})
    assert_close(last, on_one_device(steps=24))


@pytest.mark.cluster
@pytest.mark.parametrize("transport", ["auto", pytest.param("tensorflow", marks=pytest.mark.proof)])
def test_rows_of_tables_travel_between_workers(transport, tmp_path):
    """Of a sharded table most of whose rows no example reads; its other use gathers all of it."""
    options = {"model": "large_vocabulary", "accumulate_steps": 2, "steps": 6}
    (found,) = divided_on_workers(2, tmp_path / "out", {**options, "shard": "weights", "transport": transport})
    assert_close(found, alone(**options)[0])
