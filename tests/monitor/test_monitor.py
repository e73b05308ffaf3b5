"""What one sees: event files read back with TensorBoard's own reader, a terminal, the profiler, the figures."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import pty
import re
import tempfile
import threading

from tfpar.cluster.info import ClusterInfo
from tfpar.config import ExperimentConfig
from tfpar.models import PeakFlops
from tfpar.monitor import announce, tags
from tfpar.monitor.live_line import LiveLine
from tfpar.monitor.monitor import Monitor
from tfpar.monitor.progress import Progress
from tfpar.monitor.tensorboard import displayable
from tfpar.parallel.topology import Topology
from tfpar.process.activity import format_seconds
from tfpar.process.cores import cores_of_host

import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import struct_pb2
from tensorboard import context
from tensorboard.backend.event_processing import data_provider, event_accumulator, plugin_event_multiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

BATCH = 32


def _config(**options):
    return ExperimentConfig.from_flat_dict({"global_batch_size": BATCH, **options})


def _monitor(workdir, *, is_chief=True, total_steps=100, stream=None, config=None, **arguments):
    progress = Progress(total_steps, stream=stream if stream is not None else io.StringIO(), live=False)
    return Monitor(
        str(workdir) if workdir else None,
        is_chief=is_chief,
        config=config or _config(log_every=10),
        total_steps=total_steps,
        progress=progress,
        **arguments,
    )


def _durations(count, total=0.1):
    """Every step: 10% input wait, 50% compute, 20% exchange, 20% update."""
    return np.outer(np.full(count, total), [0.1, 0.5, 0.2, 0.2, 1.0, 0.0])


def _events(workdir, run):
    accumulator = event_accumulator.EventAccumulator(str(pathlib.Path(workdir) / run), size_guidance={"tensors": 0})
    accumulator.Reload()
    return accumulator


def _points(accumulator, tag):
    return [(event.step, float(tf.make_ndarray(event.tensor_proto))) for event in accumulator.Tensors(tag)]


def _assert_points(accumulator, tag, expected):
    np.testing.assert_allclose(_points(accumulator, tag), expected, rtol=1e-6, err_msg=tag)


def _texts(accumulator, tag):
    return [tf.make_ndarray(event.tensor_proto).ravel()[0].decode() for event in accumulator.Tensors(tag)]


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def test_a_point_is_the_mean_over_examples(tmp_path):
    """Of which the last batch of an epoch may have few."""
    monitor = _monitor(tmp_path, config=_config(log_every=2))
    losses = np.array([1.0, 3.0, np.inf, 2.0])
    with monitor.session():
        monitor.on_steps(4, losses, _durations(4), {}, examples=np.array([60.0, 20.0, 0.0, 5.0]))
    _assert_points(_events(tmp_path, "train"), "loss", [(2, 1.5), (4, 2.0)])


def test_points_are_means_over_log_every_steps(tmp_path):
    """Calls of 25, 25 and 10 steps, points every 10: where calls end must not matter."""
    config = _config(log_every=10, precision="mixed_float16")
    monitor = _monitor(tmp_path, flops_per_example=2e6, peak_flops=1e9, replicas=2, config=config)
    losses = np.arange(60, dtype=np.float64)
    losses[13] = np.nan  # a skipped step: no part of the mean
    scalars = {"learning_rate": 0.5, "gradient_norm": 2.0, "parameter_norm": 3.0, "update_norm": 4.0, "loss_scale": 8.0}
    with monitor.session():
        for begin, end in ((0, 25), (25, 50), (50, 60)):
            monitor.on_steps(end, losses[begin:end], _durations(end - begin), {**scalars, "accuracy": end / 100})
    train = _events(tmp_path, "train")
    expected = [(end, np.nanmean(losses[end - 10 : end])) for end in range(10, 61, 10)]
    _assert_points(train, "loss", expected)
    rate = BATCH / 0.1
    _assert_points(train, "time/examples_per_second", [(end, rate) for end, _ in expected])
    for name, milliseconds in (("input_wait", 10), ("compute", 50), ("exchange", 20), ("update", 20), ("step", 100)):
        assert _points(train, f"time/{name}_ms")[-1] == pytest.approx((60, milliseconds))
    for name, end in (("0_start", 0), ("1_input_wait", 10), ("2_compute", 60), ("3_exchange", 80), ("4_update", 100)):
        assert _points(train, f"time_stacked/{name}")[-1] == pytest.approx((60, end))
    assert _points(train, "time/mfu")[0] == pytest.approx((10, 2e6 * rate / (2 * 1e9)))
    for tag, value in (
        ("training/learning_rate", 0.5),
        ("training/gradient_norm", 2.0),
        ("training/parameter_norm", 3.0),
        ("training/update_norm", 4.0),
        ("training/loss_scale", 8.0),
    ):
        assert _points(train, tag) == [(25, value), (50, value), (60, value)]
    _assert_points(train, "metrics/accuracy", [(25, 0.25), (50, 0.5), (60, 0.6)])


def test_without_log_every_a_run_has_sixty_points(tmp_path):
    monitor = _monitor(tmp_path, config=_config(), total_steps=920)
    ends, step = [], 0
    while step < 920:
        step = min(step + 100, monitor.next_boundary(step))
        ends.append(step)
    assert ends == [*range(15, 920, 15), 920]  # a call ends where a point is, so that the point has all values
    with monitor.session():
        monitor.on_steps(1, np.array([1.0]), _durations(1), {"learning_rate": 1.0})
        for step in range(2, 921):
            monitor.on_steps(step, np.array([float(step)]), _durations(1), {"learning_rate": 1.0, "accuracy": 0.5})
    train = _events(tmp_path, "train")
    for tag in ("loss", "metrics/accuracy", "training/learning_rate", "time/step_ms"):
        steps = [step for step, _ in _points(train, tag)]
        assert len(steps) >= 60  # 919 steps in no time are not 919 points
        assert set(ends) <= set(steps)
        assert len(steps) < 80


def test_calls_are_not_cut_for_points_that_the_user_sets_or_with_a_fixed_length():
    assert _monitor(None, config=_config(log_every=7), total_steps=920).next_boundary(0) == 920
    assert _monitor(None, config=_config(steps_per_loop=100), total_steps=920).next_boundary(0) == 920
    assert _monitor(None, config=_config(round_seconds=60.0), total_steps=920).next_boundary(0) == 920
    assert _monitor(None, config=_config(), total_steps=50).next_boundary(0) == 10  # nor for less than 10 steps


def test_points_come_every_two_seconds_at_least(tmp_path, monkeypatch):
    clock = _Clock()
    monkeypatch.setattr("tfpar.monitor.monitor.time.monotonic", clock)
    monitor = _monitor(tmp_path, config=_config(), total_steps=100_000)
    with monitor.session():
        for step in range(1, 13):
            clock.now += 0.5
            monitor.on_steps(step, np.zeros(1), _durations(1), {})
    assert [step for step, _ in _points(_events(tmp_path, "train"), "loss")] == [1, 5, 9]


def test_what_does_not_change_is_no_chart(tmp_path):
    monitor = _monitor(tmp_path, config=_config(log_every=1))
    with monitor.session():
        for step in range(1, 5):
            counts = {"skipped_steps": float(max(0, step - 2)), "skipped_examples": 0.0, "loss_scale": 1.0}
            monitor.on_steps(step, np.zeros(1), _durations(1), {**counts, "cosine": 0.5})
        monitor.table("exchange", {"codec": "int8", "payload, bytes per step": "1,024"}, step=2)
    train = _events(tmp_path, "train")
    assert _points(train, "training/skipped_steps") == [(3, 1.0), (4, 2.0)]
    assert not {"training/skipped_examples", "training/loss_scale"} & set(train.Tags()["tensors"])
    assert _points(train, "worker_exchange/cosine_to_dense")[0] == (1, 0.5)
    assert "| codec | `int8` |" in _texts(train, "exchange")[0]


def test_every_chart_has_a_description(tmp_path):
    monitor = _monitor(tmp_path, config=_config(log_every=1), flops_per_example=1.0, peak_flops=1.0, workers=2)
    scalars = dict.fromkeys((*tags.TAGS, "accuracy"), 1.0)
    with monitor.session():
        for step in (1, 2):
            monitor.on_steps(step, np.zeros(1), _durations(1), scalars, worker_seconds=[0.1, 0.2])
        monitor.on_evaluation(2, {"loss": 1.0, "accuracy": 0.5, "examples": 1.0})
        monitor.images("training/inputs", np.zeros([1, 2, 2, 1]))
        monitor.finish({"steps": 2, "train_loss": 0.5, "examples_per_second": 1.0, "mfu": 1.0})
    for run in ("train", "eval"):
        events = _events(tmp_path, run)
        names = [name for name in events.Tags()["tensors"] if "/" in name or name == "loss"]
        assert len(names) > 3
        # A new file would need it again, as would a second run of the same process.
        without = [name for name in names if not events.SummaryMetadata(name).summary_description]
        assert [name for name in without if not name.startswith("_hparams_")] == []


def test_metrics_with_the_names_of_other_scalars_are_metrics(tmp_path):
    stream = io.StringIO()
    results = {"cosine": 0.25, "loss_scale": np.array([3.0, 4.0]), "skipped_steps": 5.0}
    monitor = _monitor(tmp_path, stream=stream, config=_config(log_every=1), metric_results=lambda sums: results)
    with monitor.session():
        monitor.on_steps(1, np.zeros(1), _durations(1), {"learning_rate": 0.5, "cosine": 0.75})
    train = _events(tmp_path, "train")
    charts = ("worker_exchange/cosine_to_dense", "metrics/cosine", "metrics/loss_scale/1", "metrics/skipped_steps")
    assert [_points(train, tag) for tag in charts] == [[(1, 0.75)], [(1, 0.25)], [(1, 4.0)], [(1, 5.0)]]
    assert not {"training/skipped_steps", "training/loss_scale"} & set(train.Tags()["tensors"])
    assert "  cosine 0.2500  " in stream.getvalue()


def test_the_slowest_and_the_fastest_worker_are_named(tmp_path):
    for workdir, seconds in (("three", [0.4, 1.2, 0.2]), ("alone", [0.4]), ("untimed", [0.0, 0.0])):
        monitor = _monitor(tmp_path / workdir, config=_config(log_every=4), workers=len(seconds))
        with monitor.session():
            for step in (2, 4):
                monitor.on_steps(step, np.zeros(2), _durations(2), {}, worker_seconds=seconds)
    three = _events(tmp_path / "three", "train")
    assert _points(three, "time_workers/slowest_ms") == [(4, pytest.approx(600.0))]
    assert _points(three, "time_workers/slowest_rank") == [(4, 1.0)]
    assert _points(three, "time_workers/fastest_ms") == [(4, pytest.approx(100.0))]
    assert _points(three, "time_workers/fastest_rank") == [(4, 2.0)]
    for workdir in ("alone", "untimed"):
        assert not any("worker" in tag for tag in _events(tmp_path / workdir, "train").Tags()["tensors"])


def test_histograms_show_weights_and_one_step(tmp_path):
    monitor = _monitor(tmp_path, config=_config(histogram_every=5), total_steps=12)
    weights, step, ends = {"dense/kernel": np.zeros([2, 3], np.float32)}, 0, []
    with monitor.session():
        while step < 12:
            monitor.before_step(step, lambda: weights)
            step = monitor.next_boundary(step)
            weights["dense/kernel"] = np.full([2, 3], step, np.float32)
            monitor.after_step(step, lambda: weights)
            ends.append(step)
    assert ends == [4, 5, 9, 10, 12]
    train = _events(tmp_path, "train")
    for tag, values in (("weights/dense/kernel", [5.0, 10.0]), ("weight_updates/dense/kernel", [1.0, 1.0])):
        events = train.Tensors(tag)
        assert [event.step for event in events] == [5, 10]
        for event, value in zip(events, values, strict=True):
            left, right, count = tf.make_ndarray(event.tensor_proto).T
            (full,) = np.flatnonzero(count)
            assert count[full] == 6
            assert left[full] <= value <= right[full]


def test_a_run_begun_by_an_earlier_version_goes_on_in_its_directory(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    monitor = _monitor(tmp_path)
    monitor.text("model", "x")
    monitor.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    assert (tmp_path / "tensorboard" / "train").is_dir()


def test_real_example_counts_make_the_throughput(tmp_path):
    monitor = _monitor(tmp_path, config=_config(log_every=2))
    with monitor.session():
        monitor.on_steps(2, np.zeros(2), _durations(2, 0.5), {}, examples=np.array([32.0, 5.0]))
    assert _points(_events(tmp_path, "train"), "time/examples_per_second") == [(2, 37.0)]


def test_configuration_images_and_text(tmp_path):
    monitor = _monitor(tmp_path, config=_config(optimizer="lamb", seed=7))
    images = np.random.default_rng(0).normal(size=(3, 8, 8, 1)).astype("float32")
    with monitor.session():
        monitor.images("training/inputs", images)
        monitor.sample_text("generated", "def f(x):\n  return `x` | 1", step=40)
        monitor.text("model", "layer    size\ndense      10")
    train = _events(tmp_path, "train")
    table = _texts(train, "configuration")[0]
    assert "| optimizer | `lamb` |" in table
    assert "| seed | `7` |" in table
    given, others = table.split("#### Defaults")
    assert [line for line in given.splitlines() if "`" in line] == [
        "| global_batch_size | `32` |",
        "| optimizer | `lamb` |",
        "| seed | `7` |",
    ]
    assert len([line for line in others.splitlines() if line.startswith("| ")]) == 1 + len(_config().as_flat_dict()) - 3
    assert _texts(train, "samples/generated") == ["    def f(x):\n      return `x` | 1"]
    assert train.Tensors("samples/generated")[0].step == 40
    assert _texts(train, "model") == ["    layer    size\n    dense      10"]
    width, height, *encoded = tf.make_ndarray(train.Tensors("training/inputs")[0].tensor_proto)
    assert (width, height, len(encoded)) == (b"8", b"8", 3)
    shown = tf.io.decode_png(encoded[1]).numpy() / 255.0
    scaled = (images[1] - images.min()) / (images.max() - images.min())
    np.testing.assert_allclose(shown, scaled, atol=0.01)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (np.array([0.0, 0.25, 1.0], np.float32), [0.0, 0.25, 1.0]),
        (np.array([0.25, 0.5], np.float32), [0.25, 0.5]),
        (np.array([-1.0, 0.0, 1.0], np.float16), [0.0, 0.5, 1.0]),
        (np.array([0, 8, 16], np.int64), [0.0, 0.5, 1.0]),
        (np.array([7.0, 7.0], np.float32), [0.0, 0.0]),
        (np.array([0, 128, 255], np.uint8), [0, 128, 255]),
    ],
)
def test_images_are_brought_into_range(given, expected):
    shown = displayable(given.reshape(1, 1, -1, 1))
    assert shown.dtype == (np.uint8 if given.dtype == np.uint8 else np.float32)
    np.testing.assert_allclose(shown.ravel(), expected)


def _session_groups(logdir):
    """What TensorBoard's HPARAMS tab shows for a log directory, from the plug-in's own backend."""
    multiplexer = plugin_event_multiplexer.EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(logdir))
    multiplexer.Reload()
    provider = data_provider.MultiplexerDataProvider(multiplexer, str(logdir))
    backend = backend_context.Context(base_plugin.TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=10, allowed_statuses=[0, 1, 2, 3])
    return list_session_groups.Handler(context.RequestContext(), backend, "", request).run().session_groups


def test_hparams_tab_lists_runs_with_their_results(tmp_path, messages):
    for number, rate in ((1, 0.1), (2, 0.2)):
        workdir = tmp_path / f"run{number}"
        messages.clear()
        monitor = _monitor(workdir, config=_config(learning_rate=rate, workdir=str(workdir)))
        with monitor.session():
            monitor.on_evaluation(50, {"loss": 1.0, "accuracy": 0.5, "examples": 180.0})
            monitor.on_evaluation(100, {"loss": 0.25 * number, "accuracy": 0.75, "examples": 180.0})
            monitor.finish({"steps": 100, "train_loss": 0.125, "examples_per_second": 1000.0, "mfu": None})
        assert messages == [
            "evaluation at step 50  loss 1.0000  accuracy 0.5000  (180 examples)",
            f"evaluation at step 100  loss {0.25 * number:.4f}  accuracy 0.7500  (180 examples)",
        ]
    groups = sorted(_session_groups(tmp_path), key=lambda group: group.sessions[0].name)
    for number, group in enumerate(groups, start=1):
        assert re.fullmatch(rf"[\d.-]{{15}} global_batch_size=32 learning_rate=0.{number}", group.name)
        assert dict(group.hparams) == {
            "learning_rate": struct_pb2.Value(number_value=0.1 * number),
            "global_batch_size": struct_pb2.Value(number_value=32.0),
        }
        metrics = {metric.name.tag: (metric.value, metric.training_step) for metric in group.metric_values}
        assert metrics == {
            "loss": (0.25 * number, 100),
            "metrics/accuracy": (0.75, 100),
            "training/final_loss": (0.125, 100),
            "time/final_examples_per_second": (1000.0, 100),
        }
        assert group.sessions[0].status == api_pb2.STATUS_SUCCESS


def test_runs_in_the_same_directory_one_after_the_other_are_rows_of_their_own(tmp_path):
    """`make train` moves the previous run aside; each run keeps its row, and a resumed one its only one."""
    workdir = tmp_path / "quickstart"
    for number in range(3):
        for step in (0, 5) if number == 2 else (0,):
            monitor = _monitor(workdir, config=_config(seed=4, workdir=str(workdir)))
            with monitor.session():
                monitor.begin(step)
                monitor.on_evaluation(step + 5, {"loss": 1.0, "examples": 180.0})
                monitor.finish({"steps": 100})
        workdir.rename(tmp_path / f"quickstart-{number}")
    groups = _session_groups(tmp_path)
    assert len({group.name for group in groups}) == len(groups) == 3
    assert sorted(session.name for group in groups for session in group.sessions) == [
        f"quickstart-{number}/eval" for number in range(3)
    ]
    assert all(group.name.endswith(" global_batch_size=32 seed=4") for group in groups)


def test_a_restarted_run_shows_its_own_options_and_how_it_ends(tmp_path):
    """Of what the tab HPARAMS shows, TensorBoard keeps the first that it finds in a directory."""

    def start(step, rate, error=None):
        monitor = _monitor(tmp_path, config=_config(learning_rate=rate))
        monitor.begin(step)
        with contextlib.suppress(KeyboardInterrupt, RuntimeError), monitor.session():
            monitor.on_evaluation(step + 10, {"loss": rate})
            if error:
                raise error
            monitor.finish({"steps": 100})
        (group,) = _session_groups(tmp_path)
        (session,) = group.sessions
        return group.name.split("learning_rate=")[1], session.status

    assert start(0, 1.0, KeyboardInterrupt()) == ("1.0", api_pb2.STATUS_FAILURE)
    assert start(0, 0.5, RuntimeError()) == ("0.5", api_pb2.STATUS_FAILURE)
    assert start(10, 0.5) == ("0.5", api_pb2.STATUS_SUCCESS)
    assert start(100, 0.5, RuntimeError()) == ("0.5", api_pb2.STATUS_FAILURE)


def test_a_failed_run_is_shown_as_failed(tmp_path):
    monitor = _monitor(tmp_path)

    def train():
        with monitor.session():
            monitor.on_steps(10, np.full(10, 0.5), _durations(10), {})
            raise RuntimeError("worker died")

    with pytest.raises(RuntimeError, match="worker died"):
        train()
    (group,) = _session_groups(tmp_path)
    assert group.sessions[0].status == api_pb2.STATUS_FAILURE
    assert _points(_events(tmp_path, "train"), "loss") == [(10, 0.5)]  # what was known is on disk


def test_only_the_chief_talks_and_writes(tmp_path, capfd):
    monitor = Monitor(
        str(tmp_path), is_chief=False, worker=1, config=_config(log_every=1, profile_steps="2,3"), total_steps=4
    )
    with monitor.session():
        assert monitor.next_boundary(0) == 1  # every process must make the chief's calls
        for step in range(1, 5):
            monitor.before_step(step - 1)
            monitor.on_steps(step, np.zeros(1), _durations(1), {"accuracy": 1.0})
            monitor.after_step(step)
        monitor.on_evaluation(4, {"loss": 0.0})
        monitor.message("hello")
        monitor.text("a", "b")
        monitor.sample_text("a", "b")
        monitor.images("c", np.zeros((1, 4, 4, 3)))
        monitor.finish({"steps": 4, "train_loss": 0.0})
    assert capfd.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []
    assert monitor.statistics()["step_ms_p50"] == pytest.approx(100.0)  # the summary is every worker's


def test_nothing_is_created_before_there_is_something_to_write(tmp_path):
    monitor = _monitor(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monitor.text("model", "x")
    assert (tmp_path / "train").is_dir()
    monitor.close()


# --- figures ---------------------------------------------------------------------------------------------------------


def test_statistics_leave_the_compiling_call_out():
    monitor = _monitor(
        None, flops_per_example=1e6, peak_flops=1e8, replicas=4, line=LiveLine(("return",), "env steps/s", 8.0)
    )
    names = ["examples_per_second", "step_ms_p50", "step_ms_p95", "input_wait_fraction", "mfu", "env_steps_per_second"]
    assert monitor.statistics() == dict.fromkeys(names)
    monitor.on_steps(1, np.zeros(1), _durations(1, 30.0), {})
    assert monitor.statistics() == dict.fromkeys(names)  # nothing else is known yet
    times = np.linspace(0.1, 0.3, 101)
    durations = np.outer(times, [0.1, 0.5, 0.2, 0.2, 1.0, 0.0])
    monitor.on_steps(61, np.zeros(60), durations[:60], {})
    monitor.on_steps(102, np.zeros(41), durations[60:], {})
    figures = monitor.statistics()
    assert figures["step_ms_p50"] == pytest.approx(200.0)
    assert figures["step_ms_p95"] == pytest.approx(290.0)
    assert figures["input_wait_fraction"] == pytest.approx(0.1)
    assert list(figures) == names
    assert figures["examples_per_second"] == pytest.approx(BATCH / 0.2)
    assert figures["env_steps_per_second"] == pytest.approx(8 * BATCH / 0.2)
    assert figures["mfu"] == pytest.approx(1e6 * BATCH / 0.2 / (4 * 1e8))
    assert _monitor(None).statistics()["mfu"] is None


def test_steps_that_are_faster_than_a_measured_peak_raise_it(tmp_path):
    monitor = _monitor(tmp_path, flops_per_example=1e6, peak_flops=1e8, config=_config(log_every=10))
    with monitor.session():
        for end, seconds in ((10, 0.2), (20, 0.1), (30, 0.2)):  # 1.6, 3.2 and 1.6 times the peak
            monitor.on_steps(end, np.zeros(10), _durations(10, seconds), {})
    assert [value for _, value in _points(_events(tmp_path, "train"), "time/mfu")] == pytest.approx([1.0, 1.0, 0.5])
    assert monitor.statistics()["mfu"] == pytest.approx(20 / 30)


def test_the_peak_of_a_replica_is_that_of_all_its_devices(monkeypatch):
    def peak(topology, threads):
        monkeypatch.setattr(announce.models, "peak_flops", lambda precision: PeakFlops(1e12, "of one device", threads))
        return announce.peak_flops_of_replica(topology, "float32")

    cores = cores_of_host()
    within = Topology(name="mirrored", local_replicas=2, pipeline_devices=3, model_devices=2)
    assert peak(within, threads=0) == 6e12
    assert peak(within, threads=cores) == 5e11  # both replicas use the same cores
    addresses = {"worker": ("10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1", "10.0.0.4:1")}
    over = Topology(
        name="multi_worker",
        workers=4,
        replica_workers=2,
        model_devices=2,
        cluster=ClusterInfo("TF_CONFIG", addresses, "worker", 0),
    )
    assert over.replicas == 2
    assert [peak(over, threads=threads) for threads in (0, cores)] == [2e12, 2e12]


# --- profiler --------------------------------------------------------------------------------------------------------


def _profiled_calls(monitor, total, per_call):
    """Runs the trainer's loop; returns where its calls ended and during which steps the profiler ran."""
    step, ends, profiled = 0, [], []
    while step < total:
        count = min(per_call, total - step, monitor.next_boundary(step) - step)
        monitor.before_step(step)
        running = monitor._profile.running
        for _ in range(count):
            tf.linalg.matmul(tf.ones([16, 16]), tf.ones([16, 16])).numpy()
        step += count
        profiled += range(step - count + 1, step + 1) if running else []
        monitor.after_step(step)
        ends.append(step)
    return ends, profiled


