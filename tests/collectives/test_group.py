"""Keys of groups and calls, and groups of some of the workers, which logical devices stand for."""

from __future__ import annotations

import concurrent.futures
import itertools
import pathlib
import re

from tfpar.collectives import group as groups
from tfpar.collectives.group import HOST_MESSAGE_KEYS, allocate_instance_keys, group_key, message_key
from tfpar.collectives.tensorflow import (
    Channel,
    TensorFlowGroup,
    device_group,
    is_gpu,
    new_group,
    use_transport,
    world_group,
)
from tfpar_ops.codecs import GPU_PEERS

import numpy as np
import pytest
import tensorflow as tf

FIRST_KEY = 1 << 20  # above those of TensorFlow's strategies
CPU, GPU = "/job:worker/replica:0/task:0/device:CPU:0", "/job:worker/replica:0/task:0/device:GPU:0"


# Keys


def test_a_set_of_members_has_one_key_whoever_asks():
    assert group_key([2, 0, 5]) == group_key((5, 2, 0)) == group_key([0, 2, 5], "CPU")
    # Pure functions of the members, the same in every process and version: these are written down.
    assert group_key([0, 1]) == FIRST_KEY
    assert group_key([0, 1], "GPU") == FIRST_KEY + 1
    assert group_key(range(3)) == 853_555_324
    assert group_key(range(3), "GPU") != group_key(range(3))


def test_keys_of_different_sets_differ():
    pairs = list(itertools.combinations(range(60), 2))
    worlds = [range(size) for size in range(3, 200)]
    rows_and_columns = [range(row * 8, row * 8 + 8) for row in range(8)] + [range(col, 64, 8) for col in range(8)]
    sets = {
        tuple(members) for members in (*pairs, *worlds, *rows_and_columns, [0], [1], [8190, 9000], [20_000, 30_000])
    }
    keys = [group_key(members, device) for members in sets for device in ("CPU", "GPU")]
    assert len(set(keys)) == len(keys)
    assert all(FIRST_KEY <= key < 1 << 31 for key in keys)


def test_messages_of_two_workers_have_another_key_in_every_group_of_theirs():
    """Groups count instance keys on their own, and may come to the same numbers."""
    groups_of_both = [(0, 2), (0, 1, 2), (0, 2, 3), range(4)]
    keys = [message_key(members, 0, 2) for members in groups_of_both]
    assert len({*keys, group_key([0, 2]), *map(group_key, groups_of_both)}) == 2 * len(keys)
    assert message_key([2, 1, 0], 2, 0) == message_key([0, 1, 2], 0, 2) != message_key([0, 1, 2], 0, 2, "GPU")
    world = message_key([0, 1, 2], 0, 2, all_workers=True)
    assert world_group(3, 0)._message_key(2) == world_group(3, 2)._message_key(0) == world
    assert world not in {*keys, group_key([0, 2])}  # messages among all workers, beside calls of the pair
    assert new_group([0, 1, 2], 0)._message_key(2) == keys[1]


def test_members_on_gpus_have_a_group_of_their_own():
    assert world_group(3, 0, CPU) == world_group(3, 0)
    assert world_group(3, 0, GPU) != world_group(3, 0)
    assert world_group(3, 0, GPU).key != world_group(3, 0).key
    assert (is_gpu(CPU), is_gpu(GPU), is_gpu("")) == (False, True, False)


def test_instance_keys_are_consecutive_and_never_given_twice():
    first, second = allocate_instance_keys(3), allocate_instance_keys(2)
    keys = [*first, *second]
    assert keys == list(range(keys[0], keys[0] + 5))
    assert not set(keys) & set(HOST_MESSAGE_KEYS)
    assert allocate_instance_keys(0) == []


def test_calls_of_a_subgroup_do_not_move_the_keys_of_all_workers(monkeypatch):
    """Worker 1 is no member of a group of 0 and 2, and must still count like them."""
    keys = []
    for worker in range(3):
        monkeypatch.setattr(groups, "_instance_keys", groups.InstanceKeys())  # another process
        allocated = {"before": allocate_instance_keys(2)}
        if worker != 1:
            allocated["subgroup"] = allocate_instance_keys(5, new_group([0, 2], worker))
        keys.append(allocated | {"after": allocate_instance_keys(2)})
    assert keys[0] == keys[2]
    assert keys[1] == {name: value for name, value in keys[0].items() if name != "subgroup"}
    assert not set(keys[0]["subgroup"]) & {*keys[0]["before"], *keys[0]["after"], *HOST_MESSAGE_KEYS}


# Groups


def test_members_and_ranks():
    group = new_group([7, 2, 4], 4, GPU)
    assert (group.members, group.rank, group.size, group.on_gpus) == ((2, 4, 7), 1, 3, True)
    assert world_group(4, 3).members == (0, 1, 2, 3)
    assert world_group().size == 1


def test_one_place_asks_whether_a_device_is_a_gpu():
    """Everything else asks a group's capabilities."""
    sources = (pathlib.Path(groups.__file__).parents[1]).rglob("*.py")
    asking = [path.name for path in sources if re.search(r"""["']GPU:?["'] (not )?in """, path.read_text())]
    assert asking == ["tensorflow.py"]


