"""Acting in Gymnasium: what actors record, that time changes no bit, and what is refused."""

from __future__ import annotations

import gc
import pathlib
import re
import weakref

from tests.rl.harness import SMALL, trained, values
from tfpar import rl
from tfpar.config import ConfigError, ReinforcementConfig, TrainingError
from tfpar.rl import environments
from tfpar.rl.actors import _Rollout
from tfpar.rl.environments.host import to_host
from tfpar.rl.playing import episodes, film

import gymnasium
import numpy as np
import pytest

ENVIRONMENT = {"env": "gym:CartPole-v1"}


class Pixels(gymnasium.Env):
    """Pictures that show the action to take; Discrete actions that do not start at 0."""

    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(2, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = 0
        return self._picture(), {}

    def step(self, action):
        reward = float(action == 5 + self.place % 2)
        self.place += 1
        return self._picture(), reward, self.place == 6, False, {}

    def _picture(self):
        return np.full([36, 36, 1], 255 * (self.place % 2), np.uint8)


class Broken(gymnasium.Env):
    """Fails in its first episode."""

    observation_space = gymnasium.spaces.Dict(
        {"a": gymnasium.spaces.Discrete(3), "b": gymnasium.spaces.Box(0, 1, (2,))}
    )
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def reset(self, *, seed=None, options=None):
        self.left = 20
        return {"a": 1, "b": np.zeros(2, np.float32)}, {}

    def step(self, action):
        self.left -= 1
        if not self.left:
            raise ValueError("the motor is on fire")
        return {"a": 2, "b": np.ones(2, np.float32)}, 0.0, False, False, {}


class Many(Broken):
    action_space = gymnasium.spaces.MultiDiscrete([2, 2])


class OfSpace(gymnasium.Env):
    """Observations of any space."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, observed, render_mode=None):
        self.observation_space = observed

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, True, False, {}


for name, observed in (
    ("Sequence-v0", gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(3))),
    ("Number-v0", gymnasium.spaces.Box(0.0, 1.0, ())),
):
    gymnasium.register(name, OfSpace, kwargs={"observed": observed})
for name, entry in (("Pixels-v0", Pixels), ("Broken-v0", Broken), ("Many-v0", Many)):
    gymnasium.register(name, entry)


def test_a_record_is_what_plain_episodes_give():
    """The recorded actions, played once more in single environments from the same seeds."""
    environment, steps = environments.find("gym:CartPole-v1"), 60
    options = ReinforcementConfig(environments=3, rollout_steps=steps, minibatches=1, reward_scale=2.0)
    random = np.random.default_rng(0)
    envs = environment.make(3, False)
    rollout = _Rollout(environment, envs, [11, 12, 13])
    records = [
        rollout.make(options, lambda x, _: (random.integers(0, 2, len(x)), np.full(len(x), -0.5))) for _ in range(2)
    ]
    envs.close()
    record = [np.concatenate(parts) for parts in zip(*(each._asdict().values() for each in records), strict=True)]
    record = type(records[0])(*record)
    assert record.ended.sum() > 6
    for env in range(3):
        single = gymnasium.make("CartPole-v1")
        observation, _ = single.reset(seed=11 + env)
        total, length = 0.0, 0
        for place in range(2 * steps):
            np.testing.assert_array_equal(record.observation[place, env], observation)
            observation, reward, terminated, truncated, _ = single.step(int(record.action[place, env]))
            total, length = total + reward, length + 1
            np.testing.assert_array_equal(record.following[place, env], observation)
            assert record.reward[place, env] == 2.0 * reward
            assert (record.terminated[place, env], record.ended[place, env]) == (terminated, terminated or truncated)
            expected = (total, length) if terminated or truncated else (0.0, 0.0)
            assert (record.episode_return[place, env], record.episode_length[place, env]) == expected
            if terminated or truncated:
                observation, _ = single.reset()
                total, length = 0.0, 0
    assert np.all(record.log_prob == -0.5)


def test_the_bits_do_not_depend_on_who_is_first(plain):
    trainer, summary, workdir = plain
    other, _ = trained(**ENVIRONMENT)
    for one, two in zip(values(trainer), values(other), strict=True):
        np.testing.assert_array_equal(one, two)
    assert summary["eval"]["return"] == summary["eval"]["length"] > 7.0
    for name in ("learner_waiting", "actor_waiting"):
        assert 0.0 <= summary.history[name][-1] <= 1.0
        assert f"metrics/{name}" in (workdir / "metrics.csv").read_text()
    assert summary.history["learner_waiting"][-1] + summary.history["actor_waiting"][-1] > 0.0


def test_actors_end_with_their_trainer():
    """Not at the exit of the process, until which their environments would stay, too."""
    trainer, _ = trained(**ENVIRONMENT, steps=4)
    threads = [actor._thread for actor in trainer.actors._every]
    gc.collect()
    assert all(thread.is_alive() for thread in threads)
    del trainer
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)


def test_two_replicas_of_two_actors_learn_what_one_does_with_all_environments(plain):
    trainer, summary, _ = plain
    other, result = trained(**ENVIRONMENT, strategy="mirrored", devices=2, actors=2)
    for one, two in zip(values(trainer), values(other), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-4)
    np.testing.assert_allclose(result.history["return"], summary.history["return"], atol=1e-3)


def test_a_resumed_run_goes_on_with_new_episodes(plain, tmp_path, messages):
    trained(**ENVIRONMENT, workdir=str(tmp_path), stop_after=10)
    _, result = trained(**ENVIRONMENT, workdir=str(tmp_path), verbose=1)
    assert any("environments of the host cannot be saved" in line for line in messages)
    assert result["steps"] == 20
    assert result["params_sha256"] != plain[1]["params_sha256"]


def test_what_dqn_remembers_of_an_episode_ends_where_a_resumed_run_begins_others(tmp_path):
    """Rewards are summed over steps until `ended`: never from one episode into another."""
    options = {"environments": 2, "rollout_steps": 4, "minibatches": 1, "replay_size": 64, "replay_batch": 4}
    options |= {"algorithm": "dqn", "rollout_epochs": 1, "steps": 6, "workdir": str(tmp_path), **ENVIRONMENT}
    trained(**options, stop_after=3)
    trainer, _ = trained(**options)
    _, observation, _, _, following, _, ended, written, *_ = (array[0] for array in trainer.memory.export().values())
    leaves = (following[: written - 1] != observation[1:written]).any(axis=-1)
    assert written == 24
    assert leaves[11].all()  # of 12 before the stop
    assert ended[: written - 1][leaves].all()


def test_dqn_learns_from_pictures_in_processes_of_their_own():
    """Actions that do not start at 0, observations of bytes, one process for each of two environments."""
    options = {"environments": 2, "rollout_steps": 4, "minibatches": 1, "replay_size": 64, "replay_batch": 4}
    trainer, summary = trained(
        env="gym:Pixels-v0", algorithm="dqn", env_processes=True, steps=4, eval_episodes=2, **options
    )
    assert [layer.name for layer in trainer.model.layers[1:3]] == ["rescaling", "convolution_0"]
    assert summary["eval"]["length"] == 6.0
    pictures = [array for array in trainer.memory.export().values() if array.shape[-3:] == (36, 36, 1)]
    assert [(array.dtype, array.max()) for array in pictures] == [(np.uint8, 255)] * 2


def test_an_environment_that_fails_is_named(tmp_path):
    with pytest.raises(TrainingError, match=r"--env=gym:Broken-v0: an environment failed: ValueError: the motor is on"):
        trained(env="gym:Broken-v0", workdir=str(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": "gym:Nothing-v0"}, r"--env=gym:Nothing-v0: Gymnasium cannot create it.*`gymnasium.registry`"),
        ({"env": "gym:CartPol-v1"}, r"--env=gym:CartPol-v1: .* Did you mean 'CartPole-v1'"),
        ({"env": "LunarLander-v3"}, r"--env='LunarLander-v3'.*any environment of Gymnasium"),
        ({"env": "gym:Many-v0"}, r"--env=gym:Many-v0: its action space MultiDiscrete.*Wrap the environment"),
        (
            {"env": "gym:Sequence-v0"},
            r"--env=gym:Sequence-v0: its observation space Sequence.*arrays of one shape.*Wrap",
        ),
        ({"env": "gym:CartPole-v1", "actors": 3}, r"--actors=3 does not divide the 8 environments of a replica"),
        (
            {"env": "CartPole-v1", "actors": 2},
            r"--actors=2 and --env_processes=False apply to environments of the",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        rl.ReinforcementTrainer(**(SMALL | {"steps": 20} | options))


def test_an_observation_may_be_a_single_number():
    environment = environments.find("gym:Number-v0")
    assert environment.observation_shape == (1,)
    envs = environment.make(3, False)
    assert envs.reset(seed=1)[0].shape == (3, 1)
    envs.close()
    assert rl.trainer.default_policy(environment, ReinforcementConfig()).input_shape == (None, 1)


def test_the_environments_of_commands_in_the_docs_need_only_gymnasium():
    """The extra `rl` installs Gymnasium alone, as `make setup` does."""
    page = pathlib.Path(__file__).parents[2] / "docs" / "reinforcement.md"
    names = re.findall(r"--env=(gym:[\w-]+)", page.read_text())
    for name in {name for name in names if name != "gym:NAME"}:
        assert environments.find(name).name == name
    assert names


def test_observations_of_several_parts_are_flattened():
    environment = environments.find("gym:Broken-v0")
    assert environment.observation_shape == (5,)
    assert environment.actions == environments.Continuous((-1.0,), (1.0,))
    assert environment.to_host(np.array([[3.0], [-0.5]], np.float32)).tolist() == [[1.0], [-0.5]]


def test_episodes_without_an_end_are_cut_off(monkeypatch, caplog):
    """A policy that walks into a wall of CliffWalking never arrives."""
    monkeypatch.setattr(episodes, "LONGEST", 30)
    cliffs, pole = environments.find("gym:CliffWalking-v1"), environments.find("gym:CartPole-v1")
    assert (cliffs.endless, pole.endless) == (True, False)
    with caplog.at_level("WARNING", "tfpar"):
        played = episodes.play_outputs(lambda x: np.eye(4)[[3] * len(x)], cliffs.observation_shape, cliffs, range(3))
    np.testing.assert_array_equal(played.lengths, 30)
    np.testing.assert_array_equal(played.returns, -30.0)
    assert "--env=gym:CliffWalking-v1 has no time limit: episodes are cut off after 30 steps" in caplog.text


@pytest.mark.parametrize("shape", [(), (1,), (2, 2)])
def test_actions_of_a_box_have_its_shape_and_are_clipped(shape):
    space = gymnasium.spaces.Box(-1.0, 1.0, shape)
    action = np.linspace(-2.0, 2.0, 3 * space.low.size, dtype=np.float32).reshape([3, -1])
    found = to_host(space, action)
    assert found.shape == (3, *shape)
    assert all(space.contains(each) for each in found)


def test_an_environment_without_a_render_mode_is_not_drawn(caplog):
    gymnasium.register("tests/Undrawn-v0", Undrawn)
    trainer = rl.ReinforcementTrainer(**SMALL | {"env": "gym:tests/Undrawn-v0", "steps": 4, "jit_compile": False})
    with caplog.at_level("WARNING", "tfpar"):
        assert trainer._film() is None
    assert "TensorBoard shows no episode: --env=gym:tests/Undrawn-v0 cannot be rendered" in caplog.text


def test_a_film_of_a_long_episode_keeps_few_pictures(monkeypatch):
    living = []

    def rendered(envs, name):
        picture = np.zeros([4, 4, 3], np.uint8)
        living.append(weakref.ref(picture))
        return picture

    monkeypatch.setattr(film, "_rendered", rendered)
    monkeypatch.setattr(film, "_LONGEST", 300)
    gymnasium.register("tests/Endless-v0", Endless)
    trainer = rl.ReinforcementTrainer(**SMALL | {"env": "gym:tests/Endless-v0", "steps": 4, "jit_compile": False})
    frames, rewards = trainer._film._on_host()
    assert (sorted(frames), len(rewards)) == (list(range(0, 300, 8)), 300)
    assert sum(each() is not None for each in living) == len(frames)
    pictures, captions = trainer._film()
    assert (len(pictures), captions[0], captions[-1]) == (16, "0: 0", "296: 296")


class Endless(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Undrawn(Endless):
    def __init__(self):
        super().__init__()
