"""Replicas that are pipelines: the numbers of one device, each stage's weights on its own."""

from __future__ import annotations

import functools
import types

import tfpar
from tests.graphs import sums_of_devices
from tests.integration.scripts import divided, divided_models
from tests.integration.scripts.divided_models import dense
from tests.training.test_tensor_parallel import alone, assert_as_alone, assert_saved_whole
from tfpar.config import ConfigError
from tfpar.optim import keras_calls
from tfpar.parallel import split
from tfpar.parallel.division import Split
from tfpar.parallel.held import Held, mark_held
from tfpar.parallel.pipeline.cuts import cut_at
from tfpar.parallel.pipeline.devices import PipelineDevices, place_of
from tfpar.parallel.split import whole_elements
from tfpar.parallel.topology import Topology
from tfpar.training.pipeline.graph import beginnings_of, run_steps, steps_of
from tfpar.training.pipeline.placing import PipelinePlacing
from tfpar.training.pipeline.stage_program import stages_of

import keras
import numpy as np
import pytest
import tensorflow as tf


@pytest.mark.parametrize(
    ("model", "devices", "options"),
    [
        ("dense", 2, {"accumulate_steps": 4, "ema": 0.9}),
        ("dense", 3, {"accumulate_steps": 2, "stages_per_device": 2}),
        ("language_model", 4, {"accumulate_steps": 2}),
        ("vit", 2, {"accumulate_steps": 4, "ema": 0.9}),
        ("resnet", 3, {"accumulate_steps": 2, "learning_rate": 0.03}),
        ("recurrent", 2, {"accumulate_steps": 2}),
        ("branches", 4, {"accumulate_steps": 4, "pipeline_schedule": "gpipe"}),
        ("batch_statistics", 2, {"accumulate_steps": 2}),
        ("branches", 3, {"accumulate_steps": 2, "pipeline_schedule": "gpipe"}),
    ],
)
def test_thirty_steps_equal_one_device(model, devices, options):
    """Weights, evaluation and predictions; and weights and the optimizer's state lie on the devices of their stages."""
    trainer = divided.here("mirrored", f"pipeline:{devices}", model=model, **options)
    same = {name: value for name, value in options.items() if name in ("accumulate_steps", "learning_rate", "ema")}
    assert_as_alone(trainer, model, **same)
    places = set()
    for variable in [*trainer.model.variables, *trainer.optimizer.variables[2:]]:
        (copy,) = variable.value.values
        assert copy.device.endswith(f":{place_of(variable)}"), variable.path
        places.add(place_of(variable))
    assert places == set(range(devices))


@pytest.mark.parametrize("options", [{}, {"recompute": "blocks"}, {"recompute": "second|third"}])
def test_stages_are_xla_programs(options):
    same = {"accumulate_steps": 2, "jit_compile": "true"}
    assert_as_alone(divided.here("mirrored", "pipeline:2", **same, **options), "dense", **same)


class Penalised(keras.Model):
    """Its loss has a penalty on the gradient of its outputs."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        del sample_weight
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = self(x, training=training)
        slope = tape.gradient(outputs, x)
        return tf.reduce_mean(tf.square(y_pred - tf.cast(y, tf.float32)[:, None])) + tf.reduce_mean(tf.square(slope))


@pytest.mark.parametrize(
    ("options", "named"),
    [({"mesh": "pipeline:2"}, "--mesh"), ({"jit_segments": 2, "jit_compile": True}, "--jit_segments")],
)
def test_a_gradient_within_the_loss_is_refused(options, named):
    def build() -> keras.Model:
        inputs = keras.Input((12,))
        return Penalised(inputs, keras.layers.Dense(1)(keras.layers.Dense(8, "tanh")(inputs)))

    trainer = tfpar.Trainer(build, keras.optimizers.SGD(0.1), global_batch_size=8, devices=2, verbose=0, **options)
    with pytest.raises(ConfigError, match=f"{named}.*: the loss contains a gradient of the model"):
        trainer.fit(*divided_models.data("dense"), steps=1)


def test_replicas_of_one_process():
    """They also hand on the mask of a batch's padding, and evaluate and predict."""
    options = {"accumulate_steps": 2}
    trainer = divided.here("mirrored", "data:2,pipeline:2", 4, **options)
    assert trainer.topology.replicas == 2
    assert_as_alone(trainer, "dense", **options)
    for variable in trainer.model.trainable_variables:
        devices = [copy.device[-1] for copy in variable.value.values]
        assert devices == [str(place_of(variable)), str(place_of(variable) + 2)]
        np.testing.assert_array_equal(*[copy.numpy() for copy in variable.value.values])


