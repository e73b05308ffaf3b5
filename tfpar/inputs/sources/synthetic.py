"""`synthetic:SHAPE`: generated, learnable examples, for benchmarks and smoke tests.

Every example is a pure function of (seed, split, index), computed in the graph from two small tables.
"""

from __future__ import annotations

import re

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import permutation, source
from tfpar.inputs.source import Source, SourceInfo

import numpy as np
import tensorflow as tf

DEFAULT_CLASSES = 10
DEFAULT_EXAMPLES = 10_000
DEFAULT_VOCABULARY = 256
_SPEC = re.compile(r"(?P<shape>tokens|\d+(x\d+)*)(:(?P<classes>\d+))?(:(?P<examples>\d+))?")
# Tables are read in rows of 64 floats: copying a row costs little more than looking it up.
_BLOCK = 64
_ROWS = 1 << 14
# Odd, so that the patterns of up to _ROWS classes start at different rows.
_CLASS_STEP = 10_139
_STRIDES = 7


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=synthetic:SHAPE[:CLASSES[:EXAMPLES]]`, e.g. `32x32x3`, `32x32x3:100`, `tokens:50257`.

    A shape gives float32 [SHAPE] in [0, 1]: a fixed smooth pattern per class, plus noise of the
    same size; 10 classes by default. `tokens` gives int32 [sequence_length]: the arithmetic
    progressions t -> start + t * stride modulo the vocabulary (CLASSES, 256 by default) with
    strides of 1 to 7, so the second token determines the rest. There are 10,000 training examples
    by default, and a tenth as many for validation; the two splits share patterns, not noise.

    Args:
      argument: The text after `synthetic:`.
      config: The input options; tokens use `sequence_length`.
      split: `"train"` or `"validation"`.
      seed: Seed of the data.

    Raises:
      ConfigError: The argument does not have this form.
    """
    match = _SPEC.fullmatch(argument)
    shape = [int(size) for size in match["shape"].split("x")] if match and match["shape"] != "tokens" else []
    tokens = match is not None and match["shape"] == "tokens"
    classes = int(match["classes"] or (DEFAULT_VOCABULARY if tokens else DEFAULT_CLASSES)) if match else 0
    examples = int(match["examples"] or DEFAULT_EXAMPLES) if match else 0
    if not match or 0 in shape or classes < 2 or not examples:
        raise ConfigError(
            f"--dataset='synthetic:{argument}' is not synthetic:SHAPE[:CLASSES[:EXAMPLES]] with positive sizes and at "
            "least 2 classes. Write e.g. --dataset=synthetic:32x32x3, synthetic:224x224x3:1000:50000 or "
            "synthetic:tokens:50257."
        )
    offset = 0 if split == "train" else examples
    count = examples if split == "train" else max(1, examples // 10)
    name = f"synthetic:{argument}"
    if tokens:
        return _tokens(name, split, config.sequence_length, classes, offset, count, seed)
    return _patterns(name, split, shape, classes, offset, count, seed)


def _patterns(name: str, split: str, shape: list[int], classes: int, offset: int, count: int, seed: int) -> Source:
    size = int(np.prod(shape))
    blocks = -(-size // _BLOCK)

    # An example reads `blocks` rows from one of _ROWS starts, so no table grows with the classes or examples.
    def make_tables() -> tuple[np.ndarray, np.ndarray]:
        generator = np.random.Generator(np.random.Philox(permutation.mix64(seed)))
        values = generator.uniform(-1.0, 1.0, (_ROWS + blocks) * _BLOCK)
        signal = _table(_smooth(values, max(1, int(np.prod(shape[1:])) // 2)))
        return signal, _table(generator.uniform(-1.0, 1.0, (_ROWS + blocks) * _BLOCK))

    tables = source.LazyTensors(make_tables)

    def read(indices: tf.Tensor) -> source.Batch:
        signal, noise = tables.tensors()
        scattered = _scatter(indices + offset, seed)
        labels = scattered % classes
        along = tf.range(blocks, dtype=tf.int64)
        pattern = tf.gather(signal, (labels * _CLASS_STEP % _ROWS)[:, tf.newaxis] + along)
        disturbance = tf.gather(noise, (scattered // classes % _ROWS)[:, tf.newaxis] + along)
        x = tf.reshape(0.5 + 0.25 * (pattern + disturbance), [-1, blocks * _BLOCK])[:, :size]
        return _with_rows((tf.reshape(x, [-1, *shape]), tf.cast(labels, tf.int32)), indices)

    info = SourceInfo(
        name=name,
        task=source.CLASSIFICATION,
        split=split,
        num_examples=count,
        input_spec=tf.TensorSpec(shape, tf.float32),
        label_spec=tf.TensorSpec([], tf.int32),
        num_classes=classes,
        storage="generated",
    )
    return Source(info=info, read=read, kept_bytes=2 * 4 * (_ROWS + blocks) * _BLOCK, load=tables.tensors)


def _tokens(name: str, split: str, length: int, vocabulary: int, offset: int, count: int, seed: int) -> Source:
    def read(indices: tf.Tensor) -> source.Batch:
        scattered = _scatter(indices + offset, seed)
        stride = scattered % _STRIDES + 1
        start = (scattered // _STRIDES) % vocabulary
        along = tf.range(length + 1, dtype=tf.int64)
        tokens = tf.cast((start[:, tf.newaxis] + stride[:, tf.newaxis] * along) % vocabulary, tf.int32)
        return _with_rows((tokens[:, :-1], tokens[:, 1:]), indices)

    info = SourceInfo(
        name=name,
        task=source.LANGUAGE_MODEL,
        split=split,
        num_examples=count,
        input_spec=tf.TensorSpec([length], tf.int32),
        label_spec=tf.TensorSpec([length], tf.int32),
        num_classes=vocabulary,
        storage="generated",
        decode=lambda tokens: " ".join(str(token) for token in np.asarray(tokens).reshape(-1).tolist()),
    )
    return Source(info=info, read=read)


def _table(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).reshape(-1, _BLOCK)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Returns the moving average over `window` values, scaled to [-1, 1]."""
    sums = np.cumsum(np.concatenate([values[-window:], values]))
    means = sums[window:] - sums[:-window]
    return means / np.abs(means).max()


def _scatter(values: tf.Tensor, seed: int) -> tf.Tensor:
    """Hashes int64 values to independent-looking 62-bit integers, int64."""
    key = tf.constant(permutation.mix64(seed), tf.uint64)
    hashed = permutation.hash64(permutation.hash64(tf.cast(values, tf.uint64) + key))
    return tf.cast(tf.bitwise.right_shift(hashed, tf.constant(2, tf.uint64)), tf.int64)


def _with_rows(batch: source.Batch, indices: tf.Tensor) -> source.Batch:
    x, y = batch
    rows = indices.shape[:1]
    return tf.ensure_shape(x, rows + x.shape[1:]), tf.ensure_shape(y, rows + y.shape[1:])
