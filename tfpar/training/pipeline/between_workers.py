"""Stages of a pipeline on several workers: the order of their passes, and the messages between them.

A worker runs its forward and backward passes one after the other, in an order that every worker derives in the same way
from the schedule and its place (`turns`). A receive waits for the previous pass, so that at most one pass waits for
messages. If messages take no thread of TensorFlow, a receive begins during the previous pass. A sender does not wait
for the receiver before the end of the step. In this order no two workers can wait for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from tfpar.collectives.group import allocate_instance_keys
from tfpar.collectives.tensorflow import Channel, new_group
from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.parallel.model_axis import ModelAxis, Place
from tfpar.parallel.pipeline.turns import BACKWARD, FORWARD, Turn, turns
from tfpar.parallel.replica_peers import ReplicaPeers
from tfpar.parallel.topology import Topology
from tfpar.training.model.call import watch
from tfpar.training.pipeline.graph import Values
from tfpar.training.pipeline.specs import Spec
from tfpar.training.pipeline.stage_program import Stage

import tensorflow as tf

_KEYS_OF_TRACE = 1 << 16

# Counts the traces of all models of the process, because TensorFlow's runtime keeps the shape of every message.
_traces = itertools.count()


@dataclasses.dataclass(frozen=True, eq=False)
class PipelineWorker:
    """This worker among those of its pipeline.

    If several workers divide the layers of a stage, each belongs to a pipeline of its own: with every other stage's
    worker that has the same part.

    Attributes:
      peers: The workers of the pipeline.
      first: Rank of the first worker of the pipeline, among all workers.
      step: Difference of the ranks of two consecutive workers of the pipeline.
      places: Places of the pipeline on each worker.
    """

    peers: ReplicaPeers
    first: int
    step: int
    places: int

    @classmethod
    def of(cls, topology: Topology) -> PipelineWorker | None:
        """This worker's place in a pipeline of several workers; None if workers have whole pipelines."""
        peers = ReplicaPeers.of_stages(topology) if topology.pipeline_devices > 1 else None
        if peers is None:
            return None
        step = topology.model_workers
        return cls(peers, topology.worker - topology.pipeline_part * step, step, topology.local_places)

    @property
    def rank(self) -> int:
        """Place of this worker in the pipeline, from 0."""
        return self.peers.rank

    @property
    def is_last(self) -> bool:
        """Whether this worker computes the model's outputs."""
        return self.rank == self.peers.size - 1

    def number_of(self, rank: int) -> int:
        """The rank, among all workers, of the worker with a place in the pipeline."""
        return self.first + rank * self.step

    def of_stage(self, stage: Stage) -> int:
        """The worker that has a stage."""
        return stage.place // self.places

    def has(self, stage: Stage) -> bool:
        """Whether this worker has a stage."""
        return self.of_stage(stage) == self.rank

    def all_reduce(self, value: tf.Tensor, ranks: Sequence[int] = ()) -> tf.Tensor:
        """The sum over workers of the pipeline, by default over all; the same bits on each."""
        group = new_group([*map(self.number_of, ranks or range(self.peers.size))], self.number_of(self.rank))
        return group.all_reduce(value, allocate_instance_keys(1, group)[0])

    def chunk_of(self, stage: Stage) -> int:
        """The chunk that a stage of this worker belongs to: the stages that follow each other on this worker."""
        return stage.number // (self.places * self.peers.size)


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


