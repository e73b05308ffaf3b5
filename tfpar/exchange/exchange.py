"""The exchange interface: gradient sums and sidecar in, their sums over all replicas out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.exchange import planning, residuals, specs
from tfpar.exchange.buckets import Bucket
from tfpar.exchange.groups import LOCAL, Group, local, new_instances
from tfpar.exchange.specs import Spec

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
      spec: Codec and options, see `tfpar.exchange.specs.parse`. `none` is the dense float32 all-reduce of TensorFlow's
        runtime.

    Raises:
      ConfigError: An unknown spec, with the nearest known ones.
    """

    def __init__(self, spec: str = "none") -> None:
        self._spec = specs.parse(spec)
        self.spec = spec
        self._shapes: list[tf.TensorShape] = []
        self._dense: list[list[int]] = []
        self._group = Group.of_workers(1, 0)
        self._small: list[int] = []
        self._fused: list[list[int]] = []  # indices of the tensors of each bucket
        self._chosen: list[Spec] = []
        self._buckets: list[Bucket] = []
        self._step: tf.Variable | None = None
        self._observed: tf.Variable | None = None
        self._instances = [0, 0, 0]
        self._device = ""
        self._seed = 0
        self.plan_table = ""

    def build(
        self,
        variables: Sequence[tf.Variable],
        *,
        strategy: tf.distribute.Strategy | None = None,
        workers: int | None = None,
        worker: int = 0,
        seed: int = 0,
    ) -> None:
        """Plans buckets for gradients shaped like `variables`, and makes the residuals.

        Args:
          variables: The trainable variables, in the order in which gradients will come. Keras variables,
            `tf.Variable`s, or anything else with a static `shape`.
          strategy: The strategy that `reduce` will run under; by default the current one.
          workers: Number of worker processes; by default what the strategy's cluster says.
          worker: Rank of this one among them.
          seed: Seed of stochastic rounding.
        """
        self._shapes = [tf.TensorShape(variable.shape) for variable in variables]
        sizes = [shape.num_elements() for shape in self._shapes]
        self._dense = planning.fuse(list(range(len(sizes))), sizes, BUCKET_BYTES)
        strategy = strategy or (tf.distribute.get_strategy() if tf.distribute.has_strategy() else None)
        if workers is None:
            workers, worker = _place(strategy) if strategy else (1, 0)
        self._group = Group.of_workers(workers, worker)
        self._device = strategy.extended.worker_devices[0] if strategy else "/device:CPU:0"
        if not self.compresses:
            return
        planning.check_workers(self._spec, workers)
        large = [index for index, shape in enumerate(self._shapes) if planning.travels_encoded(self._spec, shape)]
        self._small = [index for index in range(len(sizes)) if index not in set(large)]
        self._fused = [bucket for bucket in planning.fuse(large, sizes, self._spec.bucket_bytes) if bucket]
        self._seed = seed
        self._instances = new_instances(3)
        with tf.device(self._device):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="exchange_step", **LOCAL)
            # Squared L2 norms of gradients and residuals at the last exchange, and a cosine.
            self._observed = tf.Variable([0.0, 0.0, float("nan")], trainable=False, name="exchange_observed", **LOCAL)
        self._make_buckets(self._plan())

    def retune(self) -> bool:
        """Measures again, with `auto`, and changes the plan if another one has become faster; all workers together.

        Returns:
          Whether the plan has changed: functions that call `reduce` must then be traced anew. What was kept back goes
          on to be delivered.
        """
        if self._spec.name != "auto" or not self.compresses:
            return False
        chosen = self._plan()
        if chosen == self._chosen:
            return False
        kept = residuals.kept_by_worker(self._buckets, self._group.rank)
        self._make_buckets(chosen)
        residuals.hand_over(self._buckets, kept)
        return True

    def _plan(self) -> list[Spec]:
        """A spec for each bucket."""
        if self._spec.name != "auto":
            return [self._spec] * len(self._fused)
        elements = [sum(self._shapes[index].num_elements() for index in bucket) for bucket in self._fused]
        plan = planning.choose(self._spec, elements, self._group, self._device)
        self.plan_table = plan.table
        return plan.specs

    def _make_buckets(self, chosen: Sequence[Spec]) -> None:
        self._chosen = list(chosen)
        with tf.device(self._device):
            self._buckets = [
                planning.bucket_type(spec)(
                    spec, [self._shapes[index] for index in bucket], self._group, self._seed, f"bucket_{number}"
                )
                for number, (bucket, spec) in enumerate(zip(self._fused, chosen, strict=True))
            ]

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
        return self._spec.lossy and self._group.size > 1

    @property
    def state(self) -> list[tf.Variable]:
        """What the exchange carries from step to step on this worker: residuals, and the count of exchanges."""
        if self._step is None:
            return []
        return [local(self._step), *(variable for bucket in self._buckets for variable in bucket.state.values())]

    def export(self) -> dict[str, np.ndarray]:
        """This worker's state, for a checkpoint; empty where nothing is compressed."""
        if self._step is None:
            return {}
        arrays = {"step": np.array(local(self._step).numpy(), np.int64)}
        for number, bucket in enumerate(self._buckets):
            for role, variable in bucket.state.items():
                arrays[f"{number}/{role}"] = np.array(variable.numpy(), copy=True)
        return arrays

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Goes on from what the workers exported.

        With the same workers, buckets and shards, every worker takes up its own residuals, bit for bit. Otherwise what
        was not yet delivered is summed up over the workers, and worker 0 delivers it.

        Args:
          workers: Number of workers of the saved run.
          read: Gives the export of the worker with this rank.

        Raises:
          ValueError: The residuals are of another model.
        """
        if self._step is None:
            return
        rank = self._group.rank
        own = read(rank if workers == self._group.size else 0)
        if not own:
            return
        local(self._step).assign(own["step"])
        shapes = {name: array.shape for name, array in own.items()}
        if workers == self._group.size and shapes == {name: array.shape for name, array in self.export().items()}:
            for number, bucket in enumerate(self._buckets):
                for role, variable in bucket.state.items():
                    variable.assign(own[f"{number}/{role}"])
            return
        kept = residuals.undelivered([read(worker) for worker in range(workers)])
        residuals.hand_over(self._buckets, kept if rank == 0 else np.zeros_like(kept))

    def describe(self) -> str:
        """One line: codec and pattern, or why there is none."""
        if self._spec.lossy and not self.compresses:
            return f"{self.spec}, not in use: with a single host nothing crosses a network"
        return self._spec.describe()

    def reduce(self, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The mean of the gradients over all replicas.

        Args:
          gradients: Float tensors shaped like the variables given to `build`.

        Returns:
          The means: float32, the same bits on every replica. If a gradient of any replica is not finite, a codec's
          residuals stay as they are and the means are NaN, on every replica.

        Raises:
          RuntimeError: Called outside a replica context.
        """
        replicas = _replica_context().num_replicas_in_sync
        if not self.compresses:
            sums, _ = self.reduce_sums(gradients, tf.zeros([0], tf.float32))
            return [value / replicas for value in sums]
        norm = tf.add_n([tf.nn.l2_loss(tf.cast(gradient, tf.float32)) for gradient in gradients])
        flag = tf.where(tf.math.is_finite(norm), 0.0, 1.0)
        sums, sidecar = self.reduce_sums(gradients, flag[None])
        factor = tf.where(sidecar[0] > 0.0, float("nan"), 1.0 / replicas)
        return [value * factor for value in sums]

    def reduce_sums(self, gradients: Sequence[tf.Tensor], sidecar: tf.Tensor) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Sums gradients and sidecar over all replicas.

        Args:
          gradients: Gradient sums of this replica, float32 tensors shaped like the variables given to `build`.
          sidecar: Float32 vector of scalars to sum along with them, always exactly. With a codec, the first one
            tells, where it is not 0, that the gradients of this replica are not finite: then no replica's residuals
            change, and what comes back in place of the gradients is of no use.

        Returns:
          The summed gradients and the summed sidecar, the same bits on every replica.

        Raises:
          RuntimeError: Called outside a replica context, or before `build`.
          ValueError: Another number of gradients than variables given to `build`.
        """
        context = _replica_context()
        if len(gradients) != len(self._shapes):
            raise ValueError(f"got {len(gradients)} gradients for {len(self._shapes)} variables; call build() first")
        gradients = [tf.cast(gradient, tf.float32) for gradient in gradients]
        if context.num_replicas_in_sync == 1:
            return gradients, sidecar
        hosts = context.num_replicas_in_sync // len(context.strategy.extended.worker_devices)
        if self._spec.lossy and hosts != self._group.size:
            raise RuntimeError(
                f"the exchange was built for {self._group.size} workers and runs on {hosts}: give build() a strategy"
            )
        if self.compresses:
            return context.merge_call(self._between_hosts, args=(gradients, sidecar))
        return self._all_reduce(context, gradients, sidecar)

    def _all_reduce(
        self, context: tf.distribute.ReplicaContext, gradients: Sequence[tf.Tensor], sidecar: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The dense exchange of `none`."""
        flat = [tf.reshape(gradient, [-1]) for gradient in gradients]
        buffers = [tf.concat([flat[index] for index in bucket], axis=0) for bucket in self._dense]
        # The sidecar rides in the last bucket: a call of its own would cost a round trip.
        buffers[-1] = tf.concat([buffers[-1], sidecar], axis=0)
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, buffers)
        result: list[tf.Tensor] = [None] * len(flat)
        for bucket, buffer in zip(self._dense, summed, strict=True):
            *parts, rest = self._cut(buffer, bucket)
            for index, part in zip(bucket, parts, strict=True):
                result[index] = part
        return result, rest

    def _between_hosts(
        self, strategy: tf.distribute.Strategy, gradients: Sequence[Any], sidecar: Any
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The compressed exchange: once per worker, after its replicas have added up what they have."""
        with tf.device(self._device):
            sums = [_sum_local(strategy, gradient) for gradient in gradients]
            # First, and dense, what decides whether there is an update at all: residuals must not change if not. Small
            # tensors ride along.
            vector = tf.concat(
                [_sum_local(strategy, sidecar), *(tf.reshape(sums[index], [-1]) for index in self._small)], axis=0
            )
            reduced = self._group.all_reduce(vector, self._instances[0])
            length = reduced.shape[0] - sum(self._shapes[index].num_elements() for index in self._small)
            sidecar = reduced[:length]
            *parts, _ = self._cut(reduced[length:], self._small)
            result: list[tf.Tensor] = [None] * len(sums)
            for index, part in zip(self._small, parts, strict=True):
                result[index] = part
            large = [index for bucket in self._fused for index in bucket]
            exchanged = tf.cond(
                tf.equal(sidecar[0], 0.0),
                lambda: self._exchange_buckets([sums[index] for index in large]),
                lambda: [tf.zeros(self._shapes[index]) for index in large],
            )
            for index, value in zip(large, exchanged, strict=True):
                result[index] = value
        return result, sidecar

    def _exchange_buckets(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        assert self._step is not None
        variable = local(self._step)
        step = variable.read_value()

        def compressed() -> list[tf.Tensor]:
            result: list[tf.Tensor] = []
            norms = []
            for indices, bucket in zip(self._fused, self._buckets, strict=True):
                sums, norm = bucket.sum(tensors[len(result) : len(result) + len(indices)], step)
                result += sums
                norms.append(norm)
            self._observe(tensors, result, tf.add_n(norms), step)
            return result

        if not tensors:
            return []
        warming_up = self._spec.warmup_steps > 0
        if warming_up:
            result = tf.cond(step < self._spec.warmup_steps, lambda: self._dense_sums(tensors, 1), compressed)
        else:
            result = compressed()
        with tf.control_dependencies(result):
            variable.assign_add(1, read_value=False)
        return result

    def _dense_sums(self, tensors: list[tf.Tensor], instance: int) -> list[tf.Tensor]:
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
        summed = self._group.all_reduce(flat, self._instances[instance])
        parts = tf.split(summed, [tensor.shape.num_elements() for tensor in tensors])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _observe(self, tensors: list[tf.Tensor], sums: list[tf.Tensor], norms: tf.Tensor, step: tf.Tensor) -> None:
        """Notes the norms, and now and then how far what was delivered points where the gradients do."""
        assert self._observed is not None
        observed = local(self._observed)
        every = self._spec.sample_every

        def cosine() -> tf.Tensor:
            dense = self._dense_sums(tensors, 2)
            inner = tf.add_n([tf.reduce_sum(one * other) for one, other in zip(dense, sums, strict=True)])
            squares = [2.0 * tf.add_n([tf.nn.l2_loss(part) for part in parts]) for parts in (dense, sums)]
            return inner / tf.sqrt(squares[0] * squares[1])

        latest = observed.read_value()[2]
        if every:
            # Early in a run for the first time, but not at its very first exchange.
            latest = tf.cond(tf.equal(step % every, min(every // 10, 100)), cosine, lambda: latest)
        observed.assign(tf.concat([norms, latest[None]], axis=0), read_value=False)

    def observed(self) -> dict[str, float]:
        """What the last exchange shows of this worker, for TensorBoard; empty where nothing is compressed.

        Returns:
          `residual_over_gradient`: L2 norm of what is kept back, over that of the gradient. `cosine`: between the sum
          that was delivered and the dense one, of the last exchange where they were compared.
        """
        if self._observed is None:
            return {}
        gradient, residual, cosine = local(self._observed).numpy().tolist()
        result = {"residual_over_gradient": (residual / gradient) ** 0.5} if gradient > 0.0 else {}
        return result | ({} if cosine != cosine else {"cosine": cosine})

    def _cut(self, buffer: tf.Tensor, indices: Sequence[int]) -> list[tf.Tensor]:
        """The tensors of these indices at the front of a buffer, and what is left of it."""
        sizes = [self._shapes[index].num_elements() for index in indices]
        parts = tf.split(buffer, [*sizes, buffer.shape[0] - sum(sizes)])
        return [
            *(tf.reshape(part, self._shapes[index]) for index, part in zip(indices, parts, strict=False)),
            parts[-1],
        ]

    def traffic(self, replicas: int, sidecar_length: int) -> Traffic:
        """What one exchange costs on the wire.

        Args:
          replicas: Number of replicas N.
          sidecar_length: Scalars in the sidecar.
        """
        elements = [shape.num_elements() for shape in self._shapes]
        dense = 4 * (sum(elements) + sidecar_length)
        if not self.compresses:
            sent = 2 * (replicas - 1) * dense // replicas
            pattern = "all_reduce" if replicas > 1 else "local"
            return Traffic("none", pattern, dense if replicas > 1 else 0, sent, sent)
        hosts = self._group.size
        small = 4 * (sidecar_length + sum(elements[index] for index in self._small))
        wires = [bucket.wire() for bucket in self._buckets]
        pattern = _joined(["all_reduce" if not spec.codec else spec.pattern for spec in self._chosen])
        return Traffic(
            _joined([spec.name for spec in self._chosen]),
            pattern if replicas == hosts or pattern == "hierarchical" else f"hierarchical, {pattern}",
            small + sum(wire.payload for wire in wires),
            2 * (hosts - 1) * small // hosts + sum(wire.sent for wire in wires),
            2 * (hosts - 1) * dense // hosts,
        )


def _joined(names: Sequence[str]) -> str:
    """Different names, in the order in which they come."""
    return " + ".join(dict.fromkeys(names)) or "none"


def _sum_local(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
    """Sum over this worker's replicas, in their order."""
    parts = strategy.experimental_local_results(value)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


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
