"""The compressed exchange between hosts: buckets, their state, and what can be seen of it.

Functions run once per worker, on its first device, after its replicas have added up what they have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import PER_WORKER, local_copy
from tfpar.exchange import buckets, residuals
from tfpar.exchange.algorithms.sparse_rows import Rows
from tfpar.exchange.residuals import LAYOUT
from tfpar.exchange.spec import Spec
from tfpar.exchange.tuning import auto as planning

import numpy as np
import tensorflow as tf

# Scalar bool from the summed sidecar.
Wanted = Callable[[tf.Tensor], tf.Tensor]


class HostExchange:
    """Sums tensors over the workers of a cluster, large ones encoded.

    Args:
      spec: The exchange; of `none`, see `planning.dense`.
      shapes: Static shapes of all tensors.
      group: All workers.
      device: Where the exchange runs.
      seed: Of stochastic rounding.
      sparse: Tensors of which rows are to travel where that is less, see `rows`.
      overlap: Whether tensors come one after the other, see `Exchange.build`.

    Attributes:
      plan_table: What `auto` has measured and decided; empty for any other spec.
      rows: The tensors of which rows may travel. Each has a bucket of its own, which serves it where rows are not less;
        what that bucket has kept back waits, like the rest of its state, until it does.

    Raises:
      ConfigError: The pattern does not work for this number of workers.
    """

    def __init__(
        self,
        spec: Spec,
        shapes: Sequence[tf.TensorShape],
        group: Group,
        device: str,
        seed: int,
        sparse: Collection[int] = (),
        *,
        overlap: bool = False,
    ) -> None:
        planning.check_workers(spec, group.size, device)
        self._spec = spec
        self._shapes = list(shapes)
        self._group = group
        self._device = device
        self._seed = seed
        self._overlap = overlap
        self.plan_table = ""
        sizes = [shape.num_elements() for shape in shapes]
        large = [index for index, shape in enumerate(shapes) if planning.travels_encoded(spec, shape)]
        self._small = [index for index in range(len(sizes)) if index not in set(large)]
        # Momentum correction (topk) adds to what is sent what was not: a table then travels like any other tensor.
        self._sparse = [index for index in large if index in sparse and not (spec.momentum or spec.ramp_steps)]
        self._fused = [bucket for bucket in planning.fuse(large, sizes, spec.bucket_bytes, self._sparse) if bucket]
        self._instances = allocate_instance_keys(3)
        self._table_instances = dict(zip(self._sparse, allocate_instance_keys(len(self._sparse)), strict=True))
        with tf.device(device):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="exchange_step", **PER_WORKER)
            # Squared L2 norms of gradients and residuals at the last exchange, and a cosine.
            self._observed = tf.Variable(
                [0.0, 0.0, float("nan")], trainable=False, name="exchange_observed", **PER_WORKER
            )
        self._make_buckets(self._plan())

    @property
    def overlaps(self) -> bool:
        """Whether buckets leave before it is known that there will be an update."""
        spec = self._spec
        hinders = self.rows.numbers or spec.warmup_steps or spec.momentum or spec.ramp_steps
        return self._overlap and spec.overlap and len(self._fused) > 1 and not hinders

    @property
    def leaves_first(self) -> list[int]:
        """The tensors of the bucket that is complete first."""
        return self._fused[-1]

    @property
    def state(self) -> list[tf.Variable]:
        """See `Exchange.state`."""
        return [local_copy(self._step), *(variable for bucket in self._buckets for variable in bucket.state.values())]

    def export(self) -> dict[str, np.ndarray]:
        """See `Exchange.export`."""
        arrays = {"step": np.array(local_copy(self._step).numpy(), np.int64)}
        for number, (bucket, spec) in enumerate(zip(self._buckets, self._chosen, strict=True)):
            arrays[f"{number}/{LAYOUT}"] = np.array([bucket.elements, bucket.shard_elements, spec.rank], np.int64)
            for role, variable in bucket.state.items():
                arrays[f"{number}/{role}"] = np.array(variable.numpy(), copy=True)
        return arrays

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """See `Exchange.restore`."""
        rank = self._group.rank
        mine = rank if workers == self._group.size else 0
        own = residuals.checked(read(mine), mine)
        if not own:
            return
        local_copy(self._step).assign(own["step"])
        # Layouts, not shapes, which may agree on one worker and not on another: all must decide alike.
        if workers == self._group.size and _layout(own) == _layout(self.export()):
            for number, bucket in enumerate(self._buckets):
                for role, variable in bucket.state.items():
                    variable.assign(own[f"{number}/{role}"])
            return
        kept = residuals.undelivered([residuals.checked(read(worker), worker) for worker in range(workers)])
        residuals.hand_over(self._buckets, kept if rank == 0 else np.zeros_like(kept))

    def retune(self) -> bool:
        """See `Exchange.retune`."""
        if self._spec.name != "auto":
            return False
        chosen = self._plan()
        if chosen == self._chosen:
            return False
        kept = residuals.kept_by_worker(self._buckets, self._group.rank)
        self._make_buckets(chosen)
        residuals.hand_over(self._buckets, kept)
        return True

    def observed(self) -> dict[str, float]:
        """See `Exchange.observed`."""
        gradient, residual, cosine = local_copy(self._observed).numpy().tolist()
        result = {"residual_over_gradient": (residual / gradient) ** 0.5} if gradient > 0.0 else {}
        return result | ({} if cosine != cosine else {"cosine": cosine})

    def payload_and_sent(self, sidecar_length: int) -> tuple[int, int]:
        """Bytes that this worker encodes, and sends, in an exchange with a sidecar of so many scalars."""
        small = 4 * (sidecar_length + self._small_elements())
        wires = [bucket.wire() for indices, bucket in self._own_buckets() if indices[0] not in self.rows.numbers]
        wires.append(self.rows.wire())
        sent = 2 * (self._group.size - 1) * small // self._group.size
        return small + sum(wire.payload for wire in wires), sent + sum(wire.sent for wire in wires)

    def codecs_and_patterns(self) -> tuple[str, str]:
        """Of all buckets, different ones joined."""
        patterns = ["all_reduce" if spec.codec is None else spec.pattern for spec in self._chosen]
        return _joined([spec.name for spec in self._chosen]), _joined(patterns)

    def sum(self, tensors: Sequence[Any], sidecar: tf.Tensor, wanted: Wanted) -> tuple[list[Any], tf.Tensor]:
        """Sums tensors and sidecar over the workers; see `Exchange.reduce_sums`.

        Args:
          tensors: Float32; of `rows.numbers`, `rows.Slices`.
          sidecar: Float32 vector.
          wanted: Tells from the summed sidecar whether the sums are of use; if not, no state changes.
        """
        with tf.device(self._device):
            large = [index for bucket in self._fused for index in bucket]
            if self.overlaps and large:
                return self._sum_early(tensors, sidecar, wanted)
            # First, and dense, what decides whether there is an update at all: residuals must not change if not.
            result, sidecar = self._sum_small(tensors, sidecar)
            if large:
                exchanged = tf.cond(
                    wanted(sidecar),
                    lambda: self._exchange_large({index: tensors[index] for index in large}),
                    lambda: {index: self._nothing(index) for index in large},
                )
                for index, value in exchanged.items():
                    result[index] = value
        return result, sidecar

    def _sum_early(
        self, tensors: Sequence[tf.Tensor], sidecar: tf.Tensor, wanted: Wanted
    ) -> tuple[list[Any], tf.Tensor]:
        """Every bucket as soon as its tensors are there; only the state waits for what decides about the update."""
        step = local_copy(self._step).read_value()
        changes: buckets.Changes = []
        norms = []
        sums: dict[int, tf.Tensor] = {}
        # The last layers first, as the backward pass finishes them: on GPUs calls start in the order of the code.
        for indices, bucket in reversed(list(self._own_buckets())):
            parts, norm = bucket.sum([tensors[index] for index in indices], step, changes)
            sums |= dict(zip(indices, parts, strict=True))
            norms.append(norm)
        result, sidecar = self._sum_small(tensors, sidecar)

        def keep() -> tf.Tensor:
            for variable, value in changes:
                variable.assign(value, read_value=False)
            self._observe([tensors[index] for index in sums], list(sums.values()), tf.add_n(norms), step)
            local_copy(self._step).assign_add(1, read_value=False)
            return tf.constant(True)

        kept = tf.cond(wanted(sidecar), keep, lambda: tf.constant(False))
        with tf.control_dependencies([kept]):
            sidecar = tf.identity(sidecar)
        for index, value in sums.items():
            result[index] = value
        return result, sidecar

    def _sum_small(self, tensors: Sequence[Any], sidecar: tf.Tensor) -> tuple[list[Any], tf.Tensor]:
        """Sums of the small tensors, which ride along with the sidecar; None in the places of all others."""
        vector = tf.concat([sidecar, *(tf.reshape(tensors[index], [-1]) for index in self._small)], axis=0)
        reduced = self._group.all_reduce(vector, self._instances[0])
        sizes = [self._shapes[index].num_elements() for index in self._small]
        sidecar, *parts = tf.split(reduced, [reduced.shape[0] - sum(sizes), *sizes])
        result: list[Any] = [None] * len(tensors)
        for index, part in zip(self._small, parts, strict=True):
            result[index] = tf.reshape(part, self._shapes[index])
        return result, sidecar

    def _nothing(self, index: int) -> Any:
        """In place of the sum of a tensor; of a table, one row, which can be made NaN."""
        shape = self._shapes[index]
        if index in self.rows.numbers:
            return tf.zeros([1, *shape[1:]]), tf.zeros([1], tf.int64)
        return tf.zeros(shape)

    def _small_elements(self) -> int:
        return sum(self._shapes[index].num_elements() for index in self._small)

    def _plan(self) -> list[Spec]:
        """A spec for each bucket."""
        if self._spec.name != "auto":
            # Without a codec, of `powersgd` too, a bucket is dense: its rank then only tells which tensors are meant.
            spec = self._spec if self._spec.lossy else dataclasses.replace(self._spec, rank=0)
            return [spec] * len(self._fused)
        elements = [sum(self._shapes[index].num_elements() for index in bucket) for bucket in self._fused]
        plan = planning.choose(self._spec, elements, self._group, self._device)
        self.plan_table = plan.table
        return plan.specs

    def _make_buckets(self, chosen: Sequence[Spec]) -> None:
        self._chosen = list(chosen)
        with tf.device(self._device):
            self._buckets = [
                planning.bucket_type(spec)(
                    spec,
                    [self._shapes[index] for index in bucket],
                    self._group,
                    buckets.seed_of_bucket(self._seed, number),
                    f"bucket_{number}",
                )
                for number, (bucket, spec) in enumerate(zip(self._fused, chosen, strict=True))
            ]
            tables = {
                indices[0]: (self._shapes[indices[0]], bucket.wire())
                for indices, bucket in self._own_buckets()
                if indices[0] in self._sparse
            }
            half = self._spec.codec is not None and self._spec.codec.kind == "bf16"
            self.rows = Rows(tables, self._group, half=half)

    def _own_buckets(self) -> Iterable[tuple[list[int], buckets.Bucket]]:
        """The tensors of every bucket, and the bucket."""
        return zip(self._fused, self._buckets, strict=True)

    def _exchange_large(self, tensors: dict[int, Any]) -> dict[int, Any]:
        """Sums of all tensors that have a bucket; of tables, rows."""
        variable = local_copy(self._step)
        step = variable.read_value()
        tables = self.rows.numbers
        result: dict[int, Any] = {}
        if tables:
            alone = {indices[0]: bucket for indices, bucket in self._own_buckets() if indices[0] in tables}
            dense = {index: functools.partial(self._sum_table, index, alone[index], step) for index in tables}
            result |= self.rows.sum({index: tensors[index] for index in tables}, dense)
        fused = [index for indices in self._fused for index in indices if index not in tables]
        if fused:
            sums = self._exchange_buckets([tensors[index] for index in fused], step)
            result |= dict(zip(fused, sums, strict=True))
        with tf.control_dependencies(tf.nest.flatten(result)):
            variable.assign_add(1, read_value=False)
        return {index: result[index] for index in tensors}

    def _sum_table(self, index: int, bucket: buckets.Bucket, step: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Sum of a table as of any other tensor."""

        def compressed() -> tf.Tensor:
            return bucket.sum([gradient], step)[0][0]

        if not self._spec.warmup_steps:
            return compressed()
        instance = self._table_instances[index]
        return tf.cond(step < self._spec.warmup_steps, lambda: self._group.all_reduce(gradient, instance), compressed)

    def _exchange_buckets(self, tensors: list[tf.Tensor], step: tf.Tensor) -> list[tf.Tensor]:
        """Sums of the tensors of all buckets but the tables'."""

        def compressed() -> list[tf.Tensor]:
            result: list[tf.Tensor] = []
            norms = []
            for indices, bucket in self._own_buckets():
                if indices[0] in self.rows.numbers:
                    continue
                sums, norm = bucket.sum(tensors[len(result) : len(result) + len(indices)], step)
                result += sums
                norms.append(norm)
            self._observe(tensors, result, tf.add_n(norms), step)
            return result

        if self._spec.warmup_steps == 0:
            return compressed()
        return tf.cond(step < self._spec.warmup_steps, lambda: self._dense_sums(tensors, 1), compressed)

    def _dense_sums(self, tensors: list[tf.Tensor], instance: int) -> list[tf.Tensor]:
        flat = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], axis=0)
        summed = self._group.all_reduce(flat, self._instances[instance])
        parts = tf.split(summed, [tensor.shape.num_elements() for tensor in tensors])
        return [tf.reshape(part, tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _observe(self, tensors: list[tf.Tensor], sums: list[tf.Tensor], norms: tf.Tensor, step: tf.Tensor) -> None:
        """Notes the norms, and now and then how far what was delivered points where the gradients do."""
        observed = local_copy(self._observed)
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


def _layout(state: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Names of a worker's state, and what the buckets are like: the same on every worker."""
    return {name: array.tolist() if name.endswith(LAYOUT) else None for name, array in state.items()}


def _joined(names: Sequence[str]) -> str:
    """Different names, in the order in which they come."""
    return " + ".join(dict.fromkeys(names)) or "none"
