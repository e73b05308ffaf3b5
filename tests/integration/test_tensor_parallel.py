"""Meshes of a data and a model axis on real workers: the weights of one device, the bytes of the formula, resumed."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tests.integration.scripts import divided
from tests.integration.test_multi_worker import launch
from tests.training.test_tensor_parallel import alone
from tfpar.checkpoint import checkpointer
from tfpar.checkpoint.arrays import read_arrays
from tfpar.checkpoint.run_state import params_sha256
from tfpar.config import ConfigError

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.cluster
MESH = {"mesh": "data:2,model:2", "devices": 2}


def on_workers(count: int, folder: pathlib.Path, *cases: dict[str, Any]) -> list[dict[str, np.ndarray]]:
    """What each case leaves, the same on all workers, and the bytes of the messages and of the sums of all."""
    folder.mkdir()
    result = launch(count, "-m", "tests.integration.scripts.divided", str(folder), json.dumps(cases), timeout=600.0)
    assert result.returncode == 0, result.stdout + result.stderr
    found = []
    for number in range(len(cases)):
        first, *others = (dict(np.load(folder / f"{number}-{worker}.npz")) for worker in range(count))
        assert int(first["skipped"]) == 0  # each example was counted once
        for other in others:
            assert other.pop("sent") >= 0  # stages differ in it
            for added in ("messages", "sums"):
                first[added] += other.pop(added)
            for name, value in other.items():
                if name.startswith("own "):  # of a weight that not all workers have
                    first.setdefault(name, value)
                np.testing.assert_array_equal(first[name], value, err_msg=name)
        found.append(first)
    return found


def assert_near(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """As near as an exchange of 4 bits leaves it, and not the same."""
    distance = sum(float(np.sum((found[name] - value) ** 2)) for name, value in expected.items()) ** 0.5
    assert 0.0 < distance < 0.2 * sum(float(np.sum(value**2)) for value in expected.values()) ** 0.5


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


def test_two_workers_of_two_devices(tmp_path):
    """They equal one device, also with micro-batches and a loss whose parts are summed beforehand; with int4 they stay
    near it; and what they have saved does not continue on another mesh with what int4 left out."""
    dense, optimizer, gradients, weights, language_model, synchronised, encoded = on_workers(
        2,
        tmp_path / "out",
        {**MESH, "accumulate_steps": 2, "jit_compile": "auto"},  # XLA compiles the optimizer step alone
        *({**MESH, "accumulate_steps": 2, "shard": shard} for shard in ("optimizer", "gradients", "weights")),
        {**MESH, "model": "language_model", "steps": 6},
        {**MESH, "model": "synchronised", "accumulate_steps": 2, "steps": 6},
        {**MESH, "exchange": "int4:min_elements=64", "workdir": str(tmp_path / "run")},
    )
    expected = alone("dense", accumulate_steps=2)[0]
    for found in (dense, optimizer, gradients, weights):
        assert_close(found, expected)
    assert int(optimizer["sent"]) == pytest.approx(int(dense["sent"]), rel=0.01)
    assert int(gradients["sent"]) == pytest.approx(1.5 * int(dense["sent"]), rel=0.01)  # (A + 1) / 2
    assert (dense["compiles_update"], language_model["compiles_update"]) == (True, False)
    assert_close(language_model, alone("language_model", steps=6)[0])
    assert_close(synchronised, alone("synchronised", accumulate_steps=2, steps=6)[0])
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2

    with pytest.raises(ConfigError, match=r"--mesh: the saved run had replicas of 2 devices each, .* previous --mesh"):
        divided.here("one_device", workdir=str(tmp_path / "run"), steps=divided.STEPS + 1)


def assert_goes_on_to_the_same_bits(folder: pathlib.Path, mesh: dict[str, Any]) -> None:
    """A run of two workers with int4 that stops and goes on ends with the weights of one that does not stop."""
    int4 = {**mesh, "exchange": "int4:min_elements=64"}
    saved = {**int4, "workdir": str(folder / "run")}
    whole, _, resumed = on_workers(2, folder / "out", int4, {**saved, "stop_after": 11}, saved)
    for name, value in whole.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)


@pytest.mark.proof
@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_two_workers_of_two_devices_go_on_to_the_same_bits(tmp_path, shard):
    assert_goes_on_to_the_same_bits(tmp_path, {**MESH, "shard": shard, "ema": 0.9})


def test_two_workers_hold_a_replica_between_them(tmp_path):
    """Each has half of the divided weights, and both agree on the whole: in digests, checkpoints, predictions; a run
    that was stopped goes on to the end of one that was not, and further on one device."""
    saved = {"mesh": "data:1,model:2", "workdir": str(tmp_path / "run"), "accumulate_steps": 2}
    _, found = on_workers(2, tmp_path / "out", {**saved, "stop_after": 11}, {**saved, "predicts": True})
    weights, _, (predictions,) = alone("dense", accumulate_steps=2)
    assert_close(found, {**weights, "predictions": predictions})
    assert int(found["sent"]) == 0  # on the data axis
    loaded = keras.saving.load_model(tmp_path / "run" / "model.keras")
    assert params_sha256(loaded.trainable_variables) == str(found["params_sha256"])
    further = divided.here("one_device", workdir=str(tmp_path / "run"), steps=divided.STEPS + 1, accumulate_steps=2)
    assert further.results["steps"] == divided.STEPS + 1


@pytest.mark.proof
def test_a_replica_between_two_workers_goes_on_to_the_same_bits(tmp_path):
    assert_goes_on_to_the_same_bits(tmp_path, {"mesh": "data:1,model:2", "accumulate_steps": 2})


@pytest.mark.proof
def test_two_workers_hold_a_language_model_between_them(tmp_path):
    options = {"model": "language_model", "steps": 6}
    [found] = on_workers(2, tmp_path / "out", {"mesh": "data:1,model:2", **options, "sequence_parallel": True})
    assert_close(found, alone(**options)[0])


def test_two_replicas_of_two_workers_each(tmp_path):
    mesh = {"mesh": "data:2,model:2", "steps": 10}
    only_parts = {"trainable": "(first|second|third|fourth)/kernel", "clip_norm": 0.05, "steps": 6}
    shards = {**mesh, "shard": "optimizer"}
    gathers, folder = {**mesh, "shard": "weights", "ema": 0.9}, {"workdir": str(tmp_path / "run")}
    found, sharded, parts, scattered, gathered, _, synchronised = on_workers(
        4,
        tmp_path / "out",
        mesh,
        {**shards, "ema": 0.9},
        {**shards, **only_parts},
        {**mesh, "shard": "gradients", "accumulate_steps": 2},
        gathers,
        {**gathers, **folder, "stop_after": 5, "eval_every": 5},
        {**mesh, "model": "synchronised"},
    )
    expected = alone("dense", steps=10, ema=0.9)
    assert_close(scattered, alone("dense", steps=10, accumulate_steps=2)[0])
    assert_close(gathered, {**expected[0], "eval loss": np.array(expected[1]["loss"])})
    [saved] = (tmp_path / "run" / "checkpoints").glob("step-*")
    files = [read_arrays(path) for path in saved.glob("state-*.safetensors")]
    assert len(files) == 4
    written = sum(array.size for arrays in files for array in arrays.values())
    assert written == sum(array.size for array in checkpointer.read(saved).arrays.values())  # each element once
    assert_close(synchronised, alone("synchronised", steps=10)[0])
    further = divided.here("one_device", steps=10, ema=0.9, **folder)
    assert_close(divided.weights_of(further), expected[0])
    assert_close(found, expected[0])
    assert_close(parts, alone("dense", **only_parts)[0])
    assert_close(sharded, {**expected[0], "eval loss": np.array(expected[1]["loss"])})


@pytest.mark.proof
@pytest.mark.parametrize(("devices", "shard"), [(1, "none"), (2, "none"), (1, "optimizer"), (1, "gradients")])
def test_four_workers_hold_two_replicas(tmp_path, devices, shard):
    """Each pair of workers has a replica, of which a worker has one device or two; with int4 the parts travel by
    themselves, what is whole as well, and a run that was stopped goes on to the same bits."""
    mesh = {"mesh": f"data:2,model:{2 * devices}", "shard": shard}
    int4 = {**mesh, "exchange": "int4:min_elements=64"}
    saved = {**int4, "workdir": str(tmp_path / "run")}
    dense, encoded, _, resumed = on_workers(4, tmp_path / "out", mesh, int4, {**saved, "stop_after": 11}, saved)
    expected = alone("dense")[0]
    assert_close(dense, expected)
    for name, value in encoded.items():
        np.testing.assert_array_equal(resumed[name], value, err_msg=name)
    assert_near(encoded, expected)
    assert int(encoded["sent"]) < int(dense["sent"]) / 2


@pytest.mark.proof
@pytest.mark.parametrize("axis", ["model", "pipeline"])
def test_parts_of_replicas_choose_the_same_exchange(tmp_path, axis):
    """Whatever the measurement leads to: what all workers have whole is the same on all, which `on_workers` checks."""
    options = {"exchange": "auto:min_elements=64,max_error=0.02", "accumulate_steps": 2, "steps": 10}
    [found] = on_workers(4, tmp_path / "out", {"mesh": f"data:2,{axis}:2", **options})
    expected = alone("dense", accumulate_steps=2, steps=10)[0]
    for name, value in expected.items():
        assert np.linalg.norm(found[name] - value) <= 0.2 * np.linalg.norm(value) + 1e-3, name
