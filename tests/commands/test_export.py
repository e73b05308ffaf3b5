"""`tfpar export`: what it refuses before it works, and what it leaves when it fails."""

from __future__ import annotations

import pathlib

from tests.commands.test_cli import tfpar
from tfpar.commands import export
from tfpar.config import ConfigError, ExperimentConfig, InputConfig
from tfpar.config.errors import TrainingError
from tfpar.inputs import build_source

import numpy as np
import pytest
import tensorflow as tf

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


def test_a_negative_tolerance_is_refused_at_once():
    """The export would be written, and then be called wrong whatever it is."""
    result = tfpar("export", "--tolerance=-1", "--model_file=a.keras", "--output=b")
    assert result.returncode == 2
    assert result.stderr.startswith("error: --tolerance=-1")
    assert result.stderr.count("\n") == 1
