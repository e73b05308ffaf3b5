"""Learning tasks one after the other: digits, in the same loop as all training."""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import random
import shutil
from typing import Any

import tfpar
from tests.incremental.test_tasks import damaged
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.incremental import IncrementalLearner, check
from tfpar.incremental.consolidation import Consolidation, fisher_information
from tfpar.incremental.learner import carry_over
from tfpar.inputs import BadRecordError, from_arrays
from tfpar.monitor import summary as summary_of_run

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

OPTIONS = {
    "strategy": "one_device",
    "jit_compile": "false",
    "global_batch_size": 8,
    "optimizer": "sgd",
    "learning_rate": 0.5,
    "epochs": 6.0,
    "tasks": "by_class:2",
    "verbose": 0,
}


def blobs(split: str, count: int = 12):
    """Four classes around the corners of a square."""
    random = np.random.default_rng(len(split))
    labels = np.repeat(np.arange(4), count).astype(np.int32)
    corners = np.array([[1, 1], [-1, -1], [1, -1], [-1, 1]], np.float32)
    return from_arrays(
        corners[labels] + 0.2 * random.normal(size=[len(labels), 2]).astype(np.float32), labels, split=split
    )


def build(classes: int) -> keras.Model:
    keras.utils.set_random_seed(classes)
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(classes)])


def learner(**options) -> IncrementalLearner:
    keras.utils.clear_session(free_memory=False)
    config = ExperimentConfig.from_flat_dict(
        {**ExperimentConfig().as_flat_dict(), "dataset": "custom", "model": "custom", **OPTIONS, **options}
    )
    check(config)
    train, validation = blobs("train"), blobs("validation")
    runtime = tfpar.initialize(config)
    return IncrementalLearner(build, train, validation, config=config, runtime=runtime)


REPLAY = {"method": "replay", "replay_examples": 8}


@functools.cache
def with_replay() -> dict[str, Any]:
    """The summary of one device."""
    return learner(**REPLAY).learn()


@pytest.fixture(scope="module")
def forgetful():
    return learner(method="finetune").learn()


def test_tasks_alone_are_forgotten(forgetful):
    assert forgetful["matrix"][0][0] == 1.0
    assert forgetful["matrix"][0][1] is None
    assert forgetful["matrix"][1] == [0.0, 1.0]
    assert forgetful["forgetting"] == 1.0
    assert [task["classes"] for task in forgetful["tasks"]] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    "options",
    [
        REPLAY,
        {"method": "joint"},
        {"method": "ewc", "ewc_strength": 100.0, "fisher_examples": 24, "learning_rate": 0.1, "epochs": 2.0},
        {"method": "lwf", "lwf_strength": 3.0},
    ],
    ids=lambda options: options["method"],
)
def test_methods_keep_more_than_nothing(options):
    summary = with_replay() if options == REPLAY else learner(**options).learn()
    least = {"replay": 0.9, "joint": 0.9, "ewc": 0.9, "lwf": 0.3}[options["method"]]
    assert summary["matrix"][1][0] >= least, summary["matrix"]


def test_many_tasks_are_not_warned_of_retracing(monkeypatch):
    """Each task traces the earlier model once, in functions that TensorFlow counts together."""
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    tf.get_logger().addHandler(handler)
    series, data = learner(method="lwf"), blobs("train")
    monkeypatch.setattr(series, "_alone", lambda number: build(4))
    try:
        for number in range(1, 7):
            assert series._teacher(number)(data).shape == (48, 4)
            fisher_information(build(4), data, np.arange(2), seed=number)
    finally:
        tf.get_logger().removeHandler(handler)
    assert not [text for text in warnings if "retracing" in text]


def test_parts_of_the_data_are_forgotten_too():
    """The blobs are in the order of their classes, so that each part has two classes of its own."""
    summary = learner(method="finetune", tasks="in_order:2", validation_fraction=0.25).learn()
    assert summary["matrix"][0][0] == summary["matrix"][1][1] == 1.0
    assert summary["forgetting"] == 1.0


