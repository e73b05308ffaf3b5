"""`--mesh=auto`: a run follows its plan, a resumed run keeps it, and what does not fit is refused with what would."""

from __future__ import annotations

import json
import logging
import sys

import tfpar
from tests import nursery
from tests.integration.scripts import divided, divided_models
from tfpar.cluster import rendezvous
from tfpar.config import ConfigError, ExperimentConfig
from tfpar.inputs import from_arrays
from tfpar.training.planning import auto
from tfpar.training.planning.facts import Facts

import keras
import numpy as np
import pytest

OPTIONS = {
    **divided.COMMON,
    "strategy": "mirrored",
    "devices": 2,
    "global_batch_size": 8,
    "uneven_batches": False,
    "steps": 2,
}
# A replica's weights, gradients and state of AdamW are 16 bytes for each of 12,000 weights, and its update without XLA
# needs 28 more.
TOO_LITTLE_FOR_A_REPLICA = "200KiB"


def config(**changes) -> ExperimentConfig:
    return ExperimentConfig.from_flat_dict({**OPTIONS, **changes})


def trained(**changes) -> tfpar.Trainer:
    keras.utils.clear_session(free_memory=False)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trainer = tfpar.Trainer(divided_models.dense, loss=loss, config=config(**changes))
    x, y = divided_models.data("dense")
    trainer.fit(x[:32], y[:32])
    return trainer


def test_a_run_follows_its_plan_and_a_resumed_run_keeps_it(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    planned = trained(mesh="auto", device_memory=TOO_LITTLE_FOR_A_REPLICA, workdir=str(tmp_path), verbose=1)
    assert planned.topology.mesh.devices_of_replica == 2
    chosen = {name: planned.config.as_flat_dict()[name] for name in auto._DECIDED}
    assert f"chosen: --mesh={chosen['mesh']}" in caplog.text
    given = trained(**chosen)
    for ours, theirs in zip(divided.weights_of(planned).values(), divided.weights_of(given).values(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # There is room for a replica on each device now.
    subject = auto.Subject(build=divided_models.dense)

    def resumed(**changes) -> dict[str, object]:
        return auto.planned(config(mesh="auto", workdir=str(tmp_path), verbose=1, **changes), subject)

    assert resumed() == resumed(device_memory=TOO_LITTLE_FOR_A_REPLICA) == resumed(shard=chosen["shard"]) == chosen
    other = 2 if chosen["accumulate_steps"] != 2 else 4
    assert resumed(accumulate_steps=other)["accumulate_steps"] == other
    assert f"does not hold (--accumulate_steps={other}, not {chosen['accumulate_steps']})" in caplog.text
    assert auto._of_saved_run(config(workdir=str(tmp_path), device_memory="10KiB"), subject, tells=True) == {}
    assert "does not hold (--device_memory=10.0 KiB: " in caplog.text


def test_a_mesh_that_does_not_fit_is_refused_with_what_would():
    with pytest.raises(ConfigError, match=r"--device_memory=200 KiB: --mesh=data:2 needs .* It fits with .*--mesh="):
        trained(mesh="data:2", device_memory=TOO_LITTLE_FOR_A_REPLICA)


class Subclassed(keras.Model):
    """No inputs are known before it is called."""

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(3)

    def call(self, inputs):
        return self.inner(inputs)


def test_memory_that_cannot_be_predicted_is_not_asked_for():
    def build() -> keras.Model:
        model = Subclassed()
        model(keras.Input((12,)))
        return model

    given = config(mesh="data:2", device_memory="16GiB")
    with pytest.raises(ConfigError, match=r"^--device_memory: model .* or leave out --device_memory\."):
        auto.check_memory(given, auto.Subject(build=build))


def test_any_size_of_the_model_axis_can_be_checked():
    """Larger ones than a plan considers, too."""
    subject = auto.Subject(build=divided_models.dense)
    with pytest.raises(ConfigError, match=r"--device_memory=5.0 KiB: --mesh=data:1,model:32 needs"):
        auto.check_memory(config(mesh="model:32", devices=32, device_memory="5KiB"), subject)


def test_a_checked_mesh_keeps_the_exchange():
    """It fits with other options, whatever the exchange that a run measures to be the fastest."""
    given = config(mesh="data:2", exchange="auto", device_memory=TOO_LITTLE_FOR_A_REPLICA)
    with pytest.raises(ConfigError, match="It fits with") as caught:
        auto.check_memory(given, auto.Subject(build=divided_models.dense))
    assert "--exchange" not in str(caught.value).partition("It fits with")[2]


def test_a_plan_knows_of_an_objective_and_a_layout(monkeypatch):
    found: list[Facts] = []
    monkeypatch.setattr(
        auto, "_question", lambda *given: found.extend(each for each in given if isinstance(each, Facts))
    )
    monkeypatch.setattr(auto, "check_fits", lambda question, plan: pytest.fail("stop here"))
    for options in ({"layout": {"third": "gather"}}, {"objective": lambda model: model}):
        with pytest.raises(pytest.fail.Exception, match="stop here"):
            tfpar.Trainer(divided_models.dense, config=config(mesh="data:2", device_memory="1GiB"), **options)
    assert [(each.has_layout, each.own_objective) for each in found] == [(True, False), (False, True)]


def test_weights_that_are_not_decayed_are_those_of_the_model():
    """Not of the weight with which the optimizer is counted and timed, a kernel."""
    options = config(mesh="auto", device_memory="1GiB", weight_decay=0.1, weight_decay_exclude="kernel")
    assert auto.planned(options, auto.Subject(build=divided_models.dense))["mesh"]


@pytest.mark.parametrize(
    "text", ["no plan fits", "x" * 9000, "größer " * 500, "\n\t\x01" * 2000, "\N{OLD ITALIC LETTER A}" * 9000]
)
def test_an_error_of_the_chief_fits_in_a_message(text):
    message = auto._error_message(text)
    assert len(message.encode()) <= rendezvous.MESSAGE_BYTES
    error = json.loads(message)["error"]
    assert text.startswith(error)
    assert error == text or len(message) > rendezvous.MESSAGE_BYTES - 12


def test_a_model_that_is_not_known_is_asked_for():
    with pytest.raises(ConfigError, match=r"--mesh=auto counts the model before .*initialize\(config, model=build\)"):
        tfpar.initialize(config(mesh="auto"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_steps": 2}, "--warmup_steps=2 takes up all of the run's 2 steps"),
        ({"profile_steps": "1,9"}, "--profile_steps=1,9: the run has 2 steps"),
        ({"workdir": "/proc/new"}, "--workdir=/proc/new: /proc cannot be written to"),
        ({"warm_start": "/gone"}, "--warm_start=/gone: no checkpoint"),
    ],
)
def test_what_no_plan_can_mend_is_refused_before_one_is_made(options, message, monkeypatch):
    monkeypatch.setattr(auto, "planned", lambda *_: pytest.fail("a plan was made"))
    x, y = divided_models.data("dense")
    with pytest.raises(ConfigError, match=message):
        tfpar.initialize(config(mesh="auto", **options), from_arrays(x, y))


@pytest.mark.parametrize("options", [["--mesh=auto"], ["--mesh=data:2", "--device_memory=1GiB"]])
def test_nothing_runs_before_the_devices_are_set_up(options):
    """In a process of its own: here the devices exist already."""
    job = ["image", "--dataset=digits", "--model=mlp", "--devices=2", "--steps=2", "--jit_compile=false"]
    command = [sys.executable, "-m", "tfpar", "train", *job, *options]
    done = nursery.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
