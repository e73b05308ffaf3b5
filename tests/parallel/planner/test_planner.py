"""Plans on paper: by hand where that can be done, and what must hold for all of them. No TensorFlow."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from tests.parallel.planner.harness import MB, on, plan, question, stack
from tfpar.collectives.cost_model import Link
from tfpar.config import ConfigError
from tfpar.parallel.planner.costs import LayerCost, ModelCosts, Weight
from tfpar.parallel.planner.machine import (
    OPS,
    PROGRAM,
    STAGES,
    Machine,
    Point,
    Rates,
    format_size,
    parse_link,
    parse_size,
)
from tfpar.parallel.planner.plan import StepTime
from tfpar.parallel.planner.search import Question, check_fits, meshes, predict_plan, search
from tfpar.parallel.planner.step_time import Exchange
from tfpar.parallel.planner.table import describe_machine, limits, table

import pytest

# Time


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


def test_messages_go_there_and_back():
    machine = on(4, within=Link(1e-3, 1e9))
    assert predict_plan(question(machine), plan(pipeline=4)).time.messages == pytest.approx(2 * 3 * (1e-3 + 16e6 / 1e9))
    slow = on(1, 2, between=Link(0.0, 1e6))  # slower than the stages: every micro-batch waits
    time = predict_plan(question(slow), plan(pipeline=2, micro_batches=16)).time
    assert time.seconds == pytest.approx(2 * 16, rel=0.01)


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


# What is listed


def test_a_mesh_that_does_not_divide_the_devices_is_named():
    with pytest.raises(ConfigError, match="pipeline:3 needs 3 devices, or a multiple of them"):
        _ = search(question(on(1, 4), meshes={"pipeline": 3})).best


def test_meshes_are_those_that_the_flag_takes():
    found = {(each.data, each.pipeline, each.model) for each in meshes(on(4, 2), (1, 2, 8))}
    assert {(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (1, 4, 2)} <= found
    assert not [*meshes(on(3, 2), (1, 2), {"data": 1, "pipeline": 3})]  # a stage on one worker and half of another
    assert [*meshes(on(1, 4), (1, 2), {"data": 1, "pipeline": 2})] == [plan(pipeline=2, model=2).mesh]
    assert all(data * pipeline * model == 8 for data, pipeline, model in found)
    assert {each.model for each in meshes(on(4, 2), (1, 2), {"model": 2})} == {2}


def test_micro_batches_divide_the_batch():
    answer = search(question(on(2), batch=12))
    by_mesh = {each.plan.mesh.data: set() for each in answer.fitting}
    for each in answer.fitting:
        by_mesh[each.plan.mesh.data].add(each.plan.micro_batches)
    assert by_mesh == {1: {1, 2, 4}, 2: {1, 2}}
    assert {each.plan.micro_batches for each in search(question(micro_batches=3)).fitting} == {3}


def test_refused_plans_are_left_out():
    answer = search(question(on(2), refusal=lambda plan: "no" if plan.mesh.pipeline > 1 else ""))
    assert {each.plan.mesh.pipeline for each in answer.fitting} == {1}


def test_a_faster_link_changes_the_choice():
    """Without one, a replica for each worker; with one, none needs micro-batches for a pipeline."""
    heavy = stack(weight=400 * MB)
    slow, fast = (
        search(question(on(1, 4, between=Link(1e-3, rate)), model=heavy, batch=64)).best.plan for rate in (1e8, 1e12)
    )
    assert slow.mesh.pipeline == 4
    assert slow.micro_batches > 4
    assert fast.mesh.data == 4


def test_a_thousand_devices_on_paper():
    """GPT-3's shape on 128 workers of 8: every plan, and the first fits and keeps devices busy."""
    width, length, blocks = 12288, 2048, 96

    def layers(size: int) -> tuple[LayerCost, ...]:
        sums = (4.0 * length * width,) * 4 if size > 1 else ()
        block = {
            "flops": (24 * length * width**2 + 4 * length**2 * width) / size,
            "kept": 68 * length * width / size,
            "kept_recomputed": 4.0 * length * width,
            "recomputed": True,
            "kept_gathered": 4.0 * length * width,
            "gathers": True,
        }
        weight = 48 * width**2 // size
        return tuple(
            LayerCost(name=f"block{n}", **block, sums=sums, weights=(Weight(index=n, size=weight, divided=size > 1),))
            for n in range(blocks)
        )

    sizes = (1, 2, 4, 8)
    model = ModelCosts(
        name="gpt3",
        layers={size: layers(size) for size in sizes},
        cut_costs=[10] * blocks,
        crossing=[-1, *[4 * length * width] * (blocks - 1)],
    )
    machine = Machine(
        workers=128,
        devices=8,
        flops=1.5e14,
        memory=80 << 30,
        memory_bandwidth=2e12,
        within=Link(1e-5, 2e11),
        between=Link(2e-5, 2.5e10),
    )
    answer = search(Question(model=model, machine=machine, batch=1536))
    assert len(answer.fitting) + len(answer.others) > 100
    best = answer.best
    assert best.plan.mesh.devices == 1024
    assert best.plan.mesh.devices_of_replica >= 32
    ideal = 4 * model.flops * 1536 / (1024 * machine.flops)
    assert ideal * 0.7 < best.time.seconds < 5 * ideal
    assert "limited by" in table(answer)


