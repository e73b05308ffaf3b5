"""Learning from files as they arrive: each example exactly once, whatever ends the process."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import time

import tfpar
from tests import nursery
from tests.integration.test_multi_worker import ROOT, launch
from tfpar.checkpoint.format import directory_name
from tfpar.config import ConfigError, ExperimentConfig, IncrementalConfig, InputConfig
from tfpar.incremental import OnlineLearner, check
from tfpar.incremental.online.arrivals import STOP, Arrivals, form_of
from tfpar.incremental.online.chief import Chief
from tfpar.incremental.online.exports import Exports
from tfpar.incremental.online.journal import NAME, ArrivedFile, Journal
from tfpar.inputs import from_arrays, load
from tfpar.inputs.write import write

import keras
import numpy as np
import pytest
import tensorflow as tf

FILES, EXAMPLES = 8, 160  # in each
OPTIONS = {
    "model": "mlp",
    "method": "finetune",
    "schedule": "constant",
    "optimizer": "sgd",
    "learning_rate": 0.1,
    "global_batch_size": 32,
    "watch_every": 0.05,
    "delivery_examples": 1,
    "strategy": "one_device",
    "verbose": 0,
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> pathlib.Path:
    """Digits in eight files, and their validation examples."""
    folder = tmp_path_factory.mktemp("digits") / "shards"
    write(InputConfig(dataset="digits"), str(folder), 1)
    whole = next(folder.glob("train*"))
    records = iter(tf.data.TFRecordDataset(str(whole)).as_numpy_iterator())
    for number in range(FILES):
        with tf.io.TFRecordWriter(str(shard(folder, number))) as writer:
            for _ in range(EXAMPLES):
                writer.write(next(records))
    whole.unlink()
    return folder


@pytest.fixture
def places(tmp_path, shards) -> tuple[pathlib.Path, pathlib.Path]:
    """A data set of the first file, and an empty directory to watch."""
    base, incoming = tmp_path / "base", tmp_path / "incoming"
    base.mkdir()
    incoming.mkdir()
    for file in (*shards.glob("validation*"), shards / "features.json", shard(shards, 0)):
        shutil.copy(file, base)
    return base, incoming


def shard(shards: pathlib.Path, number: int) -> pathlib.Path:
    return shards / f"train-{number:05d}-of-{FILES:05d}.tfrecord"


def arrive(file: pathlib.Path, incoming: pathlib.Path) -> None:
    shutil.copy(file, incoming / f".{file.name}")
    os.replace(incoming / f".{file.name}", incoming / file.name)


def config_of(base, incoming, run, **options) -> ExperimentConfig:
    given = {"dataset": f"tfrecord:{base}", "watch": str(incoming), "workdir": str(run), **options}
    return ExperimentConfig.from_flat_dict({**ExperimentConfig().as_flat_dict(), **OPTIONS, **given})


def learner_of(base, incoming, workdir, **options) -> OnlineLearner:
    keras.utils.clear_session()
    config = config_of(base, incoming, workdir, **options)
    check(config)
    train, validation = tfpar.inputs.build_splits(config.input, 0)
    runtime = tfpar.initialize(config)

    def build() -> keras.Model:
        return tfpar.models.build("mlp", tfpar.task_spec(train))

    return OnlineLearner(build, train, validation, config=config, runtime=runtime)


def learned(*arguments, **options) -> dict:
    learner = learner_of(*arguments, **options)
    return {**learner.learn(), "weights": [np.asarray(each) for each in learner._trainer.model.weights]}


# --- what has arrived ------------------------------------------------------------------------------------------------


def test_files_are_complete_once_they_have_not_changed(places, shards):
    base, incoming = places
    config = InputConfig(dataset=f"tfrecord:{base}")
    arrivals = Arrivals(str(incoming), form_of(config, load(config.dataset, "train").info, str(incoming)))
    assert arrivals.look(()) == ([], False)
    content = shard(shards, 1).read_bytes()
    target = incoming / "a.tfrecord"
    target.write_bytes(content[:-9])
    (incoming / "b.tfrecord.part").write_bytes(content)
    (incoming / ".c.tfrecord").write_bytes(content)
    (incoming / "notes.txt").write_text("no examples")
    assert arrivals.look(()) == ([], True)
    target.write_bytes(content)
    assert arrivals.look(()) == ([], True)
    (found,), others = arrivals.look(())
    assert (found.name, found.size, others) == ("a.tfrecord", len(content), False)
    assert arrivals.look({found.identity}) == ([], False)


def test_bad_files_are_named_with_the_reason(places, shards):
    base, incoming = places
    config = InputConfig(dataset=f"tfrecord:{base}")
    arrivals = Arrivals(str(incoming), form_of(config, load(config.dataset, "train").info, str(incoming)))
    content = bytearray(shard(shards, 1).read_bytes())
    (incoming / "whole.tfrecord").write_bytes(content)
    (incoming / "short.tfrecord").write_bytes(content[:-9])
    content[200] ^= 1
    (incoming / "flipped.tfrecord").write_bytes(content)
    (incoming / "empty.tfrecord").touch()
    arrivals.look(())
    good, bad = arrivals.check(arrivals.look(())[0])
    assert [file.name for file in good] == ["whole.tfrecord"]
    reasons = {file.name: reason for file, reason in bad}
    assert reasons.keys() == {"short.tfrecord", "flipped.tfrecord", "empty.tfrecord"}
    assert "incomplete" in reasons["short.tfrecord"]
    assert "checksum" in reasons["flipped.tfrecord"]
    assert "no examples" in reasons["empty.tfrecord"]


def test_images_are_of_the_classes_that_the_data_set_has(tmp_path):
    pixels = tf.io.encode_png(tf.zeros([8, 8, 3], tf.uint8)).numpy()
    for folder in ("base", "incoming"):
        for name in ("cat/1.png", "dog/1.png"):
            (tmp_path / folder / name).parent.mkdir(parents=True)
            (tmp_path / folder / name).write_bytes(pixels)
    incoming = tmp_path / "incoming"
    (incoming / "dog" / "broken.png").write_bytes(pixels[:40])
    (incoming / "bird").mkdir()
    (incoming / "bird" / "1.png").write_bytes(pixels)
    (incoming / "loose.png").write_bytes(pixels)
    config = InputConfig(dataset=f"images:{tmp_path}/base", image_size=8, validation_fraction=0.0)
    form = form_of(config, load(config.dataset, "train", image_size=8, validation_fraction=0.0).info, str(incoming))
    arrivals = Arrivals(str(incoming), form)
    arrivals.look(())
    good, bad = arrivals.check(arrivals.look(())[0])
    assert sorted(file.name for file in good) == ["cat/1.png", "dog/1.png"]
    assert form.source(str(incoming), ["dog/1.png", "cat/1.png"]).read(tf.range(2, dtype=tf.int64))[
        1
    ].numpy().tolist() == [
        1,
        0,
    ]
    reasons = {file.name: reason for file, reason in bad}
    assert "classes are cat, dog" in reasons["bird/1.png"]
    assert "classes are cat, dog" in reasons["loose.png"]
    assert "cannot be read" in reasons["dog/broken.png"]


def test_a_delivery_waits_for_enough_examples_or_long_enough(places, shards, tmp_path, monkeypatch):
    base, incoming = places
    clock = [100.0]
    monkeypatch.setattr("tfpar.incremental.online.chief.time.monotonic", lambda: clock[0])
    config = config_of(
        base, incoming, tmp_path / "run", delivery_examples=200, delivery_seconds=10.0, idle_seconds=60.0
    )
    form = form_of(config.input, load(config.input.dataset, "train").info, str(incoming))
    assert config.incremental is not None
    chief = Chief(config.incremental, form, config, lambda examples: -(-examples // 32))
    arrive(shard(shards, 1), incoming)
    chief.next(0)
    assert chief.next(0) == (None, False)  # 160 examples
    clock[0] += 9.0
    assert chief.next(0) == (None, False)
    clock[0] += 1.0
    first, _ = chief.next(0)
    assert first is not None
    assert (first.number, first.examples, first.steps) == (1, 160, 5)
    arrive(shard(shards, 2), incoming)
    arrive(shard(shards, 3), incoming)
    assert chief.next(0) == (first, False)  # which is not learned yet
    (tmp_path / "run" / "exports" / "000001").mkdir(parents=True)
    chief.next(5)
    second, _ = chief.next(5)
    assert second is not None
    assert (second.first_step, len(second.files), second.steps) == (5, 2, 10)
    (tmp_path / "run" / "exports" / "000002").mkdir(parents=True)
    assert chief.next(15) == (None, False)
    clock[0] += 61.0
    assert chief.next(15) == (None, True)


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_a_journal_that_cannot_be_read_ends_the_start(tmp_path):
    journal = Journal(str(tmp_path))
    delivery = journal.deliver([ArrivedFile("a", 1, 2, 3)], 4)
    journal.reject(ArrivedFile("b", 1, 2), "it is empty")
    again = Journal(str(tmp_path))
    assert (again.deliveries, again.set_aside) == (journal.deliveries, journal.set_aside)
    assert again.deliver([ArrivedFile("c", 1, 2, 3)], 5).first_step == delivery.end
    (tmp_path / NAME).write_text("{")
    with pytest.raises(ConfigError, match=r"deliveries\.json records which files were learned, and cannot be read"):
        Journal(str(tmp_path))


def test_exports_appear_whole_and_old_ones_go(tmp_path):
    exports = Exports(str(tmp_path), keep=2)
    for version in (1, 2, 3):
        (tmp_path / ".new").write_text(f"weights {version}")
        os.replace(tmp_path / ".new", tmp_path / "model.keras")
        exports.add(version, {"version": version})
    assert sorted(path.name for path in (tmp_path / "exports").iterdir()) == ["000002", "000003", "newest"]
    assert (tmp_path / "exports" / "000002" / "model.keras").read_text() == "weights 2"
    assert (tmp_path / "exports" / "newest" / "model.keras").read_text() == "weights 3"
    assert exports.has(1)
    assert not exports.has(4)


# --- what is learned -------------------------------------------------------------------------------------------------


def test_weights_are_those_of_one_pass_over_what_has_arrived(places, shards, tmp_path):
    """Deliveries of 160 and 320 examples, whose batches begin in the middle of the pipeline's epoch."""
    base, incoming = places
    run = tmp_path / "run"
    learner = learner_of(base, incoming, run)
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
    summary = learner.learn()
    assert (summary["deliveries"], summary["examples"], summary["steps"], summary["set_aside"]) == (2, 480, 15, 0)
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
    keras.utils.clear_session()
    plain = tfpar.Trainer(
        lambda: tfpar.models.build("mlp", tfpar.task_spec(sent)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        **{name: OPTIONS[name] for name in ("schedule", "optimizer", "learning_rate", "global_batch_size", "verbose")},
        strategy="one_device",
        shuffle=False,
    )
    plain.fit(from_arrays(np.concatenate(x), np.concatenate(y), num_classes=10), epochs=1)
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
        ({"method": "ewc"}, "--method=ewc works with --tasks"),
        ({"workdir": ""}, "--watch needs a --workdir"),
        ({"watch": "/nowhere"}, "--watch=/nowhere: no such directory"),
        ({"grow_head": True}, "--grow_head works with --tasks"),
    ],
)
def test_what_does_not_go_with_watching_is_refused(options, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        check(config_of("base", tmp_path, tmp_path / "run", **options))


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


def test_killed_in_a_delivery_and_after_one_it_has_the_bits_of_a_run_that_was_not(places, shards, tmp_path):
    def in_the_middle(run: pathlib.Path) -> bool:
        return (run / "checkpoints" / directory_name(2)).exists()

    def after_the_second(run: pathlib.Path) -> bool:
        return (run / "exports" / "000002").exists()

    expected = served(places, shards, tmp_path / "undisturbed", 3, [])
    disturbed = served(places, shards, tmp_path / "disturbed", 3, [in_the_middle, after_the_second])
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


@pytest.mark.cluster
def test_two_workers_learn_what_one_does(places, shards, tmp_path):
    base, incoming = places
    for number in (1, 2):
        arrive(shard(shards, number), incoming)
    (incoming / "bad.tfrecord").write_text("no records")
    (incoming / STOP).touch()
    alone = learned(base, incoming, tmp_path / "one")
    flags = {**OPTIONS, "strategy": "multi_worker", "watch": incoming, "dataset": f"tfrecord:{base}", "verbose": 1}
    flags["workdir"] = tmp_path / "two"
    done = launch(2, "experiments/incremental.py", *[f"--{name}={value}" for name, value in flags.items()])
    assert done.returncode == 0, done.stdout
    assert "bad.tfrecord is set aside" in done.stdout
    assert "learned from 320 examples in 1 delivery; 1 files set aside" in done.stdout
    both = keras.saving.load_model(tmp_path / "two" / "exports" / "newest" / "model.keras")
    for one, other in zip(alone["weights"], both.weights, strict=True):
        np.testing.assert_allclose(np.asarray(other), one, rtol=1e-5, atol=1e-6)
