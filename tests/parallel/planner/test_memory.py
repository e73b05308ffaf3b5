"""Memory of plans, by hand."""

from __future__ import annotations

import dataclasses

from tests.parallel.planner.harness import MB, on, plan, question, stack
from tfpar.parallel.mesh import Mesh
from tfpar.parallel.planner.costs import Weight
from tfpar.parallel.planner.search import predict_plan, search
from tfpar.parallel.planner.stages import replica_of
from tfpar.parallel.planner.step_time import Exchange

import pytest


def test_memory_on_one_device():
    memory = predict_plan(question(on(fused={1: 1.0}, fused_in_stages=1.0)), plan()).memory
    assert memory == dataclasses.replace(
        memory, weights=32 * MB, gradients=32 * MB, state=64 * MB, residuals=0, activations=16 * 80 * MB
    )
    assert memory.size == (32 + 32 + 64 + 1280 + 32) * MB  # one program: activations, and the weights before the step


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        (plan(micro_batches=4), {"activations": 320, "gradients": 32, "accumulated": 4}),  # in place, tensor by tensor
        (plan(model=2), {"weights": 16, "gradients": 16, "state": 32, "activations": 640}),
        (plan(pipeline=2), {"weights": 16, "gradients": 16, "state": 32, "activations": 640}),
        # 1F1B: the first of two stages works on two micro-batches, of two examples each
        (
            plan(pipeline=2, micro_batches=8),
            {"weights": 16, "gradients": 16, "accumulated": 16, "activations": 2 * 2 * 40},
        ),
        (plan(data=2, shard="optimizer"), {"weights": 32, "state": 32 + 16, "activations": 640}),
        (plan(data=2, shard="gradients"), {"gradients": 32, "summed": 16, "state": 32 + 16}),
        (plan(data=2, shard="weights"), {"weights": 16, "gradients": 16, "state": 32}),
        # A stage has all gradients of a micro-batch, and the sums of its shards.
        *(
            (plan(data=2, pipeline=2, shard="gradients", micro_batches=each), {"gradients": 16, "accumulated": 8})
            for each in (1, 8)
        ),
        (plan(recompute="blocks"), {"activations": 16 * (8 * 1 + 10)}),
    ],
)
def test_memory_by_hand(wanted, part):
    machine = on(wanted.mesh.devices, fused={1: 1.0}, fused_in_stages=1.0, fleeting={1: 0.0})
    memory = dataclasses.asdict(predict_plan(question(machine), wanted).memory)
    assert {name: memory[name] for name in part} == {name: size * MB for name, size in part.items()}


@pytest.mark.parametrize(
    ("wanted", "options", "update"),
    [
        (plan(data=2), {}, 32),  # the weights before the step
        (plan(model=2), {}, 16),
        (plan(data=2, shard="optimizer"), {}, 32),  # the new weights
        (plan(data=2, shard="weights"), {}, 16),
        # New values of weights and state of the five weights that exceed 16 MiB, instead of their gradients, and an
        # intermediate result; of other weights, gradients or old values.
        (plan(data=2), {"compiles_update": False}, (3 - 1) * 20 + 4),
        # New weights of the owner, beside all of its gradients; then those of all.
        (plan(data=2, shard="optimizer"), {"compiles_update": False}, 32 - 16 + 3 * 16 + 2),
        # All 16 MB that a device has; an XLA program cannot change variables of two devices.
        (plan(pipeline=2), {}, (3 - 1) * 16 + 4),
        (plan(data=2), {"compiles_update": False, "in_groups": False}, 32 + 6 * 32),
    ],
)
def test_the_update_needs_more_than_weights_and_state(wanted, options, update):
    asked = question(on(2), **options)
    assert predict_plan(asked, wanted).memory.update == update * MB


