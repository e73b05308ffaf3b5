"""The experiment scripts as a user starts them: real processes, real data, the contract's files."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

from tests import nursery
from tests.integration.test_multi_worker import ROOT, launch

import keras
import numpy as np
import pytest
import tensorflow as tf

pytestmark = [pytest.mark.cluster, pytest.mark.grappler]
CLASSIFY = "experiments/image_classification.py"
QUICK = "--flagfile=experiments/recipes/quickstart.flags"

SUMMARY_KEYS = {
    *("steps", "train_loss", "eval", "examples_per_second", "step_ms_p50", "step_ms_p95", "input_wait_fraction"),
    *("strategy", "workers", "replicas", "precision", "jit_compile", "exchange", "params_sha256", "restarts"),
}


def script(name: str, *flags: str, timeout: float = 300.0) -> subprocess.CompletedProcess:
    """Runs a script in one process, as `python experiments/NAME`."""
    environ = {key: value for key, value in os.environ.items() if key not in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL")}
    return nursery.run(
        [sys.executable, f"experiments/{name}.py", *flags],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def succeeded(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def summary_of(workdir: pathlib.Path) -> dict:
    return json.loads((workdir / "summary.json").read_text())


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> pathlib.Path:
    """The main job, as `make train` runs it."""
    workdir = tmp_path_factory.mktemp("quickstart") / "run"
    succeeded(launch(2, CLASSIFY, QUICK, f"--workdir={workdir}", "--profile_steps=40,44", "--profile_workers=all"))
    return workdir


def test_the_main_job_keeps_its_contract(quickstart):
    summary = summary_of(quickstart)
    assert set(summary) >= SUMMARY_KEYS
    assert set(summary["exchange"]) >= {"codec", "pattern", "payload_bytes_per_step", "wire_bytes_per_step"}
    assert summary["eval"]["accuracy"] >= 0.98
    assert summary["workers"] == summary["replicas"] == 2
    assert summary["strategy"] == "multi_worker"
    # Weights and sidecar (count, flag, loss, and two numbers of the accuracy), float32; a ring of two sends it once.
    model = keras.saving.load_model(quickstart / "model.keras", safe_mode=True)
    assert summary["exchange"]["payload_bytes_per_step"] == 4 * (model.count_params() + 5)
    assert summary["exchange"]["wire_bytes_per_step"] == summary["exchange"]["payload_bytes_per_step"]


def test_tensorboard_has_what_one_watches(quickstart):
    points: dict[str, int] = {}
    for path in (quickstart / "train").glob("*events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                points[value.tag] = points.get(value.tag, 0) + 1
    for wanted in (
        *("loss", "metrics/accuracy", "training/learning_rate", "training/gradient_norm", "training/update_norm"),
        *("time/examples_per_second", "time/mfu", "time/step_ms", "time/input_wait_ms", "time/exchange_ms"),
        *("time_workers/slowest_ms", "time_workers/fastest_rank", "time_stacked/4_update"),
    ):
        assert points[wanted] >= 50, (wanted, points)
    assert {"configuration", "exchange", "training/inputs", "model"} <= points.keys()
    assert "training/loss_scale" not in points  # it is 1 in float32
    profiles = sorted(path.name for path in (quickstart / "plugins" / "profile" / "steps_40_to_44").iterdir())
    assert profiles == ["worker_0.xplane.pb", "worker_1.xplane.pb"]


def test_evaluate_agrees_with_the_run(quickstart):
    output = succeeded(script("evaluate", f"--model_file={quickstart}/model.keras"))
    results = json.loads(output[output.index("{") :])
    assert results["examples"] == 360
    assert results["accuracy"] == pytest.approx(summary_of(quickstart)["eval"]["accuracy"])
    assert results["loss"] == pytest.approx(summary_of(quickstart)["eval"]["loss"], rel=1e-4)


@pytest.mark.parametrize("kind", ["saved_model", "onnx"])
def test_export_is_checked_against_the_model(quickstart, tmp_path, kind):
    output = tmp_path / ("model.onnx" if kind == "onnx" else "export")
    flags = [f"--model_file={quickstart}/model.keras", "--dataset=digits", f"--format={kind}", f"--output={output}"]
    exported = script("export", *flags)
    assert "checked on 64 examples" in succeeded(exported)
    assert "Warning" not in exported.stderr
    assert output.exists()
    again = script("export", *flags)
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_export_sees_16_bits_in_a_nested_model(tmp_path):
    inner = keras.Sequential([keras.layers.Dense(4, dtype="mixed_bfloat16")])
    keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(3)]).save(tmp_path / "model.keras")
    flags = [f"--model_file={tmp_path}/model.keras", "--dataset=synthetic:5:3:64", f"--output={tmp_path}/new"]
    refused = script("export", *flags, "--format=onnx")
    assert refused.returncode == 2
    assert "model.keras computes in bfloat16, for which ONNX has no convolutions" in refused.stderr


TINY = [
    QUICK,
    "--epochs=0",
    "--steps=40",
    "--eval_every=40",
    "--checkpoint_every=10",
    "--deterministic",
    "--warmup_steps=5",
]


@pytest.mark.parametrize(
    ("workers", "exchanges", "xla"),
    [
        (1, ("none", "none"), True),
        (2, ("none", "none"), True),
        # One lets the exchange overlap the backward pass, the other not.
        (
            2,
            tuple(f"int4:rounding=stochastic,bucket_bytes=20000,overlap={overlap}" for overlap in ("true", "false")),
            False,
        ),
    ],
)
def test_a_stopped_and_resumed_run_gives_the_bits_of_one_that_was_not(tmp_path, workers, exchanges, xla):
    def train(workdir: str, *flags: str) -> str:
        exchange = dict(zip(("whole", "parts"), exchanges, strict=True))[workdir]
        compiled = ["--model=mlp", "--jit_compile=true"] if xla else ["--jit_compile=false"]
        arguments = [*TINY, *compiled, f"--exchange={exchange}", f"--workdir={tmp_path / workdir}", *flags]
        if workers == 1:
            return succeeded(script("image_classification", *arguments))
        return succeeded(launch(workers, CLASSIFY, *arguments))

    train("whole")
    # 29 is in the middle of the second epoch of 23 steps.
    assert "stopped after step 29 of 40" in train("parts", "--stop_after=29")
    assert not (tmp_path / "parts" / "summary.json").exists()
    assert "resumed from step 29" in train("parts")
    whole, parts = summary_of(tmp_path / "whole"), summary_of(tmp_path / "parts")
    assert whole["params_sha256"] == parts["params_sha256"]
    assert whole["eval"] == parts["eval"]


def test_without_xla_the_exchange_overlaps_the_backward_pass(tmp_path):
    flags = [
        QUICK,
        "--epochs=0",
        "--steps=20",
        "--warmup_steps=5",
        "--exchange=int8:bucket_bytes=20000",
        "--jit_compile=false",
    ]
    succeeded(launch(2, CLASSIFY, *flags, f"--workdir={tmp_path}"))
    overlapped = [
        tf.make_ndarray(value.tensor).item()
        for path in tmp_path.rglob("*events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag == "time/exchange_overlapped_ms"
    ]
    assert overlapped
    assert min(overlapped) > 0.0


def test_parameter_servers_train_digits(tmp_path):
    flags = [QUICK, "--strategy=parameter_server", "--epochs=5", f"--workdir={tmp_path}"]
    output = succeeded(launch(2, CLASSIFY, *flags, ps=1))
    assert "32 examples per step, each the push of one worker = 64 / 2 workers" in output
    assert "46 steps; remainder=pad: the last 2 share 29 examples" in output
    summary = summary_of(tmp_path)
    assert summary["eval"]["accuracy"] >= 0.95
    assert summary["strategy"] == "parameter_server"
    assert summary["steps"] == 5 * 23 * 2


def test_another_configuration_in_the_same_workdir_is_refused(quickstart):
    before = {path: path.stat().st_mtime_ns for path in quickstart.rglob("*") if path.is_file()}
    result = script("image_classification", QUICK, f"--workdir={quickstart}", "--learning_rate=0.5")
    assert result.returncode == 2
    assert "--learning_rate: 0.003 -> 0.5" in result.stderr
    assert "Traceback" not in result.stderr
    assert {path: path.stat().st_mtime_ns for path in quickstart.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["evaluate", "export"])
def test_a_file_that_is_no_model_is_one_plain_line(tmp_path, name):
    (tmp_path / "broken.keras").write_bytes(b"PK")
    flags = ["--dataset=digits", *([f"--output={tmp_path / 'out'}"] if name == "export" else [])]
    said = {"broken.keras": "is not a .keras file", "missing.keras": "does not exist"}
    for path in map(tmp_path.joinpath, said):
        result = script(name, f"--model_file={path}", *flags)
        assert result.returncode == 2
        assert said[path.name] in result.stderr
        assert "Traceback" not in result.stderr
        assert "strategy" not in result.stdout
    assert not (tmp_path / "out").exists()


def test_training_without_evaluation(tmp_path):
    flags = [f"--dataset=text:{ROOT}/README.md", "--validation_fraction=0", "--global_batch_size=4", "--steps=2"]
    small = ["--sequence_length=16", "--model_args=width=16,depth=1,heads=2", "--jit_compile=false"]
    output = succeeded(script("language_model", *flags, *small, "--warmup_steps=1", f"--workdir={tmp_path}"))
    assert "evaluation" not in output
    assert summary_of(tmp_path)["eval"] == {}


def test_warm_start_takes_the_weights(quickstart, tmp_path):
    flags = ["--dataset=digits", "--steps=1", "--learning_rate=0", f"--workdir={tmp_path}"]
    output = succeeded(script("image_classification", *flags, f"--warm_start={quickstart}"))
    assert "warm start from" in output
    assert summary_of(tmp_path)["eval"]["accuracy"] >= 0.98


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model=resnet19"], "resnet18"),
        (["--dataset=digit"], "digits"),
        (["--optimizer=adamm"], "adam"),
        (["--schedule=cosin"], "cosine"),
        (["--augment=flipp"], "flip"),
        (["--exchange=nonne"], "none"),
        (["--strategy=multi_worker"], "tfpar.launch"),
        (["--strategy=mirrored", "--devices=3"], "--uneven_batches=true"),
        (["--learning_rate=-1"], "at least 0"),
        (["--learning_rates=1"], "--learning_rate"),
        (["--steps=5", "--epochs=2"], "contradict"),
        (["--strategy=tpu"], "no TPU was found"),
        (["--profile_steps=9"], "10,15"),
        (["--dataset=tfds:nonesuch"], "not prepared"),
        (["--model_args=activation=rellu"], "'relu'"),
        (["--augment=crop:9"], "crop:7"),
        (["--warm_start=/nonesuch"], "a run's workdir"),
    ],
)
def test_wrong_flags_are_one_plain_line(tmp_path, flags, message):
    result = script("image_classification", f"--workdir={tmp_path / 'run'}", *flags)
    assert result.returncode == 2, result.stdout + result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


# Fine-tuning


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory) -> pathlib.Path:
    """A model for images of another number of classes, with one part of several layers, as Keras saves it."""
    keras.utils.set_random_seed(0)
    block = keras.Sequential(
        [keras.layers.Conv2D(4, 3, padding="same"), keras.layers.BatchNormalization(), keras.layers.ReLU()],
        name="block",
    )
    inputs = keras.Input((None, None, 3))
    outputs = keras.layers.Dense(7, name="old")(keras.layers.Conv2D(6, 3, name="last")(block(inputs)))
    path = tmp_path_factory.mktemp("pretrained") / "backbone.keras"
    keras.Model(inputs, outputs).save(path)
    return path


@pytest.mark.parametrize(
    ("trainable", "changed"),
    [("head", {"head"}), ("^backbone/last|^last/|head", {"head", "last"}), ("all", {"head", "last", "block"})],
)
def test_fine_tuning_changes_the_weights_that_it_is_told(pretrained, tmp_path, trainable, changed):
    flags = ["--flagfile=experiments/recipes/finetune.flags", "--epochs=0", "--steps=6", "--warmup_steps=0"]
    result = script("finetune", *flags, f"--preset={pretrained}", f"--trainable={trainable}", f"--workdir={tmp_path}")
    assert result.returncode == 0, result.stdout + result.stderr
    assert json.loads((tmp_path / "summary.json").read_text())["eval"]["accuracy"] > 0.0
    old = {"/".join(one.path.split("/")[-2:]): one.numpy() for one in keras.saving.load_model(pretrained).weights}
    new = {
        "/".join(one.path.split("/")[-2:]): one.numpy()
        for one in keras.saving.load_model(tmp_path / "model.keras").weights
    }
    assert new["head/kernel"].shape == (6, 10)
    assert (not np.array_equal(new["last/kernel"], old["last/kernel"])) == ("last" in changed)
    # Also its statistics: frozen batch normalisation does not learn them.
    inside = [name for name in old if name not in ("last/kernel", "last/bias", "old/kernel", "old/bias")]
    assert len(inside) == 6
    for name in inside:
        assert (not np.array_equal(new[name], old[name])) == ("block" in changed), name


def test_fine_tuning_keeps_all_but_the_last_call_of_a_layer(tmp_path):
    """The table of the token embeddings makes the logits of this model, after the last norm."""
    flags = ["--model=transformer_lm_tiny", "--dataset=synthetic:tokens:32", "--sequence_length=8"]
    short = ["--epochs=0", "--steps=1", "--jit_compile=false", "--global_batch_size=8"]
    succeeded(script("finetune", *flags, *short, f"--workdir={tmp_path}"))
    paths = [weight.path for weight in keras.saving.load_model(tmp_path / "model.keras").weights]
    assert {"token_embedding/embeddings", "final_norm/gamma", "head/kernel"} <= {*paths}


def test_fine_tuning_of_a_model_by_name_and_what_is_refused(tmp_path):
    result = script("finetune", "--epochs=0", "--steps=2", "--model=mlp", "--jit_compile=false")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "training 1,290 of 50,826 parameters (2.5 %): --trainable=^head/" in result.stdout + result.stderr
    inputs = keras.Input((32, 32, 3))  # digits are grey, which may become colours, but smaller
    keras.Model(inputs, keras.layers.Dense(7)(keras.layers.Flatten()(inputs))).save(tmp_path / "large.keras")
    twice = keras.layers.Dense(7)(inputs) + keras.layers.Dense(7)(inputs)
    keras.Model(inputs, twice).save(tmp_path / "two.keras")
    for flags, said in [
        ([f"--preset={tmp_path}/two.keras"], "two.keras: the model has no single last layer with weights"),
        ([f"--preset={tmp_path}/large.keras"], "the model takes inputs of shape (32, 32, 3), the data have (8, 8, 1)."),
        (["--preset=nowhere"], "error: --preset=nowhere is neither a .keras file nor a directory"),
        (["--preset=nowhere.keras"], "error: --preset=nowhere.keras"),
        (
            ["--preset=nowhere", "--model_args=dropout=0.5"],
            "error: --model_args builds a model, and --preset names one",
        ),
        (["--model=mlp", "--model_args=widths=0"], "error: --model_args widths=0 must be"),
        (["--trainable=("], "error: --trainable='(' is not a regular expression"),
        (
            ["--model=mlp", "--trainable=decoder"],
            "--trainable='decoder' matches no weight that can learn. Paths are such as",
        ),
    ]:
        result = script("finetune", *flags)
        assert result.returncode == 2, result.stdout + result.stderr
        assert said in result.stderr
