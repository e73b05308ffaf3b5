"""Plans that were predicted, and how they ran: step time, memory, and whether the best was chosen.

For each case, a model on workers with devices, plans are predicted from passes that are timed in the same call. Then
each runs on a cluster of its own on this machine; the plans take turns, and the fastest turn of each counts. Memory is
measured in a run of its own: the most that tensors asked for at once, and the most that TensorFlow's allocator had
given out, in the process that needs most, divided by the devices of the process. In these runs, CPUs have the allocator
of GPUs: that of oneDNN, which they have otherwise on x86, does not count tensors of less than 256 KiB.

  python experiments/benchmarks/planner.py --cases=mlp:1x2,language_model:2x1
  sudo python experiments/benchmarks/planner.py --cases=mlp:2x1@1gbit --most_plans=4

A case is MODEL:WORKERSxDEVICES@LINK. With a link, such as `1gbit`, each worker is a host of its own, a network
namespace with a link of this rate, which needs root; without, workers communicate over loopback. The workers share the
cores of this machine, as the prediction assumes. Times need a quiet machine.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the module beside it, when started as a script

import tfpar
from experiments.benchmarks import allocations, hosts, netns
from experiments.benchmarks.loops import SETTLED, median_step_seconds
from tfpar import inputs, models
from tfpar.config import flags
from tfpar.doctor import describe_machine
from tfpar.parallel.planner.machine import parse_link
from tfpar.parallel.planner.plan import Prediction
from tfpar.process.cores import cores, listed, share_out
from tfpar.training.planning.machines import between_cpus
from tfpar.training.planning.offline import plan_offline

from absl import flags as absl_flags

MODELS: dict[str, dict[str, Any]] = {
    "mlp": {
        "model": "mlp",
        "model_args": "widths=[2048, 2048, 2048]",
        "dataset": "synthetic:32x32x1",
        "global_batch_size": 256,
    },
    "language_model": {
        "model": "transformer_lm_tiny",
        "dataset": "synthetic:tokens:512",
        "sequence_length": 128,
        "global_batch_size": 32,
    },
    "vit": {"model": "vit", "dataset": "synthetic:32x32x3", "global_batch_size": 32},
}
_PLACES = ("1x2", "2x1", "2x1@1gbit", "4x1@1gbit")
_LATENCY_S = 1e-4  # of a message between namespaces
_COUNTED_STEPS = 8

flags.define(sections=[])
CASES = absl_flags.DEFINE_list(
    "cases", [f"{model}:{place}" for model in MODELS for place in _PLACES], "Cases, see above."
)
MOST = absl_flags.DEFINE_integer("most_plans", 0, "Plans that run, the best predicted; 0: all.", lower_bound=0)
CALLS = absl_flags.DEFINE_integer(
    "measured_calls",
    12,
    "Calls of the training program in a turn that count, of which the median is taken.",
    lower_bound=1,
)
STEPS = absl_flags.DEFINE_integer("steps_per_call", 4, "Steps of a call.", lower_bound=1)
TURNS = absl_flags.DEFINE_integer("turns", 2, "Turns of each plan.", lower_bound=1)
# Of a traced run: TensorFlow's profiler (2.21) ended 2 of 80, and 5 of about 40 in another call, with SIGSEGV in
# `profiler.stop` where the cause was seen.
ATTEMPTS = 3
CHILD = absl_flags.DEFINE_string("child", "", "Internal: options of the run that this process measures.")


def measure(options: dict[str, Any]) -> dict[str, Any]:
    """Trains in this process, one of the workers."""
    import keras

    # A trace of allocations is long, and later steps are as the first ones.
    counts, each = allocations.COUNTING.items() <= os.environ.items(), STEPS.value
    length = {"steps": _COUNTED_STEPS if counts else (SETTLED + CALLS.value) * each, "steps_per_loop": each}
    config = tfpar.ExperimentConfig.from_flat_dict({**options, **length, "verbose": 0})
    source, _ = inputs.build_splits(config.input, 0)
    runtime = tfpar.initialize(config, source)
    with allocations.traced() if counts else contextlib.nullcontext(allocations.Peaks()) as peaks:
        trainer = tfpar.Trainer(
            lambda: models.build(config.model.model, tfpar.task_spec(source), **config.model.arguments()),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            config=config,
            runtime=runtime,
        )
        if counts:
            trainer.fit(source)
        seconds = 0.0 if counts else median_step_seconds(trainer, source, each)
    devices = runtime.topology.local_devices
    return {"seconds": seconds, "asked": peaks.asked / devices, "given": peaks.given / devices}


@contextlib.contextmanager
def cluster(workers: int, link: str) -> Iterator[netns.Network | None]:
    """Hosts with links, if a link is given."""
    if not link:
        yield None
        return
    with netns.network(workers) as network:
        network.shape(link)
        yield network


def _output(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False)


def _cluster_of(
    child: list[str], environ: dict[str, str], workers: int, link: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs a command as every worker of a cluster."""
    with cluster(workers, link) as network:
        if network:
            commands = [
                (
                    network.command(host, child, hosts.own_cores(network)),
                    {**environ, **hosts.tensorflow_environ(network, host)},
                )
                for host in range(workers)
            ]
        else:
            launcher = [sys.executable, "-m", "tfpar.launch", f"--workers={workers}", "--", *child[1:]]
            commands = [(launcher if workers > 1 else child, environ)]
        with ThreadPoolExecutor(len(commands)) as threads:  # all are read at the same time
            return list(threads.map(lambda each: _output(*each), commands))


