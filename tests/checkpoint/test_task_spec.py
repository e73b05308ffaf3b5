"""Which sources have what the models of `--model` need."""

from __future__ import annotations

from tfpar import inputs
from tfpar.checkpoint.model_files import task_spec
from tfpar.config import ConfigError

import numpy as np
import pytest


def test_a_source_of_one_input_and_classes_describes_a_task():
    spec = task_spec(inputs.from_arrays(np.zeros((4, 5)), np.array([0, 2, 1, 1])))
    assert (spec.task, spec.input_shape, spec.input_dtype, spec.num_classes) == ("classification", (5,), "float32", 3)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (lambda: inputs.from_arrays({"a": np.zeros(4)}, np.zeros(4, int)), "the models of --model take one input"),
        (lambda: inputs.from_arrays(np.zeros(4), {"a": np.zeros(4)}), "the models of --model take one input"),
        (lambda: inputs.from_arrays(np.zeros(4)), "but this source has several, or no label"),
        (lambda: inputs.from_random_access([(np.zeros(3), 1)]), "need the number of classes, .* Give num_classes="),
    ],
)
def test_other_sources_are_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        task_spec(source())


def test_columns_of_a_table_may_be_one_input(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "t.csv").write_text("a,b,label\n" + "1.5,2.5,no\n3.5,4.5,yes\n" * 9)
    table = f"csv:{tmp_path}/t.csv?label=label"
    with pytest.raises(ConfigError, match=r"With as=vector in --dataset, the numeric columns are one input\. Or"):
        task_spec(inputs.load(table, "train"))
    assert task_spec(inputs.load(f"{table}&as=vector", "train")).input_shape == (2,)
