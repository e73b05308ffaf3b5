"""Sample inputs and generated text, for TensorBoard."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from tfpar import inputs
from tfpar.monitor.monitor import Monitor

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from tfpar.training.trainer import Trainer

IMAGES = 16
PROMPT_TOKENS = 32
GENERATED_TOKENS = 96


def write_inputs(monitor: Monitor, source: inputs.Source) -> None:
    """Shows the first examples of a source: images as images, text as text. Chief only."""
    info = source.info
    count = min(IMAGES, info.num_examples)
    if count == 0:
        return
    x, _, usable = inputs.fetch_with_mask(source, tf.range(count, dtype=tf.int64))
    shown = x.numpy()[usable.numpy()]  # what is wrong with the others is said when they are trained on
    if not len(shown):
        return
    if info.task == "language_model" and info.decode is not None:
        monitor.sample_text("inputs", "\n\n---\n\n".join(info.decode(row) for row in shown[:4]))
    elif info.input_spec.shape.rank == 3 and info.input_spec.shape[-1] in (1, 3, 4):
        monitor.images("inputs", shown)


def write_text(monitor: Monitor, trainer: Trainer, source: inputs.Source, step: int) -> None:
    """Lets a language model continue the beginning of the first held-out example. Chief only; nothing otherwise."""
    info = source.info
    if not trainer.topology.is_chief or info.task != "language_model" or info.decode is None or not info.num_examples:
        return
    x, _, _ = inputs.fetch_with_mask(source, tf.constant([0], tf.int64))
    prompt = x.numpy()[0][:PROMPT_TOKENS]
    try:
        generated = info.decode(generate(trainer, prompt, GENERATED_TOKENS, seed=step))
    except FloatingPointError:
        generated = "(not finite)"
    except Exception as error:
        monitor.message(f"no sample text: {type(error).__name__}: {error}")
        return
    monitor.sample_text("generated", f"{info.decode(prompt)}|{generated}", step=step)


def generate(
    trainer: Trainer, prompt: np.ndarray, length: int, *, seed: int = 0, temperature: float = 0.8
) -> np.ndarray:
    """Samples tokens from a decoder-only language model.

    Args:
      trainer: A trainer of a model that maps int32 `[1, T]` to logits `[1, T, vocabulary]`, causally.
      prompt: Int `[P]`, P below T.
      length: Tokens to generate; ends earlier when the context of T tokens is full.
      seed: Seed of the draws.
      temperature: Divides the logits; below 1 sharpens.

    Returns:
      Int64 `[at most length]`.

    Raises:
      FloatingPointError: The model gives logits that are not finite, as after training has diverged.
    """
    context = int(trainer.model.inputs[0].shape[1])
    tokens = np.zeros([1, context], np.int32)
    position = min(len(prompt), context - 1)
    tokens[0, :position] = prompt[:position]
    local = trainer.strategy.experimental_local_results
    # This runs on the chief alone, so it must not touch the other replicas: its own copies, as tensors.
    params = [local(variable.value)[0].read_value() for variable in trainer.evaluated_weights()]
    state = [local(variable.value)[0].read_value() for variable in trainer.model.non_trainable_variables]
    forward = _forward(trainer)
    generator = np.random.default_rng(seed)
    generated: list[int] = []
    while position < context and len(generated) < length:
        logits = forward(params, state, tf.constant(tokens), tf.constant(position - 1)).numpy().astype(np.float64)
        odds = np.exp((logits - logits.max()) / temperature)
        if not np.isfinite(odds.sum()):
            raise FloatingPointError("the model's logits are not finite")
        token = int(generator.choice(len(odds), p=odds / odds.sum()))
        tokens[0, position] = token
        generated.append(token)
        position += 1
    return np.asarray(generated, np.int64)


# Traced once a trainer, and no longer there than it is. The functions know the model, never the trainer.
_FORWARD: weakref.WeakKeyDictionary[Trainer, tf.types.experimental.GenericFunction] = weakref.WeakKeyDictionary()


def _forward(trainer: Trainer) -> tf.types.experimental.GenericFunction:
    if trainer in _FORWARD:
        return _FORWARD[trainer]
    model = trainer.model

    @tf.function(autograph=False, jit_compile=trainer.jit_compile)
    def forward(params: list[tf.Tensor], state: list[tf.Tensor], tokens: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
        logits, _ = model.stateless_call(params, state, tokens, training=False)
        # Not logits[0, position]: XLA takes what a slice begins at for a constant, and would compile anew for each.
        return tf.gather(logits[0], position)

    _FORWARD[trainer] = forward
    return forward
