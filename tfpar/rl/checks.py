"""Checks of the user's own environments and policies, before the first rollout.

Shapes: n environments, a numbers per action, or actions to choose from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfpar.config import ConfigError
from tfpar.rl.environments import AnyEnvironment, Discrete, Environment, HostEnvironment, Transition
from tfpar.rl.normalization import normalization_layers

import keras
import tensorflow as tf

_ENVIRONMENTS = 7  # unlike any size of a state or an observation that is likely to be confused with it


def name_of(env: Any) -> str:
    """Returns the name of an environment that is given by name or as an object.

    Raises:
      ConfigError: It is neither.
    """
    if isinstance(env, Environment | HostEnvironment):
        return env.name
    if isinstance(env, str):
        return env
    raise ConfigError(
        f"ReinforcementTrainer(env={env!r}): give the name of an environment, such as 'CartPole-v1' or 'gym:NAME', or "
        "a tfpar.rl.Environment. gymnasium.register gives an environment of Gymnasium a name."
    )


def build_checked(
    build: Callable[[AnyEnvironment], keras.Model], environment: AnyEnvironment, algorithm: str
) -> keras.Model:
    """Builds a policy, and checks that environment, policy and algorithm fit each other.

    Args:
      build: Builds the policy for an environment.
      environment: The environment in which it acts.
      algorithm: As for `--algorithm`.

    Raises:
      ConfigError: They do not; the message names the argument and says what to change.
    """
    if isinstance(build, keras.Model) or not callable(build):
        raise ConfigError(
            f"ReinforcementTrainer(model={build!r}): give a function that builds a policy for an environment, such as "
            "lambda environment: tfpar.rl.build_policy(environment.observation_shape, environment.actions)."
        )
    if isinstance(environment, Environment):
        _check_environment(environment)
    model = build(environment)
    if isinstance(model, keras.Model):
        _check_policy(model, environment, algorithm)
        _check_normalization(model, environment, algorithm)
    return model


def _check_environment(environment: Environment) -> None:
    """Compares what the functions of an environment return with what it says about itself, without running them."""
    tf.function(lambda: _traced(environment), autograph=False).get_concrete_function()


def _traced(environment: Environment) -> tf.Tensor:
    name = f"environment {environment.name!r}"
    state = environment.reset([tf.zeros([_ENVIRONMENTS])] * environment.reset_numbers)
    _check_observation(environment, environment.observe(state), "reset")
    action = tf.zeros([_ENVIRONMENTS, *environment.actions.spec.shape], environment.actions.spec.dtype)
    moved = environment.step(state, action, [tf.zeros([_ENVIRONMENTS])] * environment.step_numbers)
    if not isinstance(moved, Transition):
        raise ConfigError(f"{name}: step returns {moved!r}. Return tfpar.rl.Transition(state, reward, terminated).")
    for field, value in (("reward", moved.reward), ("terminated", moved.terminated)):
        shape = tf.convert_to_tensor(value).shape
        if not shape.is_compatible_with([_ENVIRONMENTS]):
            raise ConfigError(
                f"{name}: step returns a {field} of shape {_shown(shape)}; it needs one per environment, [n]."
            )
    if moved.terminated.dtype != tf.bool:
        raise ConfigError(f"{name}: step returns terminated as {moved.terminated.dtype.name}; it must be bool [n].")
    before, after = _described(state), _described(moved.state)
    if before != after:
        raise ConfigError(
            f"{name}: reset returns a state of {before}, and step one of {after}. Both must have the same structure, "
            "shapes and types."
        )
    _check_observation(environment, environment.observe(moved.state), "step")
    return tf.zeros([])


def _check_observation(environment: Environment, observation: Any, after: str) -> None:
    observation = tf.convert_to_tensor(observation)
    expected = tuple(environment.observation_shape)
    fits = observation.shape.is_compatible_with([_ENVIRONMENTS, *expected])
    if not fits or observation.dtype != tf.float32:
        raise ConfigError(
            f"environment {environment.name!r}: observation_shape={expected} promises float32 "
            f"[n{''.join(f', {size}' for size in expected)}], but observe returns {observation.dtype.name} "
            f"{_shown(observation.shape)} after {after}. Change observation_shape, or what observe returns."
        )


def _described(state: Any) -> str:
    return str(tf.nest.map_structure(lambda part: f"{part.dtype.name} {_shown(part.shape)}", state))


def _shown(shape: tf.TensorShape) -> str:
    """Returns a shape with `n` in place of the number of environments."""
    return f"[{', '.join('n' if size == _ENVIRONMENTS else str(size) for size in shape.as_list())}]"


def _check_policy(model: keras.Model, environment: AnyEnvironment, algorithm: str) -> None:
    """Compares the outputs of a policy with those that the algorithm reads."""
    shape, actions = tuple(environment.observation_shape), environment.actions
    try:
        outputs = keras.tree.flatten(model.compute_output_spec(keras.KerasTensor((None, *shape), "float32")))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"model=...: the policy cannot read the observations of {environment.name}, float32 {[None, *shape]}: "
            f"{error}"
        ) from error
    names = ["values of the actions"] if algorithm == "dqn" else ["logits", "value"]
    sizes = [actions.outputs] if algorithm == "dqn" else [actions.outputs, 1]
    if not isinstance(actions, Discrete):
        names, sizes = ["means", "value", "log deviations"], [actions.outputs, 1, actions.outputs]
    found = [tuple(output.shape) for output in outputs]
    if found != [(None, size) for size in sizes]:
        wanted = ", ".join(f"{name} [m, {size}]" for name, size in zip(names, sizes, strict=True))
        builder = "build_q_network" if algorithm == "dqn" else "build_policy"
        given = ", ".join(f"[{', '.join(map(str, ('m', *each[1:])))}]" for each in found)
        raise ConfigError(
            f"model=...: the policy has the outputs {given}; --algorithm={algorithm} in {environment.name} "
            f"({actions.text}) needs {wanted}. tfpar.rl.policy.{builder} builds such a model."
        )


def _check_normalization(model: keras.Model, environment: AnyEnvironment, algorithm: str) -> None:
    """Refuses layers whose statistics would not be those of the observations: nothing else would say so."""
    layers, shape = normalization_layers(model), tuple(environment.observation_shape)
    names = ", ".join(sorted(repr(layer.name) for layer in layers))
    if layers and algorithm == "dqn":
        raise ConfigError(
            f"model=...: --algorithm=dqn does not update the statistics of ObservationNormalization (layer {names}). "
            "Scale observations by constants, such as those of keras.layers.Rescaling, or use --algorithm=ppo."
        )
    if len(layers) > 1:
        raise ConfigError(
            f"model=...: the policy has {len(layers)} layers ObservationNormalization ({names}), and the statistics of "
            "one are updated. Use one, whose output is read by all that read observations."
        )
    for layer in layers:
        if layer.built and tuple(layer.mean.shape) != shape:
            raise ConfigError(
                f"model=...: the layer {names} (ObservationNormalization) reads {list(layer.mean.shape)} numbers of an "
                f"example, and its statistics are those of the observations of {environment.name}, {list(shape)}. Make "
                "it the first layer of the policy."
            )