REPLICAS = {"mesh": "data:2,pipeline:2", "devices": 4}
RESNET = {"model": "synchronised_resnet", "learning_rate": 0.03}


@pytest.mark.parametrize(
    "options",
    [
        {"model": "synchronised", "accumulate_steps": 2},
        pytest.param({**RESNET, "accumulate_steps": 4}, marks=pytest.mark.proof),
        pytest.param(
            {**RESNET, "accumulate_steps": 2, "pipeline_schedule": "gpipe", "stages_per_device": 2, "steps": 10},
            marks=pytest.mark.proof,
        ),
    ],
    ids=str,
)
def test_replicas_synchronise_batch_statistics(options):
    """Each stage with the same stage of the other replica. The moving statistics have the same bits in both."""
    trainer = divided.here("mirrored", "data:2,pipeline:2", 4, **options)
    assert_as_alone(trainer, **{name: options[name] for name in options if "pipe" not in name and "stages" not in name})
    for variable in trainer.model.variables:
        np.testing.assert_array_equal(*[copy.numpy() for copy in variable.value.values], err_msg=variable.path)


def test_each_sum_of_statistics_is_a_call_of_two_devices():
    """They are the devices of the stage. Two calls with the same keys could mix."""
    trainer = divided.here("mirrored", "data:2,pipeline:2", 4, model="synchronised", steps=1, accumulate_steps=2)
    ((_, step),) = trainer.program._steps
    (function,) = step.run._list_all_concrete_functions()
    calls: dict[str, list[int]] = {}
    for device, key in sums_of_devices(function):
        calls.setdefault(device[-1], []).append(key)
    place = place_of(next(each for each in trainer.model.variables if "moving_mean" in each.path))
    assert calls.keys() == {str(place), str(place + 2)}
    own, other = calls.values()
    assert len(own) == len(set(own)) == 2 * 3  # two micro-batches: two sums forward, one backward
    assert own == other


@pytest.mark.proof
def test_one_replica_has_xla_programs_of_synchronised_layers():
    """There is nothing to sum."""
    same = {"accumulate_steps": 2, "jit_compile": "true"}
    assert_as_alone(divided.here("mirrored", "pipeline:2", model="synchronised", **same), "synchronised", **same)


@pytest.mark.parametrize(
    ("model", "options"), [("dense", {"accumulate_steps": 2}), ("language_model", {"recompute": "blocks"})]
)
def test_layers_of_stages_are_divided(model, options):
    """Each device has its part of the weights of its stage alone."""
    trainer = divided.here("mirrored", "pipeline:2,model:2", 4, model=model, **options)
    assert_as_alone(trainer, model, **{name: value for name, value in options.items() if name == "accumulate_steps"})
    held = dict.fromkeys(range(4), 0)
    for variable in trainer.model.trainable_variables:
        for program, copy in enumerate(variable.value.values):
            assert int(copy.device[-1]) == 2 * place_of(variable) + program, variable.path
            held[int(copy.device[-1])] += int(np.prod(copy.shape))
    assert max(held.values()) < 0.5 * whole_elements(trainer.model.trainable_variables)


def test_dropout_draws_the_numbers_of_one_device():
    def build():
        layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.5)]
        return keras.Sequential([keras.Input((12,)), *layers * 1, keras.layers.Dense(16), keras.layers.Dense(3)])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    alone, found = divided.weights_alone_and_on("pipeline:3", build, *divided_models.data("dense"), steps=6, loss=loss)
    for name, value in alone.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_what_one_mesh_saves_another_resumes(tmp_path):
    """The checkpoint, the digest and `model.keras` are of the whole model."""
    workdir = {"workdir": str(tmp_path / "run")}
    divided.here("mirrored", "pipeline:2", stop_after=7, **workdir)
    divided.here("mirrored", "model:2", stop_after=7, **workdir)
    divided.here("one_device", stop_after=7, **workdir)
    trainer = divided.here("mirrored", "pipeline:3", **workdir)
    assert_as_alone(trainer, "dense")
    assert_saved_whole(trainer, tmp_path / "run")


