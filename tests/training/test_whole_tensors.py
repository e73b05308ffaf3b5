"""Optimizers that need whole tensors, of weights whose parts are on the devices of a model axis or of all replicas."""

from __future__ import annotations

import collections

from tests.integration.scripts import divided
from tests.training.test_tensor_parallel import alone, assert_as_alone
from tfpar.parallel.split import model_split_of, slots_of, split_of, whole
from tfpar.parallel.weight_shards import is_sharded, replica_split_of

import keras
import numpy as np
import pytest

STEPS = 6
MUON = {"optimizer": "muon", "learning_rate": 0.02, "steps": STEPS}


@pytest.mark.parametrize(
    ("mesh", "model", "optimizer"),
    [
        ("data:2,model:2", "dense", "lamb"),  # unlike shapes: a device of the axis may have nothing to update
        ("model:2", "dense", "adafactor"),
        pytest.param("model:4", "uneven_vocabulary", "adafactor", marks=pytest.mark.proof),
        # A table with padding, whose norm counts.
        pytest.param("model:4", "uneven_vocabulary", "lamb", marks=pytest.mark.proof),
    ],
)
def test_the_weights_of_one_device(mesh, model, optimizer):
    options = {**MUON, "optimizer": optimizer}
    trainer = divided.here("mirrored", mesh, 2 if mesh == "model:2" else 4, model=model, **options)
    assert any(map(split_of, trainer.model.trainable_variables))
    # Adafactor makes steps of equal size of the gradients of keys' biases too, which are zero but for rounding.
    apart = "qkv/bias" if optimizer == "adafactor" else ""
    assert_as_alone(trainer, model, apart=apart, **options)
    assert_share_the_work(trainer, trainer.topology.model_devices)


@pytest.mark.parametrize(
    ("replicas", "model", "optimizer"),
    [
        (2, "dense", "muon"),
        (3, "dense", "lamb"),  # shards with padding
        pytest.param(2, "language_model", "lars", marks=pytest.mark.proof),
        pytest.param(3, "language_model", "muon", marks=pytest.mark.proof),
        pytest.param(3, "uneven_vocabulary", "adafactor", marks=pytest.mark.proof),
    ],
)
def test_replicas_that_share_the_weights(replicas, model, optimizer):
    options = {**MUON, "optimizer": optimizer}
    trainer = divided.here("mirrored", f"data:{replicas}", replicas, model=model, shard="weights", **options)
    assert any(map(is_sharded, trainer.model.trainable_variables))
    assert_as_alone(trainer, model, apart="qkv/bias" if optimizer == "adafactor" else "", **options)
    assert_share_the_work(trainer, replicas)


def assert_share_the_work(trainer, devices):
    assert not trainer.program.compiles_update
    [(_, step)] = trainer.program._steps
    rows = [[each is not None for each in chunk] for chunk in step._dealt._chunks]
    loads = np.sum(rows, axis=0)
    assert len(loads) == devices
    assert loads.max() - loads.min() <= 1


def test_muon_sends_no_more_than_the_parts(monkeypatch):
    """The weights of one device, the bytes beside those of an elementwise optimizer, and one orthogonalisation for each
    divided matrix."""
    calls: list[str] = []
    orthogonalise = keras.optimizers.Muon.zeropower_via_newtonschulz5
    monkeypatch.setattr(
        keras.optimizers.Muon,
        "zeropower_via_newtonschulz5",
        lambda self, x, steps: (calls.append(x.name), orthogonalise(self, x, steps))[1],
    )
    trainer = divided.here("mirrored", "model:2", 2, model="language_model", **MUON)
    plain = divided.here("mirrored", "model:2", 2, model="language_model", **MUON | {"optimizer": "adamw"})
    optimizer = trainer.program.optimizer
    matrices = [each for each in trainer.model.trainable_variables if len(slots_of(optimizer, each)) == 1]
    parts = [each for each in matrices if model_split_of(each)]
    assert len(parts) == 8
    assert len(calls) == len(parts)  # both devices together
    assert len(parts) == len(matrices)
    sent = [each.results["exchange"]["model_axis_bytes_per_step"] for each in (trainer, plain)]
    assert sent[0] - sent[1] == pytest.approx(bytes_of_dealing(parts, model_split_of), abs=1)
    assert_share_the_work(trainer, 2)
    assert_as_alone(trainer, "language_model", **MUON)


def test_what_replicas_send_for_muon_is_counted():
    """Also in the second run, whose step is traced again."""
    options = {"model": "language_model", "shard": "weights"}
    trainer, plain = (
        divided.here("mirrored", "data:2", 2, **options, **how, steps=2)
        for how in ({"optimizer": "muon"}, {"optimizer": "sgd"})
    )
    parts = [each for each in trainer.model.trainable_variables if len(slots_of(trainer.program.optimizer, each)) == 1]
    parts = [each for each in parts if replica_split_of(each)]
    assert len(parts) == 8
    expected = bytes_of_dealing(parts, replica_split_of)
    sent = [each.results["exchange"]["wire_bytes_per_step"] for each in (trainer, plain)]
    assert sent[0] - sent[1] == pytest.approx(expected, abs=1)
    again = trainer.fit(*divided.data("language_model"), steps=4)
    assert again["exchange"]["wire_bytes_per_step"] == sent[0]


def bytes_of_dealing(parts, split_of):
    """What each of two devices sends for matrices: gradient, weight and momentum to the owner, weight and momentum
    back, of which half stays where it is."""
    counts = collections.Counter((tuple(each.shape), split_of(each)) for each in parts)
    elements = sum(2 * -(-count // 2) * int(np.prod(shape)) for (shape, _), count in counts.items())
    return 4 * 5 * elements / 2


@pytest.mark.parametrize(
    ("mesh", "devices", "shard", "optimizer"),
    [
        ("model:2", 2, "none", "muon"),
        ("model:2", 2, "none", "adafactor"),
        # Each device owns whole parts, and puts the tensors together with those that own the others.
        ("data:2,model:2", 4, "gradients", "muon"),
        ("data:2,model:2", 4, "optimizer", "adafactor"),
        ("data:3", 3, "weights", "adafactor"),
    ],
)
def test_a_run_continues_on_one_device(mesh, devices, shard, optimizer, tmp_path):
    """State is saved as of whole weights."""
    options = {**MUON, "optimizer": optimizer}
    left = {**options, "model": "dense", "workdir": str(tmp_path)}
    divided.here("mirrored", mesh, devices, **left, shard=shard, stop_after=3)
    found = divided.here(**left)
    weights, *_ = alone("dense", **options)
    for variable in found.model.variables:
        np.testing.assert_allclose(whole(variable), weights[variable.path], rtol=1e-4, atol=1e-5, err_msg=variable.path)


@pytest.mark.parametrize("shard", ["weights", pytest.param("gradients", marks=pytest.mark.proof)])
def test_replicas_continue_what_shards_of_weights_left(shard, tmp_path):
    """With the same shards to the bits of a run that was not stopped; with others to its weights."""
    replicas = {**MUON, "strategy": "mirrored", "mesh": "data:2", "devices": 2}
    through = divided.here(**replicas, shard="weights")
    divided.here(**replicas, shard="weights", workdir=str(tmp_path), stop_after=3)
    found = divided.here(**replicas, shard=shard, workdir=str(tmp_path))
    for before, after in zip(through.model.variables, found.model.variables, strict=True):
        limits = {"rtol": 0, "atol": 0} if shard == "weights" else {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(whole(after), whole(before), **limits, err_msg=before.path)
