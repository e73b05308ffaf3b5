"""Learning by acting through the same step, loops and files as all training."""

from __future__ import annotations

import dataclasses
import json

from tests.integration.test_experiments import script, succeeded
from tests.rl.harness import SMALL, trained, values
from tfpar import rl
from tfpar.commands import train_reinforcement
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.config import flags as config_flags
from tfpar.config.errors import TrainingError
from tfpar.config.sections.reinforcement_presets import preset
from tfpar.rl import environments
from tfpar.rl.environments.cartpole import CARTPOLE
from tfpar.rl.layers import ObservationNormalization
from tfpar.rl.normalization import normalization_layers
from tfpar.rl.options import with_options
from tfpar.rl.playing import episodes, evaluation

import gymnasium
import keras
import numpy as np
import pytest
import tensorflow as tf
from absl import flags


def test_what_a_run_leaves_behind(plain):
    trainer, summary, workdir = plain
    assert summary == json.loads((workdir / "summary.json").read_text())
    assert summary["steps"] == 20
    assert summary["eval"].keys() == {"return", "length"}
    assert 8.0 < summary["eval"]["return"] <= 500.0
    assert summary["eval"]["return"] == summary["eval"]["length"]
    assert set(summary.history) >= {"loss", "return", "length", "kl", "entropy", "clipped", "explained_variance"}
    recorded = (workdir / "metrics.csv").read_text()
    assert "metrics/return" in recorded
    # Acting and environments cost FLOPs too, so those of training say nothing about how much of the peak is used.
    assert summary["mfu"] is None
    assert "time/mfu" not in recorded
    # Raw observations in, logits first, then the value; statistics of 5 rounds but the last are in it.
    model = keras.saving.load_model(workdir / "model.keras")
    logits, value = model.predict_on_batch(np.zeros([3, 4], np.float32))
    assert (logits.shape, value.shape) == ((3, 2), (3, 1))
    assert float(model.get_layer("observation_normalization").observations) == 4 * 64
    assert trainer.evaluate() == summary["eval"]


def test_the_saved_policy_does_in_gymnasium_what_the_evaluation_says(plain):
    """The same episodes: the starts of the evaluation, set as Gymnasium's states."""
    from tfpar.rl import environments, vector

    _, summary, workdir = plain
    model = keras.saving.load_model(workdir / "model.keras")
    env = gymnasium.make("CartPole-v1")
    start = vector.reset(environments.find("CartPole-v1"), tf.constant(evaluation._SEED), tf.range(4)).state
    returns = []
    for episode in range(4):
        env.reset()
        env.unwrapped.state = np.array([part[episode] for part in start], np.float64)
        observation, total, over = np.array(env.unwrapped.state, np.float32), 0.0, False
        while not over:
            logits = model(observation[np.newaxis])[0]
            observation, reward, terminated, truncated, _ = env.step(int(np.argmax(logits)))
            total, over = total + reward, terminated or truncated
        returns.append(total)
    assert np.mean(returns) == pytest.approx(summary["eval"]["return"], abs=0.5)


def test_a_saved_policy_plays_in_gymnasium(plain):
    _, _, workdir = plain
    model = keras.saving.load_model(workdir / "model.keras")
    played = episodes.play(model, "CartPole-v1", episodes=3, seed=5)
    again = episodes.play(model, "CartPole-v1", episodes=1, seed=6)
    assert played.returns[1] == again.returns[0] == again.lengths[0] > 7
    assert episodes.Played(np.array([1.0, 3.0]), np.array([4, 6])).summary("Some-v0") == {
        "env": "Some-v0",
        "episodes": 2,
        "return": 2.0,
        "return_std": 1.0,
        "return_min": 1.0,
        "return_max": 3.0,
        "length": 5.0,
    }
    with pytest.raises(ConfigError, match=r"observations have shape \(2,\), and the model takes \(4,\)"):
        episodes.play(model, "MountainCar-v0")
    with pytest.raises(ConfigError, match=r"--env=gym:Nothing-v0: Gymnasium cannot create it"):
        episodes.play(model, "Nothing-v0")


