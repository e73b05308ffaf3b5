"""Runs the graph of a model in stages, each on the device of its place.

A stage is a function of tensors: its inputs from earlier stages, and the values of the variables that it reads. It is
traced once, optionally as an XLA program, and called for every micro-batch, or traced for every micro-batch if devices
communicate within it; its gradient is computed on the same device. A stage waits for its inputs and, so that no more
activations are kept than the schedule allows, for the backward pass of an earlier micro-batch; TensorFlow's executor
runs all operations that are ready, on all devices at the same time. Dependencies point only to earlier micro-batches,
so that no order of execution can block.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.optim import keras_calls, keras_compile
from tfpar.parallel.model_axis import ModelAxis
from tfpar.parallel.pipeline.cuts import micro_batches_in_flight
from tfpar.parallel.pipeline.devices import PipelineDevices
from tfpar.parallel.pipeline.turns import BACKWARD, FORWARD
from tfpar.training.model.call import is_watched
from tfpar.training.pipeline.between_workers import Messages, PipelineWorker, crossings_of
from tfpar.training.pipeline.graph import Values
from tfpar.training.pipeline.replica_sums import ReplicaSums, is_synchronized, summing_nothing
from tfpar.training.pipeline.specs import specs_of
from tfpar.training.pipeline.stage_program import Stage, StageProgram, learning_tensors, way_out

import keras
import tensorflow as tf

# Beginnings of the types of operations that communicate, over TensorFlow's transport and the native one.
# `run_unordered` takes them out of the order of the trace.
_COLLECTIVES = ("Collective", "Tfpar")


@dataclasses.dataclass(eq=False)
class Trace:
    """The trace of one function for one replica.

    Attributes:
      devices: Names of the replica's devices, by place.
      differentiates: Whether gradients will be taken.
      done: For each stage, an operation that ends with the backward pass of each micro-batch so far.
      programs: The stages' functions, by stage, by whether gradients will be taken, and by the options of the model's
        call, such as `training`: it may be called several times.
      messages: Messages to and from the other workers of the pipeline, if there are any.
      has_outputs: Whether the model's outputs are computed here.
      pending: For each call of a stage with several results that the loss may read, the places of those from which no
        gradient has come yet, and their number.
      places_of_sums: If something else is summed over micro-batches than the gradients of variables, its places.
    """

    devices: Sequence[str]
    differentiates: bool = False
    done: dict[int, list[tf.Operation]] = dataclasses.field(default_factory=dict)
    programs: dict[tuple[Any, ...], StageProgram] = dataclasses.field(default_factory=dict)
    messages: Messages | None = None
    has_outputs: bool = True
    pending: list[tuple[set[int], int]] = dataclasses.field(default_factory=list)
    places_of_sums: Sequence[int] | None = None

    @property
    def has_unread_results(self) -> bool:
        """Whether the loss reads some results of a stage and not others, whose weights have zeros as gradients."""
        return any(0 < len(pending) < count for pending, count in self.pending)

    def complete_backward_with(self, sums: Sequence[tf.Tensor], variables: Sequence[keras.Variable]) -> None:
        """Makes the backward passes that were traced last end only when their gradients are added to the sums.

        Later passes wait for their end. Otherwise the threads of TensorFlow may start them first, and leave the
        additions, and with them the gradients of several micro-batches, for later.

        Args:
          sums: The accumulated gradients, or what `places_of_sums` are the places of.
          variables: The variables of gradients. A variable of several stages belongs to the first, whose backward pass
            is last; what a place sums belongs to its first stage.
        """
        stages = {program.stage.number: program.stage for program in self.programs.values()}
        learning = [number for number in sorted(self.done, reverse=True) if self.done[number]]
        if self.places_of_sums is None:
            first = {id(each): number for number in learning for each in stages[number].variables}
            owners = [first.get(id(variable)) for variable in variables]
        else:
            first = {stages[number].place % len(self.devices): number for number in learning}
            owners = [first.get(place) for place in self.places_of_sums]
        for number in learning:
            added = tf.group(*(total for total, owner in zip(sums, owners, strict=True) if owner == number))
            self.done[number][-1] = tf.group(self.done[number][-1], added)
            if self.messages:
                end = self.messages.ends if self.places_of_sums is None else self.messages.leaves
                end(BACKWARD, stages[number], added)

    def messages_of_worker(self) -> Messages:
        """`messages` of a pipeline over several workers."""
        assert self.messages is not None
        return self.messages


class Pipeline:
    """A model in stages.

    Args:
      model: A built functional model.
      stages: Its stages, in order.
      devices: Their devices.
      schedule: `1f1b`, `eager_1f1b` or `gpipe`.
      recompute: Whether the backward pass of a stage calls the stage again, so that only tensors at the cuts are kept.
      axis: If layers are divided as well, the devices that divide them.
      worker: If the pipeline spans several workers, this worker.
      sums: If several replicas synchronise batch statistics, the sums over them.
      option: The option that asks for stages, for errors.

    Attributes:
      stages: As given. In a pipeline over several workers, only this worker's stages run here.
      devices: As given.
      axis: As given.
      worker: As given.
      schedule: As given.
      compiles: Whether stages are XLA programs.
    """

    def __init__(
        self,
        model: keras.Model,
        stages: Sequence[Stage],
        devices: PipelineDevices,
        schedule: str,
        *,
        recompute: bool = False,
        axis: ModelAxis | None = None,
        worker: PipelineWorker | None = None,
        sums: ReplicaSums | None = None,
        option: str = "--mesh",
    ) -> None:
        self._option, self._sums = option, sums
        self.stages, self.devices, self.axis, self.worker = list(stages), devices, axis, worker
        self.compiles = False
        self.schedule = schedule
        self._model, self._recompute = model, recompute
        graph = keras_calls.graph_of(model)
        self._crossings = crossings_of(stages, worker, [*map(id, graph.outputs)]) if worker and graph else []

    @contextlib.contextmanager
    def on_own_replica(self) -> Iterator[Trace]:
        """In this context, this thread's calls of the model run in stages, for the current replica context."""
        trace = Trace(self.devices.of_own_replica())
        if self.worker:
            chunks = len(self.stages) // (self.devices.places * self.worker.peers.size)
            options = self.devices.host, self.schedule, chunks, self.axis
            learning = learning_tensors(self._model, self.stages)
            trace.messages = Messages(self.worker, self._crossings, learning, *options)
            trace.has_outputs = self.worker.is_last
        before, _current.trace = _current.trace, trace
        try:
            yield _current.trace
        finally:
            _current.trace = before

    def on_no_device(self) -> contextlib.AbstractContextManager[Any]:
        """In this context layers compute as on a device, with parts of weights, but send nothing: for traces that are
        never run."""
        return self.axis.on_no_device() if self.axis else contextlib.nullcontext()

    def run(self, graph: Any, plain: Any, /, inputs: Any, **options: Any) -> Any:
        """Replaces `keras.Function._run_through_graph`."""
        trace, scope = _current.trace, keras_calls.innermost_scope()
        operation_fn = options.get("operation_fn")
        if trace is None or scope is None or operation_fn is None or options.get("call_fn") is not None:
            return plain(inputs, **options)
        call_options = keras_calls.options_of_call(operation_fn)
        given = tf.nest.flatten(inputs)
        values: Values = dict(zip(map(id, graph.inputs), given, strict=True))
        messages = trace.messages
        if messages:
            messages.starts_call(self._option)
        if messages and not messages.specs:
            with summing_nothing():
                specs = specs_of(self._model, graph, self.stages, given, operation_fn, self.axis)
            messages.specs, messages.draws = specs.tensors, specs.draws
        for stage in self.stages:
            if messages and self.worker and not self.worker.has(stage):
                _skip_draws(scope, messages.draws[stage.number])
                continue
            key = stage.number, trace.differentiates, call_options
            if key not in trace.programs:
                how = {"compiles": self.compiles, "shares": not self._communicates(stage)}
                program = StageProgram(self._model, stage, operation_fn, **how, option=self._option)
                trace.programs[key] = program
            with _in_pass(trace, FORWARD, stage):
                if messages:
                    values.update({each: messages.receive(each, stage) for each in stage.given if each not in values})
                with tf.device(self._device(trace, stage)), self._on_devices(stage):
                    made = self._call(trace, trace.programs[key], [values[each] for each in stage.given])
            values.update(made)
            if messages:
                messages.ends(FORWARD, stage, tf.group(*made.values()))
                messages.send(values, stage)
        outputs = [self._output(trace, values, id(symbol)) for symbol in graph.outputs]
        return keras.tree.pack_sequence_as(keras_compile.symbolic_outputs(graph), outputs)

    def _output(self, trace: Trace, values: Values, each: int) -> tf.Tensor:
        """An output of the model; zeros where another worker has it."""
        if each in values or trace.messages is None:
            return values[each]
        if trace.has_outputs:  # an earlier stage of another worker makes it
            return trace.messages.receive(each, self.stages[-1])
        spec = trace.messages.specs[each].tensor
        return tf.zeros(spec.shape, spec.dtype)

    def _device(self, trace: Trace, stage: Stage) -> str:
        return trace.devices[stage.place % len(trace.devices)]

    def _is_received(self, each: int) -> bool:
        """Whether another worker sends a tensor of the graph to this one."""
        return any(one.tensor == each and self.worker and one.target == self.worker.rank for one in self._crossings)

    def _check_order(self, stage: Stage, operations: Iterable[tf.Operation]) -> None:
        """Refuses operations that TensorFlow would keep in the order of the trace, which is not that of several chunks.

        Args:
          stage: The stage.
          operations: The operations of the stage. Collectives are always allowed.

        Raises:
          ConfigError: The stage has such an operation.
        """
        if any(one.op_def.is_stateful and not one.type.startswith(_COLLECTIVES) for one in operations):
            names = dict.fromkeys(step.name for step in stage.steps)
            raise ConfigError(
                f"--stages_per_device: stage {stage.number} ({', '.join(names)}) prints, calls Python or changes other "
                "state, which has a fixed order. Use --stages_per_device=1, or a pipeline within a worker."
            )

    def _communicates(self, stage: Stage) -> bool:
        """Whether devices communicate within the layers of a stage. Then each call needs collectives of its own: two
        calls of one trace may run at the same time, and collectives with the same keys would mix."""
        return self.axis is not None or (self._sums is not None and is_synchronized(stage))

    @contextlib.contextmanager
    def _on_devices(self, stage: Stage) -> Iterator[None]:
        """In this context layers compute with the parts on the devices of a stage, and sum statistics over those of all
        replicas."""
        place = stage.place % self.devices.places
        with (
            self.axis.on_own_device(place) if self.axis else contextlib.nullcontext(),
            self._sums.in_stage(stage) if self._sums else summing_nothing(),
        ):
            yield

    def _call(self, trace: Trace, program: StageProgram, given: Sequence[Any]) -> Values:
        scope = keras_calls.innermost_scope()
        assert scope is not None
        tensors = program.arguments(given, scope)
        results = self._with_gradient(trace, program, tensors) if trace.differentiates else program(tensors)
        return program.unpacked(results, scope)

    def _with_gradient(self, trace: Trace, program: StageProgram, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The results of a stage; its gradient is computed on its device and recorded in the trace."""
        number, device = program.stage.number, self._device(trace, program.stage)
        done = trace.done.setdefault(number, [])
        limit = micro_batches_in_flight(number, len(self.stages), self.devices.places, self.schedule)
        if trace.messages:
            limit = None  # they order the passes
        waits = [done[-limit]] if limit is not None and len(done) >= limit else []
        # Not frozen weights, statistics, or tensors that depend on nothing else.
        learning = [place for place, each in enumerate(tensors) if each.dtype.is_floating and is_watched(each)]
        every: list[tf.Tensor] = []
        passes = program.passes(tensors, learning, recompute=self._recompute)
        graph = tf.compat.v1.get_default_graph()
        in_turn = trace.messages is not None and trace.messages.chunks > 1
        received = {place for place, each in enumerate(program.stage.given) if self._is_received(each)}

        @tf.custom_gradient
        def stage(*watched: tf.Tensor) -> Any:
            # The tape of the whole pass must not see the call. With two tapes, TensorFlow 2.21 prepares gradients of
            # gradients (`_HigherOrderTapeGradientFunctions`), and adds zeros of the size of weights to their gradients.
            given = list(tensors)
            for place, tensor in zip(learning, watched, strict=True):
                given[place] = tf.stop_gradient(tensor)
            before = len(graph.get_operations()) if in_turn else 0
            with tf.control_dependencies(waits):
                every[:], kept = passes.forward(given)
            if in_turn:
                self._check_order(program.stage, graph.get_operations()[before:])

            def backward(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
                with _in_pass(trace, BACKWARD, program.stage), tf.device(device), self._on_devices(program.stage):
                    found = passes.backward(given, kept, upstream)
                    for number, place in enumerate(learning):
                        if found[number] is None and place in received:  # the worker that sent it waits
                            found[number] = tf.zeros_like(watched[number])
                    # Also those of tables are dense here, beside the weights.
                    gradients = [each if each is None else tf.convert_to_tensor(each) for each in found]
                    done.append(tf.group(*(each for each in gradients if each is not None)))
                    gradients = self._not_differentiable(watched, gradients)
                if trace.messages:
                    trace.messages.ends(BACKWARD, program.stage, done[-1])
                return gradients

            return [result for result in every if result.dtype.is_floating], backward

        found = iter(stage(*(tensors[place] for place in learning)))
        results = [next(found) if result.dtype.is_floating else result for result in every]
        return _noting_gradients(trace, results, program.places_of_values(len(results)))

    def _not_differentiable(
        self, sources: Sequence[tf.Tensor], gradients: Sequence[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        """The gradients, which refuse to be differentiated: a tape around a gradient would see nothing of the stage,
        and take second derivatives for zero.

        Args:
          sources: What they are gradients of, on the device on which operations are traced.
          gradients: The gradients, also there; None without one.

        Raises:
          ConfigError: Later, if a tape differentiates the result.
        """

        @tf.custom_gradient
        def final(*tensors: tf.Tensor) -> Any:
            def refuse(*_: Any) -> Any:
                raise ConfigError(
                    f"{self._option}: the loss contains a gradient of the model, such as a penalty, which cannot be "
                    f"differentiated through stages. {way_out(self._option)}"
                )

            return [tf.identity(tensor) for tensor in tensors[len(sources) :]], refuse

        found = iter(final(*sources, *(gradient for gradient in gradients if gradient is not None)))
        return [gradient if gradient is None else next(found) for gradient in gradients]


def _noting_gradients(trace: Trace, results: Sequence[tf.Tensor], places: Sequence[int]) -> list[tf.Tensor]:
    """The results of a stage; the trace notes which of those at some places get a gradient. The stage cannot tell: the
    tape gives it zeros for the others."""
    pending = {place for place in places if results[place].dtype.is_floating}
    if len(pending) < 2:
        return list(results)
    trace.pending.append((pending, len(pending)))

    def noted(place: int) -> tf.Tensor:
        @tf.custom_gradient
        def same(tensor: tf.Tensor) -> Any:
            def backward(upstream: tf.Tensor) -> tf.Tensor:
                pending.discard(place)
                return upstream

            return tf.identity(tensor), backward

        return same(results[place])

    return [noted(place) if place in pending else result for place, result in enumerate(results)]


def _in_pass(trace: Trace, kind: str, stage: Stage) -> contextlib.AbstractContextManager[None]:
    """In this context operations belong to a pass, if the pipeline spans several workers; see `Messages.in_pass`."""
    return trace.messages.in_pass(kind, stage) if trace.messages else contextlib.nullcontext()


def _skip_draws(scope: keras.StatelessScope, draws: Mapping[int, int]) -> None:
    """Advances the seed generators from which a stage of another worker draws: a layer may be in several stages."""
    for key, count in draws.items():
        if (state := scope.state_mapping.get(key)) is not None:  # it is the model's
            scope.state_mapping[key] = state + tf.constant([0, count], state.dtype)


class _Current(threading.local):
    """The trace of this thread: MirroredStrategy traces every replica in a separate thread."""

    def __init__(self) -> None:
        self.trace: Trace | None = None


_current = _Current()


@contextlib.contextmanager
def without_stages() -> Iterator[None]:
    """In this context this thread calls models as a whole."""
    before, _current.trace = _current.trace, None
    try:
        yield
    finally:
        _current.trace = before


def current_trace() -> Trace | None:
    """The trace in stages of this thread; None if it traces something else."""
    return _current.trace
