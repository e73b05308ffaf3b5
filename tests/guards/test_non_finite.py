"""Runs on data with NaN in them, and runs that diverge: what is left out in a row ends the run and is explained."""

from __future__ import annotations

import json
import re

from tests.training.trainers import BATCH, CLASSES, everything, trainer_of
from tfpar import inputs
from tfpar.checkpoint import checkpointer
from tfpar.config import InputConfig
from tfpar.config.errors import TrainingError
from tfpar.guards.batches import PushOrder
from tfpar.guards.non_finite import BadStepsError, NonFiniteStreak
from tfpar.inputs.source import SourceInfo

import keras
import numpy as np
import pytest
import tensorflow as tf

IN_ORDER = InputConfig(global_batch_size=BATCH, shuffle=False)
FIRST_BAD = 2 * BATCH  # examples from here on are NaN: steps 3 to 5 of each epoch, counted from 1


def generated(first_bad: int, count: int = 5 * BATCH) -> inputs.Source:
    """A program's own source, which nothing checks before it is trained on."""

    def read(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        x = tf.cast(indices % 7, tf.float32)[:, None] * tf.ones([1, 6]) / 7
        return tf.where((indices >= first_bad)[:, None], np.nan, x), tf.cast(indices % CLASSES, tf.int32)

    info = SourceInfo(
        name="own",
        task=inputs.CLASSIFICATION,
        split="train",
        num_examples=count,
        input_spec=tf.TensorSpec([6], tf.float32),
        label_spec=tf.TensorSpec([], tf.int32),
        num_classes=CLASSES,
        storage="generated",
    )
    return inputs.Source(info=info, read=read)


@pytest.mark.parametrize("steps_per_loop", [1, 5])
def test_nan_in_the_data_ends_the_run_with_the_last_good_checkpoint_in_place(tmp_path, steps_per_loop):
    options = {"workdir": str(tmp_path), "shuffle": False, "max_bad_steps": 3, "keep_checkpoints": 1}
    trainer = trainer_of(**options, checkpoint_every=1 if steps_per_loop == 1 else 2, steps_per_loop=steps_per_loop)
    with pytest.raises(BadStepsError) as caught:
        trainer.fit(generated(FIRST_BAD), epochs=4)
    assert isinstance(caught.value, TrainingError)
    assert str(caught.value) == (
        "steps 3 to 5, 3 in a row (--max_bad_steps=3), were skipped: loss or gradients were not finite, or no "
        "example could be used. The cause is in the data: train example 16 has NaN or infinity in its input (6 of 6 "
        "values); train example 17 has NaN or infinity in its input (6 of 6 values); train example 18 has NaN or "
        "infinity in its input (6 of 6 values); train example 19 has NaN or infinity in its input (6 of 6 values); "
        "train example 20 has NaN or infinity in its input (6 of 6 values). Repair or remove such examples. Step 3 "
        f"had the train examples 16, 17, 18, 19, 20, 21, 22, 23 of --dataset=own. All are listed in {tmp_path}/"
        "bad_steps.json. Earlier checkpoints are kept."
    )
    listed = json.loads((tmp_path / "bad_steps.json").read_text())
    assert [entry["step"] for entry in listed["steps"]] == [3, 4, 5]
    assert [entry["examples"] for entry in listed["steps"]] == [
        list(range(start, start + BATCH)) for start in range(FIRST_BAD, 5 * BATCH, BATCH)
    ]
    assert all("loss" in entry for entry in listed["steps"])
    assert [bad["example"] for bad in listed["unusable"]] == [16, 17, 18, 19, 20]
    kept = checkpointer.Checkpointer(tmp_path)
    assert kept.steps() == [2]
    saved = kept.latest()
    kept.close()
    assert saved is not None
    for name, value in everything(trainer).items():  # nothing has changed since
        np.testing.assert_array_equal(saved.arrays[name], value, err_msg=name)


def test_a_run_that_diverges_on_good_data_is_told_likely_causes(tmp_path):
    options = {"learning_rate": 1e30, "schedule": "constant", "max_bad_steps": 4, "optimizer": "sgd"}
    with pytest.raises(BadStepsError, match=r"4 in a row .*The examples are finite.*--learning_rate") as caught:
        trainer_of(**options, workdir=str(tmp_path)).fit(generated(10**6), steps=30)
    first = int(re.search(r"steps (\d+) to", str(caught.value))[1])
    listed = json.loads((tmp_path / "bad_steps.json").read_text())
    assert [entry["step"] for entry in listed["steps"]] == list(range(first, first + 4))
    assert listed["unusable"] == []


class Dividing(keras.optimizers.SGD):
    """Divides gradients by their sizes without an epsilon: those of units that are off become NaN."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient / tf.abs(gradient), variable, learning_rate)


@pytest.mark.parametrize("limit", [3, 0])
def test_weights_that_a_step_has_made_nan_are_named(caplog, limit):
    trainer = trainer_of(optimizer=Dividing(0.1), max_bad_steps=limit)
    named = r"The cause is in the weights: since the update of step 1 at the latest, .* in 'net/dense/kernel'"
    if limit == 3:
        with pytest.raises(BadStepsError, match=rf"steps 2 to 4, 3 in a row .* {named}"):
            trainer.fit(generated(10**6), steps=10)
        return
    assert trainer.fit(generated(10**6), steps=4)["train_loss"] is not None  # of the first step
    assert re.search(rf"the last steps were skipped .* {named}", caplog.text)
    caplog.clear()
    trainer.fit(generated(10**6), steps=6)
    assert re.search("before the first step of this start, .* in 'net/dense/kernel'", caplog.text)


def test_fewer_in_a_row_end_nothing():
    summary = trainer_of(shuffle=False, max_bad_steps=4).fit(generated(FIRST_BAD), epochs=3)
    assert summary["steps"] == 15
    assert summary["skipped_steps"] == 9  # three an epoch, never four in a row


def test_the_overflows_with_which_mixed_float16_begins_do_not_count_as_too_many():
    trainer = trainer_of(precision="mixed_float16", initial_loss_scale=2.0**36)
    summary = trainer.fit(generated(10**6), steps=40)
    assert 10 <= summary["skipped_steps"] <= 30


class TestStreaks:
    def test_are_counted_across_calls_and_end_with_a_step_that_is_applied(self):
        pipeline = inputs.Pipeline(generated(FIRST_BAD), IN_ORDER)
        settled = []
        steps = NonFiniteStreak(pipeline, limit=4, before_raise=lambda: settled.append(True))
        steps.note(np.arange(3), np.array([True, False, False]), np.full(3, np.nan))
        assert list(steps.streak) == [1, 2]
        assert steps.suspends_checkpoints
        steps.note(np.arange(3, 5), np.array([False, True]), np.ones(2))
        assert not steps.suspends_checkpoints
        steps.note(np.arange(5, 7), np.array([False, False]), np.ones(2))
        with pytest.raises(BadStepsError, match=r"steps 6 to 9, 4 in a row"):
            # That the last one is well again changes nothing: how many steps a call has depends on the pace.
            steps.note(np.arange(7, 10), np.array([False, False, True]), np.ones(3))
        assert settled == [True]

    def test_without_a_limit_nothing_ends_but_checkpoints_are_held_back(self):
        steps = NonFiniteStreak(inputs.Pipeline(generated(FIRST_BAD), IN_ORDER), limit=0)
        for first in range(0, 1000, 100):
            steps.note(np.arange(first, first + 100), np.zeros(100, bool), np.ones(100))
            steps.note(np.zeros(0, np.int64), np.zeros(0, bool), np.zeros(0))
            assert steps.suspends_checkpoints
        assert not steps.streak  # it would grow for ever
        steps.note(np.arange(1000, 1002), np.array([False, True]), np.ones(2))
        assert not steps.suspends_checkpoints

    def test_of_pushes_name_the_share_of_one_worker(self):
        pipeline = inputs.Pipeline(generated(FIRST_BAD), IN_ORDER, replicas=2)
        pushes = PushOrder(pipeline, 2)
        assert pushes.indices(4, 2).reshape(2, -1).tolist() == [[16, 17, 18, 19], [20, 21, 22, 23]]
        assert pushes.examples_in(np.arange(10)).tolist() == [[4]] * 10
        with pytest.raises(BadStepsError, match=r"steps 5 to 6, .* Step 5 had the train examples 16, 17, 18, 19 of"):
            NonFiniteStreak(pushes, limit=2).note(np.arange(4, 6), np.array([False, False]), np.ones(2))

    def test_a_directory_that_cannot_be_written_hides_nothing(self, tmp_path):
        (tmp_path / "file").touch()
        pipeline = inputs.Pipeline(generated(FIRST_BAD), IN_ORDER)
        with pytest.raises(BadStepsError, match="1 in a row"):
            NonFiniteStreak(pipeline, limit=1, workdir=str(tmp_path / "file")).note(
                np.arange(1), np.array([False]), np.ones(1)
            )
