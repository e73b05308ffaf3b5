"""tfpar: parallel training of Keras 3 models on TensorFlow, one custom loop from one device to a cluster.

Importing the package brings in TensorFlow only when a name that needs it is used, so that `tfpar.launch`, `--help` and
the validation of a configuration answer at once.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

from tfpar.process import logs
from tfpar.process.after_import import after_import, after_imports_below, is_importing
from tfpar.process.startup import quiet_startup

if TYPE_CHECKING:
    from tfpar import inputs, models, rl
    from tfpar.checkpoint.keras_file import check_model_file
    from tfpar.checkpoint.model_files import examples_of_run, load_model, task_spec
    from tfpar.config import ConfigError, ExperimentConfig
    from tfpar.config.errors import TrainingError
    from tfpar.drop_in import (
        AverageMetrics,
        BroadcastInitialWeights,
        DistributedOptimizer,
        init_cluster,
        rank,
        shard,
        size,
    )
    from tfpar.exchange import Exchange
    from tfpar.parallel.replica import apply_means
    from tfpar.parallel.strategies import Runtime
    from tfpar.training.loops import loggers
    from tfpar.training.loops.hooks import Hook
    from tfpar.training.loops.state import LoopState
    from tfpar.training.start import initialize, validate
    from tfpar.training.trainer import Trainer

# Before anything imports TensorFlow: its import messages cannot be held back later.
quiet_startup()
logs.install()

__version__ = "0.2.0.dev0"

_HOMES = {
    "AverageMetrics": "tfpar.drop_in",
    "BroadcastInitialWeights": "tfpar.drop_in",
    "ConfigError": "tfpar.config",
    "DistributedOptimizer": "tfpar.drop_in",
    "Exchange": "tfpar.exchange",
    "ExperimentConfig": "tfpar.config",
    "Hook": "tfpar.training.loops.hooks",
    "LoopState": "tfpar.training.loops.state",
    "Runtime": "tfpar.parallel.strategies",
    "Trainer": "tfpar.training.trainer",
    "TrainingError": "tfpar.config",
    "apply_means": "tfpar.parallel.replica",
    "check_model_file": "tfpar.checkpoint.keras_file",
    "examples_of_run": "tfpar.checkpoint.model_files",
    "init_cluster": "tfpar.drop_in",
    "initialize": "tfpar.training.start",
    "load_model": "tfpar.checkpoint.model_files",
    "rank": "tfpar.drop_in",
    "shard": "tfpar.drop_in",
    "size": "tfpar.drop_in",
    "task_spec": "tfpar.checkpoint.model_files",
    "validate": "tfpar.training.start",
}

_MODULES = {
    "inputs": "tfpar.inputs",
    "loggers": "tfpar.training.loops.loggers",
    "models": "tfpar.models",
    "rl": "tfpar.rl",
}

__all__ = [
    "AverageMetrics",
    "BroadcastInitialWeights",
    "ConfigError",
    "DistributedOptimizer",
    "Exchange",
    "ExperimentConfig",
    "Hook",
    "LoopState",
    "Runtime",
    "Trainer",
    "TrainingError",
    "apply_means",
    "check_model_file",
    "examples_of_run",
    "init_cluster",
    "initialize",
    "inputs",
    "load_model",
    "loggers",
    "models",
    "rank",
    "rl",
    "shard",
    "size",
    "task_spec",
    "validate",
]


# Names of version 0.1.0 that moved; each goes with version 0.3.
_DEPRECATED = {
    "Layout": ("tfpar.parallel.strategies", "Runtime", "tfpar.Runtime"),
    "check": ("tfpar.training.start", "validate", "tfpar.validate"),
    "flags": ("tfpar.config", "flags", "tfpar.config.flags"),
    "start": ("tfpar.training.start", "initialize", "tfpar.initialize"),
}


# Modules with classes that a `.keras` file may name.
_SERIALIZED = (
    "tfpar.models",
    "tfpar.optim.lars",
    "tfpar.optim.schedules",
    "tfpar.optim.yogi",
    "tfpar.inputs.augment",
    "tfpar.rl.layers",
)


def _register_with_keras() -> bool:
    """Lets `keras.saving.load_model` find tfpar's classes: importing a module registers them.

    Returns:
      Whether it has. Not while a module of tfpar is being imported that has just imported Keras: it is done when that
      module is there.
    """
    return not is_importing("tfpar") and _import_serialized()


def _import_serialized() -> bool:
    """Imports these modules if Keras is there, and returns whether it is."""
    if "keras" not in sys.modules:
        return False
    for module in _SERIALIZED:
        importlib.import_module(module)
    return True


def __getattr__(name: str) -> Any:
    found = _find(name)
    if "keras" in sys.modules and _register_with_keras() and name not in _DEPRECATED:
        globals()[name] = found  # Python looks there first
    return found


def _find(name: str) -> Any:
    if name in _DEPRECATED:
        module, member, successor = _DEPRECATED[name]
        warnings.warn(f"tfpar.{name} is deprecated; use {successor}", DeprecationWarning, stacklevel=3)
        return getattr(importlib.import_module(module), member, None) or importlib.import_module(f"{module}.{member}")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'tfpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


after_import("keras", _register_with_keras)
after_imports_below("tfpar", _import_serialized)
