"""`FederatedTrainer`: clients that train independently, with the usual training loop, checkpoints and monitoring.

A round is a step of the loop. The clients of a round are distributed over the replicas of all workers; each replica
trains its clients in one XLA program, and the exchange between workers sums their movements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfpar import inputs
from tfpar.checkpoint import workdir_lock
from tfpar.cluster import failure
from tfpar.config import CUSTOM, ConfigError, ExperimentConfig, FederatedConfig
from tfpar.optim import optimizers, schedules
from tfpar.outer.federated import privacy
from tfpar.outer.federated.checks import DEFAULTS, check, check_evaluated, check_model, complete, federated_of
from tfpar.outer.federated.client_update import LocalTraining, averaged_state
from tfpar.outer.federated.encoding import UpdateEncoding
from tfpar.outer.federated.evaluation import FederatedEvaluator
from tfpar.outer.federated.population import Population, RoundElements, bytes_of_round
from tfpar.outer.federated.round import ClientRound
from tfpar.outer.federated.server import Averaging, server_optimizer
from tfpar.outer.federated.step import ClientMemory, FederatedCore, step_factory
from tfpar.parallel import strategies
from tfpar.parallel.topology import Topology
from tfpar.process.exit_codes import install_exit_code_hook
from tfpar.training.loops import start_run
from tfpar.training.loops.history import FitResult
from tfpar.training.loops.hooks import Hook, check_hooks
from tfpar.training.loops.state import LoopState
from tfpar.training.model.averages import AveragesBetweenRuns
from tfpar.training.objective import Goal
from tfpar.training.optimizer_spec import OptimizerSpec
from tfpar.training.placing.own_parts import OwnParts
from tfpar.training.program import Program
from tfpar.training.start import initialize

import keras

_log = logging.getLogger(__name__)

# Besides its movement, a client sends its number of examples, as float32.
_COUNT_BYTES = 4


class FederatedTrainer:
    """Trains a Keras model on a population of clients.

        trainer = FederatedTrainer(build, loss="sparse_categorical_crossentropy", metrics=["accuracy"],
                                   partition="dirichlet:0.1", clients=100, clients_per_round=10, rounds=200)
        trainer.fit(train, validation=validation)

    Args:
      model: A function that builds a Keras model, called under the strategy; or a model, which has the server's weights
        when `fit` returns.
      loss: As for `tfpar.Trainer`.
      metrics: As for `tfpar.Trainer`; evaluation on single clients reports the first one.
      config: The whole configuration; `options` override single fields of it. `optimizer`, `learning_rate`, `schedule`
        and `clip_norm` are those of the clients' steps; a step of the schedule is a round.
      runtime: The result of `tfpar.initialize(config)`; by default the trainer starts one.
      **options: Any option of `tfpar.config` by its flag name, including those of federated averaging.

    Attributes:
      config: The whole configuration.
      runtime: The running strategy.
      program: The program that the loop runs: the model, the server's optimizer, and the exchange between workers.

    Raises:
      ConfigError: Options cannot work; the message says what to do instead.
    """

    def __init__(
        self,
        model: keras.Model | Callable[[], keras.Model],
        loss: Any = None,
        metrics: Sequence[Any] | Mapping[str, Any] | None = None,
        *,
        config: ExperimentConfig | None = None,
        runtime: strategies.Runtime | None = None,
        **options: Any,
    ) -> None:
        install_exit_code_hook()
        self.config = complete(with_options(config, options))
        check(self.config, runtime.topology if runtime else None)
        self.runtime = runtime or initialize(self.config, complete=True)
        server = OptimizerSpec(server_optimizer(self._options), keeps_own_rate=False)
        goal = Goal(loss, metrics=metrics, loss_weighting=self.config.train.loss_weighting)
        program = Program.build(self.config, self.runtime, model=model, optimizer=server, goal=goal)
        check_model(program.model, self._options)
        self.program = dataclasses.replace(program, core=FederatedCore.of(program.core), _steps=[])
        with program.strategy.scope():
            batch = self.config.step_batch_size
            self._client_optimizer = optimizers.build(self.config.optimizer, global_batch_size=batch)
            self._client_optimizer.build(program.model.trainable_variables)
        self._between_runs = AveragesBetweenRuns()

    @property
    def _options(self) -> FederatedConfig:
        return federated_of(self.config)

    @property
    def model(self) -> keras.Model:
        """The server's model, under the strategy."""
        return self.program.model

    @property
    def topology(self) -> Topology:
        """The distribution of the replicas over workers and devices."""
        return self.program.topology

    def fit(self, train: Any, y: Any = None, *, validation: Any = None, hooks: Sequence[Hook] = ()) -> FitResult:
        """Trains, evaluates, checkpoints and writes the results; resumes if the workdir holds a checkpoint.

        Args:
          train: Training examples of all clients: a source of `tfpar.inputs`, arrays, or anything that `as_source`
            accepts.
          y: Labels, if `train` is an array.
          validation: Examples on which the server's weights are evaluated, or None.
          hooks: Functions to run between rounds, see `tfpar.Hook`.

        Returns:
          The contents of `summary.json`; its attribute `history` has loss and metrics over the run.

        Raises:
          ConfigError: The examples cannot be divided among the clients, the checkpoint is from another run, or an
            option of the evaluation on clients is given without validation examples.
          Preempted: A worker received SIGTERM; all workers have saved a checkpoint if they could.
        """
        check_hooks(hooks)
        check_evaluated(self._options, validation is not None)
        source, validation = self._sources(train, y, validation)
        population = Population.of(source, self.config)
        fill, replicas = reads_whole_batches(self.program), self.topology.replicas
        elements = RoundElements.of(population, replicas, self._options.rounds, fill=fill)
        program = self._program_for(elements)
        evaluator = FederatedEvaluator(program, population)
        made = self._made_source(elements)
        workdir = self.config.checkpoint.workdir if self.topology.is_chief else ""
        with (
            workdir_lock.lock_workdir(workdir),
            contextlib.ExitStack() as closing,
            failure.peer_errors_named(self.topology.cluster),
            program.left_to_user(self._between_runs),
        ):

            def show(state: LoopState) -> None:
                if state.evaluated_at == state.step and len(evaluator.by_client):
                    run.monitor.histograms(state.step, {"clients/accuracy": evaluator.by_client})

            every = self.config.train.eval_every
            own = [*hooks, Hook(every, show), Hook(every, _warn_of_lost, also=lambda state: state.ending)]
            run = start_run(program, evaluator, made, validation, self.config.train.steps, None, own, (), closing)
            return run.run()

    def _sources(self, train: Any, y: Any, validation: Any) -> tuple[inputs.Source, Any]:
        """Returns the sources for the arguments of `fit`; assigns losses and metrics to the model's outputs."""
        source = inputs.as_source(train, y) if not isinstance(train, inputs.Source) else train
        if not isinstance(source, inputs.Source):
            raise ConfigError(
                f"{source.info.name}: clients have examples by index, which a stream has not. Give arrays, or a "
                "--dataset that is read by index."
            )
        if validation is not None and not isinstance(validation, inputs.Source):
            validation = _counted(inputs.as_source(validation, split="validation"))
        schedules.check_evaluated(self.config.schedule, validation is not None)
        for each in filter(None, (source, validation)):
            self.program.bind(each)
        return source, validation

    def encoding(self) -> UpdateEncoding:
        """Returns the encoding of a client's movement."""
        shapes = [weight.shape for weight in self.program.model.trainable_variables]
        options = self._options
        return UpdateEncoding.of(options.update_codec, shapes, stateful=options.stateful_clients)

    def client_round(self) -> ClientRound:
        """Returns the work of a client in a round, as pure functions of tensors."""
        program, options = self.program, self._options
        assert isinstance(program.core, FederatedCore)
        slots = self._client_optimizer.variables
        local = LocalTraining(
            core=program.core,
            optimizer=self._client_optimizer,
            initial_slots=tuple(value.numpy() for value in program.first_copies(slots)),
            prox=options.prox if options.averaging == "fedprox" else 0.0,
            clip_norm=self.config.optimizer.clip_norm,
            metric_shapes=tuple(tuple(each.shape) for each in program.core.local_variables),
        )
        return ClientRound(local, self.encoding(), options.client_clip, options.averaging == "scaffold")

    def _program_for(self, rounds: RoundElements) -> Program:
        """Returns the program whose steps are these rounds."""
        program, options, population = self.program, self._options, rounds.population
        clients = self.client_round()
        elements = sum(math.prod(weight.shape) for weight in program.model.trainable_variables)
        memory = ClientMemory(
            program.strategy,
            population.clients,
            elements if clients.scaffold else 0,
            clients.encoding.residual_elements,
        )
        averaging = Averaging.of(options, self.config.train.seed, population.sampling.expected)
        traffic = self._traffic_of_clients(population, clients.encoding)
        own = OwnParts(
            step_factory(clients, averaging, memory),
            {"clients": memory.variables} if memory.variables else {},
            lambda step: _recorded(population, traffic, step),
            lambda step: _summarized(population, traffic, step),
            memory.summed_elements(rounds.slots * rounds.replicas),
        )
        return dataclasses.replace(program, own=own, _steps=[])

    def _traffic_of_clients(self, population: Population, encoding: UpdateEncoding) -> tuple[int, int]:
        """Returns the bytes that one client sends in a round, and the bytes that it receives."""
        model = self.program.model
        state = sum(4 * math.prod(model.non_trainable_variables[place].shape) for place in averaged_state(model))
        weights = sum(4 * math.prod(weight.shape) for weight in model.trainable_variables)
        # The server computes a client's new control variate from its movement, as option II defines it.
        variate = weights if population.options.averaging == "scaffold" else 0
        return encoding.payload_bytes + state + _COUNT_BYTES, weights + state + variate

    def _made_source(self, elements: RoundElements) -> inputs.MadeSource:
        """Returns the rounds as a source for the training loops."""
        options, population = self._options, elements.population
        examples = sum(map(len, population.parts))
        per_client = max(1.0, examples / population.clients * options.local_epochs)
        text = population.describe()
        if self.topology.replicas > 1:
            text += f"\nup to {elements.slots} clients on each of {self.topology.replicas} replicas"
        return inputs.MadeSource(
            info=dataclasses.replace(population.source.info, task=inputs.FEDERATED, decode=None),
            text=text,
            steps_per_epoch=max(1, round(population.clients / options.clients_per_round)),
            line=((), "clients/s", 1.0 / per_client),
            export=dict,
            restore=lambda saved: True,
            goes_on="",
            show=lambda: None,
            elements=elements.dataset,
        )


