"""What a gradient exchange costs over links of a given rate: TensorFlow's ring, tfpar's exchanges, PyTorch's.

Every host is a network namespace on this machine with a link shaped by tc, so it needs root, and `ip` and `tc`. The
hosts share the processors: with many hosts, or fast links, the processors take most of the time.

  sudo .venv/bin/python experiments/benchmarks/exchange.py --hosts=4 --links=1gbit,none --exchanges="ring none int4"

Exchanges, separated by spaces:

- `ring`: TensorFlow's ring (`CollectiveReduceV2`) over buffers of 32 MiB, with which the others are compared.
  `ring_buffer`: the same over a single buffer that exists already.
- any `--exchange` of tfpar: `none`, `int4`, `int4:pattern=ring`, `topk:0.01`, ..., timed as training does it: gradients
  in tensors that nothing else needs, `Exchange.reduce_sums` with a sidecar in a `tf.function` under the strategy.
- either of these followed by `@gloo`: over the native transport (`--transport=gloo`) instead of TensorFlow's; all are
  measured in the same processes.
- `all_reduce:BYTES`: a single all-reduce.
- with PyTorch, in this Python or that of --torch_python: `gloo`, its all_reduce on a single buffer that exists
  already; `ddp`, `ddp:fp16`, `ddp:powersgd:4`, the buckets of DistributedDataParallel without a hook, and with one.

A time is that of the slowest worker, the median over calls back to back. Bytes are counted by the interface of the host
that sends most, beside those of the formula. The limit is the time that the formula's bytes take on the link. The
predicted time is that of tfpar's cost model, from what `--exchange=auto` measures, on the same link just before.

With --output=FILE, results are written there after each measurement; --resume keeps those that it has.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the workers' modules, when started as a script

from experiments.benchmarks import netns
from experiments.benchmarks.exchange_results import Cell, Measured, Results
from experiments.benchmarks.fleet import Fleet, FleetError
from experiments.benchmarks.hosts import PORT, can_measure, own_cores, progress, tensorflow_environ, threads
from tfpar.config import ConfigError, flags
from tfpar.doctor.cli import check_memory

from absl import flags as absl_flags

# name: of the builder, and the data it is built for
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "resnet50": (
        "resnet50",
        {"task": "classification", "input_shape": (224, 224, 3), "input_dtype": "float32", "num_classes": 1000},
    ),
    "vit": (
        "vit_base",
        {"task": "classification", "input_shape": (224, 224, 3), "input_dtype": "float32", "num_classes": 1000},
    ),
    "gpt2": (
        "transformer_lm_gpt2",
        {"task": "language_model", "input_shape": (1024,), "input_dtype": "int32", "num_classes": 50257},
    ),
}
RING = "ring"
CODECS = ["bf16", "fp16", "fp8", "int8", "int4", "int2", "sign", "topk:0.01", "powersgd:4"]
PATTERNS = [f"int4:pattern={name}" for name in ("all_gather", "ring", "halving_doubling", "binary_blocks")]
TORCH = ["gloo", "ddp:fp16", "ddp:powersgd:4"]

HOSTS = absl_flags.DEFINE_list("hosts", ["2", "4", "8"], "Numbers of hosts.")
LINKS = absl_flags.DEFINE_list(
    "links", ["100mbit", "1gbit", "10gbit", "none"], "Rates of a host's link; none: not shaped."
)
GRADIENTS = absl_flags.DEFINE_list("models", ["resnet50", "gpt2"], f"Shapes of the gradients, of {', '.join(MODELS)}.")
EXCHANGES = absl_flags.DEFINE_string(
    "exchanges",
    " ".join([RING, "ring_buffer", "none", *CODECS, "auto", *TORCH]),
    "Separated by spaces; see above.",
)
WITH_PATTERNS = absl_flags.DEFINE_boolean("patterns", False, f"Also {' '.join(PATTERNS)}.")
REPEATS = absl_flags.DEFINE_integer("repeats", 20, "Calls of which the median counts, at most.", lower_bound=1)
SECONDS = absl_flags.DEFINE_float(
    "seconds", 15.0, "For all calls of a measurement; one there is always.", lower_bound=0.0
)
OUTPUT = absl_flags.DEFINE_string("output", "", "JSON file for the results.")
RESUME = absl_flags.DEFINE_boolean("resume", False, "Keep what --output has, and measure what is missing.")
BEYOND = absl_flags.DEFINE_list(
    "beyond", ["16", "64", "256", "1024"], "Numbers of hosts that the cost model predicts for."
)
TORCH_PYTHON = absl_flags.DEFINE_string("torch_python", sys.executable, "A Python that has PyTorch.")

_START_S, _BUILD_S = 300.0, 600.0  # on busy cores
# A worker's memory: of the program, and in gradients (residuals, results, buffers on their way). Measured.
_PROGRAM_BYTES = 0.7e9
_GRADIENTS = 10


def is_torch(exchange: str) -> bool:
    """Whether it is one of PyTorch's."""
    return exchange.partition(":")[0] in ("gloo", "ddp")


