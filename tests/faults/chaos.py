"""Kills, stops and preempts random workers of a real cluster at random steps, and checks that nothing was lost.

    python -m tests.faults.chaos --runs=4 --faults=5 --workers=4

Each run trains the same model as an undisturbed one under `tfpar.launch --max_restarts`, and meets its faults one after
the other: SIGKILL, SIGSTOP and SIGTERM in turn, the worker (chief included) and the step drawn from --seed. A run
passes if it recovers from all of them, ends with the `params_sha256` of the undisturbed run, and every survivor of a
SIGKILL or SIGSTOP has named the victim within the bound.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).parents[2]
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
PEER_TIMEOUT = 10.0
_LOST = re.compile(r"\[worker (\d+)\] error: lost (.*?): ended, ")
_NAMED = re.compile(r"worker (\d+) \(")


@dataclasses.dataclass
class Fault:
    """One fault and what came of it.

    Attributes:
      number: The signal.
      victim: Rank of the worker that gets it.
      step: Step after which it comes.
      named: Seconds after which each survivor named the victim, by rank; empty for SIGTERM, which all obey together.
    """

    number: signal.Signals
    victim: int
    step: int
    named: dict[int, float] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        named = ", ".join(f"{seconds:.1f} s" for _, seconds in sorted(self.named.items()))
        return f"{self.number.name} to worker {self.victim} after step {self.step}" + (
            f": named by its peers after {named}" if named else ""
        )


class Cluster:
    """A training run under the launcher, its lines with the time they came."""

    def __init__(
        self,
        workdir: pathlib.Path,
        workers: int,
        steps: int,
        restarts: int,
        exchange: str,
        start: type[subprocess.Popen],
        local_steps: int = 1,
        transport: str = "auto",
        fragments: int = 1,
    ) -> None:
        self.workdir = workdir
        self.lines: list[tuple[float, str]] = []
        environ = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG",)}
        command = [
            *(sys.executable, "-m", "tfpar.launch", f"--workers={workers}", f"--max_restarts={restarts}"),
            *(["--restart_delay=0"] if restarts else []),
            *("--", "experiments/image_classification.py", "--dataset=digits", "--model=mlp"),
            *(f"--steps={steps}", "--global_batch_size=48", "--checkpoint_every=20", f"--eval_every={steps}"),
            *(f"--exchange={exchange}", f"--peer_timeout={PEER_TIMEOUT:g}", "--deterministic", "--uneven_batches"),
            *(f"--local_steps={local_steps}", f"--outer_fragments={fragments}", f"--transport={transport}"),
            "--jit_compile=false",  # the same faults in less time
            f"--workdir={workdir}",
        ]
        self.process = start(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def finish(self, limit: float) -> None:
        """Waits for its end.

        Raises:
          AssertionError: It failed, or wrote no further checkpoint for `limit` seconds.
        """
        newest, deadline = self.newest, time.monotonic() + limit
        while self.process.poll() is None:
            if self.newest != newest:
                newest, deadline = self.newest, time.monotonic() + limit
            assert time.monotonic() < deadline, f"no progress in {limit} s\n{self.output()}"
            time.sleep(0.05)
        assert self.wait() == 0, self.output()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        code = self.process.wait()
        self._reader.join()
        return code

    def stop(self) -> None:
        """Ends it, if it still runs, and everything it started."""
        if self.process.poll() is None:
            self.process.terminate()
            self.process.send_signal(signal.SIGTERM)  # the second one makes the launcher kill
        self.wait()

    @property
    def newest(self) -> int:
        """Step of the newest checkpoint, 0 if there is none."""
        names = [path.name.removeprefix("step-") for path in (self.workdir / "checkpoints").glob("step-*")]
        return max((int(name) for name in names if name.isdigit()), default=0)  # the others are damaged

    @property
    def starts(self) -> int:
        """How often the run was started so far."""
        try:
            return int(json.loads((self.workdir / "restarts.json").read_text())["starts"])
        except (OSError, ValueError):
            return 0

    def summary(self) -> dict:
        """The run's results."""
        return json.loads((self.workdir / "summary.json").read_text())

    def output(self) -> str:
        """All lines so far."""
        return "\n".join(line for _, line in self.lines)

    def pids(self) -> list[int]:
        """Process of each worker, in the order of their ranks: the launcher starts them in it."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                _, parent, *more = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(parent) != self.process.pid:
                    continue
                is_guard = b"\0-I\0-S\0" in (entry / "cmdline").read_bytes()
                if not is_guard:
                    found.append((int(more[17]), int(entry.name)))  # when it started
        return [pid for _, pid in sorted(found)]


def disturb(cluster: Cluster, fault: Fault, workers: int, limit: float, slack: float) -> None:
    """Waits for the step, sends the signal, and waits until training goes on.

    Raises:
      AssertionError: The run ended, or did not go on within `limit` seconds, or a survivor did not name the victim
        within `slack` seconds of the bound.
    """
    _until(cluster, lambda: cluster.newest >= fault.step and len(cluster.pids()) == workers, limit)
    starts, seen = cluster.starts, len(cluster.lines)
    pids = cluster.pids()
    sent = time.monotonic()
    os.kill(pids[fault.victim], fault.number)
    _until(cluster, lambda: cluster.starts > starts, limit)
    if fault.number == signal.SIGTERM:
        return
    for came, line in cluster.lines[seen:]:
        match = _LOST.match(line)
        if match and str(fault.victim) in _NAMED.findall(match[2]):
            fault.named[int(match[1])] = came - sent
    missing = set(range(workers)) - {fault.victim} - set(fault.named)
    assert not missing, f"{fault}: not named by {sorted(missing)}\n{cluster.output()}"
    bound = PEER_TIMEOUT + slack
    assert max(fault.named.values()) <= bound, f"{fault}: later than {bound} s"


def _until(cluster: Cluster, reached, limit: float) -> None:
    deadline = time.monotonic() + limit
    while not reached():
        assert cluster.process.poll() is None, cluster.output()
        assert time.monotonic() < deadline, f"no progress in {limit} s\n{cluster.output()}"
        time.sleep(0.05)


def draw(generator: random.Random, faults: int, workers: int, steps: int) -> list[Fault]:
    """Faults in the order of their steps; signals in turn, workers and steps at random."""
    at = sorted(generator.randrange(steps // 20, steps - steps // 10) for _ in range(faults))
    return [Fault(SIGNALS[n % len(SIGNALS)], generator.randrange(workers), step) for n, step in enumerate(at)]


def run(
    folder: pathlib.Path,
    faults: list[Fault],
    workers: int,
    steps: int,
    exchange: str,
    *,
    local_steps: int = 1,
    transport: str = "auto",
    fragments: int = 1,
    limit: float,
    slack: float = 0.0,
    start: type[subprocess.Popen] = subprocess.Popen,
) -> dict:
    """One run with these faults; returns its `summary.json`."""
    cluster = Cluster(folder, workers, steps, len(faults) + 1, exchange, start, local_steps, transport, fragments)
    try:
        for fault in faults:
            disturb(cluster, fault, workers, limit, slack)
            print(f"  {fault}", flush=True)
        cluster.finish(limit)
    finally:
        cluster.stop()
    return cluster.summary()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4, help="disturbed runs")
    parser.add_argument("--faults", type=int, default=5, help="faults in each")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1500, help="steps in each run")
    parser.add_argument("--exchange", default="int8")
    parser.add_argument("--local_steps", type=int, default=1, help="steps of a round; checkpoints come every 20")
    parser.add_argument("--transport", choices=("auto", "tensorflow", "gloo"), default="auto")
    parser.add_argument("--fragments", type=int, default=1, help="fragments of the model that are sent one by one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=180.0, help="seconds in which each recovery must have happened")
    parser.add_argument(
        "--slack",
        type=float,
        default=0.0,
        help=f"seconds over the bound of {PEER_TIMEOUT:g} allowed for naming the victim, where cores are busy",
    )
    options = parser.parse_args()
    generator = random.Random(options.seed)
    shape = (options.workers, options.steps, options.exchange)
    patience = {name: getattr(options, name) for name in ("limit", "slack", "local_steps", "transport", "fragments")}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        expected = run(folder / "undisturbed", [], *shape, **patience)["params_sha256"]
        print(f"undisturbed: params_sha256 {expected[:16]}", flush=True)
        redone = slowest = 0.0
        for number in range(options.runs):
            faults = draw(generator, options.faults, options.workers, options.steps)
            summary = run(folder / f"run-{number}", faults, *shape, **patience)
            same = summary["params_sha256"] == expected
            redone += summary["steps_redone"]
            slowest = max([slowest, *(seconds for fault in faults for seconds in fault.named.values())])
            print(
                f"run {number}: {summary['restarts']} restarts, weights {'the same' if same else 'DIFFER'}", flush=True
            )
            assert (same, summary["restarts"]) == (True, len(faults)), summary
    print(
        f"{options.runs * options.faults} faults, as many recoveries; {redone:.0f} steps done again; "
        f"slowest naming {slowest:.1f} s"
    )


if __name__ == "__main__":
    main()
