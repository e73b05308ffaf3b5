"""The exchange interface: gradient sums and sidecar in, their sums over all replicas out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tfpar_ops
from tfpar.collectives.group import Group
from tfpar.collectives.tensorflow import world_group
from tfpar.config import ConfigError
from tfpar.exchange import residuals
from tfpar.exchange import spec as specs
from tfpar.exchange.choosing import as_encoded_before, check_sparse, dense_or_compressed, world_of
from tfpar.exchange.compressed import CompressedReducer
from tfpar.exchange.gradients import Gradient, as_float32, as_slices
from tfpar.exchange.per_device import DevicesOfReplica, PlacesReducer, check_saved_devices
from tfpar.exchange.reducer import (
    LocalReducer,
    Reducer,
    ShouldApply,
    Traffic,
    local_replicas,
    replica_context,
)
from tfpar.exchange.residual_units import ResidualUnits
from tfpar.exchange.sharding.owners import OwnersReducer, Scattered
from tfpar.exchange.sharding.per_place import reducer_of_places
from tfpar.exchange.sharding.reducer import ShardedReducer
from tfpar.exchange.sharding.shards import ShardedVector
from tfpar.exchange.spec import Spec

import numpy as np
import tensorflow as tf

_UNSUPPORTED = {
    "parameter_server": "workers push and pull over TensorFlow's remote variables, which hold float32",
    "tpu": "XLA runs its exchange on the slice's own interconnect",
}

# Names of version 0.1.0, with their successors; they go with version 0.3.
_DEPRECATED = {"leaves_first": "first_ready_indices", "overlaps": "overlaps_backward"}


class Exchange:
    """Sums gradients over the replicas of a strategy.

    Use inside a replica context (`strategy.run`), at the top level of the function given to it:

    ```python
    exchange = tfpar.Exchange("int4")
    exchange.build(model.trainable_variables, strategy=strategy)

    @tf.function
    def step():
        def replica_step():
            ...
            return exchange.reduce(gradients)  # the mean over replicas, the same bits on each
        return strategy.run(replica_step)
    ```

    With a codec, the replicas of one worker add up their gradients in float32 first, and the workers exchange payloads:
    the traffic between workers does not grow with the number of devices in each. Within one worker nothing is
    compressed.

    Args:
      spec: Algorithm and options, see `tfpar.exchange.spec.parse`. `none` is the dense float32 all-reduce.

    Raises:
      ConfigError: An unknown spec, with the nearest known ones.
    """

    def __init__(self, spec: str = "none") -> None:
        self._spec = specs.parse(spec)
        self.spec = spec
        self._shapes: list[tf.TensorShape] = []
        self._group: Group = world_group()
        self._group_given = False
        self._micro_batches = 0
        self._reducer: Reducer = LocalReducer([])
        self._pending_reducer: Callable[[Spec], Reducer] = lambda _: self._reducer

    def build(
        self,
        variables: Sequence[tf.Variable],
        *,
        strategy: tf.distribute.Strategy | None = None,
        workers: int | None = None,
        worker: int = 0,
        group: Group | None = None,
        seed: int = 0,
        sparse: Sequence[int] = (),
        overlap: bool = False,
        shards: Sequence[ShardedVector] | None = None,
        micro_batches: int = 0,
        per_device: DevicesOfReplica | None = None,
    ) -> None:
        """Plans buckets for gradients shaped like `variables`, and creates the residuals.

        Args:
          variables: The trainable variables, in the order of the gradients; anything with a static `shape`.
          strategy: The strategy that `reduce` will run under; by default the current one.
          workers: Number of workers; by default that of the strategy's cluster.
          worker: Rank of this worker.
          group: The workers that exchange, in place of `workers` and `worker`; maybe not all. All sums are then
            collective calls of this group, never the strategy's, which fail inside a `tf.cond` (TensorFlow 2.21).
          seed: Seed of stochastic rounding.
          sparse: Indices of those variables, embeddings, whose gradients will come as `tf.IndexedSlices`. Workers send
            the rows of such a gradient, summed by row, as float32 (with `bf16`, as bfloat16), in steps in which that
            takes fewer bytes than the dense tensor; see `sparse_rows`. Other gradients, and all if workers use NCCL,
            are sent dense.
          overlap: Whether gradients come one after the other, as from a backward pass that is not one XLA program.
            Buckets then leave once their tensors are complete, before it is known that all are finite: the results
            are the same, bit for bit, for one more copy of the residuals. Not with one bucket, `warmup_steps`,
            momentum, a ramp, or embeddings whose rows are sent. The same on all workers.
          shards: Which worker updates which weights; then call `update_shards`. By default each updates all.
          micro_batches: Micro-batches of a step that `scatter_shards` sends to the owners of `shards`; 0: whole steps.
          per_device: How devices divide the weights of a replica; the variables then have the shapes of parts.

        Raises:
          ValueError: `worker` or an index in `sparse` is out of range.
          ConfigError: The exchange does not work for this number of workers.
        """
        self._shapes = shapes = [tf.TensorShape(variable.shape) for variable in variables]
        check_sparse(sparse, shapes)
        strategy = strategy or (tf.distribute.get_strategy() if tf.distribute.has_strategy() else None)
        device = strategy.extended.worker_devices[0] if strategy else "/device:CPU:0"
        own_collectives, self._group_given = group is not None, group is not None or per_device is not None
        if group is None:
            group = world_of(strategy, workers, worker, device)
            own_collectives = group.size > 1 and not group.capabilities.ordered
        self._group, self._micro_batches = group, micro_batches
        if per_device and strategy:
            self._reducer = reducer_of_places(self._spec, shapes, group, strategy, seed, per_device)
            return
        if shards is not None:
            self._reducer = ShardedReducer(self._spec, shapes, shards, group, device, seed, micro_batches)
            return
        self._reducer = dense_or_compressed(
            self._spec, shapes, group, device, seed, sparse, strategy, overlap=overlap, own_collectives=own_collectives
        )
        self._pending_reducer = lambda spec: CompressedReducer(spec, shapes, group, device, seed, encodes=False)

    def check_supported(self, strategy: str) -> None:
        """Refuses a codec under a strategy, given by its tfpar name, that does not support it.

        Raises:
          ConfigError: The exchange encodes gradients, but the strategy sends them itself.
        """
        if self._spec.compresses and strategy in _UNSUPPORTED:
            raise ConfigError(
                f"--exchange={self.spec} does not work with --strategy={strategy}: {_UNSUPPORTED[strategy]}. "
                "Use --exchange=none."
            )

    @property
    def compresses(self) -> bool:
        """Whether gradients are encoded: the spec says so, and there is more than one worker."""
        return self._reducer.compresses

    @property
    def state(self) -> list[tf.Variable]:
        """This worker's variables that an exchange changes: residuals, and the count of exchanges."""
        return self._reducer.state

    @property
    def sparse(self) -> list[int]:
        """Indices of the variables whose rows are sent: those given to `build` whose dense tensor costs more than a
        row, unless workers use NCCL."""
        return self._reducer.sparse

    @property
    def overlaps_backward(self) -> bool:
        """Whether gradients are sent while others are still being computed."""
        return bool(self._reducer.first_ready_indices)

    @property
    def first_ready_indices(self) -> list[int]:
        """Indices of the variables whose gradients are sent first, if the exchange overlaps the backward pass."""
        return self._reducer.first_ready_indices

    @property
    def early_units(self) -> list[ResidualUnits]:
        """The units of the residuals that are sent before the summed sidecar is known: see `follow_early`."""
        early = self.first_ready_indices or self._micro_batches
        return [units for units in self._reducer.units if early and units.variables]

    @property
    def plan_table(self) -> str:
        """The measurements and choices of `auto`, as text; empty for any other spec."""
        return self._reducer.plan_table

    def export(self) -> dict[str, np.ndarray]:
        """This worker's state, for a checkpoint; empty without residuals."""
        return self._reducer.export()

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Resumes from the exports of the workers. Call it before a function that calls `reduce` is traced.

        With the same workers, buckets and shards, every worker restores its own residuals, bit for bit. Otherwise
        worker 0 gets their sum over the workers. If nothing is encoded any more, the sum is applied with the first
        finite gradients; not with replicas of several devices.

        Args:
          workers: Number of workers of the saved run.
          read: Returns the export of the worker with a rank.

        Raises:
          ConfigError: This exchange encodes other tensors, or has others in shards, or has no residuals.
        """
        check_saved_devices(self._reducer, workers, read)
        if isinstance(self._reducer, PlacesReducer):
            if not self._reducer.state:
                residuals.check_none_of_places(workers, read)
        elif not self._reducer.state and (elements := residuals.pending_elements(workers, read)):
            self._reducer = self._pending_reducer(as_encoded_before(self._spec, self._shapes, elements))
        self._reducer.restore(workers, read)

    def retune(self) -> bool:
        """Measures again, with `auto`, and changes the plan if another one has become faster; all workers together.

        Returns:
          Whether the plan has changed: functions that call `reduce` must then be traced again. Residuals are kept.
        """
        return self._reducer.retune()

    def observed(self) -> dict[str, float]:
        """This worker's statistics, for TensorBoard; empty if nothing is compressed.

        Returns:
          `residual_over_gradient`: L2 norm of the residual, over that of the gradient, in the last exchange that
          measured them. `cosine`: between the applied sum and the dense one, in the last that compared them.
        """
        return self._reducer.observed()

    def describe(self) -> str:
        """One line: codec and pattern, or why there is none."""
        if self._spec.compresses and not self.compresses:
            return f"{self.spec}, not in use: with a single worker nothing crosses a network"
        return self._spec.describe()

    def traffic(self, replicas: int, sidecar_length: int) -> Traffic:
        """The bytes of one exchange.

        With a codec, or rows of embeddings, the mean over the exchanges so far: warm-up, ramp and comparisons send more
        than the encoded tensors, and the number of rows varies. Before the first, the bytes of an exchange that encodes
        all large tensors, with embeddings as dense tensors.

        Args:
          replicas: Number of replicas N.
          sidecar_length: Scalars in the sidecar.
        """
        return self._reducer.bytes_per_step(replicas, sidecar_length)

    def reduce(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """The mean of the gradients over all replicas.

        Args:
          gradients: Float tensors, or `tf.IndexedSlices`, shaped like the variables given to `build`.

        Returns:
          The means: float32, the same bits on every replica. Those of the variables in `sparse` are `tf.IndexedSlices`
          with the rows that any replica has touched (with all rows, if they travelled dense), none of them twice; all
          others are tensors. If a gradient of any replica is not finite, a codec's residuals do not change and the
          means are NaN, on every replica; for `tf.IndexedSlices`, row 0 alone is then NaN.

        Raises:
          RuntimeError: Called outside a replica context, or under another strategy than `build` was given.
          ValueError: Another number of gradients than variables given to `build`, or `build` was not called, or a
            gradient is None.
        """
        replicas = self._replicas()
        prepared = self._as_float32(gradients)
        if not self._reducer.state:
            sums, _ = self._reducer.reduce(prepared, tf.zeros([0], tf.float32), lambda _: tf.constant(True))
            return as_slices(sums, self._shapes, lambda values: values / replicas)
        values = [gradient[0] for gradient in prepared if isinstance(gradient, tuple)]
        _, finite = tfpar_ops.norm_squared([gradient for gradient in prepared if not isinstance(gradient, tuple)])
        finite = tf.reduce_all([finite, *(tf.reduce_all(tf.math.is_finite(rows)) for rows in values)])
        sums, sidecar = self._reducer.reduce(prepared, tf.where(finite, [0.0], [1.0]), _first_is_zero)
        factor = tf.where(sidecar[0] > 0.0, float("nan"), 1.0 / replicas)
        return as_slices(sums, self._shapes, lambda values: values * factor)

    def reduce_sums(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        sidecar: tf.Tensor,
        should_apply: ShouldApply | None = None,
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], tf.Tensor]:
        """Sums gradients and sidecar over all replicas.

        Args:
          gradients: Gradient sums of this replica, float32 tensors, or `tf.IndexedSlices`, shaped like the variables
            given to `build`.
          sidecar: Float32 vector of scalars to sum along with them, always exactly.
          should_apply: Maps the summed sidecar to a bool scalar: whether the step will be applied. If not, no replica's
            residuals change, and the returned gradients are meaningless. By default the step is applied if the first
            scalar is 0, that is, if the gradients of all replicas are finite.

        Returns:
          The summed gradients, as tensors or `tf.IndexedSlices` like the means of `reduce`, and the summed sidecar, the
          same bits on every replica.

        Raises:
          RuntimeError: Called outside a replica context, or under another strategy than `build` was given.
          ValueError: Another number of gradients than variables given to `build`, or `build` was not called.
        """
        self._replicas()
        sums, sidecar = self._reducer.reduce(self._as_float32(gradients), sidecar, should_apply or _first_is_zero)
        return as_slices(sums, self._shapes, lambda values: values), sidecar

    def sum_vector(self, vector: tf.Tensor) -> tf.Tensor:
        """The sum of a short vector over all workers, for replicas whose devices have different weights.

        Args:
          vector: Float32, the same on all devices of a worker.

        Raises:
          RuntimeError: `build` was called without `per_device`.
        """
        if not isinstance(self._reducer, PlacesReducer):
            raise RuntimeError("sum_vector needs an exchange that was built with per_device")
        return self._reducer.sum_vector(vector)

    def scatter_shards(
        self, gradients: Sequence[tf.Tensor | tf.IndexedSlices], before: Scattered | None, number: int
    ) -> Scattered:
        """Sends the gradients of one micro-batch to the owners of shards; see `ShardedReducer.scatter`.

        Args:
          gradients: As for `reduce_sums`.
          before: The result of the call for the previous micro-batch; None for the first.
          number: Number of the micro-batch, from 0.

        Raises:
          RuntimeError: `build` was not given `shards`.
        """
        if not isinstance(self._reducer, OwnersReducer):
            raise RuntimeError("scatter_shards needs an exchange that was built with shards")
        return self._reducer.scatter(self._as_float32(gradients), before, number)

    def update_shards(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices] | Scattered,
        sidecar: tf.Tensor,
        weights: Sequence[tf.Tensor],
        **how: Any,
    ) -> tuple[list[tf.Tensor], tf.Tensor, tf.Tensor]:
        """Sums gradients at the owners of shards, and gathers the new weights that these compute.

        Args:
          gradients: As for `reduce_sums`, or the result of `scatter_shards` for the last micro-batch.
          sidecar: As for `reduce_sums`.
          weights: The weights, the same on every replica.
          **how: See `ShardedReducer.update_shards`, also for what is returned.

        Raises:
          RuntimeError: `build` was not given `shards`.
        """
        if not isinstance(self._reducer, OwnersReducer):
            raise RuntimeError("update_shards needs an exchange that was built with shards")
        given = gradients if isinstance(gradients, Scattered) else self._as_float32(gradients)
        return self._reducer.update_shards(given, sidecar, weights, **how)

    def _replicas(self) -> int:
        """Number of replicas that exchange.

        Raises:
          RuntimeError: Called outside a replica context, or under a strategy with another number of workers.
        """
        context = replica_context()
        if self._group_given:
            return self._group.size * local_replicas(context)
        if self._group.size > 1 or self._reducer.state:
            workers = context.num_replicas_in_sync // local_replicas(context)
            if workers != self._group.size:
                raise RuntimeError(
                    f"the exchange was built for {self._group.size} workers and runs on {workers}: give build() a "
                    "strategy"
                )
        return context.num_replicas_in_sync

    def _as_float32(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Gradient]:
        if len(gradients) != len(self._shapes):
            raise ValueError(f"got {len(gradients)} gradients for {len(self._shapes)} variables; call build() first")
        return as_float32(gradients, self._shapes, self.sparse)

    def __getattr__(self, name: str) -> Any:
        if name not in _DEPRECATED:
            raise AttributeError(f"'Exchange' object has no attribute {name!r}")
        warnings.warn(f"Exchange.{name} is deprecated; use {_DEPRECATED[name]}", DeprecationWarning, stacklevel=2)
        return getattr(self, _DEPRECATED[name])


def _first_is_zero(sidecar: tf.Tensor) -> tf.Tensor:
    return tf.equal(sidecar[0], 0.0)
