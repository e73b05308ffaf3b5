"""Several fits in one process: what they share and what they do not, and what does not depend on the steps per call."""

from __future__ import annotations

import logging
import math

from tests.training.trainers import BATCH, EXAMPLES, assert_same_bits, everything, source, trainer_of

import keras
import numpy as np
import pytest
import tensorflow as tf


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


def test_the_training_loss_does_not_depend_on_the_steps_per_call():
    """Calls from Python are as long as the machine is fast; the results must not be."""
    losses = [trainer_of(steps_per_loop=steps).fit(source(), epochs=1)["train_loss"] for steps in (2, 5)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_the_progress_line_shows_metrics_over_its_interval(capsys, monkeypatch):
    """With a single line at the end, the accuracy of an epoch does not depend on the steps per call."""
    monkeypatch.setattr("tfpar.monitor.progress.Progress.due", lambda self: False)
    shown = []
    for steps_per_loop in (1, EXAMPLES // BATCH):
        trainer_of(optimizer="adam", steps_per_loop=steps_per_loop).fit(source(), epochs=1)
        (line,) = [text for text in capsys.readouterr().out.splitlines() if text.startswith("step 5/5")]
        shown.append(line.split("accuracy")[1].split()[0])
    assert shown[0] == shown[1]


@pytest.mark.grappler
def test_replicas_keep_the_same_bits_where_tensorflow_optimizes_their_graph():
    """The run ends with an error otherwise. Before updates had graphs of their own, this one did."""

    def wide() -> keras.Model:
        layers = [keras.layers.Dense(2048, "relu"), keras.layers.Dense(32, "relu"), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((6,)), *layers])

    options = {"optimizer": "lars", "learning_rate": 0.5, "schedule": "constant", "clip_norm": 0.05}
    trainer = trainer_of(wide, strategy="mirrored", devices=4, weight_decay=0.1, **options)
    assert trainer.fit(source(), steps=6)["steps"] == 6
