"""Recognises `.keras` files without loading them or TensorFlow."""

from __future__ import annotations

import json
import zipfile
import zlib
from typing import Any

from tfpar.config import ConfigError

# What a damaged archive raises: an entry that is missing, encrypted or compressed in another way, or is no JSON.
_OF_DAMAGE = (KeyError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)


def check_model_file(path: str, *, flag: str = "--model_file") -> None:
    """Refuses a path that is not a `.keras` file, without loading it.

    Args:
      path: The file.
      flag: The flag that named the file, for errors.

    Raises:
      ConfigError: No such file, another kind of file, or one that is damaged or cannot be read.
    """
    _config_of(path, flag)


def gives_probabilities(path: str) -> bool:
    """Whether the model in a `.keras` file ends in a softmax: its outputs are probabilities, not logits.

    Args:
      path: A file that `check_model_file` accepts. A subclassed model, which has no graph of layers, counts as one
        that gives logits.

    Raises:
      ConfigError: As `check_model_file`.
    """
    return _ends_in_softmax(_config_of(path, "--model_file"))


def _config_of(path: str, flag: str) -> dict[str, Any]:
    """The configuration of the model in a `.keras` file; raises as `check_model_file`."""
    try:
        with zipfile.ZipFile(path) as archive:
            if not {"config.json", "metadata.json"} <= set(archive.namelist()):
                raise zipfile.BadZipFile
            try:
                config = json.loads(archive.read("config.json"))
            except _OF_DAMAGE as error:
                raise ConfigError(
                    f"{flag}={path} is damaged: its config.json cannot be read ({error}). Name another file, or start "
                    "the finished run again without it, which writes its model.keras."
                ) from error
    except (FileNotFoundError, NotADirectoryError):
        raise _no_model(path, flag, "does not exist") from None
    except (IsADirectoryError, zipfile.BadZipFile):
        raise _no_model(path, flag, "is not a .keras file") from None
    except OSError as error:
        raise ConfigError(f"{flag}={path} cannot be read ({error.strerror}). Make it readable.") from error
    if not isinstance(config, dict):
        raise _no_model(path, flag, "is not a .keras file")
    return config


def _no_model(path: str, flag: str, what: str) -> ConfigError:
    return ConfigError(f"{flag}={path} {what}. A finished run leaves a .keras file as WORKDIR/model.keras.")


def _ends_in_softmax(layer: Any) -> bool:
    """The same of a layer or model, by the configuration that Keras saves."""
    config = layer.get("config") if isinstance(layer, dict) else None
    if not isinstance(config, dict):
        return False
    layers = config.get("layers")
    # A class of the user's own may have an option of this name, such as a number of layers.
    if not isinstance(layers, list) or not layers or not all(map(_name_of, layers)):
        return layer.get("class_name") == "Softmax" or config.get("activation") == "softmax"
    output = _first_name(config.get("output_layers")) or _name_of(layers[-1])
    return any(_ends_in_softmax(each) for each in layers if _name_of(each) == output)


def _name_of(layer: Any) -> str:
    """The name in the configuration of a layer; empty if it is not one."""
    config = layer.get("config") if isinstance(layer, dict) else None
    name = config.get("name") if isinstance(config, dict) else None
    return name if isinstance(name, str) else ""


def _first_name(outputs: Any) -> str:
    """The layer of the first output, which may be in a dictionary or list; empty if there is none."""
    while isinstance(outputs, (dict, list)) and outputs:
        outputs = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs[0]
    return outputs if isinstance(outputs, str) else ""
