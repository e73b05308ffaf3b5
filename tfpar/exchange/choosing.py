"""Chooses the reducer that carries out an exchange, and determines this worker's rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfpar.collectives.group import Group
from tfpar.collectives.replicas import worker_rank
from tfpar.collectives.tensorflow import world_group
from tfpar.exchange import buckets
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.dense_reducer import DenseReducer
from tfpar.exchange.reducer import LocalReducer, Reducer, SharedMemoryReducer, StrategyReducer
from tfpar.exchange.spec import Spec

import tensorflow as tf


def dense_or_compressed(
    spec: Spec,
    shapes: Sequence[tf.TensorShape],
    group: Group,
    device: str,
    seed: int,
    sparse: Sequence[int],
    strategy: tf.distribute.Strategy | None,
    *,
    overlap: bool,
    own_collectives: bool,
) -> Reducer:
    """The reducer that carries out an exchange for these workers."""
    sparse = sparse if group.size > 1 and group.capabilities.variable_sizes else ()
    if group.size > 1 and spec.compresses:
        return CompressedReducer(spec, shapes, group, device, seed, sparse, overlap=overlap)
    if own_collectives and group.size == 1 and (strategy is None or len(strategy.extended.worker_devices) == 1):
        return LocalReducer(shapes, alone=True)
    if own_collectives:
        return DenseReducer(shapes, group, device, buckets.DENSE_BUCKET_BYTES, sparse)
    if strategy is not None and strategy.num_replicas_in_sync == 1:
        return LocalReducer(shapes)
    if group.size == 1 and strategy is not None and all("CPU" in name for name in strategy.extended.worker_devices):
        return SharedMemoryReducer(shapes, device)
    return StrategyReducer(shapes, buckets.DENSE_BUCKET_BYTES)


def check_sparse(sparse: Sequence[int], shapes: Sequence[tf.TensorShape]) -> None:
    """Refuses indices that are not of variables with rows.

    Raises:
      ValueError: One of them.
    """
    if any(not 0 <= index < len(shapes) or not shapes[index].rank for index in sparse):
        raise ValueError(f"sparse={list(sparse)}: not all are indices, from 0, of variables that have rows")


def world_of(strategy: tf.distribute.Strategy | None, workers: int | None, worker: int, device: str) -> Group:
    """The group of all workers, seen from this one.

    Args:
      strategy: The strategy that runs.
      workers: Number of workers; by default that of the strategy's cluster.
      worker: Rank of this worker, where `workers` is given.
      device: Device of this worker that takes part.

    Raises:
      ValueError: No such rank.
    """
    if workers is None:
        workers, worker = _place(strategy) if strategy else (1, 0)
    if not 0 <= worker < workers:
        raise ValueError(f"worker={worker} is not a rank among workers={workers}")
    return world_group(workers, worker, device)


def _place(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Number of workers of a strategy, and the rank of this one."""
    local = len(strategy.extended.worker_devices)
    workers = max(1, strategy.num_replicas_in_sync // local)
    if strategy.cluster_resolver is None or workers == 1:
        return workers, 0
    return workers, worker_rank(strategy)


def as_encoded_before(spec: Spec, shapes: Sequence[tf.TensorShape], elements: int) -> Spec:
    """A spec that encodes the tensors that a saved run encoded, to which its residuals belong.

    Args:
      spec: The exchange.
      shapes: Static shapes of all tensors.
      elements: Elements of the tensors that the saved run encoded. Its `min_elements` is not known, but no two of them
        that choose other tensors give the same number.

    Returns:
      `spec` with that `min_elements`, or as it is if none gives this number.
    """
    for least in sorted({shape.num_elements() for shape in shapes}):
        options = dataclasses.replace(spec.options, min_elements=least)
        if elements == sum(shape.num_elements() for shape in shapes if options.is_compressible(shape)):
            return dataclasses.replace(spec, options=options)
    return spec
