"""Scripts in processes of their own, in which TensorFlow counts the tensors of a CPU."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"


def printed(folder: pathlib.Path, text: str, *arguments: str, launcher: Sequence[str] = (), **environment: str) -> str:
    """What a script prints in a process of its own, whose environment does not choose an allocator by itself.

    TensorFlow 2.21 counts the tensors of a CPU only with oneDNN, which it leaves out by itself on CPUs without AVX-512,
    and reads the variable when it is loaded: this process, and a fork of the nursery, would come too late.
    """
    script = folder / "script.py"
    script.write_text(text)
    environ = {name: value for name, value in os.environ.items() if name != ALLOCATOR} | environment
    environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
    command = [sys.executable, *launcher, str(script), *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=True).stdout
