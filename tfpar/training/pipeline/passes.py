"""Forward and backward pass of a stage: taped, or as two XLA programs that are cut from one graph.

The gradient of a `tf.function` is a function as well, but TensorFlow (2.21, `_construct_forward_backward`) has the
forward function return all that the backward function reads, weights included, and XLA copies what a program returns:
each micro-batch would copy the weights of its stage. `CompiledPasses` traces both passes as one graph and cuts it: the
forward pass returns only what is expensive to compute, such as the results of matrix products, and the backward pass
computes the rest again from it, fused with its readers, as PyTorch's partitioner does
(`min_cut_rematerialization_partition`; here without a minimum cut).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from tfpar.training.model.random_ops import DRAWING

import tensorflow as tf

# Operations that take about as long as reading and writing their tensors, or nothing if XLA fuses them. Exponentials
# and the like take longer than that on a CPU.
_NAMES = (
    "Abs Add AddN AddV2 BiasAdd BroadcastTo Cast ConcatV2 Const Equal ExpandDims Fill Greater GreaterEqual Identity "
    "LeakyRelu Less LessEqual LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul Neg NotEqual OnesLike Pack "
    "PreventGradient Range RealDiv Reciprocal Relu Relu6 Reshape Rsqrt Select SelectV2 Shape Sign Slice Split SplitV "
    "Sqrt Square SquaredDifference Squeeze StopGradient StridedSlice Sub Tile Transpose Unpack ZerosLike"
)
_CHEAP = frozenset(_NAMES.split())

# All stateful operations that may be left out.
_WITHOUT_EFFECT = DRAWING | {"Assert", "Placeholder", "ReadVariableOp"}

Body = Callable[..., Sequence[tf.Tensor]]
Gradients = list[tf.Tensor | tf.IndexedSlices | None]


class Passes(Protocol):
    """The passes of a stage."""

    def forward(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        """Returns the results of the stage, and what the backward pass needs beside its arguments."""

    def backward(self, tensors: Sequence[tf.Tensor], kept: Any, upstream: Sequence[tf.Tensor]) -> Gradients:
        """Returns the gradients of the watched arguments.

        Args:
          tensors: The arguments of the forward pass.
          kept: As returned by the forward pass.
          upstream: Gradients of the floating-point results.
        """


class TapedPasses:
    """Passes that a tape records.

    Args:
      body: The stage, `(tensors) -> results`.
      recompute: Whether the backward pass calls the stage again.
      watched: The places of the arguments that have gradients; None: all floating-point ones.
    """

    def __init__(
        self,
        body: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]],
        *,
        recompute: bool,
        watched: Sequence[int] | None = None,
    ) -> None:
        self._body, self._recompute, self._watched = body, recompute, watched

    def forward(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        """See `Passes`."""
        return (list(self._body(tensors)), None) if self._recompute else self._taped(tensors)

    def backward(self, tensors: Sequence[tf.Tensor], kept: Any, upstream: Sequence[tf.Tensor]) -> Gradients:
        """See `Passes`."""
        if self._recompute:
            # After the incoming gradients; otherwise two equal calls would be merged.
            with tf.control_dependencies(upstream):
                _, kept = self._taped(tensors)
        tape, results = kept
        return list(tape.gradient(_floats(results), _at(self._watched, tensors), list(upstream)))

    def _taped(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(_at(self._watched, tensors))
            results = list(self._body(tensors))
        return results, (tape, results)


class CompiledPasses:
    """Passes that are an XLA program each.

    Args:
      body: The stage, `(*tensors) -> results`. It must read nothing but its arguments.
      tensors: Arguments like those of later calls.
      recompute: Whether the backward pass computes everything again.
      watched: The places of the arguments that have gradients; None: all floating-point ones.

    Attributes:
      kept: The symbolic tensors that the forward pass returns for the backward pass: none if that computes everything
        again, as it does where a loop or a branch has what it needs.
      captured: Tensors that the stage reads beside its arguments.
      can_run: Whether the programs can be called. They cannot read variables, would leave out what the stage does
        beside its results, such as printing, and could not compute stateful random numbers again because of a loop.
    """

    def __init__(
        self, body: Body, tensors: Sequence[tf.Tensor], *, recompute: bool, watched: Sequence[int] | None = None
    ) -> None:
        graph = _JointGraph(body, tensors, watched)
        self.captured = graph.captured
        self.kept = [] if recompute else graph.to_keep()
        loops = any(tensor.dtype == tf.variant for tensor in self.kept)
        self.kept = [] if loops else self.kept
        self._results = len(graph.results)
        self._has_gradient = [gradient is not None for gradient in graph.gradients]
        gradients = [gradient for gradient in graph.gradients if gradient is not None]
        inputs = [*graph.inputs, *graph.constants]
        self._forward = graph.program("forward", inputs, [*graph.results, *self.kept])
        self._backward = graph.program("backward", [*inputs, *self.kept, *graph.upstream], gradients)
        has_others = graph.has_effects() or (loops and graph.draws())
        self.can_run = not has_others and all(each.dtype != tf.resource for each in self.captured)

    def forward(self, tensors: Sequence[tf.Tensor]) -> tuple[list[tf.Tensor], Any]:
        """See `Passes`."""
        found = self._forward([*tensors, *self.captured])
        return found[: self._results], found[self._results :]

    def backward(self, tensors: Sequence[tf.Tensor], kept: Any, upstream: Sequence[tf.Tensor]) -> Gradients:
        """See `Passes`."""
        found = iter(self._backward([*tensors, *self.captured, *kept, *upstream]))
        return [next(found) if has_gradient else None for has_gradient in self._has_gradient]


class _JointGraph:
    """A stage and its gradient in one graph.

    Args:
      body: The stage.
      tensors: Its arguments.
      watched: As of `CompiledPasses`.

    Attributes:
      inputs: The symbolic arguments.
      results: The symbolic results.
      upstream: Stand-ins for the gradients of the floating-point results.
      gradients: The symbolic gradients of the watched arguments; None without one.
      captured: Tensors that the stage reads beside its arguments.
      constants: The symbolic tensors that stand for them.
    """

    def __init__(self, body: Body, tensors: Sequence[tf.Tensor], watched: Sequence[int] | None) -> None:
        self.inputs: list[tf.Tensor] = []
        self.results: list[tf.Tensor] = []
        self.upstream: list[tf.Tensor] = []
        self.gradients: list[tf.Tensor | None] = []
        self._forward: set[str] = set()

        def joint(*given: tf.Tensor) -> None:
            self.inputs = list(given)
            sources = _at(watched, given)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(sources)
                self.results = list(body(*given))
            self._forward = {each.name for each in tf.compat.v1.get_default_graph().get_operations()}
            made = _floats(self.results)
            self.upstream = [tf.compat.v1.placeholder(each.dtype, each.shape) for each in made]
            found = tape.gradient(made, sources, self.upstream)
            self.gradients = [None if each is None else tf.convert_to_tensor(each) for each in found]

        specs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in tensors]
        # Traced for XLA: otherwise a branch would return an optional, and a loop lists of unknown length.
        concrete = tf.function(joint, autograph=False, jit_compile=True).get_concrete_function(*specs)
        self.captured = list(concrete.captured_inputs)
        self.constants = concrete.inputs[len(concrete.inputs) - len(self.captured) :]
        self._operations = concrete.graph.get_operations()
        self._order = {each.name: place for place, each in enumerate(self._operations)}
        self._definition = concrete.graph.as_graph_def()

    def to_keep(self) -> list[tf.Tensor]:
        """Returns the tensors of the forward pass that the backward pass needs, and cannot compute from others at
        little cost."""
        given = [*self.inputs, *self.constants]
        crossing = self._crossing(given)
        known, wanted, kept = _references(given), _references(crossing), []
        for operation in self._needed(crossing, given)[0]:
            cheap = operation.type in _CHEAP and known.issuperset(_references(operation.inputs))
            for output in operation.outputs:
                if cheap or output.ref() in wanted:
                    known.add(output.ref())
                    kept += [] if cheap else [output]
        return kept

    def has_effects(self) -> bool:
        """Returns whether the stage does something beside its results, which no program would do. Assertions, which XLA
        leaves out, do not count."""
        computed = {each.name for each in self._needed(self.results, self.inputs)[0]}
        others = [each for each in self._operations if each.name in self._forward and each.name not in computed]
        stateful = [each for each in others if each.op_def.is_stateful and "AssertGuard" not in each.name]
        return any(each.type not in _WITHOUT_EFFECT for each in stateful)

    def draws(self) -> bool:
        """Returns whether there are random numbers that are others at each call."""
        functions = [self._definition.node, *(each.node_def for each in self._definition.library.function)]
        return any(node.op in DRAWING for nodes in functions for node in nodes)

    def program(
        self, name: str, arguments: Sequence[tf.Tensor], wanted: Sequence[tf.Tensor]
    ) -> Callable[[Sequence[tf.Tensor]], list[tf.Tensor]]:
        """Returns an XLA program that computes tensors of the graph from others.

        Args:
          name: Its name.
          arguments: The tensors that are given.
          wanted: The tensors that are computed.

        Returns:
          `(values of arguments) -> values of wanted`.
        """
        operations, read = self._needed(wanted, arguments)
        definition = self._part({operation.name for operation in operations})
        inputs = _references(each for operation in operations for each in operation.inputs)
        places = [place for place, each in enumerate(arguments) if each.ref() in read]
        # XLA would copy a tensor that a program returns twice.
        order = {each.ref(): each for each in wanted}
        distinct = [*order.values()]

        def run(*given: tf.Tensor) -> list[tf.Tensor]:
            values = {arguments[place].ref(): value for place, value in zip(places, given, strict=True)}
            fed = {each.deref().name: value for each, value in values.items() if each in inputs}
            inside = [each for each in distinct if each.ref() not in values]
            found = tf.graph_util.import_graph_def(definition, fed, [each.name for each in inside], name=name)
            for each, value in zip(inside, found, strict=True):
                value.set_shape(each.shape)
                values[each.ref()] = value
            return [values[each.ref()] for each in distinct]

        run.__name__ = name
        function = tf.function(run, autograph=False, jit_compile=True)

        def call(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            found = dict(zip(order, function(*(values[place] for place in places)), strict=True))
            return [found[each.ref()] for each in wanted]

        return call

    def _crossing(self, given: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of the forward pass, other than given ones, that operations of the backward pass read."""
        made = [each for each in self.gradients if each is not None]
        operations, _ = self._needed(made, [*given, *self.upstream])
        backward = [each for each in operations if each.name not in self._forward]
        tensors = [*made, *(each for operation in backward for each in operation.inputs)]
        found = {each.ref(): each for each in tensors if each.op.name in self._forward}
        return [found[reference] for reference in found.keys() - _references(given)]

    def _needed(self, wanted: Iterable[tf.Tensor], given: Iterable[tf.Tensor]) -> tuple[list[tf.Operation], set[Any]]:
        """Returns the operations that compute tensors from given ones, in the order of the trace, and references to
        those of the given tensors that are read."""
        stops, read = _references(given), set()
        found: dict[str, tf.Operation] = {}
        waiting = list(wanted)
        while waiting:
            tensor = waiting.pop()
            if tensor.ref() in stops:
                read.add(tensor.ref())
            elif tensor.op.name not in found:
                found[tensor.op.name] = tensor.op
                waiting += tensor.op.inputs
        return sorted(found.values(), key=lambda operation: self._order[operation.name]), read

    def _part(self, names: Collection[str]) -> tf.compat.v1.GraphDef:
        """Returns a part of the graph. Only data order its operations: see `has_effects`."""
        part = tf.compat.v1.GraphDef(versions=self._definition.versions, library=self._definition.library)
        for node in self._definition.node:
            if node.name in names:
                own = part.node.add()
                own.CopyFrom(node)
                own.input[:] = [each for each in node.input if not each.startswith("^")]
                own.attr.pop("_class", None)  # colocations, also with operations of other parts
        return part


def _at(places: Sequence[int] | None, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return _floats(tensors) if places is None else [tensors[place] for place in places]


def _floats(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    return [each for each in tensors if each.dtype.is_floating]


def _references(tensors: Iterable[tf.Tensor]) -> set[Any]:
    return {each.ref() for each in tensors}
