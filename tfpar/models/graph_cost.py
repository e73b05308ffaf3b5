"""FLOPs and saved activations of a model, counted on its traced graph.

Counting on the graph rather than on layers covers every Keras model, including custom layers, and counts what runs.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from tfpar.optim.keras_draws import drawing

import keras
import tensorflow as tf

# Operations whose output shares the memory of its input, or can be recomputed from it at no cost.
_VIEWS = frozenset({"Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "StopGradient", "PreventGradient"})
# Operations that read the shape of a tensor but not its values.
_SHAPE_ONLY = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"})
_CONVOLUTIONS = frozenset({"Conv2D", "Conv3D"})
_TRANSPOSED_CONVOLUTIONS = frozenset({"Conv2DBackpropInput", "Conv3DBackpropInputV2"})
_DEPTHWISE = frozenset({"DepthwiseConv2dNative"})
_ALL_CONVOLUTIONS = _CONVOLUTIONS | _TRANSPOSED_CONVOLUTIONS | _DEPTHWISE
_BATCHED_PRODUCTS = frozenset({"BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"})
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
_LOOPS = frozenset({"While", "StatelessWhile"})


class UnknownShapeError(ValueError):
    """A dimension is unknown in the trace, so an operation cannot be counted."""


@dataclasses.dataclass(frozen=True)
class GraphCost:
    """The cost of one batch.

    Attributes:
      forward_flops: Floating point operations of all matrix products and convolutions; a multiply-add counts as two.
      saved_bytes: Bytes of the tensors that depend on the input and that the backward pass reads.
      uncounted: Names of operations with unknown shapes; if there are any, the figures are lower bounds.
      convolution_flops: The part of `forward_flops` in convolutions.
    """

    forward_flops: int
    saved_bytes: int
    uncounted: tuple[str, ...]
    convolution_flops: int = 0


def count(model: keras.Model, batch_size: int) -> GraphCost:
    """Traces a training step of the model, without running it, and counts its cost.

    Args:
      model: A built Keras model with symbolic inputs.
      batch_size: Number of examples in the traced batch.

    Raises:
      ValueError: The model has no symbolic inputs, or an input dimension besides the batch is unknown.
    """
    specs = _input_specs(model, batch_size)
    weights = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
    state = [tf.TensorSpec(v.shape, v.dtype) for v in model.non_trainable_variables]
    forward: list[tf.Operation] = []
    results: list[tf.Tensor] = []

    def step(inputs: list[tf.Tensor], weights: list[tf.Tensor], state: list[tf.Tensor]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(weights)
            with drawing():
                outputs, _ = model.stateless_call(weights, state, in_structure(model, inputs), training=True)
            loss = stand_in_loss(outputs)
        forward.extend(tf.compat.v1.get_default_graph().get_operations())
        results.extend(tf.nest.flatten(outputs))
        return [g for g in tape.gradient(loss, weights) if g is not None]

    graph = tf.function(step, autograph=False).get_concrete_function(specs, weights, state).graph
    uncounted: list[str] = []
    flops = _flops(_ancestors(results), uncounted)
    sources = graph.inputs[: len(specs)]
    saved = _saved_bytes(forward, graph.get_operations()[len(forward) :], sources, uncounted)
    convolutions = sum(flops[kind] for kind in _ALL_CONVOLUTIONS)
    return GraphCost(flops.total(), saved, tuple(uncounted), convolutions)


def stand_in_loss(outputs: Any) -> tf.Tensor:
    """Returns a stand-in for the loss; like a cross-entropy, it saves one tensor of the outputs' size."""
    return tf.add_n(
        [
            tf.reduce_sum(tf.nn.log_softmax(tf.cast(output, tf.float32)))
            for output in tf.nest.flatten(outputs)
            if output.dtype.is_floating
        ]
    )


def in_structure(model: keras.Model, inputs: list[tf.Tensor]) -> Any:
    """Returns the inputs in the structure, such as a dict, with which the model was created."""
    structure = getattr(model, "input", None)
    if isinstance(structure, dict | list | tuple):
        return keras.tree.pack_sequence_as(structure, inputs)
    return inputs[0] if len(inputs) == 1 else inputs


