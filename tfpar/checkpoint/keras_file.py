"""Recognises `.keras` files without loading them or TensorFlow."""

from __future__ import annotations

import json
import os
import zipfile
from typing import Any

from tfpar.config import ConfigError


def check_model_file(path: str, *, flag: str = "--model_file") -> None:
    """Refuses a path that is not a `.keras` file, without loading it.

    Args:
      path: The file.
      flag: The flag that named the file, for errors.

    Raises:
      ConfigError: No such file, or another kind of file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            complete = {"config.json", "metadata.json"} <= set(archive.namelist())
    except (OSError, zipfile.BadZipFile):
        complete = False
    if not complete:
        what = "is not a .keras file" if os.path.exists(path) else "does not exist"
        raise ConfigError(f"{flag}={path} {what}. A finished run leaves a .keras file as WORKDIR/model.keras.")


def gives_probabilities(path: str) -> bool:
    """Whether the model in a `.keras` file ends in a softmax: its outputs are probabilities, not logits.

    Args:
      path: A file that `check_model_file` accepts. A subclassed model, which has no graph of layers, counts as one
        that gives logits.
    """
    with zipfile.ZipFile(path) as archive:
        return _ends_in_softmax(json.loads(archive.read("config.json")))


def _ends_in_softmax(layer: dict[str, Any]) -> bool:
    """The same of a layer or model, by the configuration that Keras saves."""
    config = layer["config"]
    if "layers" not in config:
        return layer["class_name"] == "Softmax" or config.get("activation") == "softmax"
    output = config.get("output_layers") or [config["layers"][-1]["config"]["name"]]
    name = output[0] if isinstance(output[0], str) else output[0][0]
    return any(_ends_in_softmax(each) for each in config["layers"] if each["config"]["name"] == name)
