"""Real processes with TF_CONFIG: the same weights as one device, the same bits on every worker."""

from __future__ import annotations

import functools
import os
import pathlib
import subprocess
import sys

from tests import nursery
from tests.training import layouts
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

import numpy as np
import pytest

pytestmark = pytest.mark.cluster
ROOT = pathlib.Path(__file__).parents[2]


def launch(workers: int, *command: str, ps: int = 0, timeout: float = 300.0) -> subprocess.CompletedProcess:
    # TF_CPP_MIN_LOG_LEVEL is the tests' own; a user has none, and tfpar then sets what keeps the start quiet.
    environ = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")}
    return nursery.run(
        [sys.executable, "-m", "tfpar.launch", f"--workers={workers}", f"--ps={ps}", "--", *command],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@functools.cache
def on_one_device(accumulate_steps: int) -> dict[str, np.ndarray]:
    runtime = strategies.build(choose_topology(StrategyConfig(strategy="one_device")))
    trainer, _ = layouts.train("one_device", 1, accumulate_steps, runtime=runtime)
    return layouts.weights_of(trainer)


@pytest.mark.parametrize(("devices", "accumulate_steps"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_two_workers_equal_one_device(tmp_path, devices, accumulate_steps):
    output = tmp_path / "WORKER.npz"
    arguments = [str(output), "multi_worker", str(devices), str(accumulate_steps), "auto"]
    result = launch(2, "-m", "tests.training.layouts", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    workers = [dict(np.load(tmp_path / f"{worker}.npz")) for worker in range(2)]
    assert workers[0].pop("params_sha256") == workers[1].pop("params_sha256")
    expected = on_one_device(accumulate_steps)
    for worker in workers:
        assert set(worker) == set(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(worker[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert "[worker 1]" not in result.stdout  # only the chief talks


def test_keras_fit_fails_where_tfpar_trains():
    result = launch(2, "tests/integration/scripts/keras_fit.py")
    assert result.returncode != 0
    assert "Attempt to convert a value (PerReplica" in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("data", ["training data (here arrays, 200 examples", "training data (here arrays, 120"]),
        ("option", ["--eval_every (here 10)", "--eval_every (here 5)"]),
        ("name", []),
        ("nothing", []),
    ],
)
def test_workers_that_were_not_given_the_same_say_so_before_the_first_step(what, named):
    result = launch(2, "-m", "tests.integration.scripts.own_data", what, timeout=300)
    said = result.stdout + result.stderr
    assert (result.returncode == 0) == (not named), said
    assert ("the workers were not given the same" in said) == bool(named)
    assert all(part in said for part in named), said


def test_workers_with_other_models_say_so_before_the_first_step():
    result = launch(2, "-m", "tests.integration.scripts.own_data", "models")
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    values = "refused: the workers' models start from different values: "
    for text in (
        f"weights {values}1 of 2 weights and states differ from those of worker 0 on worker 1, the first of them 'seq",
        f"state {values}1 of 4 weights and states differ from those of worker 0 on worker 1, the first of them 'norm",
    ):
        assert said.count(text) == 2, said  # on every worker
    for text in (
        "loss refused: the workers were not given the same: loss (here mse). Each",
        "loss refused: the workers were not given the same: loss (here mae). Each",
        "metrics refused: the workers were not given the same: metrics (here None). Each",
        "metrics refused: the workers were not given the same: metrics (here ['mae']). Each",
    ):
        assert text in said, said


_THREE_TRAINERS = """
import tfpar, keras, numpy as np
x = np.random.default_rng(0).normal(size=(24, 6)).astype("float32")
options = {"global_batch_size": 8, "jit_compile": "false", "verbose": 0}
for width, strategy in ((4, "auto"), (9, "multi_worker"), (5, "auto")):
    build = lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(width), keras.layers.Dense(1)])
    trainer = tfpar.Trainer(build, "sgd", "mse", strategy=strategy, **options)
    result = trainer.fit(x, x[:, :1], epochs=1, validation=(x, x[:, :1]))
    print("trained", width, trainer.predict(x).shape, result["params_sha256"], flush=True)
for other in ({"peer_timeout": 20.0}, {"devices": 2}, {"devices": 2, "mesh": "model:2"}, {"mesh": "auto"}):
    try:
        tfpar.Trainer(build, "sgd", "mse", **options, **other)
    except tfpar.ConfigError as error:
        print("refused", error, flush=True)
"""


def test_several_trainers_in_a_program(tmp_path):
    """They share the strategy that the first one started, and options that it cannot follow are named."""
    (tmp_path / "three.py").write_text(_THREE_TRAINERS)
    result = launch(2, str(tmp_path / "three.py"))
    assert result.returncode == 0, result.stdout + result.stderr
    trained = [line.partition("trained ")[2] for line in result.stdout.splitlines() if "trained " in line]
    assert sorted(trained) == sorted(2 * list(dict.fromkeys(trained)))
    assert {line.split()[0] for line in trained} == {"4", "9", "5"}
    for option, runs in (("peer_timeout=20.0", "30.0"), ("devices=2", "1"), ("mesh=data:2,model:2", "data:2")):
        said = f"refused --{option} does not agree with the strategy that connects this process to its cluster, which "
        assert result.stdout.count(f"{said}runs with --{option.partition('=')[0]}={runs} and can be") == 2, (
            result.stdout
        )
    assert result.stdout.count("refused --mesh=auto is chosen before the strategy starts, and") == 2, result.stdout