def _input_specs(model: keras.Model, batch_size: int) -> list[tf.TensorSpec]:
    if not getattr(model, "inputs", None):
        raise ValueError(
            f"The model {model.name!r} has no symbolic inputs, so its cost is unknown before it runs. "
            "Build it with the functional API, or as a Sequential with an Input."
        )
    specs = []
    for tensor in model.inputs:
        if None in tensor.shape[1:]:
            raise ValueError(
                f"Input {tensor.name!r} of model {model.name!r} has shape {tuple(tensor.shape)}: "
                "its cost depends on an unknown dimension. Give the Input its full shape."
            )
        specs.append(tf.TensorSpec((batch_size, *tensor.shape[1:]), tensor.dtype))
    return specs


def _ancestors(results: Iterable[tf.Tensor]) -> list[tf.Operation]:
    """Returns the operations that the results depend on: TensorFlow prunes the others before it runs the graph."""
    visited: dict[tf.Operation, None] = {}
    pending = [tensor.op for tensor in results]
    while pending:
        operation = pending.pop()
        if operation not in visited:
            visited[operation] = None
            pending.extend(tensor.op for tensor in operation.inputs)
    return list(visited)


def flops_of(operations: Iterable[tf.Operation], uncounted: list[str]) -> int:
    """Returns the FLOPs of matrix products and convolutions.

    Args:
      operations: Operations of a graph.
      uncounted: Receives the names of operations with unknown shapes.
    """
    return _flops(operations, uncounted).total()


def _flops(operations: Iterable[tf.Operation], uncounted: list[str]) -> Counter[str]:
    """Returns the FLOPs by type of operation, including those in called functions."""
    total: Counter[str] = Counter()
    for operation in operations:
        try:
            total[operation.type] += _matrix_flops(operation)
            total += _nested_flops(operation, uncounted)
        except UnknownShapeError:
            uncounted.append(operation.name)
    return total


def _matrix_flops(operation: tf.Operation) -> int:
    """Returns 2 x (number of multiply-adds) of a matrix product or convolution, 0 for other operations."""
    kind, inputs = operation.type, operation.inputs
    if kind == "MatMul":
        contracted = _dims(inputs[0])[0 if operation.get_attr("transpose_a") else 1]
        return 2 * math.prod(_dims(operation.outputs[0])) * contracted
    if kind in _BATCHED_PRODUCTS:
        contracted = _dims(inputs[0])[-2 if operation.get_attr("adj_x") else -1]
        return 2 * math.prod(_dims(operation.outputs[0])) * contracted
    if kind in _CONVOLUTIONS:
        # The filter is [kernel..., channels of a group, out channels].
        return 2 * math.prod(_dims(operation.outputs[0])) * math.prod(_dims(inputs[1])[:-1])
    if kind in _TRANSPOSED_CONVOLUTIONS:
        return 2 * math.prod(_dims(inputs[2])) * math.prod(_dims(inputs[1])[:-1])
    if kind in _DEPTHWISE:
        return 2 * math.prod(_dims(operation.outputs[0])) * math.prod(_dims(inputs[1])[:2])
    if kind == "Einsum":
        return _einsum_flops(operation.get_attr("equation").decode(), [_dims(tensor) for tensor in inputs])
    return 0


def _einsum_flops(equation: str, shapes: Sequence[tuple[int, ...]]) -> int:
    """Returns 2 x the product of all labels' sizes if two operands are contracted, otherwise 0."""
    terms, result = equation.replace(" ", "").split("->")
    sizes: dict[str, int] = {}
    for term, shape in zip(terms.split(","), shapes, strict=True):
        if "..." in term:
            head, tail = term.split("...")
            ellipsis = shape[len(head) : len(shape) - len(tail)]
            # The last broadcast dimension is "-1", the second to last "-2", in every operand.
            broadcast = [str(dim - len(ellipsis)) for dim in range(len(ellipsis))]
            labels = [*head, *broadcast, *tail]
        else:
            labels = list(term)
        for label, size in zip(labels, shape, strict=True):
            sizes[label] = max(size, sizes.get(label, 1))
    contracted = [label for label in sizes if label.isalpha() and label not in result]
    return 2 * math.prod(sizes.values()) if len(shapes) == 2 and contracted else 0


