"""Hooks: where the loop stops for them, what they see, and what they may change."""

from __future__ import annotations

import json
import re

import tfpar
from tests.training.trainers import BATCH, EXAMPLES, assert_same_bits, everything, source, trainer_of
from tfpar.checkpoint import checkpointer
from tfpar.config import ConfigError
from tfpar.training.loops.hooks import Hook, HookRows, boundaries, check_hooks
from tfpar.training.loops.state import Interval, LoopState

import numpy as np
import pytest

EPOCH = EXAMPLES // BATCH


def rows(before=(), user=(), after=(), **more) -> HookRows:
    return HookRows(
        before,
        user,
        after,
        **more,
        metric_results=lambda sums: {"seen": float(sums[0])},
        gather=lambda value, activity: [value],
    )


def steps(*losses: float, count: float = 2.0) -> Interval:
    counts = np.full(len(losses), count)
    return Interval(np.asarray(losses), counts, np.isfinite(losses), [np.sum(counts)])


def test_the_loop_stops_where_the_nearest_row_is_due():
    hooks = [Hook(4, print), Hook(6, print), Hook(100, print)]
    assert boundaries(0, hooks) == [4, 6, 100]
    assert boundaries(4, hooks) == [8, 6, 100]


def test_rows_run_in_order_where_they_are_due():
    ran = []

    def row(name, every, **more):
        return Hook(every, lambda state: ran.append((name, state.step)), **more)

    every = rows([row("evaluate", 3)], [row("user", 2)], [row("save", 6, also=lambda state: state.ending)])
    for step in range(1, 8):
        every.run(LoopState(step, 7, ending=step == 7))
    expected = [("user", 2), ("evaluate", 3), ("user", 4), ("evaluate", 6), ("user", 6), ("save", 6), ("save", 7)]
    assert ran == expected


@pytest.mark.parametrize("ends", ["hook", "end of an epoch"])
def test_rows_of_the_last_stop_run_whatever_ends_the_run(ends):
    """Once each, with the steps since their last run, and before the checkpoint."""
    ran = []

    def row(name, **more):
        def run(state):
            ran.append((name, state.ending, len(state.since.losses)))

        return Hook(100, run, also=lambda state: state.ending, **more)

    often = Hook(
        1, lambda state: ran.append(("often", state.ending)), at_end=lambda state: ran.append(("end", state.stop))
    )
    stop = Hook(3, lambda state: state.replace(stop=True))
    hooks = {"user": [often, row("last"), stop]} if ends == "hook" else {"user": [often, row("last")]}
    more = {} if ends == "hook" else {"ends_of_epochs": [stop]}
    every = rows([row("evaluate")], **hooks, after=[row("save")], **more)
    for step in (2, 3):
        every.record(steps(1.0))
        state = every.run(LoopState(step, 9))
    assert state.ending
    expected = [("often", False), ("evaluate", True, 0), ("last", True, 2), ("save", True, 0), ("end", True)]
    assert ran == [("often", False), *expected]


def test_a_hook_sees_the_steps_since_it_ran_last():
    seen = []
    hooks = rows(user=[Hook(2, lambda state: seen.append(state.since)), Hook(3, lambda state: None)])
    for step, loss in enumerate([4.0, 2.0, np.nan, 1.0], start=1):
        hooks.record(steps(loss))
        hooks.run(LoopState(step, 4))
    assert seen[0].losses.tolist() == [4.0, 2.0]
    assert seen[0].results() == {"loss": 3.0, "seen": 4.0}
    assert seen[1].results()["loss"] == 1.0  # a step that was left out has no part in the mean


def test_the_mean_loss_is_over_examples():
    whole = Interval.join([steps(3.0, count=3.0), steps(1.0, count=1.0)], lambda sums: {})
    assert whole.results()["loss"] == 2.5
    assert np.isnan(Interval.join([], lambda sums: {}).results()["loss"])


def test_of_what_a_hook_returns_stop_and_rate_count():
    def change(state):
        return state.replace(stop=True, lr_multiplier=0.5, step=99, best=-1.0)

    state = rows(user=[Hook(1, change)]).run(LoopState(3, 9))
    assert (state.step, state.best) == (3, None)
    assert state.stop
    assert state.ending
    assert state.finished
    assert state.lr_multiplier == 0.5


def test_numbers_of_numpy_count_like_those_of_python():
    def change(state):
        return state.replace(stop=np.float32(1.0) < np.float32(2.0), lr_multiplier=np.float32(0.5))

    hook = Hook(np.int64(3), change)
    state = rows(user=[hook]).run(LoopState(3, 9))
    assert json.dumps([hook.every, state.stop, state.lr_multiplier]) == "[3, true, 0.5]"


@pytest.mark.parametrize("multiplier", [float("nan"), float("inf"), -1.0, None, "half"])
def test_a_rate_with_which_no_step_makes_sense_is_refused(multiplier):
    def spoil(state):
        return state.replace(lr_multiplier=multiplier)

    with pytest.raises(ConfigError, match=r"the hook spoil returned lr_multiplier=.* after step 3\. Return a finite"):
        rows(user=[Hook(1, spoil)]).run(LoopState(3, 9))


def test_one_worker_that_stops_stops_all():
    def gather(own, activity):
        return [own, [True, own[1]]]

    hooks = HookRows([], [Hook(1, lambda state: None)], [], metric_results=dict, gather=gather)
    assert hooks.run(LoopState(3, 9)).stop


def test_a_factor_on_a_rate_that_an_optimizer_object_keeps_is_refused():
    def halve(state):
        return state.replace(lr_multiplier=0.5)

    hooks = HookRows([], [Hook(1, halve)], [], metric_results=dict, gather=lambda own, activity: [own], scheduled=False)
    with pytest.raises(ConfigError, match=r"halve returned lr_multiplier=0\.5, but the optimizer object keeps"):
        hooks.run(LoopState(3, 9))