@pytest.mark.parametrize(
    ("window", "per_call", "ends"),
    [
        ("3,5", 4, [2, 3, 4, 5, 9, 12]),
        ("1,2", 5, [1, 2, 7, 12]),
        ("0,1", 12, [1, 12]),
        ("12,12", 6, [6, 11, 12]),
    ],
)
def test_profile_window_is_met_exactly(tmp_path, messages, window, per_call, ends):
    monitor = _monitor(tmp_path, total_steps=12, config=_config(profile_steps=window, log_every=1))
    with monitor.session():
        result = _profiled_calls(monitor, 12, per_call)
    first, last = (max(int(edge), 1) for edge in window.split(","))
    assert result == (ends, list(range(first, last + 1)))
    (trace,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 1000
    assert f"profiled steps {first} to {last}" in messages[-1]


def test_no_profile_after_a_resume_beyond_the_window(tmp_path):
    monitor = _monitor(tmp_path, config=_config(profile_steps="3,5", log_every=1))
    assert monitor.next_boundary(20) == 100
    monitor.before_step(20)
    assert not monitor._profile.running


def test_a_run_that_ends_inside_the_window_keeps_its_profile(tmp_path):
    monitor = _monitor(tmp_path, config=_config(profile_steps="2,50"))

    def train():
        with monitor.session():
            monitor.before_step(1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train()
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))
    tf.profiler.experimental.start(str(tmp_path / "free"))  # the profiler is free again
    tf.profiler.experimental.stop()


