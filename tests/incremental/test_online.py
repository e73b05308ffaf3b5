"""Learning from files as they arrive: each example exactly once, whatever ends the process."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import random
import subprocess
import sys
import time

import tfpar
from tests import nursery
from tests.incremental.watched import EXAMPLES, FILES, OPTIONS, arrive, config_of, learned, learner_of, shard
from tests.integration.test_multi_worker import ROOT, launch
from tfpar.checkpoint import export
from tfpar.checkpoint.format import directory_name
from tfpar.checkpoint.run_state import params_sha256
from tfpar.config import ConfigError, IncrementalConfig, InputConfig, TrainingError
from tfpar.incremental import check
from tfpar.incremental.online.arrivals import STOP, form_of
from tfpar.incremental.online.journal import Journal
from tfpar.inputs import from_arrays, load
from tfpar.monitor import summary as summary_of_run

import keras
import numpy as np
import pytest
import tensorflow as tf

# --- what is learned -------------------------------------------------------------------------------------------------


def test_weights_are_those_of_one_pass_over_what_has_arrived(places, shards, tmp_path):
    """Deliveries of 160 and 320 examples, whose batches begin in the middle of the pipeline's epoch."""
    base, incoming = places
    run = tmp_path / "run"
    # Both are longer than the first delivery.
    learner = learner_of(base, incoming, run, warmup_steps=8, profile_steps="20,25")
    assert learner._chief is not None
    real_next, passes = learner._chief.next, []

    def next_with_arrivals(position):
        if not passes:
            arrive(shard(shards, 1), incoming)
        if position == 5 and len(list(incoming.iterdir())) == 1:
            learner._chief._enough = 320
            arrive(shard(shards, 2), incoming)
            arrive(shard(shards, 3), incoming)
        if position == 15:
            (incoming / STOP).touch()
        passes.append(position)
        return real_next(position)

    learner._chief.next = next_with_arrivals
    learn_delivery, results = learner._learn_delivery, []
    learner._learn_delivery = lambda delivery: results.append(learn_delivery(delivery)) or results[-1]
    summary = learner.learn()
    assert (summary["deliveries"], summary["examples"], summary["steps"], summary["skipped"]) == (2, 480, 15, 0)
    x, y = [], []
    for delivery in learner._chief.journal.deliveries:
        source = learner._source(delivery)
        every = tf.range(source.info.num_examples, dtype=tf.int64)
        inputs, labels = (part.numpy() for part in source.fetch(every))
        order = [(delivery.first_step + step) % delivery.steps for step in range(delivery.steps)]
        x += [inputs[32 * batch : 32 * batch + 32] for batch in order]
        y += [labels[32 * batch : 32 * batch + 32] for batch in order]
    sent = load(f"tfrecord:{shards}", "train")
    whole = sent.fetch(tf.range(EXAMPLES, 4 * EXAMPLES, dtype=tf.int64))
    assert sorted(map(bytes, np.concatenate(x))) == sorted(map(bytes, whole[0].numpy()))  # each once
    keras.utils.clear_session(free_memory=False)
    plain = tfpar.Trainer(
        lambda: tfpar.models.build("mlp", tfpar.task_spec(sent)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{name: OPTIONS[name] for name in ("schedule", "optimizer", "learning_rate", "global_batch_size")},
        **{name: OPTIONS[name] for name in ("strategy", "jit_compile", "verbose")},
        shuffle=False,
        warmup_steps=8,
    )
    losses: list[float] = []
    note = tfpar.Hook(1, lambda state: losses.extend(state.since.losses))
    plain.fit(from_arrays(np.concatenate(x), np.concatenate(y), num_classes=10), epochs=1, hooks=[note])
    of_deliveries = [np.mean(losses[:5]), np.mean(losses[5:])]
    assert [result["train_loss"] for result in results] == pytest.approx(of_deliveries, rel=1e-6)
    for one, other in zip(learner._trainer.model.weights, plain.model.weights, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    assert json.loads((run / "exports" / "newest" / "about.json").read_text())["examples"] == 480
    with (
        pytest.raises(ConfigError, match="another process already watches"),
        learner._chief.alone(),
        learner._chief.alone(),
    ):
        pass


def test_replay_adds_as_many_kept_examples(places, shards, tmp_path):
    base, incoming = places
    (incoming / STOP).touch()
    arrive(shard(shards, 1), incoming)
    learner = learner_of(base, incoming, tmp_path / "run", method="replay", replay_examples=20)
    summary = learner.learn()
    assert (summary["examples"], summary["steps"]) == (160, 10)
    source = learner._source(learner._chief.journal.deliveries[0])
    rows = [bytes(row) for row in source.fetch(tf.range(320, dtype=tf.int64))[0].numpy()]
    kept = load(f"tfrecord:{base}", "train")
    old = {bytes(row) for row in kept.fetch(tf.range(kept.info.num_examples, dtype=tf.int64))[0].numpy()}
    assert sum(row in old for row in rows) == 160
    assert len({row for row in rows if row in old}) <= 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosine"}, "--schedule=cosine needs the length of a run"),
        ({"warmup_steps": 0.05}, "--warmup_steps=0.05 is a share of a run's steps, .* e.g. --warmup_steps=100"),
        ({"method": "ewc"}, "--method=ewc works with --tasks"),
        ({"workdir": ""}, "--watch needs a --workdir"),
        ({"watch": "/nowhere"}, "--watch=/nowhere: no such directory"),
        ({"grow_head": True}, "--grow_head works with --tasks"),
        ({"tasks": "by_class:1"}, "--tasks=by_class:1 has no effect, because --watch learns from the files"),
        ({"watch": ""}, r"--watch_every=0\.05 has no effect, because --watch is not given"),
        ({"remainder": "drop"}, "--remainder=drop: with --watch, each example is learned exactly once"),
        ({"shard_by": "file"}, "--shard_by=file: the examples of a task or a delivery are not in the order of files"),
    ],
)
def test_what_does_not_go_with_watching_is_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check(config_of("base", tmp_path, tmp_path / "run", **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 0.05}, "--warmup_steps=0.05 is a share of a run's steps"),
        ({"method": "ewc"}, "--method=ewc works with --tasks"),
        ({"remainder": "drop"}, "--remainder=drop: with --watch, each example is learned exactly once"),
        ({"lora": "4"}, "--lora=4 does not work with incremental learning"),
        ({"local_steps": 5}, "--local_steps=5 does not work with incremental learning"),
        ({"watch": "", "watch_every": 2.0, "delivery_examples": 0}, "OnlineLearner learns from files .* --watch"),
    ],
)
def test_the_learner_itself_refuses_what_does_not_go_with_watching(options, message, places, tmp_path, monkeypatch):
    """As the command does, before anything is built."""
    base, incoming = places
    monkeypatch.setattr("tests.incremental.watched.check", lambda config: None)
    with pytest.raises(ConfigError, match=message):
        learner_of(base, incoming, tmp_path / "run", **options)


