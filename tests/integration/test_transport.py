"""The native transport between real workers: the same numbers as over TensorFlow's, and starts that cannot work."""

from __future__ import annotations

import json
import os
import re

from tests.integration.scripts.exchange_sums import BAD_STEP, EARLY, SHAPES
from tests.integration.test_multi_worker import launch
from tfpar.collectives.gloo_mesh import Choice, choose
from tfpar.config import ConfigError
from tfpar_ops.transport_library import why_unusable

import numpy as np
import pytest

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here"),
]

FEW = ["none", "int4:rounding=stochastic", "topk:0.05,block=256", EARLY + "int4:bucket_bytes=20000"]
SPECS = [
    *FEW,
    "bf16",
    "fp8",
    "int8:pattern=ring",
    "int2",
    "int8:error_feedback=false",
    "int8:pipeline=false",
    "sign:pattern=all_gather",
    "int4:pattern=binary_blocks",
    "powersgd:2",
]
PIPELINED = {"int4:rounding=stochastic", "int4:bucket_bytes=20000", "bf16", "fp8", "int2", "int8:error_feedback=false"}
LARGE = {index for index, shape in enumerate(SHAPES) if len(shape) > 1 and np.prod(shape) >= 1024}


@pytest.mark.parametrize(
    ("workers", "specs"),
    [pytest.param(2, FEW, marks=pytest.mark.proof), (3, SPECS), pytest.param(4, FEW, marks=pytest.mark.proof)],
)
def test_exchanges_have_the_same_bits_as_over_tensorflow(tmp_path, workers, specs):
    """Payloads are the same, and are decoded and added in the same order. Dense sums of more than two workers differ in
    the last bit: TensorFlow's ring begins each part with another worker, the native transport always with the first."""
    result = launch(workers, "-m", "tests.integration.scripts.both_transports", str(tmp_path), *specs)
    assert result.returncode == 0, result.stdout + result.stderr
    for number, spec in enumerate(specs):
        encoded = set() if spec.startswith(("none", "powersgd")) else LARGE
        first = dict(np.load(tmp_path / f"Gloo-{number}-0.npz"))
        for worker in range(workers):
            over_gloo = dict(np.load(tmp_path / f"Gloo-{number}-{worker}.npz"))
            over_tensorflow = dict(np.load(tmp_path / f"TensorFlow-{number}-{worker}.npz"))
            assert bool(over_gloo.pop("pipelined")) == (spec.removeprefix(EARLY) in PIPELINED)
            assert over_tensorflow.pop("pipelined") == 0
            assert over_gloo.keys() == over_tensorflow.keys()
            for name, value in over_gloo.items():
                kind, *where = name.split("/")
                if kind == "mean":
                    np.testing.assert_array_equal(value, first[name], err_msg=f"{spec} {name}")
                    exact = workers == 2 or int(where[1]) in encoded
                    if int(where[0]) == BAD_STEP:
                        continue
                else:
                    exact = workers == 2 or bool(encoded) or kind != "state"
                if exact:
                    np.testing.assert_array_equal(value, over_tensorflow[name], err_msg=f"{spec} {name}")
                else:
                    close = (
                        {"rtol": 1e-3, "atol": 1e-4} if spec.startswith("powersgd") else {"rtol": 1e-5, "atol": 1e-5}
                    )
                    np.testing.assert_allclose(value, over_tensorflow[name], err_msg=f"{spec} {name}", **close)


@pytest.mark.proof
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_random_exchanges_have_the_same_bits_over_both_transports(workers):
    """`TFPAR_RANDOM_EXCHANGES` says how many; the output, from which number on, so that others come in other runs."""
    count, first = int(os.environ.get("TFPAR_RANDOM_EXCHANGES", "150")), int(np.random.default_rng().integers(1 << 30))
    print(f"{count} exchanges from number {first} on, {workers} workers")
    script = ("-m", "tests.integration.scripts.random_exchanges", str(count), str(first))
    result = launch(workers, *script, timeout=300.0 + 5.0 * count)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert said.count(f"exchanges {first} to {first + count - 1}, ") == said.count("all the same") == workers, said


@pytest.mark.proof
def test_auto_chooses_nothing_that_is_much_slower_than_others(tmp_path):
    """Only where another exchange takes a third of the time is the choice wrong: the machine may be busy."""
    output = tmp_path / "found.json"
    result = launch(2, "-m", "tests.integration.scripts.auto_choice", str(output))
    assert result.returncode == 0, result.stdout + result.stderr
    for transport, found in json.loads(output.read_text()).items():
        print(transport, json.dumps(found["seconds"]), found["table"], sep="\n")
        for chosen, seconds in zip(found["chosen"], found["seconds"], strict=True):
            allowed = 3.0 * min(seconds.values()) + 5e-4
            assert seconds["chosen"] < allowed, f"{transport}: {chosen} among {seconds}\n{found['table']}"


