"""Training on a GPU: the weights of the CPU, the bits of its exchanges, and runs that go on with the same bits."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

from tests.gpu.conftest import environ
from tests.integration.scripts.exchange_sums import BAD_STEP
from tests.integration.test_multi_worker import ROOT
from tests.training.test_tensor_parallel import alone
from tfpar_ops.transport_library import why_unusable

import numpy as np
import pytest

needs_transport = pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here")
SPECS = [
    "none",
    "powersgd:2",
    "int4:rounding=stochastic",
    "topk:0.05,block=256",
    "int8:pattern=ring",
    "sign:pattern=all_gather",
    "fp8",
    "int2",
]


def run(*command: str, workers: int = 1, gpu: bool = True, timeout: float = 600.0) -> str:
    """Runs a module or a script on workers that share the GPU; returns what they said."""
    launched = ["-m", "tfpar.launch", f"--workers={workers}", "--share_gpus", "--"] if workers > 1 else []
    result = subprocess.run(
        [sys.executable, *launched, *(() if command[0].endswith(".py") else ("-m",)), *command],
        cwd=ROOT,
        env=environ() | ({} if gpu else {"CUDA_VISIBLE_DEVICES": "-1"}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-10_000:]
    return result.stdout + result.stderr


def trained(folder: pathlib.Path, *cases: dict[str, Any], workers: int = 1) -> list[dict[str, np.ndarray]]:
    """What the cases of `tests.integration.scripts.divided` leave, the same on all workers."""
    folder.mkdir()
    common = {"tf32": False, **({"transport": "gloo"} if workers > 1 else {"strategy": "one_device"})}
    options = json.dumps([common | case for case in cases])
    run("tests.integration.scripts.divided", str(folder), options, workers=workers)
    found = []
    for number in range(len(cases)):
        first, *others = (dict(np.load(folder / f"{number}-{worker}.npz")) for worker in range(workers))
        for other in others:
            assert other["params_sha256"] == first["params_sha256"]
        found.append(first)
    return found


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], **tolerance: float) -> None:
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, err_msg=name, **({"rtol": 1e-4, "atol": 1e-5} | tolerance))


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Of the weights, in proportion to their norm."""
    squares = [(np.sum((found[name] - value) ** 2), np.sum(value**2)) for name, value in expected.items()]
    return float(np.sqrt(sum(first for first, _ in squares) / max(1e-30, sum(second for _, second in squares))))


@pytest.mark.parametrize(
    "case",
    [
        {"accumulate_steps": 2},
        {"accumulate_steps": 2, "jit_compile": "true"},
        {"offload": "optimizer"},
        {"model": "attention", "steps": 6},
        {"model": "language_model", "steps": 6, "jit_compile": "true", "recompute": "blocks"},
        {"model": "vit", "steps": 6},
        {"model": "resnet", "steps": 6},
        {"model": "recurrent", "steps": 6},
        {"model": "batch_statistics", "steps": 6},
    ],
    ids=lambda case: ",".join(f"{name}={value}" for name, value in case.items()),
)
def test_the_weights_of_the_cpu(tmp_path, case):
    [found] = trained(tmp_path / "out", case)
    plain = {name: value for name, value in case.items() if name not in ("jit_compile", "offload", "recompute")}
    assert_close(found, alone(plain.pop("model", "dense"), **plain)[0])


@pytest.mark.parametrize(
    ("precision", "jit_compile"),
    [("float32", "auto"), ("mixed_float16", "false"), ("mixed_float16", "true"), ("mixed_bfloat16", "auto")],
)
def test_real_digits(tmp_path, precision, jit_compile):
    flags = ["--flagfile=experiments/recipes/quickstart.flags", "--epochs=6", f"--jit_compile={jit_compile}"]
    said = run("experiments/image_classification.py", *flags, f"--precision={precision}", f"--workdir={tmp_path}/run")
    assert "1 GPU" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval"]["accuracy"] > 0.9