def test_a_saved_policy_is_exported_with_all_its_outputs(plain, tmp_path):
    _, _, workdir = plain
    exported = script("export", f"--model_file={workdir / 'model.keras'}", f"--output={tmp_path / 'policy'}")
    assert "saved_model, checked on 64 examples" in succeeded(exported)
    x = np.ones([3, 4], np.float32)
    loaded = tf.saved_model.load(str(tmp_path / "policy"))
    for output, expected in zip(loaded.serve(x), keras.saving.load_model(workdir / "model.keras")(x), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-5)


def test_two_replicas_learn_what_one_does_with_all_environments(plain):
    """20 steps, to 1e-4: environments, minibatches, advantages and statistics are those of one replica."""
    trainer, summary, _ = plain
    other, result = trained(strategy="mirrored", devices=2)
    for one, two in zip(values(trainer), values(other), strict=True):
        np.testing.assert_allclose(two, one, atol=1e-4)
    np.testing.assert_allclose(result.history["return"], summary.history["return"], atol=1e-3)
    assert result["replicas"] == 2


@pytest.mark.parametrize("stop", [8, 10])  # between two rounds, and in the middle of one
def test_a_resumed_run_goes_on_bit_by_bit(plain, tmp_path, stop):
    trainer, summary, _ = plain
    first, _ = trained(workdir=str(tmp_path), stop_after=stop)
    assert any((one != two).any() for one, two in zip(values(trainer), values(first), strict=True))
    second, result = trained(workdir=str(tmp_path))
    for one, two in zip(values(trainer), values(second), strict=True):
        np.testing.assert_array_equal(one, two)
    assert result["params_sha256"] == summary["params_sha256"]
    for name, array in trainer.memory.export().items():
        np.testing.assert_array_equal(array, second.memory.export()[name])


def test_a_run_resumed_on_other_replicas_begins_new_episodes_in_the_middle_of_a_round(tmp_path, messages):
    trained(workdir=str(tmp_path), stop_after=6)
    _, result = trained(workdir=str(tmp_path), strategy="mirrored", devices=2, verbose=1)
    assert any("new episodes begin" in line for line in messages)
    assert result["steps"] == 20
    assert np.isfinite(result["train_loss"])


def test_a_run_that_has_stopped_at_its_goal_continues(tmp_path, messages, monkeypatch):
    """By a larger --env_steps, in steps, or without its goal; 100 rounds have other epochs than 10."""
    monkeypatch.setitem(environments._ENVIRONMENTS, "Easy", dataclasses.replace(CARTPOLE, name="Easy", goal=1.0))
    options = {"env": "Easy", "steps": 0, "eval_every": 4, "verbose": 1, "workdir": str(tmp_path)}
    _, result = trained(**options, env_steps=640, stop_at_goal=True)
    assert (result["steps"], result["stopped_by"][:14]) == (4, "--stop_at_goal")
    trained(**options, env_steps=640, stop_at_goal=True)
    assert any("more --env_steps, or --stop_at_goal=false, continue it" in line for line in messages)
    _, result = trained(**options, env_steps=640, stop_at_goal=False)
    assert (result["steps"], result["stopped_by"]) == (40, None)
    _, result = trained(**options, env_steps=6400, stop_at_goal=True)
    assert result["steps"] == 44
    _, result = trained(**options | {"steps": 404}, stop_at_goal=True)
    assert result["steps"] == 48


