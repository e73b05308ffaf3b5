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
import ctypes
import functools
import itertools
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tfpar
import tfpar_ops
from tfpar.config import ConfigError, flags
from tfpar.doctor import describe_machine
from tfpar_ops import Codec

import ml_dtypes
import numpy as np
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

_CASTS = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}

Name = TypeVar("Name")
Key = tuple[str, str, str]  # operation, codec, size
Times = dict[tuple[Key, str], float]  # seconds of a call, by key and implementation


class _Options(ctypes.Structure):
    """tfpar_codec of codec.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "block", "keep", "scale_bits", "stochastic")),
        *((name, ctypes.c_uint64) for name in ("seed", "step")),
    ]


class _Vector(ctypes.Structure):
    """tfpar_vector, of one part."""

    _fields_ = [
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("offset", ctypes.POINTER(ctypes.c_int64)),
        ("parts", ctypes.c_int64),
    ]


def aligned(elements: int, dtype: type = np.float32) -> np.ndarray:
    """Zeros at a multiple of 64 bytes, where TensorFlow allocates too, their pages already there."""
    size = elements * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, np.uint8)
    memory[:] = 0
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype)


def gradient(elements: int, seed: int = 0) -> np.ndarray:
    """Numbers such as a gradient has."""
    values = aligned(elements)
    values[:] = np.random.default_rng(seed).standard_normal(elements, np.float32) * np.float32(1e-3)
    return values


class Core:
    """The library's C interface on buffers of its own, for one codec and length."""

    def __init__(self, codec: Codec, elements: int, peers: int) -> None:
        path = Path(tfpar_ops.__file__).with_name("libtfpar_ops.so")
        self._library = ctypes.CDLL(str(path))
        scale_bits = 8 * codec.scale_bytes if codec.has_scale else 0
        stochastic = int(codec.rounding == "stochastic")
        self._options = _Options(codec.format.number, codec.block, codec.keep, scale_bits, stochastic)
        self._elements, self._peers, self.blocks = elements, peers, codec.blocks(elements)
        self._x, self._residual, self._sum = gradient(elements), aligned(elements), aligned(elements)
        self._payloads = [aligned(codec.payload_bytes(elements), np.uint8) for _ in range(peers)]
        self._rows = (ctypes.c_void_p * peers)(*(payload.ctypes.data for payload in self._payloads))
        self._offset = (ctypes.c_int64 * 2)(0, elements)
        for payload in self._payloads:
            self._library.tfpar_write_frame(
                ctypes.byref(self._options), ctypes.c_int64(elements), ctypes.c_void_p(payload.ctypes.data)
            )
            self._encode(payload)(0, self.blocks)

    def _vector(self, values: np.ndarray) -> _Vector:
        return _Vector((ctypes.c_void_p * 1)(values.ctypes.data), self._offset, 1)

    def _encode(self, payload: np.ndarray) -> Callable[[int, int], None]:
        function, x = self._library.tfpar_encode, self._vector(self._x)
        function.restype, integer, pointer = None, ctypes.c_int64, ctypes.c_void_p
        function.argtypes = [pointer, pointer, integer, integer, pointer, pointer, pointer, integer, integer, pointer]
        residual = self._residual.ctypes.data
        fixed = (
            ctypes.byref(self._options),
            ctypes.byref(x),
            0,
            self._elements,
            residual,
            residual,
            payload.ctypes.data,
        )
        return lambda first, last: function(*fixed, first, last, None)

    def encode(self) -> Callable[[int, int], None]:
        """Encodes blocks [first, last) with the residual in place."""
        return self._encode(self._payloads[0])

    def decode_sum(self) -> Callable[[int, int], None]:
        """Decodes and sums blocks [first, last) of all peers."""
        function, out = self._library.tfpar_decode_sum, self._vector(self._sum)
        integer, pointer = ctypes.c_int64, ctypes.c_void_p
        function.argtypes = [pointer, integer, pointer, integer, ctypes.c_float, pointer, integer, integer, integer]
        fixed = (ctypes.byref(self._options), self._elements, self._rows, self._peers, 0.25, ctypes.byref(out), 0)
        return lambda first, last: function(*fixed, first, last)

    def triad(self) -> Callable[[int, int], None]:
        """y = a * x + y for the elements of blocks [first, last)."""
        function, block = self._library.tfpar_triad, self._options.block
        function.restype, pointer = None, ctypes.c_void_p
        function.argtypes = [ctypes.c_float, pointer, pointer, ctypes.c_int64]
        x, y = self._x.ctypes.data, self._sum.ctypes.data

        def call(first: int, last: int) -> None:
            begin, end = min(first * block, self._elements), min(last * block, self._elements)
            function(1e-6, x + 4 * begin, y + 4 * begin, end - begin)

        return call


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


