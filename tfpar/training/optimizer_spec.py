"""The optimizer of a run: one that the configuration names, or a Keras object."""

from __future__ import annotations

import dataclasses
import logging
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from tfpar.checkpoint import run_state
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.optim import keras_internals, keras_rates, optimizers
from tfpar.parallel.held import held_by
from tfpar.parallel.pipeline.devices import place_of
from tfpar.parallel.split import (
    assign_whole,
    keep_rows_and_columns_whole,
    keeps_slots_beside,
    shape_of,
    split_of,
)
from tfpar.training.model.building import given_for

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class OptimizerSpec:
    """An optimizer that can be used, not yet built under a strategy.

    Attributes:
      instance: A Keras optimizer, or None for the one that the configuration names.
      keeps_own_rate: Whether `instance` keeps its own learning rate or schedule; the configuration's schedule drives
        every other optimizer.
    """

    instance: keras.optimizers.Optimizer | None
    keeps_own_rate: bool

    @classmethod
    def of(
        cls,
        optimizer: keras.optimizers.Optimizer | str | None,
        options: Mapping[str, Any],
        config: ExperimentConfig | None = None,
    ) -> OptimizerSpec:
        """The optimizer that was given to `Trainer`.

        Args:
          optimizer: A Keras optimizer, a name, or None for the one that the options name.
          options: Options given beside it.
          config: The configuration of the run; what it says without effect on an object is logged.

        Raises:
          ConfigError: Not a Keras optimizer, one that cannot be used, or options without effect on an object.
        """
        if optimizer is None or isinstance(optimizer, str):
            return cls(None, False)
        if isinstance(optimizer, keras.optimizers.Optimizer):
            _check_has_effect(optimizer, options)
            if config is not None:
                _note_what_has_none(optimizer, options, config)
        optimizers.check_optimizer(optimizer)
        return cls(optimizer, "schedule" not in options)

    def recorded_options(self) -> dict[str, Any]:
        """Options of the object that a checkpoint records, to compare when it is resumed; empty for a name."""
        if self.instance is None:
            return {}
        recorded = run_state.optimizer_options(self.instance)
        if not self.keeps_own_rate:
            recorded.pop("learning_rate", None)
        return recorded

    def build(self, config: ExperimentConfig, variables: Sequence[keras.Variable]) -> keras.optimizers.Optimizer:
        """The optimizer, built. Call it in the scope in which the variables were created, because the optimizer's
        variables must be created there too.

        Returns the given object if it was created there too and does not update other variables; otherwise a new one
        like it.

        Args:
          config: The experiment.
          variables: The variables that it updates.
        """
        optimizer = self.instance
        if (
            optimizer is None
            or keras_internals.strategy_of(optimizer) is not tf.distribute.get_strategy()
            or (optimizer.built and [*map(id, keras_internals.trainable_variables(optimizer))] != [*map(id, variables)])
        ):
            optimizer = self.create(config)
        else:
            optimizers.follow_rate(optimizer, optimizer)  # as copies of it, for other weights, will
        if any(split_of(variable) or place_of(variable) is not None for variable in variables):
            keeps_slots_beside(optimizer)
        optimizer.build(variables)
        if any(split_of(variable) or held_by(variable) for variable in variables):
            keep_rows_and_columns_whole(optimizer)
        self._take_over_state(optimizer, variables)
        return optimizer

    def _take_over_state(self, optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]) -> None:
        """Gives a copy the state of the given optimizer if that was built for the weights that the model's copy stands
        for; it may have the same number of slots for other weights."""
        given = self.instance
        if given is None or optimizer is given or not given.built:
            return
        same = [*map(id, keras_internals.trainable_variables(given))] == [id(given_for(each)) for each in variables]
        shapes = [[shape_of(each) for each in every.variables] for every in (optimizer, given)]
        if any(map(held_by, variables)):  # workers that take over other parts would count other steps
            self.tell_of_lost_state("several workers divide the layers")
        elif same and shapes[0] == shapes[1]:
            for variable, value in zip(optimizer.variables, given.variables, strict=True):
                assign_whole(variable, value.numpy())
        else:
            self.tell_of_lost_state("it was built for other weights than this model trains")

    def tell_of_lost_state(self, reason: str) -> None:
        """Logs that a given optimizer has made steps whose state is not taken over."""
        given = self.instance
        if given is not None and given.built and (steps := int(given.iterations.numpy())):
            _log.info("optimizer %s begins anew, without the state of its %d steps: %s", given.name, steps, reason)

    def create(self, config: ExperimentConfig) -> keras.optimizers.Optimizer:
        """A new optimizer, not built, for the strategy in whose scope this is called."""
        if self.instance is None:
            return optimizers.build(config.optimizer, global_batch_size=config.step_batch_size)
        copy = optimizers.recreate(self.instance)
        optimizers.follow_rate(copy, self.instance)
        return copy


