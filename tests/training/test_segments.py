"""Passes of several XLA programs: the weights of one program, and gradients that do not wait for each other."""

from __future__ import annotations

import dataclasses
import json
import re

import tfpar
from tests.integration.scripts import divided, divided_models
from tests.integration.test_multi_worker import launch
from tests.training.test_pipeline import normalized, own, synchronized
from tfpar.collectives.cost_model import NOTHING, Cost
from tfpar.config import ConfigError
from tfpar.exchange import spec as specs
from tfpar.exchange.tuning.forecast import buckets_of
from tfpar.training.segments.choose import Profile, added_seconds, choose_segments, why_too_few
from tfpar.training.segments.placing import segments_of
from tfpar.training.validate import validate_config

import numpy as np
import pytest
import tensorflow as tf

COMPILED = {"jit_compile": "true", "steps": 5, "devices": 2}


def programs_of(trainer: tfpar.Trainer) -> set[str]:
    """Names of the XLA programs of a step."""
    run = trainer.program.step(trainer.program.schedule(COMPILED["steps"])).run
    graph = run._list_all_concrete_functions()[0].graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return {node.attr["f"].func.name for node in nodes if node.attr["_XlaMustCompile"].b}


@pytest.mark.parametrize(
    ("model", "segments", "options"),
    [
        ("dense", 3, {"optimizer": "sgd", "learning_rate": 0.1}),
        pytest.param("resnet", 3, {}, marks=pytest.mark.proof),
        pytest.param("language_model", 4, {"recompute": "blocks"}, marks=pytest.mark.proof),
        pytest.param("branches", 3, {}, marks=pytest.mark.proof),
    ],
)
def test_segments_have_the_weights_of_one_program(model, segments, options):
    """One is what `auto` makes within one worker."""
    weights = []
    for number in ("auto", segments):
        trainer = divided.here("mirrored", model=model, jit_segments=number, **COMPILED, **options)
        weights.append(divided.weights_of(trainer))
        if number == "auto":
            assert trainer.program.placing.segments == 1
            assert not trainer.program.placing.in_segments
        passes = 1 if number == "auto" else 2 * segments  # a forward and a backward pass of each segment
        assert len(programs := programs_of(trainer)) == 2 * (passes + 1), programs  # of two replicas, with the update
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.xla
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (own, "--jit_segments=2: model 'own' has its own call method, not a graph of layers"),
        (normalized, "--jit_segments: the model assigns .*SpectralNormalization does., which stages cannot do. Leave"),
        (synchronized, "--jit_segments=2: model .* synchronises batch statistics between replicas"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(build, message):
    config = tfpar.ExperimentConfig.from_flat_dict(
        {**divided.COMMON, **COMPILED, "strategy": "mirrored", "jit_segments": 2, "jit_compile": "auto"}
    )
    runtime = divided.runtime_of("mirrored", devices=2)
    with pytest.raises(ConfigError, match=message):
        tfpar.Trainer(build, loss="mse", config=config, runtime=runtime).fit(
            np.zeros((16, 12), np.float32), np.zeros((16, 3), np.float32), steps=1
        )


def test_more_segments_than_layers_are_refused():
    with pytest.raises(ConfigError, match=r"--jit_segments=12: model .* has 9 layers .*, too few for 12 segments"):
        segments_of(divided_models.dense(), 12)


def test_recurrent_layers_are_refused():
    with pytest.raises(ConfigError, match=r"--jit_segments=2: model .* has recurrent layers, .* Leave it out"):
        segments_of(divided_models.recurrent(), 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1, "strategy": "one_device"}, "a single replica exchanges nothing"),
        ({"mesh": "pipeline:2"}, "--mesh=pipeline:2, whose layers are cut already"),
        ({"jit_compile": "false"}, "--jit_compile=false: without XLA, the exchange overlaps"),
        ({"accumulate_steps": 2}, "--accumulate_steps=2: gradients are complete only after the last"),
        ({"shard": "optimizer"}, "--shard=optimizer yet"),
    ],
)
def test_options_that_do_not_go_with_segments_are_refused(options, message):
    base = {"strategy": "mirrored", "devices": 2, "jit_segments": 2, "global_batch_size": 32, "model": "mlp"}
    with pytest.raises(ConfigError, match=message):
        validate_config(tfpar.ExperimentConfig.from_flat_dict({**base, **options}))


