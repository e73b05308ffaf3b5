"""Trainer: what it accepts and refuses, and that a run goes on where it was stopped, bit for bit."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pathlib
from collections.abc import Callable

import tfpar
from tfpar import inputs
from tfpar.checkpoint import checkpointer, workdir_lock
from tfpar.config import ConfigError, ExperimentConfig

import keras
import numpy as np
import pytest
import tensorflow as tf

EXAMPLES, BATCH, CLASSES = 40, 8, 3
SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def source(count: int = EXAMPLES, seed: int = 0) -> inputs.Source:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 6)).astype(np.float32)
    return inputs.from_arrays(x, (np.abs(x).sum(axis=1) % CLASSES).astype(np.int32), num_classes=CLASSES)


def model(**options) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu", **options),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(CLASSES),
        ],
        name="net",
    )


def trainer_of(builder=model, optimizer=None, loss=SPARSE, **options) -> tfpar.Trainer:
    """A trainer as the first one of a process: Keras counts names (dense, dense_1, ...) over all models."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    return another_trainer(builder, optimizer, loss, **options)


def another_trainer(builder=model, optimizer=None, loss=SPARSE, **options) -> tfpar.Trainer:
    return tfpar.Trainer(
        builder,
        optimizer,
        loss,
        [keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
        **{
            "strategy": "one_device",
            "global_batch_size": BATCH,
            "uneven_batches": True,
            "jit_compile": False,  # these models train for a few steps; XLA is what other tests are about
            **options,
        },
    )


def everything(trainer: tfpar.Trainer) -> dict[str, np.ndarray]:
    return {name: np.array(variable.numpy()) for name, variable in trainer.program.checkpoint_variables().items()}


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)


def summary_of(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "summary.json").read_text(), parse_constant=lambda word: pytest.fail(f"JSON: {word}"))


# Models


def subclassed() -> keras.Model:
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(CLASSES)

        def call(self, x):
            return self.dense(x)

        def get_config(self):
            raise NotImplementedError("no configuration")

    made = Net()
    made(np.zeros((1, 6), np.float32))
    return made


def functional() -> keras.Model:
    x = keras.Input((6,))
    return keras.Model(x, keras.layers.Dense(CLASSES)(keras.layers.Dense(4, activation="tanh")(x)))


def deferred() -> keras.Model:
    made = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(CLASSES)])
    made(np.zeros((1, 6), np.float32))
    return made


@pytest.mark.parametrize("builder", [model, functional, deferred])
def test_a_model_built_outside_the_strategy_is_rebuilt_under_it_with_its_weights(builder):
    outside, replicas = builder(), 3
    generator = np.random.default_rng(5)
    outside.set_weights([generator.normal(size=value.shape) for value in outside.get_weights()])
    trainer = trainer_of(outside, strategy="mirrored", devices=replicas)
    assert trainer.model is not outside
    assert type(trainer.model) is type(outside)
    for theirs, ours in zip(outside.weights, trainer.model.weights, strict=True):
        assert trainer.strategy.extended.variable_created_in_scope(ours.value)
        copies = trainer.strategy.experimental_local_results(ours.value)
        assert len(copies) == replicas
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), theirs.numpy(), err_msg=ours.path)


def test_a_model_built_under_the_strategy_is_taken_as_it_is():
    runtime = tfpar.initialize(ExperimentConfig.from_flat_dict({"strategy": "mirrored", "devices": 2}))
    with runtime.strategy.scope():
        inside = model()
    assert trainer_of(inside, runtime=runtime, strategy="mirrored", devices=2).model is inside


def docs_trainer(workdir: str, optimizer: Callable[[], keras.optimizers.Optimizer | str], **options) -> tfpar.Trainer:
    """As docs/strategies.md says for objects: first the strategy, from a configuration of its own."""
    config = ExperimentConfig.from_flat_dict({"global_batch_size": BATCH, "jit_compile": "false", "workdir": workdir})
    runtime = tfpar.initialize(config)
    return tfpar.Trainer(model(), optimizer(), SPARSE, ["accuracy"], config=config, runtime=runtime, **options)


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1.0, "optimizer": "sgd"}, {"config": None}])
def test_a_run_with_objects_and_a_runtime_resumes(tmp_path, options):
    options = dict(options)
    kind = options.pop("optimizer", None)
    optimizer = (lambda: kind) if kind else (lambda: keras.optimizers.SGD(0.1))
    if "config" in options:  # started without a configuration, which records the model and the data as custom
        first = trainer_of(model(), optimizer(), workdir=str(tmp_path), stop_after=3)
        options = {}
    else:
        first = docs_trainer(str(tmp_path), optimizer, stop_after=3, **options)
    assert first.fit(source(), steps=6)["steps"] == 3
    assert docs_trainer(str(tmp_path), optimizer, **options).fit(source(), steps=6)["steps"] == 6


