"""The CUDA kernels through their C interface, on buffers and streams of PyTorch, against the bits of the reference.

A GPU machine needs no TensorFlow for it: `make -C tests/native/cuda pytorch` builds the library, and takes the expected
bits from the file that `expected_bits.py` wrote. With `--profile`, every kernel runs once on a large gradient, for a
profiler to look at; with `--overheads`, prints what calls cost besides memory traffic.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

_FACTOR = 0.25


class _Codec(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("keep", ctypes.c_int32),
        ("scale_bits", ctypes.c_int32),
        ("stochastic", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
    )


class _Vector(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.POINTER(ctypes.c_void_p)),
        ("offset", ctypes.POINTER(ctypes.c_int64)),
        ("parts", ctypes.c_int64),
    )


def _pointers(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))


def vector(parts: Sequence[torch.Tensor]) -> _Vector:
    """The parts as `tfpar_vector`; they must stay alive while it is used."""
    offset = np.cumsum([0, *(part.numel() for part in parts)]).tolist()
    return _Vector(_pointers(parts), (ctypes.c_int64 * len(offset))(*offset), len(parts))


def _address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


class Kernels:
    """The functions of `codec_cuda.h` for one codec; each queues its work on PyTorch's current stream.

    Args:
      library: The shared library of the kernels.
      fields: Those of `tfpar_codec`.
      elements: Length of the vector.
    """

    def __init__(self, library: ctypes.CDLL, fields: Sequence[int], elements: int) -> None:
        self._library = library
        self._codec = _Codec(*fields)
        self._n = ctypes.c_int64(elements)
        library.tfpar_payload_bytes.restype = ctypes.c_int64
        library.tfpar_cuda_scratch_bytes.restype = ctypes.c_int64
        self._bytes = library.tfpar_payload_bytes(ctypes.byref(self._codec), self._n)
        scratch = library.tfpar_cuda_scratch_bytes(ctypes.byref(self._codec), self._n)
        self._scratch = torch.empty(scratch, dtype=torch.uint8, device="cuda")
        self.norms = torch.zeros(2, dtype=torch.float64, device="cuda")
        self._factor = torch.tensor(_FACTOR, device="cuda")

    def payload(self) -> torch.Tensor:
        """A buffer for a payload, filled with bytes that no encoder writes there. int32 [words]."""
        return torch.full([self._bytes // 4], -0x11111112, dtype=torch.int32, device="cuda")

    def encode(self, x: _Vector, residual: torch.Tensor | None, payload: torch.Tensor) -> None:
        """Encodes a vector plus the residual, which gets the new one."""
        self._call(
            "tfpar_cuda_encode",
            *(ctypes.byref(x), ctypes.c_int64(0), self._n, _address(residual), _address(residual)),
            *(_address(payload), _address(self.norms), _address(self._scratch)),
        )

    def decode_sum(self, payloads: Sequence[torch.Tensor], out: _Vector) -> None:
        """Writes the mean of the payloads to a vector."""
        self._call(
            "tfpar_cuda_decode_sum",
            *(self._n, _pointers(payloads), ctypes.c_int64(len(payloads)), ctypes.c_float(0), _address(self._factor)),
            *(ctypes.byref(out), ctypes.c_int64(0), ctypes.c_void_p()),
        )

    def recode(self, payloads: Sequence[torch.Tensor], residual: torch.Tensor, payload: torch.Tensor) -> None:
        """Encodes the mean of the payloads plus the residual, which gets the new one."""
        self._call(
            "tfpar_cuda_recode",
            *(self._n, _pointers(payloads), ctypes.c_int64(len(payloads)), ctypes.c_float(0), _address(self._factor)),
            *(self._n, ctypes.c_int64(0), _address(residual), _address(residual), _address(payload)),
            *(_address(self.norms), _address(self._scratch), ctypes.c_void_p()),
        )

    def _call(self, name: str, *arguments: object) -> None:
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = getattr(self._library, name)(ctypes.byref(self._codec), *arguments, stream)
        if error:
            raise RuntimeError(f"{name}: CUDA error {error}")


def _parts(vector: torch.Tensor, cuts: Sequence[int]) -> list[torch.Tensor]:
    """Copies of the pieces of a vector, each at an address of its own."""
    return [piece.clone() for piece in torch.tensor_split(vector, list(cuts))]


def _same(name: str, got: torch.Tensor, expected: np.ndarray) -> None:
    bits, wanted = got.cpu().numpy().view(np.int32), expected.view(np.int32)
    wrong = np.flatnonzero(bits != wanted)
    if wrong.size:
        raise AssertionError(f"{name}: {wrong.size} of {wanted.size} words differ, the first at {wrong[0]}")


class _Exchange:
    """All workers encode, the payloads are summed, and the sum is encoded again: buffers, and one run over them."""

    def __init__(self, kernels: Kernels, x: torch.Tensor, residual: torch.Tensor) -> None:
        cuts = (1, 4, 20_000, 20_001)  # pieces that are not aligned, and tiny ones
        self._kernels = kernels
        self.parts = [_parts(own, cuts) for own in x]
        self.residuals = [own.clone() for own in residual]
        self.payloads = [kernels.payload() for _ in x]
        self.sums = _parts(torch.full_like(x[0], -5.0), cuts[1:])
        self.recoded, self.recoded_residual = kernels.payload(), residual[0].clone()
        self.norms: list[torch.Tensor] = []

    def restart(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """Copies other values into the same buffers."""
        for own, parts in zip(x, self.parts, strict=True):
            for part, values in zip(parts, torch.split(own, [part.numel() for part in parts]), strict=True):
                part.copy_(values)
        for own, mine in zip(residual, self.residuals, strict=True):
            mine.copy_(own)
        self.recoded_residual.copy_(residual[0])

    def run(self) -> None:
        """Queues everything on the current stream."""
        self.norms = []
        for parts, residual, payload in zip(self.parts, self.residuals, self.payloads, strict=True):
            self._kernels.encode(vector(parts), residual, payload)
            self.norms.append(self._kernels.norms.clone())
        self._kernels.decode_sum(self.payloads, vector(self.sums))
        self._kernels.recode(self.payloads, self.recoded_residual, self.recoded)

    def check(self, name: str, expected: np.lib.npyio.NpzFile, number: int) -> None:
        """Compares every buffer with the reference's."""
        for worker, payload in enumerate(self.payloads):
            _same(f"{name}: payload of worker {worker}", payload, expected[f"payloads_{number}"][worker])
            _same(f"{name}: residual", self.residuals[worker], expected[f"residuals_{number}"][worker])
            squares = [float(np.square(expected[key][worker], dtype=np.float64).sum())
                       for key in ("x", f"residuals_{number}")]  # fmt: skip
            assert np.allclose(self.norms[worker].cpu().numpy(), squares, rtol=1e-12), f"{name}: norms"
        _same(f"{name}: sum", torch.cat(self.sums), expected[f"sum_{number}"])
        _same(f"{name}: recoded", self.recoded, expected[f"recoded_{number}"])
        _same(f"{name}: residual of the sum", self.recoded_residual, expected[f"recoded_residual_{number}"])


