"""The environments on the device are Gymnasium's: same states, rewards and ends for the same actions."""

from __future__ import annotations

from tfpar.config import ConfigError
from tfpar.rl import environments, noise, vector

import gymnasium
import numpy as np
import pytest
import tensorflow as tf

SAME_AS_GYMNASIUM = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "Pendulum-v1"]
# Acrobot is chaotic: over 500 steps it amplifies even the rounding of float64 to something that is seen, in a few of a
# thousand episodes. So it is compared over stretches of so many steps, each of which begins in Gymnasium's state.
STRETCH = {"Acrobot-v1": 100}


def played(name: str, episodes: int) -> dict[str, np.ndarray]:
    """Random episodes of Gymnasium: states before each step [T, s, n], and actions and what they led to [T, n]."""
    env = gymnasium.make(name)
    env.action_space.seed(1)
    limit = env.spec.max_episode_steps
    shape = env.observation_space.shape
    record = {
        "states": np.zeros([limit, len(env.unwrapped.state), episodes]) if env.reset(seed=0) else None,
        "actions": np.zeros([limit, episodes, *env.action_space.shape], env.action_space.dtype),
        "observations": np.zeros([limit, episodes, *shape]),
        "rewards": np.zeros([limit, episodes]),
        "terminated": np.zeros([limit, episodes], bool),
        "alive": np.zeros([limit, episodes], bool),
    }
    for episode in range(episodes):
        env.reset(seed=episode)
        for time in range(limit):
            action = env.action_space.sample()
            record["states"][time, :, episode] = env.unwrapped.state
            observation, reward, terminated, truncated, _ = env.step(action)
            record["actions"][time, episode] = action
            record["observations"][time, episode] = observation
            record["rewards"][time, episode] = reward
            record["terminated"][time, episode] = terminated
            record["alive"][time, episode] = True
            if terminated or truncated:
                assert truncated == (time == limit - 1)
                break
    return record