def test_other_arguments_than_those_of_the_saved_run_are_refused(tmp_path):
    docs_trainer(str(tmp_path), lambda: "sgd", clip_norm=1.0).fit(source(), steps=2)
    with pytest.raises(ConfigError, match=r"--clip_norm: 1\.0 -> 2\.0\. "):
        docs_trainer(str(tmp_path), lambda: "sgd", clip_norm=2.0)
    with pytest.raises(ConfigError, match=r"--optimizer: 'sgd' -> 'custom'"):
        docs_trainer(str(tmp_path), keras.optimizers.SGD, clip_norm=1.0)


def test_the_runtime_by_its_old_name():
    runtime = tfpar.start(ExperimentConfig.from_flat_dict({"strategy": "one_device"}))
    with pytest.warns(DeprecationWarning, match=r"Trainer\(layout=...\) is deprecated; use runtime="):
        assert trainer_of(layout=runtime).runtime is runtime


@pytest.mark.parametrize(
    ("builder", "message"),
    [
        (lambda: keras.Sequential([keras.layers.Dense(3)]), "it must return a built Keras model"),
        (lambda: "convnet", "it must return a built Keras model"),
        (keras.Sequential([keras.layers.Dense(3)]), "the model has no weights yet"),
        (keras.Sequential([keras.Input((2,)), keras.layers.ReLU()]), "the model has no weights yet"),
        (subclassed, None),
    ],
)
def test_models_that_cannot_be_used(builder, message):
    options = {}
    if message is None:  # a model without a configuration, built outside
        builder, message = builder(), r"cannot be rebuilt under it \(no configuration\).*Trainer\(lambda"
        options = {"strategy": "mirrored", "devices": 2}
    with pytest.raises(ConfigError, match=message):
        trainer_of(builder, **options)


# Optimizers


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "precision='mixed_float16'"),
        (lambda: keras.optimizers.SGD(loss_scale_factor=8.0), r"loss_scale_factor=8\.0"),
        (lambda: "adamm", r"--optimizer='adamm' is not known\. Did you mean 'adam'"),
        (lambda: keras.optimizers.SGD, "is not a Keras 3 optimizer"),  # the class itself
    ],
)
def test_optimizers_that_are_refused(optimizer, message):
    with pytest.raises(ConfigError, match=message):
        trainer_of(optimizer=optimizer())


def linear() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])


def descend(rates: list[float]) -> np.ndarray:
    """Weights of `linear` after full-batch gradient descent on its data, in NumPy."""
    x, y = line()
    weight = np.ones((2, 1))
    for rate in rates:
        weight = weight - rate * 2 * x.T @ (x @ weight - y) / len(x)
    return weight


def line() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    return generator.normal(size=(BATCH, 2)).astype(np.float32), generator.normal(size=(BATCH, 1)).astype(np.float32)


def squared_error(y, outputs):
    return tf.square(outputs - y)


def fit_line(optimizer, steps: int, **options) -> np.ndarray:
    trainer = tfpar.Trainer(
        linear, optimizer, squared_error, strategy="one_device", global_batch_size=BATCH, jit_compile=False, **options
    )
    trainer.fit(inputs.from_arrays(*line()), steps=steps)
    return trainer.model.get_weights()[0]


def test_an_optimizer_object_keeps_its_own_schedule():
    decay = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)
    expected = descend([0.1 * 0.5 ** (step / 2) for step in range(6)])
    np.testing.assert_allclose(fit_line(keras.optimizers.SGD(decay), 6), expected, rtol=1e-5)


def test_an_optimizer_object_keeps_its_own_learning_rate():
    np.testing.assert_allclose(fit_line(keras.optimizers.SGD(0.07), 5), descend([0.07] * 5), rtol=1e-5)


