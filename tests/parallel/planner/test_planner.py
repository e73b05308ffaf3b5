"""Plans on paper: by hand where that can be done, and what must hold for all of them. No TensorFlow."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

from tests.parallel.planner.harness import MB, on, plan, question, stack
from tfpar.collectives.cost_model import Link
from tfpar.config import ConfigError
from tfpar.parallel.mesh import Mesh
from tfpar.parallel.planner.costs import LayerCost, ModelCosts, Weight
from tfpar.parallel.planner.machine import Machine, format_size, parse_link, parse_size
from tfpar.parallel.planner.plan import StepTime
from tfpar.parallel.planner.search import Question, check_fits, meshes, predict_plan, search
from tfpar.parallel.planner.stages import replica_of
from tfpar.parallel.planner.step_time import Exchange
from tfpar.parallel.planner.table import describe_machine, limits, table

import pytest


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
    given = question(on(2), batch=12, micro_batches=4)
    assert {(each.plan.mesh.data, each.plan.micro_batches) for each in search(given).fitting} == {(1, 4)}
    with pytest.raises(ConfigError, match=r"replicas x --accumulate_steps=5 by which .* or --uneven_batches=true"):
        _ = search(dataclasses.replace(given, micro_batches=5)).best


def test_uneven_batches_are_planned_where_a_run_takes_them():
    asked = question(on(3), batch=8)
    assert {each.plan.mesh.data for each in search(asked).fitting} == {1}
    uneven = search(dataclasses.replace(asked, uneven_batches=True)).fitting
    assert {(each.plan.mesh.data, each.plan.micro_batches) for each in uneven} >= {(3, 1), (3, 2), (1, 8)}
    given = dataclasses.replace(asked, uneven_batches=True, micro_batches=3)
    assert {each.plan.mesh.data for each in search(given).fitting} == {1, 3}


def test_a_pipeline_of_divided_layers_is_cut_like_the_whole_model():
    """A run divides layers after it has cut the model, by the size of all their weights."""
    equal = stack(4)

    def layers(size: int) -> tuple[LayerCost, ...]:
        large = Weight(
            index=0, size=12 * MB // size, divided=size > 1
        )  # as large as those of the other layers together
        first, *others = equal.layers[size]
        whole = [dataclasses.replace(each, weights=equal.whole[1 + place].weights) for place, each in enumerate(others)]
        return dataclasses.replace(first, weights=(large,)), *whole

    model = dataclasses.replace(equal, layers={1: layers(1), 4: layers(4)})
    for size in (1, 4):
        stages = replica_of(model, Mesh(pipeline=2, model=size), stage_balance="weights").stages
        assert [stage.flops * size / 1e9 for stage in stages] == [1, 3]


def test_refused_plans_are_left_out():
    answer = search(question(on(2), refusal=lambda plan: "no" if plan.mesh.pipeline > 1 else ""))
    assert {each.plan.mesh.pipeline for each in answer.fitting} == {1}


def test_of_plans_within_2_percent_the_simplest_is_chosen():
    """Shards save a part of the update, which a faster memory makes shorter."""
    chosen = set()
    for bandwidth in range(10, 200, 5):
        machine = on(1, 4, memory_bandwidth=bandwidth * 1e9)
        answer = search(question(machine, shards=("none", "optimizer"), meshes={"data": 4}, micro_batches=1))
        seconds = {each.plan.shard: each.time.seconds for each in answer.fitting}
        assert seconds["optimizer"] < seconds["none"]
        close = seconds["none"] < 1.02 * seconds["optimizer"]
        assert answer.best.plan.shard == ("none" if close else "optimizer")
        chosen.add(close)
    assert chosen == {True, False}


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
        weight = {"size": 48 * width**2 // size, "state": 96 * width**2 // size, "divided": size > 1}
        return tuple(
            LayerCost(name=f"block{n}", **block, sums=sums, weights=(Weight(index=n, **weight),)) for n in range(blocks)
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


def test_an_exchange_that_a_run_chooses_counts_as_the_fastest_and_is_no_remedy():
    lossy = Exchange("int8", lambda elements, workers, link: 1e-3, remembers=True)
    slow = {"between": Link(1e-3, 1e7)}
    auto = Exchange("auto", among=(Exchange("none"), lossy))
    asked = question(on(1, 2, **slow, memory=480 * MB), exchanges=(auto,))
    chosen = plan(data=2, exchange="auto")
    with pytest.raises(ConfigError, match=r"residuals.* It fits with") as caught:
        check_fits(asked, chosen)
    assert "--exchange=none" not in str(caught.value)
    fast = dataclasses.replace(asked, machine=on(1, 2))
    assert predict_plan(asked, chosen).memory.residuals == (32 + 16) * MB
    assert predict_plan(fast, chosen).memory.residuals == 0


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


@pytest.mark.parametrize("text", ["GiB", "-1G", "0", "0.5", "1e999", "4 apples"])
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