def test_training_over_both_transports_gives_the_same_weights(tmp_path):
    """Two workers, so that dense sums have the same bits too: batch statistics, sidecar, codec and checkpoints."""
    digests = set()
    for transport in ("tensorflow", "gloo"):
        workdir = tmp_path / transport
        flags = [
            "--model=convnet",
            "--model_args=normalization=batch",
            "--steps=4",
            "--global_batch_size=32",
            "--exchange=int4",
            "--jit_compile=false",
            f"--transport={transport}",
        ]
        result = launch(2, "experiments/image_classification.py", *flags, f"--workdir={workdir}")
        assert result.returncode == 0, result.stdout + result.stderr
        assert ("transport gloo" in result.stdout + result.stderr) == (transport == "gloo")
        summary = json.loads((workdir / "summary.json").read_text())
        assert summary["transport"] == transport
        digests.add((summary["params_sha256"], summary["train_loss"]))
    assert len(digests) == 1


@pytest.mark.parametrize("wishes", [("gloo", "tensorflow"), ("tensorflow", "auto")])
def test_workers_with_different_transports_are_told_so(wishes):
    result = launch(2, "-m", "tests.integration.scripts.transport_of_rank", "", *wishes)
    said = result.stdout + result.stderr
    told = "error: --transport: worker 0 has {}, worker 1 has {}. Give all workers the same.".format(*wishes)
    assert all(f"[worker {rank}] {told}" in said for rank in range(2)), said


@pytest.mark.parametrize(
    ("obstacle", "chosen", "why"),
    [
        ("", "gloo", "all workers have it"),
        ("library", "tensorflow", "worker 1: it was built without Gloo"),
        ("address", "tensorflow", "worker 1 cannot listen on its own address: cannot listen on 192.0.2.1: "),
        ("firewall", "tensorflow", r"worker 0 and /job:worker/replica:0/task:1 \(127.0.0.1:\d+\): did not connect in"),
    ],
)
def test_auto_takes_gloo_where_all_workers_can(obstacle, chosen, why):
    # Worker 1 connects to worker 0, so a firewall before worker 0 is in the way.
    wishes = [f"auto:{obstacle}", "auto"] if obstacle == "firewall" else ["auto", f"auto:{obstacle}"]
    result = launch(2, "-m", "tests.integration.scripts.transport_of_rank", "", *wishes)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    group = {"gloo": "PipelinedGlooGroup", "tensorflow": "TensorFlowGroup"}[chosen]
    lines = re.findall(rf"replicas, transport {chosen} \({why}.*\| {group} \[2.0, 2.0, 2.0\]", said)
    assert len(lines) == 2, said
    reduction = {"gloo": "TfparAllReduce", "tensorflow": "CollectiveReduceV2"}[chosen]
    assert said.count(f"sums [[3.0], [6.0]] ['{reduction}']") == 2, said
    assert ("so data travels over TensorFlow's runtime" in said) == (obstacle in ("address", "firewall"))


def test_no_worker_encodes_in_the_transport_if_one_is_to_use_plain_tensorflow_operations():
    result = launch(2, "-m", "tests.integration.scripts.transport_of_rank", "", "gloo", "gloo:reference")
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    assert len(re.findall(r"replicas, transport gloo .*\| GlooGroup \[2\.0, 2\.0, 2\.0\]", said)) == 2, said


@pytest.mark.parametrize("wishes", [("gloo", "gloo:address"), ("gloo:address", "gloo")])
def test_all_workers_say_which_one_cannot_listen(wishes):
    """Within the time of a start: none waits for an address that will not come."""
    result = launch(2, "-m", "tests.integration.scripts.transport_of_rank", "", *wishes)
    said = result.stdout + result.stderr
    worker = wishes.index("gloo:address")
    told = f"error: --transport=gloo: worker {worker} cannot listen on its own address: cannot listen on 192.0.2.1: "
    assert all(f"[worker {rank}] {told}" in said for rank in range(2)), said
    assert said.count("Name an address of that worker's machine in TF_CONFIG, or use --transport=tensorflow.") == 2


def test_a_worker_that_ends_before_it_listens_is_lost():
    result = launch(2, "-m", "tests.integration.scripts.transport_of_rank", "", "gloo", "gloo:end")
    said = result.stdout + result.stderr
    assert result.returncode != 0, said
    assert re.search(
        r"lost /job:worker/replica:0/task:1 \(\S+\): no answer during the choice of --transport\.", said
    ), said


def test_a_pipeline_over_workers_must_know_its_transport_before_it_starts():
    result = launch(2, "-m", "tests.integration.scripts.transport_of_rank", "data:1,pipeline:2", "auto", "auto:library")
    said = result.stdout + result.stderr
    assert "[worker 0] error: --transport=auto: not all workers can use the native transport (worker 1: it was" in said
    assert "must know before it starts. Pass --transport=tensorflow." in said, said


def test_workers_choose_gloo_only_where_all_can():
    assert choose([("auto", "", "CPUs")] * 2) == Choice("gloo", "all workers have it")
    assert choose([("auto", "", "CPUs"), ("auto", "no Gloo", "CPUs")]) == Choice("tensorflow", "worker 1: no Gloo")
    assert choose([("gloo", "", "GPUs"), ("gloo", "", "GPUs")]) == Choice("gloo")
    with pytest.raises(ConfigError, match="worker 0 has auto, worker 2 has gloo"):
        choose([("auto", "", "CPUs"), ("auto", "", "CPUs"), ("gloo", "", "CPUs")])
    with pytest.raises(ConfigError, match="worker 0 trains on GPUs, worker 1 on CPUs"):
        choose([("gloo", "", "GPUs"), ("gloo", "", "CPUs")])