def test_the_users_own_model_gets_the_weights_back_and_may_be_frozen():
    keras.utils.set_random_seed(1)
    model = dense()
    config = tfpar.ExperimentConfig.from_flat_dict({**divided.COMMON, "strategy": "mirrored", "mesh": "pipeline:2"})
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    runtime = divided.runtime_of("mirrored", "pipeline:2")
    trainer = tfpar.Trainer(model, loss=loss, metrics=["accuracy"], config=config, runtime=runtime)
    x, y = divided_models.data("dense")
    trainer.fit(x, y, steps=divided.STEPS)
    np.testing.assert_allclose(model.predict(x[:21], verbose=0), alone("dense")[2][0], rtol=1e-3, atol=1e-4)
    before = model.layers[0].kernel.numpy(), model.layers[-1].kernel.numpy()
    model.layers[0].trainable = False
    trainer.fit(x, y, steps=2)
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), before[0])
    assert np.any(model.layers[-1].kernel.numpy() != before[1])


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, x):
        return self.inner(x)


def own():
    model = Own()
    model(np.zeros((1, 12), np.float32))
    return model


def normalized():
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(16))
    return keras.Sequential([keras.Input((12,)), layer, keras.layers.Dense(3)])


def synchronized():
    """By Keras' own layer."""
    norm = keras.layers.BatchNormalization(synchronized=True)
    return keras.Sequential([keras.Input((12,)), keras.layers.Dense(16), norm, keras.layers.Dense(3)])


@pytest.mark.parametrize(
    ("build", "options", "message"),
    [
        (own, {}, "'own' has its own call method, not a graph of layers"),
        (normalized, {}, "assigns .* in its forward pass .as SpectralNormalization does., which stages"),
        (synchronized, REPLICAS, r"a keras\..*, synchronises batch .* Use tfpar.models.BatchNormalization\(synchro"),
        (
            functools.partial(divided_models.batch_statistics, synchronized=True),
            {**REPLICAS, "jit_compile": "true"},
            "--jit_compile=true: the model synchronises batch statistics .* Use --jit_compile=auto",
        ),
        (
            functools.partial(divided_models.batch_statistics, synchronized=True),
            {**REPLICAS, "recompute": "blocks"},
            "--recompute=blocks: the model synchronises batch statistics",
        ),
        (dense, {"mesh": "pipeline:4", "stages_per_device": 3}, "has 9 layers .*, too few for 12 stages"),
        (dense, {"stages": "norm,third"}, "2 expressions for a pipeline of 2 stages. Give 1"),
        (dense, {"stages": "fifth"}, "'fifth' matches the path of no layer behind the first. The .*last"),
        (dense, {"stages": "("}, "is not a regular expression"),
    ],
)
def test_what_cannot_be_cut_is_refused(build, options, message):
    options = {"mesh": "pipeline:2", "devices": 0, **options}
    config = tfpar.ExperimentConfig.from_flat_dict({**divided.COMMON, "strategy": "mirrored", **options})
    runtime = divided.runtime_of("mirrored", options["mesh"], options["devices"])
    with pytest.raises(ConfigError, match=message):
        tfpar.Trainer(build, loss="mse", config=config, runtime=runtime).fit(
            np.zeros((16, 12), np.float32), np.zeros((16, 3), np.float32), steps=1
        )


