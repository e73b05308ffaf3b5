"""Trainable weights without a path from the loss, which an optimizer leaves alone as it does in Keras' `fit`.

Their gradients are zeros where programs and exchanges need tensors. An update with zeros would not leave a weight as it
is: it would decay.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from tfpar.config import ConfigError
from tfpar.process.listing import listed

import keras
import tensorflow as tf

_log = logging.getLogger(__name__)
_MOST_NAMES = 8


class Unreached:
    """The weights of a model that no gradient reaches. Known once a backward pass was traced, before its update is."""

    def __init__(self) -> None:
        self._reached: set[int] | None = None  # None before a trace
        self._confirmed: set[int] | None = None  # None if all that have gradients are reached
        self._told = False

    def dense(
        self,
        weights: Sequence[tf.Tensor],
        places: Iterable[int],
        found: Iterable[tf.Tensor | tf.IndexedSlices | None],
        elsewhere: Iterable[int] = (),
        devices: Sequence[str] = (),
    ) -> list[tf.Tensor]:
        """Adds up the gradients that a tape found, zeros for weights without one, and notes which are reached.

        Args:
          weights: The values of the model's trainable weights.
          places: For each gradient the index of its weight.
          found: The gradients.
          elsewhere: Weights that gradients of other workers may reach.
          devices: If not all weights are on one device, the name of each weight's. The gradients are then there, too.
        """

        def beside(place: int) -> contextlib.AbstractContextManager[Any]:
            return tf.device(devices[place]) if devices else contextlib.nullcontext()

        total: dict[int, tf.Tensor] = {}
        for place, gradient in zip(places, found, strict=True):
            if gradient is not None:
                with beside(place):
                    dense = tf.identity(gradient) if devices else tf.convert_to_tensor(gradient)
                    total[place] = total[place] + dense if place in total else dense
        self._reached = {*(self._reached or ()), *total, *elsewhere}  # those of any trace count
        for place, weight in enumerate(weights):
            if place not in total:
                with beside(place):
                    total[place] = tf.zeros_like(weight)
        return [total[place] for place in range(len(weights))]

    def confirm(self, reached: Iterable[int]) -> None:
        """Counts only these weights as reached. The gradients of others may be zeros: a program with several results
        gets zeros for those that the loss does not read.

        Args:
          reached: The indices of the weights that a gradient reaches in a trace of the whole model.
        """
        self._confirmed = {*(self._confirmed or ()), *reached}

    def indices(self, weights: Sequence[keras.Variable]) -> list[int]:
        """The indices of the weights that are not reached. Names them in the log, once.

        Args:
          weights: The model's trainable weights.

        Raises:
          ConfigError: None is reached.
        """
        if self._reached is None:
            return []
        reached = self._reached if self._confirmed is None else self._reached & self._confirmed
        found = [index for index in range(len(weights)) if index not in reached]
        if found and not reached:
            raise ConfigError(
                "the loss depends on no trainable weight of the model, so there is nothing to learn. Compute it from "
                "the model's outputs, with operations that have gradients (not argmax, round or .numpy())."
            )
        if found and not self._told:
            self._told = True
            names = [weights[index].path for index in found]
            _log.warning(
                "Gradients do not exist for variables %s when minimizing the loss. They stay as they are; set "
                "trainable=False if that is intended.",
                listed(names, _MOST_NAMES),
            )
        return found

    def left_out(self, gradients: Sequence[tf.Tensor], weights: Sequence[keras.Variable]) -> list[tf.Tensor | None]:
        """The gradients, None for each weight that is not reached. See `indices`."""
        without = {*self.indices(weights)}
        return [None if index in without else gradient for index, gradient in enumerate(gradients)]
