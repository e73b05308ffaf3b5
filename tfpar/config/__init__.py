"""What an experiment is: typed options, the absl flags made from them, and the errors they raise.

Importing this package imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

from tfpar.config.errors import ConfigError, TrainingError, unknown_name
from tfpar.config.experiment import (
    CUSTOM,
    PRECISIONS,
    STRATEGIES,
    CheckpointConfig,
    ExchangeConfig,
    ExperimentConfig,
    InputConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
    StrategyConfig,
    TrainConfig,
)
from tfpar.config.fields import parse_arguments

__all__ = [
    "CUSTOM",
    "PRECISIONS",
    "STRATEGIES",
    "CheckpointConfig",
    "ConfigError",
    "ExchangeConfig",
    "ExperimentConfig",
    "InputConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "PrecisionConfig",
    "ScheduleConfig",
    "StrategyConfig",
    "TrainConfig",
    "TrainingError",
    "parse_arguments",
    "unknown_name",
]
