"""The drop-in for plain Keras scripts, in one process. Real workers: tests/integration/test_drop_in.py."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import zipfile

import tfpar
from tfpar import drop_in
from tfpar.drop_in import callbacks, workers
from tfpar.drop_in.optimizer import distribution_of

import keras
import numpy as np
import pytest
import tensorflow as tf

ROOT = pathlib.Path(__file__).parents[2]
TWO_WORKERS = {"cluster": {"worker": ["127.0.0.1:20001", "127.0.0.1:20002"]}, "task": {"type": "worker", "index": 1}}
X = np.random.default_rng(0).standard_normal((24, 3)).astype(np.float32)
Y = X.sum(axis=1, keepdims=True)


def model_of() -> keras.Model:
    # No bias before a normalisation: its gradient is zero but for rounding, which another order of threads changes.
    hidden = keras.layers.Dense(4, use_bias=False)
    return keras.Sequential([keras.Input((3,)), hidden, keras.layers.BatchNormalization(), keras.layers.Dense(1)])


@pytest.fixture
def worker_1_of_2(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(TWO_WORKERS))


class Alone:
    """Stands for the workers of a cluster, and answers for the others."""

    size, rank = 1, 0

    def __init__(self) -> None:
        self.strategy = tf.distribute.OneDeviceStrategy("CPU:0")
        self.others: list = []

    def gather(self, what, value):
        del what
        others = [other(value) for other in self.others]
        return json.loads(json.dumps([value, *others]))

    def broadcast(self, arrays):
        return arrays


@pytest.fixture
def alone(monkeypatch) -> Alone:
    """A process that believes to be one of several, so that optimizers are distributed."""
    found = Alone()
    monkeypatch.setattr(workers, "_workers", found)
    return found


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


# The optimizer, seen from Keras


def test_keras_sees_the_optimizer_that_it_knows(alone):
    adam = tfpar.DistributedOptimizer(keras.optimizers.Adam(0.01, clipnorm=1.0), exchange="int4")
    assert isinstance(adam, keras.optimizers.Adam)
    assert distribution_of(adam) is not None
    assert keras.optimizers.get(adam) is adam
    plain = keras.optimizers.Adam(0.01, clipnorm=1.0, name=adam.name)
    assert keras.optimizers.serialize(adam) == keras.optimizers.serialize(plain)
    assert type(adam).from_config(adam.get_config()).get_config() == plain.get_config()
    adam.learning_rate = 0.5
    assert float(adam.learning_rate) == 0.5


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 20)),
        lambda: keras.optimizers.Adam(0.1, use_ema=True, gradient_accumulation_steps=3),
        lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    ],
)
def test_saved_it_loads_as_the_plain_optimizer_and_goes_on(alone, tmp_path, make):
    def train(optimizer: keras.optimizers.Optimizer) -> keras.Model:
        keras.backend.clear_session()
        keras.utils.set_random_seed(0)
        model = model_of()
        model.compile(optimizer, "mse", jit_compile=False)
        model.fit(X, Y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        return model

    plain, distributed = train(make()), train(tfpar.DistributedOptimizer(make()))
    for name, model in (("plain", plain), ("distributed", distributed)):
        model.save(tmp_path / f"{name}.keras")
    configs = [zipfile.ZipFile(tmp_path / f"{name}.keras").read("config.json") for name in ("plain", "distributed")]
    assert json.loads(configs[0])["compile_config"] == json.loads(configs[1])["compile_config"]
    loaded = keras.models.load_model(tmp_path / "distributed.keras")
    assert type(loaded.optimizer) is type(plain.optimizer)
    for ours, theirs in zip(loaded.optimizer.variables, plain.optimizer.variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    # A loaded optimizer, with its state, is distributed in its place.
    assert tfpar.DistributedOptimizer(loaded.optimizer) is loaded.optimizer
    for model in (plain, loaded):
        model.fit(X, Y, batch_size=6, shuffle=False, verbose=0)
    for ours, theirs in zip(loaded.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_it_works_in_a_loop_of_ones_own(alone):
    variables = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    sgd = tfpar.DistributedOptimizer(keras.optimizers.SGD(1.0))

    @tf.function
    def step() -> None:
        sgd.apply([None, tf.constant([0.5])], variables)

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step()
    np.testing.assert_array_equal(variables[0].numpy(), [1.0, 2.0])
    np.testing.assert_array_equal(variables[1].numpy(), [2.5])


def test_repeated_rows_of_a_sparse_gradient_add_up(alone):
    """Keras 3.15 alone squares each of the rows by itself for Adam's second moment."""
    rows = tf.IndexedSlices(tf.constant([[1.0], [2.0]]), tf.constant([1, 1]), tf.constant([3, 1]))
    found = []
    for gradient in (rows, tf.constant([[0.0], [3.0], [0.0]])):
        variable = keras.Variable(np.ones((3, 1), np.float32))
        adam = tfpar.DistributedOptimizer(keras.optimizers.Adam(0.1))
        adam.apply([gradient], [variable])
        found.append([value.numpy() for value in adam.variables])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


