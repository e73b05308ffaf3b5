"""Weights of classes become the sample weights that Keras computes."""

from __future__ import annotations

from tfpar import inputs
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, Weighted

import keras
import numpy as np
import pytest
import tensorflow as tf

WEIGHTS = {0: 0.5, 2: 4.0, 1: 1.5}


def weights_of(source: inputs.Source) -> np.ndarray:
    _, y = source.fetch(tf.range(source.info.num_examples, dtype=tf.int64))
    assert isinstance(y, Weighted)
    assert y.sample_weight.shape[1:] == source.info.weight_spec.shape
    return y.sample_weight.numpy()


def weights_in_keras(y: np.ndarray) -> np.ndarray:
    """What Keras' own `fit` gives to `train_step`."""

    class Recorder(keras.Model):
        seen: list

        def train_step(self, data):
            self.seen.append(keras.utils.unpack_x_y_sample_weight(data)[2].numpy())
            return {"loss": 0.0}

    model = Recorder()
    model.seen = []
    model.compile(run_eagerly=True)
    model.fit(np.zeros((len(y), 1)), y, class_weight=WEIGHTS, batch_size=len(y), shuffle=False, verbose=0)
    return model.seen[0]


LABELS = {
    "classes": np.array([0, 1, 2, 3, 2, 0]),
    "column": np.array([[0], [2], [1], [7]]),
    "float classes": np.array([0.0, 1.9999, 2.0]),
    "one-hot": np.eye(4)[[3, 0, 2, 1]],
    "one-hot integers": np.eye(4, dtype=np.int32)[[3, 0, 2, 1]],
}


@pytest.mark.parametrize("labels", sorted(LABELS))
def test_weights_are_those_of_keras(labels):
    y = LABELS[labels]
    weighted = inputs.with_class_weight(inputs.from_arrays(np.zeros((len(y), 1)), y), WEIGHTS)
    np.testing.assert_array_equal(weights_of(weighted), weights_in_keras(y))


@pytest.mark.parametrize("labels", sorted(LABELS))
@pytest.mark.parametrize("batched", [False, True])
def test_a_dataset_gets_them_too(labels, batched):
    y = LABELS[labels]
    dataset = tf.data.Dataset.from_tensor_slices((np.zeros((len(y), 1)), y))
    source = inputs.from_dataset(dataset.batch(2) if batched else dataset, batched=batched)
    weighted = inputs.with_class_weight(source, WEIGHTS)
    found = [y.sample_weight for _, y in weighted.batches(tf.distribute.InputContext())]
    np.testing.assert_array_equal(np.concatenate(found), weights_in_keras(y))
    with pytest.raises(ConfigError, match="sample weights already"):
        inputs.with_class_weight(weighted, WEIGHTS)


def test_labels_of_positions_get_a_weight_each():
    y = np.array([[[0], [1]], [[2], [5]]])
    weighted = inputs.with_class_weight(inputs.from_arrays(np.zeros((2, 1)), y), WEIGHTS)
    np.testing.assert_array_equal(weights_of(weighted), [[0.5, 1.5], [4.0, 1.0]])


@pytest.mark.parametrize("cache", ["memory", "none"])
def test_weights_go_through_a_pipeline_of_files_and_through_skipping(cache, tmp_path):
    for name in ("ant", "bee"):
        (tmp_path / name).mkdir()
        for number in range(3):
            image = np.full((4, 4, 3), 40 * number, np.uint8)
            (tmp_path / name / f"{number}.png").write_bytes(tf.io.encode_png(image).numpy())
    (tmp_path / "bee" / "1.png").write_bytes(b"\x89PNG nothing")
    config = InputConfig(
        dataset=f"images:{tmp_path}", global_batch_size=6, validation_fraction=0.0, image_size=4, cache=cache,
        on_bad_record="skip", shuffle=False,
    )  # fmt: skip
    weighted = inputs.with_class_weight(inputs.build_source(config, "train"), {1: 3.0})
    _, y, real = next(Pipeline(weighted, config).dataset().as_numpy_iterator())
    assert real.tolist() == [[1, 1, 1, 1, 0, 1]]
    np.testing.assert_array_equal(y.sample_weight[real > 0], np.where(y.y[real > 0] == 1, 3.0, 1.0))
    (bad,) = inputs.locate_bad_example(weighted, range(6), limit=6)
    assert bad.index == 4


def test_other_weights_are_other_data():
    source = inputs.from_arrays(np.zeros((3, 1)), np.arange(3))
    fingerprints = {
        each.info.fingerprint
        for each in (
            source,
            inputs.with_class_weight(source, {0: 2.0}),
            inputs.with_class_weight(source, {0: 3.0}),
        )
    }
    assert len(fingerprints) == 3


@pytest.mark.parametrize(
    ("source", "weights", "message"),
    [
        (lambda: inputs.from_arrays(np.zeros(3)), WEIGHTS, "arrays has no labels"),
        (lambda: inputs.from_arrays(np.zeros(3), {"a": np.zeros(3)}), WEIGHTS, "arrays has several labels"),
        (
            lambda: inputs.from_arrays(np.zeros(3), np.zeros(3), sample_weight=np.ones(3)),
            WEIGHTS,
            "has sample weights already",
        ),
        (lambda: inputs.load("synthetic:tokens"), WEIGHTS, "has tokens as labels"),
        (lambda: inputs.from_arrays(np.zeros(3), np.zeros(3)), {}, "must be a dict from class number"),
        (lambda: inputs.from_arrays(np.zeros(3), np.zeros(3)), {"a": 1.0}, "'a' is not a class number"),
        (lambda: inputs.from_arrays(np.zeros(3), np.zeros(3)), {-1: 1.0}, "-1 is not a class number"),
        (lambda: inputs.from_arrays(np.zeros(3), np.zeros(3)), {0: float("nan")}, "class 0 is nan"),
        (lambda: inputs.from_arrays(np.zeros(3), np.zeros(3)), {0: "much"}, "class 0 is 'much'"),
    ],
)
def test_what_has_no_class_is_refused(source, weights, message):
    with pytest.raises(ConfigError, match=message):
        inputs.with_class_weight(source(), weights)