@pytest.mark.parametrize("option", ["learning_rate", "warmup_steps", "weight_decay", "ema"])
def test_options_without_effect_on_an_optimizer_object_are_refused(option):
    value = 3 if option == "warmup_steps" else 0.5
    with pytest.raises(ConfigError, match=f"{option}: without effect on the SGD object"):
        trainer_of(optimizer=keras.optimizers.SGD(0.07), **{option: value})


def test_a_schedule_that_is_asked_for_takes_the_place_of_the_optimizers_rate():
    found = fit_line(keras.optimizers.SGD(0.9), 4, schedule="constant", learning_rate=0.02)
    np.testing.assert_allclose(found, descend([0.02] * 4), rtol=1e-5)


def test_a_schedule_beside_an_optimizer_object_scales_its_rate():
    options = {"schedule": "step", "schedule_args": "milestones=[2],factor=0.5"}
    found = fit_line(keras.optimizers.SGD(0.1), 4, **options)
    np.testing.assert_allclose(found, descend([0.1, 0.1, 0.05, 0.05]), rtol=1e-5)
    decaying = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5))
    with pytest.raises(ConfigError, match="the SGD object given as optimizer has a learning-rate schedule of its own"):
        trainer_of(optimizer=decaying, **options)


def test_an_optimizer_by_name_follows_the_options():
    options = {"schedule": "step", "schedule_args": "milestones=[2],factor=0.5", "learning_rate": 0.1}
    found = fit_line("sgd", 4, optimizer_args="momentum=0", **options)
    np.testing.assert_allclose(found, descend([0.1, 0.1, 0.05, 0.05]), rtol=1e-5)


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_optimizer_made_outside_gets_its_slots_under_the_strategy(replicas):
    given = keras.optimizers.AdamW(0.01, weight_decay=0.1, beta_1=0.7)
    given.exclude_from_weight_decay(var_names=["bias"])
    trainer = trainer_of(optimizer=given, strategy="mirrored" if replicas > 1 else "one_device", devices=replicas)
    ours = trainer.optimizer
    assert ours.get_config() == given.get_config()
    kernel, bias = trainer.model.trainable_variables[:2]
    assert ours._use_weight_decay(kernel)
    assert not ours._use_weight_decay(bias)
    for variable in ours.variables:
        assert len(trainer.strategy.experimental_local_results(variable.value)) == replicas


# What does not fit together


def test_a_missing_loss_is_named():
    trainer = trainer_of(loss=None)
    with pytest.raises(ConfigError, match="loss is missing: give a Keras loss"):
        trainer.fit(source(), steps=1)


@pytest.mark.parametrize(("precision", "found"), [("mixed_bfloat16", "float32"), ("float32", "bfloat16")])
def test_a_model_of_another_precision_is_refused(precision, found):
    built = model(dtype=keras.DTypePolicy("mixed_bfloat16" if found == "bfloat16" else "float32"))
    plain = keras.Sequential([layer for layer in built.layers if isinstance(layer, keras.layers.Dense)][:1])
    plain.build((None, 6))
    with pytest.raises(ConfigError, match=rf"--precision={precision}: the model was built to compute in {found}"):
        trainer_of(plain, precision=precision)


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, {"steps": 3, "epochs": 1.0}),
        ({}, {}),
        ({}, {"steps": 0}),
        ({}, {"epochs": 0.0}),
        ({}, {"epochs": 0.01}),  # less than one step
    ],
)
def test_steps_or_epochs_one_of_them(options, arguments):
    trainer = trainer_of(**options)
    with pytest.raises(ConfigError, match=r"--steps.*--epochs"):
        trainer.fit(source(), **arguments)


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


def test_a_data_set_without_examples_is_refused():
    one = source(1)
    empty = dataclasses.replace(one, info=dataclasses.replace(one.info, num_examples=0))
    with pytest.raises(ConfigError, match=r"fit\(train=...\): arrays is empty"):
        trainer_of().fit(empty, steps=1)
    with pytest.raises(ConfigError, match=r"predict\(source=...\): arrays is empty. Give it at least one example"):
        trainer_of().predict(empty)
    with pytest.raises(ConfigError, match=r"evaluate\(source=...\): arrays is empty"):
        trainer_of().evaluate(empty)


# A run that is stopped and goes on

TOTAL = 14
EVALUATION = 2