def test_profiles_are_named_by_the_steps_that_they_have(tmp_path, messages):
    """Of a run that is preempted in the window, and goes on from there."""
    for first, last in ((2, 4), (5, 6)):
        monitor = _monitor(tmp_path, config=_config(profile_steps="2,6", log_every=1))
        with monitor.session():
            for step in range(first, last + 1):
                monitor.before_step(step - 1)
                monitor.after_step(step)
        assert f"profiled steps {first} to {last}: tab" in messages[-1]
    folders = sorted(path.name for path in (tmp_path / "plugins" / "profile").iterdir())
    assert folders == ["steps_2_to_4", "steps_5_to_6"]


def test_no_room_for_a_profile_is_said_not_fatal(tmp_path, monkeypatch, messages):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monitor = _monitor(tmp_path, config=_config(profile_steps="1,2"))
    monitor.before_step(0)
    monitor.after_step(2)
    assert "the profiler does not start: [Errno 2] No such file or directory" in messages[-1]


def test_profiler_in_use_and_missing_workdir_are_said_not_fatal(tmp_path, messages):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        monitor = _monitor(tmp_path, config=_config(profile_steps="1,2"))
        monitor.before_step(0)
        monitor.after_step(2)
    finally:
        tf.profiler.experimental.stop()
    assert "the profiler does not start" in messages[-1]
    monitor = _monitor(None, config=_config(profile_steps="1,2"))
    monitor.before_step(0)
    assert "--workdir" in messages[-1]


