"""What is counted of models, against the whole-model count, the devices' own weights and the optimizer's variables."""

from __future__ import annotations

import dataclasses
import functools
import json
import math

from tests.integration.scripts import divided, divided_models
from tfpar import models
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.inputs.checks import check_divides
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.mesh import parse_mesh
from tfpar.parallel.planner.costs import distinct
from tfpar.parallel.planner.machine import OPS, Machine, Point, Rates
from tfpar.parallel.planner.plan import Plan
from tfpar.parallel.planner.search import predict_plan, search
from tfpar.process.exit_codes import LEFT_OUT
from tfpar.training.model.adapting import adapt_model
from tfpar.training.model.recompute import recompute_activations
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.planning.counting import count_model
from tfpar.training.planning.facts import Facts, find_facts
from tfpar.training.planning.measuring import Measured
from tfpar.training.planning.question import question_of
from tfpar.training.uneven_batches import train_input

import keras
import pytest
import tensorflow as tf

FLAGS = {"elementwise": True, "in_groups": True, "compiled": False, "compiles_update": True}

GRAPHS = ("language_model", "resnet", "branches")


@pytest.fixture(scope="module")
def counted():
    """Each model is counted once."""
    built = {name: divided_models.MODELS[name]() for name in GRAPHS}
    return {name: (model, count_model(model, [2])) for name, model in built.items()}


@pytest.mark.parametrize("name", GRAPHS)
def test_layers_add_up_to_the_model(counted, name):
    model, costs = counted[name]
    whole = models.describe(model)
    assert costs.flops == whole.forward_flops_per_example
    assert sum(layer.kept for layer in costs.whole) == whole.activation_bytes_per_example
    assert costs.parameters == sum(4 * variable.value.shape.num_elements() for variable in model.variables)
    assert len(costs.whole) == len(costs.cut_costs) == len(costs.crossing)


def test_the_model_is_as_before(counted):
    for model, _ in counted.values():
        for layer in keras_internals.all_layers(model):
            assert "call" not in vars(layer)
            if type(layer) is keras.layers.Dense:
                assert layer.input_spec is not None
        assert not keras_calls.runs_graph_otherwise(keras_calls.graph_of(model))


def test_a_model_axis_halves_what_it_divides(counted):
    """Blocks are divided, with two sums of activations in each pass; norms and residuals stay whole."""
    _, costs = counted["language_model"]
    whole, half = costs.layers[1], costs.layers[2]
    assert sum(layer.flops for layer in half) == costs.flops / 2
    for before, after in zip(whole, half, strict=True):
        if before.name.startswith("block"):
            assert 0.5 < after.kept / before.kept < 0.8
            assert after.sums == (4 * 8 * 32,) * 4  # float32 [8, 32], forward and backward, twice
            assert after.forward_sums == (4 * 8 * 32,) * 2
    assert sum(weight.size for weight in distinct(half)) < 0.6 * costs.parameters
    assert any(weight.divided for layer in half for weight in layer.weights)


def test_recomputed_blocks_keep_their_inputs(counted):
    _, costs = counted["language_model"]
    blocks = [layer for layer in costs.whole if layer.recomputed]
    assert [layer.name for layer in blocks] == ["block0", "block1"]
    assert all(layer.kept_recomputed == 4 * 8 * 32 for layer in blocks)
    _, stretches = counted["resnet"]
    kept, again = (sum(getattr(layer, name) for layer in stretches.whole) for name in ("kept", "kept_recomputed"))
    assert 0 < again < 0.5 * kept


def test_layers_that_gather_weights_keep_their_inputs(counted):
    _, costs = counted["language_model"]
    gathering = {layer.name: layer for layer in costs.whole if layer.gathers}
    assert sorted(gathering) == ["block0", "block1", "token_embedding"]
    assert all(gathering[name].kept_gathered == 4 * 8 * 32 for name in ("block0", "block1"))


def test_a_model_with_a_call_of_its_own_is_not_cut():
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(3)

        def call(self, inputs):
            return self.inner(inputs)

    model = Own()
    model(keras.Input((4,)))
    with pytest.raises(ConfigError, match=r"--mesh=auto: model .* has no symbolic inputs.* name a mesh"):
        count_model(model, [])
    with pytest.raises(ConfigError, match=r"--device_memory: model .* has no symbolic inputs.* leave out --device_mem"):
        count_model(model, [], option="--device_memory")