@dataclasses.dataclass(frozen=True)
class Resumed:
    """A run that is stopped.

    Attributes:
      options: What it trains with.
      stops: Steps after which each start but the last one stops; 5 steps are an epoch.
      moved: Whether the state that must survive the stop is no longer the initial one at the end; else the comparison
        would compare constants.
    """

    options: dict
    stops: tuple[int, ...]
    moved: Callable[[tfpar.Trainer, dict], bool]


RESUMED = {
    # No evaluation is good enough: the rate is halved at every second one after the first.
    "plateau": Resumed(
        {
            "optimizer": "sgd",
            "schedule": "plateau",
            "schedule_args": "factor=0.5,patience=2,min_delta=100",
            "warmup_steps": 3,
            "learning_rate": 0.2,
        },
        (7, 4),
        lambda _, run: run["plateau"]["multiplier"] == 0.5**3,
    ),
    "loss scale": Resumed(
        {
            "optimizer": "adamw",
            "precision": "mixed_float16",
            "initial_loss_scale": 2.0**22,  # overflows at first
            "loss_scale_growth_steps": 3,
        },
        (7,),
        lambda _, run: (
            run["skipped"] > 0 and run["loss_scale"]["good_steps"] > 0 and run["loss_scale"]["scale"] < 2**22
        ),
    ),
    "moving averages": Resumed(
        {"optimizer": "adam", "schedule": "one_cycle", "ema": 0.8, "accumulate_steps": 2},
        (7,),
        lambda trainer, _: all(
            np.abs(average.numpy() - own.numpy()).max() > 1e-5
            for average, own in zip(trainer.program.eval_weights(), trainer.model.trainable_variables, strict=True)
        ),
    ),
    "xla": Resumed(
        {"optimizer": "adam", "schedule": "one_cycle", "accumulate_steps": 2, "jit_compile": True},
        (7,),
        lambda trainer, _: trainer.optimizer.iterations.numpy() == TOTAL,
    ),
    "mirrored": Resumed(
        {"optimizer": "lamb", "strategy": "mirrored", "devices": 2},
        (7,),
        lambda trainer, _: trainer.optimizer.iterations.numpy() == TOTAL,
    ),
}


@pytest.mark.parametrize("case", RESUMED.values(), ids=RESUMED)
def test_stopped_and_resumed_gives_the_bits_of_a_run_that_was_not(tmp_path, capsys, case):
    def run(name: str, **more) -> tuple[tfpar.Trainer, dict]:
        trainer = trainer_of(workdir=str(tmp_path / name), eval_every=EVALUATION, **case.options, **more)
        return trainer, trainer.fit(source(), steps=TOTAL, validation=source(11, 9))

    whole, summary = run("whole")
    done = 0
    for stop_after in case.stops:
        _, stopped = run("parts", stop_after=stop_after)
        done += stop_after
        assert f"stopped after step {done} of {TOTAL}" in capsys.readouterr().out
        assert stopped["steps"] == done
        assert not (tmp_path / "parts" / "summary.json").exists()
    parts, resumed = run("parts")
    assert f"resumed from step {done} (epoch {done / 5:.2f})" in capsys.readouterr().out

    assert_same_bits(everything(whole), everything(parts))
    for name in ("steps", "eval", "params_sha256", "skipped_steps"):
        assert resumed[name] == summary[name], name
    assert summary_of(tmp_path / "parts") == resumed
    last = [checkpointer.Checkpointer(tmp_path / name).latest() for name in ("whole", "parts")]
    assert last[0].step == last[1].step == TOTAL
    assert last[0].run == last[1].run
    assert case.moved(parts, last[1].run)


def test_resuming_does_not_depend_on_how_often_checkpoints_were_written(tmp_path):
    def run(name: str, **more) -> tfpar.Trainer:
        trainer = trainer_of(workdir=str(tmp_path / name), **more)
        trainer.fit(source(), steps=9)
        return trainer

    whole = run("whole", checkpoint_every=4)
    run("parts", checkpoint_every=3, stop_after=4, steps_per_loop=2)
    assert checkpointer.Checkpointer(tmp_path / "parts").steps() == [3, 4]
    assert_same_bits(everything(whole), everything(run("parts", checkpoint_every=5)))


def test_a_longer_run_goes_on_from_a_finished_one(tmp_path, capsys):
    options = {"schedule": "constant", "optimizer": "adam"}
    whole = trainer_of(**options)
    whole.fit(source(), steps=9)
    trainer_of(workdir=str(tmp_path), **options).fit(source(), steps=4)
    longer = trainer_of(workdir=str(tmp_path), **options)
    longer.fit(source(), steps=9)
    assert "resumed from step 4" in capsys.readouterr().out
    assert summary_of(tmp_path)["steps"] == 9
    assert_same_bits(everything(whole), everything(longer))


