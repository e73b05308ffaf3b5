"""Actors: threads that act in environments on the host while the device learns ("Sebulba", Hessel et al. 2021).

The actor gathers a rollout with the weights that the learner had when it began to learn from the previous rollout, so
that both work at the same time. Their speeds do not affect the result: rollout k always uses the weights that were sent
for rollout k - 1 (the first two rollouts use the same weights). Each actor has two TensorFlow queues with room for one
or two elements, one for incoming weights and one for outgoing rollouts; no wait blocks a TensorFlow thread.

Shapes: T steps of a rollout, n environments of an actor.
"""

from __future__ import annotations

import collections
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tfpar.config import TrainingError
from tfpar.rl.algorithm import Algorithm
from tfpar.rl.environments import HostEnvironment
from tfpar.rl.rollout import Step
from tfpar.training.objective import Tensors

import numpy as np
import tensorflow as tf

_log = logging.getLogger(__name__)

_ROUNDS = 50  # the rollouts over which waiting times are averaged
_CPU = "CPU:0"


class _Waiting:
    """The times that an actor and its learner waited for each other in the last rollouts."""

    def __init__(self) -> None:
        self._rounds: collections.deque[np.ndarray] = collections.deque(maxlen=_ROUNDS)

    def add(self, learner: tuple[float, float], actor: tuple[float, float]) -> None:
        """Adds one rollout: for the learner and for the actor, the seconds of waiting and the seconds in total."""
        self._rounds.append(np.array([learner, actor]))

    def shares(self) -> tuple[float, float]:
        """The fractions of the time that the learner and the actor waited."""
        (learner, its_time), (actor, own_time) = np.sum([np.full((2, 2), 1e-9), *self._rounds], axis=0)
        return float(min(learner / its_time, 1.0)), float(min(actor / own_time, 1.0))


class Actor:
    """A thread that acts in some of the environments.

    Args:
      environment: The environment in which it acts.
      algorithm: Chooses the actions.
      index: Int32 `[n]`: indices of its environments among those of all replicas.
      seed: Seed of the run.
      processes: Whether every environment has its own process.
      jit_compile: Whether XLA compiles the choice of actions.
    """

    def __init__(
        self,
        environment: HostEnvironment,
        algorithm: Algorithm,
        index: np.ndarray,
        *,
        seed: int,
        processes: bool,
        jit_compile: bool,
    ) -> None:
        self._environment, self._algorithm = environment, algorithm
        self._index, self._seed, self._processes = index, seed, processes
        self._choose = tf.function(self._chosen, jit_compile=jit_compile or None, autograph=False)
        self.waiting = _Waiting()
        self.error: BaseException | None = None
        model, steps = algorithm.model, algorithm.options.rollout_steps
        weights = [*model.trainable_variables, *model.non_trainable_variables]
        self._trainable = len(model.trainable_variables)
        specs = [tf.TensorSpec(each.shape, each.dtype) for each in weights]
        with tf.device(_CPU):
            # Weights, the number of the rollout to gather, and the time of the request.
            self.weights = _queue(2, [*specs, tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)])
            self.rollouts = _queue(1, record_specs(environment, steps, len(index)))
        self._thread = threading.Thread(target=self._run, name=f"actor-{index[0]}", daemon=True)

    def start(self) -> None:
        """Starts the thread if it has not been started."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Ends the thread; a learner that waits for a rollout gets an error."""
        for queue in (self.weights, self.rollouts):
            queue.close(cancel_pending_enqueues=True)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        envs = None
        try:
            envs = self._environment.make(len(self._index), self._processes)
            self._act(envs)
        except (tf.errors.CancelledError, tf.errors.OutOfRangeError):  # closed
            pass
        except BaseException as error:  # any exception of a third-party environment
            self.error = error
            self.close()
        finally:
            if envs is not None:
                envs.close()

    def _act(self, envs: Any) -> None:
        *weights, first, asked = self.weights.dequeue()
        number, rollout = int(first.numpy()), _Rollout(self._environment, envs, self._seeds(int(first.numpy())))
        for place in itertools.count():
            began = time.time()
            record = rollout.make(self._algorithm.options, self._chooser(weights, number + place))
            made = time.time()
            self.rollouts.enqueue([tf.constant(each) for each in record])
            if place > 0:  # the first and the second rollout use the same weights
                asked_before = float(asked)
                *weights, _, asked = self.weights.dequeue()
                ended, asked = time.time(), float(asked)
                self.waiting.add((max(made - asked, 0.0), asked - asked_before), (ended - made, ended - began))

    def _seeds(self, first: int) -> list[int]:
        """Returns seeds for the environments; they depend on the first rollout, so a resumed run has new episodes."""
        return [
            int(np.random.SeedSequence([self._seed & 0xFFFFFFFF, int(each), first]).generate_state(1)[0])
            for each in self._index
        ]

    def _chooser(self, weights: Tensors, number: int) -> Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]:
        options = self._algorithm.options
        params, state = weights[: self._trainable], weights[self._trainable :]
        step = tf.constant(number * options.steps_per_rollout, tf.int64)
        begin = number * options.rollout_steps

        def choose(observation: np.ndarray, place: int) -> tuple[np.ndarray, np.ndarray]:
            action, log_prob = self._choose(
                params, state, tf.constant(observation), tf.constant(begin + place), step, tf.constant(self._index)
            )
            return action.numpy(), log_prob.numpy()

        return choose

    def _chosen(
        self, params: Tensors, state: Tensors, observation: tf.Tensor, when: tf.Tensor, step: tf.Tensor, index: Any
    ) -> tuple[tf.Tensor, tf.Tensor]:
        observation = tf.cast(observation, tf.float32)
        choice = self._algorithm.choose(params, state, observation, index=index, time=when, step=step)
        return choice.action, choice.log_prob


