"""The section of local steps."""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

# The defaults of --outer_learning_rate and --outer_momentum, by --outer_optimizer. Nesterov's are those that DiLoCo
# found best over workers, models and H (Douillard et al. 2023, section 3.1); sgd takes the plain mean of the workers
# (FedAvg, local SGD); adam's step is of the size of its learning rate, whatever the workers have moved.
_LEARNING_RATE = {"nesterov": 0.7, "sgd": 1.0, "adam": 0.01}
_MOMENTUM = {"nesterov": 0.9, "sgd": 0.0, "adam": 0.9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig(ConfigBase):
    """How rarely workers exchange, and what is made of what they send then."""

    local_steps: int = option(
        1,
        "Steps that each worker trains by itself before what the workers have moved is exchanged, through --exchange, "
        "and an outer optimizer applies its mean (DiLoCo). Replicas of one worker stay in step. 1: gradients are "
        "exchanged in every step.",
        minimum=1,
        may_change_on_resume=True,
    )
    outer_optimizer: str = option(
        "auto",
        "What applies the mean of the workers' movements at the end of a round of local steps: nesterov, sgd (with "
        "rate 1 the mean of the workers' weights) or adam. auto: nesterov with --local_steps, and none without. Naming "
        "one makes rounds of single steps, too.",
        choices=("auto", "nesterov", "sgd", "adam"),
    )
    outer_learning_rate: float = option(
        0.0,
        "Learning rate of --outer_optimizer. 0: 0.7 for nesterov, 1 for sgd, 0.01 for adam.",
        minimum=0.0,
        may_change_on_resume=True,
    )
    outer_momentum: float = option(
        -1.0,
        "Momentum of --outer_optimizer, beta_1 of adam. -1: 0.9 for nesterov and adam, 0 for sgd.",
        minimum=-1.0,
        maximum=0.9999,
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if -1.0 < self.outer_momentum < 0.0:
            raise ConfigError(
                f"--outer_momentum={self.outer_momentum} is negative. Give 0 or more, or -1 for the default."
            )

    @property
    def uses_rounds(self) -> bool:
        """Whether workers train by themselves and exchange what they have moved, not gradients."""
        return self.local_steps > 1 or self.outer_optimizer != "auto"

    @property
    def optimizer(self) -> str:
        """The outer optimizer, by name."""
        return "nesterov" if self.outer_optimizer == "auto" else self.outer_optimizer

    @property
    def learning_rate(self) -> float:
        """The learning rate of the outer optimizer."""
        return self.outer_learning_rate or _LEARNING_RATE[self.optimizer]

    @property
    def momentum(self) -> float:
        """The momentum of the outer optimizer."""
        return self.outer_momentum if self.outer_momentum >= 0.0 else _MOMENTUM[self.optimizer]