def test_continuous_actions_micro_batches_and_xla(tmp_path):
    _, result = trained(env="Pendulum-v1", accumulate_steps=2, jit_compile=True, workdir=str(tmp_path), steps=8)
    assert result["jit_compile"]
    assert result["eval"]["length"] == 200.0
    assert -2000.0 < result["eval"]["return"] < -200.0
    means, _, deviations = keras.saving.load_model(tmp_path / "model.keras")(np.zeros([2, 3], np.float32))
    assert means.shape == deviations.shape == (2, 1)
    assert np.any(np.asarray(deviations) != 0.0)  # it is learned


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_mixed_precision_scales_observations_in_float32(env, tmp_path):
    trainer, result = trained(env=env, precision="mixed_bfloat16", steps=8, workdir=str(tmp_path))
    assert np.isfinite(result["train_loss"])
    layer = trainer.model.get_layer("observation_normalization")
    assert {weight.dtype for weight in layer.weights} == {"float32"}
    layer.mean.assign(np.full(layer.mean.shape, 100.0))
    scaled = layer(np.full([1, *layer.mean.shape], 100.1, np.float32))
    assert scaled.dtype == "bfloat16"
    deviations = 0.1 / np.sqrt(layer.variance)  # 100.1 is 100 in bfloat16
    np.testing.assert_allclose(np.asarray(scaled, np.float32)[0], np.minimum(deviations, 10.0), rtol=0.01)
    saved = keras.saving.load_model(tmp_path / "model.keras")
    assert saved.get_layer("observation_normalization").compute_dtype == "bfloat16"


@pytest.mark.parametrize("priority", [0.0, 0.6])
def test_an_own_network_in_mixed_precision_learns_values_in_float32(priority):
    def build(environment):
        layers = [keras.layers.Dense(8, activation="relu"), keras.layers.Dense(environment.actions.count)]
        return keras.Sequential([keras.Input(environment.observation_shape), *layers])

    replay = {"replay_batch": 16, "replay_size": 256, "replay_priority": priority}
    made = rl.ReinforcementTrainer(
        "CartPole-v1",
        model=build,
        algorithm="dqn",
        precision="mixed_bfloat16",
        environments=8,
        steps=8,
        eval_episodes=2,
        jit_compile=False,
        verbose=0,
        **replay,
    )
    assert np.isfinite(made.fit()["train_loss"])
    assert made.model.compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": "CartPole-v2"}, r"--env='CartPole-v2'.*Did you mean 'CartPole-v1'"),
        ({"minibatches": 3}, r"--rollout_steps=8 is not divisible by --minibatches=3"),
        ({"steps": 0}, r"how long is the run\? Give --env_steps"),
        ({"steps": 0, "epochs": 2}, r"--epochs: an environment has no epochs"),
        ({"env_steps": 640}, r"--env_steps=640 and --steps=20 both"),
        ({"environments": 7, "strategy": "mirrored", "devices": 2}, r"--environments=7 is not divisible by the 2"),
        ({"accumulate_steps": 5}, r"--accumulate_steps=5 does not divide the 32 transitions"),
        ({"shard": "optimizer"}, r"--shard=optimizer does not work with"),
        ({"offload": "optimizer"}, r"--offload=optimizer does not work with .* Use --offload=none"),
        ({"jit_segments": "auto"}, r"--jit_segments=auto does not work with .* Use --jit_segments=1"),
        ({"local_steps": 5}, r"--local_steps=5 does not work with"),
        ({"schedule": "plateau"}, r"--schedule=plateau watches .* Use --schedule=constant or cosine"),
        ({"augment": "flip"}, r"--augment=flip has no effect on reinforcement learning, .* Leave it out"),
        ({"on_bad_record": "skip"}, r"--on_bad_record=skip has no effect"),
        ({"remainder": "drop"}, r"--remainder=drop has no effect"),
        ({"shuffle": False}, r"--shuffle=false has no effect"),
        ({"eval_batch_size": 3}, r"--eval_batch_size=3 has no effect"),
        ({"hidden": "64;64"}, r"--hidden='64;64' is not a list of positive whole numbers"),
    ],
)
def test_what_cannot_work_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        rl.ReinforcementTrainer(**(SMALL | {"steps": 20} | options))


def test_adapters_are_in_the_policy_too():
    trainer = rl.ReinforcementTrainer(**(SMALL | {"steps": 20, "lora": "2"}))
    adapted = {layer.name for layer in trainer.model.layers if getattr(layer, "lora_enabled", False)}
    assert adapted == {"policy_hidden_0", "logits", "critic_hidden_0", "value"}


