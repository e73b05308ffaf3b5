"""A run whose workers strangers attack, beside one that is left alone: how much longer it takes.

The workers of a cluster on this machine listen for each other over the native transport, wait as for a worker that is
late, connect, which closes their ports, and train. Half of the runs are attacked: as soon as a worker listens,
strangers connect to it, one after the other until the run ends, and send random bytes, a truncated handshake, one with
a wrong token, or what Gloo would send; a quarter of the connections stay open. Runs with and without attack take turns,
and medians are compared: of the time that the workers take to connect after the wait, of the training, and of the
processor time of the workers.

  python experiments/benchmarks/attacks.py --turns=5

The strangers need a core of their own, if their work is not to count as well. Times need a quiet machine.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import random
import resource
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the modules of tfpar, when started as a script

import tfpar
from tfpar import inputs, models
from tfpar.config import flags
from tfpar.doctor import describe_machine
from tfpar_ops.transport_library import TransportLibrary

from absl import flags as absl_flags

flags.define(sections=[])
WORKERS = absl_flags.DEFINE_integer("workers", 2, "Workers of the cluster.", lower_bound=2)
PAUSE = absl_flags.DEFINE_float("pause_seconds", 0.002, "Seconds between two connections to a worker.", lower_bound=0.0)
TURNS = absl_flags.DEFINE_integer("turns", 5, "Runs of each kind.", lower_bound=1)
STEPS = absl_flags.DEFINE_integer("measured_steps", 400, "Steps of a run.", lower_bound=1)
LATE = absl_flags.DEFINE_float("late_seconds", 4.0, "Seconds for which workers listen before they connect.")
CHILD = absl_flags.DEFINE_string("child", "", "Internal: this process is a worker, and writes here where it listens.")

_OPEN = 200  # connections that strangers keep, the newest
PARTS = ("connecting", "training", "processor")


def announce(folder: Path) -> dict[str, float]:
    """Makes this process write to a file where it listens, before it connects.

    Returns:
      Is filled later: the seconds of connecting, and the connections that were dropped until then.
    """
    connect = TransportLibrary.connect
    found: dict[str, float] = {}

    def announced(library: TransportLibrary, mesh: int, addresses: list[str]) -> None:
        address = library.address(mesh)
        unfinished = folder / f"{address.split()[-1]}.tmp"
        unfinished.write_text(address)
        unfinished.rename(unfinished.with_suffix(".address"))
        time.sleep(LATE.value)
        began = time.perf_counter()
        connect(library, mesh, addresses)
        found.update(connecting=time.perf_counter() - began, dropped=library.dropped(mesh))

    TransportLibrary.connect = announced  # type: ignore[method-assign,assignment]
    return found


def worker(folder: Path) -> dict[str, float]:
    """Connects and trains in this process; returns the seconds of each part."""
    import keras

    found = announce(folder)
    options: dict[str, Any] = {"dataset": "digits", "model": "mlp", "global_batch_size": 64, "steps": STEPS.value}
    config = tfpar.ExperimentConfig.from_flat_dict({**options, "transport": "gloo", "verbose": 0})
    source, _ = inputs.build_splits(config.input, 0)
    runtime = tfpar.initialize(config, source)
    began = time.perf_counter()
    trainer = tfpar.Trainer(
        lambda: models.build("mlp", tfpar.task_spec(source)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        config=config,
        runtime=runtime,
    )
    trainer.fit(source)
    training, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    return {**found, "training": training, "processor": used.ru_utime + used.ru_stime}


def messages(seed: int) -> Iterator[tuple[bytes, bool]]:
    """What strangers send, and whether they leave the connection open, without end."""
    choose = random.Random(seed)
    handshake = struct.pack("8s4i32s", b"tfpar/4", 1, 0, WORKERS.value, 0, bytes(32))
    gloo = struct.pack("6Q", 1 << 40, 1, 7, 0, 1 << 40, 0)
    while True:
        sent = [choose.randbytes(choose.randrange(400)), handshake[: choose.randrange(56)], handshake, gloo * 20, b""]
        yield choose.choice(sent), choose.random() < 0.25


class Attack:
    """Strangers that connect to the workers that announce themselves in a folder, until the end of a run."""

    def __init__(self, folder: Path) -> None:
        self.taken = self.refused = 0
        self._folder, self._over = folder, threading.Event()
        self._thread = threading.Thread(target=self._attack)

    def __enter__(self) -> Attack:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _attack(self) -> None:
        addresses: set[str] = set()
        left_open: collections.deque[socket.socket] = collections.deque()
        for sent, stays in messages(0):
            if self._over.wait(PAUSE.value):
                break
            if len(addresses) < WORKERS.value:
                addresses |= {path.read_text() for path in self._folder.glob("*.address")}
            for address in addresses:
                self._connect(address, sent, left_open if stays else None)
            while len(left_open) > _OPEN:
                left_open.popleft().close()
        for connection in left_open:
            connection.close()

    def _connect(self, address: str, sent: bytes, left_open: collections.deque[socket.socket] | None) -> None:
        host, port = address.split()
        try:
            connection = socket.create_connection((host, int(port)), timeout=5)
        except OSError:
            self.refused += 1
            return
        self.taken += 1
        with contextlib.suppress(OSError):  # it may be closed already
            connection.sendall(sent)
        if left_open is None:
            connection.close()
        else:
            left_open.append(connection)


def run(*, attacked: bool) -> tuple[dict[str, float], str]:
    """The seconds of the slowest worker and the processor time of all, and a note on the connections."""
    note = ""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={WORKERS.value}", "--"]
        command = [*launcher, __file__, f"--child={folder}", *sys.argv[1:]]
        with Attack(Path(folder)) if attacked else contextlib.nullcontext() as attack:
            done = subprocess.run(command, capture_output=True, text=True)
        if attack:
            note = f"{attack.taken} connections, {attack.refused} refused later"
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"training"' in line]
    if done.returncode or len(found) != WORKERS.value:
        raise SystemExit(f"a run failed, attacked={attacked}:\n{(done.stdout + done.stderr)[-3000:]}")
    if attacked and not min(each["dropped"] for each in found):
        raise SystemExit("no stranger reached a worker before it connected")
    seconds = {part: max(each[part] for each in found) for part in PARTS[:2]}
    return {**seconds, "processor": sum(each["processor"] for each in found)}, note


def main(_: list[str]) -> None:
    """Runs in turns and prints a table."""
    if CHILD.value:
        print(json.dumps(worker(Path(CHILD.value))), flush=True)
        return
    results: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for turn, attacked in itertools.product(range(TURNS.value), (False, True)):
        taken, note = run(attacked=attacked)
        results[attacked].append(taken)
        shown = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in taken.items())
        print(f"run {turn}{' attacked' if attacked else ''}: {shown}{'; ' + note if note else ''}", file=sys.stderr)
    print(f"{WORKERS.value} workers, {STEPS.value} steps, {describe_machine()}")
    print(f"{'seconds':<12}{'alone':>10}{'attacked':>10}{'ratio':>8}")
    for part in (*PARTS, "whole run"):
        medians = [statistics.median(_of(each, part) for each in results[attacked]) for attacked in (False, True)]
        print(f"{part:<12}{medians[0]:>10.3f}{medians[1]:>10.3f}{medians[1] / medians[0]:>8.3f}")


def _of(taken: dict[str, float], part: str) -> float:
    return taken[part] if part in taken else sum(taken[each] for each in PARTS[:2])


if __name__ == "__main__":
    flags.run(main)
