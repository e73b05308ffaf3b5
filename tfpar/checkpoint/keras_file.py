"""Recognises `.keras` files without loading them or TensorFlow."""

from __future__ import annotations

import json
import zipfile
import zlib
from typing import Any

from tfpar.config import ConfigError

# What a damaged archive raises: an entry that is missing, encrypted or compressed in another way, or is no JSON.
_OF_DAMAGE = (KeyError, RuntimeError, ValueError, zipfile.BadZipFile, zlib.error)
# Layers whose outputs are the values of their inputs, and those that apply one layer to them.
_KEEP_VALUES = ("Identity", "Reshape", "Flatten")
_WRAPPERS = ("TimeDistributed", "SpectralNormalization")


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

    Layers behind the softmax that keep values, such as one that reshapes, do not matter.

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
        if layer.get("class_name") in _WRAPPERS:
            return _ends_in_softmax(config.get("layer"))
        return layer.get("class_name") == "Softmax" or config.get("activation") == "softmax"
    outputs = config.get("output_layers")
    if outputs is None:  # layers one after the other
        return _ends_in_softmax(next((each for each in reversed(layers) if not _keeps_values(each)), None))
    named = {_name_of(each): each for each in layers}
    name, call = _first_call(outputs)
    while (each := named.get(name)) and _keeps_values(each):
        del named[name]  # ends, whatever the file says
        nodes = each.get("inbound_nodes")
        name, call = _input_call(nodes[call]) if isinstance(nodes, list) and call < len(nodes) else ("", 0)
    return _ends_in_softmax(each)


def _keeps_values(layer: Any) -> bool:
    """Whether the values of a layer's outputs are those of its inputs, by its configuration."""
    config = layer.get("config") if isinstance(layer, dict) else None
    if not isinstance(config, dict):
        return False
    kind = layer.get("class_name")
    return kind in _KEEP_VALUES or (kind == "Activation" and config.get("activation") == "linear")


def _name_of(layer: Any) -> str:
    """The name in the configuration of a layer; empty if it is not one."""
    config = layer.get("config") if isinstance(layer, dict) else None
    name = config.get("name") if isinstance(config, dict) else None
    return name if isinstance(name, str) else ""


def _first_call(outputs: Any) -> tuple[str, int]:
    """The layer of the first output, which may be in a dictionary or list, and which of its calls; empty if none."""
    while isinstance(outputs, (dict, list)) and outputs:
        if isinstance(outputs, list) and isinstance(outputs[0], str):
            call = outputs[1] if len(outputs) > 1 else 0
            return outputs[0], call if type(call) is int and call >= 0 else 0
        outputs = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs[0]
    return "", 0


def _input_call(node: Any) -> tuple[str, int]:
    """As `_first_call`, of the layer whose output is the argument of a call."""
    arguments = node.get("args") if isinstance(node, dict) else None
    tensor = arguments[0] if isinstance(arguments, list) and arguments else None
    config = tensor.get("config") if isinstance(tensor, dict) else None
    return _first_call(config.get("keras_history") if isinstance(config, dict) else None)
