"""What the presets reach, played in Gymnasium itself."""

from __future__ import annotations

from tfpar import rl
from tfpar.rl.playing.episodes import play

import keras
import pytest

pytestmark = pytest.mark.proof


def mean_return(env: str, seed: int, algorithm: str = "ppo", **options) -> float:
    keras.utils.clear_session(free_memory=False)
    given = {"algorithm": algorithm, "seed": seed, "verbose": 0, "strategy": "one_device"}
    trainer = rl.ReinforcementTrainer(env, **(given | options))
    trainer.fit()
    return float(play(trainer.model, env, episodes=100, seed=1000).returns.mean())


@pytest.mark.parametrize("seed", range(5))
def test_ppo_solves_cartpole(seed):
    assert mean_return("CartPole-v1", seed) >= 475.0


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("env", "goal"), [("Acrobot-v1", -90.0), ("Pendulum-v1", -220.0)])
def test_ppo_solves(env, goal, seed):
    assert mean_return(env, seed) >= goal