def with_own_accumulation(
    optimizer: Any, options: Mapping[str, Any], config: ExperimentConfig | None
) -> tuple[Any, dict[str, Any]]:
    """Turns `gradient_accumulation_steps` of an optimizer into the option `accumulate_steps`.

    Args:
      optimizer: The argument of `Trainer`.
      options: Options given beside it.
      config: The configuration given beside it.

    Returns:
      A copy of the optimizer that does not accumulate, and the options. Both are returned unchanged if the given
      optimizer does not accumulate, if it has state, which a copy would not have, or if it has a schedule, which counts
      micro-batches in Keras (3.15).

    Raises:
      ConfigError: Another number of micro-batches was given.
    """
    kept = optimizer, {**options}
    if not isinstance(optimizer, keras.optimizers.Optimizer) or optimizer.built:
        return kept
    steps = optimizer.gradient_accumulation_steps
    if not steps or isinstance(optimizer, keras.optimizers.LossScaleOptimizer | keras.optimizers.MultiOptimizer):
        return kept
    if not isinstance(keras_rates.config_of(optimizer)["learning_rate"], numbers.Real):
        return kept
    configured = config.train.accumulate_steps if config else 1
    given = options.get("accumulate_steps", steps if configured == 1 else configured)
    if given != steps:
        raise ConfigError(
            f"accumulate_steps={given} contradicts gradient_accumulation_steps={steps} of the optimizer. Give one of "
            "them."
        )
    copy = optimizers.recreate(optimizer)
    optimizers.follow_rate(copy, optimizer)
    copy.gradient_accumulation_steps = None
    _log.info(
        "gradient_accumulation_steps=%s of the optimizer is taken as accumulate_steps=%s of a copy of it: a step takes "
        "global_batch_size examples in %s micro-batches, and in fit batch_size x %s",
        *[steps] * 4,
    )
    return copy, {**options, "accumulate_steps": steps}


def refuse_schedule_objects(options: Mapping[str, Any]) -> None:
    """Refuses an object of Keras where an option takes a number or a name.

    Args:
      options: Options that were given to `Trainer`.

    Raises:
      ConfigError: `learning_rate` or `schedule` is a Keras schedule.
    """
    for name in ("learning_rate", "schedule"):
        if isinstance(given := options.get(name), keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                f"{name}={type(given).__name__}(...): a schedule object belongs to an optimizer object. Give "
                f"optimizer=keras.optimizers.AdamW({type(given).__name__}(...)), or a name, such as schedule='cosine'."
            )


def peak_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """The learning rate of an optimizer object, which a schedule given beside it scales.

    Raises:
      ConfigError: It has a schedule of its own.
    """
    rate = keras_rates.config_of(optimizer)["learning_rate"]
    if isinstance(rate, numbers.Real):
        return float(rate)
    raise ConfigError(
        f"schedule: the {type(optimizer).__name__} object given as optimizer has a learning-rate schedule of its own. "
        "Leave schedule=... out, or give learning_rate=... as well, which then replaces the object's."
    )


def _check_has_effect(optimizer: keras.optimizers.Optimizer, options: Mapping[str, Any]) -> None:
    """Refuses options that determine how an optimizer is built or driven, if an optimizer that is already built is
    given."""
    if idle := _without_effect(options) & options.keys():
        remedy = "" if "schedule" in options else ", or give a schedule=... that replaces the object's learning rate"
        raise ConfigError(
            f"{', '.join(sorted(idle))}: without effect on the {type(optimizer).__name__} object given as optimizer. "
            f"Set it there, or give the optimizer by name{remedy}."
        )


def _note_what_has_none(
    optimizer: keras.optimizers.Optimizer, options: Mapping[str, Any], config: ExperimentConfig
) -> None:
    """Logs what a configuration says differently from the defaults, but without effect on an optimizer object. It is
    no error, because one configuration may serve runs with an object and without."""
    said, default = config.as_flat_dict(), ExperimentConfig().as_flat_dict()
    names = _without_effect(options) | (set() if "schedule" in options else {"schedule"})
    if idle := sorted(name for name in names if said[name] != default[name]):
        _log.warning(
            "%s of the configuration: without effect on the %s object given as optimizer. Set it there, or give the "
            "optimizer by name.",
            ", ".join(idle),
            type(optimizer).__name__,
        )


def _without_effect(options: Mapping[str, Any]) -> set[str]:
    """Names of options that have no effect on an optimizer object."""
    built = {"optimizer_args", "weight_decay", "weight_decay_exclude", "ema"}
    driven = {"learning_rate", "base_batch_size", "schedule_args", "warmup_steps"}
    return built if "schedule" in options else built | driven
