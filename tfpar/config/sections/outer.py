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

# What stands for --local_steps=auto.
AUTO = -1
# The default of --outer_delay at most, in steps: weights that are merged after many steps are old.
_DELAY = 5
# The default of --outer_own_share where fragments are applied late (Douillard et al. 2025: alpha = 0.5).
_OWN_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig(ConfigBase):
    """How rarely workers exchange, and what is made of what they send then."""

    local_steps: int = option(
        1,
        "Steps that each worker trains by itself before what the workers have moved is exchanged, through --exchange, "
        "and an outer optimizer applies its mean (DiLoCo). Replicas of one worker stay in step. 1: gradients are "
        "exchanged in every step. auto: measured, so that exchanges take the share --outer_time_share of the time.",
        minimum=1,
        words={"auto": AUTO},
        may_change_on_resume=True,
    )
    round_seconds: float = option(
        0.0,
        "In place of --local_steps: seconds of a round, in which each worker takes as many steps as it can, for "
        "workers that are not equally fast. 0: rounds of --local_steps steps.",
        minimum=0.0,
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

    outer_time_share: float = option(
        0.05,
        "With --local_steps=auto: the share of the time that exchanges are to take.",
        minimum=0.001,
        maximum=0.9,
        may_change_on_resume=True,
    )
    outer_fragments: int = option(
        1,
        "Fragments that the model is divided into, by layers. One after the other leaves, each every --local_steps "
        "steps, and travels while the next steps run (Streaming DiLoCo). 1: the model travels whole.",
        minimum=1,
    )
    outer_delay: int = option(
        -1,
        "Steps after which a fragment that has left is applied, the same on every worker; while it travels, nobody "
        "waits. -1: 0 where the model travels whole, otherwise 5, or the steps until the next one leaves if these are "
        "fewer.",
        minimum=-1,
        may_change_on_resume=True,
    )
    outer_own_share: float = option(
        -1.0,
        "Share of its own weights in those that a worker continues from when a fragment is applied (alpha of Streaming "
        "DiLoCo); the rest is the outer weights'. -1: 0.5, and 0 where --outer_delay is 0.",
        minimum=-1.0,
        maximum=0.99,
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if -1.0 < self.outer_own_share < 0.0:
            raise ConfigError(
                f"--outer_own_share={self.outer_own_share} is negative. Give 0 or more, or -1 for the default."
            )
        if -1.0 < self.outer_momentum < 0.0:
            raise ConfigError(
                f"--outer_momentum={self.outer_momentum} is negative. Give 0 or more, or -1 for the default."
            )

    def check_lengths(self) -> None:
        """Refuses fragments, delays and times that do not fit the length of a round.

        Raises:
          ConfigError: The first of them.
        """
        if self.round_seconds and self.local_steps != 1:
            steps = "auto" if self.local_steps == AUTO else self.local_steps
            raise ConfigError(
                f"--round_seconds={self.round_seconds:g} does not work with --local_steps={steps}: a round has either "
                "a time or a number of steps. Leave one of them out."
            )
        if not self.streams:
            return
        flag = f"--outer_fragments={self.outer_fragments}" if self.outer_fragments > 1 else ""
        flag = flag or f"--outer_delay={self.outer_delay}"
        if self.round_seconds:
            raise ConfigError(
                f"{flag} does not work with --round_seconds={self.round_seconds:g}: a fragment leaves after a number "
                "of steps that is the same on all workers. Use --local_steps=50, or leave it out."
            )
        if self.local_steps == AUTO:
            raise ConfigError(
                f"{flag} does not work with --local_steps=auto, which measures an exchange that steps wait for. Give a "
                "number, such as --local_steps=50."
            )
        if self.outer_fragments > self.local_steps:
            raise ConfigError(
                f"{flag} does not work with --local_steps={self.local_steps}: fragments leave at steps of their own. "
                f"Use --outer_fragments={self.local_steps} or less, or more local steps."
            )
        if self.outer_delay >= self.local_steps:
            raise ConfigError(
                f"--outer_delay={self.outer_delay} does not work with --local_steps={self.local_steps}: a fragment is "
                f"applied before it leaves again. Use --outer_delay={self.local_steps - 1} or less."
            )

    @property
    def streams(self) -> bool:
        """Whether what workers have moved travels while steps run."""
        return self.outer_fragments > 1 or self.outer_delay > 0

    @property
    def delay(self) -> int:
        """Steps between the leaving of a fragment and its being applied."""
        if self.outer_delay >= 0:
            return self.outer_delay
        return min(_DELAY, self.local_steps // self.outer_fragments, self.local_steps - 1) if self.streams else 0

    @property
    def own_share(self) -> float:
        """The share of its own weights in those that a worker continues from."""
        if self.outer_own_share >= 0.0:
            return self.outer_own_share
        return _OWN_SHARE if self.delay else 0.0

    @property
    def uses_rounds(self) -> bool:
        """Whether workers train by themselves and exchange what they have moved, not gradients."""
        return self.local_steps != 1 or self.round_seconds > 0.0 or self.outer_optimizer != "auto"

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
