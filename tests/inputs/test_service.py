"""The pipeline behind a real tf.data service: dispatcher and workers in this process."""

from __future__ import annotations

import time

from tests.inputs.helpers import index_source
from tfpar.config import ConfigError, InputConfig
from tfpar.inputs import Pipeline, build_source, service

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image


@pytest.fixture
def start():
    """Starts a dispatcher with some workers; returns its address."""
    running = []

    def started(workers: int) -> str:
        dispatcher = tf.data.experimental.service.DispatchServer()
        running.append(dispatcher)
        address = dispatcher.target.split("://")[1]
        for _ in range(workers):
            options = tf.data.experimental.service.WorkerConfig(dispatcher_address=address, heartbeat_interval_ms=200)
            running.append(tf.data.experimental.service.WorkerServer(options))
        # All workers must be registered before a job starts, or one of them might do all the work.
        deadline = time.monotonic() + 300
        while dispatcher._num_workers() < workers:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return f"grpc://{address}"

    yield started
    for server in reversed(running):
        server._stop()


def config(address: str = "", **options) -> InputConfig:
    return InputConfig(data_service=address, **{"global_batch_size": 8, **options})


def elements(pipeline: Pipeline, count: int, **arguments) -> list:
    return list(pipeline.dataset(**arguments).take(count).as_numpy_iterator())


def assert_same(left: list, right: list) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert all(np.array_equal(p, q) for p, q in zip(a, b, strict=True))


def test_one_service_worker_keeps_the_order_bit_for_bit(start):
    address = start(1)
    source = index_source(45)
    plain, served = (Pipeline(source, config(a), accumulate_steps=2, replicas=2, seed=3) for a in ("", address))
    dataset = served.dataset()
    assert dataset.cardinality() == tf.data.INFINITE_CARDINALITY
    assert dataset.element_spec == served.element_spec
    assert_same(elements(plain, 30), elements(served, 30))
    assert_same(elements(plain, 8, start_step=9), elements(served, 8, start_step=9))
    assert address in served.report()


def test_examples_in_memory_are_sent_with_the_graph(start, tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 100)
    address = start(1)
    source = build_source(config(dataset=f"text:{tmp_path}/a.txt", sequence_length=16), "train")
    assert_same(elements(Pipeline(source, config()), 9), elements(Pipeline(source, config(address)), 9))


def test_image_files_are_read_by_the_service(start, tmp_path):
    for number in range(10):
        folder = tmp_path / f"class{number % 2}"
        folder.mkdir(exist_ok=True)
        Image.new("RGB", (5, 5), (20 * number, 0, 0)).save(folder / f"{number}.png")
    options = config(dataset=f"images:{tmp_path}", image_size=4, cache="none", validation_fraction=0.0)
    source = build_source(options, "train")
    assert_same(elements(Pipeline(source, config()), 4), elements(Pipeline(source, config(start(1))), 4))


@pytest.mark.parametrize(("workers", "steps_per_chunk"), [(1, 1), (3, 1), (2, 6)])
def test_evaluation_reads_each_example_once_with_any_number_of_workers(start, workers, steps_per_chunk, monkeypatch):
    # More chunks than service workers; the last one of 6 steps runs past the pass of 13.
    monkeypatch.setattr("tfpar.inputs.pipeline._INDICES_PER_CALL", 8 * steps_per_chunk)
    pipeline = Pipeline(index_source(101), config(start(workers)), training=False)
    dataset = pipeline.dataset()
    assert dataset.cardinality() == 13
    seen = np.concatenate([x[..., 0][weight > 0] for x, _, weight in dataset.as_numpy_iterator()])
    assert np.array_equal(np.sort(seen), np.arange(101))


def test_training_with_several_service_workers_takes_each_step_once(start, monkeypatch):
    monkeypatch.setattr("tfpar.inputs.pipeline._INDICES_PER_CALL", 8)
    pipeline = Pipeline(index_source(2400), config(start(2), prefetch=0), seed=1)
    steps = {tuple(pipeline.indices(step, 1)[0].ravel().tolist()): step for step in range(300)}
    seen = [steps[tuple(x[..., 0].ravel().astype(int).tolist())] for x, _, _ in elements(pipeline, 60)]
    assert len(set(seen)) == 60


class TestRefusals:
    ADDRESS = "grpc://localhost:1"

    @pytest.mark.parametrize("address", ["localhost:5050", "grpc://", "http://host:1"])
    def test_malformed_addresses_are_refused(self, address):
        with pytest.raises(ConfigError, match=r"--data_service=.* must be grpc://HOST:PORT"):
            Pipeline(index_source(20), config(address))

    @pytest.mark.parametrize("address", [ADDRESS, "grpc://no-such-host.invalid:5050"])
    def test_an_unreachable_dispatcher_is_refused(self, address, monkeypatch):
        monkeypatch.setattr(service, "_REACH_SECONDS", 0.6)
        pipeline = Pipeline(index_source(20), config(address))
        with pytest.raises(ConfigError, match=r"--data_service='grpc://.*: no dispatcher answers there .* 0.6 s"):
            pipeline.dataset()

    @pytest.mark.parametrize("address", ["grpc://host", "grpc://host:", "grpc://:5050", "host:5050", "grpc://host:x"])
    def test_reaching_a_malformed_address_is_refused(self, address):
        with pytest.raises(ConfigError, match=r"must be grpc://HOST:PORT"):
            service.check_reachable(address)

    def test_a_source_that_reads_through_python_is_refused(self, tmp_path):
        from tfpar.inputs import write

        write.write(InputConfig(dataset="synthetic:3:2:50"), str(tmp_path / "out"), shards=2)
        options = config(self.ADDRESS, dataset=f"tfrecord:{tmp_path}/out", cache="none")
        with pytest.raises(ConfigError, match=r"cannot read --dataset=tfrecord:.*--cache=memory"):
            Pipeline(build_source(options, "train"), options)
        options = config(self.ADDRESS, dataset=f"tfrecord:{tmp_path}/out", cache="memory")
        assert Pipeline(build_source(options, "train"), options).steps_per_epoch == 7

    def test_too_many_bytes_in_memory_are_refused(self, monkeypatch, tmp_path):
        monkeypatch.setattr(service, "_MAX_GRAPH_BYTES", 1 << 20)
        (tmp_path / "a.txt").write_bytes(b"x" * (2 << 20))
        source = build_source(config(dataset=f"text:{tmp_path}/a.txt"), "train")
        with pytest.raises(ConfigError, match=r"its 2 MiB in memory would be sent in the graph, which may hold 1 MiB"):
            Pipeline(source, config(self.ADDRESS))