def _nested_flops(operation: tf.Operation, uncounted: list[str]) -> Counter[str]:
    """Returns the FLOPs of the functions that an operation calls: a loop's body times its trips, the largest branch."""
    kind = operation.type
    if kind in _CALLS:
        return _function_flops(operation, operation.get_attr("f"), uncounted)
    if kind in _BRANCHES:
        branches = (
            [operation.get_attr("then_branch"), operation.get_attr("else_branch")]
            if kind.endswith("If")
            else operation.get_attr("branches")
        )
        return max((_function_flops(operation, branch, uncounted) for branch in branches), key=Counter.total)
    if kind in _LOOPS:
        body = _function_flops(operation, operation.get_attr("body"), uncounted)
        trips = _static_trip_count(operation.inputs[1]) if body.total() else 0
        if trips is None or trips < 0:
            raise UnknownShapeError(operation.name)
        return Counter({inner: flops * trips for inner, flops in body.items()})
    return Counter()


def _static_trip_count(maximum: tf.Tensor) -> int | None:
    """Returns the trip count of a loop from `maximum_iterations`, which control flow v2 passes as its second input."""
    value = tf.get_static_value(maximum)
    if value is None and maximum.op.type == "Max":
        # The recurrent layers of Keras 3.15 pass the maximum over a constant, which tracing does not fold.
        lengths = tf.get_static_value(maximum.op.inputs[0])
        value = None if lengths is None else lengths.max()
    return None if value is None else int(value)


def _function_flops(operation: tf.Operation, function: Any, uncounted: list[str]) -> Counter[str]:
    # There is no public way from a call to the graph that it calls (TensorFlow 2.21).
    called = operation.graph._get_function(function.name)
    return _flops(called.graph.get_operations(), uncounted)


def _saved_bytes(
    forward: Iterable[tf.Operation],
    backward: Iterable[tf.Operation],
    sources: Iterable[tf.Tensor],
    uncounted: list[str],
) -> int:
    return sum(size for _, size in saved_tensors(forward, backward, sources, uncounted))


def saved_tensors(
    forward: Iterable[tf.Operation],
    backward: Iterable[tf.Operation],
    sources: Iterable[tf.Tensor],
    uncounted: list[str],
) -> list[tuple[tf.Tensor, int]]:
    """Returns the distinct forward tensors that depend on `sources` and that backward operations read, with bytes.

    Args:
      forward: Operations of the forward pass.
      backward: Operations of the backward pass.
      sources: Inputs.
      uncounted: Receives the names of tensors with unknown shapes.
    """
    dependent = {tensor.ref() for tensor in sources}
    forward_tensors = set(dependent)
    for operation in forward:
        forward_tensors.update(tensor.ref() for tensor in operation.outputs)
        if operation.type not in _SHAPE_ONLY and any(tensor.ref() in dependent for tensor in operation.inputs):
            dependent.update(tensor.ref() for tensor in operation.outputs)
    saved: dict[Any, None] = {}
    for operation in backward:
        if operation.type not in _SHAPE_ONLY:
            saved.update(
                (_storage(tensor).ref(), None)
                for tensor in operation.inputs
                if tensor.ref() in forward_tensors and tensor.ref() in dependent
            )
    found = []
    for reference in saved:
        tensor = reference.deref()
        try:
            # Variants (the stacks of a loop) have no size.
            if not tensor.dtype.size or tensor.dtype == tf.variant:
                raise UnknownShapeError(tensor.name)
            found.append((tensor, math.prod(_dims(tensor)) * tensor.dtype.size))
        except UnknownShapeError:
            uncounted.append(tensor.name)
    return found


def _storage(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor whose memory this one shares."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def _dims(tensor: tf.Tensor) -> tuple[int, ...]:
    if not tensor.shape.is_fully_defined():
        raise UnknownShapeError(tensor.name)
    return tuple(tensor.shape.as_list())
