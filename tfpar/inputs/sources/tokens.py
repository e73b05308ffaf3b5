"""Documents as tokens of any tokenizer, in windows for a language model, with a weight for every position.

A window holds `sequence_length + 1` tokens: a model reads all but the last and predicts all but the first. A position
has weight 0 if the token that it predicts is padding or belongs to another document. Windows of one document overlap by
one token, so that every token of a document except the first is predicted exactly once.
"""

from __future__ import annotations

import bisect
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfpar.config import ConfigError, unknown_name
from tfpar.inputs.source import LANGUAGE_MODEL, Batch, LazyTensors, Source, SourceInfo, Weighted
from tfpar.inputs.sources import text

import numpy as np
import tensorflow as tf

PACKINGS = ("none", "fit", "join")
_ENCODERS = ("encode", "tokenize")  # in this order: a tokenizer of transformers tokenizes to strings
_DECODERS = ("detokenize", "decode")
_SIZES = ("vocabulary_size", "vocab_size", "get_vocab_size", "get_piece_size")
_Window = list[np.ndarray]


def from_text(
    documents: str | Iterable[str],
    tokenizer: Any,
    *,
    sequence_length: int = 128,
    packing: str = "none",
    end_token: int | None = None,
    pad_token: int = 0,
    vocabulary_size: int | None = None,
    segment_ids: bool = False,
    split: str = "train",
    name: str = "tokens",
) -> Source:
    """Returns a source of language-model windows over tokenized documents, kept in memory.

    Args:
      documents: Texts, one per document; or a file, directory or pattern, of which every file is a document in UTF-8.
      tokenizer: Returns the token ids of a string: a callable, or an object with `encode` (SentencePiece, Hugging Face)
        or `tokenize` (keras-hub). Its `detokenize` or `decode`, if there is one, turns generated tokens into text.
      sequence_length: L, the tokens that a model reads and predicts per window.
      packing: `"none"`: a window holds one document, or a part of one, and padding. `"fit"`: it holds as many whole
        documents as fit. `"join"`: documents follow each other without a gap and are cut where a window ends.
      end_token: Put after each document, or None.
      pad_token: Fills the rest of a window.
      vocabulary_size: By default the tokenizer's own, or the largest token plus one if it has none.
      segment_ids: Whether the inputs are `{"token_ids", "segment_ids"}` instead of the tokens alone: segments number
        the documents of a window from 1, and 0 is padding, for models that keep attention within a document.
      split: `"train"` or `"validation"`, for reports.
      name: For reports and errors.

    Returns:
      A source of windows: int32 tokens `[L]`, and labels `[L]` with sample weights `[L]` (`Weighted`).

    Raises:
      ConfigError: No file matches, the tokenizer cannot be used or does not return token ids, a token is outside the
        vocabulary, or an argument is out of range.
    """
    if packing not in PACKINGS:
        raise unknown_name("packing", packing, PACKINGS)
    if sequence_length < 1:
        raise ConfigError(f"{name}: sequence_length={sequence_length} must be at least 1.")
    tokens = _tokenize(name, _documents(name, documents), tokenizer, end_token)
    size = _vocabulary_size(name, tokenizer, vocabulary_size, tokens, (end_token, pad_token))
    windows = _windows(tokens, sequence_length + 1, packing)
    ids, segments = _matrices(windows, sequence_length + 1, pad_token, np.uint16 if size <= 1 << 16 else np.int32)
    return _source(name, split, ids, segments, size, _decoder(tokenizer), segment_ids)


def _source(
    name: str,
    split: str,
    ids: np.ndarray,
    segments: np.ndarray,
    vocabulary_size: int,
    decode: Callable[[np.ndarray], str] | None,
    segment_ids: bool,
) -> Source:
    """Returns the source of windows, from their tokens and segments [n, L + 1]."""
    spec = tf.TensorSpec([ids.shape[1] - 1], tf.int32)
    content = hashlib.blake2b(ids.tobytes() + segments.tobytes(), digest_size=16)
    info = SourceInfo(
        name=name,
        task=LANGUAGE_MODEL,
        split=split,
        num_examples=len(ids),
        input_spec={"token_ids": spec, "segment_ids": spec} if segment_ids else spec,
        label_spec=spec,
        weight_spec=tf.TensorSpec(spec.shape, tf.float32),
        num_classes=vocabulary_size,
        storage="memory",
        decode=decode,
        digest=content.hexdigest(),
    )
    kept = LazyTensors(lambda: (ids, segments))

    def read(indices: tf.Tensor) -> Batch:
        window, segment = (tf.gather(values, indices) for values in kept.tensors())
        # 1 if the next token belongs to the same document; padding (0) after padding has weight 0.
        same = (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] > 0)
        x = window[:, :-1]
        y = Weighted(window[:, 1:], tf.cast(same, tf.float32))
        return ({"token_ids": x, "segment_ids": segment[:, :-1]} if segment_ids else x), y

    return Source(info=info, read=read, kept_bytes=ids.nbytes + segments.nbytes, load=kept.tensors)


def _documents(name: str, documents: str | Iterable[str]) -> Iterable[str]:
    if not isinstance(documents, (str, os.PathLike)):
        return documents
    root, names = text.list_files(os.fspath(documents), name)
    contents = (text.read_file(os.path.join(root, file), name) for file in names)
    return (content.decode("utf-8", errors="replace") for content in contents)