def test_activations_are_freed_before_the_update():
    wanted = plan(data=2)
    few, many = (predict_plan(question(on(2), model=stack(weight=size * MB)), wanted) for size in (4, 500))
    assert few.memory.size == few.memory.lasting + few.memory.gradients + few.memory.activations
    assert many.memory.size == many.memory.lasting + many.memory.gradients + many.memory.update
    alone = predict_plan(question(), plan()).memory  # a single program
    assert alone.size == alone.lasting + alone.gradients + alone.activations + alone.update
    for each in (few, many):
        assert sum(each.as_dict()["bytes_by_part"].values()) == each.as_dict()["bytes"]


def test_only_the_sums_of_micro_batches_are_left_for_the_update():
    asked = question(on(2), model=stack(state=10), compiles_update=False, compiled=False)
    memory = predict_plan(asked, plan(data=2, micro_batches=8)).memory
    assert memory.accumulated == memory.summed == 32 * MB
    assert memory.update > memory.accumulated + memory.activations
    assert memory.size == memory.lasting + memory.summed + memory.update


def test_an_update_has_the_sums_of_shards():
    asked = question(on(4), model=stack(state=20), compiles_update=False)
    memory = predict_plan(asked, plan(data=2, pipeline=2, shard="gradients", micro_batches=8)).memory
    assert memory.update > memory.accumulated + memory.activations
    assert memory.parts["gradients"] == memory.accumulated == memory.gradients // 2


