"""Optimizers that need whole tensors, of weights whose parts are on the devices of a model axis."""

from __future__ import annotations

import collections

from tests.integration.scripts import divided
from tests.training.test_tensor_parallel import alone, assert_as_alone
from tfpar.parallel.split import model_split_of, slots_of, split_of, whole

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
    assert_share_the_work(trainer)


def assert_share_the_work(trainer):
    assert not trainer.program.compiles_update
    [(_, step)] = trainer.program._steps
    rows = [[each is not None for each in chunk] for chunk in step._dealt._chunks]
    loads = np.sum(rows, axis=0)
    assert len(loads) == trainer.topology.model_devices
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
    counts = collections.Counter((tuple(each.shape), model_split_of(each)) for each in parts)
    elements = sum(2 * -(-count // 2) * int(np.prod(shape)) for (shape, _), count in counts.items())
    # Gradient, weight and momentum to the owner, weight and momentum back; half of it stays where it is.
    expected = 4 * 5 * elements / 2
    sent = [each.results["exchange"]["model_axis_bytes_per_step"] for each in (trainer, plain)]
    assert sent[0] - sent[1] == pytest.approx(expected, abs=1)
    assert_share_the_work(trainer)
    assert_as_alone(trainer, "language_model", **MUON)


@pytest.mark.parametrize(
    ("mesh", "shard", "optimizer"),
    [
        ("model:2", "none", "muon"),
        ("model:2", "none", "adafactor"),
        # Each device owns whole parts, and puts the tensors together with those that own the others.
        ("data:2,model:2", "gradients", "muon"),
        ("data:2,model:2", "optimizer", "adafactor"),
    ],
)
def test_a_run_continues_on_one_device(mesh, shard, optimizer, tmp_path):
    """State is saved as of whole weights."""
    options = {**MUON, "optimizer": optimizer}
    left = {**options, "model": "dense", "workdir": str(tmp_path)}
    divided.here("mirrored", mesh, 2 if mesh == "model:2" else 4, **left, shard=shard, stop_after=3)
    found = divided.here(**left)
    weights, *_ = alone("dense", **options)
    for variable in found.model.variables:
        np.testing.assert_allclose(whole(variable), weights[variable.path], rtol=1e-4, atol=1e-5, err_msg=variable.path)