def test_other_data_in_the_same_workdir_is_refused(tmp_path):
    trainer_of(workdir=str(tmp_path)).fit(source(), steps=2)
    before = {
        path: path.stat().st_mtime_ns
        for path in tmp_path.rglob("*")
        if path.is_file() and "tfevents" not in path.name and path.name != workdir_lock.NAME
    }
    with pytest.raises(ConfigError, match=r"--dataset=.*the data set is not the one the run in .* was trained on"):
        trainer_of(workdir=str(tmp_path)).fit(source(EXAMPLES + 1), steps=4)
    after = {path: path.stat().st_mtime_ns for path in before}
    assert after == before


def test_another_configuration_in_the_same_workdir_is_refused(tmp_path):
    trainer_of(workdir=str(tmp_path), clip_norm=1.0).fit(source(), steps=2)
    with pytest.raises(ConfigError, match=r"--clip_norm: 1\.0 -> 2\.0"):
        trainer_of(workdir=str(tmp_path), clip_norm=2.0)


def test_another_model_in_the_same_workdir_is_refused(tmp_path):
    trainer_of(workdir=str(tmp_path)).fit(source(), steps=2)

    def wider() -> keras.Model:
        return keras.Sequential([keras.Input((6,)), keras.layers.Dense(CLASSES, name="other")], name="net")

    trainer = trainer_of(wider, workdir=str(tmp_path))
    before = everything(trainer)
    with pytest.raises(ConfigError, match=r"does not fit this model and optimizer: missing model/net/other/kernel"):
        trainer.fit(source(), steps=4)
    assert_same_bits(before, everything(trainer))


def test_a_second_trainer_of_the_same_program_resumes_too(tmp_path, capsys):
    """Keras counts names over all models of a process (sequential_1, dense_1, adam_1); it is still the same run."""

    def unnamed() -> keras.Model:
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.1), keras.layers.Dense(CLASSES)])

    options = {"schedule": "constant", "optimizer": "adam", "steps": 6}
    whole = another_trainer(unnamed, **options)
    whole.fit(source())
    another_trainer(unnamed, workdir=str(tmp_path), stop_after=2, **options).fit(source())
    resumed = another_trainer(unnamed, workdir=str(tmp_path), **options)
    resumed.fit(source())
    assert "resumed from step 2" in capsys.readouterr().out
    for one, other in zip(
        whole.program.checkpoint_variables().values(), resumed.program.checkpoint_variables().values(), strict=True
    ):
        np.testing.assert_array_equal(one.numpy(), other.numpy(), err_msg=one.path)


# Several fits in one process


def test_two_fits_of_one_trainer_without_a_workdir_train_on():
    trainer = trainer_of(schedule="constant", optimizer="sgd")
    first = trainer.fit(source(), steps=30, validation=source())
    middle = everything(trainer)
    second = trainer.fit(source(), steps=30, validation=source())
    assert first["steps"] == second["steps"] == 30
    assert second["eval"]["loss"] < first["eval"]["loss"]
    assert trainer.optimizer.iterations.numpy() == 60
    assert any(not np.array_equal(middle[name], value) for name, value in everything(trainer).items())


def test_two_fits_of_one_trainer_with_a_workdir_are_one_run(tmp_path, capsys):
    options = {"schedule": "constant", "optimizer": "adam"}
    whole = trainer_of(**options)
    whole.fit(source(), steps=7)
    trainer = trainer_of(workdir=str(tmp_path), **options)
    trainer.fit(source(), steps=3)
    trainer.fit(source(), steps=7)
    assert "resumed from step 3" in capsys.readouterr().out
    assert_same_bits(everything(whole), everything(trainer))


def test_two_trainers_do_not_share_anything():
    first = trainer_of()
    first.fit(source(), steps=3)
    kept = everything(first)
    trainer_of(strategy="mirrored", devices=2).fit(source(), steps=3)
    assert_same_bits(kept, everything(first))
    assert math.isfinite(first.evaluate(source())["loss"])


