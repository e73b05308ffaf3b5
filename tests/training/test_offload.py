"""Optimizer state in the memory of the host: where it lies, and the same numbers as on the device."""

from __future__ import annotations

from typing import Any

import tfpar
from tests.integration.scripts import divided, divided_models
from tests.training.own_optimizers import EachAlone, OfOneTotal, OfOwnApply
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.optim.block_update import blocks_of
from tfpar.parallel.topology import Topology
from tfpar.training.offload import step as offloaded
from tfpar.training.validate import validate_config

import keras
import numpy as np
import pytest
import tensorflow as tf


def trained(offload: str, **options: Any) -> tfpar.Trainer:
    """On the second logical device; the host is the first."""
    strategy = tf.distribute.OneDeviceStrategy("/device:CPU:1")
    runtime = tfpar.Runtime(topology=Topology(name="one_device"), strategy=strategy)
    return divided.train({"strategy": "one_device", "offload": offload, "steps": 3, **options}, runtime)


def state_of(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {variable.path: variable.numpy() for variable in trainer.optimizer.variables}


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_the_same_bits_as_on_the_device(optimizer, monkeypatch):
    """With several blocks, clipping, weight decay, a schedule and micro-batches."""
    monkeypatch.setattr(offloaded, "BLOCK_BYTES", 20_000)
    options = {"optimizer": optimizer, "accumulate_steps": 2}
    found, expected = trained("optimizer", **options), trained("none", **options)
    for states in ((divided.weights_of(found), divided.weights_of(expected)), (state_of(found), state_of(expected))):
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            np.testing.assert_array_equal(value, states[1][name], err_msg=name)
    assert {variable.value.device[-5:] for variable in found.optimizer.variables} == {"CPU:0"}
    assert {variable.value.device[-5:] for variable in found.model.variables} == {"CPU:1"}
    assert {variable.value.device[-5:] for variable in expected.optimizer.variables} == {"CPU:1"}
    assert_layers_may_be_frozen(found)


def assert_layers_may_be_frozen(trainer: tfpar.Trainer) -> None:
    """Between two runs."""
    kept = trainer.model.get_layer("third").kernel.numpy()
    trainer.model.get_layer("third").trainable = False
    trainer.fit(*divided_models.data("dense"), steps=4)
    np.testing.assert_array_equal(trainer.model.get_layer("third").kernel.numpy(), kept)
    assert {variable.value.device[-5:] for variable in trainer.optimizer.variables} == {"CPU:0"}


def test_blocks_are_xla_programs(monkeypatch):
    monkeypatch.setattr(offloaded, "BLOCK_BYTES", 4096)
    found, expected = (trained(offload, jit_compile="true") for offload in ("optimizer", "none"))
    for name, value in divided.weights_of(found).items():
        np.testing.assert_allclose(value, divided.weights_of(expected)[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_run_goes_on_with_and_without(tmp_path):
    """The checkpoint has the same names and values."""
    options = {"workdir": str(tmp_path / "run")}
    trained("optimizer", stop_after=1, **options)
    trained("none", stop_after=1, **options)
    found, expected = trained("optimizer", **options), trained("none")
    for name, value in divided.weights_of(found).items():
        np.testing.assert_array_equal(value, divided.weights_of(expected)[name], err_msg=name)


def test_blocks_have_the_state_of_their_weights():
    """At most so many bytes, unless a single weight has more."""
    model = divided_models.dense()
    optimizer = keras.optimizers.Nadam()
    optimizer.build(model.trainable_variables)
    blocks, common = blocks_of(optimizer, 20_000)
    assert [len(optimizer.variables[index].shape) for index in common] == 3 * [0]  # steps, rate, Nadam's product
    assert [index for block in blocks for index in block.weights] == [*range(len(model.trainable_variables))]
    for block in blocks:
        paths = [model.trainable_variables[index].path.replace("/", "_") for index in block.weights]
        slots = [optimizer.variables[index] for index in block.slots]
        assert [slot.name for slot in slots] == [
            f"{path}_{kind}" for path in paths for kind in ("momentum", "velocity")
        ]
        assert len(paths) == 1 or sum(4 * np.prod(slot.shape) for slot in slots) <= 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ema": 0.9}, "--offload=optimizer does not work yet with --ema=0.9"),
        ({"strategy": "mirrored", "devices": 2}, "one copy of the state in a worker, which has 2 devices"),
        ({"strategy": "mirrored", "mesh": "model:2"}, "does not work yet with --mesh=model:2"),
        ({"strategy": "mirrored", "mesh": "pipeline:2"}, "does not work yet with --mesh=pipeline:2"),
        ({"shard": "optimizer"}, "does not work yet with --shard=optimizer"),
        ({"local_steps": 2}, "does not work yet with --local_steps=2"),
        ({"outer_optimizer": "sgd"}, "does not work yet with --outer_optimizer=sgd"),
    ],
)
def test_what_does_not_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        validate_config(ExperimentConfig.from_flat_dict({**divided.COMMON, "offload": "optimizer", **options}))


@pytest.mark.parametrize(("kind", "part"), [(OfOneTotal, "variable 'total'"), (OfOwnApply, "method 'apply'")])
def test_an_optimizer_that_combines_weights_of_several_blocks_is_refused(kind, part):
    optimizer = kind(0.1, momentum=0.9)
    optimizer.build(divided_models.dense().trainable_variables)
    with pytest.raises(ConfigError, match=f"--offload=optimizer: the {part} of {kind.__name__} may combine weights"):
        blocks_of(optimizer, 20_000)
    assert len(blocks_of(optimizer, 1 << 30)[0]) == 1


def test_an_optimizer_of_another_class_that_updates_each_weight_by_itself_works():
    optimizer = EachAlone()
    optimizer.build(divided_models.dense().trainable_variables)
    assert len(blocks_of(optimizer, 20_000)[0]) > 1


def test_an_optimizer_that_needs_all_gradients_is_refused():
    runtime = divided.runtime_of("one_device")
    config = ExperimentConfig.from_flat_dict({**divided.COMMON, "strategy": "one_device", "offload": "optimizer"})
    optimizer = keras.optimizers.Adam(global_clipnorm=1.0)
    with pytest.raises(ConfigError, match="global_clipnorm of Adam needs all weights at once"):
        tfpar.Trainer(divided_models.dense, loss="mse", optimizer=optimizer, config=config, runtime=runtime)
