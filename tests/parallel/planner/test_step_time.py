"""Times of a step on paper, told by hand. No TensorFlow."""

from __future__ import annotations

import dataclasses

from tests.parallel.planner.harness import MB, on, plan, question, stack
from tfpar.collectives.cost_model import Link
from tfpar.parallel.planner.machine import OPS, PROGRAM, STAGES, Machine, Point, Rates
from tfpar.parallel.planner.plan import StepTime
from tfpar.parallel.planner.search import predict_plan
from tfpar.parallel.planner.step_time import Exchange

import pytest


def test_one_device_spends_three_forward_passes():
    time = predict_plan(question(), plan()).time
    assert time.compute == pytest.approx(3 * 8e9 * 16 / 1e12)
    assert time.seconds == pytest.approx(time.compute)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 8), (4, 8), (8, 16)])
def test_a_pipeline_of_equal_stages_waits_for_its_bubble(stages, micro_batches):
    """Narayanan et al. 2021, section 2.2: (S - 1) / M of the time of the passes."""
    time = predict_plan(question(on(stages)), plan(pipeline=stages, micro_batches=micro_batches)).time
    assert time.compute == pytest.approx(3 * 8e9 * 16 / 1e12 / stages)
    assert time.bubble == pytest.approx(time.compute * (stages - 1) / micro_batches)


def test_shorter_stages_shorten_the_bubble():
    both = [
        predict_plan(question(on(4), stages_per_device=each), plan(pipeline=4, micro_batches=4)).time for each in (1, 2)
    ]
    assert both[0].compute == pytest.approx(both[1].compute)
    assert both[1].bubble == pytest.approx(both[0].bubble / 2)


def test_devices_that_share_cores_gain_nothing_and_have_no_bubble():
    shared = on(4, worker_flops=1e12)
    alone = predict_plan(question(), plan()).time.seconds
    for each in (plan(data=4), plan(model=4), plan(pipeline=4, micro_batches=16)):
        time = predict_plan(question(shared), each).time
        assert (time.seconds, time.bubble) == (pytest.approx(alone), 0.0), each


def test_recomputing_costs_a_forward_pass():
    plain, again = (predict_plan(question(), plan(recompute=each)).time.seconds for each in ("none", "blocks"))
    assert again == pytest.approx(4 / 3 * plain)


def test_an_exchange_costs_its_bytes_and_latency():
    """A ring of N sends 2 (N - 1) / N of 32 MB in 2 (N - 1) messages."""
    machine = on(1, 4, between=Link(1e-3, 1e8))
    assert predict_plan(question(machine), plan(data=4)).time.exchange == pytest.approx(6e-3 + 1.5 * 32e6 / 1e8)


def test_replicas_of_a_worker_exchange_once():
    machine = on(4, 2, between=Link(0.0, 1e8))
    assert predict_plan(question(machine), plan(data=8)).time.exchange == pytest.approx(32e6 / 1e8)


def test_workers_that_take_local_steps_exchange_once_a_round():
    """Replicas of one worker still do in every step."""
    machine = on(2, 2, within=Link(0.0, 1e9), between=Link(0.0, 1e8))
    every = [predict_plan(question(machine, exchanges=[Exchange("none", every=n)]), plan(data=4)) for n in (1, 50)]
    within = 32e6 / 1e9
    assert every[0].time.exchange == pytest.approx(within + 32e6 / 1e8)
    assert every[1].time.exchange == pytest.approx(within + 32e6 / 1e8 / 50)


def test_shards_cost_what_they_send():
    """Gradients of every micro-batch go to their owners; each weight is gathered twice and scattered once."""
    link = Link(1e-3, 1e9)

    def exchange(shard: str, micro_batches: int) -> float:
        machine = question(on(1, 4, between=link))
        return predict_plan(machine, plan(data=4, shard=shard, micro_batches=micro_batches)).time.exchange

    once = exchange("none", 1)
    assert exchange("none", 4) == exchange("optimizer", 4) == exchange("gradients", 1) == once
    assert exchange("gradients", 4) == pytest.approx(2.5 * once)
    assert exchange("weights", 2) == pytest.approx(6 * 8 * (1e-3 + 0.75 * 4e6 / 1e9))


