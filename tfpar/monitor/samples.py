"""Sample inputs and generated text, for TensorBoard."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfpar import inputs
from tfpar.monitor import figures
from tfpar.monitor.monitor import Monitor
from tfpar.monitor.tensorboard import displayable
from tfpar.parallel.split import scope_of_values

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
    # Reading a stream would take examples out of it.
    if not monitor.records or count == 0 or not isinstance(source, inputs.Source):
        return
    if tf.nest.is_nested(info.input_spec):
        return  # which of several inputs to show is not known
    x, y, usable = inputs.fetch_with_mask(source, tf.range(count, dtype=tf.int64))
    shown = x.numpy()[usable.numpy()]  # errors in the others are reported when training reads them
    if not len(shown):
        return
    if info.task == "language_model" and info.decode is not None:
        try:
            text = "\n\n---\n\n".join(info.decode(row) for row in shown[:4])
        except Exception as error:  # of a tokenizer that, for example, does not know the padding
            monitor.message(_problem(error))
        else:
            monitor.sample_text("inputs", text)
    elif _has_images(info):
        classes = _classes(info, y)
        captions = [""] * len(shown)
        if classes is not None:
            captions = [class_name(info, label) for label in classes[usable.numpy()]]
        monitor.images("training/inputs", figures.sheet(displayable(shown), captions))


def _problem(error: Exception) -> str:
    return f"no sample text: the tokenizer cannot decode its tokens ({type(error).__name__}: {error})"


def write_predictions(
    monitor: Monitor, source: inputs.AnySource, predict: Callable[[tf.Tensor], Any], step: int
) -> None:
    """Shows the first examples of a source, if they are images, with their labels and a classifier's predictions.

    Args:
      monitor: Of the run.
      source: The validation examples.
      predict: `inputs [n, ...] -> outputs`, on this process alone.
      step: Finished steps.
    """
    info = source.info
    if not isinstance(source, inputs.Source) or not shows_predictions(source):
        return
    x, y, usable = inputs.fetch_with_mask(source, tf.range(min(IMAGES, info.num_examples), dtype=tf.int64))
    kept, labels = usable.numpy(), _classes(info, y)
    outputs = predict(x)
    if (
        labels is None
        or not kept.any()
        or not tf.is_tensor(outputs)
        or outputs.shape.as_list()[1:] != [info.num_classes]
    ):
        return
    predictions, labels = np.argmax(outputs.numpy(), axis=-1)[kept], labels[kept]
    captions = [
        class_name(info, label)
        if label == prediction
        else f"{class_name(info, prediction)}, not {class_name(info, label)}"
        for label, prediction in zip(labels, predictions, strict=True)
    ]
    picture = figures.sheet(displayable(x.numpy()[kept]), captions, wrong=list(labels != predictions))
    monitor.images("validation/predictions", picture, step=step, run="eval")


def write_made(monitor: Monitor, source: inputs.MadeSource, step: int) -> None:
    """Shows examples that a step created, such as an episode.

    Args:
      monitor: Of the run.
      source: What is made.
      step: Finished steps.
    """
    shown = source.show()
    if shown is not None:
        monitor.images("validation/episode", figures.sheet(*shown), step=step, run="eval")


def write_confusion(monitor: Monitor, source: inputs.AnySource, counts: np.ndarray, step: int) -> None:
    """Shows which classes a classifier takes for which.

    Args:
      monitor: Of the run.
      source: The examples.
      counts: `[C, C]` examples by class and prediction.
      step: Finished steps.
    """
    names = [class_name(source.info, label) for label in range(len(counts))]
    picture = figures.confusion_matrix(counts, names)
    monitor.images("validation/confusion_matrix", picture, step=step, run="eval")


def shows_predictions(source: inputs.AnySource) -> bool:
    """Whether a source has images of classes that can be read again."""
    info = source.info
    return (
        isinstance(source, inputs.Source)
        and not tf.nest.is_nested(info.input_spec)
        and not tf.nest.is_nested(info.label_spec)
        and info.num_examples > 0
        and info.num_classes > 1
        and info.task == "classification"
        and _has_images(info)
    )


def class_name(info: inputs.SourceInfo, label: int) -> str:
    """The name of a class, or its number."""
    return info.class_names[label] if 0 <= label < len(info.class_names) else str(label)


def _has_images(info: inputs.SourceInfo) -> bool:
    return info.input_spec.shape.rank == 3 and info.input_spec.shape[-1] in (1, 3, 4)


def _classes(info: inputs.SourceInfo, y: Any) -> np.ndarray | None:
    """The class numbers [n] of labels, which may be one-hot; None for other labels."""
    y = y.y if isinstance(y, inputs.Weighted) else y
    if tf.nest.is_nested(y) or info.num_classes < 2:
        return None
    values = y.numpy()
    if values.ndim == 1 and np.issubdtype(values.dtype, np.integer):
        return values
    return np.argmax(values, axis=-1) if values.ndim == 2 and values.shape[-1] == info.num_classes else None


def continues_text(source: inputs.AnySource) -> bool:
    """Whether a source has text that a language model can continue."""
    info = source.info
    if not isinstance(source, inputs.Source) or tf.nest.is_nested(info.input_spec):
        return False
    return info.task == "language_model" and info.decode is not None and info.num_examples > 0


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A language model's continuation of the beginning of an example.

    Attributes:
      text: Prompt and continuation, divided by `|`; empty if there is none.
      problem: Why there is none, in one line; empty if there is one, or if the sampler has told it before.
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
    generated: np.ndarray | None = None
    try:
        generated = sampler.generate(params, state, prompt, GENERATED_TOKENS, seed=seed)
    except FloatingPointError:
        pass
    except Exception as error:
        return Continuation("", sampler.told_once(f"no sample text: {type(error).__name__}: {error}"))
    try:
        text = "(not finite)" if generated is None else info.decode(generated)
        return Continuation(f"{info.decode(prompt)}|{text}")
    except Exception as error:
        return Continuation("", sampler.told_once(_problem(error)))


def write_continuation(monitor: Monitor, continuation: Continuation, step: int) -> None:
    """Records generated text in TensorBoard, or prints why there is none."""
    if continuation.problem:
        monitor.message(continuation.problem)
    elif continuation.text:
        monitor.sample_text("generated", continuation.text, step=step)


class TextSampler:
    """Samples tokens from a decoder-only language model. Its forward pass is traced once.

    Args:
      model: Maps int32 `[1, T]` to logits `[1, T, vocabulary]`, causally.
      jit_compile: Whether XLA compiles it.
    """

    def __init__(self, model: keras.Model, *, jit_compile: bool) -> None:
        self._model = model
        self._told: set[str] = set()

        def forward(params: Any, state: Any, tokens: tf.Tensor, position: tf.Tensor) -> tf.Tensor:
            with scope_of_values([*model.trainable_variables, *model.non_trainable_variables], [*params, *state]):
                logits = model(tokens, training=False)
            # Not logits[0, position]: XLA treats the start of a slice as a constant, and would compile for each
            # position.
            return tf.gather(logits[0], position)

        self.forward = tf.function(forward, autograph=False, jit_compile=jit_compile)

    def told_once(self, problem: str) -> str:
        """Returns a problem, or nothing if it has been returned before: each evaluation meets it again."""
        if problem in self._told:
            return ""
        self._told.add(problem)
        return problem

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
