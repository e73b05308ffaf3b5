"""Small runs of reinforcement learning."""

from __future__ import annotations

from tfpar import rl

import keras
import numpy as np

# Small: two rounds of four steps are two epochs of two minibatches each.
SMALL = {
    "env": "CartPole-v1",
    "environments": 8,
    "rollout_steps": 8,
    "minibatches": 2,
    "rollout_epochs": 2,
    "hidden": "8",
    "eval_episodes": 4,
    "eval_every": 1000,
    "optimizer": "adam",
    "learning_rate": 0.01,
    "seed": 3,
    "verbose": 0,
    "steps_per_loop": 4,
    "stop_at_goal": False,
}


def trained(**options):
    keras.utils.clear_session(free_memory=False)
    trainer = rl.ReinforcementTrainer(**(SMALL | {"jit_compile": False, "steps": 20} | options))
    return trainer, trainer.fit()


def values(trainer):
    return [np.asarray(variable) for variable in [*trainer.model.weights, *trainer.program.optimizer.variables]]