def compare(name: str, episodes: int) -> None:
    environment, expected = environments.find(name), played(name, episodes)
    limit = environment.max_steps
    assert expected["actions"].shape[0] == limit
    begins = np.arange(limit) % STRETCH.get(name, limit) == 0

    @tf.function(jit_compile=True, autograph=False)
    def replay(states, actions, begins):
        def body(carry, now):
            action, given, begin = now
            state = tuple(tf.where(begin, one, other) for one, other in zip(tf.unstack(given), carry[0], strict=True))
            moved = environment.step(state, action, [])
            return moved.state, environment.observe(moved.state), moved.reward, moved.terminated

        start = tuple(tf.unstack(states[0]))
        zeros = body((start,), (actions[0], states[0], begins[0]))
        return tf.scan(body, (actions, states, begins), (start, *map(tf.zeros_like, zeros[1:])))

    # In the type of Gymnasium's own states: over hundreds of steps of a chaotic system float32 would drift away.
    actions = expected["actions"]
    actions = actions.astype(np.int32) if actions.dtype.kind == "i" else actions
    _, observations, rewards, terminated = replay(
        tf.constant(expected["states"]), tf.constant(actions), tf.constant(begins)
    )
    alive = expected["alive"]
    np.testing.assert_allclose(observations.numpy()[alive], expected["observations"][alive], atol=1e-5, rtol=1e-6)
    np.testing.assert_allclose(rewards.numpy()[alive], expected["rewards"][alive], atol=1e-5)
    np.testing.assert_array_equal(terminated.numpy()[alive], expected["terminated"][alive])

    # In float32, as in training, each step by itself.
    flat = [tf.constant(part[alive], tf.float32) for part in expected["states"].transpose(1, 0, 2)]
    moved = environment.step(tuple(flat), tf.constant(actions[alive]), [])
    np.testing.assert_allclose(environment.observe(moved.state), expected["observations"][alive], atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(moved.reward, expected["rewards"][alive], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SAME_AS_GYMNASIUM)
def test_dynamics_are_those_of_gymnasium(name):
    compare(name, episodes=3 if name == "Acrobot-v1" else 20)


@pytest.mark.proof
@pytest.mark.parametrize("name", SAME_AS_GYMNASIUM)
def test_dynamics_are_those_of_gymnasium_over_a_thousand_episodes(name):
    compare(name, episodes=1000)


@pytest.mark.parametrize("name", SAME_AS_GYMNASIUM)
def test_starts_lie_where_those_of_gymnasium_do(name):
    environment, env = environments.find(name), gymnasium.make(name)
    starts = np.stack([(env.reset(seed=seed), np.array(env.unwrapped.state))[1] for seed in range(500)])
    ours = vector.reset(environment, tf.constant([3, 4]), tf.range(2000)).state
    for part, theirs in zip(ours, starts.T, strict=True):
        width = max(np.ptp(theirs), 1e-6)
        assert abs(np.min(part) - np.min(theirs)) < 0.05 * width
        assert abs(np.max(part) - np.max(theirs)) < 0.05 * width
        assert abs(np.mean(part) - np.mean(theirs)) < 0.1 * width


def test_catch_is_the_game_of_bsuite():
    """Against the rules written down in plain Python."""
    environment, random = environments.find("Catch"), np.random.default_rng(0)
    current = vector.reset(environment, tf.constant([1, 2]), tf.range(8))
    ball = np.stack([part.numpy() for part in current.state], axis=1)
    for time in range(30):
        action = random.integers(0, 3, 8).astype(np.int32)
        ball[:, 0] += 1
        ball[:, 2] = np.clip(ball[:, 2] + action - 1, 0, 4)
        outcome = vector.step(environment, current, tf.constant(action), tf.constant([1, 2]), tf.range(8), time)
        down = ball[:, 0] == 9
        board = np.zeros([8, 10, 5, 1])
        board[np.arange(8), ball[:, 0], ball[:, 1], 0] = 1
        board[np.arange(8), 9, ball[:, 2], 0] = 1
        np.testing.assert_array_equal(outcome.observation, board)
        np.testing.assert_array_equal(outcome.reward, np.where(down, np.where(ball[:, 1] == ball[:, 2], 1, -1), 0))
        np.testing.assert_array_equal(outcome.terminated, down)
        current = outcome.vector
        fresh = np.stack([part.numpy() for part in current.state], axis=1)
        ball = np.where(down[:, np.newaxis], fresh, ball)
        np.testing.assert_array_equal(ball, fresh)
    assert environment.render(board[0]).shape == (160, 80, 3)


def test_the_time_limit_cuts_off_and_a_new_episode_begins():
    environment = environments.find("MountainCar-v0")
    seed, index = tf.constant([5, 6]), tf.range(3)
    current = vector.reset(environment, seed, index)
    # Cars that stand on the brake never arrive; the last one starts before the flag.
    current = current._replace(
        state=tuple(tf.concat([part[:2], [value]], 0) for part, value in zip(current.state, (0.499, 0.07), strict=True))
    )
    for time in range(200):
        outcome = vector.step(environment, current, tf.constant([1, 1, 2]), seed, index, tf.constant(time))
        current = outcome.vector
        if time == 0:
            np.testing.assert_array_equal(outcome.terminated, [False, False, True])
            np.testing.assert_array_equal(outcome.episode_return, [0, 0, -1])
            np.testing.assert_array_equal(current.steps, [1, 1, 0])
            assert outcome.observation[2, 0] > 0.5 > current.state[0][2] + 0.5
    np.testing.assert_array_equal(outcome.truncated[:2], [True, True])
    np.testing.assert_array_equal(outcome.terminated[:2], [False, False])
    np.testing.assert_array_equal(outcome.episode_return[:2], [-200, -200])
    np.testing.assert_array_equal(outcome.episode_length[:2], [200, 200])
    np.testing.assert_array_equal(current.steps[:2], [0, 0])


def test_noise_belongs_to_an_environment_wherever_it_is_computed():
    def draw(index):
        return tf.stack(noise.uniforms(6, seed=tf.constant([7, -8]), stream=noise.RESET, index=index, time=3))

    compiled = tf.function(draw, jit_compile=True, autograph=False)
    whole = draw(tf.range(4096)).numpy()
    np.testing.assert_array_equal(whole, compiled(tf.range(4096)))
    np.testing.assert_array_equal(whole[:, 1000:1010], draw(tf.range(1000, 1010)))
    assert 0.0 <= whole.min() < 0.001
    assert 0.999 < whole.max() < 1.0
    np.testing.assert_allclose(whole.mean(axis=1), 0.5, atol=0.02)
    np.testing.assert_allclose(np.corrcoef(whole), np.eye(6), atol=0.06)
    assert len(np.unique(whole)) > 0.99 * whole.size
    gauss = np.stack(noise.normals(3, seed=tf.constant([7, 8]), stream=noise.ACTION, index=tf.range(9000), time=4))
    np.testing.assert_allclose(gauss.mean(axis=1), 0.0, atol=0.04)
    np.testing.assert_allclose(gauss.std(axis=1), 1.0, atol=0.03)


def test_names():
    assert {*SAME_AS_GYMNASIUM, "Catch"} <= set(environments.names())
    with pytest.raises(ConfigError, match=r"--env.*CartPole-v1"):
        environments.find("Cartpole-v1")
    with pytest.raises(ConfigError, match="exists already"):
        environments.register(environments.find("Catch"))
