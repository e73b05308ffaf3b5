"""`text[:PATH]`: byte-level language modelling over files.

The files of a split are joined, a zero byte after each, into one buffer of bytes. Example i is
the window that predicts bytes `[i * L + 1, (i + 1) * L]` from the preceding bytes, where L is
`--sequence_length`. Windows advance by L, so an epoch predicts each byte exactly once, and a loss
per token is a loss per byte. A window belongs to the file in which it starts.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Sequence

from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import source
from tfpar.inputs.folders import files_below
from tfpar.inputs.source import Source, SourceInfo
from tfpar.process.writable import read_error

import numpy as np
import tensorflow as tf

_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
VOCABULARY = 256


def build(argument: str, config: InputConfig, split: str, seed: int) -> Source:
    """`--dataset=text[:PATH]`: inputs are int32 [sequence_length] byte values, labels the same shifted by one.

    Whole files are held out for validation: the `--validation_fraction` of them whose relative
    paths hash lowest, but at least one. With a single file, the last fraction of its bytes is held
    out.

    Args:
      argument: A file, a directory (all files below it that are not hidden) or a glob pattern.
        Empty: the `.py` sources of the installed Python standard library, without its tests.
      config: The input options; uses `sequence_length` and `validation_fraction`.
      split: `"train"` or `"validation"`.
      seed: Not used; the split does not depend on it.

    Raises:
      ConfigError: No file matches, or none can be seen.
    """
    root, names = _standard_library() if not argument else list_files(argument)
    name = f"text:{argument}" if argument else "text"
    training = split == "train"
    if len(names) == 1:
        content = read_file(os.path.join(root, names[0]))
        boundary = len(content) - round(len(content) * config.validation_fraction)
        content = content[:boundary] if training else content[boundary:]
        return windows(name, [(os.path.join(root, names[0]), content)], config.sequence_length, split)
    count = round(len(names) * config.validation_fraction)
    if config.validation_fraction > 0:
        count = min(max(count, 1), len(names) - 1)
    chosen = source.held_out_mask(names, count)
    paths = [os.path.join(root, file) for file, held in zip(names, chosen, strict=True) if held != training]
    return windows(name, [(path, read_file(path)) for path in paths], config.sequence_length, split)


def windows(
    name: str, documents: Sequence[tuple[str, bytes]], length: int, split: str, *, named_files: bool = True
) -> Source:
    """Returns a source of language-model windows over documents.

    Args:
      name: The source in the notation of `--dataset`.
      documents: (file name, content) in order.
      length: Number of bytes that an example predicts.
      split: `"train"` or `"validation"`.
      named_files: Whether the documents are files, which can be distributed over the workers.
    """
    ends = np.cumsum([len(content) + 1 for _, content in documents], dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    joined = b"\0".join(content for _, content in documents) + b"\0"
    buffer = source.LazyTensors(lambda: [np.frombuffer(joined, np.uint8)])
    count = max(0, (total - 1) // length)
    file_of_window = np.searchsorted(ends, np.arange(count, dtype=np.int64) * length, side="right")
    per_file = np.bincount(file_of_window, minlength=len(documents)) if count else np.zeros(len(documents), np.int64)
    info = SourceInfo(
        name=name,
        task=source.LANGUAGE_MODEL,
        split=split,
        num_examples=count,
        input_spec=tf.TensorSpec([length], tf.int32),
        label_spec=tf.TensorSpec([length], tf.int32),
        num_classes=VOCABULARY,
        files=tuple(path for path, _ in documents) if named_files else (),
        records_per_file=tuple(per_file.tolist()) if named_files else (),
        storage="memory",
        decode=source.decode_bytes,
    )

    def read(indices: tf.Tensor) -> source.Batch:
        positions = indices[:, tf.newaxis] * length + tf.range(length + 1, dtype=tf.int64)
        window = tf.gather(buffer.tensors()[0], positions)
        return window[:, :-1], window[:, 1:]

    return Source(info=info, read=read, kept_bytes=len(joined), load=buffer.tensors)


def _standard_library() -> tuple[str, list[str]]:
    root = sysconfig.get_path("stdlib")
    names = [
        name
        for name in files_below(root, "--dataset=text")
        if name.endswith(".py") and not _NOT_STDLIB.intersection(name.split("/")) and not name.startswith("config-")
    ]
    if not names:
        raise ConfigError(
            f"--dataset=text: the standard library's sources are not in {root!r} (a stripped installation?). "
            "Give other files: --dataset=text:PATH."
        )
    return root, names


def list_files(argument: str, name: str = "") -> tuple[str, list[str]]:
    """Returns a root directory and the sorted file names below it, with `/` between folders.

    Args:
      argument: A file, a directory (all files below it that are not hidden) or a glob pattern.
      name: The data set, for errors; by default that of `--dataset=text:`.

    Raises:
      ConfigError: No file matches.
    """
    path = os.path.expanduser(argument)
    if os.path.isfile(path):
        return os.path.dirname(path), [os.path.basename(path)]
    if os.path.isdir(path):
        root, names = path, files_below(path, name or f"--dataset=text:{argument}")
    else:
        paths = [match for match in glob.glob(path, recursive=True) if os.path.isfile(match)]
        root = path
        while glob.has_magic(root):
            root = os.path.dirname(root)
        names = sorted(os.path.relpath(match, root or ".").replace(os.sep, "/") for match in paths)
    if not names:
        if error := read_error(path):
            raise ConfigError(
                f"{name or f'--dataset=text:{argument}'}: {argument!r} cannot be read ({error.strerror}). Give "
                "yourself the permission to read it and to search the directories above it, or name other files."
            )
        if name:
            raise ConfigError(f"{name}: no file matches {argument!r}. Correct the path or the pattern.")
        raise ConfigError(
            f"--dataset=text:{argument}: no such file, no files below such a directory, and no match for such a "
            "pattern. Correct the path, or leave it out to read the standard library: --dataset=text."
        )
    return root, names


def read_file(path: str, name: str = "--dataset=text") -> bytes:
    """Returns the content of a file; raises ConfigError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(f"{name}: {path!r} cannot be read: {error}") from error