# Misuse


def fit(alone, optimizer=None, callback=tfpar.BroadcastInitialWeights, model=None, data=(X, Y), **keywords):
    model = model or model_of()
    model.compile(optimizer or tfpar.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse", jit_compile=False)
    return model.fit(*data, verbose=0, callbacks=[callback()], **keywords)


def test_misuse_is_refused_in_one_line(alone):
    distributed = tfpar.DistributedOptimizer

    def under_strategy():
        with tf.distribute.OneDeviceStrategy("CPU:0").scope():
            distributed(keras.optimizers.SGD())

    def mixed_float16():
        keras.config.set_dtype_policy("mixed_float16")
        fit(alone)

    def scaled_and_accumulated():
        inner = keras.optimizers.SGD(gradient_accumulation_steps=2)
        distributed(keras.optimizers.LossScaleOptimizer(inner))

    generator = tf.data.Dataset.from_generator(
        lambda: iter([(X, Y)]), output_signature=(tf.TensorSpec(X.shape), tf.TensorSpec(Y.shape))
    )
    for misuse, said in [
        (under_strategy, "train with tfpar.Trainer"),
        (lambda: distributed(distributed(keras.optimizers.SGD())), "distributed already"),
        (scaled_and_accumulated, "would exchange at every step"),
        (lambda: fit(alone, keras.optimizers.SGD()), "does not exchange gradients"),
        (lambda: fit(alone, model=keras.Sequential([keras.layers.Dense(1)])), "Give it a keras.Input"),
        (lambda: fit(alone, data=(generator,)), "steps_per_epoch=N"),
        (mixed_float16, "tfpar.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"),
    ]:
        with pytest.raises(tfpar.ConfigError) as caught:
            misuse()
        assert said in str(caught.value)
        assert "\n" not in str(caught.value)


def test_float16_with_loss_scaling_inside(alone):
    keras.config.set_dtype_policy("mixed_float16")
    optimizer = tfpar.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01), initial_scale=64.0)
    )
    model = model_of()
    history = fit(alone, optimizer, model=model, epochs=4)
    assert model.optimizer is optimizer  # Keras put no second one around it
    assert history.history["loss"][-1] < history.history["loss"][0]


def test_keras_chooses_xla_by_itself_where_there_is_a_gpu(alone, monkeypatch):
    class Gpu:
        device_type = "GPU"

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: [Gpu()])
    model = model_of()
    model.compile(tfpar.DistributedOptimizer(keras.optimizers.SGD()), "mse")
    with pytest.raises(tfpar.ConfigError, match="jit_compile=False"):
        model.fit(X, Y, verbose=0, callbacks=[tfpar.BroadcastInitialWeights()])


