"""One worker of tests/integration/test_transport.py: what `auto` chooses over each transport, and what takes how long.

python -m tests.integration.scripts.auto_choice OUTPUT

Worker 0 writes to OUTPUT, as JSON by transport: the choices for a large and a small bucket, and for each of these the
shortest seconds of every exchange among them and of the usual ones, of the slower worker.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import tfpar
from tfpar import ExperimentConfig
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.group import Group, allocate_instance_keys
from tfpar.collectives.tensorflow import use_transport, world_group
from tfpar.exchange import spec as specs
from tfpar.exchange.spec import Spec
from tfpar.exchange.tuning import auto
from tfpar.parallel import strategies
from tfpar.parallel.topology import choose_topology

import tensorflow as tf

ELEMENTS = [1 << 22, 1 << 8]
CALLS = 9


def shortest(spec: Spec, elements: int, group: Group) -> float:
    """Seconds of the fastest call, of the slower worker."""
    bucket = spec.build([tf.TensorShape([elements])], group, 0, "bucket")
    [key] = allocate_instance_keys(1, group)
    values = tf.random.stateless_normal([elements], [group.rank, 1])
    call = tf.function(lambda: bucket.reduce([values], tf.constant(0, tf.int64))[0])
    barrier = tf.function(lambda: group.all_reduce(tf.zeros([1]), key))
    call(), barrier()
    taken = []
    for _ in range(CALLS):
        barrier()
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return max(WorkerAgreement(group).gather(min(taken)))


def main() -> None:
    config = ExperimentConfig.from_flat_dict({"strategy": "multi_worker", "transport": "gloo"})
    topology = strategies.build(choose_topology(config.strategy, tfpar.cluster.detect())).topology
    found = {}
    for transport in ("gloo", "tensorflow"):
        if transport == "tensorflow":
            use_transport(None)
        group = world_group(topology.workers, topology.worker)
        spec = specs.parse("auto")
        chosen = auto.choose(spec, ELEMENTS, group, auto.measure_codecs(spec, group, "/device:CPU:0"))
        names = ["none", "bf16", "int8"]
        seconds = []
        for elements, one in zip(ELEMENTS, chosen.specs, strict=True):
            known = {"chosen": one, **{name: specs.parse(name) for name in names}}
            seconds.append({name: shortest(spec, elements, group) for name, spec in known.items()})
        found[transport] = {
            "chosen": [(one.name, one.options.pattern_name) for one in chosen.specs],
            "seconds": seconds,
            "table": chosen.table,
        }
    if topology.worker == 0:
        pathlib.Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
