"""What clients send: the codecs of tfpar_ops, with and without a memory of what was left out."""

from __future__ import annotations

from tests.outer.federated.test_averaging import examples, trainer_of
from tfpar.outer.federated.encoding import UpdateEncoding

import keras
import numpy as np
import pytest
import tensorflow as tf

SHAPES = [(64, 32), (32,)]


def movement() -> list[tf.Tensor]:
    generator = np.random.default_rng(0)
    return [tf.constant(generator.normal(size=shape), tf.float32) for shape in SHAPES]


@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
def test_the_mean_of_stateless_clients_is_unbiased(codec):
    """The error of the mean of n falls as 1 / sqrt(n), as it would not if all rounded alike."""
    encoding = UpdateEncoding.of(codec, SHAPES, stateful=False)
    sent = movement()

    @tf.function(autograph=False)
    def decoded(seed: tf.Tensor) -> tf.Tensor:
        return encoding.through(sent, None, seed)[0][0]

    def error(count: int) -> float:
        mean = np.mean([decoded(tf.constant([number, 9])).numpy() for number in range(count)], axis=0)
        return float(np.sqrt(np.mean((mean - sent[0].numpy()) ** 2)))

    assert error(200) < 0.12 * error(1)
    np.testing.assert_array_equal(encoding.through(sent, None, tf.constant([1, 2]))[0][1], sent[1])  # a bias


def test_clients_with_memory_deliver_everything_in_the_end():
    encoding = UpdateEncoding.of("topk:0.1", SHAPES, stateful=True)
    residual, total = tf.zeros([encoding.residual_elements]), np.zeros(SHAPES[0])
    for _ in range(30):
        received, residual = encoding.through(movement(), residual, tf.constant([0, 0]))
        total += received[0].numpy()
    np.testing.assert_allclose(total + residual.numpy().reshape(SHAPES[0]), 30 * movement()[0].numpy(), atol=1e-3)
    assert float(tf.norm(residual)) < 15 * float(tf.norm(movement()[0]))


def test_bytes_are_those_of_the_payloads():
    for codec in ("none", "int8", "topk:0.1"):
        encoding = UpdateEncoding.of(codec, SHAPES, stateful=True)
        sent, _ = encoding.encode(movement(), tf.zeros([encoding.residual_elements]), tf.constant([0, 0]))
        assert encoding.payload_bytes == sum(4 * int(tf.size(each)) for each in sent)


def wide() -> keras.Model:
    return keras.Sequential([keras.Input([12]), keras.layers.Dense(100, activation="relu"), keras.layers.Dense(5)])


def test_a_run_with_memory_goes_on_with_the_same_bits(tmp_path):
    """Residuals, control variates and the server's optimizer are in the checkpoint."""
    options = {
        "rounds": 6,
        "averaging": "scaffold",
        "server_momentum": 0.5,
        "update_codec": "int4:min_elements=100",
        "stateful_clients": True,
        "client_dropout": 0.2,
    }
    whole = trainer_of(wide, **options, workdir=str(tmp_path / "whole")).fit(*examples())
    trainer_of(wide, **options, workdir=str(tmp_path / "cut"), stop_after=4).fit(*examples())
    resumed = trainer_of(wide, **options, workdir=str(tmp_path / "cut")).fit(*examples())
    assert resumed["params_sha256"] == whole["params_sha256"]
    assert resumed["rounds"] == 6
    federated = whole["federated"]
    assert federated["clients_trained"] + federated["clients_dropped"] == 24
    weights = 4 * (12 * 100 + 100 + 100 * 5 + 5)
    assert federated["bytes_down_per_round"] == 4 * 2 * weights  # weights and the control variate
    assert federated["bytes_up_per_round"] < federated["clients_trained"] / 6 * 0.5 * weights
    assert (tmp_path / "cut" / "model.keras").exists()