def test_data_that_runs_out(alone):
    data = tf.data.Dataset.from_tensors((X, Y)).repeat(3)
    with pytest.raises(tfpar.ConfigError, match="worker 0 ended epoch 1 after 3 of 5 steps"):
        fit(alone, data=(data,), steps_per_epoch=5, epochs=2)


def test_stopping_at_different_times_is_noticed(alone):
    alone.others = [lambda value: value | {"stop_training": True} if isinstance(value, dict) else value]
    with pytest.raises(tfpar.ConfigError, match=r"values of stop_training, \[False, True\]"):
        fit(alone, callback=tfpar.AverageMetrics)


def test_other_names_in_the_logs_are_noticed(alone):
    alone.others = [lambda value: value | {"values": {"other": 1.0}} if isinstance(value, dict) else value]
    with pytest.raises(tfpar.ConfigError, match="worker 1 logs other, worker 0 loss"):
        fit(alone, callback=tfpar.AverageMetrics)


# Averages


class Largest(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros")

    def update_state(self, y, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y)))

    def result(self):
        return self.value


class Errors(keras.metrics.MeanSquaredError):
    """A metric of Keras with two results."""

    def result(self):
        return {"mse": super().result(), "root": keras.ops.sqrt(super().result())}


def test_logs_are_those_of_all_examples_and_weights(alone):
    """The other worker has more examples, and other sample weights: each metric counts in its own way."""
    generator = np.random.default_rng(4)
    x = generator.standard_normal((64, 3)).astype(np.float32)
    y = (x.sum(axis=1, keepdims=True) > 0).astype(np.float32)
    weight = generator.uniform(0.1, 9.0, 64).astype(np.float32)
    shares = {"train": [slice(0, 24), slice(24, 40)], "validation": [slice(40, 45), slice(45, 64)]}

    def metrics():
        # The name of a metric that does not add up is a part of other names.
        plain = [
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.F1Score(threshold=0.5),
            Largest("a"),
            Errors(),
        ]
        return {"metrics": plain, "weighted_metrics": [keras.metrics.RootMeanSquaredError(name="rms")]}

    def model_with_weights():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, activation="sigmoid")])

    # What the other worker has seen, from a callback of its own on a model that does not change.
    def snapshots(share):
        model, spy = model_with_weights(), callbacks.AverageMetrics()
        model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", jit_compile=False, **metrics())
        spy.set_model(model)
        seen = {}
        for split in shares:
            part = shares[split][share]
            logs = model.evaluate(x[part], y[part], sample_weight=weight[part], verbose=0, return_dict=True)
            seen[split] = spy._snapshot(), logs
        return seen

    theirs = snapshots(1)

    def other(value):
        if not isinstance(value, dict):
            return value
        logs = theirs["train"][1] | {f"val_{name}": one for name, one in theirs["validation"][1].items()}
        plain = {name: np.asarray(one).tolist() for name, one in logs.items()}
        return value | {"values": plain, "train": theirs["train"][0], "validation": theirs["validation"][0]}

    alone.others = [other]
    model = model_with_weights()
    model.compile(
        tfpar.DistributedOptimizer(keras.optimizers.SGD(0.0)), "binary_crossentropy", jit_compile=False, **metrics()
    )
    own = {split: (x[part[0]], y[part[0]], weight[part[0]]) for split, part in shares.items()}
    history = model.fit(
        *own["train"][:2],
        sample_weight=own["train"][2],
        validation_data=own["validation"],
        callbacks=[tfpar.AverageMetrics()],
        batch_size=8,
        verbose=0,
    )
    whole = model_with_weights()
    whole.compile(keras.optimizers.SGD(0.0), "binary_crossentropy", jit_compile=False, **metrics())
    for prefix, part in (("", slice(0, 40)), ("val_", slice(40, 64))):
        expected = whole.evaluate(x[part], y[part], sample_weight=weight[part], verbose=0, return_dict=True)
        for name, value in expected.items():
            np.testing.assert_allclose(history.history[prefix + name][0], value, rtol=1e-6, err_msg=prefix + name)


