"""One worker of tests/integration/test_agreement.py: asks a WorkerAgreement, and exchanges in groups of some workers.

agree.py TRANSPORT ROUNDS, a JSON list of rounds, each a list of the workers' numbers; prints `answers` and `groups`.
agree.py TRANSPORT lose: the last worker ends abruptly, the others ask it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from typing import Any

from tfpar import cluster
from tfpar.cluster import failure
from tfpar.collectives.agreement import WorkerAgreement
from tfpar.collectives.group import allocate_instance_keys
from tfpar.collectives.tensorflow import new_group, world_group
from tfpar.config import StrategyConfig
from tfpar.parallel import strategies
from tfpar.parallel.topology import Topology, choose_topology
from tfpar.process.exit_codes import PeerLostError

import numpy as np
import tensorflow as tf

STEPS = 3
LONG = 20_000_000  # bytes of the longest value: several pieces
SUBGROUPS = ([0, 2], [0, 1, 2], [2, 1])  # of which some members are also members of the next


def long_bytes(rank: int) -> bytes:
    return np.random.default_rng(rank).bytes(LONG * rank // 2 + 3)


def answers(agreement: WorkerAgreement, rank: int, rounds: list[list[list[int]]]) -> list[dict[str, Any]]:
    result = []
    for held in rounds:
        mine = held[rank]
        result.append({"equal": agreement.all_equal(mine), "mean": agreement.mean(mine[0])})
        result[-1] |= {"gathered": agreement.gather(mine[0]), "sums": agreement.sums([0.1 * number for number in mine])}
    digests = [hashlib.sha256(data).hexdigest() for data in agreement.gather_bytes(long_bytes(rank))]
    (received,) = agreement.broadcast([np.frombuffer(long_bytes(2), np.uint8) ^ rank])
    shapes = [array.shape for array in agreement.gather_arrays(np.full([rank, 2], rank, np.float16))]
    return [*result, {"digests": digests, "broadcast": hashlib.sha256(received).hexdigest(), "shapes": shapes}]


def exchanged(topology: Topology) -> dict[str, list[list[float]]]:
    """Sums, gathered values and messages of the groups that this worker is in, of several steps."""
    groups = [new_group(members, topology.worker) for members in SUBGROUPS if topology.worker in members]
    keys = [allocate_instance_keys(3, group) for group in groups]
    world = world_group(topology.workers, topology.worker)
    (world_key,) = allocate_instance_keys(1)
    own = float(10**topology.worker)
    direction = -1 if topology.worker == 2 else 1

    def step(number: tf.Tensor) -> list[tf.Tensor]:
        results = []
        # In the opposite order on worker 2: keys alone tell calls apart.
        for group, (reduce_key, gather_key, message_key) in list(zip(groups, keys, strict=True))[::direction]:
            total = group.all_reduce(tf.fill([4], own * number), reduce_key)[0]
            gathered = group.all_gather(tf.fill([1, 2], own), gather_key)[:, 0]
            # Of the first member to the last.
            message = tf.zeros([3])
            if group.rank == 0:
                with tf.control_dependencies([group.send(tf.fill([3], own), group.size - 1, message_key)]):
                    message = tf.identity(message)
            elif group.rank == group.size - 1:
                message = group.receive(message.shape, tf.float32, 0, message_key)
            results.append(tf.concat([total[None], gathered, message[:1]], axis=0))
        return [*results[::direction], world.all_reduce(tf.fill([1], own), world_key)]

    function = tf.function(step, input_signature=[tf.TensorSpec([])], autograph=False)
    names = [*(str(list(group.members)) for group in groups), "world"]
    return {
        name: [result.numpy().tolist() for result in results]
        for name, *results in zip(
            names, *(function(tf.constant(float(number))) for number in range(STEPS)), strict=True
        )
    }


def lose(agreement: WorkerAgreement, topology: Topology) -> None:
    if topology.worker == topology.workers - 1:
        os._exit(0)  # without a word; as a success, so that the launcher does not end the others
    try:
        with failure.peer_errors_named(topology.cluster):
            agreement.all_equal("a value")
    except PeerLostError as error:
        print("error:", error, flush=True)
        os._exit(0)


def main() -> None:
    topology = choose_topology(StrategyConfig(strategy="multi_worker", transport=sys.argv[1]), cluster.detect())
    strategies.build(topology)
    agreement = WorkerAgreement(world_group(topology.workers, topology.worker))
    agreement.all_equal(0)
    if sys.argv[2] == "lose":
        lose(agreement, topology)
        return
    print("answers", json.dumps(answers(agreement, topology.worker, json.loads(sys.argv[2]))), flush=True)
    print("groups", topology.worker, json.dumps(exchanged(topology)), flush=True)
    agreement.all_equal(1)  # nobody leaves while another still needs it


if __name__ == "__main__":
    main()
