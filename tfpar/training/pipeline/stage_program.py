"""A stage of a model's graph as a function of tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.models.normalization import current_example_weights, example_weights
from tfpar.optim import keras_calls, keras_internals
from tfpar.optim.keras_draws import current_draws, draw_state
from tfpar.parallel.tensor.obstacles import check_read
from tfpar.training.model.random_ops import on_model_axis, without_draws
from tfpar.training.pipeline import powers
from tfpar.training.pipeline.graph import GraphStep, Values, crossing, run_steps
from tfpar.training.pipeline.passes import CompiledPasses, Passes, TapedPasses

import keras
import tensorflow as tf


@dataclasses.dataclass(frozen=True, eq=False)
class Stage:
    """Consecutive steps of a model's graph.

    Attributes:
      number: From 0.
      place: Place of its devices.
      steps: The steps.
      given: Identities of the tensors that it reads from other stages.
      made: Identities of the tensors that it computes and that later stages read, or the model returns.
    """

    number: int
    place: int
    steps: Sequence[GraphStep]
    given: Sequence[int]
    made: Sequence[int]

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of its layers."""
        return [variable for step in self.steps for variable in step.variables]


def stages_of(graph: Any, steps: Sequence[GraphStep], cuts: Sequence[int], places: int) -> list[Stage]:
    """The stages into which cuts divide a graph.

    Args:
      graph: The graph.
      steps: Its steps.
      cuts: Number of the first step of each stage but the first.
      places: Number of devices, to which stages are assigned in turn.
    """
    outputs = [*map(id, graph.outputs)]
    bounds = [0, *cuts, len(steps)]
    stages = []
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        own: set[int] = set()
        given: dict[int, None] = {}
        for step in steps[start:end]:
            given.update(dict.fromkeys(each for each in step.reads if each not in own))
            own.update(step.makes)
        crosses = crossing(steps, end, outputs, []) if end < len(steps) else outputs
        made = [each for each in dict.fromkeys(crosses) if each in own]
        stages.append(Stage(number, number % places, steps[start:end], [*given], made))
    return stages


def learning_tensors(model: keras.Model, stages: Sequence[Stage]) -> set[int]:
    """The identities of the tensors of the graph that depend on trainable variables, as far as stages can tell."""
    trainable = {id(variable) for variable in model.trainable_variables}
    known = {id(variable) for stage in stages for variable in stage.variables}
    found: set[int] = set()
    for stage in stages:
        own = not trainable.isdisjoint(map(id, stage.variables)) or not trainable <= known
        if own or not found.isdisjoint(stage.given):
            found.update(stage.made)
    return found


def way_out(option: str) -> str:
    """What to do if stages, which an option asks for, cannot be had."""
    return "Use --mesh=data:... alone." if option == "--mesh" else "Leave it out."


