"""What a run leaves for people without TensorBoard: `config.yaml` and `metrics.csv`."""

from __future__ import annotations

import csv
import json
import os
import pathlib

from tests import own_process
from tests.checkpoint import small_disk
from tests.training.trainers import source, trainer_of
from tfpar.config import ExperimentConfig
from tfpar.monitor import options_record
from tfpar.monitor import summary as results
from tfpar.monitor.metrics_table import MetricsTable
from tfpar.monitor.monitor import Monitor

import numpy as np
import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]


def rows(workdir) -> list[dict[str, str]]:
    with (workdir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_config_has_all_options_with_those_that_differ_first(tmp_path):
    given = {"learning_rate": 1e-05, "model_args": 'activation="gelu: #b"', "epochs": 3e17, "seed": 7}
    options = ExperimentConfig.from_flat_dict({**given, "shuffle": False}).as_flat_dict()
    assert options_record.write_config(tmp_path, "a (now)", options) == []
    text = (tmp_path / "config.yaml").read_text()
    assert yaml.safe_load(text) == options
    assert {type(value) for value in yaml.safe_load(text).values()} == {str, int, float, bool}
    changed, defaults = text.split("# defaults")
    assert set(yaml.safe_load(changed)) == {*given, "shuffle"}
    assert "seed" not in yaml.safe_load(defaults)
    # It is a configuration again.
    assert ExperimentConfig.from_flat_dict(yaml.safe_load(text)).as_flat_dict() == options
    assert options_record.trial_of(tmp_path) == "a (now)"


def test_a_trial_is_named_by_what_differs_and_by_its_start():
    assert options_record.new_trial(ExperimentConfig().as_flat_dict()).endswith(" defaults")
    options = ExperimentConfig.from_flat_dict(
        {"seed": 3, "dataset": "d" * 30, "model": "m" * 30, "optimizer_args": "beta_2=0.5", "workdir": "/somewhere"}
    )
    name = options_record.new_trial(options.as_flat_dict())
    assert name[15:] == f" model={'m' * 30} +3"
    assert "workdir" not in name


def test_a_row_for_every_point(tmp_path):
    config = ExperimentConfig.from_flat_dict({"log_every": 10})
    monitor = Monitor(str(tmp_path), is_chief=True, config=config, total_steps=30)
    with monitor.session():
        monitor.begin(0)
        for end in (10, 20, 30):
            monitor.on_steps(end, np.full(10, 1 / end), np.full([10, 6], 0.1), {"learning_rate": 0.5, "accuracy": 0.25})
            if end == 20:
                monitor.on_evaluation(20, {"loss": 0.125, "accuracy": 1.0, "examples": 5.0})
    table = rows(tmp_path)
    assert [(row["step"], row["run"]) for row in table] == [
        ("10", "train"),
        ("20", "train"),
        ("20", "eval"),
        ("30", "train"),
    ]
    assert [float(row["loss"]) for row in table] == [0.1, 0.05, 0.125, 1 / 30]
    assert [row["metrics/accuracy"] for row in table] == ["0.25", "0.25", "1.0", "0.25"]
    assert table[2]["training/learning_rate"] == ""
    assert round(float(table[0]["time/step_ms"]), 6) == 100.0
    assert not any("stacked" in name for name in table[0])
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["log_every"] == 10


def test_a_resumed_run_continues_its_table_where_its_checkpoint_is(tmp_path):
    table = MetricsTable(tmp_path)
    table.begin(0)
    for step in (10, 20, 30):
        table.append("train", step, {"loss": float(step)})
    path = tmp_path / "metrics.csv"
    path.write_text(path.read_text() + "40,train,17")  # the process ended while it wrote a row
    table = MetricsTable(tmp_path)
    table.begin(20)
    assert [row["step"] for row in rows(tmp_path)] == ["10", "20"]
    table.append("train", 30, {"loss": 0.5, 'odd, "name"': 1.0})  # a new chart: a new column
    table.append("eval", 30, {"loss": 0.25})
    assert [row["loss"] for row in rows(tmp_path)] == ["10.0", "20.0", "0.5", "0.25"]
    assert [row['odd, "name"'] for row in rows(tmp_path)] == ["", "", "1.0", ""]
    MetricsTable(tmp_path).begin(0)  # a run that begins again: nothing of the old one is its own
    assert rows(tmp_path) == []


@pytest.mark.parametrize(
    "saved",
    [
        lambda text: text.replace(",", ";").encode("utf-8-sig"),
        lambda text: text.replace(",", "\t").encode("utf-16"),
        lambda text: text.replace("loss", "\x00" * 200_000).encode(),
    ],
    ids=["semicolons", "utf-16", "damaged"],
)
def test_a_table_that_a_spreadsheet_has_saved_otherwise_is_moved_aside(tmp_path, messages, saved):
    for number in (1, 2):
        table = MetricsTable(tmp_path)
        table.append("train", 1, {"loss": 1.0})
        path = tmp_path / "metrics.csv"
        content = saved(path.read_text())
        path.write_bytes(content)
        table = MetricsTable(tmp_path)
        table.begin(1)
        table.append("train", 2, {"loss": 0.5})
        assert table.failures == []
        assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [("2", "0.5")]
        assert (tmp_path / f"metrics.csv.{number}").read_bytes() == content
        assert f"moved to metrics.csv.{number}, and a new table begins" in messages[-1]
        path.unlink()


def test_a_table_that_a_spreadsheet_has_saved_goes_on(tmp_path):
    MetricsTable(tmp_path).append("train", 1, {"loss": 1.0})
    path = tmp_path / "metrics.csv"
    path.write_bytes(path.read_text().replace("\n", "\r\n").encode("utf-8-sig"))
    table = MetricsTable(tmp_path)
    table.begin(1)
    table.append("train", 2, {"loss": 0.5})
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [("1", "1.0"), ("2", "0.5")]


def test_a_run_that_begins_again_does_not_read_its_table(tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"\xff;\n")
    table = MetricsTable(tmp_path)
    table.begin(0)
    table.append("train", 1, {"loss": 1.0})
    assert table.failures == []
    assert [row["loss"] for row in rows(tmp_path)] == ["1.0"]


def test_a_full_disk_does_not_end_the_training(tmp_path, messages):
    with small_disk.mounted(tmp_path / "disk", kilobytes=256) as disk:
        table = MetricsTable(disk)
        table.append("train", 1, {"loss": 1.0})
        small_disk.fill(disk)
        for step in range(2, 2000):
            table.append("train", step, {"loss": 1.0})
        assert table.failures == ["metrics.csv: No space left on device"]
        assert options_record.write_config(disk, "x", {"seed": 1}) == ["config.yaml: No space left on device"]
        MetricsTable(disk).begin(1)  # which writes the file again
        assert sorted(path.name for path in disk.iterdir()) == ["filler", "metrics.csv"]  # nothing takes room in vain
    assert [message.partition(" cannot")[0] for message in messages] == [
        "WARNING: metrics.csv",
        "WARNING: config.yaml",
        "WARNING: metrics.csv",
    ]


def test_options_that_are_not_valid_text_are_recorded_with_escapes(tmp_path):
    """Python gives bytes of a path that are no UTF-8, as in names of Latin-1, as surrogates."""
    options = {"dataset": f"images:{os.fsdecode(bytes([0x63, 0xE9]))}", "log_every": 1}
    config = ExperimentConfig.from_flat_dict(options)
    monitor = Monitor(str(tmp_path), is_chief=True, config=config, total_steps=1)
    with monitor.session():
        monitor.begin(0)
        monitor.on_steps(1, np.ones(1), np.full([1, 6], 0.1), {})
        monitor.table("input", {"folder": options["dataset"]})
    assert monitor.failures == []
    text = (tmp_path / "config.yaml").read_text(encoding="utf-8")
    assert yaml.safe_load(text)["dataset"] == options["dataset"]
    assert options_record.trial_of(tmp_path).endswith("dataset=images:c\\udce9")
    events = b"".join(path.read_bytes() for path in tmp_path.glob("*/events*"))
    assert events.count(b"images:c\\udce9") == 4  # the configuration, the trial, its option, and the table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "eval", "metrics.csv", "train"]


RUN = """
import sys
from tests.training.trainers import source, trainer_of

for steps in (2, 3):
    trainer = trainer_of(workdir=sys.argv[1], schedule="constant", jit_compile="false")
    found = trainer.fit(source(), steps=steps, validation=source())
    print("found", found["steps"], found["failed_writes"], found["failed_checkpoints"])
"""


def test_a_run_in_a_directory_whose_name_is_not_valid_text(tmp_path):
    """In a process of its own: its output names the directory, and pytest-xdist sends on no such text."""
    workdir = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    environment = {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8:backslashreplace"}
    printed = own_process.printed(tmp_path, RUN, workdir, **environment)
    assert [line for line in printed.splitlines() if line.startswith("found")] == ["found 2 [] []", "found 3 [] []"]
    left = {path.name for path in pathlib.Path(workdir).iterdir()}
    assert {"checkpoints", "config.yaml", "eval", "metrics.csv", "model.keras", "summary.json", "train"} < left
    assert not any(name.startswith(".") for name in left - {".lock"})


def test_a_run_of_one_call_has_no_speed(messages):
    """The call compiles."""
    found = trainer_of(schedule="constant").fit(source(), steps=1)
    assert [found[name] for name in ("examples_per_second", "step_ms_p50", "input_wait_fraction", "mfu")] == [None] * 4
    assert "  not measured: the steps were one call, which compiles" in "\n".join(messages)


@pytest.mark.parametrize("text", ["[1]", "3", "null", "{", "[" * 100_000])
def test_a_summary_that_is_none_is_not_read(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    assert results.read_summary(str(tmp_path)) is None
    assert results.previous_summary(str(tmp_path), 1) is None


@pytest.mark.parametrize(
    "edit", [lambda content: [content], lambda content: {**content, "failed_writes": 3, "eval": 1}]
)
def test_a_summary_that_somebody_has_edited_ends_no_run(tmp_path, edit):
    options = {"workdir": str(tmp_path), "schedule": "constant"}
    trainer_of(**options).fit(source(), steps=2)
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    assert trainer_of(**options).fit(source(), steps=2)["steps"] == 2


@pytest.mark.parametrize("cell", ["²", "", "-1", "2.5", "x", "9" * 5000])
def test_a_row_that_somebody_has_edited_ends_no_run(tmp_path, cell):
    (tmp_path / "metrics.csv").write_text(f"step,run,seconds\n1,train,5\n{cell},train,6\n", encoding="utf-8")
    MetricsTable(tmp_path).begin(3)
    kept = ["1", cell] if len(cell) > 9 else ["1"]  # Python reads no number of so many digits: the table is left alone
    assert [row["step"] for row in rows(tmp_path)] == kept
