"""A worker of `experiments.benchmarks.exchange` that runs TensorFlow: its ring, and tfpar's exchanges.

Requests: `start` with shapes; `build` with an exchange; `predict` its time on the link as it is now; `time` with a
number of calls. A call copies the gradients and waits for the other workers; only then does its time begin. As in
training, nothing else needs the gradients, so that an exchange may overwrite them, as PyTorch's all-reduce does.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

import tfpar
from experiments.benchmarks import fleet, netns
from experiments.benchmarks.loops import process_bytes
from tfpar import ExperimentConfig
from tfpar.collectives.group import allocate_instance_keys, group_key
from tfpar.collectives.tensorflow import transport_of, use_transport, world_group
from tfpar.doctor import describe_machine
from tfpar.exchange import fusion
from tfpar.exchange import spec as specs
from tfpar.exchange.buckets import DENSE_BUCKET_BYTES
from tfpar.exchange.tuning.forecast import forecast
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology
from tfpar_ops.transport_library import why_unusable

import numpy as np
import tensorflow as tf

RING, RING_BUFFER = "ring", "ring_buffer"
OVER_GLOO = "@gloo"  # after an exchange: over the native transport
ALL_REDUCE = "all_reduce:"  # of so many bytes
SIDECAR = 8  # scalars
_WARM_UP = 2

Call = Callable[[], float]  # one exchange; returns its seconds


class Worker:
    """State between requests."""

    def __init__(self) -> None:
        transport = "tensorflow" if why_unusable() else "gloo"
        config = ExperimentConfig.from_flat_dict({"strategy": "multi_worker", "transport": transport})
        self._runtime = strategies.build(choose_topology(config.strategy, tfpar.cluster.detect()))
        topology = self._runtime.topology
        self._native = transport_of("CPU")
        use_transport(None)
        self._group = world_group(topology.workers, topology.worker)
        self._gradients: list[tf.Tensor] = []
        self._call: Call = lambda: 0.0
        self._prepares = False  # whether a call does
        self.result: list[float] = []
        [key] = allocate_instance_keys(1)
        self._barrier = tf.function(lambda: self._group.all_reduce(tf.zeros([1]), key))
        [self._ready_key] = allocate_instance_keys(1)
        self._prepare = tf.function(self._prepared)

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        """Does what is asked."""
        return getattr(self, f"_{request.pop('do')}")(**request)

    def _start(self, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
        generator = np.random.default_rng(self._group.rank)
        self._gradients = [
            tf.constant(generator.standard_normal(shape, np.float32) * np.float32(1e-3)) for shape in shapes
        ]
        self._prepare(self._gradients)  # traces it
        self._barrier()
        return {"machine": describe_machine()}

    def _build(self, exchange: str) -> dict[str, Any]:
        """Builds an exchange and calls it until it has settled."""
        self._call = lambda: 0.0
        gc.collect()  # residuals of the previous exchange
        sizes = [int(np.prod(gradient.shape)) for gradient in self._gradients]
        dense = 4 * sum(sizes)
        sent = 2 * (self._group.size - 1) * dense // self._group.size
        reply: dict[str, Any] = {"payload": dense, "formula": sent, "about": ""}
        over_gloo, exchange = exchange.endswith(OVER_GLOO), exchange.removesuffix(OVER_GLOO)
        if over_gloo and self._native is None:
            raise RuntimeError(f"the native transport cannot be used: {why_unusable()}")
        use_transport(self._native if over_gloo else None)
        if exchange.startswith(ALL_REDUCE):
            size = int(exchange.removeprefix(ALL_REDUCE))
            self._call = self._all_reduce(size)
            reply |= {"payload": size, "formula": None}
        elif exchange == RING:
            self._call = self._ring(sizes)
        elif exchange == RING_BUFFER:
            self._call = self._ring_buffer(sum(sizes))
        else:
            self._call, about = self._tfpar(exchange)
            reply |= about
        for _ in range(_WARM_UP):
            self._call()
        return reply

    def _predict(self, exchange: str, beyond: Sequence[int]) -> dict[str, Any]:
        """Measures the link, and predicts the time of the exchange that was built, here and for `beyond` workers."""
        spec = exchange.removesuffix(OVER_GLOO)
        if spec.startswith((RING, ALL_REDUCE)):  # these are not tfpar's
            return {"predicted_ms": None, "beyond_ms": []}
        topology = self._runtime.topology
        group = world_group(topology.workers, topology.worker)  # over the transport of the exchange
        shapes = [gradient.shape for gradient in self._gradients]
        self._barrier()
        found = forecast(specs.parse(spec), shapes, group, self._runtime.strategy.extended.worker_devices[0])
        ms, *beyond_ms = (1e3 * found.cost(workers).seconds for workers in (group.size, *beyond))
        return {"predicted_ms": ms, "beyond_ms": beyond_ms}

    def _time(self, times: int) -> dict[str, Any]:
        """Seconds of each of so many calls, and bytes sent by each."""
        self._barrier()
        before, busy = int(netns.counter("tx_bytes").read_text()), time.process_time()
        seconds = [self._call() for _ in range(times)]
        busy = time.process_time() - busy
        self._barrier()  # bytes that others have not yet fetched from this worker count, too
        sent = int(netns.counter("tx_bytes").read_text()) - before
        if self._prepares:
            preparing = time.process_time()
            for _ in range(times):
                self._prepare(self._gradients)
            busy -= time.process_time() - preparing
        return {
            "seconds": seconds,
            "sent": sent / times,
            "peak_memory": process_bytes("VmHWM"),
            "cpu_seconds": max(busy, 0.0) / times,
        }

    def _prepared(self, gradients: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Gradients of which nothing else needs the memory, and the time when all workers have theirs."""
        fresh = [tf.raw_ops.DeepCopy(x=gradient) for gradient in gradients]
        with tf.control_dependencies(fresh):
            everywhere = self._group.all_reduce(tf.zeros([1]), self._ready_key)
        with tf.control_dependencies([everywhere]):
            return fresh, tf.timestamp()

    def _timed(
        self, run: Callable[[list[tf.Tensor]], tuple[Sequence[tf.Tensor], tf.Tensor]], given: Sequence[tf.Tensor] = ()
    ) -> Call:
        """A call of a function that returns sums and a result; `result` has that of the last call.

        Args:
          run: The function.
          given: Its arguments; by default the gradients.
        """
        self._prepares = True

        @tf.function
        def step(gradients: list[tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
            def replica_step() -> tuple[tf.Tensor, tf.Tensor]:
                fresh, began = self._prepared(gradients)
                with tf.control_dependencies([began]):
                    sums, result = run([tf.identity(gradient) for gradient in fresh])
                with tf.control_dependencies([*sums, result]):  # made as for a user of theirs
                    return tf.identity(result), tf.timestamp() - began

            return self._runtime.strategy.run(replica_step)

        def call() -> float:
            first = self._runtime.strategy.experimental_local_results
            result, seconds = (first(each)[0].numpy() for each in step([*given] or self._gradients))
            self.result = result.tolist()
            return float(seconds)

        return call

    def _tfpar(self, spec: str) -> tuple[Call, dict[str, Any]]:
        exchange, strategy, workers = tfpar.Exchange(spec), self._runtime.strategy, self._group.size
        exchange.build([tf.TensorSpec(gradient.shape) for gradient in self._gradients], strategy=strategy)

        # The first scalar means that all gradients are finite: else nothing would be exchanged.
        sidecar = tf.concat([[0.0], tf.ones([SIDECAR - 1])], axis=0)
        timed = self._timed(lambda gradients: exchange.reduce_sums(gradients, sidecar))

        def call() -> float:
            seconds = timed()
            if self.result != [0.0, *[float(workers)] * (SIDECAR - 1)]:
                raise AssertionError(f"the sidecar should be 0 and {workers}, but is {self.result}")
            return seconds

        traffic = exchange.traffic(workers, SIDECAR)
        about_text = "\n".join(filter(None, [exchange.describe(), exchange.plan_table]))
        about = {"payload": traffic.payload_bytes, "formula": traffic.wire_bytes, "about": about_text}
        return call, about

    def _all_reduce(self, size: int) -> Call:
        """An all-reduce of so many bytes, over the transport that is in use."""
        group = world_group(self._runtime.topology.workers, self._runtime.topology.worker)
        [key] = allocate_instance_keys(1)
        value = tf.ones([size // 4])
        self._prepares = False

        @tf.function
        def step(tensor: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([group.all_reduce(tensor, key)]):
                return tf.zeros([])

        def call() -> float:
            began = time.perf_counter()
            step(value).numpy()
            return time.perf_counter() - began

        return call

    def _ring(self, sizes: Sequence[int]) -> Call:
        """TensorFlow's ring over buffers of the size to which `none` fuses: copies in and out are part of it."""
        buckets = fusion.group_indices(range(len(sizes)), sizes, DENSE_BUCKET_BYTES)
        keys = allocate_instance_keys(len(buckets))

        def ring(gradients: list[tf.Tensor]) -> tuple[list[tf.Tensor], tf.Tensor]:
            sums: list[tf.Tensor] = []
            for bucket, key in zip(buckets, keys, strict=True):
                buffer = tf.concat([tf.reshape(gradients[index], [-1]) for index in bucket], axis=0)
                parts = tf.split(self._ring_reduce(buffer, key), [sizes[index] for index in bucket])
                sums += [tf.reshape(part, gradients[index].shape) for part, index in zip(parts, bucket, strict=True)]
            return sums, tf.zeros([])

        return self._timed(ring)

    def _ring_buffer(self, elements: int) -> Call:
        """TensorFlow's ring over one buffer that is there already: nothing but the collective."""
        [key] = allocate_instance_keys(1)
        ring = lambda buffers: ([self._ring_reduce(buffers[0], key)], tf.zeros([]))  # noqa: E731
        return self._timed(ring, [tf.zeros([elements])])

    def _ring_reduce(self, value: tf.Tensor, key: int) -> tf.Tensor:
        return tf.raw_ops.CollectiveReduceV2(
            input=value,
            group_size=self._group.size,
            group_key=group_key(self._group.members),
            instance_key=key,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="RING",
        )


if __name__ == "__main__":
    fleet.explain(__doc__)
    fleet.serve(Worker().handle)
