"""What a user changes in a given model between two calls counts in the next one."""

from __future__ import annotations

from tests.training.model.test_building import same, source, trainer
from tfpar.config import ConfigError
from tfpar.parallel.split import whole
from tfpar.training.loops.hooks import Hook

import keras
import numpy as np
import pytest

layers = keras.layers
WIDE = 300  # so that its weights are in shards


def model() -> keras.Model:
    base = [keras.Input((4,)), layers.Dense(WIDE, "tanh", name="dense"), layers.BatchNormalization(name="norm")]
    return keras.Sequential([keras.Sequential(base, name="base"), layers.Dense(1, name="head")])


@pytest.mark.parametrize("replicas", [1, 2])
def test_what_stays_frozen_in_a_layer_that_is_unfrozen(replicas):
    """As in fine-tuning, where statistics of batches stay frozen."""
    given = model()
    base = given.get_layer("base")
    norm, dense = base.get_layer("norm"), base.get_layer("dense")
    made = trainer(given, replicas)
    base.trainable = False
    made.fit(source(), steps=2)
    before = {layer.name: layer.get_weights() for layer in (norm, dense)}
    base.trainable = True
    norm.trainable = False
    dense.bias.trainable = False
    made.fit(source(), steps=2)
    assert same(norm.get_weights(), before["norm"])
    kernel, bias = dense.get_weights()
    assert same([bias], before["dense"][1:])
    assert not same([kernel], before["dense"][:1])
    assert [each.trainable for each in made.model.weights] == [each.trainable for each in given.weights]


def test_weights_that_are_added_to_the_given_model_are_refused_where_a_copy_is_trained():
    given = model()
    made = trainer(given, 2)
    made.fit(source(), steps=1)
    given.get_layer("head").enable_lora(2)
    with pytest.raises(ConfigError, match=r"other layers or weights than when the Trainer was made.*option lora="):
        made.fit(source(), steps=1)


@pytest.mark.parametrize(
    ("replicas", "options"),
    [
        (1, {"ema": 0.9}),
        (2, {"ema": 0.9}),
        (2, {"ema": 0.9, "shard": "optimizer"}),
        (1, {"optimizer": keras.optimizers.SGD, "shard": "none"}),
        (2, {"optimizer": keras.optimizers.SGD, "shard": "optimizer"}),
    ],
)
def test_weights_that_are_assigned_take_the_place_of_their_averages(replicas, options):
    if isinstance(options.get("optimizer"), type):
        options = {**options, "optimizer": options["optimizer"](0.05, use_ema=True)}
    given = model()
    made = trainer(given, replicas, **options)
    start = given.get_weights()
    made.fit(source(), steps=4)
    averages = made.evaluate(source())["loss"]
    head = given.get_layer("head")
    head.set_weights([4.0 * value for value in head.get_weights()])
    changed = made.evaluate(source())["loss"]
    assert changed > 2.0 * averages  # the averages of the other weights still count
    given.set_weights(start)
    x = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)  # those of `source`
    given.compile(loss="mse")
    assert made.evaluate(source())["loss"] == pytest.approx(given.evaluate(x, x[:, :1], verbose=0), rel=1e-5)
    np.testing.assert_allclose(made.predict(x), given.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("replicas", "shard"), [(1, "none"), (2, "optimizer")])
def test_restored_weights_take_the_place_of_averages(replicas, shard):
    """`EarlyStopping` gives the weights of the best epoch back, which are then evaluated and exported."""
    kept = []

    class Keeps(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                kept.extend(self.model.get_weights())

    stopping = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=9, restore_best_weights=True)
    made = trainer(model(), replicas, ema=0.5, shard=shard)
    result = made.fit(source(), epochs=3, validation=source(), callbacks=[Keeps(), stopping])
    assert stopping.best_epoch == 0
    assert same([whole(each) for each in made.model.weights], kept)
    assert result["eval"]["loss"] == pytest.approx(made.evaluate(source())["loss"], rel=1e-6)
    plain = model()
    plain.set_weights(kept)
    assert trainer(plain).evaluate(source())["loss"] == pytest.approx(result["eval"]["loss"], rel=1e-5)


def test_a_replica_whose_weights_differ_ends_the_run_by_name():
    def spoil(state):
        made.model.get_layer("head").kernel.value.values[1].assign_add(np.ones((WIDE, 1), np.float32))

    made = trainer(model(), 2)
    with pytest.raises(RuntimeError, match=r"differ: 1 of \d+ weights, the first of them 'head/kernel', on a replica"):
        made.fit(source(), steps=2, hooks=[Hook(2, spoil)])
