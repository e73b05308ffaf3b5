"""Worker processes, one per host of a `netns.Network`, that do in step what they are told.

The starter's side is `Fleet`; a worker's program ends in `serve(handle)`. Requests and replies are JSON, a line each.
Only the standard library is used, so that workers may run under another Python than the starter.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from experiments.benchmarks.netns import Network

ROOT = Path(__file__).resolve().parents[2]
_LOG_LINES = 8


class FleetError(RuntimeError):
    """A worker failed, died or did not answer in time; the fleet is of no more use."""


class Fleet:
    """One worker process per host.

    Args:
      network: The hosts.
      command: What each runs, in the root of the repository.
      environ: Environment variables of a host's worker, besides the starter's.
      cores: Numbers of the cores of each host, if it does not use all.
    """

    def __init__(
        self,
        network: Network,
        command: Sequence[str],
        environ: Callable[[int], Mapping[str, str]],
        cores: Sequence[Sequence[int]] = (),
    ) -> None:
        self._logs = [tempfile.TemporaryFile() for _ in network.namespaces]  # noqa: SIM115 - closed with the fleet
        self._workers = [
            subprocess.Popen(
                network.command(host, command, cores),
                env={**os.environ, **environ(host)},
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the starter, who ends them
            )
            for host, log in enumerate(self._logs)
        ]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            with contextlib.suppress(BrokenPipeError):
                worker.communicate()
        for log in self._logs:
            log.close()

    def ask(self, request: Mapping[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Sends a request to all; their replies, by host.

        Raises:
          FleetError: One failed, or has not answered after so many seconds.
        """
        line = json.dumps(request).encode() + b"\n"
        for host, worker in enumerate(self._workers):
            assert worker.stdin is not None
            try:
                worker.stdin.write(line)
                worker.stdin.flush()
            except BrokenPipeError:
                raise FleetError(f"worker {host} has ended: {self._last_words(host)}") from None
        return self._replies(request, time.monotonic() + seconds)

    def _replies(self, request: Mapping[str, Any], deadline: float) -> list[dict[str, Any]]:
        replies: dict[int, dict[str, Any]] = {}
        with selectors.DefaultSelector() as selector:
            for host, worker in enumerate(self._workers):
                assert worker.stdout is not None
                selector.register(worker.stdout, selectors.EVENT_READ, host)
            while len(replies) < len(self._workers):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    silent = [host for host in range(len(self._workers)) if host not in replies]
                    raise FleetError(f"no answer to {request} from workers {silent}: {self._last_words(silent[0])}")
                for key, _ in ready:
                    line = key.fileobj.readline()  # type: ignore[union-attr]
                    if not line:
                        raise FleetError(f"worker {key.data} has ended: {self._last_words(key.data)}")
                    replies[key.data] = json.loads(line)
                    if "error" in replies[key.data]:
                        raise FleetError(f"worker {key.data}: {replies[key.data]['error']}")
                    selector.unregister(key.fileobj)
        return [replies[host] for host in range(len(self._workers))]

    def _last_words(self, host: int) -> str:
        """The end of a worker's standard error."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._workers[host].wait(1.0)
        log = self._logs[host]
        log.seek(0)
        return "\n".join(log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]) or "it said nothing"


def explain(document: str | None) -> None:
    """Ends a worker's program that a person has started, with what it is; returns if a starter has.

    Args:
      document: The docstring of the program.
    """
    if sys.argv[1:] or sys.stdin.isatty():
        print(f"{(document or '').strip()}\n\nIt has no flags: another program starts it.")
        raise SystemExit(0 if sys.argv[1:] in (["--help"], ["-h"]) else 2)


def serve(handle: Callable[[dict[str, Any]], dict[str, Any]]) -> NoReturn:
    """Answers requests until the starter has gone.

    Args:
      handle: Makes the reply to a request.
    """
    # What libraries print must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        for line in sys.stdin:
            requests.put(line)
        os._exit(0)  # also out of a call that waits for a peer

    threading.Thread(target=listen, daemon=True).start()
    while True:
        request = json.loads(requests.get())
        try:
            reply = handle(request)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(reply), file=replies)
