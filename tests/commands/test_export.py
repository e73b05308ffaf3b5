"""`tfpar export`: what it refuses before it works, and what it leaves when it fails."""

from __future__ import annotations

import dataclasses
import pathlib
import re

from tests.commands.test_cli import tfpar
from tfpar.commands import export
from tfpar.config import ConfigError, ExperimentConfig, InputConfig
from tfpar.config.errors import TrainingError
from tfpar.inputs import BadRecordError, build_source

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

pytestmark = pytest.mark.without_keras


def test_an_output_that_cannot_be_written_is_refused_at_once(tmp_path):
    result = tfpar("export", f"--model_file={tmp_path}/gone.keras", "--output=/proc/new")
    assert result.returncode == 2
    assert result.stderr == (
        "error: --output=/proc/new: /proc cannot be written to (No such file or directory). "
        "Name a writable directory.\n"
    )


@pytest.mark.parametrize("folder", [True, False])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), tf.errors.ResourceExhaustedError])
def test_a_full_disk_is_named_and_no_part_is_left(tmp_path, folder, error):
    class Full:
        def export(self, path: str, **options: object) -> None:
            if folder:
                (pathlib.Path(path) / "variables").mkdir(parents=True)
            else:
                pathlib.Path(path).write_text("half")
            raise error if isinstance(error, OSError) else error(None, None, f"{path}; No space left on device")

    output = tmp_path / "new" / "export"
    with pytest.raises(TrainingError, match=r"--output=.*/export could not be written \(No space left on device\)"):
        export._write(Full(), output, "tf_saved_model")
    assert not any(output.parent.iterdir())


@pytest.mark.parametrize("spoiled", [0, 1])
def test_no_number_in_any_output_is_no_agreement(spoiled):
    expected = [np.ones(2), np.ones(2)]
    actual = [np.array([np.nan, 1.0]) if output == spoiled else np.ones(2) for output in range(2)]
    assert np.isnan(export._difference(actual, expected))
    assert export._difference(expected, expected) == 0.0


def test_an_export_has_its_name_after_its_check(tmp_path):
    class Model:
        def export(self, path: str, **options: object) -> None:
            pathlib.Path(path).write_text("model")

    def refuse(path: pathlib.Path) -> None:
        assert path.suffix == ".onnx"
        assert path.read_text() == "model"
        raise ConfigError("differs")

    output = tmp_path / "digits.onnx"
    with pytest.raises(ConfigError, match="differs"):
        export._write(Model(), output, "onnx", refuse)
    assert not any(tmp_path.iterdir())
    export._write(Model(), output, "onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["digits.onnx"]


def test_the_check_reads_what_the_run_held_out(tmp_path, monkeypatch):
    """Not the digits, which are the default of `--dataset`."""

    def of_run(config, path, given):
        assert path == str(tmp_path / "model.keras")
        assert given == export.flags.is_given
        return ExperimentConfig.from_flat_dict({"dataset": "synthetic:4x6x1:3:64", "seed": 7})

    monkeypatch.setattr(export.tfpar, "examples_of_run", of_run)
    monkeypatch.setattr(export.tfpar, "initialize", lambda config: None)
    monkeypatch.setattr(export.tfpar, "load_model", lambda path, spec: spec)
    spec, x = export._loaded(ExperimentConfig(), str(tmp_path / "model.keras"), 5)
    assert (spec.input_shape, spec.num_classes) == ((4, 6, 1), 3)
    assert x.shape == (5, 4, 6, 1)
    of_seed = [build_source(InputConfig(dataset="synthetic:4x6x1:3:64"), "validation", seed) for seed in (0, 7)]
    first = [source.fetch(tf.range(5, dtype=tf.int64))[0].numpy() for source in of_seed]
    assert [np.array_equal(x, each) for each in first] == [False, True]


@pytest.fixture
def damaged(tmp_path) -> InputConfig:
    """A folder of images that are all held out, one of which is no image."""
    for name in ("blue", "red"):
        (tmp_path / name).mkdir()
        for number in range(4):
            Image.new("RGB", (6, 6), name).save(tmp_path / name / f"{number}.png")
    (tmp_path / "blue" / "1.png").write_bytes(b"no image")
    return InputConfig(dataset=f"images:{tmp_path}", image_size=6, validation_fraction=0.9)


@pytest.mark.parametrize("cache", ["none", "auto"])
def test_a_bad_example_that_is_skipped_is_not_checked(damaged, cache):
    source = build_source(dataclasses.replace(damaged, cache=cache, on_bad_record="skip"), "validation")
    x = export._held_out(source, source.info.num_examples)
    assert len(x) == source.info.num_examples - 1
    assert x.max(axis=(1, 2, 3)).tolist() == [1.0] * len(x)  # an example in its place would be black


@pytest.mark.parametrize("cache", ["none", "auto"])
def test_a_bad_example_ends_the_check_and_is_named(damaged, cache):
    with pytest.raises(BadRecordError, match=r"blue/1.png' cannot be read.*--on_bad_record=skip"):
        export._held_out(build_source(dataclasses.replace(damaged, cache=cache), "validation"), 64)


def test_nothing_to_check_on_is_refused(damaged, tmp_path):
    for path in tmp_path.glob("*/*.png"):
        path.write_bytes(b"no image")
    source = build_source(dataclasses.replace(damaged, on_bad_record="skip", cache="none"), "validation")
    with pytest.raises(ConfigError, match=r"--examples=3: the first 3 held-out examples of --dataset=.* all bad"):
        export._held_out(source, 3)


OWN = {
    "export": {"examples", "format", "model_file", "output", "tolerance"},
    "play": {"env", "episodes", "model_file", "seed"},
}
# Which examples a run held out, and how they are read. The error for a model of no run names some of these.
HELD_OUT = {"crop", "data_dir", "dataset", "image_size", "resize", "seed", "sequence_length", "validation_fraction"}
HELD_OUT |= {"cache", "on_bad_record", "tf32", "verbose"}


@pytest.mark.parametrize(("command", "options"), [("export", HELD_OUT), ("play", set())])
def test_flags_are_those_that_have_an_effect(command, options):
    shown = tfpar(command, "--help").stdout
    flags = set(re.findall(r"^  --(?:\[no\])?(\w+)", shown, re.MULTILINE))
    assert flags == OWN[command] | options | {"tensorflow_log"}


def test_a_negative_tolerance_is_refused_at_once():
    """The export would be written, and then be called wrong whatever it is."""
    result = tfpar("export", "--tolerance=-1", "--model_file=a.keras", "--output=b")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --tolerance=-1")
    assert result.stderr.count("\n") == 1