def test_the_training_loss_does_not_depend_on_the_steps_per_call():
    """Calls from Python are as long as the machine is fast; the results must not be."""
    losses = [trainer_of(steps_per_loop=steps).fit(source(), epochs=1)["train_loss"] for steps in (2, 5)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("eval_every", [0, 1000])
def test_the_training_loss_is_that_of_the_last_epoch_also_after_resuming_with_more(tmp_path, eval_every):
    """As Keras' History has it; an interval of evaluations that never comes does not matter."""

    def run(workdir: pathlib.Path, epochs: float, *callbacks: keras.callbacks.Callback) -> float:
        trainer = trainer_of(workdir=str(workdir), eval_every=eval_every, schedule="constant", learning_rate=0.02)
        return trainer.fit(source(), epochs=epochs, callbacks=callbacks)["train_loss"]

    history = keras.callbacks.History()
    whole = run(tmp_path / "whole", 3.0, history)
    assert whole == pytest.approx(history.history["loss"][-1], rel=1e-6)
    assert whole < 0.95 * history.history["loss"][0]
    run(tmp_path / "resumed", 1.4)
    assert run(tmp_path / "resumed", 3.0) == whole
    run(tmp_path / "again", 2.4)  # in the middle of the last epoch
    assert run(tmp_path / "again", 3.0) == whole


TIMES = {"examples_per_second", "step_ms_p50", "step_ms_p95", "input_wait_fraction", "mfu"}


def test_a_finished_run_says_so_and_writes_the_same_summary(tmp_path, capsys):
    def run() -> dict:
        trainer = trainer_of(workdir=str(tmp_path), eval_every=2, ema=0.5)
        return trainer.fit(source(), steps=5, validation=source(11, 9))

    first = run()
    assert summary_of(tmp_path) == first
    saved = keras.saving.load_model(tmp_path / "model.keras").get_weights()
    (tmp_path / "model.keras").unlink()
    capsys.readouterr()
    events = {path: path.stat().st_mtime_ns for path in (tmp_path / "train").rglob("*") if path.is_file()}
    again = run()
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "train").rglob("*") if p.is_file()} == events
    assert "finished" in capsys.readouterr().out
    assert summary_of(tmp_path) == again
    for name, value in first.items():
        # Nothing was timed this time: the figures of before or none, but not zero.
        assert again[name] == value or (name in TIMES and again[name] is None), name
    for one, other in zip(saved, keras.saving.load_model(tmp_path / "model.keras").get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_fits_with_one_schedule_share_one_compiled_step():
    trainer = trainer_of(schedule="constant")
    for steps in (2, 3, 3):
        trainer.fit(source(), steps=steps)
    assert trainer.program.step(trainer.program.schedule(1)).run.experimental_get_tracing_count() == 1


def test_several_short_runs_of_a_program_are_not_warned_of_retracing():
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    try:
        for steps in range(1, 7):
            trainer_of(schedule="cosine").fit(source(), steps=steps)
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [text for text in warnings if "retracing" in text]


@pytest.mark.parametrize("optimizer", [None, "lion", keras.optimizers.SGD])
def test_a_program_records_what_it_gave(tmp_path, optimizer):
    made = optimizer(0.01) if isinstance(optimizer, type) else optimizer
    trainer_of(optimizer=made, workdir=tmp_path).fit(source(), steps=1)
    saved = checkpointer.saved_config(tmp_path)
    assert (saved["model"], saved["dataset"]) == ("custom", "custom")
    assert saved["optimizer"] == {None: "adamw", "lion": "lion"}.get(optimizer, "custom")
    with pytest.raises(ConfigError, match="--optimizer: "):
        trainer_of(optimizer="sgd", workdir=tmp_path)


def test_a_run_goes_on_with_the_optimizer_it_had(tmp_path):
    def run(optimizer: keras.optimizers.Optimizer, steps: int, **options) -> dict:
        return trainer_of(optimizer=optimizer, workdir=tmp_path, **options).fit(source(), steps=steps)

    run(keras.optimizers.Adam(0.01), 2)
    with pytest.raises(ConfigError, match=r"has another one \(learning_rate 0\.0\d+ -> .*beta_1 0\.9 -> 0\.5"):
        run(keras.optimizers.Adam(0.1, beta_1=0.5), 4)
    keras.optimizers.Adam(0.3)  # Keras counts names
    assert run(keras.optimizers.Adam(0.01), 4)["steps"] == 4


def test_the_progress_line_shows_metrics_over_its_interval(capsys, monkeypatch):
    """With a single line at the end, the accuracy of an epoch does not depend on the steps per call."""
    monkeypatch.setattr("tfpar.monitor.progress.Progress.due", lambda self: False)
    shown = []
    for steps_per_loop in (1, EXAMPLES // BATCH):
        trainer_of(optimizer="adam", steps_per_loop=steps_per_loop).fit(source(), epochs=1)
        (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("step 5/5")]
        shown.append(line.split("accuracy")[1].split()[0])
    assert shown[0] == shown[1]


def convolutional(layer: keras.layers.Layer | None = None) -> keras.Model:
    layers = [keras.layers.Reshape((3, 2, 1)), layer or keras.layers.Conv2D(4, 2), keras.layers.Flatten()]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])


