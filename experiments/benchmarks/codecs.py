"""What the gradient codecs cost: GB/s of memory traffic, next to a triad on the same machine in the same run.

Two operations: encoding with the residual updated in place, and decoding and summing the payloads of several peers.
Their traffic is what has to cross the memory bus once: gradient, residual twice and payload; payloads and sum. The
triad, `y = a * x + y` over as many elements, is compiled for the same instruction set in the same library.

- C: the C interface on plain buffers, through ctypes; the call itself is measured empty and subtracted (not with
  several threads, which call while others compute). From 1 MB on. Triad and codec, with one thread and with all, take
  turns in one process, so that what slows the machine for a while slows all four; figures are medians of the turns.
  A share of the triad of more than 105 % says that they did not meet the same machine: "not measured".
- TF: the TensorFlow operation in a loop inside of a `tf.function`. It makes norms as well, and a new tensor each time.
  Its triad takes turns with it in the same way, in a process for each number of threads.
- reference: `tfpar_ops.reference` in the same loop. NumPy: what one would write by hand, one thread.

  python experiments/benchmarks/codecs.py --only=int4 --sizes=1MB
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for its other modules, when started as a script

import tfpar
import tfpar_ops
from experiments.benchmarks.codecs_core import Core, gradient
from experiments.benchmarks.codecs_numpy import numpy_operations
from tfpar.config import ConfigError, flags
from tfpar.doctor import describe_machine
from tfpar_ops import Codec

from absl import flags as absl_flags

SIZES = {"4KB": 1 << 12, "1MB": 1 << 20, "100MB": 100 << 20}  # bytes of gradient
CODECS = {
    "bf16": Codec("bf16"),
    "fp16": Codec("fp16"),
    "fp8": Codec("fp8"),
    "int8": Codec("int8"),
    "int4": Codec("int4"),
    "int4 stochastic": Codec("int4", rounding="stochastic"),
    "int2": Codec("int2"),
    "sign": Codec("sign"),
    "topk 1%": Codec("topk", keep=41),
}
ENCODE, DECODE_SUM = "encode with residual", "decode and sum"

ONLY = absl_flags.DEFINE_list("only", [], f"Codecs, of {', '.join(CODECS)}; all if empty.")
WANTED = absl_flags.DEFINE_list("sizes", list(SIZES), f"Sizes of the gradient, of {', '.join(SIZES)}.")
PEERS = absl_flags.DEFINE_integer("peers", 4, "Payloads that are decoded and summed.", lower_bound=1)
SECONDS = absl_flags.DEFINE_float("seconds", 0.3, "How long each figure is measured, at least.", lower_bound=0.01)
SLOW = absl_flags.DEFINE_boolean("slow", True, "Measure the reference and NumPy too.")

TURNS = 9
LARGEST_SHARE = 1.05  # of the triad that is not noise

Name = TypeVar("Name")
Key = tuple[str, str, str]  # operation, codec, size
Times = dict[tuple[Key, str], float]  # seconds of a call, by key and implementation


def seconds_of(repeat: Callable[[int], object], least: float) -> float:
    """Seconds of a call, the median of five rounds; `repeat` calls so many times."""
    times = calls_for(repeat, least / 5)
    rounds: list[float] = []
    while len(rounds) < 5 and sum(rounds) * times < 10 * least:  # slow ones have had enough earlier
        rounds.append(seconds_now(repeat, times))
    return statistics.median(rounds)


def seconds_in_turns(repeats: dict[Name, Callable[[int], object]], least: float) -> dict[Name, float]:
    """Seconds of a call of each, medians over `TURNS` rounds in which each has its turn."""
    times = {name: calls_for(repeat, least / TURNS) for name, repeat in repeats.items()}
    rounds: dict[Name, list[float]] = {name: [] for name in repeats}
    for _ in range(TURNS):
        for name, repeat in repeats.items():
            rounds[name].append(seconds_now(repeat, times[name]))
    return {name: statistics.median(found) for name, found in rounds.items()}


def calls_for(repeat: Callable[[int], object], least: float) -> int:
    """How many calls take so many seconds, whatever it takes to begin with them."""
    repeat(1)
    times = 1
    while (took := times * seconds_now(repeat, times)) < least / 2:
        times *= 2
    return max(1, int(times * least / took))


def seconds_now(repeat: Callable[[int], object], times: int) -> float:
    """Seconds of a call, of so many."""
    began = time.perf_counter()
    repeat(times)
    return (time.perf_counter() - began) / times


def repeated(call: Callable[[], object], times: int) -> None:
    """Calls so many times."""
    for _ in range(times):
        call()


def spread(
    call: Callable[[int, int], None], blocks: int, threads: int, pool: concurrent.futures.Executor
) -> Callable[[int], object]:
    """Repeats a call on all blocks, shared evenly by threads that do not wait for each other."""
    ends = [blocks * i // threads for i in range(threads + 1)]

    def work(first: int, last: int, times: int) -> None:
        for _ in range(times):
            call(first, last)

    return lambda times: list(pool.map(work, ends, ends[1:], [times] * threads))


def measure_core(
    names: Sequence[str], sizes: Sequence[str], peers: int, numbers: Sequence[int], least: float
) -> dict[int, Times]:
    """Times of triad and C interface with each number of threads, in turns.

    TensorFlow is loaded, as the library is linked to it, but idle.
    """
    tfpar.process.startup.quiet_startup()
    import tensorflow as tf  # noqa: F401

    times: dict[int, Times] = {number: {} for number in numbers}
    with concurrent.futures.ThreadPoolExecutor(max(numbers)) as pool:
        for size, name in itertools.product(sizes, names):
            # At 4 KB a call from Python would take longer than what it calls, and its threads longer still.
            if SIZES[size] < 1 << 20:
                continue
            core = Core(CODECS[name], SIZES[size] // 4, peers)
            for operation, call in ((ENCODE, core.encode()), (DECODE_SUM, core.decode_sum())):
                calls = {"triad": core.triad(), "C": call}
                found = seconds_in_turns(
                    {
                        (number, kind): spread(one, core.blocks, number, pool)
                        for number in numbers
                        for kind, one in calls.items()
                    },
                    least,
                )
                for (number, kind), seconds in found.items():
                    empty = functools.partial(repeated, functools.partial(calls[kind], 0, 0))
                    less = seconds_of(empty, least / 10) if number == 1 else 0.0
                    times[number][(operation, name, size), kind] = seconds - less
    return times


def calls_per_turn(elements: int) -> int:
    """A turn of TensorFlow's own loop takes about 20 microseconds: several calls in each where that would show."""
    return 16 if elements < 1 << 18 else 1


