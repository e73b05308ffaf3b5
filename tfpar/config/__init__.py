"""The configuration of an experiment: typed options, the absl flags generated from them, and the errors they raise.

Importing this package imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

from tfpar.config.errors import ConfigError, TrainingError, unknown_name
from tfpar.config.experiment import PER_HOST_OPTIONS, RESUME_MAY_CHANGE, SECTIONS, ExperimentConfig
from tfpar.config.fields import parse_arguments
from tfpar.config.sections import (
    ALL_WEIGHTS,
    CUSTOM,
    PRECISIONS,
    STRATEGIES,
    CheckpointConfig,
    ExchangeConfig,
    FederatedConfig,
    IncrementalConfig,
    InputConfig,
    ModelConfig,
    MonitorConfig,
    OptimizerConfig,
    OuterConfig,
    PrecisionConfig,
    ReinforcementConfig,
    ScheduleConfig,
    StrategyConfig,
    TrainConfig,
)
from tfpar.config.trainer_options import TrainerOptions

__all__ = [
    "ALL_WEIGHTS",
    "CUSTOM",
    "PER_HOST_OPTIONS",
    "PRECISIONS",
    "RESUME_MAY_CHANGE",
    "SECTIONS",
    "STRATEGIES",
    "CheckpointConfig",
    "ConfigError",
    "ExchangeConfig",
    "ExperimentConfig",
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
    "TrainerOptions",
    "TrainingError",
    "parse_arguments",
    "unknown_name",
]