def run_plan(workers: int, link: str, options: dict[str, Any], *, counts: bool = False) -> dict[str, float]:
    """`measure` on a cluster of its own: the slowest and the largest of its workers.

    Args:
      workers: Number of workers.
      link: Their link, if they have one.
      options: Options of the run.
      counts: Whether all tensors are counted, which may take time.
    """
    child = [sys.executable, __file__, f"--child={json.dumps(options)}", *sys.argv[1:]]
    environ = {**os.environ, **(allocations.COUNTING if counts else {})}
    for attempt in range(ATTEMPTS if counts else 1):
        done = _cluster_of(child, environ, workers, link)
        outputs = "".join(each.stdout for each in done)
        found = [json.loads(line[line.index("{") :]) for line in outputs.splitlines() if '"seconds"' in line]
        if not any(each.returncode for each in done) and len(found) == workers:
            break
        print(f"{options}: attempt {attempt + 1} failed", file=sys.stderr, flush=True)
    else:
        raise SystemExit(f"{options} failed:\n{(outputs + ''.join(each.stderr for each in done))[-3000:]}")
    return {name: max(each[name] for each in found) for name in ("seconds", "asked", "given")}


def predicted(options: dict[str, Any], workers: int, link: str) -> list[Prediction]:
    """The plans that fit, the best first, for workers with as many threads as they will have."""
    os.environ["TF_NUM_INTRAOP_THREADS"] = str(max(1, cores() // workers))
    if own := share_out(workers):
        os.environ.update(listed(own))
        os.sched_setaffinity(0, own[0])
    config = tfpar.ExperimentConfig.from_flat_dict(options)
    between = between_cpus("gloo", parse_link(link, "--cases", _LATENCY_S) if link else None)
    return [*plan_offline(config, hosts=workers, flops=0.0, between=between, hosts_here=workers).fitting]


def run_case(case: str) -> str:
    """Predicts and runs the plans of a case; returns its rows."""
    name, _, place = case.partition(":")
    shape, _, link = place.partition("@")
    workers, devices = map(int, shape.split("x"))
    common = {**MODELS[name], "devices": devices}
    # In a process of its own: XLA reports memory only once in a process.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        plans = process.submit(predicted, common, workers, link).result()[: MOST.value or None]
    ran: list[list[dict[str, float]]] = [[] for _ in plans]
    for _ in range(TURNS.value):
        for number, each in enumerate(plans):
            ran[number].append(run_plan(workers, link, {**common, **each.plan.options()}))
            print(f"{case} {each.plan.options()}: {ran[number][-1]}", file=sys.stderr, flush=True)
    memory = [run_plan(workers, "", {**common, **each.plan.options()}, counts=True) for each in plans]
    return rows(case, plans, ran, memory)


def rows(case: str, plans: list[Prediction], ran: list[list[dict[str, float]]], memory: list[dict[str, float]]) -> str:
    """A row for each plan, and one on the choice.

    Args:
      case: The case.
      plans: The best predicted first.
      ran: What the turns of each measured.
      memory: Bytes of a device that each asked for and was given.
    """
    seconds = [min(turn["seconds"] for turn in turns) for turns in ran]
    lines = []
    for each, took, sizes in zip(plans, seconds, memory, strict=True):
        options = each.plan.options()
        how = f"{options['mesh']}, {options['accumulate_steps']}, {options['recompute']}, {options['shard']}"
        lines.append(
            f"| {case} | {how} | {1e3 * each.time.seconds:.1f} | {1e3 * took:.1f} | {each.time.seconds / took:.2f} "
            f"| {each.memory.size / 2**20:.1f} | {sizes['asked'] / 2**20:.1f} | {sizes['given'] / 2**20:.1f} |"
        )
    lines.append(f"{case}: the choice takes {seconds[0] / min(seconds):.2f} of the best of {len(plans)} plans")
    return "\n".join(lines)


def main(_: list[str]) -> None:
    """Runs all cases and prints a table."""
    if CHILD.value:
        print(json.dumps(measure(json.loads(CHILD.value))), flush=True)
        return
    print(describe_machine())
    print(
        "| case | mesh, micro-batches, recompute, shard | predicted ms | step ms | ratio | predicted MiB | asked MiB "
        "| given MiB |"
    )
    for case in CASES.value:
        print(run_case(case), flush=True)


if __name__ == "__main__":
    flags.run(main)