def tensorflow_loops(codec: Codec, elements: int, peers: int, native: bool) -> dict[str, Callable[[int], None]]:
    """The two operations, each in a graph that repeats it; a turn is of `calls_per_turn(elements)` calls."""
    from tfpar_ops import reference

    import tensorflow as tf

    x, variable = tf.constant(gradient(elements)), tf.Variable(tf.zeros([elements]))
    seed = tf.constant([1, 2], tf.int64) if codec.rounding == "stochastic" else None
    payloads = tf.repeat(tfpar_ops.encode([x], None, codec, seed_step=seed).payload, peers, axis=0)

    calls = calls_per_turn(elements)

    def encode_once() -> tf.Tensor:
        if native:
            return tfpar_ops.encode_into(variable, [x], codec, seed_step=seed).payload
        made = reference.encode([x], variable.read_value(), codec, seed_step=seed)
        variable.assign(made.residual)
        return made.payload

    def decode_sum_often(factor: tf.Tensor) -> tf.Tensor:
        # The factor differs from call to call: nothing is the same twice, and could be done once.
        for _ in range(calls):
            factor += (
                1e-9 * (tfpar_ops if native else reference).decode_sum(payloads, codec, elements, factor=factor)[0]
            )
        return factor

    @tf.function
    def encode(turns: tf.Tensor) -> tf.Tensor:
        done = tf.constant(0)
        for _ in tf.range(turns):
            done += [encode_once() for _ in range(calls)][-1][0, 0]
        return done

    @tf.function
    def decode_sum(turns: tf.Tensor) -> tf.Tensor:
        factor = tf.constant(0.25)
        for _ in tf.range(turns):
            factor = decode_sum_often(factor)
        return factor

    return {
        ENCODE: lambda turns: encode(tf.constant(turns)).numpy(),
        DECODE_SUM: lambda turns: decode_sum(tf.constant(turns)).numpy(),
    }


def measure(names: Sequence[str], sizes: Sequence[str], peers: int, threads: int, least: float, slow: bool) -> Times:
    """Times of TensorFlow's and NumPy's operations with so many threads, in a process of its own, where that is fixed.

    With several threads the reference and NumPy are left out.
    """
    tfpar.process.startup.quiet_startup()
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    times: Times = {}
    for size in sizes:
        for name in names:
            codec, elements = CODECS[name], SIZES[size] // 4
            keys = {operation: (operation, name, size) for operation in (ENCODE, DECODE_SUM)}
            for operation, loop in tensorflow_loops(codec, elements, peers, native=True).items():
                found = seconds_beside_triad(loop, Core(codec, elements, peers), threads, least)
                times[keys[operation], "TF"] = found["TF"] / calls_per_turn(elements)
                if SIZES[size] >= 1 << 20:
                    times[keys[operation], "triad beside TF"] = found["triad"]
            if not slow:
                continue
            for operation, loop in tensorflow_loops(codec, elements, peers, native=False).items():
                times[keys[operation], "reference"] = seconds_of(loop, least) / calls_per_turn(elements)
            by_hand = numpy_operations(codec, gradient(elements), peers)
            for operation, call in zip((ENCODE, DECODE_SUM), by_hand, strict=True):
                times[keys[operation], "NumPy"] = seconds_of(functools.partial(repeated, call), least)
    return times