@pytest.mark.parametrize("size", [3, 5])
def test_layers_whose_parts_are_padded_are_counted(size):
    tokens = keras.Input((4,), dtype="int32")
    x = keras.layers.Dense(256, "relu")(keras.layers.Flatten()(keras.layers.Embedding(64, 16)(tokens)))
    costs = count_model(keras.Model(tokens, keras.layers.Dense(7)(x)), [size])
    assert costs.undivided == {}
    assert any(weight.divided for layer in costs.layers[size] for weight in layer.weights)


def test_the_reason_is_what_keras_says_below_its_head_line(monkeypatch):
    def fails(*_: object) -> None:
        raise ValueError("Exception encountered when calling Functional.call().\n\n\x1b[1mno such axis\x1b[0m\n\nmore")

    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(256), keras.layers.Dense(64)])
    monkeypatch.setattr("tfpar.training.planning.counting.divide_calls", fails)
    assert count_model(model, [2]).undivided[2].endswith("is divided in this way (no such axis).")


def test_divided_layers_may_read_tensors_of_unknown_length():
    x, mask = keras.Input((4, 64)), keras.Input((4,), dtype="bool")
    kept = keras.layers.Lambda(lambda both: tf.boolean_mask(*both), output_shape=(64,))([x, mask])
    costs = count_model(keras.Model([x, mask], keras.layers.Dense(128)(kept)), [2])
    assert costs.undivided == {}
    assert any(weight.divided for layer in costs.layers[2] for weight in layer.weights)


def test_mistakes_in_a_layout_are_raised():
    """Other layouts may fit some sizes of the axis."""
    x = keras.Input((4, 8))
    model = keras.Model(x, keras.layers.MultiHeadAttention(2, 4, name="attention")(x, x))
    for layout, said in (({"(": "gather"}, "is not a regular expression"), ({"gone": "gather"}, "matches no layer")):
        with pytest.raises(ConfigError, match=said):
            count_model(model, [2], layout)
    costs = count_model(model, [2, 3], {"attention": "heads"})
    assert [*costs.layers] == [1, 2]
    assert "3 devices cannot divide" in costs.undivided[3]


def test_what_cannot_be_divided_is_named():
    small = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    assert "no layer that can be divided over 2 devices" in count_model(small, [2]).undivided[2]


@pytest.mark.parametrize("name", GRAPHS)
def test_facts_travel_between_processes(counted, name):
    facts = Facts(costs=counted[name][1], **FLAGS)
    assert Facts.from_json(json.loads(json.dumps(dataclasses.asdict(facts)))) == facts
    rates = Rates(passes={OPS: [Point(1, 1e-9), Point(4, 2e-9, 4e-9)]}, updates={OPS: 1e10}, adding=1e9)
    measured = dataclasses.replace(facts, measured=Measured(rates, {1: 0.7}))
    assert Facts.from_json(json.loads(json.dumps(dataclasses.asdict(measured)))) == measured


@functools.cache
def facts_with(optimizer: str) -> Facts:
    config = ExperimentConfig.from_flat_dict({**divided.COMMON, "optimizer": optimizer})
    return find_facts(divided_models.MODELS["language_model"], config, [2])


@pytest.mark.parametrize(
    ("mesh", "devices", "options"),
    [
        ("pipeline:2", 2, {"optimizer": "muon", "accumulate_steps": 2}),
        ("pipeline:2,model:2", 4, {"accumulate_steps": 2}),
        ("data:2,model:2", 4, {"local_steps": 5}),
        ("model:2", 2, {"local_steps": 5, "outer_optimizer": "adam"}),
        ("pipeline:2", 2, {"accumulate_steps": 2, "local_steps": 5, "outer_optimizer": "sgd"}),
    ],
)
def test_predicted_bytes_are_those_that_devices_hold(mesh, devices, options):
    """Weights, and the optimizer's state to a few scalars; with local steps, those of the outer optimizer too."""
    options = {"optimizer": "adamw", **options}
    trainer = divided.made_here("mirrored", mesh, devices, model="language_model", **options)
    config = ExperimentConfig.from_flat_dict({**divided.COMMON, **options, "mesh": mesh})
    facts = facts_with(options["optimizer"])
    plan = Plan(
        mesh=parse_mesh(mesh, workers=1, devices=devices),
        micro_batches=config.train.accumulate_steps,
    )
    memory = predict_plan(question_of(config, facts, Machine(devices=devices)), plan).memory
    assert _fullest(trainer.model.variables) == memory.weights
    rounds = trainer.program.rounds
    outer = [*rounds.outer_variables, *rounds.outer_state] if rounds else []
    assert _fullest([*trainer.optimizer.variables, *outer]) == pytest.approx(memory.state, abs=64)


