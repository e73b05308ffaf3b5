"""Stages of a pipeline on several workers: the order of their passes, and the messages between them.

A worker runs its forward and backward passes one after the other, in an order that every worker derives in the same way
from the schedule and its place. A receive waits for the previous pass, so that at most one pass waits for messages. If
messages take no thread of TensorFlow, a receive begins during the previous pass. A sender does not wait for the
receiver before the end of the step. In this order no two workers can wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tfpar.collectives.tensorflow import Channel
from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_internals
from tfpar.parallel.pipeline.cuts import micro_batches_in_flight
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.split import shape_of
from tfpar.parallel.topology import Topology
from tfpar.training.model.call import watch
from tfpar.training.pipeline.graph import GraphStep, Values, run_steps
from tfpar.training.pipeline.stage_program import Stage

import keras
import tensorflow as tf

FORWARD, BACKWARD = "forward", "backward"
_KEYS_OF_TRACE = 1 << 16

# Counts the traces of all models of the process, because TensorFlow's runtime keeps the shape of every message.
_traces = itertools.count()


def turns(place: int, workers: int, micro_batches: int, schedule: str) -> list[tuple[str, int]]:
    """The order in which a worker runs its passes: `(FORWARD or BACKWARD, number of the micro-batch)`.

    1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): one forward pass, and one more for each later worker;
    then backward and forward alternately. Eager 1F1B (Zhuang et al. 2022, arXiv:2211.05322): two more for each later
    worker. GPipe (Huang et al. 2019, arXiv:1811.06965): all forward passes first.

    Args:
      place: Place of the worker in the pipeline, from 0.
      workers: Workers of the pipeline.
      micro_batches: Micro-batches of a step.
      schedule: `1f1b`, `eager_1f1b` or `gpipe`.
    """
    ahead = min(micro_batches_in_flight(place, workers, workers, schedule) or micro_batches, micro_batches)
    order = [(FORWARD, number) for number in range(ahead)]
    for number in range(micro_batches):
        order.append((BACKWARD, number))
        if ahead + number < micro_batches:
            order.append((FORWARD, ahead + number))
    return order


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineWorker:
    """This worker among those of its pipeline.

    Attributes:
      peers: The workers of the pipeline.
      first: Rank of the first worker of the pipeline, among all workers.
      places: Places of the pipeline on each worker.
    """

    peers: ReplicaPeers
    first: int
    places: int

    @classmethod
    def of(cls, topology: Topology) -> PipelineWorker | None:
        """This worker's place in a pipeline of several workers; None if workers have whole pipelines."""
        peers = ReplicaPeers.of(topology) if topology.pipeline_devices > 1 else None
        return cls(peers, topology.worker - topology.replica_part, topology.local_places) if peers else None

    @property
    def rank(self) -> int:
        """Place of this worker in the pipeline, from 0."""
        return self.peers.rank

    @property
    def is_last(self) -> bool:
        """Whether this worker computes the model's outputs."""
        return self.rank == self.peers.size - 1

    def of_stage(self, stage: Stage) -> int:
        """The worker that has a stage."""
        return stage.place // self.places

    def has(self, stage: Stage) -> bool:
        """Whether this worker has a stage."""
        return self.of_stage(stage) == self.rank


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that one worker computes and another reads.

    Attributes:
      tensor: Its identity in the graph.
      source: The worker that computes it.
      target: The worker that reads it.
    """

    tensor: int
    source: int
    target: int


def crossings_of(stages: Sequence[Stage], worker: PipelineWorker, outputs: Sequence[int]) -> list[Crossing]:
    """The tensors that the workers of a pipeline send each other, in the same order on all of them.

    Args:
      stages: All stages.
      worker: This worker.
      outputs: Identities of the model's outputs, all of which the last worker needs.
    """
    readers = [*((worker.of_stage(stage), stage.given) for stage in stages), (worker.peers.size - 1, outputs)]
    found: dict[Crossing, None] = {}
    for made_by in stages:
        source = worker.of_stage(made_by)
        for target, given in readers:
            if target != source:
                read = [each for each in made_by.made if each in given]
                found.update(dict.fromkeys(Crossing(each, source, target) for each in read))
    return [*found]


@dataclasses.dataclass(frozen=True)
class Spec:
    """The shape and type of a tensor of the graph before it is computed, and those of its mask, if it has one."""

    tensor: tf.TensorSpec
    mask: tf.TensorSpec | None


def specs_of(
    model: keras.Model, graph: Any, steps: Sequence[GraphStep], inputs: Sequence[tf.Tensor], operation_fn: Any
) -> Mapping[int, Spec]:
    """The specs of all tensors that steps compute, by identity. Nothing is run.

    Args:
      model: The model.
      graph: Its graph.
      steps: All steps.
      inputs: Tensors like those of a call, in the order of the graph's inputs.
      operation_fn: Returns the callable to use in place of a layer.
    """
    found: dict[int, Spec] = {}

    def forward(*given: tf.Tensor) -> None:
        values: Values = dict(zip(map(id, graph.inputs), given, strict=True))
        scope = keras.StatelessScope()
        for variable in model.variables:
            scope.state_mapping[id(variable)] = tf.zeros(shape_of(variable), variable.dtype)
        whole = [(variable, shape_of(variable)) for variable in model.variables]
        with scope, keras_calls.shapes_of_variables(whole):  # layers ask variables for their shapes
            run_steps(steps, values, operation_fn)
        for each, value in values.items():
            mask = keras_internals.mask_of(value)
            of_mask = None if mask is None else tf.TensorSpec.from_tensor(mask)
            found[each] = Spec(tf.TensorSpec.from_tensor(value), of_mask)

    specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in inputs]
    tf.function(forward, autograph=False).get_concrete_function(*specs)
    return found


@dataclasses.dataclass(eq=False)
class _Exchanged:
    """The crossings with gradients that one micro-batch has sent and received, with their tensors."""

    sent: list[tuple[int, Crossing, tf.Tensor]] = dataclasses.field(default_factory=list)
    received: list[tuple[int, Crossing, tf.Tensor]] = dataclasses.field(default_factory=list)


class Messages:
    """The messages of one traced function.

    Args:
      worker: This worker.
      crossings: From `crossings_of`.
      device: The device of this worker through which all messages pass.
      schedule: The order of the passes, see `turns`.

    Attributes:
      worker: As given.
      schedule: As given.
      sent: The operations that send; they must be run.
      micro_batch: The number of the micro-batch whose passes are being traced.
      specs: The specs of the tensors that cross; must be set before any is received.
    """

    def __init__(self, worker: PipelineWorker, crossings: Sequence[Crossing], device: str, schedule: str) -> None:
        self.sent: list[tf.Tensor] = []
        self.micro_batch = 0
        self.specs: Mapping[int, Spec] = {}
        self.worker, self.schedule, self._device = worker, schedule, device
        self._crossings = list(enumerate(crossings))
        self._first_key = next(_traces) * _KEYS_OF_TRACE
        self._before: list[tf.Operation] = []
        self._earlier: list[tf.Operation] = []
        self._exchanged: dict[int, _Exchanged] = {}

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """Operations traced in this context run after the previous pass."""
        with tf.control_dependencies(self._before):
            yield

    def passed(self, results: Sequence[tf.Tensor]) -> None:
        """Records the end of a pass with these results."""
        self._earlier, self._before = self._before, [tf.group(*results)]

    def receive(self, each: int) -> tf.Tensor:
        """A tensor of the graph from another worker, with its mask; a leaf of an open tape."""
        number, crossing = next(
            (number, one) for number, one in self._crossings if (one.tensor, one.target) == (each, self.worker.rank)
        )
        spec = self.specs[each]
        value = self._receive(crossing.source, number, spec.tensor)
        if spec.mask is not None:
            mask = self._receive(crossing.source, number, spec.mask, is_mask=True)
            value = keras_internals.set_mask(value, mask)
        if spec.tensor.dtype.is_floating:
            self._of_micro_batch().received.append((number, crossing, watch(value)))
        return value

    def send(self, values: Values, made: Sequence[int]) -> None:
        """Sends the outputs of a stage to the workers that read them."""
        for number, crossing in self._crossings:
            if crossing.source != self.worker.rank or crossing.tensor not in made:
                continue
            value = values[crossing.tensor]
            mask = keras_internals.mask_of(value)
            self._send(crossing.target, number, value)
            if mask is not None:
                self._send(crossing.target, number, mask, is_mask=True)
            if value.dtype.is_floating:
                self._of_micro_batch().sent.append((number, crossing, value))

    def sent_values(self) -> list[tf.Tensor]:
        """The tensors with gradients that this micro-batch has sent."""
        return [value for _, _, value in self._of_micro_batch().sent]

    def received_tensors(self) -> list[tf.Tensor]:
        """The tensors with gradients that this micro-batch has received."""
        return [value for _, _, value in self._of_micro_batch().received]

    def upstream(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors that this micro-batch has sent, and their gradients, from the workers that read them."""
        sent = self._of_micro_batch().sent
        gradients = [
            self._receive(crossing.target, number, tf.TensorSpec(value.shape, value.dtype), backward=True)
            for number, crossing, value in sent
        ]
        return [value for _, _, value in sent], gradients

    def send_back(self, gradients: Sequence[tf.Tensor]) -> None:
        """Sends the gradients of `received_tensors` back to the senders. The micro-batch is then done."""
        exchanged = self._exchanged.pop(self.micro_batch)
        for (number, crossing, _), gradient in zip(exchanged.received, gradients, strict=True):
            self._send(crossing.source, number, gradient, backward=True)

    def _of_micro_batch(self) -> _Exchanged:
        return self._exchanged.setdefault(self.micro_batch, _Exchanged())

    def _key(self, number: int, *, is_mask: bool, backward: bool) -> int:
        key = (self.micro_batch * len(self._crossings) + number) * 4 + 2 * backward + is_mask
        if key >= _KEYS_OF_TRACE:
            raise ConfigError(
                f"--accumulate_steps: {self.micro_batch + 1} micro-batches, each with {len(self._crossings)} tensors "
                "between stages, are too many for a pipeline over workers. Use fewer."
            )
        return self._first_key + key

    def _receive(
        self, source: int, number: int, spec: tf.TensorSpec, *, is_mask: bool = False, backward: bool = False
    ) -> tf.Tensor:
        ranks = self.worker.first + source, self.worker.first + self.worker.rank
        channel = Channel(*ranks, self._device)
        key = self._key(number, is_mask=is_mask, backward=backward)
        with contextlib.ExitStack() as stack:
            if channel.waits_apart:
                stack.enter_context(tf.control_dependencies(None))  # instead of `_before`
                stack.enter_context(tf.control_dependencies(self._earlier))
            stack.enter_context(tf.device(self._device))
            return channel.receive(spec, key)

    def _send(
        self, target: int, number: int, value: tf.Tensor, *, is_mask: bool = False, backward: bool = False
    ) -> None:
        ranks = self.worker.first + self.worker.rank, self.worker.first + target
        with tf.device(self._device):
            self.sent.append(
                Channel(*ranks, self._device).send(value, self._key(number, is_mask=is_mask, backward=backward))
            )