def _tokenize(name: str, documents: Iterable[str], tokenizer: Any, end_token: int | None) -> list[np.ndarray]:
    """Returns the token ids of every document that has some, int64 [n] each."""
    encode = _encoder(name, tokenizer)
    tokens = []
    for number, document in enumerate(documents):
        if not isinstance(document, str):
            raise ConfigError(f"{name}: document {number} is {type(document).__name__}, but must be a str.")
        encoded = encode(document)
        ids = np.asarray(getattr(encoded, "ids", encoded))
        if not ids.size:
            continue
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ConfigError(
                f"{name}: the tokenizer returned {ids.dtype} {list(ids.shape)} for document {number}, but must return "
                "a list of integers for a string. Configure it to return token ids."
            )
        tokens.append(np.append(ids, end_token if end_token is not None else []).astype(np.int64))
    return tokens


def _encoder(name: str, tokenizer: Any) -> Callable[[str], Any]:
    method = next((getattr(tokenizer, each) for each in _ENCODERS if hasattr(tokenizer, each)), None)
    if method is None and callable(tokenizer):
        method = tokenizer
    if method is None:
        raise ConfigError(
            f"{name}: tokenizer={type(tokenizer).__name__} is neither callable nor has one of the methods "
            f"{', '.join(_ENCODERS)}. Give a function from a string to token ids."
        )
    return method


def _decoder(tokenizer: Any) -> Callable[[np.ndarray], str] | None:
    method = next((getattr(tokenizer, each) for each in _DECODERS if hasattr(tokenizer, each)), None)
    if method is None:
        return None

    def decode(tokens: np.ndarray) -> str:
        decoded = method(np.asarray(tokens).ravel().tolist())
        if hasattr(decoded, "numpy"):
            decoded = decoded.numpy()
        return decoded.decode("utf-8", errors="replace") if isinstance(decoded, bytes) else str(decoded)

    return decode


def _vocabulary_size(
    name: str, tokenizer: Any, given: int | None, tokens: Sequence[np.ndarray], others: Sequence[int | None]
) -> int:
    """Returns the size of the vocabulary; refuses tokens outside it."""
    low = min([0, *(int(ids.min()) for ids in tokens), *(token for token in others if token is not None)])
    high = max([0, *(int(ids.max()) for ids in tokens), *(token for token in others if token is not None)])
    size = given
    if size is None:
        stated = next((getattr(tokenizer, each) for each in _SIZES if hasattr(tokenizer, each)), None)
        size = stated() if callable(stated) else stated
    size = high + 1 if size is None else int(size)
    if low < 0 or high >= size:
        raise ConfigError(
            f"{name}: token {low if low < 0 else high} is outside the vocabulary of {size} tokens (0 to {size - 1}). "
            "Correct vocabulary_size, end_token or pad_token, or use the tokenizer that belongs to the vocabulary."
        )
    return size


def _windows(tokens: Sequence[np.ndarray], slots: int, packing: str) -> list[_Window]:
    """Returns the documents, or parts of them, of each window of `slots` tokens."""
    if packing == "join":
        return _joined(tokens, slots)
    parts = [ids[start : start + slots] for ids in tokens for start in range(0, max(len(ids) - 1, 1), slots - 1)]
    parts = [part for part in parts if len(part) > 1]  # a single token predicts nothing
    return [[part] for part in parts] if packing == "none" else _fitted(parts, slots)


def _joined(tokens: Sequence[np.ndarray], slots: int) -> list[_Window]:
    ends = np.cumsum([len(ids) for ids in tokens])
    total = int(ends[-1]) if len(tokens) else 0
    windows = []
    for start in range(0, max(total - 1, 0), slots - 1):
        stop = min(start + slots, total)
        first, last = (int(np.searchsorted(ends, position, side="right")) for position in (start, stop - 1))
        window = []
        for number in range(first, last + 1):
            offset = int(ends[number]) - len(tokens[number])
            window.append(tokens[number][max(start - offset, 0) : stop - offset])
        windows.append(window)
    return windows


def _fitted(parts: Sequence[np.ndarray], slots: int) -> list[_Window]:
    """Best fit, longest first: each part goes into the window whose free space it fills best."""
    windows: list[_Window] = []
    free: list[tuple[int, int]] = []  # free slots and number of each window that has any, sorted
    for part in sorted(parts, key=len, reverse=True):
        place = bisect.bisect_left(free, (len(part), -1))
        space, number = free.pop(place) if place < len(free) else (slots, len(windows))
        if number == len(windows):
            windows.append([])
        windows[number].append(part)
        if space - len(part) > 1:
            bisect.insort(free, (space - len(part), number))
    return windows


def _matrices(windows: Sequence[_Window], slots: int, pad_token: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tokens and the segments of windows, [n, slots] each."""
    most = max((len(window) for window in windows), default=0)
    ids: np.ndarray = np.full((len(windows), slots), pad_token, dtype)
    segments = np.zeros((len(windows), slots), np.uint8 if most < 256 else np.int32)
    for row, window in enumerate(windows):
        position = 0
        for number, part in enumerate(window, start=1):
            ids[row, position : position + len(part)] = part
            segments[row, position : position + len(part)] = number
            position += len(part)
    return ids, segments