def seconds_beside_triad(loop: Callable[[int], object], core: Core, threads: int, least: float) -> dict[str, float]:
    """Seconds of a turn of TensorFlow's loop, and of the triad."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        return seconds_in_turns({"triad": spread(core.triad(), core.blocks, threads, pool), "TF": loop}, least)


def traffic(key: Key, peers: int) -> int:
    """Bytes that have to cross the memory bus."""
    operation, name, size = key
    payload = CODECS[name].payload_bytes(SIZES[size] // 4)
    return 3 * SIZES[size] + payload if operation == ENCODE else SIZES[size] + peers * payload


def report(one: Times, several: Times, threads: int, peers: int) -> str:
    """The Markdown table of throughput."""
    lines = [
        f"GB/s of memory traffic, and as a share of the triad; {threads} threads are all there are; {peers} peers\n",
        f"| operation | codec | gradient | triad | C | TF | triad, {threads} threads | C, {threads} | TF, {threads} "
        f"| C, {threads} over 1 | reference | NumPy |",
        "|---|---|---" + "|---:" * 9 + "|",
    ]
    measured = {key for key, _ in one}
    for size, name, operation in itertools.product(SIZES, CODECS, (ENCODE, DECODE_SUM)):
        key = (operation, name, size)
        if key not in measured:
            continue

        def cell(times: Times, implementation: str, key: Key = key) -> str:
            if (key, implementation) not in times:
                return ""
            bytes_moved = 3 * SIZES[key[2]] if implementation == "triad" else traffic(key, peers)
            rate = f"{bytes_moved / times[key, implementation] / 1e9:.3g}"
            share = share_of_triad(times, key, implementation, peers)
            if share is None:
                return rate
            return f"{rate} ({share:.0%})" if share <= LARGEST_SHARE else "not measured"

        cells = [cell(one, name) for name in ("triad", "C", "TF")] + [
            cell(several, name) for name in ("triad", "C", "TF")
        ]
        gain = gain_of_threads(one, several, key, peers)
        slow = [cell(one, name).partition(" ")[0] for name in ("reference", "NumPy")]
        lines.append(f"| {' | '.join([*key, *cells, gain, *slow])} |")
    return "\n".join(lines)


def share_of_triad(times: Times, key: Key, implementation: str, peers: int) -> float | None:
    """Throughput over that of the triad that was measured with it; None where none was."""
    triad = times.get((key, {"C": "triad", "TF": "triad beside TF"}.get(implementation, "")))
    if triad is None:
        return None
    return traffic(key, peers) / times[key, implementation] * triad / (3 * SIZES[key[2]])


def gain_of_threads(one: Times, several: Times, key: Key, peers: int) -> str:
    """How many times as fast all threads are as one, of the C interface."""
    if (key, "C") not in several:
        return ""
    shares = [share_of_triad(times, key, "C", peers) for times in (one, several)]
    if any(share is not None and share > LARGEST_SHARE for share in shares):
        return "not measured"
    return f"{one[key, 'C'] / several[key, 'C']:.2f}"


def payload_report(names: Sequence[str], size: str) -> str:
    """The Markdown table of payload bytes, of real payloads against what packed bits and scales would take."""
    import tensorflow as tf

    elements = SIZES[size] // 4
    lines = [
        f"Payload of {elements:,} elements\n",
        "| codec | bytes per element | bits / 8 + scales | more by |",
        "|---|---:|---:|---:|",
    ]
    for name in names:
        codec = CODECS[name]
        code = codec.format.code_bits / 8 * (codec.keep / codec.block if codec.format.keeps else 1)
        seed = tf.constant([1, 2], tf.int64) if codec.rounding == "stochastic" else None
        payload = tfpar_ops.encode([tf.zeros([elements])], None, codec, seed_step=seed).payload
        actual, least = 4 * payload.shape[1] / elements, code + codec.scale_bytes / codec.block
        lines.append(f"| {name} | {actual:.5f} | {least:.5f} | {actual / least - 1:.2%} |")
    return "\n".join(lines)


def in_a_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a new process."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def main(_: list[str]) -> None:
    names = [name for name in CODECS if not ONLY.value or name in ONLY.value]
    unknown = sorted({*ONLY.value} - CODECS.keys() | {*WANTED.value} - SIZES.keys())
    if unknown:
        raise ConfigError(f"unknown codec or size: {', '.join(unknown)}")
    tfpar.process.startup.quiet_startup()
    if not tfpar_ops.uses_library():
        raise SystemExit(f"Nothing to measure: {tfpar_ops.library_status()}. Run `make setup`.")
    threads = len(os.sched_getaffinity(0))
    numbers = (1, threads) if threads > 1 else (1,)
    what = (names, WANTED.value, PEERS.value)
    times = in_a_process(measure_core, *what, numbers, SECONDS.value)
    for number in numbers:
        times[number] |= in_a_process(measure, *what, number, SECONDS.value, SLOW.value and number == 1)
    print(f"{describe_machine()}; {tfpar_ops.library_status()}\n")
    print(report(times[1], times[threads] if threads > 1 else {}, threads, PEERS.value))
    print(f"\n{payload_report(names, WANTED.value[-1])}")


if __name__ == "__main__":
    flags.run(main)