def _counted(validation: inputs.AnySource) -> inputs.AnySource:
    """Returns validation examples of which it is known how many there are."""
    try:
        return validation.counted() if isinstance(validation, inputs.StreamSource) else validation
    except ConfigError as error:
        raise ConfigError(f"validation: {error}") from error


def _warn_of_lost(state: LoopState) -> None:
    """Says how many clients of the last rounds were left out."""
    results = state.since.metric_results(state.since.metric_sums)  # also of rounds that have no loss
    if lost := int(results["lost_clients"]):
        _log.warning(
            "clients left out of the last %d rounds, because their weights, statistics or loss were not finite: %d. A "
            "lower --learning_rate or --clip_norm may help.",
            len(state.since.losses),
            lost,
        )


def _recorded(population: Population, traffic: tuple[int, int], step: int) -> dict[str, float]:
    """Returns the figures of the last round for TensorBoard."""
    taking, lost = population.sampling.round(step - 1)
    up, down = bytes_of_round(len(taking), len(lost), up=traffic[0], down=traffic[1])
    values: dict[str, float] = {
        "clients": len(taking),
        "dropped_clients": len(lost),
        "bytes_up": up,
        "bytes_down": down,
    }
    if population.options.noise_multiplier:
        values["epsilon"] = privacy.epsilon(population.options, population.clients, step)
    return {name: float(value) for name, value in values.items()}


