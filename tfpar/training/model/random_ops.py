"""Random operations of TensorFlow whose numbers depend on when and where they run (`tf.random.uniform`).

A block that is computed again, and the other devices of a replica, would draw others. `keras.random` draws numbers that
depend on a seed alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from tfpar.config import ConfigError
from tfpar.parallel.model_axis import current_place

import tensorflow as tf

# Operations whose results are others at each call, without another effect.
DRAWING = frozenset(
    ["Multinomial", "RandomShuffle", "RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal"]
)
_OTHERS = frozenset(
    [
        "ParameterizedTruncatedNormal",
        "RandomGamma",
        "RandomPoisson",
        "RandomPoissonV2",
        "RngReadAndSkip",
        "RngSkip",
        "StatefulRandomBinomial",
        "StatefulStandardNormalV2",
        "StatefulTruncatedNormal",
        "StatefulUniform",
        "StatefulUniformFullInt",
        "StatefulUniformInt",
    ]
)
_CALLED = {  # attributes with functions
    "Case": ("branches",),
    "If": ("then_branch", "else_branch"),
    "PartitionedCall": ("f",),
    "StatefulPartitionedCall": ("f",),
    "StatelessCase": ("branches",),
    "StatelessIf": ("then_branch", "else_branch"),
    "StatelessWhile": ("body",),
    "While": ("body",),
}


def first_draw(operations: Iterable[tf.Operation]) -> tf.Operation | None:
    """The first operation that draws, also in functions that are called."""
    for operation in operations:
        if operation.type in DRAWING | _OTHERS:
            return operation
        for attribute in _CALLED.get(operation.type, ()):
            value = operation.get_attr(attribute)
            for function in value if isinstance(value, list) else [value]:
                # There is no public way from a call to the graph that it calls (TensorFlow 2.21).
                called = operation.graph._get_function(function.name)
                if called is not None and (found := first_draw(called.graph.get_operations())):
                    return found
    return None


@contextlib.contextmanager
def without_draws(what: str, why: str) -> Iterator[None]:
    """A context in whose trace no operation may draw.

    Args:
      what: What is traced.
      why: Where the numbers would be others.

    Raises:
      ConfigError: An operation draws.
    """
    if tf.executing_eagerly():
        yield
        return
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    yield
    if (drawing := first_draw(graph.get_operations()[before:])) is not None:
        raise ConfigError(
            f"{what} draws random numbers by TensorFlow ({drawing.name}), which are others {why}. Draw them by "
            "keras.random instead, as in keras.random.uniform(shape, seed=...): give the layer a "
            "keras.random.SeedGenerator in its constructor, or leave the seed out."
        )


def on_model_axis(what: str) -> contextlib.AbstractContextManager[None]:
    """`without_draws`, if a device of a model axis is traced."""
    place = current_place()
    several = place is not None and place.size > 1
    return without_draws(what, "on each device of the model axis") if several else contextlib.nullcontext()
