"""Agreement between workers, outside the training step: small values, compared or gathered on the host.

Everything is a gather of bytes over a group of CPUs, whatever the strategy and the devices of the exchange: results are
exact, and the same bits on every worker.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from tfpar.collectives.group import HOST_MESSAGE_KEYS, Group
from tfpar.config import ConfigError

import numpy as np
import tensorflow as tf

# The first row of a gather holds the length of a worker's bytes, what the worker is doing, and the bytes themselves
# where they fit: most do.
_LENGTH = struct.Struct("<q")
_ACTIVITY_BYTES = 64
_ROW_BYTES = 320
_HEAD_BYTES = _LENGTH.size + _ACTIVITY_BYTES
_FITTING_BYTES = _ROW_BYTES - _HEAD_BYTES
_ALIGNMENT = 64  # of the first byte of an array

# Longer values follow in pieces of 2^n int32 words (collectives take no bytes). The runtime remembers the size of a
# call site's tensors, so every size has an instance key of its own.
_SMALLEST_EXPONENT, _LARGEST_EXPONENT = 6, 22
_ROW_KEY = HOST_MESSAGE_KEYS[0]
_GATHER_KEYS = HOST_MESSAGE_KEYS[1:32]
# The runtime remembers the sender of a key, so messages in the other direction have other keys.
_MESSAGE_KEYS = {True: HOST_MESSAGE_KEYS[32:64], False: HOST_MESSAGE_KEYS[64:]}  # by whether they go to a higher rank


class WorkerAgreement:
    """Small agreements between the workers of a group, outside the training step.

    Every worker makes the same calls in the same order, not inside a `tf.function`. With one worker nothing is sent.
    If a worker is lost, calls raise TensorFlow's error of a failed collective (see `tfpar.cluster.failure`).

    Every gather carries what its worker is doing. Where workers meet in different activities, such as an evaluation
    and a step, all of them raise a ConfigError that names both. `broadcast` does not check this.

    Args:
      group: The workers, with their CPUs as members.
      activity: What the worker is doing when it makes these calls, as it reads after "worker 0 is in": `"predict()"`.
        The same on every worker; 64 bytes of it are compared.
    """

    def __init__(self, group: Group, activity: str = "another call") -> None:
        self._group, self._activity = group, activity

    def during(self, activity: str) -> WorkerAgreement:
        """The agreement between the same workers in another activity.

        Args:
          activity: See the class.
        """
        return WorkerAgreement(self._group, activity)

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._group.size

    def all_equal(self, value: Any) -> bool:
        """Whether all workers hold the same value.

        Args:
          value: Any object that its `repr` identifies; a digest of 24 bytes is sent (BLAKE2b).
        """
        digest = hashlib.blake2b(repr(value).encode(), digest_size=24).digest()
        return len(set(self.gather_bytes(digest))) == 1

    def gather(self, value: Any) -> list[Any]:
        """The workers' values, in the order of their ranks.

        Args:
          value: Any value that JSON can represent, NumPy's scalars included; floats keep their bits.
        """
        return [json.loads(text) for text in self.gather_bytes(json.dumps(value, default=_as_python).encode())]

    def gather_arrays(self, array: np.ndarray) -> list[np.ndarray]:
        """The workers' arrays, in the order of their ranks, bit for bit.

        Args:
          array: Of a numeric type that TensorFlow has. Shapes and types may differ between workers.
        """
        array = np.asarray(array)
        header = json.dumps([tf.as_dtype(array.dtype).name, array.shape]).encode()
        # The array begins at an address that is aligned for every type, which saves a copy of large weights.
        data = bytearray(header.ljust(-(-len(header) // _ALIGNMENT) * _ALIGNMENT - 1) + b"\n")
        data += _bytes_of(array)
        arrays = []
        for gathered in self._gather(data):
            end = gathered.index(b"\n")
            dtype, shape = json.loads(gathered[:end])
            arrays.append(_array_at(gathered, end + 1, tf.as_dtype(dtype).as_numpy_dtype, shape))
        return arrays

    def sum_arrays(self, array: np.ndarray) -> np.ndarray:
        """The sum of the workers' arrays, added up in the order of their ranks: the same bits on each.

        Args:
          array: Of the same shape and type on every worker.
        """
        return np.sum(self.gather_arrays(array), axis=0) if self._group.size > 1 else array

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the workers in float64, the same bits on each."""
        return self.sum_arrays(np.array(values, np.float64)).tolist()

    def mean(self, value: float) -> float:
        """The mean of the workers' values, the same bits on each."""
        return self.sums([value])[0] / self._group.size

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """The workers' bytes, of any lengths, in the order of their ranks."""
        return [bytes(gathered) for gathered in self._gather(data)]

    def _gather(self, data: bytes | bytearray) -> Sequence[bytes | bytearray]:
        if self._group.size == 1:
            return [data]
        activity = self._activity.encode()[:_ACTIVITY_BYTES].ljust(_ACTIVITY_BYTES, b"\0")
        head = _LENGTH.pack(len(data)) + activity
        rows = self._all_gather((head + data[:_FITTING_BYTES]).ljust(_ROW_BYTES, b"\0"), _ROW_KEY)
        self._check_activities([row[_LENGTH.size : _HEAD_BYTES] for row in rows])
        lengths = [_LENGTH.unpack_from(row)[0] for row in rows]
        gathered = [bytearray(row[_HEAD_BYTES:]) for row in rows]
        for start, exponent in _pieces(_FITTING_BYTES, max(lengths)):
            size = 4 << exponent
            pieces = self._all_gather(data[start : start + size].ljust(size, b"\0"), _GATHER_KEYS[exponent])
            for worker_bytes, piece in zip(gathered, pieces, strict=True):
                worker_bytes += piece
        for worker_bytes, length in zip(gathered, lengths, strict=True):
            del worker_bytes[length:]
        return gathered

    def _check_activities(self, activities: Sequence[bytes]) -> None:
        """Refuses workers that meet in different activities: they would take each other's values for their own."""
        if len(set(activities)) == 1:
            return
        ranks: dict[str, list[str]] = {}
        for rank, activity in zip(self._group.members, activities, strict=True):
            ranks.setdefault(activity.rstrip(b"\0").decode(errors="replace"), []).append(str(rank))
        places = ", while ".join(
            f"worker {each[0]} is in {activity}" if len(each) == 1 else f"workers {', '.join(each)} are in {activity}"
            for activity, each in ranks.items()
        )
        raise ConfigError(
            f"{places}. All workers must make these calls together: if a hook, a callback or the script calls "
            "predict(), evaluate() or fit() on some workers only, as on the chief, call it on every worker."
        )

    def broadcast(self, arrays: Sequence[np.ndarray], source: int = 0) -> list[np.ndarray]:
        """The arrays of one worker, bit for bit.

        Args:
          arrays: Of the same shapes and types on every worker.
          source: Rank of that worker.
        """
        if self._group.size == 1:
            return list(arrays)
        data, starts = bytearray(), []
        for array in arrays:
            data += bytes(-len(data) % _ALIGNMENT)
            starts.append(len(data))
            data += _bytes_of(array)
        for start, exponent in _pieces(0, len(data)):
            piece = bytes(data[start : start + (4 << exponent)])
            received = self._pass_on(piece.ljust(4 << exponent, b"\0"), exponent, source)
            data[start : start + len(piece)] = received[: len(piece)]
        pairs = zip(arrays, starts, strict=True)
        return [_array_at(data, start, array.dtype, array.shape) for array, start in pairs]

    def _pass_on(self, data: bytes, exponent: int, source: int) -> bytes:
        """Sends one worker's bytes down a binary tree: counted from it, member i has the children 2i + 1 and 2i + 2."""
        rank, size = self._group.rank, self._group.size
        place = (rank - source) % size
        with tf.device("/device:CPU:0"):
            words = tf.constant(np.frombuffer(data, np.int32))
            if place > 0:
                parent = ((place - 1) // 2 + source) % size
                words = self._group.receive(words.shape, tf.int32, parent, _MESSAGE_KEYS[parent < rank][exponent])
            for child in range(2 * place + 1, min(2 * place + 3, size)):
                target = (child + source) % size
                self._group.send(words, target, _MESSAGE_KEYS[rank < target][exponent])
        return words.numpy().tobytes()

    def _all_gather(self, data: bytes | bytearray, instance: int) -> list[bytes]:
        with tf.device("/device:CPU:0"):
            row = tf.constant(np.frombuffer(data, np.int32)[np.newaxis])
            return [gathered.tobytes() for gathered in self._group.all_gather(row, instance).numpy()]


def _as_python(value: Any) -> Any:
    """A scalar of NumPy as a value of Python, for JSON.

    Raises:
      TypeError: Anything else.
    """
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"workers exchange values as JSON, which cannot represent {value!r} ({type(value).__name__})")


def _bytes_of(array: np.ndarray) -> memoryview:
    """The bytes of an array; not copied if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _array_at(data: bytes | bytearray, start: int, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """The array whose bytes begin at `start`, not copied."""
    size = math.prod(shape)
    return np.frombuffer(data, dtype, size, start).reshape(shape) if size else np.zeros(shape, dtype)


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cuts a range of bytes into pieces of 2^exponent words; yields their starts and exponents."""
    while start < stop:
        exponent = (-(-(stop - start) // 4) - 1).bit_length()
        exponent = min(max(exponent, _SMALLEST_EXPONENT), _LARGEST_EXPONENT)
        yield start, exponent
        start += 4 << exponent
