"""Starts the launcher on tests/integration/scripts/actor.py, whose processes do what their arguments say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "integration" / "scripts"
ACTOR = str(SCRIPTS / "actor.py")


class Actors:
    """Starts the launcher on actor.py, and knows all processes that it started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if name not in ("TF_CONFIG", "NO_COLOR", "COLUMNS", "LINES")
            },
            "ACTOR_DIR": str(folder),
            "PYTHONPATH": str(ROOT),
        }

    def command(self, flags: str, script: list[str]) -> list[str]:
        return [sys.executable, "-m", "tfpar.launch", *flags.split(), "--", *script]

    def start(self, flags: str, *acts: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(flags, [ACTOR, *acts]),
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(
        self, flags: str, *acts: str, script: list[str] | None = None, start: Any = subprocess.run
    ) -> subprocess.CompletedProcess[str]:
        return start(
            self.command(flags, [ACTOR, *acts] if script is None else script),
            cwd=ROOT,
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )

    def wait_for(self, count: int) -> dict[str, int]:
        """Task name to process number, once that many have started."""
        deadline = time.monotonic() + 300
        while len(found := self.pids()) < count:
            assert time.monotonic() < deadline, f"{count} processes wanted, {found} started"
            time.sleep(0.02)
        return found

    def wait_for_files(self, *names: str) -> None:
        """Returns once the actors have touched all of these."""
        deadline = time.monotonic() + 300
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, f"{names} wanted, {os.listdir(self.folder)} found"
            time.sleep(0.02)

    def pids(self) -> dict[str, int]:
        parts = (path.name.split(".") for path in self.folder.glob("*.pid"))
        return {task: int(pid) for pid, task, _ in parts}

    def alive(self, wait: float = 30.0) -> list[str]:
        """Who still runs after this many seconds."""
        deadline = time.monotonic() + wait
        while running := [task for task, pid in self.pids().items() if _runs(pid)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return running


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def lines_of(output: str, label: str) -> list[str]:
    """What one process has printed, without the prefix."""
    prefix = f"[{label}] "
    return [line.removeprefix(prefix) for line in output.splitlines() if line.startswith(prefix)]
