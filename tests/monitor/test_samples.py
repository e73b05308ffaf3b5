"""Text that a language model continues, while it is trained."""

from __future__ import annotations

import functools
import re

import tfpar
from tfpar import models

import numpy as np
import pytest
import tensorflow as tf


@pytest.fixture(scope="module")
def trainer():
    task = models.TaskSpec("language_model", (16,), "int32", 32)
    return tfpar.Trainer(
        lambda: models.build("transformer_lm_tiny", task, depth=1, width=16, heads=2),
        loss="sparse_categorical_crossentropy",
        strategy="one_device",
        jit_compile=True,
        steps=1,
    )


def test_text_goes_on_until_the_context_is_full(trainer):
    prompt = np.arange(5)
    program = trainer.program
    weights = [program.first_copies(group) for group in (program.eval_weights(), program.model.non_trainable_variables)]
    generate = functools.partial(program.text_sampler.generate, *weights, prompt)
    first = generate(100, seed=1)
    assert first.shape == (11,)
    assert ((first >= 0) & (first < 32)).all()
    np.testing.assert_array_equal(generate(100, seed=1), first)
    assert generate(3, seed=1).tolist() == first[:3].tolist()


def test_one_program_serves_every_position(trainer):
    # Were the position a constant for XLA, as it is where it begins a slice, each token would cost a compilation.
    weights = [variable.value for variable in trainer.model.trainable_variables]
    state = [variable.value for variable in trainer.model.non_trainable_variables]
    arguments = (weights, state, tf.zeros([1, 16], tf.int32), tf.constant(3))
    program = trainer.program.text_sampler.forward.experimental_get_compiler_ir(*arguments)(stage="hlo")
    used = set(re.findall(r"parameter\((\d+)\)", program.split("ENTRY")[1]))
    assert len(used) == len(tf.nest.flatten(arguments))