class StageProgram:
    """A stage as a function of tensors, which is traced once in a function.

    Args:
      model: The model.
      stage: The stage.
      operation_fn: Returns the callable to use in place of a layer.
      compiles: Whether the stage is an XLA program.
      shares: Whether all calls share one trace.
      option: The option that cuts the model, for errors.
    """

    def __init__(
        self,
        model: keras.Model,
        stage: Stage,
        operation_fn: Any,
        *,
        compiles: bool,
        shares: bool = True,
        option: str = "--mesh",
    ) -> None:
        self.stage = stage
        self._option = option
        self._way_out = way_out(option)
        self._model, self._operation_fn = model, operation_fn
        self._learning = {id(variable) for variable in model.trainable_variables}
        self._variables: list[keras.Variable] | None = None
        self._has_mask: list[bool] = []
        self._has_example_weights = False
        self._recomputes = False
        # Facts found by tracing.
        self._masks_made: list[bool] = []
        self._updated: list[keras.Variable] = []
        self._shares, self._compiles = shares, compiles and shares
        self._checked = not shares
        self._compiled: dict[tuple[Any, ...], CompiledPasses] = {}
        self._functions: dict[tuple[int, ...], Any] = {}
        self._options = {
            "jit_compile": True if compiles else None,
            # Otherwise TensorFlow would place the operations again for every call, which takes seconds each time.
            "experimental_attributes": None if compiles else {"_noinline": True},
        }

    def arguments(self, given: Sequence[Any], scope: keras.StatelessScope) -> list[tf.Tensor]:
        """The arguments of a call: tensors with their masks, values of variables, weights of examples.

        Args:
          given: Values of `stage.given`.
          scope: The scope with the variables' values.
        """
        masks = [keras_internals.mask_of(value) for value in given]
        weights = current_example_weights()
        self._has_mask, self._has_example_weights = [mask is not None for mask in masks], weights is not None
        if self._variables is None:
            self._variables = self._read_variables(given, masks, weights, scope)
        return [
            *map(tf.convert_to_tensor, given),
            *(mask for mask in masks if mask is not None),
            *(tf.convert_to_tensor(scope.state_mapping[id(variable)]) for variable in self._variables),
            *([] if weights is None else [weights]),
        ]

    def __call__(self, tensors: Sequence[tf.Tensor], watched: Sequence[int] = ()) -> list[tf.Tensor]:
        """The values of `stage.made` with their masks, the updates and the losses.

        Args:
          tensors: From `arguments`.
          watched: The places of those that have gradients. The gradient of a function would compute those of all.
        """
        if not self._shares:
            return self._body(*tensors)
        function = self._function_of(tuple(watched))
        if not self._checked:
            self._checked = True
            self._check_captured(function.get_concrete_function(*tensors).captured_inputs)
        return list(function(*tensors))

    def passes(self, tensors: Sequence[tf.Tensor], watched: Sequence[int], *, recompute: bool) -> Passes:
        """The forward and the backward pass.

        Args:
          tensors: From `arguments`.
          watched: The places of those that have gradients.
          recompute: Whether the backward pass computes the stage again.
        """
        self._recomputes = recompute
        how: dict[str, Any] = {"recompute": recompute, "watched": watched}
        taped = TapedPasses(functools.partial(self, watched=watched), **how)
        if not self._compiles:
            return taped
        key = (recompute, tuple(watched), *((str(tensor.shape), tensor.dtype) for tensor in tensors))
        if key not in self._compiled:
            self._compiled[key] = CompiledPasses(self._body, tensors, **how)
            self._check_captured(self._compiled[key].captured)
        return self._compiled[key] if self._compiled[key].can_run else taped

    def places_of_values(self, results: int) -> list[int]:
        """The places, among this number of results of a call, of values and losses; updates of state are others."""
        values = len(self.stage.made) + sum(self._masks_made)
        return [*range(values), *range(values + len(self._updated), results)]

    def unpacked(self, results: Sequence[tf.Tensor], scope: keras.StatelessScope) -> Values:
        """The values of `stage.made`; the stage's other results are recorded in the scope."""
        rest = iter(results)
        values = {each: next(rest) for each in self.stage.made}
        for value, has_mask in zip(values.values(), self._masks_made, strict=True):
            if has_mask:
                keras_internals.set_mask(value, next(rest))
        for variable in self._updated:
            scope.add_update((variable, next(rest)))
        for loss in rest:
            keras_calls.add_loss(self._model, scope, loss)
        return values

    def _read_variables(
        self, given: Sequence[Any], masks: Sequence[Any], weights: Any, scope: keras.StatelessScope
    ) -> list[keras.Variable]:
        """The variables of the stage's layers, and others that it reads, found by tracing it with all variables
        available."""
        read = {id(variable): variable for step in self.stage.steps for variable in step.variables}

        def discover() -> None:
            self._stage_results(given, masks, weights, inner := _StageScope(dict(scope.state_mapping)))
            read.update(inner.read)

        tf.function(discover, autograph=False).get_concrete_function()
        return [variable for key, variable in read.items() if key in scope.state_mapping]

    def _function_of(self, watched: tuple[int, ...]) -> Any:
        """The stage as a function, through which no gradients pass but those of some arguments."""

        def run(*tensors: tf.Tensor) -> list[tf.Tensor]:
            passing = [place in watched or not each.dtype.is_floating for place, each in enumerate(tensors)]
            pairs = zip(passing, tensors, strict=True)
            return self._body(*(each if passes else tf.stop_gradient(each) for passes, each in pairs))

        if watched not in self._functions:
            self._functions[watched] = tf.function(run, autograph=False, **self._options)
        return self._functions[watched]

    def _body(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        assert self._variables is not None
        rest = iter(tensors)
        given = [next(rest) for _ in self.stage.given]
        masks = [next(rest) if has_mask else None for has_mask in self._has_mask]
        inner = _StageScope({id(variable): next(rest) for variable in self._variables})
        weights = next(rest) if self._has_example_weights else None
        with powers.constant_exponents():
            made = self._stage_results(given, masks, weights, inner)
        masks_made = [keras_internals.mask_of(value) for value in made]
        self._masks_made = [mask is not None for mask in masks_made]
        self._updated = [variable for variable, _ in inner.updates.values()]
        for variable in self._updated:
            if id(variable) in self._learning:
                raise ConfigError(
                    f"{self._option}: the model assigns {variable.path} in its forward pass (as SpectralNormalization "
                    f"does), which stages cannot do. {self._way_out}"
                )
        parts = [
            *made,
            *(mask for mask in masks_made if mask is not None),
            *(_returned(variable, value) for variable, value in inner.updates.values()),
            *inner.losses,
        ]
        return [tf.convert_to_tensor(part) for part in parts]

    def _stage_results(
        self, given: Sequence[Any], masks: Sequence[Any], weights: Any, scope: _StageScope
    ) -> list[tf.Tensor]:
        """Runs the steps with variables as in a scope; returns the values of `stage.made`."""
        values: Values = {}
        for key, value, mask in zip(self.stage.given, given, masks, strict=True):
            tensor = tf.identity(value)  # a separate tensor, which may have a mask
            values[key] = tensor if mask is None else keras_internals.set_mask(tensor, mask)
        what = f"{self._option}: stage {self.stage.number}"
        again = without_draws(what, "in the backward pass, which computes it again (--recompute)")
        with contextlib.ExitStack() as stack:
            stack.enter_context(on_model_axis(what))
            if self._recomputes:
                stack.enter_context(again)
            if weights is not None:
                stack.enter_context(example_weights(weights))
            stack.enter_context(scope)
            run_steps(self.stage.steps, values, self._operation_fn)
        return [values[each] for each in self.stage.made]

    def _check_captured(self, tensors: Iterable[tf.Tensor]) -> None:
        """Refuses a stage that reads tensors which are not its arguments.

        Args:
          tensors: What it reads beside its arguments.

        Raises:
          ConfigError: A layer reads a tensor that reaches it neither through the graph nor as a variable.
        """
        for captured in tensors:
            if tf.is_symbolic_tensor(captured) and captured.dtype != tf.resource:
                names = dict.fromkeys(step.name for step in self.stage.steps)
                raise ConfigError(
                    f"{self._option}: stage {self.stage.number} ({', '.join(names)}) reads {captured.name!r}, which is "
                    f"neither made by a layer before it nor a variable. {self._way_out}"
                )


def _returned(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """The value of a variable after a stage, in the graph of the stage."""
    return current_draws().settled(value) if variable is draw_state() else value


class _StageScope(keras.StatelessScope):
    """Values of variables within a stage; records reads and assignments."""

    def __init__(self, values: dict[int, Any]) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping = values
        self.read: dict[int, keras.Variable] = {}
        self.updates: dict[int, tuple[keras.Variable, tf.Tensor]] = {}

    def get_current_value(self, variable: keras.Variable) -> Any:
        self.read[id(variable)] = variable
        check_read(variable)
        return super().get_current_value(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        self.updates[id(update[0])] = update