def test_a_model_of_its_own_loss_is_weighted_by_examples(alone):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)
            self.mean = keras.metrics.Mean(name="own")

        def call(self, inputs):
            return self.dense(inputs)

        def train_step(self, data):
            self.mean.update_state(tf.reshape(data[1], [-1]))
            self.optimizer.apply([tf.zeros([3, 1]), tf.zeros([1])], self.trainable_variables)
            return {"own": self.mean.result(), "unknown": 1.0}

    def other(value):
        if not isinstance(value, dict):
            return value
        state = {"examples": 8.0, "state": [*value["train"]["state"][:-2], 4.0, 8.0]}
        return value | {"train": state, "values": {"own": 0.5, "unknown": 5.0}}

    alone.others = [other]
    model = Model()
    model(X)
    history = fit(alone, model=model, callback=tfpar.AverageMetrics)
    np.testing.assert_allclose(history.history["own"][0], (Y.sum() + 4.0) / 32, rtol=1e-6)
    np.testing.assert_allclose(history.history["unknown"][0], (24 * 1.0 + 8 * 5.0) / 32, rtol=1e-12)


def test_weighted_mean():
    assert callbacks.weighted_mean([1.0, 4.0], [2.0, 1.0]) == 2.0
    assert callbacks.weighted_mean([1.0, 2.0], [0.0, 0.0]) == 1.5
    assert callbacks.weighted_mean([float("nan"), 2.0], [0.0, 3.0]) == 2.0
    assert callbacks.weighted_mean([0.1, 0.1, 0.1], [1.0, 1.0, 1.0]) == 0.1


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """Cannot be serialised."""

    def __call__(self, step):
        return 0.5 ** tf.cast(step, tf.float32)


@pytest.mark.parametrize(("rate", "name"), [(Halving(), "Halving"), (lambda: 0.1, "<lambda>")])
@pytest.mark.parametrize("scaled", [False, True])
def test_rates_that_cannot_be_saved_are_compared_by_name(alone, rate, name, scaled):
    optimizer = keras.optimizers.SGD(rate)
    optimizer = tfpar.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer)
    optimizer.build(model_of().trainable_variables)
    alone.others = [lambda value: [value[0] | {"learning_rate": "Doubling"}, value[1]]]
    with pytest.raises(tfpar.ConfigError, match=f"different values of learning_rate, 'Doubling' and '{name}'"):
        distribution_of(optimizer).start(optimizer)
    alone.others = [lambda value: value]
    distribution_of(optimizer).start(optimizer)


# What the reader sees


def statements_of_the_example() -> list[str]:
    """The imports and the body of `main` of the script, all but `from __future__` and that of its command line."""
    script = ast.parse((ROOT / "experiments/keras_fit.py").read_text()).body
    (main,) = [node for node in script if isinstance(node, ast.FunctionDef)]
    imports = [node for node in script if isinstance(node, (ast.Import, ast.ImportFrom))]
    return [line for line in map(ast.unparse, [*imports, *main.body]) if line != "import argparse"][1:]


def statements_shown(page: str) -> list[str]:
    """The statements of the one Python block of a page that uses the optimizer."""
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (shown,) = [ast.parse(block).body for block in blocks if "DistributedOptimizer" in block]
    return [ast.unparse(node) for node in shown]


def test_the_documentation_shows_the_example():
    assert statements_shown("docs/keras.md") == statements_of_the_example()


def test_the_readme_shows_lines_of_the_example():
    script = iter(statements_of_the_example())
    assert [line for line in statements_shown("README.md") if line not in script] == []  # `in` consumes: the same order


def test_the_names_are_those_of_the_package():
    for name in drop_in.__all__:
        assert getattr(tfpar, name) is getattr(drop_in, name)
