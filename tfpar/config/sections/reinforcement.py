"""The options of reinforcement learning, which one program takes in addition to those of every experiment.

This module imports neither TensorFlow nor Keras.
"""

from __future__ import annotations

import dataclasses

from tfpar.config.errors import ConfigError
from tfpar.config.fields import ConfigBase, option

ALGORITHMS = ("ppo", "a2c", "dqn")
_OF_POLICIES = ("ppo", "a2c")
_OF_REPLAY = ("dqn",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReinforcementConfig(ConfigBase):
    """The environment, and how a policy is learned by acting in it."""

    env: str = option(
        "CartPole-v1",
        "Environment to act in. Acrobot-v1, CartPole-v1, Catch, MountainCar-v0 and Pendulum-v1 run on the device; "
        "gym:NAME is any environment of Gymnasium, envpool:NAME one of EnvPool.",
    )
    algorithm: str = option("ppo", "How the policy is learned.", choices=ALGORITHMS)
    environments: int = option(
        64, "Environments that run side by side, over all replicas; a multiple of the number of replicas.", minimum=1
    )
    actors: int = option(
        1,
        "gym:NAME, envpool:NAME: threads of each replica that act while it learns; they must divide its environments.",
        minimum=1,
        may_change_on_resume=True,
    )
    env_processes: bool = option(
        False,
        "gym:NAME: run each environment in its own process, for environments with slow steps.",
        may_change_on_resume=True,
    )
    rollout_steps: int = option(
        32, "Steps of every environment between two phases of learning; a multiple of --minibatches.", minimum=1
    )
    minibatches: int = option(
        4,
        "Number of global batches into which a rollout is divided; each is one step, and has transitions of every "
        "environment.",
        minimum=1,
    )
    rollout_epochs: int = option(4, "How many times the policy learns from each transition of a rollout.", minimum=1)
    env_steps: int = option(
        0,
        "Length of the run: steps of all environments together. 0: --steps decides.",
        minimum=0,
        may_change_on_resume=True,
    )
    discount: float = option(0.99, "Discount of a reward one step later (gamma).", minimum=0.0, maximum=1.0)
    gae_lambda: float = option(
        0.95,
        "Decay of generalised advantage estimation (Schulman et al. 2016).",
        minimum=0.0,
        maximum=1.0,
        used_by=_OF_POLICIES,
    )
    clip_ratio: float = option(
        0.2,
        "PPO: how far the probability ratio may leave 1 before its gradient is cut off.",
        minimum=0.0,
        used_by=("ppo",),
    )
    value_coef: float = option(0.5, "Weight of the value loss.", minimum=0.0, used_by=_OF_POLICIES)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0.0, used_by=_OF_POLICIES)
    reward_scale: float = option(
        1.0, "Factor on every reward in training; reported returns are not scaled.", minimum=0.0
    )
    replay_size: int = option(
        100_000, "DQN: transitions that are remembered, over all replicas.", minimum=1, used_by=_OF_REPLAY
    )
    replay_batch: int = option(
        512,
        "DQN: transitions per step, over all replicas; a multiple of --environments.",
        minimum=1,
        used_by=_OF_REPLAY,
    )
    replay_priority: float = option(
        0.0,
        "DQN: how strongly transitions with larger errors are preferred when they are drawn (alpha of Schaul et al. "
        "2016, who use 0.6). 0: uniformly.",
        minimum=0.0,
        maximum=1.0,
        used_by=_OF_REPLAY,
    )
    replay_correction: float = option(
        0.4,
        "DQN: how much of that bias importance weights correct at first (beta); it rises to 1 over the run.",
        minimum=0.0,
        maximum=1.0,
        used_by=_OF_REPLAY,
    )
    n_step: int = option(
        3, "DQN: number of rewards that a target sums before it adds an estimated value.", minimum=1, used_by=_OF_REPLAY
    )
    target_every: int = option(
        200, "DQN: steps after which the target network is replaced by the current one.", minimum=1, used_by=_OF_REPLAY
    )
    explore_share: float = option(
        0.3,
        "DQN: share of the run over which the share of random actions falls from 1 to --explore_end.",
        minimum=0.0,
        maximum=1.0,
        used_by=_OF_REPLAY,
    )
    explore_end: float = option(
        0.05, "DQN: share of random actions afterwards.", minimum=0.0, maximum=1.0, used_by=_OF_REPLAY
    )
    normalize_observations: bool = option(
        True,
        "Scale observations by their running mean and variance, which become part of model.keras.",
        used_by=_OF_POLICIES,
    )
    hidden: str = option("64,64", "Units of the hidden layers of policy and value network, comma-separated.")
    eval_episodes: int = option(
        64, "Episodes that an evaluation plays, with the most likely actions.", minimum=1, may_change_on_resume=True
    )
    stop_at_goal: bool = option(
        True,
        "End the run when an evaluation reaches the return that is the environment's goal, e.g. 495 of 500 for "
        "CartPole-v1. A policy that has nothing left to learn may drift away from it.",
        may_change_on_resume=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hidden_units()
        if self.rollout_steps % self.minibatches:
            raise ConfigError(
                f"--rollout_steps={self.rollout_steps} is not divisible by --minibatches={self.minibatches}: every "
                "minibatch has the same number of steps from each environment. Change one of them."
            )

        self._check_algorithm()

    def _check_algorithm(self) -> None:
        if self.algorithm == "a2c" and self.steps_per_rollout > 1:
            raise ConfigError(
                f"--algorithm=a2c learns from each transition once, in one step, but --rollout_epochs="
                f"{self.rollout_epochs} and --minibatches={self.minibatches}. Give 1 for both, or use --algorithm=ppo."
            )
        if self.algorithm != "dqn":
            return
        if self.replay_batch % self.environments:
            raise ConfigError(
                f"--replay_batch={self.replay_batch} is not divisible by --environments={self.environments}: a step "
                "draws the same number of transitions from each environment. Choose a multiple."
            )
        if self.rollout_steps < self.n_step or self.replay_size < 2 * self.transitions_per_rollout:
            raise ConfigError(
                f"--replay_size={self.replay_size}, --rollout_steps={self.rollout_steps}, --n_step={self.n_step}: a "
                "rollout must be at least as long as --n_step, and the replay must hold two rollouts of all "
                "--environments. Give a larger replay or other rollouts."
            )

    def hidden_units(self) -> tuple[int, ...]:
        """The numbers in `hidden`; an empty tuple for a linear policy."""
        parts = [part.strip() for part in self.hidden.split(",") if part.strip()]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(
                f"--hidden={self.hidden!r} is not a list of positive whole numbers. Write e.g. --hidden=64,64."
            )
        return tuple(int(part) for part in parts)

    @property
    def steps_per_rollout(self) -> int:
        """Number of steps, that is, changes of the weights, per rollout."""
        return self.rollout_epochs * self.minibatches

    @property
    def batch_size(self) -> int:
        """Transitions of a step, over all replicas."""
        return self.replay_batch if self.algorithm == "dqn" else self.transitions_per_rollout // self.minibatches

    @property
    def transitions_per_rollout(self) -> int:
        """Steps of all environments together in one rollout."""
        return self.environments * self.rollout_steps
