"""`ReinforcementTrainer`: learns a policy by acting, on any synchronous strategy."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfpar import cluster, inputs
from tfpar.checkpoint import workdir_lock
from tfpar.cluster import failure
from tfpar.config import ExperimentConfig, ReinforcementConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import Topology, choose_topology
from tfpar.process.exit_codes import install_exit_code_hook
from tfpar.rl import checks, environments
from tfpar.rl.actors import Actors
from tfpar.rl.algorithm import Algorithm
from tfpar.rl.dqn import DQN
from tfpar.rl.environments import AnyEnvironment, Discrete, Environment, HostEnvironment
from tfpar.rl.options import (
    check,
    check_actions,
    check_host,
    check_replay,
    complete,
    reinforcement_of,
    rooms_for_replays,
    with_options,
)
from tfpar.rl.playing.evaluation import HostEvaluator, PolicyEvaluator
from tfpar.rl.playing.film import Film
from tfpar.rl.policy import build_policy, build_q_network
from tfpar.rl.ppo import PPO
from tfpar.rl.step import ActingStep, AgentMemory
from tfpar.training.loops import start_run
from tfpar.training.loops.history import FitResult
from tfpar.training.loops.hooks import Hook, check_hooks
from tfpar.training.loops.state import LoopState
from tfpar.training.model.averages import AveragesBetweenRuns
from tfpar.training.objective import OwnGoal
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.placing.own_parts import OwnParts
from tfpar.training.program import Program
from tfpar.training.start import initialize

import keras
import tensorflow as tf

_EPOCHS = 50  # intervals per run, over each of which losses are averaged


class ReinforcementTrainer:
    """Learns a policy by acting in an environment, on the device or in Gymnasium.

    ```python
    trainer = tfpar.rl.ReinforcementTrainer("CartPole-v1", env_steps=500_000, workdir="runs/cartpole")
    summary = trainer.fit()
    ```

    Args:
      env: An `Environment`, or the name of one, with the prefix `gym:` or `envpool:` for Gymnasium or EnvPool; by
        default the configuration's `env`.
      model: A function that builds a policy for an environment; by default `policy.build_policy`.
      config: A configuration; `options` override single fields of it.
      runtime: The result of `tfpar.initialize`; by default the trainer starts one.
      **options: Any option of `tfpar.config` by its flag name, including those of `reinforcement`. Others get what
        suits environment and algorithm, as on the command line, unless `config` has the section `reinforcement`.

    Attributes:
      environment: The environment in which the policy acts.
      program: The program that training loops run.
      algorithm: The learning algorithm.
      memory: The memories of the replicas of this process.
      actors: The threads that act in an environment on the host; None if it runs on the device.

    Raises:
      ConfigError: Options cannot work; the message says what to do instead.
    """

    def __init__(
        self,
        env: str | Environment | None = None,
        model: Callable[[AnyEnvironment], keras.Model] | None = None,
        *,
        config: ExperimentConfig | None = None,
        runtime: strategies.Runtime | None = None,
        **options: Any,
    ) -> None:
        install_exit_code_hook()
        if env is not None:
            options["env"] = checks.name_of(env)
        config = complete(with_options(config, options))
        options_of = reinforcement_of(config)
        self.environment = env if isinstance(env, Environment) else environments.find(options_of.env)
        check_actions(options_of, self.environment)
        topology = runtime.topology if runtime else choose_topology(config.strategy, cluster.detect())
        check(config, topology)
        check_host(options_of, self.environment, topology)
        for room in rooms_for_replays(topology, saves=bool(config.checkpoint.workdir)):
            check_replay(options_of, self.environment, topology.replicas, room)
        runtime = runtime or initialize(config, complete=True)
        build = model or functools.partial(default_policy, options=options_of)
        self.algorithm: Algorithm | None = None
        self.actors: Actors | None = None
        program = Program.build(
            config,
            runtime,
            model=functools.partial(checks.build_checked, build, self.environment, options_of.algorithm),
            optimizer=OptimizerSpec.of(None, {}),
            goal=OwnGoal(lambda built: self._algorithm_for(built, config, runtime).objective),
        )
        assert self.algorithm is not None
        algorithm, topology = self.algorithm, runtime.topology
        first = topology.data_worker * topology.local_replicas
        self.memory: AgentMemory = AgentMemory(algorithm, runtime.strategy, first=first)
        if isinstance(self.environment, HostEnvironment):
            self.actors = Actors(
                self.environment,
                algorithm,
                seed=config.train.seed,
                first=first,
                local_replicas=topology.local_replicas,
                replicas=topology.replicas,
                jit_compile=program.compiles_whole,
            )
        self.program: Program = dataclasses.replace(
            program, own=OwnParts(functools.partial(ActingStep, algorithm, self.memory, self.actors)), _steps=[]
        )
        self._evaluator: PolicyEvaluator | HostEvaluator = evaluator_for(
            self.program, self.environment, options_of.eval_episodes
        )
        self._film: Film = Film(self.program, self.environment, seed=config.train.seed)
        self._between_runs: AveragesBetweenRuns = AveragesBetweenRuns()

    def _algorithm_for(self, model: keras.Model, config: ExperimentConfig, runtime: strategies.Runtime) -> Algorithm:
        # The threads of the actors have the algorithm; they end once nothing has the trainer, see `Actors`.
        trainer = weakref.ref(self)

        def waiting() -> dict[str, float]:
            alive = trainer()
            return alive.actors.waiting() if alive and alive.actors else {}

        self.algorithm = algorithm_for(model, self.environment, config, runtime.topology.replicas, waiting)
        return self.algorithm

    @property
    def config(self) -> ExperimentConfig:
        """The whole configuration."""
        return self.program.config

    @property
    def model(self) -> keras.Model:
        """The policy, under the strategy."""
        return self.program.model

    @property
    def topology(self) -> Topology:
        """The workers, replicas and devices of the run."""
        return self.program.topology

    def fit(self, *, hooks: Sequence[Hook] = ()) -> FitResult:
        """Learns, evaluates, checkpoints and writes the results; resumes if the workdir holds a checkpoint.

        Args:
          hooks: Functions to run between steps, see `tfpar.Hook`; `state.since.results()` has returns and lengths.

        Returns:
          The contents of `summary.json`; its attribute `history` has loss and metrics over the run.

        Raises:
          ConfigError: The checkpoint is from another run, another job writes to the workdir, or a hook cannot work.
          Preempted: A worker received SIGTERM; all workers have saved a checkpoint if they could.
          TrainingError: An environment on the host failed.
        """
        check_hooks(hooks)
        source = self._source()
        workdir = self.config.checkpoint.workdir if self.topology.is_chief else ""
        with (
            workdir_lock.lock_workdir(workdir),
            contextlib.ExitStack() as closing,
            failure.peer_errors_named(self.topology.cluster),
            self.program.left_to_user(self._between_runs),
            self._acting(),
        ):
            steps, own = self.config.train.steps, [*hooks, *self._goal_hooks()]
            return start_run(self.program, self._evaluator, source, source, steps, None, own, (), closing).run()

    @contextlib.contextmanager
    def _acting(self) -> Iterator[None]:
        """Runs the actors; if an actor fails, raises its error instead of the learner's."""
        if self.actors is None:
            yield
            return
        self.actors.start()
        try:
            yield
        except tf.errors.OpError:
            self.actors.raise_error()
            raise

    def _goal_hooks(self) -> list[Hook]:
        """Returns the hook that ends the run at an evaluation that reaches the goal, if `--stop_at_goal` is set."""
        goal = self.environment.goal
        if goal is None or not reinforcement_of(self.config).stop_at_goal:
            return []

        def stop_at_goal(state: LoopState) -> LoopState | None:
            reached = state.results.get("return", goal - 1.0)
            if state.evaluated_at != state.step or reached < goal:
                return None
            return state.replace(stop=True, stopped_by=f"--stop_at_goal (return {reached:g}, goal {goal:g})")

        return [Hook(self.config.train.eval_every, stop_at_goal)]

    def evaluate(self) -> dict[str, float]:
        """Plays `eval_episodes` episodes with the most likely actions; returns the means `return` and `length`."""
        return self._evaluator(self._source())

    def _source(self) -> inputs.MadeSource:
        """Returns a source that describes the batches of the step to the training loops."""
        options, environment = reinforcement_of(self.config), self.environment
        per_round = options.steps_per_rollout * options.batch_size
        rounds = self.config.train.steps // options.steps_per_rollout
        actions, replicas = environment.actions, self.topology.replicas
        per_epoch = options.steps_per_rollout * max(1, rounds // _EPOCHS)
        info = inputs.SourceInfo(
            name=environment.name,
            task=inputs.REINFORCEMENT,
            split="train",
            num_examples=per_epoch * options.batch_size,
            input_spec=tf.TensorSpec(environment.observation_shape, tf.float32),
            label_spec=actions.spec,
            num_classes=actions.count if isinstance(actions, Discrete) else 0,
            storage="generated",
            digest=environment.name,
        )
        return inputs.MadeSource(
            info=info,
            text=f"{environment.name}: observations {list(environment.observation_shape)}, {actions.text}\n"
            f"{options.environments} environments, {options.environments // replicas} on each of {replicas} replicas; "
            f"{options.transitions_per_rollout} transitions a rollout, learned from in {options.steps_per_rollout} "
            f"steps of {options.batch_size}",
            steps_per_epoch=per_epoch,
            line=(("return", "length"), "env steps/s", options.transitions_per_rollout / per_round),
            export=self.memory.export,
            restore=functools.partial(self.memory.restore, new_episodes=bool(self.actors)),
            goes_on="learning continues with new episodes: environments of the host cannot be saved"
            if self.actors
            else "the episodes continue where they stopped",
            show=self._film,
        )


def algorithm_for(
    model: keras.Model,
    environment: AnyEnvironment,
    config: ExperimentConfig,
    replicas: int,
    also_reported: Callable[[], Mapping[str, float]],
) -> Algorithm:
    """Creates the algorithm that the configuration names."""
    options, train = reinforcement_of(config), config.train
    others: dict[str, Any] = {
        "replicas": replicas,
        "accumulate_steps": train.accumulate_steps,
        "also_reported": also_reported,
    }
    if options.algorithm == "dqn":
        return DQN(model, environment, options, train.seed, train.steps, **others)
    return PPO(model, environment, options, train.seed, **others)


def evaluator_for(program: Program, environment: AnyEnvironment, episodes: int) -> PolicyEvaluator | HostEvaluator:
    """Creates the evaluator for this number of episodes, on the device or the host."""
    if isinstance(environment, HostEnvironment):
        return HostEvaluator(program, environment, episodes=episodes)
    return PolicyEvaluator(program, environment, episodes=episodes)


def default_policy(environment: AnyEnvironment, options: ReinforcementConfig) -> keras.Model:
    """Builds the policy that the options describe."""
    scale = environment.observation_scale if isinstance(environment, HostEnvironment) else 1.0
    shape, hidden = environment.observation_shape, options.hidden_units()
    if options.algorithm == "dqn" and isinstance(environment.actions, Discrete):
        return build_q_network(shape, environment.actions, hidden=hidden, scale=scale)
    normalize = options.normalize_observations
    return build_policy(shape, environment.actions, hidden=hidden, normalize=normalize, scale=scale)