def options_of(*argv: str) -> dict:
    """The configuration that the command makes of a command line."""
    values = flags.FlagValues()
    config_flags.define(sections=train_reinforcement._SECTIONS, flag_values=values)
    values(["train", *argv])
    return train_reinforcement.configured(values).as_flat_dict()


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "a2c", "env_steps": 1024},
        {"algorithm": "dqn", "steps": 20, "schedule": "cosine"},
        {"env": "Pendulum-v1", "gae_lambda": 0.5},
        {"optimizer": "sgd"},
    ],
)
def test_presets_are_those_of_the_command_line(options):
    flat = with_options(None, options).as_flat_dict()
    assert flat == options_of(*(f"--{name}={value}" for name, value in options.items()))
    assert flat.items() >= options.items()
    assert flat["clip_norm"] == preset("CartPole-v1", flat["algorithm"])["clip_norm"]
    assert (flat["env_steps"] > 0) == ("steps" not in options)
    assert flat["optimizer_args"] == ("" if "optimizer" in options else "epsilon=1e-5")


def test_the_command_refuses_options_of_another_algorithm():
    with pytest.raises(ConfigError, match=r"--algorithm=ppo does not use --n_step=3 \(of dqn\), --target_every=9"):
        options_of("--n_step=3", "--target_every=9")


def test_presets_leave_what_a_configuration_says():
    config = ExperimentConfig.from_flat_dict({"learning_rate": 0.5, "steps": 10})
    flat = with_options(config, {"algorithm": "a2c"}).as_flat_dict()
    assert (flat["learning_rate"], flat["env_steps"], flat["rollout_epochs"]) == (0.5, 0, 1)
    whole = ExperimentConfig.from_flat_dict({"rollout_epochs": 2, "steps": 10})
    assert with_options(whole, {"seed": 7}).as_flat_dict() == whole.as_flat_dict() | {"seed": 7}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("dataset", "mnist", r"--dataset=mnist has no effect .*: give --env\."),
        ("global_batch_size", 7, r"--global_batch_size=7 .* --environments, --rollout_steps and --minibatches\."),
        ("model_args", "units=3", r"--model_args=units=3 .*the function that builds the policy\."),
    ],
)
@pytest.mark.parametrize("whole", [None, ExperimentConfig.from_flat_dict({"rollout_epochs": 2, "steps": 10})])
def test_options_that_follow_from_others_are_refused(name, value, said, whole):
    with pytest.raises(ConfigError, match=said):
        with_options(whole, {"env_steps": 5000, name: value})
    completed = rl.complete(with_options(whole, {}) if whole else with_options(None, {"env_steps": 5000}))
    assert with_options(completed, {name: completed.as_flat_dict()[name]}) == completed


def test_options_of_a_program_are_no_options_of_others():
    assert "env" not in ExperimentConfig().as_flat_dict()
    config = rl.complete(ExperimentConfig.from_flat_dict({"env": "Catch", "env_steps": 5000}))
    assert config.train.steps == 3 * 16  # rollouts of 64 x 32 transitions
    assert config.input.global_batch_size == 512
    assert ExperimentConfig.from_flat_dict(config.as_flat_dict()) == config


def _policy(environment, sizes):
    observation = keras.Input(environment.observation_shape)
    return keras.Model(observation, [keras.layers.Dense(size)(observation) for size in sizes])


def _normalised(environment, sizes, after=(), count=1):
    """A policy that scales observations in a nested model."""
    scaling = [ObservationNormalization(name=f"scale_{place}") for place in range(count)]
    nested = keras.Sequential([keras.Input(environment.observation_shape), *after, *scaling])
    observation = keras.Input(environment.observation_shape)
    read = nested(observation)
    return keras.Model(observation, [keras.layers.Dense(size)(read) for size in sizes])


