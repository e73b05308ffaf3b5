"""Places to write to, tried before a program works for them."""

from __future__ import annotations

import errno
import pathlib

from tfpar.process.writable import unwritable, write_error, write_reason

import pytest

pytestmark = pytest.mark.without_keras


def test_what_can_be_written_is_accepted_and_left_alone(tmp_path):
    assert write_error(tmp_path) is None
    assert unwritable("--output", tmp_path / "some" / "new" / "file.onnx") is None
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    assert unwritable("--output", tmp_path / "file" / "below") == (
        f"--output={tmp_path}/file/below: {tmp_path}/file cannot be written to (Not a directory). "
        "Name a writable directory."
    )
    assert unwritable("--log_dir", pathlib.Path("/proc/new/logs")).startswith("--log_dir=/proc/new/logs: /proc cannot")


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/a"), "No space left on device"),
        (
            RuntimeError("{{node SaveV2}} /a/b.tempstate1; No space left on device [Op:SaveV2]"),
            "No space left on device",
        ),
        (RuntimeError("something else"), "something else"),
    ],
)
def test_the_reason_of_a_failed_write(error, reason):
    assert write_reason(error) == reason
