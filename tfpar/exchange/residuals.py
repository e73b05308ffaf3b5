"""Pending residuals of a saved run, when the workers or the buckets are no longer the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from tfpar.config import ConfigError
from tfpar.exchange.buckets import RESIDUALS, Bucket, Padding
from tfpar.exchange.residual_units import EXAMPLES

import numpy as np

# Name of the array with a bucket's elements, those of a shard, and the rank of its factors.
LAYOUT = "layout"


def checked(state: Mapping[str, np.ndarray], rank: int) -> Mapping[str, np.ndarray]:
    """The export of a worker from a checkpoint, checked to be a valid export.

    Raises:
      ConfigError: Names, shapes, dtypes or values that no exchange exports.
    """
    wrong = [name for name, array in state.items() if not _plausible(name, array, state)]
    wrong += [name for name in ("step",) if state and name not in state]
    if wrong:
        raise ConfigError(
            f"the checkpoint's exchange state of worker {rank} is not what an exchange saves: {', '.join(wrong[:6])}. "
            "Resume from an older checkpoint, or start in another workdir with --warm_start."
        )
    return state


def _plausible(name: str, array: np.ndarray, state: Mapping[str, np.ndarray]) -> bool:
    if name == "step":
        return array.dtype == np.int64 and array.shape == () and int(array) >= 0
    if name == EXAMPLES:
        return array.dtype == np.float32 and array.shape == () and bool(np.isfinite(array))
    number, _, role = name.partition("/")
    layout = state.get(f"{number}/{LAYOUT}")
    if not number.isdecimal() or layout is None or layout.dtype != np.int64 or layout.shape != (3,) or layout.min() < 0:
        return False
    if role == LAYOUT:
        return True
    largest = {RESIDUALS[0]: layout[0], RESIDUALS[1]: layout[1]}.get(role, array.size)
    fits = array.size == largest if role == RESIDUALS[0] else array.size <= largest
    return array.dtype == np.float32 and array.ndim == 1 and fits and bool(np.isfinite(array).all())


def total_pending(saved: Sequence[Mapping[str, np.ndarray]]) -> np.ndarray:
    """The pending residual of all workers together.

    Args:
      saved: The export of each worker, in the order of their ranks.

    Returns:
      float64 over the elements of all buckets, one bucket after the other.
    """
    worker, owner = RESIDUALS
    buckets = []
    for index in itertools.count():
        parts = [state[f"{index}/{worker}"] for state in saved if f"{index}/{worker}" in state]
        if not parts:
            break
        total = np.sum(parts, axis=0, dtype=np.float64)
        # The owners' shards lie end to end in the order of the ranks.
        shards = [state[f"{index}/{owner}"] for state in saved if f"{index}/{owner}" in state]
        if shards:
            total += np.concatenate(shards)
        buckets.append(total)
    return np.concatenate(buckets) if buckets else np.zeros(0)


def pending_elements(workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> int:
    """The elements of the tensors that a saved run encoded; 0 if all of its residuals are zero. See
    `Exchange.restore`."""
    total = total_pending([checked(read(rank), rank) for rank in range(workers)]) if read(0) else np.zeros(0)
    return total.size if total.any() else 0


def are_pending(state: Mapping[str, np.ndarray]) -> bool:
    """Whether the export of a worker has a residual that is not zero."""
    return any(array.any() for name, array in state.items() if name.rpartition("/")[2] in RESIDUALS)


def check_none_of_places(workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
    """Refuses residuals of the devices of replicas, which no longer encode anything; see `Exchange.restore`.

    Raises:
      ConfigError: There are residuals that are not zero.
    """
    if any(are_pending(read(rank)) for rank in range(workers)):
        raise ConfigError(
            "--exchange: the checkpoint holds a residual that has not been applied yet, of replicas of several "
            "devices. Nothing is encoded in this run, so it would be lost. Resume with the previous --exchange and "
            "several workers, or start in another workdir with --warm_start."
        )


def exported(bucket: Bucket, rank: int) -> dict[str, np.ndarray]:
    """Copies of a worker's state of a bucket by role, without padding."""
    padding, arrays = _padding(bucket), {role: np.array(one.numpy()) for role, one in bucket.state.items()}
    if padding is None:
        return arrays
    originals = padding.originals()
    result = {role: array[originals[_shard(bucket, role, rank)][: array.size]] for role, array in arrays.items()}
    # Only its name matters: residuals of a bucket with other blocks are in other shards.
    return result | {f"blocks-{padding.block}": np.zeros(1, np.float32)}


def assign_exported(bucket: Bucket, rank: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Restores the result of `exported` for the same rank and bucket."""
    padding = _padding(bucket)
    if padding is not None:
        sources, originals = padding.sources(), padding.originals()
    for role, variable in bucket.state.items():
        value = arrays[role]
        if padding is not None:
            shard = _shard(bucket, role, rank)
            value = value[sources[shard][: variable.shape[0]] - int(originals[: shard.start].sum())]
        variable.assign(value)


def _padding(bucket: Bucket) -> Padding | None:
    return getattr(bucket, "padding", None)


def _shard(bucket: Bucket, role: str, rank: int) -> slice:
    """The elements of the bucket's vector that a residual covers; it may end before the slice does."""
    return slice(rank * bucket.shard_elements, None) if role == RESIDUALS[1] else slice(0, None)


def pending_of(buckets: Sequence[Bucket], rank: int) -> np.ndarray:
    """The residuals of one worker, in both roles: float32 over the elements of all buckets, one after the other."""
    worker, owner = RESIDUALS
    vectors = []
    for bucket in buckets:
        vector, padding = np.zeros(bucket.elements, np.float32), _padding(bucket)
        state = exported(bucket, rank)
        if worker in state:
            vector += state[worker]
        if owner in state:
            begin = rank * bucket.shard_elements
            begin = min(begin, bucket.elements) if padding is None else int(padding.originals()[:begin].sum())
            vector[begin : begin + state[owner].size] += state[owner]
        vectors.append(vector)
    return np.concatenate(vectors) if vectors else np.zeros(0, np.float32)


def load_pending(buckets: Sequence[Bucket], vector: np.ndarray) -> None:
    """Sets the residuals of a worker, which it will send with its next gradients.

    Args:
      buckets: The worker's buckets.
      vector: The residuals over the elements of all buckets, one after the other.

    Raises:
      ConfigError: This exchange encodes other tensors than the saved run, or has no residuals.
    """
    expected = sum(bucket.elements for bucket in buckets)
    if vector.size != expected:
        raise ConfigError(
            f"--exchange: the checkpoint holds a residual that has not been applied yet, of tensors with "
            f"{vector.size:,} elements; this exchange encodes tensors with {expected:,}. Resume with the previous "
            "--exchange (its min_elements, or powersgd, decide which tensors those are), or start in another workdir."
        )
    begin = 0
    for bucket in buckets:
        part = vector[begin : begin + bucket.elements]
        begin += bucket.elements
        if RESIDUALS[0] in bucket.state:
            padding = _padding(bucket)
            part = part if padding is None else part[padding.sources()]
            bucket.state[RESIDUALS[0]].assign(part.astype(np.float32))
        elif part.any():
            raise ConfigError(
                "--exchange: the checkpoint holds a residual that has not been applied yet, which error_feedback=false "
                "would lose. Resume with error_feedback=true, or start in another workdir."
            )