def test_shards_of_gradients_are_summed_within_a_worker_after_every_micro_batch():
    """Over its replicas, and over the devices that divide a replica."""
    link = Link(1e-3, 1e9)
    for machine in (on(4, within=link), on(4, within=link, worker_flops=1e12, memory_bandwidth=1e9)):

        def time(shard: str, micro_batches: int, machine: Machine = machine) -> StepTime:
            asked = plan(data=2, model=2, shard=shard, micro_batches=micro_batches)
            return predict_plan(question(machine), asked).time

        activations = time("optimizer", 4).sums - time("optimizer", 2).sums
        for part, more in (("exchange", 0.0), ("sums", activations)):
            once, twice, four = (
                getattr(time(*case), part) for case in (("optimizer", 2), ("gradients", 2), ("gradients", 4))
            )
            own = twice - once  # of one more micro-batch
            assert own > 0
            assert four - twice == pytest.approx(2 * own + more)


def test_parts_and_stages_exchange_their_own():
    """All of a worker's parts are the whole model again; a worker with a stage of two exchanges half."""
    machine = on(2, 2, between=Link(0.0, 1e8))
    for each in (plan(data=2, model=2), plan(data=2, pipeline=2)):
        assert predict_plan(question(machine), each).time.exchange == pytest.approx(32e6 / 1e8), each
    machine = on(1, 4, between=Link(0.0, 1e8))
    for each in (plan(data=2, model=2), plan(data=2, pipeline=2)):
        assert predict_plan(question(machine), each).time.exchange == pytest.approx(16e6 / 1e8), each


def test_sums_along_the_model_axis_cost_their_link():
    """Two calls for each block and micro-batch, of 1 MB an example; and one for the gradients that all have."""
    for machine in (on(2, within=Link(1e-3, 1e9)), on(1, 2, between=Link(1e-3, 1e9))):
        time = predict_plan(question(machine), plan(model=2, micro_batches=4)).time
        assert time.sums == pytest.approx(4 * 16 * (2e-3 + 4e6 / 1e9) + 2e-3)


def test_layers_that_are_called_again_sum_again():
    """One of two calls, in eight blocks and four micro-batches."""
    machine = on(2, within=Link(1e-3, 1e9))
    plain, again = (
        predict_plan(question(machine), plan(model=2, micro_batches=4, recompute=each)).time.sums
        for each in ("none", "blocks")
    )
    assert again - plain == pytest.approx(4 * 8 * (2e-3 + 4e6 / 1e9))


def test_messages_go_there_and_back():
    machine = on(4, within=Link(1e-3, 1e9))
    assert predict_plan(question(machine), plan(pipeline=4)).time.messages == pytest.approx(2 * 3 * (1e-3 + 16e6 / 1e9))
    slow = on(1, 2, between=Link(0.0, 1e6))  # slower than the stages: every micro-batch waits
    time = predict_plan(question(slow), plan(pipeline=2, micro_batches=16)).time
    assert time.seconds == pytest.approx(16 + 1, rel=0.01)  # 16 tensors of a second each; the last gradient returns


@pytest.mark.parametrize(
    ("schedule", "there_and_back"),
    [
        ("1f1b", 1 + 3),  # in 16 micro-batches, the first stage waits for the first of each four
        ("eager_1f1b", 1),  # seven are started, and tensors are back before they are done
        ("gpipe", 1),
    ],
)
def test_stages_wait_for_tensors_on_the_way_if_no_other_micro_batch_is_started(schedule, there_and_back):
    machine = on(1, 4, between=Link(1e-3, 1e30))
    time = predict_plan(question(machine, schedule=schedule), plan(pipeline=4, micro_batches=16)).time
    assert time.messages == pytest.approx(there_and_back * 2 * 3 * 1e-3)