def test_a_policy_may_scale_observations_in_a_nested_model():
    trainer, _ = trained(model=lambda environment: _normalised(environment, [2, 1]), steps=8)
    [layer] = normalization_layers(trainer.model)
    assert float(layer.observations) == 64.0
    assert np.all(np.asarray(layer.variance) != 1.0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"env": 42}, r"ReinforcementTrainer\(env=42\): give the name of an environment.*or a tfpar.rl.Environment"),
        (
            {"env": dataclasses.replace(CARTPOLE, observation_shape=(3,))},
            r"observation_shape=\(3,\) promises float32 \[n, 3\], but observe returns float32 \[n, 4\] after reset",
        ),
        (
            {"env": dataclasses.replace(CARTPOLE, step=lambda *_: CARTPOLE.step(*_)._replace(reward=tf.zeros([])))},
            r"step returns a reward of shape \[\]; it needs one per environment, \[n\]",
        ),
        (
            {"env": dataclasses.replace(CARTPOLE, step=lambda *_: CARTPOLE.step(*_)._replace(state=tf.zeros([7])))},
            r"reset returns a state of .*, and step one of float32 \[n\]",
        ),
        (
            {"model": lambda environment: _policy(environment, [2])},
            r"outputs \[m, 2\]; --algorithm=ppo in CartPole-v1 .*needs logits \[m, 2\], value \[m, 1\]",
        ),
        (
            {"model": lambda environment: _policy(environment, [2, 1]), "algorithm": "dqn"},
            r"outputs \[m, 2\], \[m, 1\]; --algorithm=dqn .*needs values of the actions \[m, 2\]",
        ),
        (
            {"model": lambda environment: _policy(environments.find("Pendulum-v1"), [2, 1])},
            r"the policy cannot read the observations of CartPole-v1, float32 \[None, 4\]",
        ),
        ({"model": 3}, r"model=3\): give a function that builds a policy for an environment"),
        (
            {"model": lambda environment: _normalised(environment, [2, 1], after=[keras.layers.Dense(5)])},
            r"layer 'scale_0' .* reads \[5\] numbers .* observations of CartPole-v1, \[4\]\. Make it the first layer",
        ),
        (
            {"model": lambda environment: _normalised(environment, [2, 1], count=2)},
            r"the policy has 2 layers ObservationNormalization \('scale_0', 'scale_1'\)",
        ),
        (
            {"model": lambda environment: _normalised(environment, [2]), "algorithm": "dqn"},
            r"--algorithm=dqn does not update the statistics of ObservationNormalization \(layer 'scale_0'\)",
        ),
    ],
)
def test_own_parts_that_do_not_fit_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        rl.ReinforcementTrainer(**(SMALL | {"steps": 20} | options))


@pytest.mark.parametrize("where", ["reward", "state"])
def test_an_environment_that_gives_nan_is_named_as_the_cause(where):
    def step(state, action, numbers):
        moved = CARTPOLE.step(state, action, numbers)
        return moved._replace(**{where: tf.nest.map_structure(lambda part: part * np.nan, getattr(moved, where))})

    with pytest.raises(TrainingError, match="rewards or observations of CartPole-v1 were NaN or infinite") as caught:
        trained(env=dataclasses.replace(CARTPOLE, step=step), max_bad_steps=2)
    assert "--dataset" not in str(caught.value)


def test_an_environment_that_is_only_on_the_device_is_not_played_in_gymnasium(plain):
    model = keras.saving.load_model(plain[2] / "model.keras")
    with pytest.raises(ConfigError, match=r"--env=Catch: Catch exists only on the device, .*`eval` in summary.json"):
        episodes.play(model, "Catch")


def test_pictures_of_an_episode_take_any_seed():
    """As `--seed` does: one of more than 31 bits ended the run at its first evaluation."""
    keras.utils.clear_session(free_memory=False)
    trainer = rl.ReinforcementTrainer(**SMALL | {"jit_compile": False, "steps": 4, "seed": 5_000_000_000})
    pictures, captions = trainer._film()
    assert len(pictures) == len(captions) > 1
