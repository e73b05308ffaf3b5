"""Checks the options of federated averaging before anything starts, and completes them."""

from __future__ import annotations

import dataclasses

from tfpar import cluster
from tfpar.config import ConfigError, ExperimentConfig, FederatedConfig, InputConfig, parse_arguments
from tfpar.exchange import spec as specs
from tfpar.outer.federated import encoding, privacy, server
from tfpar.outer.federated.client_update import averaged_state
from tfpar.parallel.topology import Topology, choose_topology
from tfpar.process.listing import listed

import keras

# The defaults of `tfpar train federated`, and of `FederatedTrainer` without a configuration: clients use plain SGD.
DEFAULTS = {"optimizer": "sgd", "optimizer_args": "momentum=0", "learning_rate": 0.1, "schedule": "constant"}
_EVALUATIONS = 20  # evaluations per run if --eval_every is not set


def federated_of(config: ExperimentConfig) -> FederatedConfig:
    """Returns the configuration's options of federated averaging."""
    assert config.federated is not None
    return config.federated


def complete(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration with the options that follow from others; a step of the run is a round.

    Raises:
      ConfigError: The length of the run is given twice, or in epochs.
    """
    options, train = config.federated or FederatedConfig(), config.train
    if train.epochs:
        raise ConfigError("--epochs: the clients of a round are drawn at random. Give --rounds.")
    if train.steps and train.steps != options.rounds:
        raise ConfigError(
            f"--steps={train.steps} and --rounds={options.rounds} both say how long the run is. Give --rounds."
        )
    every = train.eval_every or max(1, options.rounds // _EVALUATIONS)
    return dataclasses.replace(
        config, federated=options, train=dataclasses.replace(train, steps=options.rounds, eval_every=every)
    )


def check(config: ExperimentConfig, topology: Topology | None = None) -> None:
    """Refuses options that do not work with federated averaging.

    Args:
      config: The experiment.
      topology: The topology of the run; by default the one that the configuration gives on this machine.

    Raises:
      ConfigError: There is such an option; the message says what to do instead.
    """
    options = federated_of(config)
    topology = topology or choose_topology(config.strategy, cluster.detect())
    if topology.name in ("parameter_server", "tpu"):
        raise ConfigError(
            f"--strategy={topology.name} does not work with federated averaging yet. Use one_device, mirrored or "
            "multi_worker."
        )
    for name, value, idle in (
        ("mesh", config.strategy.mesh if topology.mesh.devices_of_replica > 1 else "", ""),
        ("shard", config.train.shard, "none"),
        ("offload", config.train.offload, "none"),
        ("jit_segments", config.train.written_segments, 1),
        ("local_steps", config.outer.local_steps, 1),
        ("round_seconds", config.outer.round_seconds, 0.0),
        ("outer_optimizer", config.outer.outer_optimizer, "auto"),
        ("accumulate_steps", config.train.accumulate_steps, 1),
        ("global_batch_size", config.input.global_batch_size, InputConfig().global_batch_size),
        ("augment", config.input.augment, "none"),
        ("on_bad_record", config.input.on_bad_record, "fail"),
        ("ema", config.optimizer.ema, 0.0),
    ):
        if value != idle:
            raise ConfigError(
                f"--{name}={value} does not work with federated averaging, whose clients train independently in steps "
                f"of --client_batch examples. Leave it out."
            )
    if config.precision.precision == "mixed_float16":
        raise ConfigError(
            "--precision=mixed_float16 needs a loss scale, which clients do not keep. Use float32 or mixed_bfloat16."
        )
    server.check_server_optimizer(options)
    _check_idle(options)
    if options.averaging == "scaffold":
        _check_scaffold(config)
    if options.noise_multiplier:
        if specs.parse(config.exchange.exchange).compresses:
            raise ConfigError(
                f"--exchange={config.exchange.exchange} and --noise_multiplier={options.noise_multiplier}: workers "
                "would round sums of updates before the noise is added, so that one client could change them by more "
                "than --client_clip. Leave --exchange out."
            )
        privacy.check_installed()


def check_over_flower(config: ExperimentConfig) -> None:
    """Refuses options that do not work over Flower, or have no effect there.

    Args:
      config: The experiment, before `complete`.

    Raises:
      ConfigError: There is such an option: SCAFFOLD, whose control variates are not sent; noise, which would be drawn
        from a seed that clients know; a schedule that needs evaluations; or one for the clients of a simulation.
    """
    options, defaults = config.federated or FederatedConfig(), FederatedConfig()
    if options.noise_multiplier:
        raise ConfigError(
            f"--noise_multiplier={options.noise_multiplier:g} does not work over Flower: the noise follows from the "
            "seed, which all clients have. Use Flower's own differential privacy."
        )
    if options.averaging == "scaffold":
        raise ConfigError("--averaging=scaffold does not work over Flower yet. Use another, such as fedprox.")
    if config.schedule.schedule == "plateau":
        raise ConfigError(
            "--schedule=plateau does not work over Flower, whose server evaluates only at the end. Use another, such "
            "as constant."
        )
    nodes, evaluated = "the clients are the nodes, with their own examples", "the server evaluates only at the end"
    for name, value, idle, why in (
        ("partition", options.partition, defaults.partition, nodes),
        # A configuration compares the two.
        ("clients", options.clients, max(defaults.clients, options.clients_per_round), nodes),
        ("client_dropout", options.client_dropout, 0.0, "a node drops out by itself"),
        ("client_holdout", options.client_holdout, 0.0, evaluated),
        ("clients_evaluated", options.clients_evaluated, defaults.clients_evaluated, evaluated),
        ("eval_every", config.train.eval_every, 0, evaluated),
        ("checkpoint_every", config.checkpoint.checkpoint_every, 0, "the server writes no checkpoints"),
    ):
        if value != idle:
            raise ConfigError(f"--{name}={value} does not work over Flower: {why}. Leave it out.")


def check_evaluated(options: FederatedConfig, evaluated: bool) -> None:
    """Refuses options of the evaluation on clients for a run that makes no evaluations.

    Raises:
      ConfigError: With what to do.
    """
    idle = (0.0,), (0, FederatedConfig.clients_evaluated)
    for name, values in zip(("client_holdout", "clients_evaluated"), idle, strict=True):
        value = getattr(options, name)
        if not evaluated and value not in values:
            raise ConfigError(
                f"--{name}={value:g} has no effect: clients are evaluated together with the validation examples, and "
                "there are none. Give fit(validation=...), or hold some out (--validation_fraction=0.1), or leave "
                f"--{name} out."
            )


def _check_idle(options: FederatedConfig) -> None:
    """Refuses options that have no effect without another one, and codecs that clients cannot use."""
    if options.prox != FederatedConfig().prox and options.averaging != "fedprox":
        raise ConfigError(
            f"--prox={options.prox:g} has no effect on --averaging={options.averaging}. Leave it out, or give "
            "--averaging=fedprox."
        )
    codec, _ = encoding.parse(options.update_codec, stateful=options.stateful_clients)
    if options.stateful_clients and codec is None:
        raise ConfigError(
            f"--stateful_clients has no effect on --update_codec={options.update_codec}, which leaves no residual. "
            "Leave it out, or give a codec, e.g. --update_codec=topk:0.01."
        )
    if options.delta and not options.noise_multiplier:
        raise ConfigError(
            f"--delta={options.delta:g} has no effect without noise: there is no epsilon. Leave it out, or give "
            "--noise_multiplier and --client_clip."
        )


def _check_scaffold(config: ExperimentConfig) -> None:
    """Refuses options that break SCAFFOLD's control variates.

    They are mean gradients, and (x - y) / (K rate) is a mean gradient only if every step is `rate x gradient`.
    """
    if not federated_of(config).is_uniform:
        raise ConfigError(
            "--client_weights=examples and --averaging=scaffold: all clients have the same weight in the control "
            "variates. Leave --client_weights out."
        )
    optimizer = config.optimizer
    arguments = parse_arguments("--optimizer_args", optimizer.optimizer_args, example="momentum=0")
    clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if arguments.get(name)]
    if optimizer.optimizer != "sgd" or arguments.get("momentum", 0.9) or clips or optimizer.weight_decay:
        raise ConfigError(
            f"--averaging=scaffold takes a client's update for the sum of its gradients, so that clients need plain "
            f"SGD, not --optimizer={optimizer.optimizer} --optimizer_args={optimizer.optimizer_args!r} "
            f"--weight_decay={optimizer.weight_decay:g}. Give --optimizer=sgd --optimizer_args=momentum=0 "
            "--weight_decay=0."
        )
    if optimizer.clip_norm or federated_of(config).client_clip:
        raise ConfigError(
            "--averaging=scaffold: with --clip_norm or --client_clip a client's update is no longer the sum of its "
            "gradients. Leave them out."
        )


def check_model(model: keras.Model, options: FederatedConfig) -> None:
    """Refuses models that clients cannot train with these options.

    Raises:
      ConfigError: The options add noise but the model has state that is sent without noise, or the model has float8
        layers.
    """
    if any(variable.overwrite_with_gradient for variable in model.trainable_variables):
        raise ConfigError("float8 layers keep statistics that clients do not average. Use another precision.")
    state = [model.non_trainable_variables[place].path for place in averaged_state(model)]
    if options.noise_multiplier and state:
        raise ConfigError(
            f"--noise_multiplier={options.noise_multiplier}: the model has state that clients would send without noise "
            f"({listed(state, 3)}). Use layer or group normalisation instead of batch normalisation."
        )
