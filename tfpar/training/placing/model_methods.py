"""The methods of a model whose variables are divided, as users and Keras' callbacks call them.

Keras computes with a variable, and writes it, as if all its copies were equal; of a divided one it would take the part
of the first device.
"""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

from tfpar.checkpoint.export import export_model
from tfpar.config import ConfigError
from tfpar.optim import keras_internals
from tfpar.parallel.held import held_by
from tfpar.parallel.split import peers_of, split_of
from tfpar.parallel.weight_lists import list_whole_weights

import keras

_OF_TRAINER = {
    "fit": "fit",
    "train_on_batch": "fit",
    "evaluate": "evaluate",
    "test_on_batch": "evaluate",
    "predict": "predict",
    "predict_on_batch": "predict",
}
_WORKDIR = "With --workdir, a finished run leaves the whole model as WORKDIR/model.keras"


def adapt_methods(model: keras.Model) -> None:
    """Makes the methods of a model take, return and write whole values, or refuse.

    Methods never communicate, because a callback may call them on the chief alone.

    Args:
      model: A model whose variables have been moved to their devices.
    """
    list_whole_weights(model)
    held = [held_by(variable) for variable in model.variables]
    elsewhere = any(map(peers_of, model.variables)) or any(each and not each.here for each in held)
    if not elsewhere and not any(map(split_of, model.variables)):
        return
    refused = {name: f"Call trainer.{other} instead" for name, other in _OF_TRAINER.items()}
    refused["export"] = f"{_WORKDIR}, which `tfpar export` takes"
    refused["save_weights"] = _WORKDIR if elsewhere else "trainer.model.save writes the whole model"
    if elsewhere:
        refused["save"] = _WORKDIR
    methods = {name: functools.partial(_refuse, name, instead) for name, instead in refused.items()}
    keras_internals.set_untracked(model, **{"save": functools.partial(_save, model), **methods})


def _refuse(method: str, instead: str, *_: Any, **__: Any) -> NoReturn:
    raise ConfigError(
        f"trainer.model.{method} would use parts of the weights, which --mesh or --shard=weights divides. {instead}."
    )


def _save(
    model: keras.Model, filepath: str | os.PathLike[str], overwrite: bool = True, *others: Any, **options: Any
) -> None:
    """Replaces `keras.Model.save`; writes whole `.keras` files."""
    path = pathlib.Path(filepath)
    given: Sequence[Any] = [each for each in (*others, *options.values()) if each is not None]
    if path.suffix != ".keras" or given:
        raise ConfigError(
            f"trainer.model.save({str(path)!r}): a model whose weights are divided is saved as a .keras file, without "
            "other options."
        )
    if path.exists() and not overwrite:
        raise ConfigError(f"trainer.model.save({str(path)!r}): the file exists. Give overwrite=True, or another name.")
    export_model(model, model.trainable_variables, path)
