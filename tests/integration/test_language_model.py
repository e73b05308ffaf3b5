"""The byte-level language model on real text, with one worker and with two."""

from __future__ import annotations

from tests.integration.test_experiments import script, succeeded, summary_of
from tests.integration.test_multi_worker import launch

import pytest
import tensorflow as tf

pytestmark = pytest.mark.cluster

RECIPE = [
    "--flagfile=experiments/recipes/language_model.flags",
    "--validation_fraction=0.02",  # whole files, never trained on
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "steps", "bits"),
    [
        (2, 60, 4.0),
        pytest.param(1, 500, 2.2, marks=pytest.mark.proof),
        pytest.param(2, 500, 2.2, marks=pytest.mark.proof),
    ],
)
def test_held_out_files_take_few_bits_per_byte(tmp_path, workers, steps, bits):
    flags = [*RECIPE, f"--steps={steps}", f"--eval_every={steps}", f"--workdir={tmp_path}"]
    if workers == 1:
        succeeded(script("language_model", *flags, timeout=600))
    else:
        succeeded(launch(workers, "experiments/language_model.py", *flags, timeout=600))
    summary = summary_of(tmp_path)
    assert summary["workers"] == summary["replicas"] == workers
    assert summary["steps"] == steps
    assert 1.0 < summary["eval"]["bits_per_byte"] < bits  # a byte model that knows more has seen the held-out files
    # Nats against bits: the loss and the metric are the same quantity.
    assert summary["eval"]["loss"] / 0.693147 == pytest.approx(summary["eval"]["bits_per_byte"], rel=1e-3)
    texts = [
        value.tensor.string_val[0].decode()
        for path in tmp_path.rglob("*events*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if "samples/generated" in value.tag
    ]
    assert texts, "the model wrote no sample"
