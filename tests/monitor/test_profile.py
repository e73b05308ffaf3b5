"""What the viewer of profiles, xprof, finds in a profile of a run."""

from __future__ import annotations

import json
import subprocess
import sys

import tfpar
from tfpar import inputs
from tfpar.monitor import profiling

import keras
import numpy as np

# In a process of its own, as in TensorBoard: xprof brings native libraries of its own.
OVERVIEW = """
import sys
from xprof.convert import raw_to_tool_data
data, _ = raw_to_tool_data.xspace_to_tool_data([sys.argv[1]], "overview_page", {})
sys.stdout.write(data if isinstance(data, str) else data.decode())
"""


def test_the_overview_shows_step_times(tmp_path, messages):
    x = np.random.default_rng(0).normal(size=[40, 8]).astype(np.float32)
    trainer = tfpar.Trainer(
        lambda: keras.Sequential([keras.Input((8,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(2)]),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        strategy="one_device",
        jit_compile="false",
        global_batch_size=10,
        profile_steps="6,13",
        workdir=str(tmp_path),
    )
    trainer.fit(inputs.from_arrays(x, (x[:, 0] > 0).astype(np.int32), num_classes=2), steps=20)
    profile = tmp_path / "plugins" / "profile" / "steps_6_to_13" / "worker_0.xplane.pb"
    assert "profiled steps 6 to 13: tab PROFILE of TensorBoard" in messages  # xprof is installed
    shown = subprocess.run([sys.executable, "-c", OVERVIEW, str(profile)], capture_output=True, text=True, check=True)
    tables = json.loads(shown.stdout)
    steps = next(table for table in tables if "steptime_ms_average" in (table.get("p") or {}))
    assert float(steps["p"]["steptime_ms_average"]) > 0.0
    # xprof drops the first and the last.
    assert [row["c"][0]["v"] for row in steps["rows"]] == [f"train {number}" for number in range(7, 13)]


def test_the_viewer_is_named_where_it_is_not_installed(monkeypatch):
    assert profiling.needs_viewer() == ""
    monkeypatch.setattr(profiling.importlib.util, "find_spec", lambda name: None)
    assert profiling.needs_viewer() == " (needs xprof: pip install 'tfpar[profile]')"
