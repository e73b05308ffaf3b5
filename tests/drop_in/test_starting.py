"""How a plain Keras script starts: without a cluster, too late, with its share of the data."""

from __future__ import annotations

import json

import tfpar
from tests.drop_in.alone import X, Y, fit, model_of
from tfpar.drop_in import workers

import keras
import numpy as np
import pytest
import tensorflow as tf

# Without a cluster


def test_without_a_cluster_the_script_is_a_plain_one():
    tfpar.init_cluster()
    assert (tfpar.rank(), tfpar.size()) == (0, 1)
    adam = keras.optimizers.Adam()
    assert tfpar.DistributedOptimizer(adam, exchange="int4") is adam
    assert adam.__class__ is keras.optimizers.Adam
    model = model_of()
    model.compile(adam, "mse", jit_compile=True)
    history = model.fit(X, Y, verbose=0, callbacks=[tfpar.BroadcastInitialWeights(), tfpar.AverageMetrics()])
    assert np.isfinite(history.history["loss"]).all()


class OneHot(keras.layers.Embedding):
    """An embedding whose gradient is a dense tensor."""

    def call(self, tokens):
        return keras.ops.matmul(keras.ops.one_hot(tokens, self.input_dim), self.embeddings)


def embedded_weights(embedding: type, make, jit_compile: bool = False) -> list[np.ndarray]:
    """The weights after some steps on batches in which tokens repeat."""
    keras.utils.set_random_seed(3)
    tokens = np.random.default_rng(1).integers(0, 4, (32, 8))  # of nine: some never occur
    model = keras.Sequential(
        [keras.Input((8,), dtype="int32"), embedding(9, 3), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile(make(), "mse", jit_compile=jit_compile)
    model.fit(tokens, tokens.sum(axis=1, keepdims=True), batch_size=16, epochs=3, shuffle=False, verbose=0)
    return model.get_weights()


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.5),
        lambda: keras.optimizers.RMSprop(0.1),
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1)),
        lambda: keras.optimizers.SGD(0.1, clipnorm=0.1, gradient_accumulation_steps=2),
    ],
)
def test_repeated_tokens_are_summed_on_one_worker_too(make, jit_compile):
    actual = embedded_weights(keras.layers.Embedding, lambda: tfpar.DistributedOptimizer(make()), jit_compile)
    for one, other in zip(actual, embedded_weights(OneHot, make), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_rows_are_summed_once_however_often_an_optimizer_is_given():
    adam = keras.optimizers.Adam()
    kind = type(tfpar.DistributedOptimizer(adam))
    assert type(tfpar.DistributedOptimizer(adam)) is kind
    assert keras.optimizers.deserialize(keras.optimizers.serialize(adam)).__class__ is keras.optimizers.Adam


def test_an_unknown_exchange_is_refused_without_a_cluster_too():
    with pytest.raises(tfpar.ConfigError, match="int5"):
        tfpar.DistributedOptimizer(keras.optimizers.Adam(), exchange="int5")


def test_an_unknown_transport_is_refused_without_a_cluster_too():
    with pytest.raises(tfpar.ConfigError, match=r"--transport='?glo'?"):
        tfpar.init_cluster(transport="glo")


def test_rows_of_float64_are_summed_as_such():
    values = np.array([[1.0], [1e-12]])
    weight = keras.Variable(np.zeros((3, 1)), dtype="float64")
    optimizer = tfpar.DistributedOptimizer(keras.optimizers.SGD(1.0))
    optimizer.apply([tf.IndexedSlices(values, [2, 2], [3, 1])], [weight])
    assert weight.numpy()[2, 0] == -values.sum()


# Setting up


def test_too_late_a_start_says_where_it_belongs(worker_1_of_2):
    tf.constant(0)
    with pytest.raises(tfpar.ConfigError, match="call it right after the imports") as caught:
        tfpar.init_cluster()
    assert "\n" not in str(caught.value)


def test_a_forgotten_start_is_noticed(worker_1_of_2):
    assert (tfpar.rank(), tfpar.size()) == (1, 2)
    with pytest.raises(tfpar.ConfigError, match=r"call tfpar.init_cluster\(\) right after the imports"):
        tfpar.DistributedOptimizer(keras.optimizers.Adam())
    model = model_of()
    model.compile("sgd", "mse")
    with pytest.raises(tfpar.ConfigError, match=r"call tfpar.init_cluster\(\)"):
        model.fit(X, Y, verbose=0, callbacks=[tfpar.AverageMetrics()])


@pytest.mark.parametrize("task", ["ps", "worker"])
def test_parameter_servers_are_refused(monkeypatch, task):
    jobs = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": jobs, "task": {"type": task, "index": 0}}))
    with pytest.raises(tfpar.ConfigError, match="Take 'ps' and 'evaluator' out of the cluster"):
        tfpar.init_cluster()


# Shares of the data


def test_shares_of_arrays_are_disjoint_and_of_one_length(monkeypatch):
    x, y = np.arange(11), np.arange(11) * 2
    shares = []
    for rank in range(3):
        monkeypatch.setattr(workers, "size", lambda: 3)
        monkeypatch.setattr(workers, "rank", lambda rank=rank: rank)
        share_x, share_y = tfpar.shard(x, y)
        np.testing.assert_array_equal(share_y, share_x * 2)
        nested = tfpar.shard({"x": x, "more": [tf.constant(y)]})
        np.testing.assert_array_equal(nested["x"], share_x)
        np.testing.assert_array_equal(nested["more"][0], share_y)
        dataset = tfpar.shard(tf.data.Dataset.from_tensor_slices(x))
        assert int(dataset.cardinality()) == 3
        assert [int(value) for value in dataset] == share_x.tolist()
        shares.append(share_x.tolist())
    assert shares == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_a_share_of_a_data_set_of_unknown_length(monkeypatch):
    monkeypatch.setattr(workers, "size", lambda: 2)
    monkeypatch.setattr(workers, "rank", lambda: 1)
    assert [int(value) for value in tfpar.shard(tf.data.Dataset.range(7).filter(lambda value: value != 2))] == [1, 4, 6]


def test_shares_that_cannot_be(monkeypatch):
    monkeypatch.setattr(workers, "size", lambda: 3)
    monkeypatch.setattr(workers, "rank", lambda: 0)
    with pytest.raises(tfpar.ConfigError, match="2 examples are not enough for 3 workers"):
        tfpar.shard(np.zeros(2))
    with pytest.raises(tfpar.ConfigError, match=r"different lengths, \[4, 5\]"):
        tfpar.shard(np.zeros(4), np.zeros(5))
    with pytest.raises(tfpar.ConfigError, match="not generator"):
        tfpar.shard(iter_of := (value for value in range(3)))
    del iter_of
    with pytest.raises(tfpar.ConfigError, match="arrays, not SparseTensor"):
        tfpar.shard(tf.sparse.from_dense(np.eye(4)))


# With a cluster


def test_normalization_computes_with_the_statistics_that_were_broadcast(alone, monkeypatch):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Normalization(name="norm"), keras.layers.Dense(1)])
    mean = model.get_layer("norm").adapt_mean
    sent = [np.full(3, 5.0, np.float32) if variable is mean else variable.numpy() for variable in model.weights]
    monkeypatch.setattr(alone, "broadcast", lambda arrays: [*sent, *arrays[len(sent) :]])
    fit(alone, model=model)
    np.testing.assert_array_equal(model.get_layer("norm").mean, [[5.0] * 3])