class OwnConvolution(keras.layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(2, 2, shape[-1], 4))

    def call(self, x):
        return tf.nn.conv2d(x, self.kernel, strides=1, padding="VALID")

    def compute_output_shape(self, shape):
        return (shape[0], shape[1] - 1, shape[2] - 1, 4)


def own_layers(layer: keras.layers.Layer) -> keras.Model:
    """A model without symbolic inputs, so that its cost is unknown before it runs."""

    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.inside = convolutional(layer)

        def call(self, x):
            return self.inside(x)

    made = Net()
    made(np.zeros((1, 6), np.float32))
    return made


@pytest.mark.parametrize(
    ("builder", "jit_compile", "left_out"),
    [
        (model, "auto", False),
        (convolutional, "auto", True),
        (convolutional, "true", False),
        (lambda: convolutional(OwnConvolution()), "auto", True),
        (lambda: convolutional(keras.layers.Flatten()), "auto", False),
        (lambda: own_layers(keras.layers.Conv2D(4, 2)), "auto", True),
        (lambda: own_layers(keras.layers.Flatten()), "auto", False),
    ],
)
def test_auto_leaves_xla_out_for_convolutions_on_cpus(builder, jit_compile, left_out):
    trainer = trainer_of(builder, jit_compile=jit_compile)
    assert trainer.jit_compile == (not left_out)
    assert ("convolutions on CPUs" in trainer.program.xla_disabled_reason) == (left_out or jit_compile == "true")


def test_weights_of_several_dtypes():
    def mixed():
        return keras.Sequential(
            [keras.Input((6,)), keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(3, dtype="float32")]
        )

    assert np.isfinite(trainer_of(mixed).fit(source(), steps=2)["train_loss"])


def partly_frozen() -> keras.Model:
    frozen = keras.layers.Dense(50, trainable=False, activation="tanh")
    norm = keras.layers.BatchNormalization(trainable=False)
    return keras.Sequential([keras.Input((6,)), frozen, norm, keras.layers.Dense(CLASSES)])


def test_frozen_weights_keep_their_bits_and_do_not_travel():
    trainer = trainer_of(partly_frozen, strategy="mirrored", devices=3, remainder="pad")
    generator = np.random.default_rng(1)
    trainer.model.layers[1].set_weights([generator.uniform(0.5, 1.5, 50) for _ in range(4)])
    before = [value.numpy() for value in trainer.model.non_trainable_variables]
    first = trainer.model.trainable_variables[0].numpy()
    summary = trainer.fit(source(), steps=20)
    assert np.abs(trainer.model.trainable_variables[0].numpy() - first).max() > 1e-4
    for variable, value in zip(trainer.model.non_trainable_variables, before, strict=True):
        for copy in trainer.strategy.experimental_local_results(variable.value):
            np.testing.assert_array_equal(copy.numpy(), value, err_msg=variable.path)
    learning = sum(int(np.prod(weight.shape)) for weight in trainer.model.trainable_variables)
    # With flag, count, loss, the accuracy's two numbers, and the statistics of the normalisation.
    assert summary["exchange"]["payload_bytes_per_step"] == 4 * (learning + 3 + 2 + 100)


@pytest.mark.parametrize(
    ("builder", "examples", "warned"), [(partly_frozen, 41, False), (model, 41, True), (model, 40, False)]
)
def test_padding_that_keras_normalisation_counts_is_said(builder, examples, warned, capsys):
    trainer_of(builder, accumulate_steps=2).fit(source(examples), steps=1)
    assert ("BatchNormalization (batch_normalization) counts the padding" in capsys.readouterr().out) == warned