@pytest.mark.parametrize(
    ("members", "worker", "said"),
    [
        ([], 0, "at least one rank"),
        ([0, 0], 0, "repeated"),
        ([-1, 0], 0, "negative"),
        ([0, 2], 1, r"worker=1 is not a rank among members=\[0, 2\]"),
    ],
)
def test_members_that_are_refused(members, worker, said):
    with pytest.raises(ValueError, match=said):
        new_group(members, worker)


def test_capabilities():
    cpus, gpus = world_group(2, 0, CPU).capabilities, world_group(2, 0, GPU).capabilities
    assert (cpus.ordered, cpus.largest_fan_in, cpus.variable_sizes) == (False, None, True)
    assert (gpus.ordered, gpus.largest_fan_in, gpus.variable_sizes) == (True, GPU_PEERS, False)
    assert cpus.messages
    assert gpus.messages
    assert tf.int32 in cpus.dtypes
    assert tf.uint8 not in cpus.dtypes


def test_devices_of_several_workers_use_their_transport():
    made = []

    def make(*arguments, all_workers, on_gpus):
        made.append((*arguments, all_workers, on_gpus))
        return made[-1]

    use_transport(make)
    try:
        first = device_group(range(4, 6), 5, "CPU:0", [2, 3])
        again = device_group(range(6, 8), 7, "CPU:0", [2, 3])
        together = device_group(range(2), 1, "CPU:1", [0, 0])  # of one worker, in its memory
    finally:
        use_transport(None)
    assert first is made[0]
    assert made[0][1:] == (1, (2, 3), False, False)
    assert made[0][0] != again[0]  # so that their keys differ
    assert isinstance(together, TensorFlowGroup)


@pytest.mark.parametrize("for_gpus", [False, True])
def test_gpus_use_a_transport_that_is_for_them(for_gpus):
    def make(*arguments, all_workers, on_gpus):
        return arguments, all_workers, on_gpus

    use_transport(make, for_gpus=for_gpus)
    try:
        cpus, gpus = world_group(2, 0, CPU), world_group(2, 0, GPU)
        assert Channel(0, 1, GPU).waits_apart == for_gpus
        assert Channel(0, 1, CPU).waits_apart
    finally:
        use_transport(None)
    assert cpus == (((0, 1), 0, (0, 1)), True, False)
    assert gpus == (((0, 1), 0, (0, 1)), True, True) if for_gpus else isinstance(gpus, TensorFlowGroup)


def test_every_dtype_travels_in_every_operation():
    """On two logical devices, so that the list in `capabilities` is what TensorFlow takes."""
    members = (500, 501)
    key = itertools.count(1 << 25)
    for dtype in world_group(2).capabilities.dtypes:
        rows = tf.cast([[1, 2], [3, 4]], dtype)
        three = tf.concat([rows, rows[1:]], axis=0)
        instances = [next(key) for _ in range(6)]

        def run(rank: int, rows=rows, three=three, dtype=dtype, instances=instances):
            group = new_group(members, members[rank])
            with tf.device(f"CPU:{rank}"):
                results = [
                    group.all_reduce(rows, instances[0]),
                    group.all_to_all(rows, instances[1]),
                    group.all_gather(rows[rank : rank + 1], instances[2]),
                    group.reduce_scatter(rows, instances[4]),
                    group.reduce_scatter(three, instances[5]),
                ]
                if rank == 0:
                    group.send(rows, 1, instances[3])
                else:
                    results.append(group.receive(rows.shape, dtype, 0, instances[3]))
                return [result.numpy().astype(np.float64).tolist() for result in results]

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            first, second = pool.map(run, range(2))
        assert first == [[[2, 4], [6, 8]], [[1, 2], [1, 2]], [[1, 2], [3, 4]], [[2, 4]], [[2, 4], [6, 8]]]
        shares = [[[6, 8]], [[6, 8], [0, 0]]]
        assert second == [[[2, 4], [6, 8]], [[3, 4], [3, 4]], [[1, 2], [3, 4]], *shares, [[1, 2], [3, 4]]]


NUMBERS = (
    *(tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16, tf.int32, tf.uint32, tf.int64, tf.uint64),
    *(tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.complex64, tf.complex128),
)


@pytest.mark.parametrize("dtype", NUMBERS, ids=lambda dtype: dtype.name)
def test_channels_carry_every_type_of_numbers(dtype):
    channel, instance = Channel(500, 501), 1000 + NUMBERS.index(dtype)
    value = tf.cast([[0, 1, 127], [1, -1, -3]], dtype)  # unsigned: 255 and such

    def run(rank: int):
        with tf.device(f"CPU:{rank}"):
            if rank == 0:
                return channel.send(value, instance)
            return channel.receive(tf.TensorSpec(value.shape, dtype), instance)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        _, received = pool.map(run, range(2))
    assert received.dtype == dtype
    np.testing.assert_array_equal(received.numpy(), value.numpy())