def test_learned_tasks_are_skipped_and_the_next_goes_on_bit_by_bit(tmp_path):
    options = {"method": "ewc", "workdir": str(tmp_path / "whole")}
    whole = learner(**options).learn()
    saved = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert saved == whole
    events = EventAccumulator(str(tmp_path / "whole" / "eval"), size_guidance={"tensors": 0}).Reload()
    tags = {*events.Tags()["tensors"], *events.Tags()["images"], *events.Tags()["scalars"]}
    assert {"incremental/accuracy_matrix", "incremental/average_accuracy"} <= tags
    # Stopped in the first task; then as killed after the second, before it was noted as learned.
    options["workdir"] = str(tmp_path / "cut")
    assert learner(**options, stop_after=10).learn() == {}
    assert [path.name for path in (tmp_path / "cut").iterdir()] == ["task-01"]
    assert learner(**options).learn() == whole
    (tmp_path / "cut" / "task-02" / "task.json").unlink()
    assert learner(**options).learn() == whole
    assert learner(**options).learn() == whole  # nothing is left to learn


def test_a_task_that_was_stopped_is_not_learned_without_a_workdir(messages):
    stopped = learner(method="finetune", stop_after=10, verbose=1)
    assert stopped.learn() == {}
    assert np.isnan(stopped.matrix).all()
    assert any("stopped in task 1 by --stop_after; without --workdir, nothing is kept" in line for line in messages)
    assert learner(method="finetune", epochs=1.0, stop_after=1000).learn()["matrix"]


def test_the_next_task_begins_with_the_averaged_weights_of_a_learned_one(tmp_path):
    """As `model.keras` has them, so that an interruption between two tasks changes nothing."""
    options = {"method": "finetune", "ema": 0.9, "epochs": 2.0, "workdir": str(tmp_path)}
    whole = learner(**options).learn()
    shutil.rmtree(tmp_path / "task-02")
    assert learner(**options).learn() == whole


class Factor(keras.layers.Layer):
    """A single trainable number."""

    def build(self, _) -> None:
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return self.factor * inputs


def test_weights_that_are_single_numbers_are_consolidated(tmp_path):
    made = learner(method="ewc", epochs=2.0, workdir=str(tmp_path))
    made._build = lambda classes: keras.Sequential([keras.Input((2,)), *build(classes).layers, Factor()])
    assert len(made.learn()["matrix"]) == 2
    saved = Consolidation.load(tmp_path / "task-02" / "consolidation.safetensors")
    assert [each.shape for each in saved.information[-2:]] == [(4,), ()]


