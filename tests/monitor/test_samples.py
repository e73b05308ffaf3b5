"""Text that a language model continues, while it is trained."""

from __future__ import annotations

import functools
import logging
import re

import tfpar
from tfpar import models

import keras
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


class Characters:
    """A tokenizer that does not know its padding, and counts what it decodes."""

    vocab_size = 4

    def __init__(self):
        self.decoded = 0

    def encode(self, text):
        return ["-abc".index(letter) for letter in text]

    def decode(self, tokens):
        self.decoded += 1
        return "".join({1: "a", 2: "b", 3: "c"}[token] for token in tokens)


@pytest.mark.parametrize("records", [True, False])
def test_a_tokenizer_that_cannot_decode_padding_costs_only_the_sample(records, tmp_path, caplog):
    caplog.set_level(logging.INFO, "tfpar")
    tokenizer = Characters()
    train, validation = (
        tfpar.inputs.from_text(["abc", "cab"], tokenizer, sequence_length=8, split=split)
        for split in ("train", "validation")
    )

    def build():
        tokens = keras.Input((8,), dtype="int32")
        return keras.Model(tokens, keras.layers.Dense(4)(keras.layers.Embedding(4, 2)(tokens)))

    trainer = tfpar.Trainer(
        build,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy="one_device",
        jit_compile=False,
        global_batch_size=2,
        **({"workdir": str(tmp_path)} if records else {}),
    )
    assert trainer.fit(train, validation=validation, epochs=3)["steps"] == 3
    told = [each.getMessage() for each in caplog.records if "no sample text" in each.getMessage()]
    line = "no sample text: the tokenizer cannot decode its tokens (KeyError: 0)"
    assert told == ([line, line] if records else []), "one for the training examples, and one for the evaluations"
    assert bool(tokenizer.decoded) == records
