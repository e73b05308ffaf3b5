"""Variables of Keras that get their values only when they are needed.

In a `StatelessScope`, Keras (3.15) makes variables without values and gives them theirs at its end. A model that is
divided among devices is made in this way without its values being in memory all at once. `INTERNALS` is as in
`keras_internals.py`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from tfpar.optim.keras_internals import Internal

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state, variables

_GLOBAL_STATE = "keras.src.backend.common.global_state"

INTERNALS = (
    Internal("uninitialized_variables", _GLOBAL_STATE, "placing", "variables that wait for the end of the scope"),
    Internal("object_name_uids", _GLOBAL_STATE, "placing", "counts of names, such as those of `dense_1`"),
    Internal("global_seed_generator", _GLOBAL_STATE, "placing, calling", "the seeds of unseeded random operations"),
    Internal("__init__", "Variable", "placing", "takes an initializer or a value, shape, dtype in this order"),
    Internal("_deferred_initialize", "Variable", "placing", "gives a variable its initial value"),
    Internal("_initializer", "Variable", "placing", "of a variable without a value, which `numpy` calls"),
)
SEEDS = "global_seed_generator"
_WAITING, _NAMES = "uninitialized_variables", "object_name_uids"
_VALUE_OF = "tfpar_value_of"

M = TypeVar("M")


def is_deferred(variable: keras.Variable) -> bool:
    """Whether a variable has no value yet. Its `numpy` computes the initial value, and keeps nothing."""
    return variable._value is None


def without_value(name: str, shape: tuple[int, ...], dtype: str) -> keras.Variable:
    """A variable that never gets a value of its own: a name for one that a `StatelessScope` has."""
    with keras.StatelessScope(initialize_variables=False):
        variable = keras.Variable("zeros", shape, dtype, trainable=False, name=name)
    waiting = global_state.get_global_attribute(_WAITING)
    global_state.set_global_attribute(_WAITING, [each for each in waiting if each is not variable])
    return variable


def made_deferred(make: Callable[[], M], variables_of: Callable[[M], list[keras.Variable]]) -> M | None:
    """Calls a function that makes variables; those of its result get their values later.

    Variables get their values at once if the function assigns to them, if they are not among `variables_of`, or if
    their initial values are drawn from a generator with a state, which may depend on the order.

    Args:
      make: The function, which must have no effects on anything but variables, names and random states.
      variables_of: Returns the variables of what it makes.

    Returns:
      The function's result. None if it fails, in which case nothing has changed.
    """
    states, counts = (random.getstate(), np.random.get_state()), dict(global_state.get_global_attribute(_NAMES) or {})
    generator = global_state.get_global_attribute(SEEDS)
    scope = _RecordingScope()
    with scope, _with_initializers():
        try:
            made = make()
        except Exception:  # whatever it is, calling it again outside the scope shows whether it is due to the scope
            made = None
        waiting = global_state.get_global_attribute(_WAITING) or []
        global_state.set_global_attribute(_WAITING, [])
    if made is None or any(map(tf.is_symbolic_tensor, scope.state_mapping.values())):
        random.setstate(states[0])
        np.random.set_state(states[1])
        global_state.set_global_attribute(SEEDS, generator)
        _restore_counts(counts)
        return None
    own = {id(variable) for variable in variables_of(made)}
    for variable in waiting:
        if id(variable) not in own or id(variable) in scope.assigned or not _has_one_value(variable):
            variable._deferred_initialize()
    for key, variable in scope.assigned.items():
        variable.assign(scope.state_mapping[key])
    return made


class _RecordingScope(keras.StatelessScope):
    """A scope that knows the variables to which values are assigned, by their identities."""

    def __init__(self) -> None:
        super().__init__()
        self.assigned: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        self.assigned[id(update[0])] = update[0]


def _has_one_value(variable: keras.Variable) -> bool:
    """Whether a variable's initial value is the same at any time: that of Keras' initializers with an integer seed."""
    initializer = variable._initializer
    module = getattr(initializer, "__module__", None) or type(initializer).__module__
    known = module.partition(".")[0] in ("keras", "keras_hub", "tfpar")
    return known and not isinstance(getattr(initializer, "seed", None), keras.random.SeedGenerator)


def comes_from(variable: keras.Variable, value_of: Callable[[keras.Variable], np.ndarray]) -> None:
    """Sets the function that `value_on_host` calls for a variable, once, instead of reading it."""
    vars(variable)[_VALUE_OF] = value_of


def value_on_host(variable: keras.Variable) -> np.ndarray:
    """The value that a variable, which may be deferred, has or begins with, in the memory of the host."""
    value_of = vars(variable).pop(_VALUE_OF, None)
    with tf.device("CPU:0"):
        return value_of(variable) if value_of else variable.numpy()


@contextlib.contextmanager
def _with_initializers() -> Iterator[None]:
    """In this context a variable that is made with a value has an initializer, without which Keras refuses to make it
    in a scope. Optimizers have such variables."""
    plain = variables.Variable.__init__

    def init(
        self: keras.Variable, initializer: Any, shape: Any = None, dtype: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if not callable(initializer) and not isinstance(initializer, str):
            value = self._convert_to_tensor(initializer, dtype=dtype)
            shape, dtype = tuple(value.shape), value.dtype if dtype is None else dtype

            def initializer(shape: Any, dtype: Any) -> tf.Tensor:
                del shape, dtype
                return value

        plain(self, initializer, shape, dtype, *args, **kwargs)

    variables.Variable.__init__ = init
    try:
        yield
    finally:
        variables.Variable.__init__ = plain


def _restore_counts(counts: dict[str, Any]) -> None:
    known = global_state.get_global_attribute(_NAMES, {}, set_to_default=True)
    known.clear()
    known.update(counts)
