"""Writes a model to a `.keras` file, also one that several workers hold between them."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import pathlib
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tfpar.checkpoint.model_files import unloadable_parts
from tfpar.parallel.held import held_by
from tfpar.parallel.split import shape_of, split_of, whole_blocks
from tfpar.process.memory import return_freed_memory
from tfpar.process.safe_write import shortened
from tfpar.process.whole_files import flush_names

import keras
import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

_Read = Callable[[], Any]


def export_model(model: keras.Model, eval_weights: Sequence[keras.Variable], path: pathlib.Path | None) -> None:
    """Saves a model with the weights that evaluation used.

    Divided weights are collected in a file beside `path`, one after the other, and read when Keras writes them, into a
    folder: no worker needs memory for the whole model.

    Args:
      model: The model. If workers hold it between them, all of them must call this function.
      eval_weights: The trainable weights that evaluation used, in order: the model's own, or their moving averages.
      path: The file; None on workers that only take part.

    Raises:
      OSError: The file could not be written. All weights have been read then, as after any error but those of
        TensorFlow, such as the loss of another worker.
    """
    exported = {id(weight): own for weight, own in zip(model.trainable_variables, eval_weights, strict=True)}
    pairs = [(variable, exported.get(id(variable), variable)) for variable in model.variables]
    reads: dict[int, _Read] = {id(variable): own.numpy for variable, own in pairs if own is not variable}
    divided = [(variable, own) for variable, own in pairs if split_of(own) or held_by(own)]
    blocks = [whole_blocks(own) for _, own in divided]
    if path is None:
        _drain(blocks)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as values:
            file = values.enter_context(tempfile.TemporaryFile(dir=path.parent)) if divided else None
            for (variable, own), parts in zip(divided, blocks, strict=True):
                reads[id(variable)] = _stored(file, own, parts)
            if divided:
                return_freed_memory()  # of the blocks, before Keras takes as much as two of the largest weight
            if reads:  # a layer may create variables when it is saved, which a scope would refuse
                values.enter_context(_Values(reads))
            write = functools.partial(_write_in_folder, saved=values.close)
            _save(model, path, write if divided else keras.Model.save)
    except tf.errors.OpError:
        raise
    except Exception:  # of Keras, too, which may not know how to write a layer
        _drain(blocks)  # the other workers send what is left all the same
        raise


def why_not_saved(model: keras.Model) -> str:
    """Returns why Keras cannot save a model, in one line, such as a layer without `get_config`; empty if it can."""
    try:
        keras.saving.serialize_keras_object(model)
    except Exception as error:
        return in_one_line(error)
    return ""


def in_one_line(error: Exception) -> str:
    """Returns the beginning of an error's text, without line breaks."""
    return shortened(" ".join(str(error).split()))


def _drain(blocks: Iterable[Iterable[np.ndarray]]) -> None:
    for parts in blocks:
        for _ in parts:
            pass


def _stored(file: Any, variable: keras.Variable, blocks: Iterable[np.ndarray]) -> _Read:
    """Appends the whole value of a variable to a file; returns a function that reads it from there."""
    start = file.seek(0, os.SEEK_END)
    for block in blocks:
        file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
    file.flush()
    shape, dtype = shape_of(variable), tf.as_dtype(variable.dtype).as_numpy_dtype

    def read() -> np.ndarray:
        file.seek(start)
        return np.fromfile(file, dtype, math.prod(shape)).reshape(shape)

    return read


class _Values(keras.StatelessScope):
    """Within it, some variables have values that are read when they are asked for.

    Args:
      reads: Functions that read a value, by the identity of the variable.
    """

    def __init__(self, reads: dict[int, _Read]) -> None:
        super().__init__()
        self._reads = reads

    def get_current_value(self, variable: keras.Variable) -> Any:
        read = self._reads.get(id(variable))
        return super().get_current_value(variable) if read is None else tf.convert_to_tensor(read())


def _save(model: keras.Model, path: pathlib.Path, write: Callable[[keras.Model, pathlib.Path], None]) -> None:
    """Saves a model as a `.keras` file with `write`, whole or not at all."""
    temporary = path.with_name(f".{path.stem}.partial.keras")
    try:
        write(model, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        flush_names(path.name, path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)  # it may be what fills the disk
        raise
    if parts := unloadable_parts(model):
        _log.warning(
            "%s: keras.saving.load_model will not load it as it is, because of %s. Decorate own classes and functions "
            "with keras.saving.register_keras_serializable() and import them before loading; load a Lambda layer with "
            "safe_mode=False",
            *(path, ", ".join(parts)),
        )


def _write_in_folder(model: keras.Model, path: pathlib.Path, saved: Callable[[], object] = lambda: None) -> None:
    """Writes a `.keras` file from a folder beside it.

    A zipped file would not do: Keras 3.15 first writes its weights to memory if the parts of divided weights, which are
    small, seem to fit.

    Args:
      model: The model.
      path: The file.
      saved: Called once all weights are in the folder.

    Raises:
      OSError: The file could not be written. Its message is that of the system.
    """
    # In a relative path, Keras 3.15 loses what layers keep besides weights (`DiskIOStore`).
    folder = path.with_name(f"{path.stem}.folder").absolute()
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    try:
        type(model).save(model, folder, zipped=False)
        saved()
        with zipfile.ZipFile(path, "w") as file:
            for part in sorted(part for part in folder.rglob("*") if part.is_file()):
                file.write(part, part.relative_to(folder))
    except Exception as error:
        # The messages of h5py have several lines, which name the folder.
        number = re.search(r"errno = (\d+)", str(error))
        code = error.errno if isinstance(error, OSError) else int(number[1]) if number else None
        if code is None:
            raise
        raise OSError(code, os.strerror(code)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