def _summarized(population: Population, traffic: tuple[int, int], step: int) -> dict[str, Any]:
    """Returns the entries that `summary.json` has in addition, after some rounds."""
    options = population.options
    rounds = [population.sampling.round(number) for number in range(step)]
    taking, lost = sum(len(each) for each, _ in rounds), sum(len(each) for _, each in rounds)
    up, down = bytes_of_round(taking, lost, up=traffic[0], down=traffic[1])
    federated: dict[str, Any] = {
        "averaging": options.averaging,
        "partition": options.partition,
        "clients": population.clients,
        "clients_trained": taking,
        "clients_dropped": lost,
        "bytes_up_per_round": up / max(step, 1),
        "bytes_down_per_round": down / max(step, 1),
        "update_codec": options.update_codec,
        "epsilon": None,
        "delta": None,
    }
    if options.noise_multiplier:
        delta = privacy.delta_of(options, population.clients)
        federated |= {"epsilon": privacy.epsilon(options, population.clients, step), "delta": delta}
    return {"rounds": step, "federated": federated}


def with_options(config: ExperimentConfig | None, options: Mapping[str, Any]) -> ExperimentConfig:
    """Returns a configuration of federated averaging with some options replaced."""
    if config is None:  # what suits plain SGD suits no other optimizer
        plain_sgd = options.get("optimizer", DEFAULTS["optimizer"]) == DEFAULTS["optimizer"]
        own = DEFAULTS if plain_sgd else {"schedule": DEFAULTS["schedule"]}
        flat: dict[str, Any] = {**own, "model": CUSTOM, "dataset": CUSTOM}
    else:
        flat = config.as_flat_dict()
    if isinstance(options.get("jit_compile"), bool):
        options = {**options, "jit_compile": str(options["jit_compile"]).lower()}
    return ExperimentConfig.from_flat_dict({**flat, **options}, program="federated")


def reads_whole_batches(program: Program) -> bool:
    """Returns whether code of the model, or a loss, reads whole batches, so that a client fills its short ones."""
    readers = program.batch_readers
    losses = readers.own_loss or readers.whole_losses or readers.reading_losses
    return bool(losses or readers.metrics or readers.statistics or readers.adding)
