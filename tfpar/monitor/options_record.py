"""The options of a run, written down: `config.yaml`, the configuration in TensorBoard, and the trial's name."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from tfpar.config.experiment import every_field
from tfpar.process.safe_write import escaped
from tfpar.process.whole_files import replace_file

FILE = "config.yaml"
_TRIAL = "# trial: "
_NAME_LENGTH = 80
# Options about where a run is stored and how it is shown do not affect what it computes.
NOT_HPARAMS = frozenset(
    [
        "workdir",
        "data_dir",
        "log_every",
        "profile_steps",
        "profile_workers",
        "histogram_every",
        "verbose",
        "tensorflow_log",
    ]
)
_log = logging.getLogger(__name__)


def changed(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that differ from their defaults."""
    defaults = {field.name: field.default for field in every_field()}
    return {name: value for name, value in options.items() if value != defaults.get(name)}


def hparams(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that the tab HPARAMS shows: those that differ from their defaults and change what is computed."""
    return {name: plain(value) for name, value in changed(options).items() if name not in NOT_HPARAMS}


def plain(value: Any) -> str | bool | int | float:
    """A value that the tab HPARAMS can show."""
    return value if isinstance(value, (bool, int, float)) else escaped(str(value))


def new_trial(options: Mapping[str, Any]) -> str:
    """The name of a trial that starts now: when, `MMDD-HHMMSS`, and the options that differ from their defaults.

    The time comes first: the tab HPARAMS shows the beginning of a name, and the options in columns beside it.
    """
    began = time.time()
    shown = time.strftime("%m%d-%H%M%S", time.localtime(began)) + f".{int(began % 1 * 1000):03}"
    texts = [f"{name}={value}" for name, value in hparams(options).items()] or ["defaults"]
    for place, text in enumerate(texts):
        if len(shown) + len(text) >= _NAME_LENGTH:
            return f"{shown} +{len(texts) - place}"
        shown += f" {text}"
    return shown


def trial_of(workdir: str | os.PathLike[str]) -> str:
    """The name that a run in this directory was given when it began; empty if there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        first = (pathlib.Path(workdir) / FILE).read_text(encoding="utf-8").partition("\n")[0]
        if first.startswith(_TRIAL):
            return first.removeprefix(_TRIAL).strip()
    return ""


def write_config(workdir: str | os.PathLike[str], trial: str, options: Mapping[str, Any]) -> list[str]:
    """Writes all options to `config.yaml`, those that differ from their defaults first.

    Args:
      workdir: The run's directory.
      trial: The name of the run in the tab HPARAMS.
      options: By name.

    Returns:
      Why it could not be written, in one line, or nothing.
    """
    given = changed(options)
    lines = [_TRIAL + " ".join(trial.split()), "", "# options that differ from their defaults"]
    lines += [f"{name}: {_yaml(value)}" for name, value in given.items()]
    lines += ["", "# defaults"]
    lines += [f"{name}: {_yaml(value)}" for name, value in options.items() if name not in given]
    path = pathlib.Path(workdir) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A path need not be valid UTF-8: Python keeps such bytes as surrogates, which no text file holds.
        replace_file(path, ("\n".join(lines) + "\n").encode(errors="backslashreplace"))
    except OSError as error:
        _log.warning("%s cannot be written (%s); training continues without it", FILE, error.strerror)
        return [f"{FILE}: {error.strerror}"]
    return []


def markdown(options: Mapping[str, Any]) -> str:
    """Options as two markdown tables, those that differ from their defaults first."""
    given = changed(options)
    others = {name: value for name, value in options.items() if name not in given}
    parts = [("Options that differ from their defaults", given), ("Defaults", others)]
    return "\n\n".join(f"#### {title}\n\n{table(values)}" for title, values in parts if values)


def table(values: Mapping[str, Any]) -> str:
    """Values as a markdown table of two columns."""
    rows = [f"| {name} | `{value}` |" if value != "" else f"| {name} | |" for name, value in values.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _yaml(value: Any) -> str:
    """A value as YAML 1.1 and 1.2 read it alike: JSON, with a point in every number with an exponent."""
    if isinstance(value, float):
        digits, _, exponent = repr(value).partition("e")
        return f"{digits}{'' if '.' in digits else '.0'}e{exponent}" if exponent else digits
    return json.dumps(value if isinstance(value, (str, bool, int, type(None))) else str(value), ensure_ascii=False)
