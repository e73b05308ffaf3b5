"""The other arguments of a trainer and of `fit`: the loss, how long it trains, the data, unknown and old names."""

from __future__ import annotations

import dataclasses

import tfpar
from tests.training.trainers import BATCH, EXAMPLES, SPARSE, model, source, trainer_of
from tfpar.config import ConfigError, ExperimentConfig, StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar.training.start import check_runtime, with_plan

import keras
import pytest


def test_a_missing_loss_is_named():
    trainer = trainer_of(loss=None)
    with pytest.raises(ConfigError, match="loss is missing: give a Keras loss"):
        trainer.fit(source(), steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 3, "epochs": 1.0}, r"give --steps or --epochs, one of them \(got steps=3, epochs=1\.0\)"),
        ({}, r"give --steps or --epochs, one of them"),
        ({"steps": 0}, "--steps=0: that is 0 steps; at least one"),
        ({"epochs": -1}, "--epochs=-1: that is -"),
        ({"epochs": 0.01}, r"--epochs=0\.01: that is 0 steps"),  # less than one
    ],
)
def test_steps_or_epochs_one_of_them(arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of().fit(source(), **arguments)


def test_steps_and_epochs_in_the_options_contradict():
    with pytest.raises(ConfigError, match="--steps=3 and --epochs=2"):
        trainer_of(steps=3, epochs=2.0)


@pytest.mark.parametrize(
    ("options", "arguments", "steps"),
    [
        ({"steps": 7}, {}, 7),
        ({"epochs": 1.0}, {}, EXAMPLES // BATCH),
        ({}, {"epochs": 1.5}, round(1.5 * EXAMPLES / BATCH)),
        ({"epochs": 4.0}, {"steps": 2}, 2),
        ({"steps": 9}, {"epochs": 0.2}, 1),
    ],
)
def test_how_long_it_trains(options, arguments, steps):
    summary = trainer_of(**options).fit(source(), **arguments)
    assert summary["steps"] == steps


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 2.5}, r"fit\(steps=2\.5\): give a whole number of steps"),
        ({"steps": "3"}, r"fit\(steps='3'\)"),
        ({"steps": True}, r"fit\(steps=True\)"),
        ({"epochs": float("nan")}, r"fit\(epochs=nan\): give a number of passes"),
        ({"epochs": "two"}, r"fit\(epochs='two'\)"),
    ],
)
def test_lengths_that_are_no_numbers_are_refused_by_name(arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of().fit(source(), **arguments)


def test_an_unknown_option_is_refused_with_suggestions():
    with pytest.raises(ConfigError, match="Did you mean 'clip_norm'"):
        trainer_of(clipnorm=1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 200}, r"clients=200 is an option of tfpar\.outer\.federated\.FederatedTrainer"),
        ({"method": "ewc"}, r"method='ewc' is an option of tfpar\.incremental\.IncrementalLearner"),
        ({"env_steps": 5}, r"env_steps=5 is an option of tfpar\.rl\.ReinforcementTrainer"),
    ],
)
def test_options_that_only_another_program_uses_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(**options)


def test_the_runtime_by_its_old_name():
    runtime = tfpar.start(ExperimentConfig.from_flat_dict({"strategy": "one_device"}))
    with pytest.warns(DeprecationWarning, match=r"Trainer\(layout=...\) is deprecated; use runtime="):
        assert trainer_of(layout=runtime).runtime is runtime


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": "model:2"}, "--mesh=model:2 does not agree .*, which runs with --mesh=data:2"),
        ({"mesh": "auto"}, "--mesh=auto .* --mesh=data:2, and a plan is made before the strategy starts"),
        ({"devices": 3}, "--devices=3 .* --devices=2"),
        ({"strategy": "one_device"}, "--strategy=one_device .* --strategy=mirrored. Give the same options"),
        ({"jit_segments": 2, "shard": "optimizer"}, "--jit_segments=2: segments do not work with --shard=optimizer"),
    ],
)
@pytest.mark.parametrize("given", ["config", "options"])
def test_options_that_contradict_the_runtime_are_refused(options, message, given):
    runtime = strategies.build(choose_topology(StrategyConfig(strategy="mirrored", devices=2)))
    if given == "config":
        options = {"config": ExperimentConfig.from_flat_dict(options)}
    with pytest.raises(ConfigError, match=message):
        tfpar.Trainer(model, loss=SPARSE, runtime=runtime, **options)


def test_a_model_is_built_in_the_precision_of_its_trainer_also_with_a_runtime():
    runtime = tfpar.initialize(ExperimentConfig.from_flat_dict({"strategy": "one_device"}))
    trainer = tfpar.Trainer(model, loss=SPARSE, runtime=runtime, precision="mixed_bfloat16")
    assert trainer.model.layers[0].compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"


@pytest.mark.parametrize("given", [lambda x: x, keras.layers.RandomFlip])
def test_an_augmentation_that_is_no_layer_is_refused(given):
    with pytest.raises(ConfigError, match=r"augmentation=.* is not a Keras layer\. Give one, e\.g\."):
        tfpar.Trainer(model, loss=SPARSE, augmentation=given)


def test_options_that_the_runtime_resolves_agree_with_it():
    runtime = strategies.build(choose_topology(StrategyConfig(strategy="mirrored", devices=2, mesh="model:2")))
    for asked in ({}, {"mesh": "data:1,model:2"}, {"strategy": "auto", "mesh": "data:1", "transport": "gloo"}):
        check_runtime(ExperimentConfig.from_flat_dict(asked), runtime.topology)
    planned = dataclasses.replace(runtime, options={"mesh": "model:2"})
    check_runtime(with_plan(ExperimentConfig.from_flat_dict({"mesh": "auto"}), planned.options), planned.topology)


def test_a_data_set_without_examples_is_refused():
    one = source(1)
    empty = dataclasses.replace(one, info=dataclasses.replace(one.info, num_examples=0))
    with pytest.raises(ConfigError, match=r"fit\(train=...\): arrays is empty"):
        trainer_of().fit(empty, steps=1)
    with pytest.raises(ConfigError, match=r"predict\(source=...\): arrays is empty. Give it at least one example"):
        trainer_of().predict(empty)
    with pytest.raises(ConfigError, match=r"evaluate\(source=...\): arrays is empty"):
        trainer_of().evaluate(empty)
