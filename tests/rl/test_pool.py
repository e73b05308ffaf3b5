"""Acting in EnvPool: the episodes are EnvPool's own, runs have the same bits, and what is refused."""

from __future__ import annotations

import json
import os
import pathlib
import sys

from tests import nursery
from tests.rl.harness import SMALL, trained, values
from tfpar import rl
from tfpar.config import ConfigError
from tfpar.rl import environments
from tfpar.rl.environments.pool import Pool

import envpool
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
ENVIRONMENT = {"env": "envpool:CartPole-v1"}


def test_steps_are_those_of_envpool_with_new_episodes_a_step_earlier():
    pool, plain = Pool("CartPole-v1", 3), envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3, seed=[4, 5, 6])
    observation, _ = pool.reset(seed=[4, 5, 6])
    expected, _ = plain.reset()
    np.testing.assert_array_equal(observation, expected)
    assert not np.array_equal(observation[0], observation[1])
    random, ended = np.random.default_rng(0), np.zeros(3, int)
    for _ in range(200):
        action = random.integers(0, 2, 3)
        observation, reward, terminated, truncated, info = pool.step(action)
        expected, *others, _ = plain.step(action.astype(np.int32))
        np.testing.assert_array_equal(info["final_obs"], expected)
        for one, two in zip((reward, terminated, truncated), others, strict=True):
            np.testing.assert_array_equal(one, two)
        done = np.flatnonzero(terminated | truncated)
        if len(done):
            expected = expected.copy()
            expected[done] = plain.reset(done)[0]
        np.testing.assert_array_equal(observation, expected)
        ended[done] += 1
    pool.close()
    assert ended.min() > 3


def test_a_run_has_the_same_bits_twice_and_reports_its_pace(plain):
    trainer, summary, workdir = plain
    other, _ = trained(**ENVIRONMENT)
    for one, two in zip(values(trainer), values(other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert summary["eval"]["return"] == summary["eval"]["length"] > 7.0
    assert summary["env_steps_per_second"] > 0.0
    assert "time/env_steps_per_second" in (workdir / "metrics.csv").read_text()


@pytest.mark.parametrize("command", ["play", "evaluate"])
def test_a_saved_policy_plays_in_the_environment_of_its_run(plain, command):
    flags = [f"--model_file={plain[2]}/model.keras", *(["--episodes=100"] if command == "play" else [])]
    ended = nursery.run([sys.executable, f"experiments/{command}.py", *flags], capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["env"], result["episodes"]) == ("envpool:CartPole-v1", 100)
    assert result["return"] == result["length"] > 7.0


def run(command: str, *flags: str, **environ: str):
    line = [sys.executable, f"experiments/{command}.py", *flags]
    return nursery.run(line, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environ}, check=False)


@pytest.mark.parametrize(
    ("command", "flag"),
    [("evaluate", "--devices=2"), ("evaluate", "--split=train"), ("export", "--dataset=digits")],
)
def test_options_without_effect_on_a_policy_are_refused(plain, tmp_path, command, flag):
    output = [f"--output={tmp_path}/new"] if command == "export" else []
    ended = run(command, f"--model_file={plain[2]}/model.keras", "--seed=1", flag, *output)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith(f"error: {flag.partition('=')[0]} has no effect here: {plain[2]}/model.keras is a")


def test_of_several_workers_the_chief_evaluates_a_policy(plain):
    workers = {"cluster": {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}, "task": {"type": "worker", "index": 1}}
    ended = run("evaluate", f"--model_file={plain[2]}/model.keras", TF_CONFIG=json.dumps(workers))
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr


def test_ataris_pictures_have_their_frames_behind():
    """Four frames of 84 x 84 pixels, which EnvPool has in front."""
    environment = environments.find("envpool:Breakout-v5")
    assert environment.observation_shape == (84, 84, 4)
    assert environment.observation_scale == 1.0 / 255.0


@pytest.mark.proof
def test_dqn_learns_from_ataris_pictures():
    options = {"environments": 2, "rollout_steps": 4, "minibatches": 1, "replay_size": 64, "replay_batch": 4}
    trainer, summary = trained(env="envpool:Breakout-v5", algorithm="dqn", steps=2, eval_episodes=1, **options)
    assert trainer.model.layers[2].name == "convolution_0"
    assert summary["eval"]["length"] > 0.0


def test_actions_of_several_numbers_are_clipped():
    environment = environments.find("envpool:Pendulum-v1")
    assert environment.actions == environments.Continuous((-2.0,), (2.0,))
    envs = environment.make(2, False)
    envs.reset(seed=[1, 2])
    _, reward, *_ = envs.step(environment.to_host(np.array([[9.0], [0.0]], np.float32)))
    envs.close()
    assert reward.shape == (2,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"env": "envpool:Nothing-v0"},
            r"--env=envpool:Nothing-v0: EnvPool cannot create it: there is no such.*list_all",
        ),
        ({"env": "envpool:Pog-v5"}, r"--env=envpool:Pog-v5: .* Did you mean 'Pong-v5'"),
        (
            {**ENVIRONMENT, "env_processes": True},
            r"--env_processes: EnvPool steps envpool:CartPole-v1 in its own threads",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        rl.ReinforcementTrainer(**(SMALL | {"steps": 20} | options))


def test_without_its_package_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(ConfigError, match=r"pip install 'tfpar\[envpool\]'"):
        environments.find("envpool:CartPole-v1")
