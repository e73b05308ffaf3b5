"""What devices tell of logits that they have parts of, against the whole logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from tests.integration.scripts import divided, divided_models
from tfpar.checkpoint import run_state
from tfpar.checkpoint.arrays import Part, SavedArrays, index_of, write_arrays
from tfpar.config import ConfigError
from tfpar.parallel.division import Split
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.replica import static_replica_id
from tfpar.parallel.split import assign_whole, move_to_devices, parts_here, whole
from tfpar.parallel.tensor.calls import heads_of
from tfpar.parallel.tensor.divided_logits import DividedLogits
from tfpar.parallel.tensor.layout import find_layout
from tfpar.training.model.recompute import recompute_activations

import keras
import numpy as np
import pytest
import tensorflow as tf

SIZE, SHAPE = 3, (2, 5)


def on_devices(program: Callable[[int, ModelAxis], Any]) -> list[Any]:
    """What each of three devices returns."""
    strategy = divided.runtime_of("mirrored", f"model:{SIZE}").strategy
    axis = ModelAxis([[device] for device in strategy.extended.worker_devices], 0, SIZE)

    def run() -> Any:
        with axis.on_own_device():
            return program(static_replica_id(), axis)

    results = tf.function(lambda: strategy.run(run), autograph=False)()
    parts = [strategy.experimental_local_results(part) for part in tf.nest.flatten(results)]
    return [tf.nest.pack_sequence_as(results, [part[device].numpy() for part in parts]) for device in range(SIZE)]


@pytest.mark.parametrize("classes", [12, 13])
def test_they_tell_what_all_logits_do(classes):
    """Cross-entropies and their gradients to 1e-6, the largest of equal logits, and all of them, with padding or not; a
    label that is no class gives NaN."""
    generator = np.random.default_rng(0)
    logits = (5.0 * generator.normal(size=(*SHAPE, classes))).astype(np.float32)
    logits[0, 0], logits[0, 1, [3, 9]] = -50.0, 20.0  # ties, below any padding of zeros and above
    labels = generator.integers(0, classes, SHAPE).astype(np.int32)
    labels[1, 0] = classes - 1
    upstream = generator.normal(size=SHAPE).astype(np.float32)
    split = Split.padded(2, SIZE, classes)

    def program(rank: int, axis: ModelAxis) -> Any:
        own = tf.constant(split.part(logits, rank))
        with axis.on_own_device() as place, tf.GradientTape(persistent=True) as tape:
            tape.watch(own)
            parts = DividedLogits(place, own, classes)
            entropy = parts.cross_entropy(tf.constant(labels))
            whole = parts.gathered()
        gradients = tape.gradient(entropy, own, upstream), tape.gradient(whole, own, logits)
        invalid = parts.cross_entropy(tf.constant([[classes, -1, 0, 0, 0]] * 2))
        return entropy, whole, parts.best(), *gradients, invalid

    found = on_devices(program)
    with tf.GradientTape() as tape:
        every = tf.constant(logits)
        tape.watch(every)
        expected = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, every)
    expected_gradient = tape.gradient(expected, every, upstream).numpy()
    for entropy, every_logit, best, _, _, invalid in found:
        np.testing.assert_allclose(entropy, expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(every_logit, logits)
        np.testing.assert_array_equal(best, logits.argmax(axis=-1))
        np.testing.assert_array_equal(np.isnan(invalid), [[True, True, False, False, False]] * 2)
    joined = split.joined([device[3] for device in found])
    np.testing.assert_allclose(joined, expected_gradient, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(split.joined([device[4] for device in found]), logits)


def dense_head(**options: Any) -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(9, name="head", **options)(inputs))


def read_twice() -> keras.Model:
    model = dense_head()
    return keras.Model(model.inputs, [model.outputs[0], keras.layers.Softmax()(model.outputs[0])])


def called_inside() -> keras.Model:
    """A pair of which a model inside calls the first layer, and a head that this model has in its midst."""
    inputs = keras.Input((4,))
    head, first = keras.layers.Dense(4, name="head"), keras.layers.Dense(8, name="first")
    norm = keras.layers.LayerNormalization()
    inner = keras.Model(inputs, keras.layers.Dense(4, name="inside")(norm(first(norm(head(inputs))))))
    return keras.Model(inputs, head(norm(keras.layers.Dense(4, name="second")(first(inner(inputs))))))


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (divided_models.language_model, "token_embedding"),
        (divided_models.grouped_query, "token_embedding"),
        (divided_models.attention, "logits"),
        (dense_head, "head"),
        (lambda: dense_head(activation="softmax"), None),
        (lambda: dense_head(activity_regularizer="l2"), None),
        (read_twice, None),
        (called_inside, None),
    ],
)
def test_which_logits_stay_divided(build, name):
    """Those that are the model's outputs as the layer computes them, and that nothing else reads."""
    model = build()
    head = model.get_layer(name or "head")
    assert (id(head) in heads_of(model)) == bool(name)
    recompute_activations(model, head.name)
    assert id(head) not in heads_of(model)