# --- terminal --------------------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def _screen(written):
    """The lines that a terminal shows: a carriage return goes back to the first column, letters overwrite."""
    lines = []
    for line in written.replace("\r\n", "\n").split("\n"):
        cells: list[str] = []
        column = 0
        for letter in line:
            if letter == "\r":
                column = 0
                continue
            cells[column : column + 1] = [letter]
            column += 1
        lines.append("".join(cells).rstrip())
    return lines


def test_plain_lines_come_soon_then_every_few_seconds_and_at_the_end():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(1000, stream=stream, clock=clock)
    for step in range(1, 1001):
        clock.now += 1 / 32
        progress.update(step, {"loss": f"{1 / step:.3f}", "examples/s": "50"})
    progress.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step    1/1000    0%  loss 1.000  examples/s 50"
    assert lines[1] == "step  161/1000   16%  loss 0.006  ETA 0:26  examples/s 50"
    assert [line.split("/")[0].split()[-1] for line in lines] == ["1", "161", "321", "481", "641", "801", "961", "1000"]
    assert lines[-1] == "step 1000/1000  100%  loss 0.001  ETA 0:00  examples/s 50"


def test_live_line_on_a_real_terminal(monkeypatch):
    """A pseudo-terminal: one line overwritten in place, messages whole above it, nothing wider than the terminal."""
    monkeypatch.setenv("COLUMNS", "80")
    master, slave = pty.openpty()
    clock = _Clock()
    with os.fdopen(slave, "w") as stream:
        progress = Progress(200, stream=stream, clock=clock)
        values = {"loss": "0.1234", "accuracy": "0.98", "examples/s": "1234", "input wait": "0.5%"}
        for step in range(1, 101):
            clock.now += 1 / 16
            progress.update(step, values)
            if step in (30, 60):
                progress.message(f"evaluation at step {step}")
        progress.close()
        progress.message("the end")
    written = ""
    while not written.endswith("the end\r\n"):  # a terminal hands over what it has so far
        written += os.read(master, 1 << 16).decode()
    os.close(master)
    assert _screen(written) == [
        "evaluation at step 30",
        "evaluation at step 60",
        "step  99/200   50%  loss 0.1234  ETA 0:06  accuracy 0.98  examples/s 1234",
        "the end",
        "",
    ]
    assert written.count("step  ") < 60  # every other step is within 0.1 s of the one before


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        ("120", "step  50/100  [==========          ]   50%  loss 0.5  ETA 0:10  examples/s 1234  input wait 0.5%"),
        ("60", "step  50/100   50%  loss 0.5  ETA 0:10  examples/s 1234"),
        ("30", "step  50/100   50%  loss 0.5"),
        ("8", "step  5"),
    ],
)
def test_live_line_fits_the_terminal(monkeypatch, columns, expected):
    monkeypatch.setenv("COLUMNS", columns)
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(100, stream=stream, live=True, clock=clock)
    for step in (1, 50):
        progress.update(step, {"loss": "0.5", "examples/s": "1234", "input wait": "0.5%"})
        clock.now += 9.8
    assert _screen(stream.getvalue())[-1] == expected
    assert all(len(line) < int(columns) for line in stream.getvalue().split("\r"))


