"""The values that a model must have on every worker before the first step, as digests."""

from __future__ import annotations

from tfpar.checkpoint import run_state
from tfpar.parallel.held import held_by
from tfpar.parallel.split import copies_of, split_of, whole_tensor
from tfpar.training.model.adapting import all_weights, frozen_weights
from tfpar.training.sidecar import Sidecar

import keras


def starting_digests(model: keras.Model, *, parts_on_workers: bool) -> list[list[str]]:
    """Path and SHA-256 of each weight, and of each state that replicas average, in the order of the model.

    Seed states and counters are left out, which differ between workers if `fit` is called again. Nothing is sent.

    Args:
      model: The model, under the strategy.
      parts_on_workers: Whether no worker has all weights. Then only weights that every worker has whole are included.
    """
    variables = all_weights(model)
    if parts_on_workers:
        variables = [each for each in variables if split_of(each) is None and held_by(each) is None]
    else:
        others = model.non_trainable_variables
        two = Sidecar.of(others, [], 2, frozen_weights(model))  # as for two replicas, even if there is one
        variables += [each for each, is_averaged in zip(others, two.averaged, strict=True) if is_averaged]
    return [[each.path, _digest(each)] for each in variables]


def _digest(variable: keras.Variable) -> str:
    value = whole_tensor(variable, copies_of(variable)[0]).numpy()
    return run_state.sha256_of_blocks([(variable.path, [value])])