def test_stages_begin_where_one_says():
    """A layer before a cut, and what it makes, belong to the stage before. A model inside begins once."""
    model = dense()
    inputs = keras.Input((12,))
    nested = steps_of(keras.Model(inputs, keras.layers.Dense(3, name="head")(model(keras.layers.Identity()(inputs)))))
    cuts = cut_at(f"{model.name},head", beginnings_of(nested), 3)
    first = [model.name, f"{model.name}/first"]
    assert [[step.name for step in nested[start:]][:2] for start in cuts] == [first, ["head"]]
    with pytest.raises(ConfigError, match=f"'{model.name}.' matches the path of no layer behind '{model.name}'"):
        cut_at(f"{model.name},{model.name}$", beginnings_of(nested), 3)
    graph = keras_calls.graph_of(model)
    steps = steps_of(graph)
    cuts = cut_at("norm, fourth", beginnings_of(steps), 3)
    stages = stages_of(graph, steps, cuts, 3)
    names = [[step.name.rpartition("/")[2] for step in stage.steps] for stage in stages]
    assert [each[0] for each in names] == ["first", "norm", "fourth"]
    assert [name for each in names for name in each] == [layer.name for layer in model.layers]
    assert [len(stage.given) for stage in stages] == [1, 1, 1]


def test_each_call_of_a_model_has_tensors_of_its_own():
    """Here one is called within another one, too: what the second call makes must not seem to come from the first."""
    inputs = keras.Input((4,))
    inner = keras.Sequential([inputs, keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)])
    outer = keras.Model(inputs, keras.layers.Dense(4)(inner(inputs)))
    x = keras.layers.Dense(4)(inputs)
    x = keras.layers.LayerNormalization()(keras.layers.Add()([x, outer(x)]))
    model = keras.Model(inputs, keras.layers.Add()([x, inner(x)]))
    steps = steps_of(model)
    made = [key for step in steps for key in step.makes]
    assert len({*made}) == len(made)
    given = np.ones((2, 4), np.float32)
    values = {id(model.inputs[0]): given}
    run_steps(steps, values, lambda operation: operation)
    np.testing.assert_allclose(values[id(model.outputs[0])], model(given), rtol=1e-6)


def test_weights_are_exchanged_together_with_those_of_the_same_holders():
    """Else a worker that shares weights with two others would have a bucket that neither of them has."""
    peers, placing = placed_over(3)
    variables = [keras.Variable(np.zeros(2, np.float32)) for _ in range(5)]
    for variable, ranks in zip(variables, [(0,), (0, 1), (0, 2), (0, 1), (1, 2)], strict=True):
        mark_held(variable, Held((2,), ranks, peers))
    exchanged = placing._exchanged_by_worker(variables)
    assert list(exchanged.indices) == [[0], [1, 3], [2]]
    assert (exchanged.parts, exchanged.part, exchanged.layer_parts) == (3, 0, 1)
    assert exchanged.place_names == [f"part_of_3x1_device_{place}" for place in range(3)]


def test_whole_weights_are_exchanged_apart_from_parts_that_other_workers_do_not_have():
    """The workers that divide a stage get the same result for whole weights only if those have their own bucket."""
    peers, placing = placed_over(2, layers=2)
    variables = [keras.Variable(np.zeros(2, np.float32)) for _ in range(3)]
    for number, variable in enumerate(variables):
        part = Split(0, 2) if number == 1 else None
        mark_held(variable, Held((2,), (0,), peers, part, placing._layer_peers))
        if part:
            split.mark(variable, part, placing._layer_peers)
    exchanged = placing._exchanged_by_worker(variables)
    assert list(exchanged.indices) == [[0, 2], [1]]
    assert (exchanged.parts, exchanged.part, exchanged.layer_parts) == (4, 0, 2)
    assert exchanged.place_names == ["part_of_2x2_device_0", "part_of_2x2_device_1"]


def placed_over(stages: int, layers: int = 1) -> tuple[types.SimpleNamespace, PipelinePlacing]:
    """The first of the workers of one device that share a replica: the workers of its pipeline, and its placing."""
    placing = PipelinePlacing.__new__(PipelinePlacing)
    shape = {"replica_workers": stages * layers, "pipeline_devices": stages, "model_devices": layers}
    placing.topology = Topology(name="multi_worker", workers=stages * layers, **shape)
    peers = types.SimpleNamespace(size=stages, rank=0)
    placing._worker, placing._devices = types.SimpleNamespace(peers=peers), PipelineDevices(["CPU:0"], 1, 1)
    placing._layer_peers = types.SimpleNamespace(size=layers, rank=0) if layers > 1 else None
    return peers, placing
