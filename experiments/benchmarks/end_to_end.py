"""Training over slow links, end to end: TensorFlow's MultiWorkerMirroredStrategy as it comes, against tfpar.

Every host is a network namespace on this machine with a link shaped by tc, so it needs root, and `ip` and `tc`. The
hosts share the processors, so that computing takes longer here than on hosts of their own, and the gain is smaller.

  sudo .venv/bin/python experiments/benchmarks/end_to_end.py --hosts=4 --link=1gbit

- `resnet18`: ResNet-18 (11 million parameters) on the digits, until the held-out accuracy reaches --target.
- `gpt2`: a few steps of the 124 million parameters of GPT-2, short sequences.

All contenders train the same model from the same first weights, with the same optimizer on the same batches in the same
order. Time is that of the slowest worker, in training steps alone: neither compilation nor evaluation is in it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the workers' modules, when started as a script

from experiments.benchmarks import hosts, netns
from experiments.benchmarks.fleet import Fleet, FleetError
from experiments.benchmarks.hosts import progress
from tfpar.config import flags

from absl import flags as absl_flags

TENSORFLOW = "tensorflow"
TO_TARGET, STEPS_ONLY = "resnet18", "gpt2"

HOSTS = absl_flags.DEFINE_integer("hosts", 4, "Number of hosts.", lower_bound=2, upper_bound=64)
LINK = absl_flags.DEFINE_string("link", "1gbit", "Rate of a host's link: 100mbit, 1gbit, ..., none for one as it is.")
WORKLOADS = absl_flags.DEFINE_multi_enum(
    "workload", [TO_TARGET, STEPS_ONLY], [TO_TARGET, STEPS_ONLY], "What is trained; may be given more than once."
)
EXCHANGES = absl_flags.DEFINE_string(
    "exchanges",
    "none int8 int4",
    "Exchanges of tfpar, divided by blanks, each with other options behind @: int4@jit_segments=4, "
    "none@mesh=pipeline:4@accumulate_steps=4.",
)
TARGET = absl_flags.DEFINE_float("target", 0.98, "Held-out accuracy to reach.", lower_bound=0.0, upper_bound=1.0)
EVALUATE_EVERY = absl_flags.DEFINE_integer("evaluate_every", 11, "Steps between evaluations.", lower_bound=1)
MAX_STEPS = absl_flags.DEFINE_integer("max_steps", 440, "Steps after which the target is given up.", lower_bound=1)
JIT = absl_flags.DEFINE_boolean("xla", True, "Compile forward and backward pass with XLA, for all contenders.")
STEPS = absl_flags.DEFINE_integer("steps", 4, f"Steps of {STEPS_ONLY}.", lower_bound=1)
SEED = absl_flags.DEFINE_integer("seed", 1, "Of first weights and order of examples.")
OUTPUT = absl_flags.DEFINE_string("output", "", "JSON file for the results.")

_BUILD_S, _STEP_S = 600.0, 120.0  # at most, on busy cores


@dataclasses.dataclass
class Result:
    """What a contender did.

    Attributes:
      workload: What was trained.
      contender: By whom.
      first_loss: Of the first step: the same for all contenders, else they did not train the same.
      step_seconds: Of the slowest worker, a value for each call of several steps.
      accuracy: Held-out, after each call of several steps; empty if it was not looked at.
      steps: Done in all.
      reached: Whether the target was.
    """

    workload: str
    contender: str
    first_loss: float
    step_seconds: list[float] = dataclasses.field(default_factory=list)
    accuracy: list[float] = dataclasses.field(default_factory=list)
    steps: int = 1
    reached: bool = False

    @property
    def seconds_a_step(self) -> float:
        """Median."""
        return statistics.median(self.step_seconds)


def run(network: netns.Network, workload: str, contender: str) -> tuple[Result, str]:
    """Trains a workload on all hosts; the result, and what it ran on in words.

    Raises:
      FleetError: A worker failed.
    """
    network.shape(LINK.value)
    command = [sys.executable, "-m", "experiments.benchmarks.end_to_end_worker"]
    environ = functools.partial(hosts.tensorflow_environ, network)
    with Fleet(network, command, environ, hosts.own_cores(network)) as fleet:
        request = {"workload": workload, "contender": contender, "seed": SEED.value, "jit_compile": JIT.value}
        built = fleet.ask({"do": "build", **request}, _BUILD_S)
        result = Result(workload, contender, built[0]["first_loss"])
        while result.steps < (MAX_STEPS.value if workload == TO_TARGET else STEPS.value):
            steps = EVALUATE_EVERY.value if workload == TO_TARGET else 1
            replies = fleet.ask({"do": "steps", "steps": steps}, steps * _STEP_S)
            result.steps += steps
            result.step_seconds.append(max(reply["seconds"] for reply in replies) / steps)
            said = f"{result.steps} steps, {result.step_seconds[-1]:.2f} s a step, loss {replies[0]['loss']:.4f}"
            if workload == TO_TARGET:
                result.accuracy.append(fleet.ask({"do": "evaluate"}, _BUILD_S)[0]["accuracy"])
                said += f", accuracy {result.accuracy[-1]:.4f}"
                result.reached = result.accuracy[-1] >= TARGET.value
            progress(f"{workload}, {contender}: {said}")
            if result.reached:
                break
        return result, f"{built[0]['machine']}; {workload}: {built[0]['parameters']:,} parameters"


def report(results: list[Result]) -> str:
    """A Markdown table; ratios are to TensorFlow's strategy."""
    lines = [
        f"| workload | contender | first loss | s a step | tensorflow / this | steps to {TARGET.value:g} | s to it "
        "| tensorflow / this |",
        "|---|---|" + "---:|" * 6,
    ]
    plain = {result.workload: result for result in results if result.contender == TENSORFLOW}
    for result in results:
        base = plain.get(result.workload)
        seconds = result.seconds_a_step
        cells = [result.workload, result.contender, f"{result.first_loss:.4f}", f"{seconds:.2f}"]
        cells.append(f"{base.seconds_a_step / seconds:.1f}" if base else "")
        if result.reached:
            cells += [str(result.steps), f"{result.steps * seconds:.0f}"]
            ratio = base.steps * base.seconds_a_step / (result.steps * seconds) if base and base.reached else None
            cells.append(f"{ratio:.1f}" if ratio else "")
        else:
            cells += [f"not in {result.steps}" if result.accuracy else "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(_: list[str]) -> int:
    if not hosts.can_measure(LINK.value):
        return 1
    results: list[Result] = []
    machine, failed = "", False
    for workload in dict.fromkeys(WORKLOADS.value):
        for contender in [TENSORFLOW, *EXCHANGES.value.split()]:
            try:
                with netns.network(HOSTS.value) as network:
                    result, machine = run(network, workload, contender)
            except FleetError as error:
                progress(f"{workload}, {contender}: failed: {error}")
                failed = True
                continue
            results.append(result)
            if OUTPUT.value:
                content = [dataclasses.asdict(result) for result in results]
                Path(OUTPUT.value).write_text(json.dumps({"machine": machine, "results": content}, indent=1))
    print(
        f"{machine}; {HOSTS.value} hosts (network namespaces on this machine), link {LINK.value}, "
        f"XLA {'on' if JIT.value else 'off'}\n\n{report(results)}"
    )
    return int(failed)


if __name__ == "__main__":
    flags.run(main)