@pytest.mark.parametrize("options", [{"lora": "2"}, {"trainable": "second"}])
def test_only_what_is_trained_counts_as_trained(options):
    """A given model stays as it is."""
    config = ExperimentConfig.from_flat_dict({**divided.COMMON, **options})
    model = divided_models.dense()
    before = len(model.weights), len(model.trainable_variables)
    costs = find_facts(model, config, []).costs
    assert (len(model.weights), len(model.trainable_variables)) == before
    adapt_model(model, config.train)
    trained = [weight for weight in distinct(costs.whole) if weight.trainable]
    sizes = [4 * math.prod(weight.shape) for weight in model.trainable_variables]
    assert sorted(weight.size for weight in trained) == sorted(sizes)
    assert sum(weight.state for weight in distinct(costs.whole)) == 2 * sum(sizes)


def test_norms_that_an_optimizer_clips_by_are_known():
    spec = OptimizerSpec(keras.optimizers.AdamW(clipnorm=1.0), True)
    config = ExperimentConfig.from_flat_dict(divided.COMMON)
    assert find_facts(divided_models.dense, config, [], optimizer=spec).clips_norms
    assert not facts_with("adamw").clips_norms


@pytest.mark.parametrize(
    ("build", "where", "reason"),
    [
        (
            lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)]),
            "blocks",
            "no graph",
        ),
        (lambda: divided_models.batch_statistics(synchronized=True), "blocks", "synchronises batch statistics"),
        (divided_models.dense, "gone", "matches no layer"),
    ],
)
def test_recompute_that_a_run_refuses_is_not_planned(build, where, reason):
    config = ExperimentConfig.from_flat_dict({**divided.COMMON, "recompute": where})
    facts = find_facts(build, config, [])
    assert reason in facts.costs.kept_whole
    with pytest.raises(ConfigError, match=reason):
        recompute_activations(build(), where)
    with pytest.raises(ConfigError, match=rf"A run would refuse all of them.*{reason}"):
        _ = search(question_of(config, facts, Machine())).best


def test_activations_are_those_of_the_layers_that_are_computed_again():
    blocks = [
        keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "gelu", name="dense")], name=f"block{n}")
        for n in (0, 1)
    ]
    x = keras.Input((16,))
    model = keras.Model(x, keras.layers.Dense(3)(blocks[1](keras.layers.Dense(16)(blocks[0](x)))))
    costs = count_model(model, [], recomputing="block0/")
    assert costs.kept_whole == ""
    assert [layer.name for layer in costs.whole if layer.kept_recomputed < layer.kept] == ["block0/dense"]
    assert [layer.name for layer in costs.whole if layer.recomputed] == ["block0/dense"]


def test_batches_that_a_run_refuses_are_not_planned(counted, monkeypatch):
    """A run that is continued with fewer workers takes uneven ones."""
    options = {**divided.COMMON, "uneven_batches": False, "global_batch_size": 12}
    facts = Facts(costs=counted["language_model"][1], **FLAGS)

    def replicas(devices: int, **changes: int) -> set[int]:
        config = ExperimentConfig.from_flat_dict(options | changes)
        plans = [each.plan for each in search(question_of(config, facts, Machine(devices=devices))).fitting]
        for plan in plans:
            check_divides(train_input(config), plan.mesh.data, plan.micro_batches)
        return {plan.mesh.data for plan in plans}

    assert replicas(2) == {1, 2}
    assert replicas(2, accumulate_steps=4) == {1}
    assert 5 not in replicas(5)
    monkeypatch.setenv(LEFT_OUT, "1")
    assert 5 in replicas(5)


