"""The training step with optimizer state on the host: part 5 of `TrainStep`, block by block.

The state of a block of weights is copied to the device once the previous block is updated, and the new state is copied
back, so that the device holds the state of one block at a time. (Ren et al. 2021, arXiv:2101.06840, update on the
host.)
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tfpar.optim.block_update import Block, apply_block, blocks_of
from tfpar.parallel import replica
from tfpar.parallel.compilation import compiled
from tfpar.training.objective import Tensors
from tfpar.training.step import TrainStep

import keras
import tensorflow as tf

BLOCK_BYTES = 64 << 20


class OffloadedStep(TrainStep):
    """A step that brings optimizer state from the host, and takes it back."""

    waits_for_host = True

    def _make_programs(self) -> None:
        super()._make_programs()
        self._updates = [self._apply_update]  # it reads variables of another device, which an XLA program cannot do
        blocks, self._common = blocks_of(self.optimizer, BLOCK_BYTES)
        compiles = self.plan.compiles_update
        self._blocks = [(block, compiled(functools.partial(self._updated_block, block), compiles)) for block in blocks]

    def _apply_update(self, reduced: Any) -> tf.Tensor:
        """Updates the variables, one block after the other; returns the factor when that is done."""
        model, variables = self.core.model, self.optimizer.variables
        weights = replica.own(model.trainable_variables)
        common = [_read(variables[index]) for index in self._common]
        new_common, done = common, list[Any]()
        for block, update in self._blocks:
            if all(reduced.gradients[index] is None for index in block.weights):
                continue  # the loss depends on none of them
            slots = [variables[index] for index in block.slots]
            with tf.control_dependencies(done):  # one block's state at a time
                state = [_read(slot) for slot in slots]
            values = [
                reduced.assigned[index] if index in reduced.assigned else weights[index].read_value()
                for index in block.weights
            ]
            gradients = [reduced.gradients[index] for index in block.weights]
            scalars = (reduced.factor, reduced.step, reduced.lr_multiplier)
            values, state, new_common = update(values, state, common, gradients, *scalars)  # the same in every block
            done += [*replica.assign([weights[index] for index in block.weights], values), *_store(slots, state)]
        new_state = self._without_seeds(self.sidecar.state(reduced.vector, reduced.state))
        with tf.control_dependencies(done):
            last = _store([variables[index] for index in self._common], new_common)
        with tf.control_dependencies([*done, *last, *replica.assign(replica.own(self._state), new_state)]):
            return tf.identity(reduced.factor)

    def _updated_block(
        self,
        block: Block,
        weights: Tensors,
        state: Tensors,
        common: Tensors,
        gradients: Sequence[tf.Tensor | None],
        factor: tf.Tensor,
        step: tf.Tensor,
        lr_multiplier: tf.Tensor,
    ) -> tuple[Tensors, Tensors, Tensors]:
        rate = self.learning_rate(step, lr_multiplier) if self._schedule is not None else None
        known = dict(zip([*block.slots, *self._common], [*state, *common], strict=True))
        mean = [None if gradient is None else gradient * factor for gradient in gradients]
        new, known = apply_block(self.optimizer, block.weights, known, weights, mean, rate)
        return new, [known[index] for index in block.slots], [known[index] for index in self._common]


def _read(variable: keras.Variable) -> tf.Tensor:
    with tf.device(variable.value.device):
        return variable.value.read_value()


def _store(variables: Sequence[keras.Variable], values: Tensors) -> list[Any]:
    stored = []
    for variable, value in zip(variables, values, strict=True):
        with tf.device(variable.value.device):
            stored.append(variable.value.assign(value, read_value=False))
    return stored