def numpy_operations(codec: Codec, gradient: np.ndarray, peers: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The two operations as one would write them by hand: much the same arithmetic, other bits."""
    blocks = codec.blocks(gradient.size)
    x = np.zeros([blocks, codec.block], np.float32)
    x.reshape(-1)[: gradient.size] = gradient
    residual = np.zeros_like(x)
    rng = np.random.default_rng(0)

    def encode_with_residual() -> Any:
        v = x + residual
        stored = numpy_encode(codec, v, rng)
        np.subtract(v, numpy_decode(codec, *stored), out=residual)
        return stored

    payloads = [encode_with_residual() for _ in range(peers)]

    def decode_and_sum() -> np.ndarray:
        total = numpy_decode(codec, *payloads[0])
        for payload in payloads[1:]:
            total += numpy_decode(codec, *payload)
        total *= np.float32(0.25)
        return total

    return encode_with_residual, decode_and_sum


def numpy_encode(codec: Codec, v: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales (for topk: positions) of float32 [blocks, block]."""
    none = np.zeros([len(v), 0], np.float32)
    if codec.kind in _CASTS:
        return v.astype(_CASTS[codec.kind]), none
    if codec.kind == "topk":
        positions = np.argpartition(np.abs(v), -codec.keep, axis=1)[:, -codec.keep :].astype(np.uint16)
        return np.take_along_axis(v, positions.astype(np.int64), 1).astype(ml_dtypes.bfloat16), positions
    if codec.kind == "sign":
        return np.packbits(v < 0, axis=1), np.mean(np.abs(v), axis=1, keepdims=True)
    largest = 448 if codec.kind == "fp8" else (1 << (codec.format.code_bits - 1)) - 1
    scale = np.maximum(np.abs(v).max(axis=1, keepdims=True) / np.float32(largest), np.float32(2.0**-126))
    t = v / scale
    if codec.kind == "fp8":
        return t.astype(ml_dtypes.float8_e4m3fn), scale
    t = np.floor(t + rng.random(t.shape, np.float32)) if codec.rounding == "stochastic" else np.rint(t)
    q = np.clip(t, -largest, largest).astype(np.int8)
    if codec.format.code_bits == 8:
        return q, scale
    codes = (q + (1 << (codec.format.code_bits - 1))).astype(np.uint8)
    planes = np.split(codes, 8 // codec.format.code_bits, axis=1)
    packed = planes[0]
    for number, plane in enumerate(planes[1:], 1):
        packed = packed | plane << np.uint8(number * codec.format.code_bits)
    return packed, scale


def numpy_decode(codec: Codec, codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 [blocks, block] of what `encode` made."""
    if codec.kind in _CASTS:
        return codes.astype(np.float32)
    if codec.kind == "topk":
        out = np.zeros([len(codes), codec.block], np.float32)
        np.put_along_axis(out, scales.astype(np.int64), codes.astype(np.float32), 1)
        return out
    if codec.kind == "sign":
        return (1 - 2 * np.unpackbits(codes, axis=1).astype(np.float32)) * scales
    if codec.kind == "fp8" or codec.format.code_bits == 8:
        return codes.astype(np.float32) * scales
    mask, middle = np.uint8((1 << codec.format.code_bits) - 1), np.float32(1 << (codec.format.code_bits - 1))
    planes = [codes >> np.uint8(place) & mask for place in range(0, 8, codec.format.code_bits)]
    return (np.concatenate(planes, axis=1).astype(np.float32) - middle) * scales


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