def test_a_learning_rate_that_one_worker_changes_alone_is_refused():
    def gather(own, activity):
        return [own, [False, 1.0]]

    hooks = HookRows(
        [], [Hook(1, lambda state: state.replace(lr_multiplier=0.5))], [], metric_results=dict, gather=gather
    )
    with pytest.raises(ConfigError, match=r"lr_multiplier is 0\.5 on worker 0, 1 on worker 1\. Return"):
        hooks.run(LoopState(3, 9))


@pytest.mark.parametrize(("every", "run"), [(0, print), (-1, print), (2.5, print), (True, print), (3, "print")])
def test_hooks_that_cannot_be(every, run):
    with pytest.raises(ConfigError, match=r"Hook\((every|run)="):
        Hook(every, run)
    with pytest.raises(ConfigError, match=r"Hook\(at_end='close'\): give a function"):
        Hook(1, print, at_end="close")


def test_other_things_than_hooks_are_refused():
    with pytest.raises(ConfigError, match=r"fit\(hooks=...\): expected a tfpar.Hook, got <built-in function print>"):
        trainer_of().fit(source(), steps=1, hooks=[print])
    with pytest.raises(ConfigError, match=r"expected a tfpar\.Hook, got <built-in function print>"):
        check_hooks(print)
    with pytest.raises(ConfigError, match=r"returned 3\. Return state\.replace\(stop=True\) to end"):
        rows(user=[Hook(1, lambda state: 3)]).run(LoopState(1, 2))


def test_one_hook_needs_no_list():
    hook = Hook(1, print)
    assert check_hooks(hook) == check_hooks([hook]) == (hook,)
    assert check_hooks(None) == ()


@pytest.mark.parametrize("replicas", [1, 2])
def test_hooks_change_nothing_but_what_they_say(replicas):
    options = {"strategy": "mirrored" if replicas > 1 else "one_device", "devices": replicas}
    plain, hooked = trainer_of(**options), trainer_of(**options)
    plain.fit(source(), steps=9, validation=source(11, 9))
    seen = []

    def look(state: tfpar.LoopState) -> None:
        weight = hooked.model.trainable_variables[0].numpy()
        seen.append((state.step, len(state.since.losses), state.evaluated_at, float(np.abs(weight).sum())))

    hooked.fit(source(), steps=9, validation=source(11, 9), hooks=[tfpar.Hook(2, look), tfpar.Hook(7, lambda _: None)])
    assert_same_bits(everything(plain), everything(hooked))
    assert [entry[:3] for entry in seen] == [(2, 2, -1), (4, 2, -1), (6, 2, EPOCH), (8, 2, EPOCH)]
    assert len({entry[3] for entry in seen}) == 4  # the weights are those of the step


def test_a_hook_that_changes_one_replica_is_told_which_weight_differs():
    trainer = trainer_of(strategy="mirrored", devices=2)

    def disturb(state: tfpar.LoopState) -> None:
        bias = trainer.model.trainable_variables[1]
        trainer.runtime.strategy.experimental_local_results(bias.value)[1].assign(bias + 1.0)

    weights = len(trainer.model.trainable_variables)
    expected = f"1 of {weights} weights, the first of them {trainer.model.trainable_variables[1].path!r}, on a replica"
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        trainer.fit(source(), steps=2, hooks=[tfpar.Hook(2, disturb)])


def test_a_hook_that_stops_a_run_finishes_it(tmp_path, capsys):
    def stop(state):
        return state.replace(stop=state.step >= 6)

    trainer = trainer_of(workdir=str(tmp_path))
    summary = trainer.fit(source(), steps=20, validation=source(11, 9), hooks=[tfpar.Hook(3, stop)])
    assert summary["steps"] == 6
    assert summary["stopped_by"] == "the hook stop"
    assert (tmp_path / "model.keras").exists()
    assert checkpointer.Checkpointer(tmp_path, worker=1).steps()[-1] == 6
    capsys.readouterr()
    again = trainer_of(workdir=str(tmp_path)).fit(source(), steps=20, validation=source(11, 9))
    assert again["params_sha256"] == summary["params_sha256"]
    assert "the hook stop stopped this run at step 6 of 20; more --steps continue it" in capsys.readouterr().out
    longer = trainer_of(workdir=str(tmp_path)).fit(source(), steps=21)
    assert (longer["steps"], longer["stopped_by"]) == (21, None)


def test_a_hook_says_why_it_stops(capsys):
    reason = tfpar.Hook(2, lambda state: state.replace(stop=True, stopped_by="the target is reached"))
    assert trainer_of().fit(source(), steps=5, hooks=[reason])["stopped_by"] == "the target is reached"
    assert "stopped by the target is reached at step 2 of 5" in capsys.readouterr().out


def test_a_rate_that_a_hook_has_set_survives_a_stop(tmp_path):
    def run(name, **more):
        trainer = trainer_of(workdir=str(tmp_path / name), schedule="constant", optimizer="sgd", **more)

        def halve(state):
            return state.replace(lr_multiplier=state.lr_multiplier / 2)

        trainer.fit(source(), steps=8, hooks=[tfpar.Hook(2, halve)])
        return trainer

    whole = run("whole")
    run("parts", stop_after=5)
    assert_same_bits(everything(whole), everything(run("parts")))
    plain = trainer_of(schedule="constant", optimizer="sgd")
    plain.fit(source(), steps=8)
    assert any(not np.array_equal(value, everything(whole)[name]) for name, value in everything(plain).items())
