"""Damaged files and diverging runs on two real workers: both skip the same, and both end alike."""

from __future__ import annotations

import json
import pathlib
import re

from tests.inputs.test_bad_records import flip
from tests.integration.test_experiments import CLASSIFY, script, succeeded, summary_of
from tests.integration.test_multi_worker import launch
from tfpar.config import InputConfig
from tfpar.inputs import write
from tfpar.process.exit_codes import BAD_NUMBERS

import pytest
from PIL import Image

pytestmark = pytest.mark.cluster
BAD = {"train-00000": 3, "train-00001": 9, "train-00002": 0, "validation-00000": 1}


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> pathlib.Path:
    """120 training examples and 12 others in 3 shards each, with a damaged one in four of the files."""
    folder = tmp_path_factory.mktemp("shards") / "set"
    write.write(InputConfig(dataset="synthetic:6:3:120"), str(folder), shards=3, seed=3)
    for name, number in BAD.items():
        flip(folder / f"{name}-of-00003.tfrecord", number)
    return folder


def flags(shards: pathlib.Path, *more: str) -> list[str]:
    data = [f"--dataset=tfrecord:{shards}", "--cache=none", "--global_batch_size=16"]
    return [*data, "--model=mlp", "--epochs=2", "--jit_compile=false", *more]


def test_two_workers_skip_what_one_skips(shards, tmp_path):
    skipping = flags(shards, "--on_bad_record=skip")
    # That both workers end with the same weights is what every run makes sure of before it writes its summary.
    said = launch(2, CLASSIFY, *skipping, f"--workdir={tmp_path}/two")
    succeeded(said)
    succeeded(script("image_classification", *skipping, f"--workdir={tmp_path}/one"))
    two, one = summary_of(tmp_path / "two"), summary_of(tmp_path / "one")
    assert two["workers"] == 2
    for key in ("steps", "skipped_examples", "skipped_validation_examples", "skipped_steps"):
        assert two[key] == one[key], key
    assert (two["skipped_examples"], two["skipped_validation_examples"]) == (2 * 3, 1)
    assert two["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
    named = re.findall(
        r"\[worker (\d)\] skipped: .* (train|validation) example (\d+) in file", said.stdout + said.stderr
    )
    assert sorted(named) == [("0", "train", "3"), ("0", "train", "49"), ("0", "train", "80"), ("0", "validation", "1")]


def test_workers_of_parameter_servers_skip_too(tmp_path):
    for part, count in (("train", 20), ("val", 2)):
        for label, grey in (("cat", 50), ("dog", 200)):
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(count):
                Image.new("L", (8, 8), grey + number).save(tmp_path / part / label / f"{number:02}.png")
    (tmp_path / "train" / "dog" / "03.png").write_bytes(b"no image")
    options = [f"--dataset=images:{tmp_path}", "--image_size=8", "--cache=none", "--on_bad_record=skip", "--epochs=3"]
    options += ["--strategy=parameter_server", "--global_batch_size=8", "--model=mlp", "--jit_compile=false"]
    result = launch(2, CLASSIFY, *options, f"--workdir={tmp_path}/run", ps=1)
    succeeded(result)
    assert summary_of(tmp_path / "run")["skipped_examples"] == 3
    assert (result.stdout + result.stderr).count("skipped: --dataset=images") == 1


def test_fail_is_one_line_on_the_worker_that_met_the_example(shards):
    result = launch(2, CLASSIFY, *flags(shards))
    assert result.returncode == 2, result.stdout + result.stderr  # starting again would only meet it again
    lines = [line for line in (result.stdout + result.stderr).splitlines() if "cannot be read" in line]
    pattern = (
        r"error: --dataset=.* train example \d+ in file '.*' cannot be read: its record does not match its checksum"
    )
    assert any(re.search(rf"^\[worker \d\] {pattern}", line) for line in lines), result.stdout + result.stderr
    assert "RecordError" not in result.stdout + result.stderr  # no traceback of the pipeline's insides


def test_a_run_that_diverges_ends_alike_everywhere(tmp_path):
    diverging = ["--optimizer=sgd", "--learning_rate=1e30", "--schedule=constant", "--max_bad_steps=6", "--steps=40"]
    data = ["--dataset=synthetic:6:3:120", "--global_batch_size=16", "--model=mlp", "--jit_compile=false"]
    result = launch(2, CLASSIFY, *data, *diverging, f"--workdir={tmp_path}", "--checkpoint_every=1")
    said = result.stdout + result.stderr
    assert result.returncode == BAD_NUMBERS, said
    assert "6 in a row (--max_bad_steps=6), were skipped" in said
    assert "Traceback" not in said
    listed = json.loads((tmp_path / "bad_steps.json").read_text())
    assert len(listed["steps"]) == 6
    assert all(len(step["examples"]) in (16, 120 % 16) for step in listed["steps"])
    last = max(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoints").glob("step-*"))
    assert last == listed["steps"][0]["step"] - 1