@dataclasses.dataclass(eq=False)
class _Exchanged:
    """The crossings with gradients that one micro-batch has sent and received, with their tensors, and the stages of
    this worker that have sent or received them."""

    sent: list[tuple[int, Crossing, tf.Tensor, Stage]] = dataclasses.field(default_factory=list)
    received: list[tuple[int, Crossing, tf.Tensor, Stage]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(eq=False)
class _Pass:
    """The operations that control a pass.

    Attributes:
      starts: An operation that all of the pass wait for.
      listens: An operation that the receives of the pass wait for, if messages take no thread.
      results: Operations that end the pass.
      left: Operations that only the next backward pass waits for.
    """

    starts: tf.Operation
    listens: tf.Operation
    results: list[tf.Operation] = dataclasses.field(default_factory=list)
    left: list[tf.Operation] = dataclasses.field(default_factory=list)


class Messages:
    """The messages of one traced function, and the order of its passes.

    If the devices of a stage have a model axis, they have equal copies of most tensors that cross to another worker.
    Each sends one part, and the receiving devices gather the parts (Narayanan et al. 2021, arXiv:2104.04473, section
    4.1), so that the link between the workers carries a tensor once.

    Args:
      worker: This worker.
      crossings: From `crossings_of`.
      learning: Identities of the tensors whose gradients are sent back.
      device: The device of this worker through which all messages pass.
      schedule: As of `turns`.
      chunks: Number of chunks on this worker.
      axis: The model axis, if there is one.

    Attributes:
      worker: As given.
      device: As given.
      chunks: As given.
      sent: The operations that send; they must be run.
      micro_batch: The number of the micro-batch whose passes are being traced.
      specs: The specs of the tensors that cross; must be set before any is received.
      draws: What `StageSpecs` says of the seeds of stages; set with `specs`.
    """

    def __init__(
        self,
        worker: PipelineWorker,
        crossings: Sequence[Crossing],
        learning: Collection[int],
        device: str,
        schedule: str,
        chunks: int,
        axis: ModelAxis | None = None,
    ) -> None:
        self.sent: list[tf.Tensor] = []
        self.micro_batch = 0
        self.specs: Mapping[int, Spec] = {}
        self.draws: Sequence[Mapping[int, int]] = ()
        self.worker, self.device, self.chunks, self._schedule, self._axis = worker, device, chunks, schedule, axis
        self._crossings, self._learning = list(crossings), learning
        self._first_key = next(_traces) * _KEYS_OF_TRACE
        first_other = next(_traces) * _KEYS_OF_TRACE
        self._other_keys = [itertools.count(first_other) for _ in range(worker.peers.size)]
        self._called: set[int] = set()
        self._passes: dict[Turn, _Pass] = {}
        self._exchanged: dict[int, _Exchanged] = {}

    def starts_call(self, option: str) -> None:
        """Refuses a second call of the model for a micro-batch, which not all workers make.

        Args:
          option: The option that asks for stages.

        Raises:
          ConfigError: This is the second call.
        """
        if self.micro_batch in self._called:
            raise ConfigError(
                f"{option}: the loss calls the model again. The last worker of a pipeline alone computes the loss, and "
                "would wait for the others forever. Use a pipeline within a worker, or --mesh=data:... alone."
            )
        self._called.add(self.micro_batch)

    def in_pass(self, kind: str, stage: Stage) -> contextlib.AbstractContextManager[None]:
        """Operations traced in this context belong to a pass of the micro-batch.

        Args:
          kind: `FORWARD` or `BACKWARD`.
          stage: A stage of this worker; the pass is that of its chunk.
        """
        return tf.control_dependencies([self._pass(kind, stage).starts])

    def ends(self, kind: str, stage: Stage, done: tf.Operation) -> None:
        """Records an operation without which a pass is not over; arguments as of `in_pass`."""
        self._pass(kind, stage).results.append(done)

    def leaves(self, kind: str, stage: Stage, done: tf.Operation) -> None:
        """Records an operation that waits for other replicas; arguments as of `ends`. If messages take no thread, the
        next forward pass runs meanwhile; the next backward pass waits, so that gradients do not pile up."""
        one = self._pass(kind, stage)
        neighbour = (self.worker.rank + 1) % self.worker.peers.size
        apart = self.channel(self.worker.rank, neighbour).waits_apart
        (one.left if apart else one.results).append(done)

    def turns(self, micro_batches: int) -> list[Turn]:
        """The order in which this worker runs its passes."""
        return turns(self.worker.rank, self.worker.peers.size, micro_batches, self._schedule, self.chunks)

    def run_in_order(self, order: Sequence[Turn]) -> None:
        """Makes the passes run one after the other. Call it when all are traced."""
        earlier: list[tf.Operation] = []
        before: list[tf.Operation] = []
        left: list[tf.Operation] = []
        for turn in order:
            if one := self._passes.get(turn):  # a stage that learns nothing has no backward pass
                one.starts._add_control_inputs(before)
                if turn[0] == BACKWARD:
                    one.starts._add_control_inputs(left)
                    left = one.left
                one.listens._add_control_inputs(earlier)
                earlier, before = before, one.results or [one.starts]

    def _pass(self, kind: str, stage: Stage) -> _Pass:
        turn = kind, self.micro_batch, self.worker.chunk_of(stage)
        if turn not in self._passes:
            with tf.control_dependencies(None), tf.device(self.device):
                self._passes[turn] = _Pass(tf.no_op(), tf.no_op())
        return self._passes[turn]

    def receive(self, each: int, stage: Stage) -> tf.Tensor:
        """A tensor of the graph from another worker, for a stage, with its mask; a leaf of an open tape, if the tensor
        depends on something that learns."""
        number, crossing = next(
            (number, one)
            for number, one in enumerate(self._crossings)
            if (one.tensor, one.target) == (each, self.worker.rank)
        )
        spec = self.specs[each]
        value = self._receive_value(crossing.source, number, stage)
        if spec.mask is not None:
            mask = self._receive(crossing.source, number, spec.mask, stage, is_mask=True)
            value = keras_internals.set_mask(value, mask)
        if spec.tensor.dtype.is_floating and each in self._learning:
            self._of_micro_batch().received.append((number, crossing, watch(value), stage))
        return value

    def send(self, values: Values, stage: Stage) -> None:
        """Sends the outputs of a stage to the workers that read them."""
        for number, crossing in enumerate(self._crossings):
            if crossing.source != self.worker.rank or crossing.tensor not in stage.made:
                continue
            value = values[crossing.tensor]
            mask = keras_internals.mask_of(value)
            self._send_value(crossing.target, number, value, stage)
            if mask is not None:
                self._send(crossing.target, number, mask, is_mask=True)
            if value.dtype.is_floating and crossing.tensor in self._learning:
                self._of_micro_batch().sent.append((number, crossing, value, stage))

    def received_tensors(self) -> list[tf.Tensor]:
        """The tensors with gradients that this micro-batch has received."""
        return [value for _, _, value, _ in self._of_micro_batch().received]

    def upstream(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The tensors that this micro-batch has sent, and their gradients, from the workers that read them."""
        sent = self._of_micro_batch().sent
        gradients = [
            self._receive_value(crossing.target, number, stage, backward=True) for number, crossing, _, stage in sent
        ]
        return [value for _, _, value, _ in sent], gradients

    def send_back(self, gradients: Sequence[tf.Tensor]) -> None:
        """Sends the gradients of `received_tensors` back to the senders. The micro-batch is then done."""
        exchanged = self._exchanged.pop(self.micro_batch)
        for (number, crossing, _, stage), gradient in zip(exchanged.received, gradients, strict=True):
            self._send_value(crossing.source, number, gradient, stage, backward=True)

    def channel(self, source: int, target: int) -> Channel:
        """Messages from a worker to another, one of which is this one."""
        return Channel(self.worker.number_of(source), self.worker.number_of(target), self.device)

    def other_keys(self, other: int, count: int) -> list[int]:
        """Keys of messages that are sent once per step. Both workers must ask in the same order; what they share with
        others does not count."""
        return [*itertools.islice(self._other_keys[other], count)]

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

    def _receive_value(self, source: int, number: int, stage: Stage, *, backward: bool = False) -> tf.Tensor:
        """A tensor, or its gradient, which the devices of the stage gather if each receives a part."""
        spec, place = self.specs[self._crossings[number].tensor].tensor, self._place_of_parts(number, stage)
        if place is None:
            return self._receive(source, number, spec, stage, backward=backward)
        elements = math.prod(spec.shape)
        part = tf.TensorSpec([-(-elements // place.size)], spec.dtype)
        own = self._receive(source, number, part, stage, backward=backward)
        with tf.control_dependencies(None), tf.device(place.device):  # as soon as all have their parts
            return tf.reshape(tf.reshape(place.collect(own), [-1])[:elements], spec.shape)

    def _send_value(self, target: int, number: int, value: tf.Tensor, stage: Stage, *, backward: bool = False) -> None:
        """Sends a tensor, or its gradient: only this device's part if all devices of the stage have the same."""
        place = self._place_of_parts(number, stage)
        if place is not None:
            elements = math.prod(self.specs[self._crossings[number].tensor].tensor.shape)
            size = -(-elements // place.size)
            with tf.device(place.device):
                value = tf.reshape(value, [elements])[place.rank * size : (place.rank + 1) * size]
                missing = max(0, min(size, (place.rank + 1) * size - elements))
                value = tf.pad(value, [[0, missing]]) if missing else value
        self._send(target, number, value, backward=backward)

    def _place_of_parts(self, number: int, stage: Stage) -> Place | None:
        """This device on the model axis, if the devices of a stage send or receive parts of a crossing tensor; None
        if each sends or receives its own tensor."""
        spec = self.specs[self._crossings[number].tensor]
        if self._axis is None or not (spec.whole and spec.tensor.dtype.is_floating):
            return None
        with self._axis.on_own_device(stage.place % self.worker.places) as place:
            return place

    def _receive(
        self,
        source: int,
        number: int,
        spec: tf.TensorSpec,
        stage: Stage,
        *,
        is_mask: bool = False,
        backward: bool = False,
    ) -> tf.Tensor:
        channel, one = self.channel(source, self.worker.rank), self._pass(BACKWARD if backward else FORWARD, stage)
        key = self._key(number, is_mask=is_mask, backward=backward)
        after = one.listens if channel.waits_apart else one.starts
        with tf.control_dependencies(None), tf.control_dependencies([after]), tf.device(self.device):
            return channel.receive(spec, key)

    def _send(
        self, target: int, number: int, value: tf.Tensor, *, is_mask: bool = False, backward: bool = False
    ) -> None:
        key = self._key(number, is_mask=is_mask, backward=backward)
        with tf.device(self.device):
            self.sent.append(self.channel(self.worker.rank, target).send(value, key))
