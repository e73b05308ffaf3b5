"""How a process of tfpar ends when it is not done: exit codes and exceptions that launchers and schedulers go by."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

# As Python and argparse use it for a wrong command line: another try would only give the same error.
USAGE_ERROR = 2

# EX_TEMPFAIL of sysexits.h: another worker was lost. Start all workers again; they go on from the newest checkpoint.
PEER_LOST = 75

# The run was asked to end (SIGTERM), has saved a checkpoint, and goes on there when it is started again. HTCondor
# recommends this number for jobs that have done so.
PREEMPTED = 85


class PeerLostError(RuntimeError):
    """Another worker has ended, hangs or cannot be reached; the message names it. Uncaught: exit code 75."""


class Preempted(SystemExit):
    """All workers have saved a checkpoint because one was asked to end (SIGTERM). Uncaught: exit code 85."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


def end_now(code: int) -> NoReturn:
    """Ends the process without TensorFlow's shutdown, which may wait for workers that are gone (TensorFlow 2.21)."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