def test_other_outputs_of_a_model_inside_are_whole():
    """The last layer of the outer model needs all features."""
    inputs = keras.Input((4,))
    x = keras.layers.LayerNormalization()(inputs)
    features, logits, last = (keras.layers.Dense(width, name=f"of_{width}") for width in (64, 100, 10))
    inner = keras.Model(inputs, [features(x), logits(x)])
    of_features, of_logits = inner(inputs)
    assert heads_of(keras.Model(inputs, [of_logits, last(of_features)])) == {id(logits), id(last)}


def test_a_layer_that_a_model_inside_calls_too_is_no_part_of_a_pair():
    """That model needs all of its outputs."""
    with pytest.raises(ConfigError, match="no layer that can be divided"):
        find_layout(called_inside(), 2)


def test_padding_is_cut_off_and_filled():
    split, array = Split.padded(0, 3, 7), np.arange(14.0).reshape(7, 2)
    parts = [split.part(array, rank) for rank in range(3)]
    assert [part.shape for part in parts] == [split.part_shape(array.shape)] * 3 == [(3, 2)] * 3
    np.testing.assert_array_equal(parts[2], [[12.0, 13.0], [0.0, 0.0], [0.0, 0.0]])
    np.testing.assert_array_equal(split.joined(parts), array)
    np.testing.assert_array_equal(split.joined_tensor([tf.constant(part) for part in parts]), array)
    assert split.whole_shape(parts[0].shape) == array.shape
    stretches = [split.stretches(7, rank) for rank in range(3)]
    assert stretches == [[(0, 3)], [(3, 3)], [(6, 1)]]
    for part, ((start, length),) in zip(parts, stretches, strict=True):
        np.testing.assert_array_equal(split.with_padding(array[start : start + length], part.shape), part)


def test_a_padded_table_is_saved_without_padding_and_read_in_parts(tmp_path):
    """Its slots get back the value that padding has had since they were made."""
    array = np.arange(14.0, dtype=np.float32).reshape(7, 2)
    variable = keras.Variable(array)
    with divided.runtime_of("mirrored", f"model:{SIZE}").strategy.scope():
        move_to_devices(variable, dataclasses.replace(Split.padded(0, SIZE, 7), fill=0.5))
    assert {rank: len(part) for rank, part in parts_here(variable).items()} == {0: 3, 1: 3, 2: 1}
    np.testing.assert_array_equal(run_state.snapshot({"table": variable})["table"], array)
    for rank in range(SIZE):
        part = Part((7, 2), {0: ((rank * 3, len(parts_here(variable)[rank])),)})
        write_arrays(tmp_path / f"{rank}.safetensors", {"table": parts_here(variable)[rank]}, {"table": part})
    names = [f"{rank}.safetensors" for rank in range(SIZE)]
    saved = SavedArrays(tmp_path, names, lambda path: None, index_of([tmp_path / name for name in names]))
    assign_whole(variable, np.zeros_like(array))
    run_state.restore({"table": variable}, saved)
    np.testing.assert_array_equal(whole(variable), array)
    np.testing.assert_array_equal(variable.value.values[2].numpy(), [[12.0, 13.0], [0.5, 0.5], [0.5, 0.5]])