def test_plans_that_a_run_would_refuse(counted):
    """Fragments on a mesh of GPUs, whole tensors where nothing puts them together, shards of what is offloaded,
    and micro-batches in segments."""
    plans = {mesh: Plan(mesh=parse_mesh(mesh, workers=1, devices=4)) for mesh in ("data:4", "data:2,model:2")}

    def refused(flags, device_type="CPU", devices=4, **options) -> list[str]:
        config = ExperimentConfig.from_flat_dict({**divided.COMMON, **options})
        facts = Facts(costs=counted["language_model"][1], **FLAGS | flags)
        machine = Machine(devices=devices, workers=4 // devices)
        question = question_of(config, facts, machine, device_type=device_type)
        return [mesh for mesh, plan in plans.items() if question.refusal(plan)]

    fragments = {"local_steps": 8, "outer_fragments": 2}
    assert refused({}, **fragments) == []
    assert refused({}, "GPU", **fragments) == ["data:2,model:2"]
    assert refused({"elementwise": False, "joins_parts": True}) == []
    assert refused({"elementwise": False}) == ["data:2,model:2"]
    assert refused({}, devices=1, offload="optimizer") == ["data:2,model:2"]
    plans["micro-batches"] = dataclasses.replace(plans["data:4"], micro_batches=2)
    assert refused({}, jit_segments=2, jit_compile="auto") == ["data:2,model:2", "micro-batches"]
    plans["shards"] = dataclasses.replace(plans["data:4"], shard="optimizer")
    assert refused({}, devices=1, offload="optimizer") == ["data:2,model:2", "shards"]
    plans["parts in shards"] = dataclasses.replace(plans["data:2,model:2"], shard="gradients")
    plans["weights"] = dataclasses.replace(plans["data:4"], shard="weights")
    plans["parts in shards of weights"] = dataclasses.replace(plans["data:2,model:2"], shard="weights")
    assert refused({"elementwise": False, "joins_parts": True}, optimizer="lamb") == ["parts in shards of weights"]
    assert refused({"synchronizes": True}) == ["weights", "parts in shards of weights"]
    assert refused({"clips_norms": True}) == [name for name in plans if name not in ("data:4", "micro-batches")]
    assert refused({"has_layout": True}) == ["data:4", "micro-batches", "shards", "weights"]
    plans["stages"] = Plan(mesh=parse_mesh("data:2,pipeline:2", workers=1, devices=4))
    assert refused({"own_objective": True}) == []
    assert refused({"own_objective": True}, devices=1) == ["stages"]


@pytest.mark.parametrize(
    ("width", "refused"), [(64, ["optimizer", "gradients", "weights"]), (4, ["optimizer", "gradients"])]
)
def test_a_model_that_assigns_weights_is_counted_and_left_whole(width, refused):
    """`--shard=weights` calls only layers again whose weights are large enough to be sharded."""
    normed = keras.layers.SpectralNormalization(keras.layers.Dense(width), name="normed")
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64), normed, keras.layers.Dense(4)])
    costs = count_model(model, [2])
    assert [layer.name for layer in costs.whole if layer.assigns] == [f"{model.name}/normed"]
    assert not any("call" in vars(layer) for layer in keras_internals.all_layers(model))
    facts = Facts(costs=costs, **FLAGS)
    question = question_of(ExperimentConfig.from_flat_dict(divided.COMMON), facts, Machine(devices=4))
    plan = Plan(mesh=parse_mesh("data:4", workers=1, devices=4))
    assert question.refusal(plan) == ""
    reasons = {shard: question.refusal(dataclasses.replace(plan, shard=shard)) for shard in question.shards}
    assert [shard for shard, reason in reasons.items() if "normed assigns its trainable weights" in reason] == refused
    for mesh in ("data:2,model:2", "data:2,pipeline:2"):
        assert "assigns" in question.refusal(Plan(mesh=parse_mesh(mesh, workers=1, devices=4)))


def test_blocks_that_assign_weights_are_not_counted_as_recomputed():
    class Block(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.normed = keras.layers.SpectralNormalization(keras.layers.Dense(16))
            self.other = keras.layers.Dense(16)

        def call(self, inputs):
            return self.other(self.normed(inputs))

    model = keras.Sequential([keras.Input((16,)), Block(), Block()])
    assert not any(layer.recomputed for layer in count_model(model, []).whole)


def _fullest(variables) -> int:
    """Bytes of the device that holds most."""
    held: dict[str, int] = {}
    for variable in variables:
        for copy in getattr(variable.value, "values", [variable.value]):
            held[copy.device] = held.get(copy.device, 0) + copy.shape.num_elements() * copy.dtype.size
    return max(held.values())


def test_the_inputs_of_an_example_are_counted():
    """Of an unknown dimension, the assumed length."""
    pixels, tokens = keras.Input([4, 4, 3]), keras.Input([None], dtype="int32")
    embedded = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(8, 2)(tokens))
    model = keras.Model([pixels, tokens], keras.layers.Concatenate()([keras.layers.Flatten()(pixels), embedded]))
    assert count_model(model, [], length=10).example == 4 * (4 * 4 * 3 + 10)
