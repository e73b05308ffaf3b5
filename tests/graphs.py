"""Questions about graphs of TensorFlow."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework import tensor_util


def ancestors(operation: tf.Operation) -> set[tf.Operation]:
    """All operations that an operation waits for."""
    found: set[tf.Operation] = set()
    left = [operation]
    while left:
        one = left.pop()
        for other in [*one.control_inputs, *(tensor.op for tensor in one.inputs)]:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def needed_types(graph: tf.Graph) -> list[str]:
    """The types of the operations of all functions in a graph that their results need."""
    found: list[str] = []
    for function in graph.as_graph_def().library.function:
        nodes = {node.name: node for node in function.node_def}
        left, seen = [*function.ret.values(), *function.control_ret.values()], set()
        while left:
            name = left.pop().removeprefix("^").split(":")[0]
            if name in nodes and name not in seen:
                seen.add(name)
                found.append(nodes[name].op)
                left += nodes[name].input
    return found


def zeros_for_calls(function: tf.types.experimental.ConcreteFunction) -> list[str]:
    """Names of the zeros that are arguments of functions called anywhere in a function."""
    definition = function.graph.as_graph_def()
    found: list[str] = []
    for nodes in [definition.node, *(each.node_def for each in definition.library.function)]:
        fills = {node.name for node in nodes if node.op == "Fill"}
        for node in nodes:
            if node.op.endswith("PartitionedCall"):
                found += [name for name in (one.split(":")[0] for one in node.input) if name in fills]
    return found


def sums_of_devices(function: tf.types.experimental.ConcreteFunction) -> list[tuple[str, int]]:
    """Device and instance key of each collective sum anywhere in a function, in the order of the trace."""
    definition = function.graph.as_graph_def()
    found: list[tuple[str, int]] = []
    for nodes in [definition.node, *(each.node_def for each in definition.library.function)]:
        constants = {node.name: node for node in nodes if node.op == "Const"}
        for node in nodes:
            if node.op == "CollectiveReduceV2":
                key = constants[node.input[3].split(":")[0]].attr["value"].tensor
                found.append((node.device, int(tensor_util.MakeNdarray(key))))
    return found
