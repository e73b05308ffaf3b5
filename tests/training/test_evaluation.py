"""Evaluation on several replicas equals Keras' own on one; moving averages are what is evaluated and saved."""

from __future__ import annotations

import tfpar
from tfpar import inputs
from tfpar.checkpoint import checkpointer
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.parallel.split import whole
from tfpar.training.placing.base import Placing

import keras
import numpy as np
import pytest

EXAMPLES = 53  # a prime: neither the batch of 10 nor 3 replicas divide it
CLASSES = 4
LOSS = {"from_logits": True}


def data(count: int = EXAMPLES, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(count, 6)).astype(np.float32)
    return x, (np.abs(x).sum(axis=1) % CLASSES).astype(np.int32)


def source(count: int = EXAMPLES, seed: int = 0) -> inputs.Source:
    return inputs.from_arrays(*data(count, seed), num_classes=CLASSES, name=f"blobs{count}")


def model() -> keras.Model:
    """With layers that behave differently in training, and a penalty that belongs to the loss."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(192, kernel_regularizer=keras.regularizers.L2(0.01)),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(CLASSES),
        ]
    )


def trainer_on(replicas: int, builder=model, **options) -> tfpar.Trainer:
    return tfpar.Trainer(
        builder,
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(**LOSS),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2"),
        ],
        **{
            "strategy": "one_device" if replicas == 1 else "mirrored",
            "devices": replicas,
            "global_batch_size": 10,
            "uneven_batches": True,
            "schedule": "constant",
            "learning_rate": 0.1,
            "jit_compile": False,  # to be traced soon; the comparison with Keras has both
            **options,
        },
    )


def keras_evaluate(weights: list[np.ndarray], x: np.ndarray, y: np.ndarray, batch_size: int = 53) -> dict[str, float]:
    """What plain Keras finds, in one process without a strategy."""
    plain = model()
    plain.set_weights(weights)
    plain.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(**LOSS),
        metrics=[
            keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
            keras.metrics.SparseTopKCategoricalAccuracy(k=2, name="top2"),
        ],
    )
    return plain.evaluate(x, y, batch_size=batch_size, verbose=0, return_dict=True)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
def test_equals_keras_evaluate(replicas, jit_compile):
    trainer = trainer_on(replicas, jit_compile=jit_compile)
    # Weights as after training; moving variances are positive.
    generator = np.random.default_rng(3)
    trainer.model.set_weights([generator.uniform(0.1, 1.5, value.shape) for value in trainer.model.get_weights()])
    found = trainer.evaluate(source())
    expected = keras_evaluate(trainer.model.get_weights(), *data())
    assert found.pop("examples") == EXAMPLES
    assert set(found) == set(expected) == {"loss", "accuracy", "top2"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    assert 0 < expected["accuracy"] < expected["top2"] < 1


def test_sources_of_other_sizes_one_after_the_other():
    trainer = trainer_on(3)
    for count, seed in ((EXAMPLES, 0), (4, 1), (31, 2), (EXAMPLES, 0)):
        x, y = data(count, seed)
        found = trainer.evaluate(source(count, seed))
        assert found["examples"] == count
        expected = keras_evaluate(trainer.model.get_weights(), x, y, batch_size=count)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)


def test_weights_of_now_are_evaluated():
    trainer = trainer_on(1)
    before = trainer.evaluate(source())
    trainer.model.set_weights([value + 0.5 for value in trainer.model.get_weights()])
    after = trainer.evaluate(source())
    assert after["loss"] != before["loss"]
    assert after["loss"] == pytest.approx(keras_evaluate(trainer.model.get_weights(), *data())["loss"], abs=1e-5)


def test_evaluation_changes_nothing():
    trainer = trainer_on(3)
    before = [value.copy() for value in trainer.model.get_weights()]
    assert trainer.evaluate(source()) == trainer.evaluate(source())
    for one, other in zip(before, trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


MOMENTUM = 0.6
STEPS = 6


@pytest.fixture(
    scope="module",
    params=[(1, "none"), (3, "none"), (3, "optimizer"), (2, "weights")],
    ids=["1", "3", "3-optimizer", "2-weights"],
)
def averaged(request, tmp_path_factory):
    """A run with moving averages that kept a checkpoint of every step."""
    workdir = tmp_path_factory.mktemp("averaged")
    keras.utils.set_random_seed(1)
    replicas, shard = request.param
    trainer = trainer_on(
        replicas,
        shard=shard,
        ema=MOMENTUM,
        workdir=str(workdir),
        checkpoint_every=1,
        keep_checkpoints=STEPS,
        eval_every=STEPS,
    )
    summary = trainer.fit(source(), steps=STEPS, validation=source(EXAMPLES, 7))
    return trainer, summary, workdir


def own_weights(workdir, step: int) -> dict[str, np.ndarray]:
    arrays = checkpointer.read(workdir / "checkpoints" / f"step-{step:09d}").arrays
    return {name.removeprefix("model/"): value for name, value in arrays.items() if name.startswith("model/")}


def moving_averages(workdir, names: list[str]) -> dict[str, np.ndarray]:
    """By the definition, from the weights after each step: the first one starts the average."""
    average = own_weights(workdir, 1)
    for step in range(2, STEPS + 1):
        now = own_weights(workdir, step)
        average = {name: MOMENTUM * average[name] + (1 - MOMENTUM) * now[name] for name in names}
    return average


def test_moving_averages_are_saved_and_the_run_keeps_its_own_weights(averaged):
    trainer, _, workdir = averaged
    names = [variable.path for variable in trainer.model.trainable_variables]
    expected, own = moving_averages(workdir, names), own_weights(workdir, STEPS)
    saved = keras.saving.load_model(workdir / "model.keras", safe_mode=True)
    saved_values = {
        mine.path: theirs.numpy() for mine, theirs in zip(trainer.model.weights, saved.weights, strict=True)
    }
    for variable in trainer.model.weights:
        np.testing.assert_array_equal(whole(variable), own[variable.path], err_msg=variable.path)
        wanted = expected[variable.path] if variable.path in names else own[variable.path]
        np.testing.assert_allclose(saved_values[variable.path], wanted, rtol=1e-5, atol=1e-7, err_msg=variable.path)
    assert any(np.abs(saved_values[name] - own[name]).max() > 1e-3 for name in names)


def test_moving_averages_are_what_is_evaluated(averaged):
    trainer, summary, workdir = averaged
    saved = keras.saving.load_model(workdir / "model.keras", safe_mode=True)
    x, y = data(EXAMPLES, 7)
    expected = keras_evaluate(saved.get_weights(), x, y)
    assert summary["eval"] == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert trainer.evaluate(source(EXAMPLES, 7))["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
    own = keras_evaluate([whole(variable) for variable in trainer.model.weights], x, y)
    assert abs(own["loss"] - expected["loss"]) > 1e-3


def test_before_the_first_step_there_is_no_average_and_the_weights_themselves_count():
    trainer = trainer_on(1, ema=MOMENTUM)
    expected = keras_evaluate(trainer.model.get_weights(), *data())
    assert trainer.evaluate(source())["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-5)
    trainer.fit(source(), steps=3)
    after = keras_evaluate(trainer.model.get_weights(), *data())
    # From the first step on it is the average, also in a program that has evaluated before.
    assert abs(trainer.evaluate(source())["loss"] - after["loss"]) > 1e-3


@pytest.mark.parametrize("replicas", [1, 3])
def test_evaluation_has_batches_of_its_own_and_may_be_cut_short_during_training(replicas):
    """16 is not divisible by 3 replicas, and need not be."""
    trainer = trainer_on(replicas, eval_batch_size=16, eval_steps=2, global_batch_size=9)
    summary = trainer.fit(source(), steps=2, validation=source(seed=1))
    every, first = source(seed=1), inputs.from_arrays(*(part[:32] for part in data(seed=1)), num_classes=CLASSES)
    assert summary["skipped_validation_examples"] == 0
    np.testing.assert_allclose(summary["eval"]["loss"], trainer.evaluate(first)["loss"], rtol=1e-6)
    assert trainer.evaluate(every, steps=2) == pytest.approx(trainer.evaluate(first), rel=1e-6)
    complete = trainer.evaluate(every)
    assert complete["examples"] == EXAMPLES
    expected = keras_evaluate([variable.numpy() for variable in trainer.model.weights], *data(seed=1))
    np.testing.assert_allclose(complete["loss"], expected["loss"], rtol=1e-5)
    assert trainer.predict(every).shape == (EXAMPLES, CLASSES)


def test_what_is_printed_follows_verbose(messages):
    printed = {}
    for verbose in (0, 1, 2):
        messages.clear()
        trainer_on(1, verbose=verbose).fit(source(), epochs=2, validation=source(seed=1))
        printed[verbose] = list(messages)
    assert all(line.startswith("WARNING") for line in printed[0])
    assert any(line.startswith("step ") for line in printed[1])
    assert any(line.startswith("evaluation at step 6 ") for line in printed[1])
    epochs = [line for line in printed[2] if line.startswith("epoch ")]
    assert [line.partition("  loss")[0] for line in epochs] == ["epoch 1  step 6/12", "epoch 2  step 12/12"]
    assert all("  accuracy " in line and "  val_loss " in line for line in epochs)
    assert not any(line.startswith(("step ", "evaluation ")) for line in printed[2])


def test_a_run_without_a_workdir_says_that_nothing_is_kept_and_a_finished_one_how_to_continue(tmp_path, messages):
    trainer_on(1).fit(source(), epochs=1)
    assert "no --workdir: nothing of this run will be kept" in messages
    for _ in range(2):
        messages.clear()
        trainer_on(1, workdir=str(tmp_path)).fit(source(), epochs=1)
    assert not any("nothing of this run" in line for line in messages)
    assert "this run is finished (step 6 of 6); more --epochs would continue it" in messages
    assert any(line.startswith("\nresult\n  steps") for line in messages)


def test_a_worker_that_is_not_counted_adds_nothing(monkeypatch):
    """Of the workers that divide a replica's layers, one counts; a loss that is not finite is not counted either."""
    added: list[np.ndarray] = []
    monkeypatch.setattr(Placing, "adds_sums", False)
    monkeypatch.setattr(WorkerAgreement, "sum_arrays", lambda self, own: added.append(own) or own)
    layers = keras.Input((6,)), keras.layers.Dense(CLASSES), *(keras.layers.Rescaling(1e30) for _ in range(2))
    trainer_on(1, lambda: keras.Sequential(layers)).evaluate(source())
    assert any(map(np.size, added))
    for own in added:
        np.testing.assert_array_equal(own, 0.0)