def test_stages_of_unequal_length_hide_messages():
    """The longest of two stages is busy until a tensor is back from the other."""
    costs = stack()
    longer = dataclasses.replace(costs.layers[1][-1], flops=4 * costs.layers[1][-1].flops)
    uneven = dataclasses.replace(costs, layers={1: (*costs.layers[1][:-1], longer)})
    machine = on(1, 2, between=Link(1e-6, 1e30))
    for asked, round_trips in ((costs, 1 + 7), (uneven, 1)):
        time = predict_plan(question(machine, model=asked), plan(pipeline=2, micro_batches=16)).time
        assert time.messages == pytest.approx(round_trips * 2 * 1e-6)


def test_devices_that_divide_a_stage_send_a_tensor_once_over_the_link_of_their_worker():
    """Each sends a part, and the receivers gather the parts, 8 MB from each; what they sum stays within the worker."""
    machine = on(2, 2, within=Link(1e-3, 1e30), between=Link(0.0, 1e9))
    time = predict_plan(question(machine), plan(pipeline=2, model=2)).time
    assert time.messages == pytest.approx(2 * (16e6 / 1e9 + 1e-3))
    machine = on(2, 2, within=Link(0.0, 1e10), between=Link(0.0, 1e9))
    assert predict_plan(question(machine), plan(pipeline=2, model=2)).time.messages == pytest.approx(
        2 * (16e6 / 1e9 + 8e6 / 1e10)
    )
    machine = on(2, 2, within=Link(0.0, 1e30), between=Link(0.0, 1e9))
    time = predict_plan(question(machine), plan(pipeline=2, model=2)).time
    assert time.sums == pytest.approx(0.0, abs=1e-6)


def test_workers_that_divide_a_stage_have_a_link_each():
    """A worker sends half of 16 MB, and gathers the other half from its neighbour over the same kind of link."""
    machine = on(1, 4, between=Link(1e-3, 1e9))
    time = predict_plan(question(machine), plan(pipeline=2, model=2)).time
    assert time.messages == pytest.approx(2 * 2 * (1e-3 + 8e6 / 1e9))


def test_passes_and_updates_have_the_rates_of_how_they_run():
    rates = Rates(
        passes={PROGRAM: [Point(1, 1e-12)], STAGES: [Point(1, 2e-12)], OPS: [Point(1, 4e-12)]},
        updates={PROGRAM: 4e9, OPS: 1e9},
        adding=2e9,
    )
    asked = question(on(2, measured_rates=rates), shards=("none", "weights"))
    seconds, size = 3 * 8e9 * 16 / 2 * 1e-12, 8 * 4 * MB

    def time(**options) -> StepTime:
        return predict_plan(asked, plan(**options)).time

    assert (time(data=2).compute, time(data=2).update) == pytest.approx((seconds, 7 * size / 4e9))
    # Of a model axis, XLA compiles the update alone.
    assert (time(model=2).compute, time(model=2).update) == pytest.approx((4 * seconds, 7 * size / 2 / 4e9))
    # Layers that gather weights are called again.
    assert time(data=2, shard="weights").compute == pytest.approx(4 * seconds * 4 / 3)
    stages = time(pipeline=2, micro_batches=16)
    added = 15 * 3 * size / 2 / 2e9  # the gradients of 16 micro-batches
    # Two devices of a process are updated op by op.
    assert (stages.compute, stages.update) == pytest.approx((2 * seconds, 7 * size / 2 / 1e9 + added))


