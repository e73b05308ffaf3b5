"""The exchange of sharded optimizer state: sends gradient sums to the owners of shards, and new weights from them to
all.

Two phases, as in `two_phase`, with the optimizer's update between them. Each worker sends the others their shards of
its gradients, encoded. The owner of a shard sums them and updates its weights. It then sends the change of these
weights to all workers, through the same codec, instead of the encoded sum. The owner keeps its weights exact; the
residual of a payload is added to the next one (error feedback). Without a codec, the owner sends the exact new weights.

A worker sends as many bytes as without shards.

With `--shard=gradients`, gradients are sent to their owners as they are computed, separately for every micro-batch
(`scatter`). The first phase then costs its bytes once per micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import PER_WORKER, local_copy
from tfpar.config import ConfigError
from tfpar.exchange import buckets, residuals
from tfpar.exchange.reducer import Traffic, dense_traffic, sum_local
from tfpar.exchange.registry import Spec
from tfpar.exchange.residual_units import EXAMPLES, ResidualUnits
from tfpar.exchange.residuals import LAYOUT
from tfpar.exchange.sharding.codecs import sharded_codec
from tfpar.exchange.sharding.owners import Norms, OwnersReducer, Scatter, Scattered, Sent, Update, UpdateInputs
from tfpar.exchange.sharding.phases import ShardPhases
from tfpar.exchange.sharding.shards import ShardedVector, runs_of

import numpy as np
import tensorflow as tf


class ShardedReducer(OwnersReducer):
    """Sums gradients at their owners, which update their weights, and gathers the new weights.

    Args:
      spec: The exchange.
      shapes: Static shapes of all tensors.
      vectors: The tensors that are sharded; exact ones last. The others are sent dense, and every worker updates them.
      group: All workers.
      device: Where the exchange runs.
      seed: Seed of stochastic rounding.
      micro_batches: Number of micro-batches of a step, each of which is scattered; 0: whole steps are scattered.

    Attributes:
      whole: Indices of the tensors without an owner.

    Raises:
      ConfigError: See `sharded_codec`.
    """

    def __init__(
        self,
        spec: Spec,
        shapes: Sequence[tf.TensorShape],
        vectors: Sequence[ShardedVector],
        group: Group,
        device: str,
        seed: int,
        micro_batches: int = 0,
    ) -> None:
        self._micro_batches = micro_batches
        spec.check_group(group)
        self._codec = sharded_codec(spec) if group.size > 1 else None
        self._spec = spec
        self._shapes = list(shapes)
        self._sizes = [shape.num_elements() for shape in shapes]
        self._group = group
        self._device = device
        sharded = {index for vector in vectors for index in vector.indices}
        self.whole = [index for index in range(len(shapes)) if index not in sharded]
        self._small_instance, self._norm_instance = allocate_instance_keys(2, group)
        with tf.device(device):
            self._step = tf.Variable(0, dtype=tf.int64, trainable=False, name="exchange_step", **PER_WORKER)
            self._shards = [
                ShardPhases(
                    vector,
                    shapes,
                    None if vector.exact else self._codec,
                    group,
                    buckets.bucket_seed(seed, number),
                    f"shards_{number}",
                    error_feedback=self._codec is not None and not vector.exact and spec.options.error_feedback,
                )
                for number, vector in enumerate(vectors)
            ]
        self.units = [ResidualUnits(device, lambda: [one.state for one in self._shards])]

    @property
    def compresses(self) -> bool:
        """Whether gradients are encoded."""
        return self._codec is not None

    @property
    def state(self) -> list[tf.Variable]:
        """The count of exchanges, and the residuals."""
        return [local_copy(self._step), *(variable for one in self._shards for variable in one.state.values())]

    @property
    def _without_owner(self) -> list[int]:
        return self.whole

    def _merged_scatter(
        self, strategy: tf.distribute.Strategy, gradients: Any, before: Sent | None, number: int
    ) -> Any:
        with tf.device(self._device):
            summed = [sum_local(strategy, gradient) for gradient in gradients]
            if before is None:
                return self.scattered_aside(summed, number)
            shards, residuals = ([_first(strategy, each) for each in part] for part in before)
            return self.scattered_aside(summed, number, shards, residuals)

    def scattered_aside(
        self,
        sums: Sequence[tf.Tensor],
        number: int,
        shards: Sequence[tf.Tensor] = (),
        residuals: Sequence[tf.Tensor] | None = None,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """`scattered` for a micro-batch, without a change of the residuals.

        Args:
          sums: This worker's gradients.
          number: Of the micro-batch, from 0.
          shards: From the micro-batch before; none for the first.
          residuals: From the micro-batch before; None for the first.

        Returns:
          The sums of this worker's shards; the new residuals, for `keep`.
        """
        step = local_copy(self._step).read_value() * self._micro_batches + number
        known = self.residuals() if residuals is None else residuals
        found = []
        # The last layers first, as the backward pass finishes them: on GPUs calls start in this order.
        for place, (one, own) in reversed([*enumerate(self._by_vector(known))]):
            # Two calls with the same keys must not run at the same time, and a pipeline works on several micro-batches.
            with tf.control_dependencies(shards[place : place + 1]):
                found.append(one.scatter_aside(sums, own, step))
        found.reverse()
        return [shard for shard, _ in found], [each for _, residual in found for each in residual]

    def residuals(self) -> list[tf.Tensor]:
        """The values of the residuals."""
        return [value for one in self._shards for value in one.residual()]

    def keep(self, residuals: Sequence[tf.Tensor]) -> None:
        """Stores the residuals that `scattered_aside` returned."""
        for one, residual in self._by_vector(residuals):
            one.store(residual)

    def _by_vector(self, residuals: Sequence[tf.Tensor]) -> list[tuple[ShardPhases, list[tf.Tensor]]]:
        left = iter(residuals)
        return [(one, [next(left) for _ in one.state]) for one in self._shards]

    @property
    def vectors(self) -> int:
        """Number of vectors."""
        return len(self._shards)

    def _merged_update(self, strategy: tf.distribute.Strategy, gradients: Any, inputs: UpdateInputs) -> Any:
        with tf.device(self._device):
            scatter, whole = self._of_worker(strategy, gradients)
            own = [_first(strategy, value) for value in inputs.weights]
            vector, small = self.reduce_whole(whole, sum_local(strategy, inputs.sidecar))
            if not isinstance(gradients, Scattered):
                self.units[0].follow_sidecar(inputs.should_apply, vector)
            vector = inputs.reported(vector)

            def apply() -> Any:
                given = [_first(strategy, value) for value in inputs.arguments]
                shards, wants = scatter(), _first(strategy, inputs.wanted)
                size = tf.cond(wants, lambda: self.norm_of(shards, small, inputs.norms), lambda: tf.zeros([]))
                return self.updated(0, shards, small, own, inputs.update, (vector, size, *given)), size

            new, size = tf.cond(inputs.should_apply(vector), apply, lambda: (own, tf.zeros([])))
            return new, vector, size

    def _of_worker(self, strategy: tf.distribute.Strategy, gradients: Any) -> tuple[Scatter, list[tf.Tensor]]:
        """A function that returns the sums of this worker's shards, once the step is applied; and its sums of the other
        tensors."""
        if isinstance(gradients, Scattered):
            shards = [_first(strategy, each) for each in gradients.shards]
            residuals = [_first(strategy, each) for each in gradients.residuals]
            whole = [sum_local(strategy, each) for each in gradients.whole]
            return functools.partial(self.known, shards, residuals), whole
        summed = [sum_local(strategy, gradient) for gradient in gradients]
        return self.scatter_of(summed), [summed[each] for each in self.whole]

    def known(self, shards: list[tf.Tensor], residuals: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """`scattered` for gradients that have been sent already: keeps the residuals, returns the sums."""
        self.keep(residuals)
        return shards

    def scatter_of(self, sums: Sequence[tf.Tensor]) -> Scatter:
        """A function that returns the sums of this worker's shards, to be called if the step is applied.

        Residuals change with an applied step alone. Where there are none, gradients leave at once, beside the sidecar.
        """
        if any(one.state for one in self._shards):
            return functools.partial(self.scattered, sums)
        shards = self.scattered(sums)
        return lambda: shards

    def scattered(self, sums: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Sends this worker's gradients to their owners; returns the sums of its own shards. Changes residuals."""
        step = local_copy(self._step).read_value()
        return [one.scatter(sums, step) for one in self._shards]

    def norm_of(self, shards: Sequence[tf.Tensor], small: Mapping[int, tf.Tensor], norms: Norms) -> tf.Tensor:
        """The norm over the sums of all workers' shards, and over those of the tensors without an owner."""
        own = tf.reshape(norms.of(shards), [1]) if shards else tf.zeros([1])
        return norms.of([self._group.all_gather(own, self._norm_instance), *small.values()])

    def updated(
        self,
        place: int,
        shards: Sequence[tf.Tensor],
        small: dict[int, tf.Tensor],
        weights: Sequence[tf.Tensor],
        update: Update,
        arguments: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Updates this worker's pieces, and gathers the new weights.

        Args:
          place: The first argument of `update`.
          shards: From `scattered`.
          small: The second result of `reduce_whole`.
          weights: The weights before.
          update: See `update_shards`.
          arguments: Its further arguments.
        """
        counter = local_copy(self._step)
        step = counter.read_value()
        sums = [one.cut(shard) for one, shard in zip(self._shards, shards, strict=True)]
        pieces, whole = update(place, sums, small, *arguments)
        new = list(weights)
        for index, value in whole.items():
            new[index] = value
        for one, parts in zip(self._shards, pieces, strict=True):
            for index, value in one.gather(parts, weights, step).items():
                new[index] = value
        with tf.control_dependencies(new):
            counter.assign_add(1, read_value=False)
        return new

    def reduce_whole(
        self, gradients: Sequence[tf.Tensor], sidecar: tf.Tensor
    ) -> tuple[tf.Tensor, dict[int, tf.Tensor]]:
        """Dense sums of the sidecar and of tensors without an owner; first, because they decide whether the step is
        applied."""
        if not gradients and sidecar.shape[0] == 0:
            return sidecar, {}
        parts = [tf.reshape(gradient, [-1]) for gradient in gradients]
        reduced = self._group.all_reduce(tf.concat([sidecar, *parts], axis=0), self._small_instance)
        sizes = [self._sizes[index] for index in self.whole]
        vector, *parts = tf.split(reduced, [reduced.shape[0] - sum(sizes), *sizes])
        return vector, {
            index: tf.reshape(part, self._shapes[index]) for index, part in zip(self.whole, parts, strict=True)
        }

    def bytes_per_step(self, replicas: int, sidecar_length: int) -> Traffic:
        """Bytes of one exchange: payloads of both phases, and dense small tensors."""
        workers = self._group.size
        if workers == 1:
            return dense_traffic(sum(self._sizes), replicas, sidecar_length)
        small = 4 * (sidecar_length + sum(self._sizes[index] for index in self.whole))
        payload = sum(one.payload_bytes for one in self._shards)
        scattered = max(self._micro_batches, 1) * payload
        dense = dense_traffic(sum(self._sizes), workers, sidecar_length)
        return Traffic(
            codec=self._spec.name,
            pattern="sharded" if replicas == workers else "hierarchical, sharded",
            payload_bytes=small + scattered,
            wire_bytes=(workers - 1) * (2 * small + scattered + payload) // workers,
            dense_bytes=dense.wire_bytes,
        )

    def export(self) -> dict[str, np.ndarray]:
        """The count of exchanges; of each run of tensors, in the order of their indices, its layout and its residual.

        Nothing if nothing is encoded and no residual is left.
        """
        if not self.compresses and not any(one.state for one in self._shards):
            return {}
        arrays = {"step": np.array(local_copy(self._step).numpy(), np.int64), **self.units[0].export()}
        for number, (one, indices) in enumerate(self._runs()):
            elements = sum(self._sizes[index] for index in indices)
            arrays[f"{number}/{LAYOUT}"] = np.array([elements, one.vector.worker_elements, 0], np.int64)
            for role, variable in one.state.items():
                parts = one.vector.parts(variable.numpy())
                arrays[f"{number}/{role}"] = np.concatenate([parts[index] for index in indices])
        return arrays

    def _runs(self) -> list[tuple[ShardPhases, list[int]]]:
        """What `runs_of` returns for the encoded vectors and, after them, for the exact ones."""
        groups = ([one for one in self._shards if one.vector.exact == exact] for exact in (False, True))
        return [(own[number], run) for own in groups for number, run in runs_of([one.vector for one in own])]

    def restore(self, workers: int, read: Callable[[int], Mapping[str, np.ndarray]]) -> None:
        """Restores this worker's own residuals if the workers are the same; otherwise worker 0 gets their sum."""
        rank = self._group.rank
        own = residuals.checked(read(rank if workers == self._group.size else 0), rank)
        if not own:
            return
        local_copy(self._step).assign(own["step"])
        self.units[0].restore(own)
        mine = {name: array for name, array in self.export().items() if name != EXAMPLES}  # older checkpoints lack it
        same = workers == self._group.size and own.keys() - {EXAMPLES} == mine.keys()
        same = same and all(own[name].shape == array.shape for name, array in mine.items())
        if same:
            pending = [own[f"{number}/{role}"] for number, (one, _) in enumerate(self._runs()) for role in one.state]
            vector = np.concatenate([*pending, np.zeros(0, np.float32)])
        else:
            vector = residuals.total_pending([residuals.checked(read(each), each) for each in range(workers)])
        encoded = [one for one in self._shards if not one.vector.exact]
        elements = sum(one.vector.elements for one in encoded)
        if vector.size != elements:
            if not vector.any():
                return
            raise ConfigError(  # on all workers, also on those that would get none of it
                f"--exchange: the checkpoint holds a residual that has not been applied yet, of tensors with "
                f"{vector.size:,} elements; this exchange has shards of tensors with {elements:,}. Resume with the "
                "previous --exchange, or start in another workdir."
            )
        # Decided before all but one worker get zeros, so that either all of them or none keep a residual.
        keeps = same or bool(vector.any())
        if rank and not same:
            vector = np.zeros_like(vector)
        indices = sorted(index for one in encoded for index in one.vector.indices)
        ends = np.cumsum([self._sizes[index] for index in indices])
        parts = dict(zip(indices, np.split(vector, ends[:-1]), strict=True)) if indices else {}
        for one in encoded:
            one.load(one.vector.from_parts(parts), keeps=keeps)


def _first(strategy: tf.distribute.Strategy, value: Any) -> tf.Tensor:
    """The value of this worker's first replica."""
    return strategy.experimental_local_results(value)[0]