def profile_of(**changes: object) -> Profile:
    """A model of 24 equal layers, each of which has a bucket."""
    cost = Cost(1 << 20, latency=1e-4, transfer=2e-2, compute=1e-3)
    return dataclasses.replace(
        Profile(
            flops=[100] * 24,
            crossing=[-1, *[1000] * 23],
            ready=list(range(24)),
            costs=[cost] * 24,
            pass_seconds=0.6,
            launch_seconds=1e-4,
            copying=1e10,
        ),
        **changes,
    )


def test_auto_cuts_where_the_exchange_takes_as_long_as_the_pass():
    choice = choose_segments(profile_of())
    assert choice.segments > 1
    assert f"{choice.segments}: " in choice.reason
    added = [added_seconds(profile_of(), number) for number in (1, 2, 4, 8)]
    assert added == sorted(added, reverse=True)  # launches and tensors at cuts cost nearly nothing here


@pytest.mark.parametrize(
    "changes",
    [
        {"costs": [Cost(1 << 10, latency=1e-5, transfer=1e-5, compute=0.0)] * 24},  # a small exchange
        {"costs": [NOTHING] * 24},
        {"launch_seconds": 0.3},
        {"crossing": [-1, *[1 << 32] * 23]},
        {"crossing": [-1] * 24},  # nowhere to cut
        {"ready": [0] * 24},  # all gradients belong to the first layer
        {"costs": [Cost(1 << 20, 0.0, transfer=0.0, compute=2e-2)] * 24},  # the processors do it all: nothing overlaps
        {"costs": [Cost(1 << 20, 0.0, transfer=2e-2, compute=0.0, handling=2e-2)] * 24},
    ],
)
def test_auto_leaves_one_program_where_nothing_is_gained(changes):
    assert choose_segments(profile_of(**changes)).segments == 1


@pytest.mark.parametrize(
    ("spec", "matrices", "why"),
    [
        ("auto", 2, ""),
        ("int8", 2, ""),
        ("none", 0, ""),
        ("auto", 1, "the exchange has one bucket of large tensors, and needs two to overlap"),
        ("int8", 0, "the exchange has no bucket of large tensors, and needs two to overlap"),
    ],
)
@pytest.mark.parametrize("chosen", ["none", "int4"])
def test_buckets_overlap_whatever_auto_chooses_for_them(spec, matrices, why, chosen):
    parsed = specs.parse(spec if spec == "none" else f"{spec}:bucket_bytes=4096")
    shapes = [tf.TensorShape([64, 16])] * matrices + [tf.TensorShape([16])]
    sent = [
        dataclasses.replace(bucket, spec=specs.parse(chosen)) if bucket.spec is parsed and spec == "auto" else bucket
        for bucket in buckets_of(parsed, shapes)
    ]
    assert why_too_few(parsed, shapes, sent) == why


def test_costs_of_programs_limit_their_number():
    numbers = [choose_segments(profile_of(launch_seconds=seconds)).segments for seconds in (0.0, 5e-3, 2e-2, 0.3)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[2] > 1


@pytest.mark.proof
@pytest.mark.cluster
def test_auto_between_two_workers_is_said_and_trains(tmp_path):
    """On a slow link, which is pretended, the language model is cut; on that of this machine, as measured."""
    digests = {}
    for pretended in ("", "slow"):
        workdir = tmp_path / (pretended or "own")
        result = launch(2, "-m", "tests.integration.scripts.auto_segments", str(workdir), pretended)
        said = result.stdout + result.stderr
        assert result.returncode == 0, said
        summary = json.loads((workdir / "summary.json").read_text())
        assert re.search(rf"jit_segments auto: {summary['jit_segments']} \(pass of .* ms, exchange of", said), said
        digests[pretended] = summary
    assert digests["slow"]["jit_segments"] > 1
    assert digests["slow"]["train_loss"] == pytest.approx(digests[""]["train_loss"], rel=1e-4)
