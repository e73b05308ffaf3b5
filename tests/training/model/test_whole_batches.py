"""Batches that are not full, in models that read a batch as a whole: the numbers are those of Keras."""

from __future__ import annotations

import tfpar
from tests.training.model.test_own_loss import Counted, OwnLoss
from tfpar import inputs
from tfpar.config import InputConfig, StrategyConfig
from tfpar.parallel.topology import choose_topology
from tfpar.precision import loss_divisor
from tfpar.training.core import Core
from tfpar.training.model.whole_batches import BatchReaders, without_padding
from tfpar.training.objective import Goal, SupervisedObjective

import keras
import numpy as np
import pytest
import tensorflow as tf

layers = keras.layers
EXAMPLES, BATCH = 17, 8  # of the last batch one of two replicas has no example


class Adding(layers.Layer):
    def call(self, x):
        self.add_loss(0.1 * keras.ops.mean(x**2))
        return x


class Inheriting(Adding):
    """Adds a loss by the code of its base class."""

    def call(self, x):
        return super().call(x)


class Delegating(layers.Layer):
    """Adds a loss in a method of its own."""

    def call(self, x):
        self.penalise(x)
        return x

    def penalise(self, x):
        self.add_loss(0.1 * keras.ops.mean(x**2))


def overriding() -> keras.Model:
    made = OwnLoss()
    made(np.zeros((1, 4), np.float32))
    return made


def sequential(layer: layers.Layer) -> keras.Model:
    ends = layers.Dense(6, kernel_initializer="ones"), layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([keras.Input((4,)), ends[0], layer, ends[1]])


MODELS = {
    "compute_loss": overriding,
    "add_loss": lambda: sequential(Adding()),
    "add_loss_of_base": lambda: sequential(Inheriting()),
    "add_loss_in_method": lambda: sequential(Delegating()),
    "activity_regularizer": lambda: sequential(layers.Dense(5, "relu", activity_regularizer="l2")),
    "batch_statistics": lambda: sequential(layers.BatchNormalization(momentum=0.5)),
    "own_metric": lambda: sequential(Counted()),
}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(2).normal(size=(EXAMPLES, 4)).astype(np.float32)
    return x, x[:, :1] * 2 + 1


@pytest.mark.parametrize(
    ("name", "replicas", "jit_compile"),
    [
        *((name, 1, "false") for name in MODELS),
        *((name, 1, "true") for name in ("compute_loss", "batch_statistics")),
        *((name, 2, "false") for name in ("compute_loss", "add_loss", "own_metric")),
    ],
)
def test_a_batch_that_is_not_full_gives_the_numbers_of_keras(caplog, name, replicas, jit_compile):
    x, y = arrays()

    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        return MODELS[name]()

    reference = build()
    own_loss = name == "compute_loss"
    reference.compile(keras.optimizers.SGD(0.01), None if own_loss else "mse", jit_compile=False)
    history = reference.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    strategy = {"strategy": "mirrored", "devices": replicas} if replicas > 1 else {"strategy": "one_device"}
    options = {"global_batch_size": BATCH, "shuffle": False, "jit_compile": jit_compile, **strategy}
    trainer = tfpar.Trainer(build, keras.optimizers.SGD(0.01), None if own_loss else "mse", **options)
    summary = trainer.fit(x, y, epochs=2)
    for ours, theirs in zip(trainer.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    expected = history["loss"][-1]
    assert summary["train_loss"] == pytest.approx(expected, rel=1e-4)
    evaluated, expected = trainer.evaluate(x, y), reference.evaluate(x, y, BATCH, verbose=0, return_dict=True)
    assert evaluated["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    if name == "own_metric":
        assert evaluated["activity"] == pytest.approx(expected["activity"], rel=1e-4)
    assert "padding" not in caplog.text


def test_metrics_of_positions_take_a_batch_of_another_size():
    x = np.random.default_rng(2).normal(size=(EXAMPLES, 4, 4, 2)).astype(np.float32)
    y = (x[..., :1] > 0).astype(np.float32)

    def build() -> keras.Model:
        keras.utils.set_random_seed(3)
        ends = layers.BatchNormalization(momentum=0.5), layers.Conv2D(1, 1, activation="sigmoid")
        return keras.Sequential([keras.Input((4, 4, 2)), *ends])

    reference = build()
    chosen = {"loss": "binary_crossentropy", "metrics": [keras.metrics.BinaryIoU(name="iou")]}
    reference.compile(keras.optimizers.SGD(0.1), **chosen, jit_compile=False)
    expected = reference.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    options = {"strategy": "one_device", "global_batch_size": BATCH, "shuffle": False, "jit_compile": "false"}
    trainer = tfpar.Trainer(build, keras.optimizers.SGD(0.1), **chosen, **options)
    history = trainer.fit(x, y, epochs=2).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("examples", [1, 2, 3, 8, 21, 64, 1000])
def test_the_divisor_of_a_loss_with_a_scale_does_not_ask_for_a_known_size(examples):
    @tf.function(input_signature=[tf.TensorSpec([None])])
    def divisor(weight: tf.Tensor) -> tf.Tensor:
        return loss_divisor(weight)

    weight = tf.ones([examples])
    assert float(divisor(weight)) == loss_divisor(weight)


def test_padding_goes_and_one_example_stays():
    weight = tf.constant([[[1.0, 0.0, 1.0]], [[0.0, 0.0, 0.0]], [[1.0, 1.0, 1.0]]])
    x = {"a": tf.constant([[[1, 2, 3]], [[4, 5, 6]], [[7, 8, 9]]])}
    found = list(without_padding(tf.data.Dataset.from_tensor_slices((x, (), weight))))
    assert [element[0]["a"].numpy().tolist() for element in found] == [[[1, 3]], [[4]], [[7, 8, 9]]]
    assert [element[2].numpy().tolist() for element in found] == [[[1.0, 1.0]], [[0.0]], [[1.0, 1.0, 1.0]]]


@pytest.mark.parametrize(
    ("mesh", "alone"), [("", True), ("pipeline:2", True), ("model:2", False), ("data:2,pipeline:2", False)]
)
def test_which_meshes_take_smaller_batches(mesh, alone):
    topology = choose_topology(StrategyConfig(strategy="mirrored", mesh=mesh, devices=0 if mesh else 2))
    config = InputConfig(global_batch_size=BATCH)
    pipeline = inputs.build_pipeline(inputs.from_arrays(*arrays()), config, replicas=topology.replicas)
    core = Core(MODELS["add_loss"](), objective=SupervisedObjective(None, None))
    assert BatchReaders.of(core, topology).get_examples_alone(pipeline) is alone


class Doubled(layers.Layer):
    def call(self, x):
        return 2 * x


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (Delegating(name="delegating"), ["delegating"]),
        (Inheriting(name="inheriting"), ["inheriting"]),
        (Doubled(), []),
        (layers.Dense(5, kernel_regularizer="l2", name="penalised"), []),  # not of examples
    ],
)
def test_layers_that_add_losses_are_named(layer, names):
    model = sequential(layer)
    objective = SupervisedObjective(model, Goal("mse"))
    readers = BatchReaders.of(Core(model, objective), choose_topology(StrategyConfig(strategy="one_device")))
    objective.bind(tf.TensorSpec([4]), tf.TensorSpec([1]))
    assert [*readers.adding] == names