def check(library: ctypes.CDLL, expected: np.lib.npyio.NpzFile) -> None:
    """Compares the kernels with the reference: on a stream behind other work, and in a graph that is replayed.

    Raises:
      AssertionError: A result differs; the message names codec, buffer and position.
    """
    x, residual = (torch.from_numpy(expected[key]).cuda() for key in ("x", "residual"))
    for number, fields in enumerate(expected["codecs"].tolist()):
        name = f"codec {fields}"
        kernels = Kernels(library, fields, x.shape[1])
        exchange = _Exchange(kernels, torch.full_like(x, float("nan")), residual)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # the values arrive later than the calls are made
            exchange.restart(x, residual)
            exchange.run()
        stream.synchronize()
        exchange.check(f"{name}, on a stream", expected, number)

        # Calls that neither synchronise nor allocate can be captured; their tables may be freed after the call.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            exchange.run()
        for _ in range(3):
            exchange.restart(x, residual)
            graph.replay()
        torch.cuda.synchronize()
        exchange.check(f"{name}, in a graph", expected, number)
        print(f"{name}: the bits of the reference, on a stream and in a graph", flush=True)


def _milliseconds(queue: Callable[[], None], rounds: int = 21) -> float:
    times = []
    for _ in range(rounds + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        queue()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def _defaults(expected: np.lib.npyio.NpzFile) -> list[list[int]]:
    seen: dict[tuple[int, int], list[int]] = {}
    for fields in expected["codecs"].tolist():
        seen.setdefault((fields[0], fields[4]), fields)
    return list(seen.values())


def profile(library: ctypes.CDLL, expected: np.lib.npyio.NpzFile, elements: int) -> None:
    """Runs each kernel once, on four payloads."""
    x, residual, out = (torch.randn(elements, device="cuda") for _ in range(3))
    for fields in _defaults(expected):
        kernels = Kernels(library, fields, elements)
        payload = kernels.payload()
        kernels.encode(vector([x]), residual, payload)
        kernels.decode_sum([payload] * 4, vector([out]))
        kernels.recode([payload] * 4, residual, kernels.payload())
    torch.cuda.synchronize()


def _convolution(taps: int, inputs: int, outputs: int) -> list[int]:
    """Sizes of a kernel, and of the scale and shift of the normalisation behind it."""
    return [taps * inputs * outputs, outputs, outputs]


def _resnet_50() -> list[int]:
    """Sizes of the variables of ResNet-50."""
    sizes = _convolution(49, 3, 64)
    before = 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for number in range(count):
            sizes += [
                *_convolution(1, before, width),
                *_convolution(9, width, width),
                *_convolution(1, width, 4 * width),
            ]
            if number == 0:
                sizes += _convolution(1, before, 4 * width)
            before = 4 * width
    return [*sizes, 2048 * 1000, 1000]


def _gpt_2() -> list[int]:
    """Sizes of the variables of GPT-2 with 124 million parameters."""
    width = 768
    block = [width, width, 3 * width * width, 3 * width, width * width, width, width, width]
    block += [4 * width * width, 4 * width, 4 * width * width, width]
    return [50257 * width, 1024 * width, *(block * 12), width, width]


def overheads(library: ctypes.CDLL, expected: np.lib.npyio.NpzFile) -> None:
    """Prints the host's time of a call, and the time of models of many variables beside that of one vector."""
    out = torch.empty(250_000_000, device="cuda")
    print(f"write alone: {out.nbytes / _milliseconds(lambda: out.fill_(1.0)) * 1e-6:.0f} GB/s")
    print(f"read alone: {out.nbytes / _milliseconds(lambda: out.sum()) * 1e-6:.0f} GB/s")
    small = Kernels(library, _defaults(expected)[4], 1000)
    one, payload = torch.randn(1000, device="cuda"), small.payload()
    view = vector([one])
    start = time.perf_counter()
    for _ in range(2000):
        small.encode(view, None, payload)
    seconds = (time.perf_counter() - start) / 2000
    print(f"one call to encode 1,000 elements: {seconds * 1e6:.1f} microseconds of the host, ctypes included")
    torch.cuda.synchronize()
    for name, sizes in (("ResNet-50", _resnet_50()), ("GPT-2", _gpt_2())):
        parts = [torch.randn(size, device="cuda") for size in sizes]
        whole = [torch.cat(parts)]
        residual = torch.zeros_like(whole[0])
        for fields in _defaults(expected):
            kernels = Kernels(library, fields, whole[0].numel())
            payload = kernels.payload()
            times = {}
            for kind, view in (("parts", vector(parts)), ("whole", vector(whole))):
                encode = functools.partial(kernels.encode, view, residual, payload)
                times["encode", kind] = _milliseconds(encode)
                times["decode", kind] = _milliseconds(functools.partial(kernels.decode_sum, [payload] * 4, view))
            print(
                f"{name}, {len(sizes)} variables, codec {fields}: "
                + ", ".join(
                    f"{call} {times[call, 'parts']:.3f} ms, as one vector {times[call, 'whole']:.3f} ms"
                    for call in ("encode", "decode")
                ),
                flush=True,
            )


def main() -> None:
    """Runs what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", help="the shared library of the kernels (libcuda_codecs.so)")
    parser.add_argument("expected", help="the file that expected_bits.py wrote")
    parser.add_argument("--profile", type=int, metavar="ELEMENTS", help="run each kernel once instead")
    parser.add_argument("--overheads", action="store_true", help="measure calls and models of many variables instead")
    arguments = parser.parse_args()
    library, expected = ctypes.CDLL(arguments.library), np.load(arguments.expected)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}", flush=True)
    if arguments.profile:
        profile(library, expected, arguments.profile)
    elif arguments.overheads:
        overheads(library, expected)
    else:
        check(library, expected)


if __name__ == "__main__":
    sys.exit(main())
