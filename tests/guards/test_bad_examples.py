"""Runs on damaged files: one line that names the example, or a count that is the same in every layout."""

from __future__ import annotations

import json
import shutil

from tests.inputs.test_bad_records import flip
from tests.training.trainers import BATCH, trainer_of
from tfpar import inputs
from tfpar.config import InputConfig
from tfpar.config.errors import TrainingError
from tfpar.guards import bad_examples
from tfpar.guards.non_finite import BadStepsError
from tfpar.inputs import BadRecordError, write
from tfpar.monitor import summary as results

import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "set"
    write.write(InputConfig(dataset="synthetic:6:3:40"), str(folder), shards=2, seed=3)
    for name, number in (("train-00000", 5), ("train-00001", 7), ("validation-00001", 0)):
        flip(folder / f"{name}-of-00002.tfrecord", number)
    return folder


@pytest.fixture
def shards(written, tmp_path):
    """40 training examples and 4 for validation in 2 shards each; two training examples and one other are damaged."""
    return shutil.copytree(written, tmp_path / "set")


def load(shards, split: str, **options) -> inputs.Source:
    return inputs.load(f"tfrecord:{shards}", split, **{"cache": "none", **options})


@pytest.mark.parametrize("cache", ["none", "memory"])
def test_fail_names_the_example_and_no_graph(cache, shards):
    train = load(shards, "train", cache=cache)
    with pytest.raises(BadRecordError) as caught:
        trainer_of(cache=cache).fit(train, epochs=1)
    assert "\n" not in str(caught.value)
    assert any(
        f"train example {index} in file '{shards}/{file}-of-00002.tfrecord' cannot be read: its record does not match"
        in str(caught.value)
        for index, file in ((5, "train-00000"), (27, "train-00001"))
    )
    assert caught.value.__suppress_context__  # what TensorFlow said is not printed before it


def test_fail_in_an_evaluation(shards):
    with pytest.raises(BadRecordError, match=r"validation example 2 in file '.*validation-00001.*' cannot be read"):
        trainer_of().evaluate(load(shards, "validation"))


@pytest.mark.parametrize(("strategy", "cache"), [("one_device", "memory"), ("mirrored", "none")])
def test_skip_counts_the_same_in_every_layout(strategy, cache, shards, tmp_path, capfd):
    options = {"strategy": strategy, "devices": 2 if strategy == "mirrored" else 1, "cache": cache}
    trainer = trainer_of(**options, on_bad_record="skip", workdir=str(tmp_path / "run"))
    train, validation = (load(shards, split, cache=cache, on_bad_record="skip") for split in ("train", "validation"))
    summary = trainer.fit(train, epochs=3, validation=validation)
    assert summary["steps"] == 15
    assert summary["skipped_examples"] == 2 * 3
    assert summary["skipped_validation_examples"] == 1
    assert summary["skipped_steps"] == 0
    assert np.isfinite(summary["eval"]["loss"])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["skipped_examples"] == 6
    said = capfd.readouterr()
    assert "6 in training, 1 in validation (--on_bad_record=skip)" in said.out
    assert "skipped at weight 0, and counted" in said.out
    named = [line for line in said.out.splitlines() if line.startswith("skipped: ")]
    assert len(named) == len(set(named)) == 3  # each once, however often it comes
    for index, file in ((5, "train-00000"), (27, "train-00001"), (2, "validation-00001")):
        split = file.partition("-")[0]
        assert (
            sum(f"{split} example {index} in file '{shards}/{file}-of-00002.tfrecord'" in line for line in named) == 1
        )


def test_skip_trains_on_the_others_as_if_the_bad_ones_were_padding(shards):
    """The same weights as a run on whole data in which these examples have the weight 0 from the start."""
    x, y = np.zeros([40, 6], np.float32), np.zeros([40], np.int32)
    train = load(shards, "train", on_bad_record="skip")
    good = [index for index in range(40) if index not in (5, 27)]
    x[good], y[good] = (part.numpy() for part in train.fetch(tf.constant(good, tf.int64)))
    x[[5, 27]] = np.nan
    sums = [
        trainer_of(on_bad_record="skip").fit(source, epochs=2)["params_sha256"]
        for source in (train, inputs.from_arrays(x, y, num_classes=3, on_bad_record="skip"))
    ]
    assert sums[0] == sums[1]


def test_the_count_goes_on_where_it_was(shards, tmp_path):
    train = load(shards, "train", on_bad_record="skip")
    options = {"on_bad_record": "skip", "workdir": str(tmp_path / "run")}
    assert trainer_of(**options, stop_after=7).fit(train, epochs=3)["steps"] == 7
    assert trainer_of(**options).fit(train, epochs=3)["skipped_examples"] == 6


def test_a_failing_run_can_go_on_skipping(shards, tmp_path):
    with pytest.raises(BadRecordError):
        trainer_of(workdir=str(tmp_path), checkpoint_every=1).fit(load(shards, "train"), epochs=2)
    resumed = trainer_of(workdir=str(tmp_path), on_bad_record="skip", checkpoint_every=1)
    assert resumed.fit(load(shards, "train"), epochs=2)["steps"] == 10  # the trainer's option is enough


def test_steps_without_any_example_change_nothing_and_are_bad(shards):
    for path in sorted(shards.glob("train-*")):
        first, already = (BATCH, 5) if "train-00000" in path.name else (0, 7)
        for number in range(first, 20):
            if number != already:
                flip(path, number)
    train = load(shards, "train", on_bad_record="skip")
    with pytest.raises(BadStepsError, match=r"steps 2 to 4, 3 in a row.*example 8 in file .* checksum"):
        trainer_of(on_bad_record="skip", shuffle=False, max_bad_steps=3).fit(train, epochs=2)


@pytest.mark.parametrize("bad", [slice(8, 16), slice(0, 40)])
def test_steps_without_any_example_are_not_called_non_finite(bad, messages, capfd):
    x, y = np.ones([40, 6], np.float32), np.zeros([40], np.int32)
    x[bad] = np.nan
    train = inputs.from_arrays(x, y, num_classes=3, on_bad_record="skip")
    summary = trainer_of(on_bad_record="skip", shuffle=False).fit(train, epochs=2)
    count = 2 * len(range(*bad.indices(40)))
    assert (summary["skipped_steps"], summary["skipped_examples"]) == (0, count)
    assert "non-finite" not in capfd.readouterr().out
    warned = any(f"no example that can be used ({count} were left out in all)" in line for line in messages)
    assert warned == (summary["train_loss"] is None) == (count == 80)


def test_reading_that_works_again_is_said_to_be_a_moment_of_the_storage(shards):
    source = load(shards, "validation", on_bad_record="skip")
    elements = tf.data.Dataset.range(1).map(lambda _: tf.io.read_file("/no/such/file"))
    said = r"validation split could not be read \(/no/such/file; No such file.*the storage failed temporarily"
    with pytest.raises(TrainingError, match=said), bad_examples.named(source, lambda: [0, 1]):
        next(iter(elements))


def test_errors_of_peers_are_left_alone(shards):
    def look() -> list[int]:
        raise AssertionError("nothing to look for")

    with pytest.raises(tf.errors.UnavailableError), bad_examples.named(load(shards, "train"), look):
        raise tf.errors.UnavailableError(None, None, "a worker is gone")


def test_the_closing_table_is_silent_where_nothing_was_skipped():
    trainer = trainer_of(on_bad_record="skip")
    source = inputs.from_arrays(np.ones([16, 6]), np.arange(16) % 3)
    assert "skipped examples" not in results.closing_table(trainer.fit(source, epochs=1), "")
