"""The workers of a plain Keras script: connecting them, their ranks, and agreement between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfpar import cluster
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError, StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar.process.exit_codes import install_exit_code_hook

import numpy as np
import tensorflow as tf

_workers: Workers | None = None


def init_cluster(*, transport: str = "auto") -> None:
    """Connects this process to the other workers of the cluster that the environment describes (`tfpar.cluster`).

    Call it first thing in a script: devices and collectives can only be set up before TensorFlow runs its first op, and
    creating a Keras layer, optimizer or metric runs one. A worker has one device, its first visible GPU or the CPU:
    start one process per GPU. Returns once all workers are there. Without a cluster, or with a single worker, and when
    called again, it does nothing of this. From here on an uncaught `ConfigError` is one line, and exit code 2.

    Args:
      transport: What carries data between workers: `auto`, `tensorflow` or `gloo`, see `--transport`.

    Raises:
      ConfigError: An unknown or unusable transport; TensorFlow was initialised before; a cluster with parameter
        servers; a process that is not a worker; a tf.distribute strategy around the call; a cluster description that
        cannot work.
    """
    global _workers
    install_exit_code_hook()
    options = StrategyConfig(strategy="multi_worker", devices=1, transport=transport)  # refuses an unknown one
    info = cluster.current()
    if info.num_ps or info.worker_rank < 0:
        raise ConfigError(
            f"tfpar.init_cluster(): this process is {info.describe()}, and Keras' fit runs on workers only. Take 'ps' "
            "and 'evaluator' out of the cluster, or use tfpar.Trainer with strategy='parameter_server'."
        )
    if tf.distribute.has_strategy():
        raise under_strategy("tfpar.init_cluster()")
    if info.num_workers == 1 or _workers is not None:
        return
    topology = choose_topology(options, info)
    try:
        runtime = strategies.build(topology)
    except strategies.TooLateError as error:
        raise ConfigError(
            "tfpar.init_cluster() must come before TensorFlow runs its first op, and one has run: call it right after "
            "the imports, before any Keras model, layer, optimizer, metric or tf.data set is made."
        ) from error
    _workers = Workers(runtime)


def rank() -> int:
    """The rank of this worker, from 0; 0 without a cluster."""
    return cluster.current().worker_rank


def size() -> int:
    """The number of workers; 1 without a cluster."""
    return cluster.current().num_workers


def shard(*data: Any) -> Any:
    """This worker's share of the examples: every `size()`-th, the same number on every worker.

    Up to `size() - 1` examples at the end are left out, so that all workers make the same number of steps.

    ```python
    x, y = tfpar.shard(x, y)
    train = tfpar.shard(dataset).shuffle(10_000).batch(32)
    ```

    Args:
      *data: A tf.data.Dataset of single examples, not yet shuffled or batched: a shuffle before it would have to give
        the same order on every worker. Or arrays, also in tuples, lists and dicts, with the same first dim.

    Returns:
      The share, in the form of `data`: a tuple where several were given. A data set of unknown length is cut by example
      only, not to the same length: give `fit` `steps_per_epoch` then.

    Raises:
      ConfigError: Fewer examples than workers, arrays of different lengths, or something else than arrays and data
        sets.
    """
    if not data:
        raise ConfigError("tfpar.shard() needs a tf.data.Dataset or arrays.")
    if len(data) > 1:
        return shard(data)
    workers, worker = size(), rank()
    if isinstance(data[0], tf.data.Dataset):
        dataset = data[0]
        examples = int(dataset.cardinality())
        if examples < 0:  # unknown or infinite
            return dataset.shard(workers, worker)
        return dataset.shard(workers, worker).take(_share(examples, workers))
    leaves = tf.nest.flatten(data[0])
    # A tf.SparseTensor has a shape, but no parts.
    if not all(hasattr(leaf, "shape") and len(leaf.shape) and hasattr(leaf, "__getitem__") for leaf in leaves):
        kinds = ", ".join(sorted({type(leaf).__name__ for leaf in leaves}))
        raise ConfigError(
            f"tfpar.shard() takes a tf.data.Dataset or arrays, not {kinds}. Cut other data with tfpar.rank() and "
            "tfpar.size(), into parts of the same length."
        )
    lengths = sorted({int(leaf.shape[0]) for leaf in leaves})
    if len(lengths) != 1:
        raise ConfigError(f"tfpar.shard(): arrays of different lengths, {lengths}; all need the same first dim.")
    stop = _share(lengths[0], workers) * workers
    return tf.nest.map_structure(lambda leaf: leaf[worker:stop:workers], data[0])


def _share(examples: int, workers: int) -> int:
    if examples < workers:
        raise ConfigError(f"tfpar.shard(): {examples} examples are not enough for {workers} workers.")
    return examples // workers


def current() -> Workers | None:
    """The workers that `init_cluster` connected; None where there is only one.

    Raises:
      ConfigError: There are several, and `init_cluster` was not called.
    """
    if _workers is None and size() > 1:
        raise ConfigError(
            f"a cluster of {size()} workers is described and not set up: call tfpar.init_cluster() right after the "
            "imports, before any Keras model, layer, optimizer, metric or tf.data set is made."
        )
    return _workers


def under_strategy(what: str) -> ConfigError:
    """The error for `what` when used inside a tf.distribute strategy."""
    return ConfigError(
        f"{what} under a tf.distribute strategy: it is for scripts without one, and gradients would be reduced twice. "
        "Leave the strategy out, or train with tfpar.Trainer, which brings its own."
    )


class Workers:
    """The workers of a cluster, and their communication outside the training step.

    Every worker makes the same calls in the same order, not inside a `tf.function`.

    Args:
      runtime: Runtime of a multi-worker topology with one replica per worker.

    Attributes:
      strategy: TensorFlow's strategy over the workers. No model is created under it: it defines the replicas of an
        exchange.
      size: Number of workers.
      rank: Rank of this worker.
      agreement: Between all workers.
    """

    def __init__(self, runtime: strategies.Runtime) -> None:
        self.strategy = runtime.strategy
        self.size = runtime.topology.workers
        self.rank = runtime.topology.worker
        self.agreement = WorkerAgreement(world_group(self.size, self.rank))

    def gather(self, purpose: str, value: Any) -> list[Any]:
        """The workers' values, in the order of their ranks.

        Args:
          purpose: The purpose of the values, in words; the same on every worker.
          value: Anything that JSON can hold; floats arrive with the same bits.

        Raises:
          ConfigError: Another worker gathers for another purpose.
        """
        purposes, values = zip(*self.agreement.gather([purpose, value]), strict=True)
        if any(other != purposes[0] for other in purposes):
            calls = "; ".join(f"worker {rank}: {other}" for rank, other in enumerate(purposes))
            raise ConfigError(
                f"workers do different things at the same time ({calls}). Run the same script on all, with tfpar's "
                "callbacks in the same order, and let only averaged metrics decide when to stop."
            )
        return list(values)

    def broadcast(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Worker 0's arrays, see `WorkerAgreement.broadcast`."""
        return self.agreement.broadcast(arrays)
