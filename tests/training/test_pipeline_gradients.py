"""Gradients of stages: which are computed, where, and when."""

from __future__ import annotations

from tests.graphs import ancestors, needed_types, zeros_for_calls
from tests.integration.scripts import divided
from tests.integration.scripts.divided_models import dense
from tests.training.test_tensor_parallel import assert_as_alone
from tfpar.optim import keras_calls
from tfpar.parallel.pipeline.cuts import cut_at
from tfpar.parallel.pipeline.devices import place_of
from tfpar.training.pipeline.graph import beginnings_of, steps_of
from tfpar.training.pipeline.stage_program import learning_tensors, stages_of
from tfpar.training.pipeline.step import PipelineCore

import pytest
import tensorflow as tf


def test_calls_of_stages_take_no_zeros():
    """Within two tapes TensorFlow returns the weights of a stage too, and adds zeros of their size to gradients."""
    trainer = divided.here("mirrored", "pipeline:2", model="language_model", steps=2, accumulate_steps=2)
    ((_, step),) = trainer.program._steps
    (function,) = step.run._list_all_concrete_functions()
    assert zeros_for_calls(function) == []


def test_a_later_pass_waits_until_the_gradients_before_it_are_added(monkeypatch):
    """The last stage has one micro-batch at a time: the gradients of the third need the sums of the first two."""
    added, found = PipelineCore.added, []

    def recorded(core, total, sums):
        result = added(core, total, sums)
        found.append((sums.gradients[-2].op, result.gradients[-2].op))
        return result

    monkeypatch.setattr(PipelineCore, "added", recorded)
    divided.here("mirrored", "pipeline:2", steps=1, accumulate_steps=4)
    (_, first_sum), (second_gradient, _), *_ = found
    assert first_sum in ancestors(second_gradient)


class TracedError(Exception):
    """Ends a trace that is not to be run."""


def source_of(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor that identities hand on."""
    while tensor.op.type in ("Identity", "IdentityN"):
        tensor = tensor.op.inputs[tensor.value_index if tensor.op.type == "IdentityN" else 0]
    return tensor


def test_gradients_are_computed_and_added_where_their_weights_are(monkeypatch):
    """Also that of the table, which is the head of the last stage, too."""
    added, found = PipelineCore.added, {}

    def recorded(core, total, sums):
        result = added(core, total, sums)
        for variable, gradient, own in zip(
            core.model.trainable_variables, sums.gradients, result.gradients, strict=True
        ):
            devices = {each.device[-1] for each in (source_of(gradient), gradient, own)}
            found[variable.path] = place_of(variable), devices
        raise TracedError

    monkeypatch.setattr(PipelineCore, "added", recorded)
    with pytest.raises(TracedError):
        divided.here("mirrored", "pipeline:3", model="language_model", steps=1, accumulate_steps=2)
    assert {place for place, _ in found.values()} == {0, 1, 2}
    assert found == {path: (place, {str(place)}) for path, (place, _) in found.items()}


def test_stages_without_anything_to_train():
    """Nothing before them learns, so they have no backward pass."""
    options = {"trainable": "/(fourth|last)/", "accumulate_steps": 2, "steps": 6}
    assert_as_alone(divided.here("mirrored", "pipeline:2", **options), "dense", **options)


@pytest.mark.parametrize(("jit_compile", "forward"), [("false", 10), ("true", 5)])
def test_stages_compute_no_gradients_of_frozen_weights_and_of_inputs(monkeypatch, jit_compile, forward):
    """There are five products of layers, in two versions without XLA."""

    def products(trainable: str) -> int:
        found = []

        def recorded(core, total, sums):
            found.extend(needed_types(tf.compat.v1.get_default_graph()))
            raise TracedError

        monkeypatch.setattr(PipelineCore, "added", recorded)
        options = {"steps": 1, "accumulate_steps": 2, "jit_compile": jit_compile, "weight_decay_exclude": ""}
        with pytest.raises(TracedError):
            divided.here("mirrored", "pipeline:2", trainable=trainable, **options)
        return found.count("MatMul")

    assert products("all") == forward + 4 + 5
    assert products("bias") == forward + 4


def test_tensors_of_frozen_stages_have_no_gradients():
    """Their workers need not send them."""
    model = dense()
    graph = keras_calls.graph_of(model)
    steps = steps_of(graph)
    stages = stages_of(graph, steps, cut_at("second,third,fourth", beginnings_of(steps), 4), 4)
    for layer in model.layers:
        layer.trainable = layer.name in ("second", "last")
    assert learning_tensors(model, stages) == {each for stage in stages[1:] for each in stage.made}
