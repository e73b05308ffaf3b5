"""Local steps over a slow link, end to end: tokens a second, and the time to a loss.

Every host is a network namespace on this machine with a link shaped by tc, so it needs root, and `ip` and `tc`. The
hosts share the processors, so that computing takes longer here than on hosts of their own, and the gain is smaller.

  sudo .venv/bin/python experiments/benchmarks/slow_link.py --hosts=4 --link=100mbit --output=slow_link.json

A byte-level language model is trained from the same first weights on the same tokens until its held-out loss is at most
--target: by TensorFlow's MultiWorkerMirroredStrategy as it comes, and by tfpar with local steps, over the slow link;
and by tfpar with local steps over a link as it is, which tells what the slow link costs. Time is that of training
alone, from the second evaluation interval on: neither compilation nor evaluation is in it.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the workers' modules, when started as a script

from experiments.benchmarks import hosts, netns
from experiments.benchmarks.fleet import Fleet, FleetError
from experiments.benchmarks.hosts import progress
from tfpar.config import flags

from absl import flags as absl_flags

HOSTS = absl_flags.DEFINE_integer("hosts", 4, "Number of hosts.", lower_bound=2, upper_bound=64)
LINK = absl_flags.DEFINE_string("link", "100mbit", "Rate of a host's link: 100mbit, 1gbit, ...")
OPTIONS = absl_flags.DEFINE_string(
    "options", "local_steps=50,exchange=int4", "Options of tfpar, as key=value divided by commas."
)
TARGET = absl_flags.DEFINE_float("target", 2.6, "Held-out loss to reach.", lower_bound=0.0)
EVERY = absl_flags.DEFINE_integer("evaluate_every", 50, "Steps between evaluations.", lower_bound=1)
MAX_STEPS = absl_flags.DEFINE_integer("max_steps", 1000, "Steps after which the target is given up.", lower_bound=1)
SEED = absl_flags.DEFINE_integer("seed", 1, "Of first weights and order of examples.")
OUTPUT = absl_flags.DEFINE_string("output", "", "JSON file for the results.")

_LIMIT_S = 6 * 3600.0


def run(contender: str, link: str) -> dict[str, Any]:
    """Trains on all hosts; what the slowest of them measured.

    Raises:
      FleetError: A worker failed.
    """
    with netns.network(HOSTS.value) as network:
        network.shape(link)
        command = [sys.executable, "-m", "experiments.benchmarks.slow_link_worker"]
        request = {"do": "train", "contender": contender, "options": OPTIONS.value, "seed": SEED.value}
        request |= {"target": TARGET.value, "every": EVERY.value, "most": MAX_STEPS.value}
        environ = functools.partial(hosts.tensorflow_environ, network)
        with Fleet(network, command, environ, hosts.own_cores(network)) as fleet:
            before = network.sent_bytes(0)
            replies = fleet.ask(request, _LIMIT_S)
            sent = network.sent_bytes(0) - before
    spans = [max(values) for values in zip(*(reply["seconds"] for reply in replies), strict=True)]
    first = replies[0]
    timed = spans[1:] or spans  # the first has compilation in it
    per_step = statistics.median(timed) / EVERY.value
    result = {"contender": contender, "link": link, "steps": first["steps"], "loss": first["loss"]}
    result |= {"seconds_a_step": per_step, "tokens_a_second": first["tokens"] / per_step}
    result |= {"reached": first["loss"] <= TARGET.value, "seconds": per_step * first["steps"]}
    return result | {"sent_bytes": sent, "machine": first["machine"], "parameters": first["parameters"]}


def report(results: list[dict[str, Any]]) -> str:
    """A Markdown table; the last column is against TensorFlow's strategy."""
    lines = [
        "| contender | link | s a step | tokens a second | MB sent by host 0 | steps | loss | s to it | gain |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    base = next((one for one in results if one["contender"] == "tensorflow"), None)
    for one in results:
        both = base is not None and base["reached"] and one["reached"]
        cells = [one["contender"], one["link"], f"{one['seconds_a_step']:.3f}", f"{one['tokens_a_second']:.0f}"]
        cells += [f"{one['sent_bytes'] / 1e6:.1f}", str(one["steps"]), f"{one['loss']:.4f}"]
        cells += [f"{one['seconds']:.0f}" if one["reached"] else "not reached"]
        cells.append(f"{base['seconds'] / one['seconds']:.1f}" if both and base else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(_: list[str]) -> int:
    if not hosts.can_measure(LINK.value):
        return 1
    results: list[dict[str, Any]] = []
    failed = False
    for contender, link in (("tfpar", "none"), ("tfpar", LINK.value), ("tensorflow", LINK.value)):
        try:
            results.append(run(contender, link))
        except FleetError as error:
            progress(f"{contender}, {link}: failed: {error}")
            failed = True
            continue
        progress(f"{contender}, {link}: {results[-1]}")
        if OUTPUT.value:
            Path(OUTPUT.value).write_text(json.dumps(results, indent=1))
    if results:
        machine, size = results[0]["machine"], results[0]["parameters"]
        print(f"{machine}; {HOSTS.value} hosts (network namespaces), {size:,} parameters; tfpar: {OPTIONS.value}\n")
        print(report(results))
    return int(failed)


if __name__ == "__main__":
    flags.run(main)