def test_times_of_passes_lie_between_those_that_were_measured():
    points = [Point(2, 1.0, 10.0), Point(4, 2.0, 10.0), Point(12, 4.0, 10.0)]
    rates = Rates(passes={OPS: points}, updates={OPS: 1.0}, adding=1.0)
    found = [rates.seconds(PROGRAM, 10.0, examples) for examples in (1, 2, 3, 8, 20)]
    assert found == pytest.approx([5, 10, 15, 30, 60])
    assert rates.processor(OPS, 10.0, 24) == pytest.approx(10 * (10 + 12 * 10 / 12 / 2))  # no batch is free
    machine = on(measured_rates=rates)
    assert predict_plan(question(machine), plan(micro_batches=4)).time.compute == pytest.approx(4 * 3 * 8e9 * 2.0)


def test_passes_wait_for_a_core_that_another_worker_uses():
    """Two stages and four micro-batches: ten passes."""
    rates = Rates(passes={OPS: [Point(1, 1e-12, 1e-12)]}, updates={OPS: 1e9}, adding=1e9)

    def messages(workers: int, cores: int) -> float:
        machine = on(2 // workers, workers, measured_rates=rates, cores=cores, sharing=4, between=on().within)
        return predict_plan(question(machine), plan(pipeline=2, micro_batches=4)).time.messages

    assert messages(2, 2) - messages(2, 4) == pytest.approx(10 * 2.5e-3)
    assert messages(2, 1) - messages(2, 4) == pytest.approx(3 * 10 * 2.5e-3)
    assert messages(1, 2) == messages(1, 4)


def test_devices_that_share_cores_take_their_processor_time_together():
    """Four cores, of which a pass keeps two busy."""
    rates = Rates(passes={OPS: [Point(1, 1e-12, 2e-12)]}, updates={OPS: 1e30}, adding=1e30)
    alone = 3 * 8e9 * 16 * 1e-12
    for sharing, factor in ((1, 1.0), (2, 1.0), (4, 2.0), (8, 4.0)):
        machine = on(1, 8, measured_rates=rates, cores=4, sharing=sharing)
        found = predict_plan(question(machine, batch=8 * 16), plan(data=8)).time.compute
        assert found == pytest.approx(alone * factor), sharing
    # Four stages in two workers: each is busy for a quarter of the time of a pass, all together for half of it.
    machine = on(2, 2, measured_rates=rates, cores=4, sharing=4)
    assert predict_plan(question(machine), plan(pipeline=4)).time.compute == pytest.approx(alone / 2)


def test_replicas_that_share_memory_add_up_in_it():
    """Two tensors of 32 MB are read for each of three sums, and one written."""
    machine = on(4, worker_flops=1e12, memory_bandwidth=1e9)
    assert predict_plan(question(machine), plan(data=4)).time.exchange == pytest.approx(3 * 3 * 32e6 / 1e9)


@pytest.mark.parametrize(("workers", "copies"), [(1, 6), (2, 4)])
def test_shards_are_put_together(workers, copies):
    """32 MB are read and written: as gradients, and where a worker owns them, as they leave a program and once more."""
    machine = on(4 // workers, workers, worker_flops=1e12, memory_bandwidth=1e9)
    whole, shards = (predict_plan(question(machine), plan(data=4, shard=shard)).time for shard in ("none", "optimizer"))
    assert shards.exchange - whole.exchange == pytest.approx(copies * 32e6 / 1e9)


@pytest.mark.parametrize(("devices", "worker_flops", "copies"), [(1, 0.0, 4), (2, 0.0, 4), (2, 1e12, 8)])
def test_devices_of_a_replica_copy_their_own_shards(devices, worker_flops, copies):
    """16 MB each: at the same time, but for those that share a memory, and on their own workers."""
    machine = on(devices, 4 // devices, worker_flops=worker_flops, memory_bandwidth=1e9)
    whole, shards = (
        predict_plan(question(machine), plan(data=2, model=2, shard=shard)).time for shard in ("none", "optimizer")
    )
    assert shards.exchange - whole.exchange == pytest.approx(copies * 16e6 / 1e9)
