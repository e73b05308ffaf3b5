"""The implementations under test behind one face: NumPy arrays and bytes in and out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import tfpar_ops
from tfpar_ops import reference
from tfpar_ops.codecs import Codec

import numpy as np
import pytest
import tensorflow as tf


class Encoded(NamedTuple):
    payloads: list[bytes]
    residual: np.ndarray | None
    norms: np.ndarray


@dataclasses.dataclass(frozen=True)
class Implementation:
    """`tfpar_ops` or its reference, called eagerly or compiled by XLA."""

    name: str
    module: ModuleType
    jit: bool = False

    def encode(
        self,
        arrays: Sequence[np.ndarray],
        residual: np.ndarray | None,
        codec: Codec,
        *,
        shards: int = 1,
        shard_elements: int | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Encoded:
        key = ("encode", codec, shards, shard_elements)

        def op(tensors: list[tf.Tensor], residual: tf.Tensor | None, seed_step: tf.Tensor | None) -> Any:
            return self.module.encode(
                tensors, residual, codec, shards=shards, shard_elements=shard_elements, seed_step=seed_step
            )

        return _encoded(
            self._call(key, op, [tf.constant(a) for a in arrays], _tensor(residual), seeds(codec, seed, step))
        )

    def decode(
        self,
        payloads: Sequence[bytes],
        codec: Codec,
        shapes: Sequence[Sequence[int]],
        *,
        shard_elements: int | None = None,
        factor: float = 1.0,
    ) -> list[np.ndarray]:
        key = ("decode", codec, tuple(map(tuple, shapes)), shard_elements, factor)

        def op(words: tf.Tensor) -> Any:
            return self.module.decode(words, codec, shapes, shard_elements=shard_elements, factor=factor)

        return [part.numpy() for part in self._call(key, op, words_of(payloads))]

    def decode_sum(
        self, payloads: Sequence[bytes], codec: Codec, elements: int, *, factor: float | tf.Tensor = 1.0
    ) -> np.ndarray:
        if isinstance(factor, tf.Tensor):

            def op(words: tf.Tensor, factor: tf.Tensor) -> Any:
                return self.module.decode_sum(words, codec, elements, factor=factor)

            return self._call(("decode_sum", codec, elements), op, words_of(payloads), factor).numpy()

        def fixed(words: tf.Tensor) -> Any:
            return self.module.decode_sum(words, codec, elements, factor=factor)

        return self._call(("decode_sum", codec, elements, factor), fixed, words_of(payloads)).numpy()

    def recode(
        self,
        payloads: Sequence[bytes],
        residual: np.ndarray | None,
        codec: Codec,
        elements: int,
        *,
        factor: float = 1.0,
        begin: int | tf.Tensor = 0,
        valid: int | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> Encoded:
        key = ("recode", codec, elements, factor, valid, begin if isinstance(begin, int) else None)
        place = begin if isinstance(begin, tf.Tensor) else None

        def op(
            words: tf.Tensor, residual: tf.Tensor | None, place: tf.Tensor | None, seed_step: tf.Tensor | None
        ) -> Any:
            at = begin if place is None else place
            return self.module.recode(
                words, residual, codec, elements, factor=factor, begin=at, valid=valid, seed_step=seed_step
            )

        return _encoded(self._call(key, op, words_of(payloads), _tensor(residual), place, seeds(codec, seed, step)))

    def norm_squared(self, arrays: Sequence[np.ndarray]) -> tuple[float, bool]:
        norm, finite = self._call(("norm_squared",), self.module.norm_squared, [tf.constant(a) for a in arrays])
        return float(norm), bool(finite)

    def _call(self, key: tuple[Any, ...], op: Callable[..., Any], *arguments: Any) -> Any:
        """Calls `op`; under XLA, the first compiled for this key. All that `op` closes over must be in the key."""
        if not self.jit:
            return op(*arguments)
        if key not in _COMPILED:
            _COMPILED[key] = tf.function(op, jit_compile=True, autograph=False)
        return _COMPILED[key](*arguments)


_COMPILED: dict[tuple[Any, ...], Callable[..., Any]] = {}


def get(name: str) -> Implementation:
    """An implementation by name; skips the test where it was not built."""
    if name == "native":
        if not tfpar_ops.uses_library():
            pytest.skip(f"the native operations are not in use here: {tfpar_ops.library_status()}")
        return Implementation(name, tfpar_ops)
    return Implementation(name, reference, jit=name == "xla")


def seeds(codec: Codec, seed: int, step: int) -> tf.Tensor | None:
    """Seed and step as operations take them, the bits of unsigned numbers in int64; None for nearest rounding."""
    if codec.rounding == "nearest":
        return None
    return tf.constant(np.array([seed, step], np.uint64).view(np.int64))


def words_of(payloads: Sequence[bytes]) -> tf.Tensor:
    return tf.constant(np.stack([np.frombuffer(payload, "<i4") for payload in payloads]))


def _tensor(array: np.ndarray | None) -> tf.Tensor | None:
    return None if array is None else tf.constant(array)


def _encoded(result: Any) -> Encoded:
    residual = None if result.residual is None else result.residual.numpy()
    return Encoded([row.tobytes() for row in result.payload.numpy()], residual, result.norms.numpy())
