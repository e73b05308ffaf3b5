"""Programs whose output nobody reads to its end."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

from tests import nursery

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize("program", ["tfpar.exchange", "tfpar.cluster", "tfpar.doctor"])
def test_a_program_without_a_reader_ends_without_a_traceback(program):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        command = [sys.executable, "-m", program]
        done = nursery.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writer)
    assert done.returncode == -signal.SIGPIPE, done.stderr
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
