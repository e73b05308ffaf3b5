"""The exchange interface: gradient sums and sidecar in, their sums over all replicas out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tfpar_ops
from tfpar.collectives.tensorflow import is_gpu, world_group
from tfpar.config import ConfigError
from tfpar.exchange import residuals
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms.sparse_rows import Slices, summed_by_row
from tfpar.exchange.compressed import HostExchange, Wanted
from tfpar.exchange.dense import Rings
from tfpar.exchange.tuning import auto as planning

import numpy as np
import tensorflow as tf

# One collective call per bucket: a call costs about a millisecond on gRPC whatever its size, so small tensors
# travel together; past this size one more call no longer shows, and a single buffer would only cost memory.
BUCKET_BYTES = 32 << 20

_UNSUPPORTED = {
    "parameter_server": "workers push and pull over TensorFlow's remote variables, which hold float32",
    "tpu": "XLA runs its exchange on the slice's own interconnect",
}


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one exchange.

    Attributes:
      codec: Name of the codec.
      pattern: How payloads move.
      payload_bytes: Encoded gradient and sidecar of one replica, bytes.
      wire_bytes: Bytes each replica sends, by the formula of the pattern: `2 (N-1)/N x payload` for a ring. With a
        codec, what each host sends.
      dense_bytes: What `wire_bytes` would be with `none`.
    """

    codec: str
    pattern: str
    payload_bytes: int
    wire_bytes: int
    dense_bytes: int


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

    With a codec, replicas of one host add up their gradients in float32 first, and the hosts exchange payloads: the
    traffic on the network does not grow with the number of devices in a host. Within one host nothing is compressed.

    Args:
      spec: Codec and options, see `tfpar.exchange.spec.parse`. `none` is the dense float32 all-reduce of TensorFlow's
        runtime.

    Raises:
      ConfigError: An unknown spec, with the nearest known ones.
    """

    def __init__(self, spec: str = "none") -> None:
        self._spec = specs.parse(spec)
        self.spec = spec
        self._shapes: list[tf.TensorShape] = []
        self._group = world_group(1, 0)
        self._device = ""
        self._by_rings = False
        self._hosts: HostExchange | None = None
        self._rings: Rings | None = None
        self._seed = 0

    def build(
        self,
        variables: Sequence[tf.Variable],
        *,
        strategy: tf.distribute.Strategy | None = None,
        workers: int | None = None,
        worker: int = 0,
        seed: int = 0,
        sparse: Sequence[int] = (),
        overlap: bool = False,
    ) -> None:
        """Plans buckets for gradients shaped like `variables`, and makes the residuals.

        Args:
          variables: The trainable variables, in the order in which gradients will come. Keras variables,
            `tf.Variable`s, or anything else with a static `shape`.
          strategy: The strategy that `reduce` will run under; by default the current one.
          workers: Number of worker processes; by default what the strategy's cluster says.
          worker: Rank of this one among them.
          seed: Seed of stochastic rounding.
          sparse: Numbers of those variables, embedding tables, whose gradients will come as `tf.IndexedSlices`. Between
            workers, the rows of such a gradient travel, summed by row, as float32 (with `bf16`, as bfloat16), in the
            steps in which that is less than the table; see `rows`. Gradients of other variables, and all where workers
            talk through NCCL, travel as the dense tensors they stand for.
          overlap: Whether gradients come one after the other, as from a backward pass that is not one XLA program.
            Buckets then leave as soon as their tensors are complete, before it is known that all are finite: the
            results are the same to the last bit, for one more copy of the residuals. Not with a single bucket,
            `warmup_steps`, momentum or a ramp, nor beside tables of which rows travel. The same on all workers.

        Raises:
          ValueError: A rank or a number in `sparse` that cannot be.
        """
        self._shapes = [tf.TensorShape(variable.shape) for variable in variables]
        if any(not 0 <= number < len(variables) or not self._shapes[number].rank for number in sparse):
            raise ValueError(f"sparse={list(sparse)}: not all are numbers, from 0, of variables that have rows")
        strategy = strategy or (tf.distribute.get_strategy() if tf.distribute.has_strategy() else None)
        if workers is None:
            workers, worker = _place(strategy) if strategy else (1, 0)
        if not 0 <= worker < workers:
            raise ValueError(f"worker={worker} is not a rank among workers={workers}")
        self._seed = seed
        self._hosts = self._rings = None
        self._device = strategy.extended.worker_devices[0] if strategy else "/device:CPU:0"
        self._group = world_group(workers, worker, self._device)
        # TensorFlow's strategy would put the buckets into one buffer again, and run a single ring (2.21:
        # `bytes_per_pack`).
        self._by_rings = workers > 1 and not is_gpu(self._device)
        # NCCL wants the same calls in the same order on all workers, and rows come in calls of many sizes.
        sparse = sparse if self._by_rings else ()
        if self._spec.lossy and workers > 1:
            self._hosts = HostExchange(
                self._spec, self._shapes, self._group, self._device, seed, sparse, overlap=overlap
            )
        else:
            self._rings = Rings(self._shapes, self._group, BUCKET_BYTES, sparse)

    def check_supported(self, strategy: str) -> None:
        """Refuses a codec under a strategy, by its tfpar name, that cannot carry it.

        Raises:
          ConfigError: See there.
        """
        if self._spec.lossy and strategy in _UNSUPPORTED:
            raise ConfigError(
                f"--exchange={self.spec} does not work with --strategy={strategy}: {_UNSUPPORTED[strategy]}. "
                "Use --exchange=none."
            )

    @property
    def compresses(self) -> bool:
        """Whether a codec is at work: one is asked for, and there is more than one host."""
        return self._hosts is not None and self._spec.lossy and self._group.size > 1

    @property
    def state(self) -> list[tf.Variable]:
        """What the exchange carries from step to step on this worker: residuals, and the count of exchanges."""
        return self._hosts.state if self._hosts else []

    @property
    def overlaps(self) -> bool:
        """Whether gradients leave while others are still being computed."""
        return self._hosts is not None and self._hosts.overlaps

    @property
    def leaves_first(self) -> list[int]:
        """Numbers of the variables whose gradients leave first, where the exchange overlaps."""
        return self._hosts.leaves_first if self._hosts is not None and self._hosts.overlaps else []

    @property
    def plan_table(self) -> str:
        """What `auto` has measured and decided, as text; empty for any other spec."""
        return self._hosts.plan_table if self._hosts else ""

    def export(self) -> dict[str, np.ndarray]:
        """This worker's state, for a checkpoint; empty where nothing is kept back."""
        return self._hosts.export() if self._hosts else {}

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Goes on from what the workers exported.

        With the same workers, buckets and shards, every worker takes up its own residuals, bit for bit. Otherwise what
        was not yet delivered is summed up over the workers, and worker 0 delivers it: where nothing is encoded any
        more, with the first gradients that are finite. To be called before a function that calls `reduce` is traced.

        Args:
          workers: Number of workers of the saved run.
          read: Gives the export of the worker with this rank.

        Raises:
          ConfigError: Another exchange encodes other tensors, or keeps nothing back.
        """
        if not self._hosts and residuals.anything_kept(workers, read):
            spec = planning.dense(self._spec)
            self._hosts = HostExchange(spec, self._shapes, self._group, self._device, self._seed)
        if self._hosts:
            self._hosts.restore(workers, read)

    def retune(self) -> bool:
        """Measures again, with `auto`, and changes the plan if another one has become faster; all workers together.

        Returns:
          Whether the plan has changed: functions that call `reduce` must then be traced anew. What was kept back goes
          on to be delivered.
        """
        return self._hosts is not None and self._hosts.retune()

    def observed(self) -> dict[str, float]:
        """What the last exchange shows of this worker, for TensorBoard; empty where nothing is compressed.

        Returns:
          `residual_over_gradient`: L2 norm of what is kept back, over that of the gradient. `cosine`: between the sum
          that was delivered and the dense one, of the last exchange where they were compared.
        """
        return self._hosts.observed() if self._hosts and self.compresses else {}

    def describe(self) -> str:
        """One line: codec and pattern, or why there is none."""
        if self._spec.lossy and not self.compresses:
            return f"{self.spec}, not in use: with a single host nothing crosses a network"
        return self._spec.describe()

    def reduce(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[tf.Tensor | tf.IndexedSlices]:
        """The mean of the gradients over all replicas.

        Args:
          gradients: Float tensors, or `tf.IndexedSlices`, shaped like the variables given to `build`.

        Returns:
          The means: float32, the same bits on every replica. Those of the variables in `sparse` are `tf.IndexedSlices`
          with the rows that any replica has touched (with all rows, if they travelled dense), none of them twice; all
          others are tensors. If a gradient of any replica is not finite, a codec's residuals stay as they are and the
          means are NaN, on every replica; of `tf.IndexedSlices`, row 0 then stands for all.

        Raises:
          RuntimeError: Called outside a replica context.
          ValueError: Another number of gradients than variables given to `build`, or `build` was not called.
        """
        replicas = _replica_context().num_replicas_in_sync
        gradients = self._prepared(gradients)
        if self._hosts is None:
            sums, _ = self._sums(gradients, tf.zeros([0], tf.float32), _always)
            return [_mapped(lambda part: part / replicas, value) for value in sums]
        tensors = [gradient for gradient in gradients if not isinstance(gradient, tf.IndexedSlices)]
        rows = [gradient.values for gradient in gradients if isinstance(gradient, tf.IndexedSlices)]
        _, finite = tfpar_ops.norm_squared(tensors)  # of finite numbers, however large, it is finite
        finite = tf.reduce_all([finite, *(tf.reduce_all(tf.math.is_finite(values)) for values in rows)])
        sums, sidecar = self._sums(gradients, tf.where(finite, [0.0], [1.0]), lambda flag: tf.equal(flag[0], 0.0))
        factor = tf.where(sidecar[0] > 0.0, float("nan"), 1.0 / replicas)
        return [_mapped(lambda part: part * factor, value) for value in sums]

    def reduce_sums(
        self,
        gradients: Sequence[tf.Tensor | tf.IndexedSlices],
        sidecar: tf.Tensor,
        wanted: Wanted = lambda sidecar: tf.equal(sidecar[0], 0.0),
    ) -> tuple[list[tf.Tensor | tf.IndexedSlices], tf.Tensor]:
        """Sums gradients and sidecar over all replicas.

        Args:
          gradients: Gradient sums of this replica, float32 tensors, or `tf.IndexedSlices`, shaped like the variables
            given to `build`.
          sidecar: Float32 vector of scalars to sum along with them, always exactly.
          wanted: Tells from the summed sidecar (bool scalar) whether there will be an update. If not, no replica's
            residuals change, and what comes back in place of the gradients is of no use. By default the first scalar
            tells, where it is not 0, that the gradients of some replica are not finite.

        Returns:
          The summed gradients, as tensors or `tf.IndexedSlices` like the means of `reduce`, and the summed sidecar, the
          same bits on every replica.

        Raises:
          RuntimeError: Called outside a replica context.
          ValueError: Another number of gradients than variables given to `build`, or `build` was not called.
        """
        return self._sums(self._prepared(gradients), sidecar, wanted)

    @property
    def sparse(self) -> list[int]:
        """Numbers of the variables of which rows travel: of those named in `build`, where workers do not talk through
        NCCL, the ones whose table costs more than a row."""
        between = self._hosts or self._rings
        return between.rows.numbers if between else []

    def _prepared(self, gradients: Sequence[tf.Tensor | tf.IndexedSlices]) -> list[Any]:
        """Float32; of `sparse`, slices in which no row comes twice, all others as tensors."""
        if len(gradients) != len(self._shapes):
            raise ValueError(f"got {len(gradients)} gradients for {len(self._shapes)} variables; call build() first")
        prepared = []
        for number, gradient in enumerate(gradients):
            if number not in self.sparse:
                prepared.append(tf.cast(tf.convert_to_tensor(gradient), tf.float32))
            elif isinstance(gradient, tf.IndexedSlices):
                prepared.append(self._slices(number, summed_by_row(gradient.values, gradient.indices)))
            else:
                every = tf.range(self._shapes[number][0], dtype=tf.int64)
                prepared.append(self._slices(number, (tf.cast(gradient, tf.float32), every)))
        return prepared

    def _slices(self, number: int, parts: Slices) -> tf.IndexedSlices:
        return tf.IndexedSlices(*parts, dense_shape=tf.constant(self._shapes[number].as_list(), tf.int64))

    def _sums(self, gradients: Sequence[Any], sidecar: tf.Tensor, wanted: Wanted) -> tuple[list[Any], tf.Tensor]:
        """`reduce_sums` of gradients that are prepared."""
        context = _replica_context()
        if context.num_replicas_in_sync == 1 and self._hosts is None:
            return list(gradients), sidecar
        hosts = context.num_replicas_in_sync // len(context.strategy.extended.worker_devices)
        if (self._hosts or self.sparse) and hosts != self._group.size:
            raise RuntimeError(
                f"the exchange was built for {self._group.size} workers and runs on {hosts}: give build() a strategy"
            )
        if self._hosts is None and not self._by_rings:
            assert self._rings is not None
            summed = context.all_reduce(tf.distribute.ReduceOp.SUM, self._rings.fused(gradients, sidecar))
            return self._rings.cut(summed)
        # Slices as structures of tensors, which every strategy knows how to hand over.
        parts = [(one.values, one.indices) if isinstance(one, tf.IndexedSlices) else one for one in gradients]
        sums, sidecar = context.merge_call(functools.partial(self._between_hosts, wanted), args=(parts, sidecar))
        return [
            self._slices(number, one) if isinstance(one, tuple) else one for number, one in enumerate(sums)
        ], sidecar

    def _between_hosts(
        self, wanted: Wanted, strategy: tf.distribute.Strategy, gradients: Sequence[Any], sidecar: Any
    ) -> tuple[list[Any], tf.Tensor]:
        """The exchange between workers: once per worker, after its replicas have added up what they have."""
        with tf.device(self._device):
            local = [_sum_local(strategy, gradient) for gradient in gradients]
            total = _sum_local(strategy, sidecar)
            if self._hosts:
                return self._hosts.sum(local, total, wanted)
            assert self._rings is not None
            return self._rings.sum(local, total)

    def traffic(self, replicas: int, sidecar_length: int) -> Traffic:
        """What one exchange costs on the wire.

        Rows of tables, of which there are more or fewer in every exchange, count with their mean over the exchanges so
        far; before the first, as dense tables.

        Args:
          replicas: Number of replicas N.
          sidecar_length: Scalars in the sidecar.
        """
        elements = [shape.num_elements() for shape in self._shapes]
        dense = 4 * (sum(elements) + sidecar_length)
        if self._hosts is not None:
            codec, pattern = self._hosts.codecs_and_patterns()
            if replicas > self._group.size and pattern != "hierarchical":
                pattern = f"hierarchical, {pattern}"
        else:
            codec, pattern = "none", "all_reduce" if replicas > 1 else "local"
        if self._hosts is None and not self.sparse:
            sent = 2 * (replicas - 1) * dense // replicas
            return Traffic(codec, pattern, dense if replicas > 1 else 0, sent, sent)
        between, hosts = self._hosts or self._rings, self._group.size
        assert between is not None
        payload, sent = between.payload_and_sent(sidecar_length)
        pattern += ", rows" if self.sparse else ""
        return Traffic(codec, pattern, payload, sent, 2 * (hosts - 1) * dense // hosts)


def _always(_: tf.Tensor) -> tf.Tensor:
    return tf.constant(True)


def _sum_local(strategy: tf.distribute.Strategy, value: Any) -> Any:
    """Sum over this worker's replicas, in their order; of slices, by row."""
    if isinstance(value, tuple):
        values, numbers = map(strategy.experimental_local_results, value)
        if len(values) == 1:
            return values[0], numbers[0]
        return summed_by_row(tf.concat(values, axis=0), tf.concat(numbers, axis=0))
    parts = strategy.experimental_local_results(value)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _mapped(
    function: Callable[[tf.Tensor], tf.Tensor], gradient: tf.Tensor | tf.IndexedSlices
) -> tf.Tensor | tf.IndexedSlices:
    """A function that maps zeros to zeros, of a gradient of either kind."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(function(gradient.values), gradient.indices, gradient.dense_shape)
    return function(gradient)


def _place(strategy: tf.distribute.Strategy) -> tuple[int, int]:
    """Number of workers of a strategy, and the rank of this one."""
    resolver = strategy.cluster_resolver
    local = len(strategy.extended.worker_devices)
    workers = max(1, strategy.num_replicas_in_sync // local)
    if resolver is None or workers == 1:
        return workers, 0
    jobs = resolver.cluster_spec().as_dict()
    before = len(jobs.get("chief", ())) if resolver.task_type == "worker" else 0
    return workers, before + int(resolver.task_id)


def _replica_context() -> tf.distribute.ReplicaContext:
    context = tf.distribute.get_replica_context()
    if context is None:
        raise RuntimeError("an exchange runs in a replica context: call it inside the function given to strategy.run")
    return context
