"""The section of local steps."""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

# The defaults of --outer_learning_rate and --outer_momentum, by --outer_optimizer. Nesterov's are those that DiLoCo
# found best over workers, models and H (Douillard et al. 2023, section 3.1); sgd takes the plain mean of the workers
# (FedAvg, local SGD); the size of adam's step is its learning rate, regardless of the size of the movements.
_LEARNING_RATE = {"nesterov": 0.7, "sgd": 1.0, "adam": 0.01}
_MOMENTUM = {"nesterov": 0.9, "sgd": 0.0, "adam": 0.9}

# The value that stands for --local_steps=auto.
AUTO = -1
# The largest default of --outer_delay, in steps: after many steps, the merged weights would be outdated.
_DELAY = 5
# The default of --outer_own_share if fragments are applied with a delay (Douillard et al. 2025: alpha = 0.5).
_OWN_SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OuterConfig(ConfigBase):
    """Local steps: how often workers exchange, and how an outer optimizer applies their movements."""

    local_steps: int = option(
        1,
        "Steps that each worker trains independently before the workers exchange the movements of their weights, "
        "through --exchange, and an outer optimizer applies the mean (DiLoCo). Replicas of one worker still exchange "
        "gradients in every step. 1: gradients are exchanged in every step. auto: measured, so that exchanges take the "
        "share --outer_time_share of the time.",
        minimum=1,
        words={"auto": AUTO},
        may_change_on_resume=True,
    )
    round_seconds: float = option(
        0.0,
        "Instead of --local_steps: seconds of a round, in which each worker takes as many steps as it can, for workers "
        "of different speeds. 0: rounds of --local_steps steps.",
        minimum=0.0,
        may_change_on_resume=True,
    )
    outer_optimizer: str = option(
        "auto",
        "Optimizer that applies the mean of the workers' movements at the end of a round of local steps: nesterov, sgd "
        "(with rate 1, the mean of the workers' weights) or adam. auto: nesterov with --local_steps, and none without. "
        "With any other value, a run without --local_steps has rounds of one step.",
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
        "With --local_steps=auto: the share of the time that exchanges may take.",
        minimum=0.001,
        maximum=0.9,
        may_change_on_resume=True,
    )
    outer_fragments: int = option(
        1,
        "Number of fragments into which the model is divided, by layers. Each is exchanged every --local_steps steps, "
        "one after the other, while the next steps run (Streaming DiLoCo). 1: the model is exchanged whole.",
        minimum=1,
    )
    outer_delay: int = option(
        -1,
        "Steps from the start of a fragment's exchange until its result is applied, the same on every worker; no "
        "worker waits in between. -1: 0 if the model is exchanged whole, otherwise 5, or the number of steps until the "
        "next exchange starts if that is less.",
        minimum=-1,
        may_change_on_resume=True,
    )
    outer_own_share: float = option(
        -1.0,
        "Share of a worker's own weights in the weights from which it continues when a fragment is applied (alpha of "
        "Streaming DiLoCo); the rest is the share of the outer weights. -1: 0.5, or 0 if --outer_delay is 0.",
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
          ConfigError: One of them does not fit; the message names the first one.
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
                f"{flag} does not work with --round_seconds={self.round_seconds:g}: a fragment is exchanged after a "
                "number of steps that is the same on all workers. Use --local_steps=50, or leave it out."
            )
        if self.local_steps == AUTO:
            raise ConfigError(
                f"{flag} does not work with --local_steps=auto, which measures an exchange that steps wait for. Give a "
                "number, such as --local_steps=50."
            )
        if self.outer_fragments > self.local_steps:
            raise ConfigError(
                f"{flag} does not work with --local_steps={self.local_steps}: the exchanges of fragments start at "
                f"different steps. Use --outer_fragments={self.local_steps} or less, or more local steps."
            )
        if self.outer_delay >= self.local_steps:
            raise ConfigError(
                f"--outer_delay={self.outer_delay} does not work with --local_steps={self.local_steps}: a fragment "
                f"must be applied before its next exchange. Use --outer_delay={self.local_steps - 1} or less."
            )

    @property
    def streams(self) -> bool:
        """Whether movements are exchanged while steps run."""
        return self.outer_fragments > 1 or self.outer_delay > 0

    @property
    def delay(self) -> int:
        """Steps from the start of a fragment's exchange until its result is applied."""
        if self.outer_delay >= 0:
            return self.outer_delay
        return min(_DELAY, self.local_steps // self.outer_fragments, self.local_steps - 1) if self.streams else 0

    @property
    def own_share(self) -> float:
        """The share of a worker's own weights in the weights from which it continues."""
        if self.outer_own_share >= 0.0:
            return self.outer_own_share
        return _OWN_SHARE if self.delay else 0.0

    @property
    def uses_rounds(self) -> bool:
        """Whether workers train independently and exchange movements of weights instead of gradients."""
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
