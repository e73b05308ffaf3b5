"""The compressed exchange between workers: buckets, their state, and its statistics.

In the training step it runs once per worker, on its first device, after its replicas have added up their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import PER_WORKER, local_copy
from tfpar.exchange import buckets, fusion, residuals
from tfpar.exchange import spec as specs
from tfpar.exchange.algorithms.sparse_rows import SparseRows
from tfpar.exchange.counting import ByteCounter, bytes_of_exchange, ring_bytes
from tfpar.exchange.gradients import Gradient
from tfpar.exchange.reducer import Reducer, ShouldApply, Traffic, reduce_per_worker
from tfpar.exchange.registry import DENSE, TuningResult
from tfpar.exchange.residual_units import EXAMPLES, ResidualUnits
from tfpar.exchange.residuals import LAYOUT
from tfpar.exchange.spec import Spec

import numpy as np
import tensorflow as tf


class CompressedReducer(Reducer):
    """Sums tensors over the workers of a cluster, large ones encoded.

    Args:
      spec: The exchange.
      shapes: Static shapes of all tensors.
      group: The workers that exchange.
      device: Where the exchange runs.
      seed: Seed of stochastic rounding.
      sparse: Indices of the tensors whose rows are sent if that takes fewer bytes, see `sparse_rows`. Each has its own
        bucket, which sums it otherwise; between such exchanges the bucket's residual and other state do not change.
      overlap: Whether tensors come one after the other, see `Exchange.build`.
      encodes: If false, the tensors that `spec` would encode are sent dense, together with the residuals of a saved
        run: on a single worker, or after a change to `none`.
      measured: What the algorithm measured of all workers; by default, it measures this group.

    Raises:
      ConfigError: The exchange does not work for this number of workers.
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
        encodes: bool = True,
        measured: Any = None,
    ) -> None:
        if encodes:
            spec.check_group(group)
        options = spec.options
        self._spec = spec if encodes else specs.plain(DENSE)
        self._shapes = list(shapes)
        self._group = group
        self._device = device
        self._seed = seed
        self._overlap = overlap and options.overlap
        self._warmup_steps = options.warmup_steps if encodes else 0
        self._sample_every = options.sample_every if encodes else 0
        self._sizes = [shape.num_elements() for shape in shapes]
        large = [index for index, shape in enumerate(shapes) if options.is_compressible(shape)]
        self._small = [index for index in range(len(shapes)) if index not in set(large)]
        # An embedding for which more than gradients are sent is exchanged like any other tensor.
        self._embeddings = [index for index in large if index in sparse and options.sends_only_gradient]
        groups = fusion.group_indices(large, self._sizes, options.bucket_bytes, self._embeddings)
        self._indices = [indices for indices in groups if indices]
        self._small_instance, self._warmup_instance, self._sample_instance = allocate_instance_keys(3, group)
        self._embedding_instances = dict(
            zip(self._embeddings, allocate_instance_keys(len(self._embeddings), group), strict=True)
        )
        with tf.device(device):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="exchange_step", **PER_WORKER)
            # Squared L2 norms of gradients and residuals when they were last measured, and a cosine.
            self._observed = tf.Variable(
                [0.0, 0.0, float("nan")], trainable=False, name="exchange_observed", **PER_WORKER
            )
            self._counter = ByteCounter("exchange_bytes")  # of the large tensors
        self.units = [ResidualUnits(device, lambda: [bucket.state for bucket in self._buckets])]
        self._make_buckets(self._choose(measured))

    @property
    def compresses(self) -> bool:
        """Whether gradients are encoded."""
        return self._spec.compresses

    @property
    def sparse(self) -> list[int]:
        """Indices of the variables whose rows are sent."""
        return self._rows.indices

    @property
    def state(self) -> list[tf.Variable]:
        """The count of exchanges, and the state of all buckets."""
        return [local_copy(self._step), *(variable for bucket in self._buckets for variable in bucket.state.values())]

    @property
    def first_ready_indices(self) -> list[int]:
        """The tensors of the bucket that is complete first, if buckets are sent before `should_apply` is known."""
        prevented = self.sparse or self._warmup_steps or not self._spec.options.sends_only_gradient
        return self._indices[-1] if self._overlap and len(self._indices) > 1 and not prevented else []

    plan_table = property(lambda self: self._plan_table, doc="The measurements and choices of `auto`, as text.")

    def export(self) -> dict[str, np.ndarray]:
        """The count of exchanges; of each bucket, its layout and its state."""
        arrays = {"step": np.array(local_copy(self._step).numpy(), np.int64), **self.units[0].export()}
        for index, bucket in enumerate(self._buckets):
            layout = [bucket.elements, bucket.shard_elements, bucket.factor_rank]
            arrays[f"{index}/{LAYOUT}"] = np.array(layout, np.int64)
            for role, array in residuals.exported(bucket, self._group.rank).items():
                arrays[f"{index}/{role}"] = array
        return arrays

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Restores this worker's own state if layouts agree, otherwise a share of the pending residual of all
        workers."""
        rank = self._group.rank
        same_workers = workers == self._group.size
        own_rank = rank if same_workers else 0
        own = residuals.checked(read(own_rank), own_rank)
        if not own:
            return
        local_copy(self._step).assign(own["step"])
        self.units[0].restore(own)
        # Compares layouts, not shapes, which may agree on one worker and not on another: all must decide the same.
        if same_workers and _layout(own) == _layout(self.export()):
            for index, bucket in enumerate(self._buckets):
                arrays = {role: own[f"{index}/{role}"] for role in bucket.state}
                residuals.assign_exported(bucket, rank, arrays)
            return
        pending = residuals.total_pending([residuals.checked(read(worker), worker) for worker in range(workers)])
        residuals.load_pending(self._buckets, pending if rank == 0 else np.zeros_like(pending))

    def retune(self) -> bool:
        """Lets the algorithm choose again; moves residuals to the new buckets."""
        result = self._choose()
        if not result.improves_on(self._chosen):
            return False
        pending = residuals.pending_of(self._buckets, self._group.rank)
        self._make_buckets(result)
        residuals.load_pending(self._buckets, pending)
        return True

    def observed(self) -> dict[str, float]:
        """Norm of the residual over that of the gradient, and cosine between the sums sent and the dense ones."""
        if not self.compresses:
            return {}
        gradient, residual, cosine = local_copy(self._observed).numpy().tolist()
        result = {"residual_over_gradient": (residual / gradient) ** 0.5} if gradient > 0.0 else {}
        return result | ({} if cosine != cosine else {"cosine": cosine})

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Mean bytes of the exchanges so far, or of one that encodes all buckets before the first; and those of a dense
        exchange."""
        ring = functools.partial(ring_bytes, workers=self._group.size)
        small = ring(4 * (sidecar_length + sum(self._sizes[index] for index in self._small)))
        counted = self._counter.mean()
        parts = [counted] if counted else [*(bucket.wire_bytes() for bucket in self._whole), self._rows.wire_bytes()]
        pattern = _joined([spec.options.pattern_name for spec in self._chosen])
        if replicas > self._group.size and pattern != "hierarchical":
            pattern = f"hierarchical, {pattern}"
        return Traffic(
            codec=_joined([spec.name for spec in self._chosen]),
            pattern=pattern + (", rows" if self.sparse else ""),
            payload_bytes=small.payload + sum(part.payload for part in parts),
            wire_bytes=small.sent + sum(part.sent for part in parts),
            dense_bytes=ring(4 * (sum(self._sizes) + sidecar_length)).sent,
        )

    def reduce(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums gradients and sidecar over all replicas; see `Reducer`."""
        per_worker = functools.partial(self.reduce_on_device, should_apply=should_apply)
        return reduce_per_worker(per_worker, self._device, gradients, sidecar)

    def reduce_on_device(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums the tensors of one device over the workers. Called in a cross-replica context, on this device."""
        reduce = self._reduce_early if self.first_ready_indices else self._reduce_after_sidecar
        return reduce(gradients, sidecar, should_apply=should_apply)

    def _reduce_after_sidecar(
        self, gradients: Sequence[Gradient], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Sums the sidecar first, dense, because it decides whether the step is applied: if not, residuals must not
        change."""
        sums, sidecar = self._reduce_small(gradients, sidecar)
        self.units[0].follow_sidecar(should_apply, sidecar)
        large = [index for indices in self._indices for index in indices]
        if large:
            reduced = tf.cond(
                should_apply(sidecar),
                lambda: self._reduce_large({index: gradients[index] for index in large}),
                lambda: {index: self._placeholder(index) for index in large},
            )
            for index, value in reduced.items():
                sums[index] = value
        return sums, sidecar

    def _reduce_early(
        self, gradients: Sequence[tf.Tensor], sidecar: tf.Tensor, should_apply: ShouldApply
    ) -> tuple[list[Gradient], tf.Tensor]:
        """Every bucket as soon as its tensors are complete; only the state waits for `should_apply`."""
        step = local_copy(self._step).read_value()
        compares = self._compares(step)
        pending: buckets.PendingAssigns = []
        norms = []
        large: dict[int, tf.Tensor] = {}
        compared: list[tf.Tensor] = []
        # The last layers first, as the backward pass finishes them: on GPUs calls start in the order of the code.
        for indices, bucket in reversed(list(self._indexed_buckets())):
            tensors, kept = buckets.given_away([gradients[index] for index in indices], compares)
            parts, norm = bucket.reduce(tensors, step, pending)
            large |= dict(zip(indices, parts, strict=True))
            compared += kept
            norms.append(norm)
        sums, sidecar = self._reduce_small(gradients, sidecar)

        def assign() -> tf.Tensor:
            for variable, value in pending:
                variable.assign(value, read_value=False)
            self._observe(compared, list(large.values()), tf.add_n(norms), compares)
            self._count_bytes(step)
            local_copy(self._step).assign_add(1, read_value=False)
            return tf.constant(True)

        assigned = tf.cond(should_apply(sidecar), assign, lambda: tf.constant(False))
        with tf.control_dependencies([assigned]):
            sidecar = tf.identity(sidecar)
        for index, value in large.items():
            sums[index] = value
        return sums, sidecar

    def _reduce_small(self, gradients: Sequence[Gradient], sidecar: tf.Tensor) -> tuple[list[Any], tf.Tensor]:
        """Sums of the small tensors, which are sent with the sidecar; None in place of all others."""
        vector = tf.concat([sidecar, *(tf.reshape(gradients[index], [-1]) for index in self._small)], axis=0)
        reduced = self._group.all_reduce(vector, self._small_instance)
        sizes = [self._sizes[index] for index in self._small]
        sidecar, *parts = tf.split(reduced, [reduced.shape[0] - sum(sizes), *sizes])
        sums: list[Any] = [None] * len(gradients)
        for index, part in zip(self._small, parts, strict=True):
            sums[index] = tf.reshape(part, self._shapes[index])
        return sums, sidecar

    def _reduce_large(self, gradients: dict[int, Any]) -> dict[int, Any]:
        """Sums of all tensors that have a bucket; of embeddings, rows."""
        variable = local_copy(self._step)
        step = variable.read_value()
        self._count_bytes(step)
        sums: dict[int, Any] = {}
        if self.sparse:
            dense = {
                indices[0]: functools.partial(self._reduce_embedding, indices[0], bucket, step)
                for indices, bucket in self._indexed_buckets()
                if indices[0] in self.sparse
            }
            sums |= self._rows.all_reduce({index: gradients[index] for index in self.sparse}, dense)
        others = {index: gradient for index, gradient in gradients.items() if index not in self.sparse}
        if others:
            sums |= self._reduce_buckets(others, step)
        with tf.control_dependencies(tf.nest.flatten(sums)):
            variable.assign_add(1, read_value=False)
        return {index: sums[index] for index in gradients}

    def _reduce_embedding(self, index: int, bucket: buckets.Bucket, step: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        """Sum of an embedding that is exchanged like any other tensor."""
        encoded, dense = bucket.wire_bytes(), ring_bytes(4 * self._sizes[index], self._group.size)

        def unencoded() -> tf.Tensor:
            self._counter.add(dense.payload - encoded.payload, dense.sent - encoded.sent)  # in place of the encoded
            return self._group.all_reduce(gradient, self._embedding_instances[index])

        return self._unless_warming_up(step, lambda: bucket.reduce([gradient], step)[0][0], unencoded)

    def _reduce_buckets(self, gradients: dict[int, tf.Tensor], step: tf.Tensor) -> dict[int, tf.Tensor]:
        """Sums of the tensors of all buckets but the embeddings'."""
        every = list(gradients.values())

        def encoded() -> list[tf.Tensor]:
            sums: list[tf.Tensor] = []
            compares = self._compares(step)
            compared: list[tf.Tensor] = []
            norms = []
            for indices, bucket in self._indexed_buckets():
                if indices[0] in self.sparse:
                    continue
                tensors, kept = buckets.given_away([gradients[index] for index in indices], compares)
                parts, norm = bucket.reduce(tensors, step)
                sums += parts
                compared += kept
                norms.append(norm)
            self._observe(compared, sums, tf.add_n(norms), compares)
            return sums

        shapes = [tensor.shape for tensor in every]
        dense = functools.partial(self._dense_sums, every, shapes, self._warmup_instance)
        return dict(zip(gradients, self._unless_warming_up(step, encoded, dense), strict=True))

    def _unless_warming_up(self, step: tf.Tensor, encoded: Callable[[], Any], dense: Callable[[], Any]) -> Any:
        """The result of `encoded`, or in the first `warmup_steps` exchanges that of `dense`."""
        return tf.cond(step < self._warmup_steps, dense, encoded) if self._warmup_steps else encoded()

    def _count_bytes(self, step: tf.Tensor) -> None:
        """Counts the bytes of one exchange; those of embeddings whose rows are sent, `SparseRows` counts."""
        dense = ring_bytes(4 * sum(bucket.elements for bucket in self._whole), self._group.size)
        warmup, compares = self._warmup_steps, self._compares(step)
        total = bytes_of_exchange(self._whole, dense, step, warmup_steps=warmup, compares=compares)
        self._counter.add(total[0], total[1], exchanges=1)

    def _dense_sums(self, tensors: list[tf.Tensor], shapes: Sequence[tf.TensorShape], instance: int) -> list[tf.Tensor]:
        vector = tf.ensure_shape(buckets.concatenated(tensors), [sum(shape.num_elements() for shape in shapes)])
        return buckets.split(self._group.all_reduce(vector, instance), shapes)

    def _compares(self, step: tf.Tensor) -> tf.Tensor | None:
        """Whether the sums of a step are compared with the dense ones: early in a run, but in its first step only if
        `sample_every` is less than 10. None if those of no step are."""
        every = self._sample_every
        return tf.equal(step % every, min(every // 10, 100)) if every else None

    def _placeholder(self, index: int) -> Any:
        """In place of the sum of a tensor; of an embedding, one row, which can be made NaN."""
        shape = self._shapes[index]
        if index in self.sparse:
            return tf.zeros([1, *shape[1:]]), tf.zeros([1], tf.int64)
        return tf.zeros(shape)

    def _observe(
        self, compared: list[tf.Tensor], sums: list[tf.Tensor], norms: tf.Tensor, compares: tf.Tensor | None
    ) -> None:
        """Stores norms that were measured and, in some steps, the cosine between the sums and the dense ones."""
        observed = local_copy(self._observed)

        def cosine() -> tf.Tensor:
            dense = self._dense_sums(compared, [each.shape for each in sums], self._sample_instance)
            inner = tf.add_n([tf.reduce_sum(one * other) for one, other in zip(dense, sums, strict=True)])
            squares = [2.0 * tf.add_n([tf.nn.l2_loss(part) for part in parts]) for parts in (dense, sums)]
            return inner / tf.sqrt(squares[0] * squares[1])

        old = observed.read_value()
        latest = old[2] if compares is None else tf.cond(compares, cosine, lambda: old[2])
        norms = tf.where(tf.math.is_nan(norms), old[:2], norms)
        observed.assign(tf.concat([norms, latest[None]], axis=0), read_value=False)

    def _choose(self, measured: Any = None) -> TuningResult:
        """A spec for each bucket; measures, if nothing is measured."""
        algorithm = self._spec.algorithm
        if measured is None:
            measured = algorithm.measured(self._spec, self._group, self._device)
        elements = [sum(self._sizes[index] for index in indices) for indices in self._indices]
        return algorithm.choose(self._spec, elements, self._group, measured)

    def _make_buckets(self, result: TuningResult) -> None:
        self._chosen, self._plan_table = list(result.specs), result.table
        with tf.device(self._device):
            self._buckets = [
                spec.build(
                    [self._shapes[index] for index in indices],
                    self._group,
                    buckets.bucket_seed(self._seed, number),
                    f"bucket_{number}",
                )
                for number, (indices, spec) in enumerate(zip(self._indices, self._chosen, strict=True))
            ]
            embeddings = {
                indices[0]: (self._shapes[indices[0]], bucket.wire_bytes())
                for indices, bucket in self._indexed_buckets()
                if indices[0] in self._embeddings
            }
            self._rows = SparseRows(embeddings, self._group, self._spec.options.sparse_row_dtype, self._counter)
        self._whole = [bucket for indices, bucket in self._indexed_buckets() if indices[0] not in self.sparse]

    def _indexed_buckets(self) -> Iterable[tuple[list[int], buckets.Bucket]]:
        """Every bucket with the indices of its tensors."""
        return zip(self._indices, self._buckets, strict=True)


def _layout(state: Mapping[str, np.ndarray]) -> dict[str, object]:
    """Names of a worker's state, and the layouts of its buckets: the same on every worker."""
    names = {name: array.tolist() if name.endswith(LAYOUT) else None for name, array in state.items()}
    return {name: layout for name, layout in names.items() if name != EXAMPLES}  # which older checkpoints lack


def _joined(names: Sequence[str]) -> str:
    """Different names, in the order in which they come."""
    return " + ".join(dict.fromkeys(names)) or "none"