class _Rollout:
    """Creates rollouts in Gymnasium environments, one after the other."""

    def __init__(self, environment: HostEnvironment, envs: Any, seeds: list[int]) -> None:
        self._environment, self._envs = environment, envs
        observation, _ = envs.reset(seed=seeds)
        self._observation = np.asarray(observation, environment.observation_dtype)
        self._returns, self._lengths = np.zeros(len(seeds)), np.zeros(len(seeds))

    def make(self, options: Any, choose: Callable[[np.ndarray, int], tuple[np.ndarray, np.ndarray]]) -> Step:
        """Runs T steps in every environment; returns arrays `[T, n, ...]`."""
        specs = record_specs(self._environment, options.rollout_steps, len(self._returns))
        record = Step(*(np.zeros(spec.shape, spec.dtype.as_numpy_dtype) for spec in specs))
        for place in range(options.rollout_steps):
            record.observation[place] = self._observation
            action, log_prob = choose(self._observation, place)
            observation, reward, terminated, truncated, info = self._envs.step(self._environment.to_host(action))
            observation, done = np.asarray(observation, self._observation.dtype), terminated | truncated
            following = observation
            if done.any():
                following = observation.copy()
                for env in np.flatnonzero(done):
                    following[env] = info["final_obs"][env]
            self._returns += reward
            self._lengths += 1
            record.action[place], record.log_prob[place] = action, log_prob
            record.reward[place] = options.reward_scale * reward
            record.terminated[place], record.ended[place] = terminated, done
            record.following[place] = following
            record.episode_return[place], record.episode_length[place] = done * self._returns, done * self._lengths
            self._returns[done], self._lengths[done] = 0.0, 0.0
            self._observation = observation
        return record


class Actors:
    """The actors of all replicas of this process.

    Args:
      environment: The environment in which they act.
      algorithm: Chooses the actions.
      seed: Seed of the run.
      first: Index of this process's first replica among those of all workers.
      local_replicas: Number of replicas in this process.
      replicas: Number of replicas of all workers.
      jit_compile: Whether XLA compiles the choice of actions.
    """

    def __init__(
        self,
        environment: HostEnvironment,
        algorithm: Algorithm,
        *,
        seed: int,
        first: int,
        local_replicas: int,
        replicas: int,
        jit_compile: bool,
    ) -> None:
        options = algorithm.options
        self._first, self._environment = first, environment
        own = options.environments // replicas
        self._actors = [
            [
                Actor(
                    environment, algorithm, index, seed=seed, processes=options.env_processes, jit_compile=jit_compile
                )
                for index in np.split(np.arange(own, dtype=np.int32) + replica * own, options.actors)
            ]
            for replica in range(first, first + local_replicas)
        ]
        every = [actor for group in self._actors for actor in group]
        weakref.finalize(self, _close, every)  # also at exit: Python must not exit while a thread is inside TensorFlow
        self._every = every

    def start(self) -> None:
        """Starts the actors; those that are already running continue."""
        for actor in self._every:
            actor.start()

    def waiting(self) -> dict[str, float]:
        """Returns the fractions of the last rollouts' time that this process's learner and actors waited."""
        shares = [actor.waiting.shares() for actor in self._every]
        learner, actor = (float(np.mean([share[part] for share in shares])) for part in (0, 1))
        return {"learner_waiting": learner, "actor_waiting": actor}

    def raise_error(self) -> None:
        """Raises the error of an actor that failed, if any.

        Raises:
          TrainingError: An actor failed; the message contains the environment's own.
        """
        for actor in self._every:
            if actor.error is not None:
                said = f"{type(actor.error).__name__}: {actor.error}"
                raise TrainingError(f"--env={self._environment.name}: an environment failed: {said}") from actor.error

    # In a replica context.

    def take(self, params: Tensors, state: Tensors, number: tf.Tensor, replica: tf.Tensor) -> Step:
        """Sends the weights of this replica to its actors, and waits for their next rollouts.

        Args:
          params: Values of the model's trainable variables.
          state: Values of its non-trainable variables.
          number: Int64 scalar: the number of the rollout.
          replica: Index of this replica, a constant.

        Returns:
          The rollouts of all its actors, concatenated: `[T, n, ...]` with n environments of the replica.
        """
        own = self._actors[int(tf.get_static_value(replica)) - self._first]
        with tf.device(_CPU):
            sent = [actor.weights.enqueue([*params, *state, number, tf.timestamp()]) for actor in own]
            with tf.control_dependencies(sent):
                taken = [actor.rollouts.dequeue() for actor in own]
            return Step(*(tf.concat(parts, axis=1) for parts in zip(*taken, strict=True)))


def record_specs(environment: HostEnvironment, steps: int, count: int) -> list[tf.TensorSpec]:
    """Returns the shapes and dtypes of a `Step` for `count` environments, with a leading dim of `steps`."""
    rows, action = [steps, count], environment.actions.spec
    others = {
        "observation": tf.TensorSpec([*rows, *environment.observation_shape], environment.observation_dtype),
        "action": tf.TensorSpec([*rows, *action.shape], action.dtype),
    }
    others["following"] = others["observation"]
    return [others.get(name, tf.TensorSpec(rows, tf.float32)) for name in Step._fields]


def _queue(room: int, specs: Sequence[tf.TensorSpec]) -> tf.queue.FIFOQueue:
    return tf.queue.FIFOQueue(room, [spec.dtype for spec in specs], [spec.shape for spec in specs])


def _close(actors: Sequence[Actor]) -> None:
    for actor in actors:
        actor.close()
