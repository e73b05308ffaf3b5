"""Sample inputs and generated text, for TensorBoard."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfpar import inputs
from tfpar.monitor.monitor import Monitor

import keras
import numpy as np
import tensorflow as tf

IMAGES = 16
PROMPT_TOKENS = 32
GENERATED_TOKENS = 96


def write_inputs(monitor: Monitor, source: inputs.AnySource) -> None:
    """Shows the first examples of a source: images as images, text as text. Chief only."""
    info = source.info
    count = min(IMAGES, info.num_examples)
    if count == 0 or isinstance(source, inputs.StreamSource):  # reading a stream would take examples out of it
        return
    if tf.nest.is_nested(info.input_spec):
        return  # which of several inputs to show is not known
    x, _, usable = inputs.fetch_with_mask(source, tf.range(count, dtype=tf.int64))
    shown = x.numpy()[usable.numpy()]  # what is wrong with the others is said when they are trained on
    if not len(shown):
        return
    if info.task == "language_model" and info.decode is not None:
        monitor.sample_text("inputs", "\n\n---\n\n".join(info.decode(row) for row in shown[:4]))
    elif info.input_spec.shape.rank == 3 and info.input_spec.shape[-1] in (1, 3, 4):
        monitor.images("training/inputs", shown)


def continues_text(source: inputs.AnySource) -> bool:
    """Whether a source has text that a language model can continue."""
    info = source.info
    if not isinstance(source, inputs.Source) or tf.nest.is_nested(info.input_spec):
        return False
    return info.task == "language_model" and info.decode is not None and info.num_examples > 0


@dataclasses.dataclass(frozen=True)
class Continuation:
    """What a language model made of the beginning of an example.

    Attributes:
      text: Prompt and continuation, divided by `|`; empty if there is none.
      problem: Why there is none, in one line; empty otherwise.
    """

    text: str
    problem: str = ""


def continue_first(
    sampler: TextSampler, params: Sequence[Any], state: Sequence[Any], source: inputs.AnySource, *, seed: int
) -> Continuation:
    """Lets a language model continue the beginning of a source's first example.

    Args:
      sampler: Of the model.
      params: Values of its trainable weights, in order, all on one device.
      state: Values of its other variables, in order.
      source: One that `continues_text`.
      seed: Seed of the draws.
    """
    info = source.info
    assert info.decode is not None
    assert isinstance(source, inputs.Source)
    x, _, _ = inputs.fetch_with_mask(source, tf.constant([0], tf.int64))
    prompt = x.numpy()[0][:PROMPT_TOKENS]
    try:
        generated = info.decode(sampler.generate(params, state, prompt, GENERATED_TOKENS, seed=seed))
    except FloatingPointError:
        generated = "(not finite)"
    except Exception as error:
        return Continuation("", f"no sample text: {type(error).__name__}: {error}")
    return Continuation(f"{info.decode(prompt)}|{generated}")


def write_continuation(monitor: Monitor, continuation: Continuation, step: int) -> None:
    """Records generated text in TensorBoard, or prints why there is none."""
    if continuation.problem:
        monitor.message(continuation.problem)
    else:
        monitor.sample_text("generated", continuation.text, step=step)


class TextSampler:
    """Samples tokens from a decoder-only language model. Its forward pass is traced once.

    Args:
      model: Maps int32 `[1, T]` to logits `[1, T, vocabulary]`, causally.
      jit_compile: Whether XLA compiles it.
    """

    def __init__(self, model: keras.Model, *, jit_compile: bool) -> None:
        self._model = model

        def forward(params: Any, state: Any, tokens: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
            logits, _ = model.stateless_call(params, state, tokens, training=False)
            # Not logits[0, position]: XLA takes what a slice begins at for a constant, and would compile for each.
            return tf.gather(logits[0], position)

        self.forward = tf.function(forward, autograph=False, jit_compile=jit_compile)

    def generate(
        self,
        params: Sequence[Any],
        state: Sequence[Any],
        prompt: np.ndarray,
        length: int,
        *,
        seed: int = 0,
        temperature: float = 0.8,
    ) -> np.ndarray:
        """Continues a prompt.

        Args:
          params: Values of the trainable weights, in order, all on one device.
          state: Values of the other variables, in order.
          prompt: Int `[P]`, P below T.
          length: Tokens to generate; ends earlier when the context of T tokens is full.
          seed: Seed of the draws.
          temperature: Divides the logits; below 1 sharpens.

        Returns:
          Int64 `[at most length]`.

        Raises:
          FloatingPointError: The model gives logits that are not finite, as after training has diverged.
        """
        context = int(self._model.inputs[0].shape[1])
        tokens = np.zeros([1, context], np.int32)
        position = min(len(prompt), context - 1)
        tokens[0, :position] = prompt[:position]
        generator = np.random.default_rng(seed)
        generated: list[int] = []
        while position < context and len(generated) < length:
            row = self.forward([*params], [*state], tf.constant(tokens), tf.constant(position - 1))
            logits = row.numpy().astype(np.float64)
            odds = np.exp((logits - logits.max()) / temperature)
            if not np.isfinite(odds.sum()):
                raise FloatingPointError("the model's logits are not finite")
            token = int(generator.choice(len(odds), p=odds / odds.sum()))
            tokens[0, position] = token
            generated.append(token)
            position += 1
        return np.asarray(generated, np.int64)
