"""The sections of an experiment's configuration, one frozen dataclass each: model, input, strategy and so on.

Every field carries its help text, its choices, its bounds, whether it may change when a run is resumed and whether
workers may be given different values. The absl flags (`tfpar.config.flags`), the `--help` page, `docs/flags.md`, the
validation and the record in TensorBoard all derive from it. Building a dataclass validates it; an invalid value raises
`ConfigError` before anything is started or written.

This package imports neither TensorFlow nor Keras: reading a configuration costs nothing.
"""

from __future__ import annotations

from tfpar.config.sections.federated import FederatedConfig
from tfpar.config.sections.general import (
    CUSTOM,
    PRECISIONS,
    CheckpointConfig,
    ExchangeConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from tfpar.config.sections.incremental import IncrementalConfig
from tfpar.config.sections.input import InputConfig
from tfpar.config.sections.outer import OuterConfig
from tfpar.config.sections.reinforcement import ReinforcementConfig
from tfpar.config.sections.strategy import STRATEGIES, StrategyConfig
from tfpar.config.sections.train import ALL_WEIGHTS, TrainConfig

__all__ = [
    "ALL_WEIGHTS",
    "CUSTOM",
    "PRECISIONS",
    "STRATEGIES",
    "CheckpointConfig",
    "ExchangeConfig",
    "FederatedConfig",
    "IncrementalConfig",
    "InputConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "OuterConfig",
    "PrecisionConfig",
    "ReinforcementConfig",
    "ScheduleConfig",
    "StrategyConfig",
    "TrainConfig",
]