def test_messages_from_threads_stay_whole(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(10**6, stream=stream, live=True, clock=clock)

    def talk(name):
        for number in range(50):
            progress.message(f"{name} says {number}")

    threads = [threading.Thread(target=talk, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for step in range(200):
        clock.now += 1.0
        progress.update(step, {"loss": "1.0" * (step % 3)})
    for thread in threads:
        thread.join()
    progress.close()
    lines = _screen(stream.getvalue())
    assert sorted(line for line in lines if " says " in line) == sorted(
        f"{n} says {i}" for n in "abcd" for i in range(50)
    )


def test_a_reader_that_left_does_not_end_the_training():
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        os.close(reader)
        progress = Progress(10, stream=stream)
        progress.update(1, {"loss": "1"})
        progress.message("still here")


def test_a_line_is_about_the_last_hundred_steps_however_often_it_is_shown():
    calls = [(10, 4.0), (60, 2.0), (60, 1.0), (40, 0.5)]
    lines = {}
    for live in (False, True):
        stream, clock = io.StringIO(), _Clock()
        progress = Progress(170, stream=stream, live=live, interval=0.0, clock=clock)
        monitor = Monitor(None, is_chief=True, config=_config(), total_steps=170, progress=progress)
        done = 0
        for steps, loss in calls:
            done += steps
            clock.now += 1.0
            monitor.on_steps(done, np.full(steps, loss), _durations(steps), {"accuracy": 0.5, "learning_rate": 1.0})
        lines[live] = stream.getvalue().split("\r" if live else "\n")
    assert [line.partition("  loss ")[2] for line in lines[False]][:4] == [
        "4.0000 (mean of 10 steps)  accuracy 0.5000  examples/s 320  input wait 10.0%",
        "2.2857 (mean of 70 steps)  ETA 0:02  accuracy 0.5000  examples/s 320  input wait 10.0%",
        "1.5000 (mean of 120 steps)  ETA 0:01  accuracy 0.5000  examples/s 320  input wait 10.0%",
        "0.8000 (mean of 100 steps)  ETA 0:00  accuracy 0.5000  examples/s 320  input wait 10.0%",
    ]
    shown = [re.findall(r"loss \S+ \(mean of \d+ steps\)", "".join(lines[live])) for live in (False, True)]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "0:00"), (59.6, "1:00"), (3599, "59:59"), (36000, "10:00:00")])
