"""Places to write to, tried before a program works for them."""

from __future__ import annotations

import errno
import os
import pathlib
import tempfile

from tests import permissions
from tfpar.process.writable import read_error, unwritable, write_error, write_reason

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


def test_a_directory_that_may_not_be_searched_is_named(tmp_path, monkeypatch):
    closed, stat = tmp_path / "closed", os.stat
    closed.mkdir()

    def denied(path: object, *args: object, **options: object) -> os.stat_result:
        if closed in pathlib.Path(str(path)).parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, *args, **options)

    def refused(**options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(options["dir"]))

    monkeypatch.setattr(os, "stat", denied)
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert unwritable("--output", closed / "new" / "file") == (
        f"--output={closed}/new/file: {closed} cannot be written to (Permission denied). Name a writable directory."
    )


def test_what_may_not_be_read_is_told_from_what_is_not_there(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "folder/file", "folder/file/below", "gone", "gone/too", "pipe"):
        assert read_error(tmp_path / name) is None
    for mode in (0o311, 0o644, 0):
        with permissions.of(tmp_path / "folder", mode):
            assert read_error(tmp_path / "folder").errno == errno.EACCES
            assert (read_error(tmp_path / "folder" / "file") is None) == (mode == 0o311)
    with permissions.of(tmp_path / "folder" / "file", 0):
        assert read_error(tmp_path / "folder" / "file").errno == errno.EACCES


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
