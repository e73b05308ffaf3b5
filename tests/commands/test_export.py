"""`tfpar export`: what it refuses before it works, and what it leaves when it fails."""

from __future__ import annotations

import pathlib

from tests.commands.test_cli import tfpar
from tfpar.commands import export
from tfpar.config.errors import TrainingError

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
    assert not output.exists()