def shapes_of(model: str) -> list[list[int]]:
    """Shapes of a model's trainable variables."""
    import tfpar

    name, task = MODELS[model]
    built = tfpar.models.build(name, tfpar.models.TaskSpec(**task))
    return [list(variable.shape) for variable in built.trainable_variables]


@functools.cache
def shapes_in_a_process(model: str) -> list[list[int]]:
    """The same from a process of its own: TensorFlow and half a GB of weights stay out of this one."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(shapes_of, model).result()


@functools.cache
def torch_missing() -> str:
    """Why PyTorch cannot be measured; empty if it can."""
    found = subprocess.run([TORCH_PYTHON.value, "-c", "import torch.distributed"], capture_output=True, check=False)
    return f"{TORCH_PYTHON.value} has no PyTorch; name one that has with --torch_python" if found.returncode else ""


@contextlib.contextmanager
def workers(
    network: netns.Network, python: str, shapes: Sequence[Sequence[int]], *, torch: bool = False
) -> Iterator[tuple[Fleet, str]]:
    """Workers on all hosts, with gradients; and what they run on and with, in words.

    Args:
      network: The hosts.
      python: The Python that workers run under.
      shapes: Of the gradients.
      torch: Whether they are to run PyTorch instead of TensorFlow.

    Raises:
      FleetError: They cannot start.
    """

    def environ(host: int) -> Mapping[str, str]:
        if torch:
            return {
                "MASTER_ADDR": network.address(0),
                "MASTER_PORT": str(PORT),
                "RANK": str(host),
                "WORLD_SIZE": str(len(network.namespaces)),
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": threads(network),
            }
        return tensorflow_environ(network, host)

    command = [python, "-m", f"experiments.benchmarks.exchange_{'torch' if torch else 'tensorflow'}"]
    network.shape("none")
    # PyTorch as its own launcher starts it, which leaves all cores to all.
    with Fleet(network, command, environ, () if torch else own_cores(network)) as fleet:
        yield fleet, fleet.ask({"do": "start", "shapes": shapes}, _START_S)[0]["machine"]


def measure(fleet: Fleet, network: netns.Network, link: str, exchange: str) -> Measured:
    """One exchange on one link.

    Raises:
      FleetError: It failed, or takes much longer than the link should need.
    """
    load, bits = os.getloadavg()[0], netns.bits_per_second(link)
    # The first calls trace functions and connect peers; that needs no slow link, unless the exchange looks at it.
    network.shape(link if exchange.startswith("auto") else "none")
    built = fleet.ask({"do": "build", "exchange": exchange}, _BUILD_S)
    network.shape(link)
    predicted: dict[str, Any] = {}
    if not is_torch(exchange):
        beyond = [int(hosts) for hosts in BEYOND.value] if bits else []  # else the processors are the link
        predicted = fleet.ask({"do": "predict", "exchange": exchange, "beyond": beyond}, _BUILD_S)[0]
    limit = 8 * (built[0]["formula"] or built[0]["payload"] * len(built)) / bits if bits else 0.0

    def timed(times: int) -> list[dict[str, Any]]:
        return fleet.ask({"do": "time", "times": times}, 60.0 + times * (30.0 + 10.0 * limit))

    replies = timed(1)
    first = max(reply["seconds"][0] for reply in replies)
    times = min(REPEATS.value, int((SECONDS.value - first) / first))
    if times >= 1:  # the first one alone found the link and its buffers in another state
        replies = timed(times)
    return Measured(
        seconds=[max(call) for call in zip(*(reply["seconds"] for reply in replies), strict=True)],
        sent=max(reply["sent"] for reply in replies),
        peak_memory=max(reply["peak_memory"] for reply in replies),
        load=load,
        cpu_seconds=sum(reply.get("cpu_seconds", 0.0) for reply in replies),
        **{
            key: max(reply[key] for reply in built) if key == "formula" and built[0][key] else built[0][key]
            for key in ("formula", "payload", "about")
            if key in built[0]
        },
        **predicted,
    )


def fits(model: str, hosts: int) -> str:
    """Why there is too little memory; empty if there is enough."""
    dense = 4 * sum(functools.reduce(lambda one, other: one * other, shape, 1) for shape in shapes_in_a_process(model))
    needed = hosts * (_PROGRAM_BYTES + _GRADIENTS * dense)
    free = float(check_memory().detail.split()[0]) * 2**30
    return "" if needed < free else f"needs about {needed / 2**30:.0f} GiB of memory, and {free / 2**30:.0f} are free"


def run_group(model: str, hosts: int, cells: Sequence[Cell], results: Results) -> None:
    """Measures cells of one model and number of hosts, of one framework, and adds them to the results."""
    left = list(cells)
    with netns.network(hosts) as network:
        while left:  # a failure takes the workers with it; others go on with the next
            with contextlib.ExitStack() as stack:
                try:
                    torch = is_torch(left[0][3])
                    python = TORCH_PYTHON.value if torch else sys.executable
                    fleet, machine = stack.enter_context(
                        workers(network, python, shapes_in_a_process(model), torch=torch)
                    )
                    results.machine["torch" if torch else "tensorflow"] = machine
                    while left:
                        result = measure(fleet, network, *left[0][2:])
                        _note(results, left.pop(0), result)
                except FleetError as error:
                    _note(results, left.pop(0), Measured([], error=str(error)))


def _note(results: Results, cell: Cell, result: Measured) -> None:
    results.cells[cell] = result
    if OUTPUT.value:
        results.write(Path(OUTPUT.value))
    model, hosts, link, exchange = cell
    text = f"{result.ms:.1f} ms ({len(result.seconds)} calls)" if result.seconds else f"failed: {result.error}"
    ring = results.cells.get((model, hosts, link, RING))
    if ring and ring.seconds and result.seconds and exchange != RING:
        text += f", the ring's time / {ring.ms / result.ms:.2f}"
    progress(f"{model}, {hosts} hosts, link {link}, {exchange}: {text}")


def report(results: Results, cells: Sequence[Cell]) -> str:
    """The Markdown tables, one per model."""
    loads = [results.cells[cell].load for cell in cells if cell in results.cells] or [0.0]
    lines = [
        f"{'; '.join(results.machine.values())}; hosts are network namespaces on this machine, whose load average "
        f"before a measurement was {min(loads):.1f} to {max(loads):.1f}"
    ]
    for model in dict.fromkeys(cell[0] for cell in cells):
        lines += [
            f"\n{model}, {sum(_elements(shape) for shape in shapes_in_a_process(model)) * 4 / 1e6:.0f} MB of float32\n",
            "| hosts | link | exchange | ms | ring / this | of the link's limit | sent, MB | formula, MB | differ by "
            "| predicted, ms | predicted / ms | processors, s |",
            "|---:|---|---|" + "---:|" * 9,
        ]
        for cell in cells:
            if cell[0] == model and cell in results.cells:
                lines.append(row(cell, results.cells[cell], results.cells.get((*cell[:3], RING))))
        lines += predictions([cell for cell in cells if cell[0] == model], results)
    return "\n".join(lines)


def predictions(cells: Sequence[Cell], results: Results) -> list[str]:
    """What the cost model predicts for more hosts than fit on one machine, each with its own processors."""
    links = list(dict.fromkeys(cell[2] for cell in cells))
    rows = []
    for link in links:
        for exchange in dict.fromkeys(cell[3] for cell in cells):
            found = [results.cells[cell] for cell in cells if cell[2:] == (link, exchange) and cell in results.cells]
            predicted = next((result.beyond_ms for result in found if any(result.beyond_ms)), None)
            if predicted:
                rows.append(f"| {link} | {exchange} | {' | '.join(f'{ms:.0f}' if ms else '' for ms in predicted)} |")
    if not rows:
        return []
    head = f"| link | exchange | {' | '.join(f'{int(hosts):,} hosts' for hosts in BEYOND.value)} |"
    return ["\npredicted, ms\n", head, f"|---|---|{'---:|' * len(BEYOND.value)}", *rows]


def _elements(shape: Sequence[int]) -> int:
    return functools.reduce(lambda one, other: one * other, shape, 1)


def row(cell: Cell, result: Measured, ring: Measured | None) -> str:
    """A line of the table."""
    _, hosts, link, exchange = cell
    start = f"| {hosts} | {link} | {exchange} |"
    if not result.seconds:
        return f"{start} {result.error.splitlines()[-1][:80]} |{' |' * 8}"
    bits = netns.bits_per_second(link)
    cells = [
        f"{result.ms:.1f}",
        f"{ring.ms / result.ms:.2f}" if ring and ring.seconds else "",
        f"{8e3 * result.formula / bits / result.ms:.0%}" if bits and result.formula else "",
        f"{result.sent / 1e6:.2f}",
        f"{result.formula / 1e6:.2f}" if result.formula else "",
        f"{result.sent / result.formula - 1:+.1%}" if result.formula else "",
        f"{result.predicted_ms:.1f}" if result.predicted_ms else "",
        f"{result.predicted_ms / result.ms:.2f}" if result.predicted_ms else "",
        f"{result.cpu_seconds:.2f}" if result.cpu_seconds else "",
    ]
    return f"{start} {' | '.join(cells)} |"


def wanted() -> list[Cell]:
    """All cells that the flags ask for, in the order of measuring.

    Raises:
      UsageError: A flag makes no sense.
    """
    exchanges = list(dict.fromkeys([*EXCHANGES.value.split(), *(PATTERNS if WITH_PATTERNS.value else [])]))
    unknown = [name for name in GRADIENTS.value if name not in MODELS]
    if unknown:
        raise ConfigError(f"--models: no {', '.join(unknown)}; there are {', '.join(MODELS)}.")
    hosts = [int(text) if text.isdecimal() else 0 for text in HOSTS.value]
    if min(hosts) < 2 or max(hosts) > 250:
        raise ConfigError(f"--hosts={','.join(HOSTS.value)}: an exchange needs from 2 to 250 hosts.")
    if not all(text.isdecimal() and int(text) > 1 for text in BEYOND.value):
        raise ConfigError(f"--beyond={','.join(BEYOND.value)}: numbers of hosts, from 2.")
    try:
        for link in LINKS.value:
            netns.bits_per_second(link)
    except ValueError as error:
        raise ConfigError(f"--links: {error}.") from error
    if RESUME.value and not OUTPUT.value:
        raise ConfigError("--resume needs --output=FILE, whose results it keeps.")
    return [
        (model, count, link, exchange)
        for model in GRADIENTS.value
        for count in hosts
        for link in LINKS.value
        for exchange in exchanges
        if not ("halving_doubling" in exchange and count & (count - 1))
    ]


def main(_: list[str]) -> int:
    cells = wanted()
    if not can_measure():
        return 1
    stored = Path(OUTPUT.value)
    results = Results.read(stored) if RESUME.value and stored.is_file() else Results({}, {})
    left = [cell for cell in cells if cell not in results.cells]
    for model, hosts, torch in dict.fromkeys((cell[0], cell[1], is_torch(cell[3])) for cell in left):
        problem = fits(model, hosts) or (torch_missing() if torch else "")
        if problem:
            progress(f"{model}, {hosts} hosts{', PyTorch' if torch else ''}: not measured: {problem}")
            continue
        run_group(
            model, hosts, [cell for cell in left if (*cell[:2], is_torch(cell[3])) == (model, hosts, torch)], results
        )
    print(report(results, cells))
    return int(any(result.error for result in results.cells.values()))


if __name__ == "__main__":
    flags.run(main)