def test_a_run_goes_on_with_the_same_bits(tmp_path):
    common = {"schedule": "constant", "deterministic": True, "model": "language_model", "exchange": "int4"}
    saved = {**common, "workdir": str(tmp_path / "run")}
    whole, _, resumed = trained(
        tmp_path / "out", {**common, "steps": 10}, {**saved, "steps": 5}, {**saved, "steps": 10}
    )
    assert whole["params_sha256"] == resumed["params_sha256"]


@needs_transport
def test_exchanges_have_the_bits_of_the_cpu(tmp_path):
    """Sums of two dense gradients and of payloads have, and residuals; PowerSGD multiplies matrices."""
    for gpu in (True, False):
        (tmp_path / str(gpu)).mkdir()
        said = run("tests.gpu.exchanges", str(tmp_path / str(gpu)), "1", *SPECS, workers=2, gpu=gpu)
        assert ("on GPU" in said) == gpu
    for number, spec in enumerate(SPECS):
        first = dict(np.load(tmp_path / "True" / f"{number}-0.npz"))
        for worker in range(2):
            found, expected = (dict(np.load(tmp_path / str(gpu) / f"{number}-{worker}.npz")) for gpu in (True, False))
            assert found.keys() == expected.keys()
            for name, value in found.items():
                kind, *where = name.split("/")
                if kind == "mean":
                    np.testing.assert_array_equal(value, first[name], err_msg=f"{spec} {name}")
                    if int(where[0]) == BAD_STEP:
                        continue
                if spec != "powersgd:2" or value.dtype != np.float32:
                    np.testing.assert_array_equal(value, expected[name], err_msg=f"{spec} {name}")
                else:
                    assert distance({name: value}, {name: expected[name]}) < 1e-2, f"{spec} {name}"


@needs_transport
def test_two_workers_on_one_gpu_equal_one_device(tmp_path):
    """Over the native transport: NCCL refuses two members on one GPU."""
    dense, again, int8, topk, *sharded = trained(
        tmp_path / "out",
        {"accumulate_steps": 2},
        {"accumulate_steps": 2, "jit_compile": "true"},
        {"exchange": "int8:min_elements=64"},
        {"exchange": "topk:0.1,min_elements=64"},
        *({"accumulate_steps": 2, "shard": shard} for shard in ("optimizer", "gradients", "weights")),
        workers=2,
    )
    for found in (dense, again, *sharded):
        assert_close(found, alone("dense", accumulate_steps=2)[0])
    assert 0.0 < distance(int8, alone("dense")[0]) < 0.1
    assert 0.0 < distance(topk, alone("dense")[0]) < 0.5


@needs_transport
def test_meshes_of_two_workers_on_one_gpu(tmp_path):
    model, language_model, pipeline, recurrent = trained(
        tmp_path / "out",
        {"mesh": "model:2", "accumulate_steps": 2},
        {"mesh": "model:2", "model": "language_model", "steps": 6},
        {"mesh": "pipeline:2", "accumulate_steps": 4},
        {"mesh": "pipeline:2", "accumulate_steps": 4, "model": "recurrent", "steps": 6},
        workers=2,
    )
    assert_close(model, alone("dense", accumulate_steps=2)[0])
    assert_close(language_model, alone("language_model", steps=6)[0])
    assert_close(pipeline, alone("dense", accumulate_steps=4)[0])
    assert_close(recurrent, alone("recurrent", accumulate_steps=4, steps=6)[0])


def test_meshes_of_one_process_on_a_split_gpu(tmp_path):
    (tmp_path / "out").mkdir()
    cases = [
        {"mesh": "data:2", "devices": 2, "accumulate_steps": 2},
        {"mesh": "model:2", "devices": 2, "accumulate_steps": 2},
        {"mesh": "pipeline:2", "devices": 2, "accumulate_steps": 4},
        {"mesh": "data:2", "devices": 2, "accumulate_steps": 2, "shard": "weights"},
    ]
    common = {"strategy": "mirrored", "tf32": False}
    run("tests.gpu.split", str(tmp_path / "out"), json.dumps([common | case for case in cases]))
    for number, case in enumerate(cases):
        found = dict(np.load(tmp_path / "out" / f"{number}-0.npz"))
        assert_close(found, alone("dense", accumulate_steps=case["accumulate_steps"])[0])