def test_durations_read_as_clocks(seconds, text):
    assert format_seconds(seconds) == text


def test_the_live_line_does_not_stay_behind_an_evaluation():
    stream, clock = io.StringIO(), _Clock()
    progress = Progress(20, stream=stream, live=True, clock=clock)
    monitor = Monitor(None, is_chief=True, config=_config(), total_steps=20, progress=progress)
    for step in (1, 2, 3):  # the clock stands still: the line is due once
        monitor.on_steps(step, np.ones(1), _durations(1), {})
    monitor.on_evaluation(3, {"loss": 2.0})
    assert re.findall(r"step +(\d+)/20", stream.getvalue()) == ["1", "3"]
    progress.close()


def test_verbose_2_says_evaluations_within_epochs_once(capsys):
    monitor = Monitor(None, is_chief=True, config=_config(verbose=2), total_steps=20)
    monitor.on_steps(4, np.full(4, 1.0), _durations(4), {})
    monitor.on_evaluation(4, {"loss": 3.0, "examples": 8})
    monitor.on_steps(10, np.full(6, 1.0), _durations(6), {})
    monitor.on_evaluation(10, {"loss": 2.0, "examples": 8})
    monitor.on_epoch(0, 10, {"loss": 1.0, "val_loss": 2.0})
    monitor.on_steps(15, np.full(5, 1.0), _durations(5), {})
    monitor.on_evaluation(15, {"loss": 1.5, "examples": 8})
    monitor.finish({})
    assert capsys.readouterr().out.splitlines() == [
        "evaluation at step 4  loss 3.0000  (8 examples)",
        "epoch 1  step 10/20  loss 1.0000  val_loss 2.0000",
        "evaluation at step 15  loss 1.5000  (8 examples)",
    ]