def test_only_compiled_passes_keep_fewer_activations():
    asked = question(on(2, fused={1: 0.5}))
    sizes = [
        predict_plan(asked, plan(data=2, shard=shard)).memory.activations
        for shard in ("none", "optimizer", "gradients")
    ]
    assert sizes == [320 * MB, 320 * MB, 640 * MB]
    in_stages = {"fused_in_stages": 0.25, "fleeting": {1: 0.5}}
    stages = question(on(2, **in_stages))
    # Two micro-batches in flight, and what the backward pass of one has beside.
    assert predict_plan(stages, plan(pipeline=2, micro_batches=8)).memory.activations == (2 * 80 // 4 + 80 // 2) * MB
    assert predict_plan(stages, plan(pipeline=2)).memory.activations == (640 // 4 + 640 // 2) * MB
    four, sharded = question(on(4, **in_stages)), plan(data=2, pipeline=2, shard="gradients")
    assert predict_plan(four, dataclasses.replace(sharded, micro_batches=8)).memory.activations == (20 + 20) * MB
    assert predict_plan(question(on(2), compiled=False), plan(pipeline=2)).memory.activations == 640 * MB


def test_a_stage_that_computes_blocks_again_keeps_their_inputs_and_a_compiled_block():
    recomputed = plan(pipeline=2, recompute="blocks")
    one, another = (question(on(2, fused={1: 0.5}, fused_in_stages=each)) for each in (0.25, 1.0))
    assert predict_plan(one, recomputed).memory == predict_plan(another, recomputed).memory
    assert predict_plan(one, recomputed).memory.activations == 16 * (4 * 1 + 10 // 2) * MB


def test_fractions_depend_on_the_number_of_examples():
    machine = on(fused={2: 0.5, 8: 1.0}, fleeting={4: 0.25})
    assert [machine.fused_for(each) for each in (1, 2, 5, 8)] == pytest.approx([0.5, 0.5, 0.9, 1.0])
    assert [machine.fleeting_for(each) for each in (1, 4, 64)] == pytest.approx([0.25] * 3)


def test_layers_whose_weights_are_sharded_are_computed_again():
    """A layer's whole weights exist with their gradients and those of the layer behind it."""
    asked = question(on(2, fused={1: 0.5}))
    blocks, sharded, both = (
        predict_plan(asked, plan(data=2, **options)).memory
        for options in (
            {"recompute": "blocks", "shard": "gradients"},
            {"shard": "weights"},
            {"recompute": "blocks", "shard": "weights"},
        )
    )
    assert blocks.activations == (8 * 1 + 10) * 8 * MB
    assert sharded.activations == both.activations == blocks.activations
    assert (blocks.gathered, sharded.gathered, both.gathered) == (0, 12 * MB, 12 * MB)
    assert sharded.size == sharded.lasting + sharded.activations + sharded.gathered
    few = predict_plan(
        dataclasses.replace(asked, batch=2, model=stack(2, weight=40 * MB)), plan(data=2, shard="weights")
    )
    assert few.memory.size == few.memory.lasting + few.memory.gradients + few.memory.gathered
    last = dataclasses.replace(stack(1).whole[0], kept_gathered=10 * MB, gathers=False)
    one = question(on(2), model=dataclasses.replace(stack(1), layers={1: (last,)}))
    assert predict_plan(one, plan(data=2, shard="weights")).memory.activations == 10 * 8 * MB


def test_one_block_alone_gains_nothing_from_being_computed_again():
    both = [
        predict_plan(question(model=stack(1)), plan(recompute=each)).memory.activations for each in ("none", "blocks")
    ]
    assert both[0] == both[1]


def test_gpipe_keeps_the_activations_of_all_micro_batches():
    sizes = [
        predict_plan(
            question(on(2, fused_in_stages=1.0, fleeting={1: 0.0}), schedule=each), plan(pipeline=2, micro_batches=8)
        ).memory.activations
        for each in ("1f1b", "gpipe")
    ]
    assert sizes == [2 * 2 * 40 * MB, 8 * 2 * 40 * MB]


def test_a_weight_of_two_stages_lies_with_the_first():
    whole = stack(2, sizes=(1,))
    tied = Weight(index=7, size=100 * MB)
    layers = tuple(dataclasses.replace(layer, weights=(*layer.weights, tied)) for layer in whole.whole)
    model = dataclasses.replace(whole, layers={1: layers})
    assert predict_plan(question(on(2), model=model), plan(pipeline=2)).memory.weights == 104 * MB
    assert predict_plan(question(model=model), plan()).memory.weights == 108 * MB
    over_workers = replica_of(model, Mesh(pipeline=2), here=1)  # each has it
    assert [sum(each.size for each in weights) for weights in over_workers.weights] == [104 * MB, 104 * MB]


def test_workers_keep_the_activations_of_what_they_have_started():
    """One micro-batch for each worker from here on, whatever devices it has; more if stages take turns."""
    within, over, in_turn = (
        replica_of(stack(), Mesh(pipeline=pipeline), chunks, here=here)
        for pipeline, chunks, here in ((4, 1, 0), (4, 1, 2), (2, 2, 1))
    )
    assert [within.in_flight(stage, 8, "1f1b") for stage in range(4)] == [4, 3, 2, 1]
    assert [over.in_flight(stage, 8, "1f1b") for stage in range(4)] == [2, 2, 1, 1]
    # The first chunk of the first worker starts two pairs of micro-batches before the gradient of the first comes back.
    assert [in_turn.in_flight(stage, 8, "1f1b") for stage in range(4)] == [4, 3, 2, 1]
    assert over.in_flight(0, 8, "gpipe") == 8


def test_a_lossy_exchange_remembers_what_it_left_out():
    lossy = Exchange("int4", lambda *_: 0.0, remembers=True)
    asked = question(on(1, 4), exchanges=(lossy,))
    assert predict_plan(asked, plan(data=4, exchange="int4")).memory.residuals == (32 + 8) * MB
    within = question(on(4), exchanges=(lossy,))  # nothing is encoded within a worker
    assert predict_plan(within, plan(data=4, exchange="int4")).memory.residuals == 0


def test_less_memory_leaves_fewer_plans():
    """And never a faster one."""
    asked = question(on(4), recomputes=("none", "blocks"), shards=("none", "optimizer"))
    every = search(asked)
    assert not every.others
    counts, best = [], []
    for limit in (2000, 700, 400, 200, 130, 60):
        answer = search(dataclasses.replace(asked, machine=on(4, memory=limit * MB)))
        assert all(each.memory.size <= limit * MB for each in answer.fitting)
        assert len(answer.fitting) + len(answer.others) == len(every.fitting)
        counts.append(len(answer.fitting))
        best.append(answer.best.time.seconds)
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1] > 0
    assert best == sorted(best)


def test_cpus_hold_batches_and_examples():
    """Each worker its own; a GPU only has batches."""
    model = dataclasses.replace(stack(), example=1000)
    asked = question(on(2, 2, shares_memory=True), model=model, batches=6, kept_examples=10 * MB)
    per_replica = 6 * 4 * 1000
    assert predict_plan(asked, plan(data=4)).memory.inputs == per_replica + 5 * MB
    assert predict_plan(asked, plan(data=4, micro_batches=2)).memory.inputs == per_replica + 5 * MB
    assert predict_plan(asked, plan(data=2, pipeline=2)).memory.inputs == per_replica + 5 * MB
    on_gpus = dataclasses.replace(asked, machine=on(2, 2))
    assert predict_plan(on_gpus, plan(data=4)).memory.inputs == per_replica


def test_an_exchange_has_sums_beside_gradients():
    """Of each device. The replicas of a CPU sum one tensor after the other, and free what they have summed."""
    gpus, cpus = question(on(2)), question(on(2, shares_memory=True))
    sizes = [predict_plan(asked, plan(data=2)).memory.exchange for asked in (gpus, cpus)]
    assert sizes == [32 * MB, 4 * MB // 2]
    assert predict_plan(cpus, plan(data=2, shard="gradients")).memory.exchange == 16 * MB
    assert predict_plan(question(on(1, 2, shares_memory=True)), plan(data=2)).memory.exchange == 32 * MB
    assert predict_plan(question(), plan()).memory.exchange == 0
    # Sharded gradients leave for other workers during the backward pass, of stages beside activations.
    memory = predict_plan(question(on(1, 2, shares_memory=True)), plan(data=2, shard="gradients")).memory
    assert memory.size == memory.lasting + memory.activations > memory.lasting + memory.gradients + memory.exchange
    stages = plan(data=2, pipeline=2, shard="gradients", micro_batches=2)
    memory = predict_plan(question(on(1, 4, shares_memory=True)), stages).memory
    assert memory.size == memory.lasting + sum(
        (memory.gradients, memory.accumulated, memory.activations, memory.exchange)
    )


def test_gradients_take_the_place_of_activations_without_xla():
    asked = question(on(2), compiled=False)
    memory = predict_plan(asked, plan(model=2)).memory
    assert memory.size == memory.lasting + memory.activations


def test_devices_that_share_memory_count_their_mean():
    whole = stack(3)  # two blocks on one device, one on the other
    fullest, mean = (
        predict_plan(question(on(2, shares_memory=shares), model=whole), plan(pipeline=2)).memory.weights
        for shares in (False, True)
    )
    assert (fullest, mean) == (8 * MB, 6 * MB)
    over_workers = question(on(1, 2, shares_memory=True), model=whole)
    assert predict_plan(over_workers, plan(pipeline=2)).memory.weights == 8 * MB


def test_replicas_of_a_cpu_share_sums_and_what_owners_send():
    gpus, cpus = question(on(2)), question(on(2, shares_memory=True))
    whole, sharded = plan(data=2), plan(data=2, shard="optimizer")
    sizes = [
        [getattr(predict_plan(asked, each).memory, name) // MB for asked in (gpus, cpus)]
        for each, name in ((whole, "summed"), (whole, "weights"), (sharded, "weights"), (sharded, "update"))
    ]
    assert sizes == [[32, 16], [32, 32], [32, 16], [32, 16]]


def test_gradients_of_an_xla_program_are_added_up_before_they_are_exchanged():
    asked = question(on(2), model=stack(weight=500 * MB), compiles_update=True)
    memory = predict_plan(asked, plan(data=2, micro_batches=16)).memory
    assert memory.accumulated == 500 * MB > memory.activations
    assert memory.size == memory.lasting + memory.gradients + memory.exchange


def test_replicas_share_initial_values_until_the_first_update():
    cpus = question(on(2, shares_memory=True))
    assert predict_plan(cpus, plan(data=2)).memory.update == (32 + 64) // 2 * MB
    assert predict_plan(question(on(1, 2, shares_memory=True)), plan(data=2)).memory.update == 32 * MB