def test_a_task_whose_model_could_not_be_written_is_completed_by_the_next_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = {"method": "finetune", "epochs": 2.0, "workdir": str(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(summary_of_run, "export_model", full)
        whole = learner(**options).learn()
    assert learner(**options).learn() == whole
    assert sorted(path.parent.name for path in tmp_path.glob("*/model.keras")) == ["task-01", "task-02"]


def test_a_start_that_skips_tasks_draws_the_numbers_of_one_that_does_not(tmp_path):
    """So that the next model has the weights that it would have had, though fewer models were built before."""
    drawn = []

    def initialised(classes: int) -> keras.Model:
        if classes == 4:
            drawn.append((random.random(), np.random.random()))
            raise KeyboardInterrupt
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(classes)]
        return keras.Sequential([keras.Input((2,)), *layers])

    for _ in range(2):
        options = {"method": "ewc", "fisher_examples": 2, "grow_head": True, "epochs": 1.0}
        made = learner(**options, workdir=str(tmp_path))
        made._build = initialised
        with pytest.raises(KeyboardInterrupt):
            made.learn()
    assert drawn[0] == drawn[1]


def test_an_earlier_model_is_run_for_the_labels_of_training_and_validation_alone():
    """Evaluations on the tasks so far read only the class."""
    made = learner(method="lwf", epochs=1.0)
    teacher, asked = made._teacher, []

    def counted(number):
        logits = teacher(number)
        return lambda source: asked.append(source.info.num_examples) or logits(source)

    made._teacher = counted
    assert len(made.learn()["matrix"]) == 2
    assert asked == [24, 24]


def test_an_earlier_model_names_or_skips_an_example_that_cannot_be_read():
    made = learner(method="lwf")
    made._earlier = build(4).get_weights()
    logits = made._teacher(1)
    assert logits(damaged(skip=True)).shape == (24, 4)
    with pytest.raises(BadRecordError, match="train example 7 cannot be read"):
        logits(damaged(skip=False))


def test_all_tasks_of_a_series_have_one_configuration(tmp_path):
    """Also those that an interruption has left for later; how fast and how visibly a run goes may change."""
    given = {"method": "finetune", "epochs": 1.0, "model": "mlp", "dataset": "digits", "workdir": str(tmp_path)}
    whole = learner(**given).learn()
    (tmp_path / "task-02" / "task.json").unlink()
    (tmp_path / "task-02" / "summary.json").unlink()
    for name, saved, now in (
        ("epochs", "1.0", 3.0),
        ("model", "'mlp'", "convnet"),
        ("dataset", "'digits'", "synthetic"),
        ("learning_rate", "0.5", 0.25),
        ("method", "'finetune'", "lwf"),
        ("seed", "0", 1),
    ):
        with pytest.raises(ConfigError) as refusal:
            learner(**{**given, name: now}).learn()
        assert f"--{name}: {saved} -> {now!r}. Give the saved values" in str(refusal.value)
    assert learner(**given, log_every=3).learn() == whole


def test_a_head_that_grows_keeps_its_outputs():
    model = learner(method="lwf", lwf_strength=0.1, grow_head=True)
    assert [model._classes(number) for number in range(2)] == [2, 4]
    small, large = build(2), build(4)
    fresh = large.get_weights()
    carry_over(large, small.get_weights())
    np.testing.assert_array_equal(large.get_weights()[2][:, :2], small.get_weights()[2])
    np.testing.assert_array_equal(large.get_weights()[2][:, 2:], fresh[2][:, 2:])
    with pytest.raises(ConfigError, match=r"build: the weight .* \(8, 2\), and .* had \(8, 4\)\. Only the last"):
        carry_over(small, large.get_weights())
    with pytest.raises(ConfigError, match=r"has 4 weights, and that of the task before had 3\. .*Build the same model"):
        carry_over(small, large.get_weights()[:3])
    summary = model.learn()
    assert summary["matrix"][1][1] > 0.9
    with pytest.raises(ConfigError, match=r"--grow_head needs --tasks=by_class:N, not --tasks=in_order:2"):
        learner(tasks="in_order:2", grow_head=True)


def test_two_replicas_learn_what_one_does():
    two = learner(**REPLAY, strategy="mirrored", devices=2).learn()
    assert with_replay()["matrix"] == two["matrix"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"shard": "optimizer", "strategy": "mirrored", "devices": 2}, r"--shard=optimizer does not work with incr"),
        ({"strategy": "mirrored", "devices": 2, "mesh": "model:2"}, r"--mesh=model:2 does not work with incremental"),
        ({"lora": "4"}, r"--lora=4 does not work with incremental"),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        learner(**options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warm_start": "model.keras"}, r"--warm_start=\S+ does not work with incremental"),
        ({"lora": "4"}, r"--lora=4 does not work with incremental"),
        ({"local_steps": 5}, r"--local_steps=5 does not work with incremental"),
        ({"watch": "incoming"}, r"--watch=incoming: IncrementalLearner learns tasks\. Use .*OnlineLearner"),
    ],
)
def test_the_learner_itself_refuses_what_cannot_work(options, said, tmp_path, monkeypatch):
    """As the command does, before anything is built."""
    build(4).save(tmp_path / "model.keras")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tests.incremental.test_learner.check", lambda config: None)
    with pytest.raises(ConfigError, match=said):
        learner(**options)
