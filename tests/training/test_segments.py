"""Passes of several XLA programs: the weights of one program, and gradients that do not wait for each other."""

from __future__ import annotations

import tfpar
from tests.integration.scripts import divided
from tests.training.test_pipeline import normalized, own, synchronized
from tfpar.config import ConfigError
from tfpar.training.segments.placing import segments_of
from tfpar.training.validate import validate_config

import numpy as np
import pytest

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
        pytest.param("recurrent", 2, {}, marks=pytest.mark.proof),
    ],
)
def test_segments_have_the_weights_of_one_program(model, segments, options):
    weights = []
    for number in (1, segments):
        trainer = divided.here("mirrored", model=model, jit_segments=number, **COMPILED, **options)
        weights.append(divided.weights_of(trainer))
        passes = 2 * number if number > 1 else 1  # a forward and a backward pass of each segment
        assert len(programs := programs_of(trainer)) == 2 * (passes + 1), programs  # of two replicas, with the update
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        np.testing.assert_allclose(weights[1][name], value, rtol=1e-6, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (own, "--jit_segments=2: model 'own' has a call of its own, not a graph of layers"),
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
        segments_of(divided.dense(), 12)


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
