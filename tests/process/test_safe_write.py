"""Output to a full disk: /dev/full takes nothing, as one."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from tests.checkpoint import small_disk
from tests.integration.test_multi_worker import ROOT
from tfpar.process import safe_write

import pytest

pytestmark = pytest.mark.without_keras

PROGRESS = """
import sys
from tfpar.monitor.progress import Progress
progress = Progress(3)
for step in range(1, 4):
    progress.update(step, {"loss": "1" * 9000})
progress.message("done")
progress.close()
print("trained to the end", file=sys.stderr)
"""
WORKER = "import sys; print('x' * 100_000); sys.exit(3)"


def run(*command: str) -> subprocess.CompletedProcess:
    with open("/dev/full", "w") as full:
        return subprocess.run(
            [sys.executable, *command], stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )


def test_progress_into_a_full_disk_ends_no_training():
    result = run("-c", PROGRESS)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "trained to the end\n"


def test_a_launcher_whose_output_goes_to_a_full_disk_keeps_its_exit_code(tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    result = run("-m", "tfpar.launch", "--workers=2", "--", str(script))
    assert (result.returncode, result.stderr) == (3, "")
    with small_disk.mounted(tmp_path / "logs", kilobytes=64) as logs:
        small_disk.fill(logs)
        result = run("-m", "tfpar.launch", "--workers=2", f"--log_dir={logs}", "--", str(script))
    assert (result.returncode, result.stderr) == (3, "")


def test_a_shortened_text_says_so() -> None:
    assert safe_write.shortened("as it is", 8) == "as it is"
    assert safe_write.shortened("more than that", 8) == "more th…"
    assert safe_write.shortened("ends in a space", 9) == "ends in…"
    assert len(safe_write.shortened("x" * 1000)) == 200


def test_what_a_stream_cannot_encode_is_escaped() -> None:
    for encoding, expected in (
        ("ascii", b"m\\xb2 \\xe9 \\udcf6\n"),
        ("koi8-r", b"m\x9d \\xe9 \\udcf6\n"),
        ("utf-8", b"m\xc2\xb2 \xc3\xa9 \\udcf6\n"),
    ):
        stream = io.TextIOWrapper(io.BytesIO(), encoding)
        assert safe_write.put(stream, "m\xb2 \xe9 \udcf6\n")
        assert stream.buffer.getvalue() == expected


def test_progress_into_a_full_pipe_that_does_not_block_ends_no_training():
    """As another process makes it that shares the terminal or the pipe, such as Node."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with open(reader, "rb"), open(writer, "wb", buffering=0) as full:
        while full.write(bytes(4096)):
            pass
        result = subprocess.run(
            [sys.executable, "-c", PROGRESS],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # Python ignores what does not fit if it has no buffer
        )
    assert (result.returncode, result.stderr) == (0, "trained to the end\n")
