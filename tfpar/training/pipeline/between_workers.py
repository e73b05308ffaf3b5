"""Stages of a pipeline on several workers: the order of their passes, and the messages between them.

A worker takes its forward and backward passes one after the other, in an order that is the same function of schedule
and place on all of them. What it receives waits for the pass before, so that no more than one pass waits for messages;
nobody waits until a message has been taken before the step ends. In that order no two workers can wait for each other.
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
from tfpar.parallel.pipeline.cuts import GPIPE
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

# What is traced, over all models of the process: the runtime remembers the shape of every message.
_traces = itertools.count()


def turns(place: int, workers: int, micro_batches: int, schedule: str) -> list[tuple[str, int]]:
    """The order in which a worker takes its passes: `(FORWARD or BACKWARD, number of the micro-batch)`.

    1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2): as many forward passes as workers follow, and one; then
    backward and forward by turns. GPipe (Huang et al. 2019, arXiv:1811.06965): all forward passes first.

    Args:
      place: Of the worker in the pipeline, from 0.
      workers: Workers of the pipeline.
      micro_batches: Micro-batches of a step.
      schedule: `1f1b` or `gpipe`.
    """
    ahead = micro_batches if schedule == GPIPE else min(micro_batches, workers - place)
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
      first: Rank of the first of them among all workers.
      places: Places of the pipeline that each of them has.
    """

    peers: ReplicaPeers
    first: int
    places: int

    @classmethod
    def of(cls, topology: Topology) -> PipelineWorker | None:
        """This worker's place in a pipeline of several; None where workers have whole pipelines."""
        peers = ReplicaPeers.of(topology) if topology.pipeline_devices > 1 else None
        return cls(peers, topology.worker - topology.replica_part, topology.local_places) if peers else None

    @property
    def rank(self) -> int:
        """Place of this worker in the pipeline, from 0."""
        return self.peers.rank

    @property
    def is_last(self) -> bool:
        """Whether this worker has the model's outputs."""
        return self.rank == self.peers.size - 1

    def of_stage(self, stage: Stage) -> int:
        """Which worker has a stage."""
        return stage.place // self.places

    def has(self, stage: Stage) -> bool:
        """Whether this worker has a stage."""
        return self.of_stage(stage) == self.rank


@dataclasses.dataclass(frozen=True)
class Crossing:
    """A tensor that one worker makes and another reads.

    Attributes:
      tensor: Its identity in the graph.
      source: The worker that makes it.
      target: The worker that reads it.
    """

    tensor: int
    source: int
    target: int


def crossings_of(stages: Sequence[Stage], worker: PipelineWorker, outputs: Sequence[int]) -> list[Crossing]:
    """What the workers of a pipeline send each other, in an order that all of them know.

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
    """What a tensor of the graph is, before it is there: its shape and type, and those of its mask, if it has one."""

    tensor: tf.TensorSpec
    mask: tf.TensorSpec | None


def specs_of(
    model: keras.Model, graph: Any, steps: Sequence[GraphStep], inputs: Sequence[tf.Tensor], operation_fn: Any
) -> Mapping[int, Spec]:
    """The specs of all tensors that steps make, by identity. Nothing of it is run.

    Args:
      model: The model.
      graph: Its graph.
      steps: All steps.
      inputs: Tensors like those of a call, in the order of the graph's inputs.
      operation_fn: Makes of a layer what is to be called.
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
    """What one micro-batch has sent and received, of what has gradients: crossings with their tensors."""

    sent: list[tuple[int, Crossing, tf.Tensor]] = dataclasses.field(default_factory=list)
    received: list[tuple[int, Crossing, tf.Tensor]] = dataclasses.field(default_factory=list)


class Messages:
    """The messages of one traced function.

    Args:
      worker: This worker.
      crossings: From `crossings_of`.
      device: The device of this worker that they all go through.
      schedule: In what order passes are taken, see `turns`.

    Attributes:
      worker: The same.
      schedule: The same.
      sent: What sends them; has to be run.
      micro_batch: The number of the micro-batch that passes are traced of.
      specs: Of the tensors that cross; to be set before any of them is received.
    """

    def __init__(self, worker: PipelineWorker, crossings: Sequence[Crossing], device: str, schedule: str) -> None:
        self.sent: list[tf.Tensor] = []
        self.micro_batch = 0
        self.specs: Mapping[int, Spec] = {}
        self.worker, self.schedule, self._device = worker, schedule, device
        self._crossings = list(enumerate(crossings))
        self._first_key = next(_traces) * _KEYS_OF_TRACE
        self._before: list[tf.Operation] = []
        self._exchanged: dict[int, _Exchanged] = {}

    @contextlib.contextmanager
    def in_turn(self) -> Iterator[None]:
        """What is traced in this context is run after the pass before."""
        with tf.control_dependencies(self._before):
            yield

    def passed(self, results: Sequence[tf.Tensor]) -> None:
        """Notes the end of a pass, which has these results."""
        self._before = [tf.group(*results)]

    def receive(self, each: int) -> tf.Tensor:
        """A tensor of the graph that another worker makes, with its mask; a leaf of an open tape."""
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
        """Sends what a stage has made to the workers that read it."""
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
        """What this micro-batch has sent and has gradients."""
        return [value for _, _, value in self._of_micro_batch().sent]

    def received_tensors(self) -> list[tf.Tensor]:
        """What this micro-batch has received and has gradients."""
        return [value for _, _, value in self._of_micro_batch().received]

    def upstream(self) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """What this micro-batch has sent, and the gradients with respect to it, from those who have read it."""
        sent = self._of_micro_batch().sent
        gradients = [
            self._receive(crossing.target, number, tf.TensorSpec(value.shape, value.dtype), backward=True)
            for number, crossing, value in sent
        ]
        return [value for _, _, value in sent], gradients

    def send_back(self, gradients: Sequence[tf.Tensor]) -> None:
        """Sends gradients with respect to `received_tensors` to where these came from. The micro-batch is done."""
        exchanged = self._exchanged.pop(self.micro_batch)
        for (number, crossing, _), gradient in zip(exchanged.received, gradients, strict=True):
            self._send(crossing.source, number, gradient, backward=True)

    def _of_micro_batch(self) -> _Exchanged:
        return self._exchanged.setdefault(self.micro_batch, _Exchanged())

    def _key(self, number: int, *, is_mask: bool, backward: bool) -> int:
        key = (self.micro_batch * len(self._crossings) + number) * 4 + 2 * backward + is_mask
        if key >= _KEYS_OF_TRACE:
            raise ConfigError(
                f"--accumulate_steps: {self.micro_batch + 1} micro-batches of {len(self._crossings)} tensors that "
                "cross are too many for a pipeline over workers. Use fewer."
            )
        return self._first_key + key

    def _receive(
        self, source: int, number: int, spec: tf.TensorSpec, *, is_mask: bool = False, backward: bool = False
    ) -> tf.Tensor:
        ranks = self.worker.first + source, self.worker.first + self.worker.rank
        with tf.device(self._device):
            return Channel(*ranks).receive(spec, self._key(number, is_mask=is_mask, backward=backward))

    def _send(
        self, target: int, number: int, value: tf.Tensor, *, is_mask: bool = False, backward: bool = False
    ) -> None:
        ranks = self.worker.first + self.worker.rank, self.worker.first + target
        with tf.device(self._device):
            self.sent.append(Channel(*ranks).send(value, self._key(number, is_mask=is_mask, backward=backward)))