def test_other_data_sets_are_refused(tmp_path):
    info = load("digits", "train").info
    with pytest.raises(ConfigError, match="must be images:DIR or tfrecord:GLOB, not digits"):
        form_of(InputConfig(dataset="digits"), info, str(tmp_path))
    assert dataclasses.fields(IncrementalConfig)


# --- what ends a process ---------------------------------------------------------------------------------------------


def served(places, shards, run: pathlib.Path, files: int, kills: list) -> dict:
    """Runs the program while files arrive one after the other, each once the one before is learned and its share of the
    kills is done.

    Args:
      places: From the fixture.
      shards: From the fixture.
      run: The workdir.
      files: How many arrive.
      kills: For each SIGKILL, whether it is time: a function of the workdir.
    """
    base, _ = places
    incoming = run.with_name(f"{run.name}-incoming")
    incoming.mkdir()
    config = config_of(base, incoming, run, checkpoint_every=1)
    flags = [f"--{name}={value}" for name, value in OPTIONS.items()]
    flags += [f"--watch={incoming}", f"--dataset={config.input.dataset}", f"--workdir={run}", "--checkpoint_every=1"]
    kills, sent = list(kills), 0
    allowed = [
        len(kills) * (files - number) // files for number in range(files + 1)
    ]  # kills that are left, after a file
    while True:
        with (
            open(run.with_name("output"), "wb") as output,
            nursery.Popen(
                [sys.executable, "experiments/incremental.py", *flags],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            try:
                while process.poll() is None:
                    if len(kills) <= allowed[sent] and (sent == 0 or (run / "exports" / f"{sent:06d}").exists()):
                        if sent == files:
                            (incoming / STOP).touch()
                        else:
                            sent += 1
                            arrive(shard(shards, sent), incoming)
                    if kills and kills[0](run):
                        kills.pop(0)
                        process.kill()
                    time.sleep(0.002)
            finally:
                process.kill()
        if process.returncode != -9:
            assert process.returncode == 0, run.with_name("output").read_text()
            break
    assert not kills
    journal = Journal(str(run))
    names = [file.name for delivery in journal.deliveries for file in delivery.files]
    assert names == [shard(shards, number + 1).name for number in range(files)]
    return json.loads((run / "summary.json").read_text())


@pytest.mark.parametrize("kills", [1, pytest.param(2, marks=pytest.mark.proof)])
def test_killed_in_a_delivery_and_after_one_it_has_the_bits_of_a_run_that_was_not(places, shards, tmp_path, kills):
    def in_the_middle(run: pathlib.Path) -> bool:
        return (run / "checkpoints" / directory_name(2)).exists()

    def after_the_second(run: pathlib.Path) -> bool:
        return (run / "exports" / "000002").exists()

    expected = served(places, shards, tmp_path / "undisturbed", 3, [])
    disturbed = served(places, shards, tmp_path / "disturbed", 3, [in_the_middle, after_the_second][:kills])
    assert disturbed["steps"] == expected["steps"] == 15
    assert disturbed["params_sha256"] == expected["params_sha256"]
    assert disturbed["eval"] == expected["eval"]


@pytest.mark.proof
def test_killed_twenty_times_every_example_is_learned_exactly_once(places, shards, tmp_path):
    draw = random.Random(5)

    def some_time(seconds: float):
        begun: list[float] = []

        def is_due(run: pathlib.Path) -> bool:
            begun.append(time.monotonic())
            return run.exists() and begun[-1] - begun[0] > seconds

        return is_due

    expected = served(places, shards, tmp_path / "undisturbed", FILES - 1, [])
    kills = [some_time(draw.uniform(0.5, 8.0)) for _ in range(20)]
    disturbed = served(places, shards, tmp_path / "disturbed", FILES - 1, kills)
    assert disturbed["params_sha256"] == expected["params_sha256"]


def test_no_version_has_the_model_of_an_earlier_delivery(places, shards, tmp_path, monkeypatch):
    """The disk fills up while model.keras is written; the next start exports."""
    base, incoming = places
    run = tmp_path / "run"
    write, fails = export.export_model, [False]

    def written(*arguments):
        if fails[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(*arguments)

    monkeypatch.setattr(summary_of_run, "export_model", written)
    (incoming / STOP).touch()
    arrive(shard(shards, 1), incoming)
    learned(base, incoming, run)
    fails[0] = True
    arrive(shard(shards, 2), incoming)
    for _ in range(2):
        with pytest.raises(TrainingError, match=r"delivery 2 .* No space left on device"):
            learned(base, incoming, run)
    assert [path.name for path in sorted((run / "exports").glob("0*"))] == ["000001"]
    fails[0] = False
    learned(base, incoming, run)
    about = json.loads((run / "exports" / "newest" / "about.json").read_text())
    model = keras.saving.load_model(run / "exports" / "000002" / "model.keras")
    assert (about["version"], about["params_sha256"]) == (2, params_sha256(model.trainable_variables))
    assert json.loads((run / "summary.json").read_text())["failed_writes"] == []


@pytest.mark.cluster
def test_two_workers_learn_what_one_does(places, shards, tmp_path):
    base, incoming = places
    for number in (1, 2):
        arrive(shard(shards, number), incoming)
    (incoming / "bad.tfrecord").write_text("no records")
    (incoming / "notes.txt").write_text("about the shards")
    (incoming / STOP).touch()
    alone = learned(base, incoming, tmp_path / "one")
    flags = {**OPTIONS, "strategy": "multi_worker", "watch": incoming, "dataset": f"tfrecord:{base}", "verbose": 1}
    flags["workdir"] = tmp_path / "two"
    done = launch(2, "experiments/incremental.py", *[f"--{name}={value}" for name, value in flags.items()])
    assert done.returncode == 0, done.stdout
    assert "bad.tfrecord is skipped" in done.stdout
    assert done.stdout.count("notes.txt is ignored: it is not a .tfrecord file") == 1
    assert "learned from 320 examples in 1 delivery; 1 file skipped" in done.stdout
    both = keras.saving.load_model(tmp_path / "two" / "exports" / "newest" / "model.keras")
    for one, other in zip(alone["weights"], both.weights, strict=True):
        np.testing.assert_allclose(np.asarray(other), one, rtol=1e-5, atol=1e-6)