# Words


def test_what_would_fit_is_named():
    machine = on(2, memory=760 * MB, fused={1: 1.0})
    asked = question(machine, recomputes=("none", "blocks"), shards=("none", "optimizer"))
    with pytest.raises(ConfigError) as caught:
        check_fits(asked, plan(data=2, exchange="none"))
    text = str(caught.value)
    assert "--device_memory=725 MiB: --mesh=data:2 needs" in text
    ways = text.partition("It fits with ")[2]
    assert ways.split("; or ")[0] == "--accumulate_steps=2"
    for way in ("--recompute=blocks", "--shard=optimizer", "--mesh=data:1,"):
        assert way in ways, way
    assert check_fits(asked, plan(data=2, micro_batches=4)).fits


def test_nothing_fits():
    with pytest.raises(ConfigError, match=r"does not fit on 1 x 2 devices .* the smallest of \d+ plans .* needs"):
        _ = search(question(on(2, memory=MB))).best


def test_no_plan_says_why():
    model = dataclasses.replace(stack(sizes=(1,)), crossing=(), uncut="It has its own call method.")
    with pytest.raises(ConfigError, match=r"no plan for 'stack' .* It has its own call method"):
        _ = search(question(on(4), model=model, batch=2)).best


def test_the_table_says_what_limits():
    machine = on(1, 4, between=Link(1e-3, 1e7), memory=2000 * MB)
    answer = search(question(machine))
    lines = table(answer, 3).splitlines()
    assert len(lines) == 5
    assert "plans; the best 3:" in lines[0]
    assert "4 workers x 1 device of 1e+03 GFLOP/s" in describe_machine(machine)
    data = predict_plan(question(machine), plan(data=4))
    assert limits(data, machine).startswith("gradient exchange 9")
    assert StepTime(compute=1.0, bubble=2.0).limit == "bubble"


@pytest.mark.parametrize(
    ("text", "size"), [("16GiB", 16 << 30), ("500M", 500 << 20), ("1.5kb", 1536), ("1e9", 10**9), ("", 0)]
)
def test_sizes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["GiB", "-1G", "0", "4 apples"])
def test_no_sizes(text):
    with pytest.raises(ConfigError, match="--device_memory"):
        parse_size(text)


def test_links():
    assert parse_link("10gbit", "--link", 1e-3) == Link(1e-3, 1.25e9)
    assert parse_link("100Gbit/s, 20us", "--link", 1e-3) == Link(pytest.approx(2e-5), 1.25e10)
    with pytest.raises(ConfigError, match="--link=fast is not a link"):
        parse_link("fast", "--link", 0.0)
    assert format_size(5.1 * 2**30) == "5.1 GiB"


def test_the_planner_needs_no_tensorflow():
    code = "import tfpar.parallel.planner.table, sys; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
