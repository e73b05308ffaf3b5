"""TensorBoard as one sees it: its pages opened in headless Chromium, with the event files of three runs."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading

from tfpar.config import ExperimentConfig
from tfpar.monitor.monitor import Monitor

import numpy as np
import pytest
from playwright import sync_api

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: make browser (as root) installs it"),
]
PARTS = np.array([0.1, 0.5, 0.2, 0.2, 1.0, 0.0])  # input wait, compute, exchange, update, total, overlapped
PATIENCE_MS = 60_000  # a busy machine; nothing here waits that long otherwise


def train(workdir, learning_rate: float) -> None:
    """What a run of two workers writes."""
    options = {"learning_rate": learning_rate, "exchange": "int8", "workdir": str(workdir), "histogram_every": 40}
    config = ExperimentConfig.from_flat_dict(options)
    monitor = Monitor(str(workdir), is_chief=True, config=config, total_steps=120, workers=2)
    weights = {"dense/kernel": np.zeros([3, 3], np.float32)}
    with monitor.session():
        monitor.begin(0)
        monitor.table("exchange", {"codec": "int8", "payload, bytes per step": "1,024"})
        step = 0
        while step < 120:
            monitor.before_step(step, lambda: weights)
            end = monitor.next_boundary(step)
            weights["dense/kernel"] = weights["dense/kernel"] + 1.0
            losses, durations = np.full(end - step, 1.0 / end), np.outer(np.full(end - step, 0.1), PARTS)
            scalars = {"learning_rate": 0.1, "gradient_norm": 2.0, "accuracy": 0.5, "cosine": 0.9}
            monitor.on_steps(end, losses, durations, scalars, worker_seconds=[0.08 * (end - step), 0.1 * (end - step)])
            step = end
            monitor.after_step(step, lambda: weights)
        monitor.images("validation/confusion_matrix", np.zeros([1, 8, 8, 3], np.uint8), step=120, run="eval")
        monitor.on_evaluation(120, {"loss": 0.25, "accuracy": 0.75, "examples": 10.0})
        monitor.finish({"steps": 120, "train_loss": 0.5, "examples_per_second": 1000.0})


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Three runs, served by TensorBoard."""
    logdir = tmp_path_factory.mktemp("runs")
    for number, rate in enumerate((0.25, 0.5, 0.25)):
        train(logdir / f"run{number}", rate)
    command = [sys.executable, "-m", "tensorboard.main", f"--logdir={logdir}", "--host=127.0.0.1", "--port=0"]
    # The server in Python: the one in Rust reads files in a process of its own, a moment later.
    server = subprocess.Popen([*command, "--load_fast=false"], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        lines = []
        for line in server.stderr:
            lines.append(line)
            if found := re.search(r"http://\S+", line):
                break
        else:
            raise AssertionError("".join(lines))
        threading.Thread(target=server.stderr.read, daemon=True).start()
        yield found.group()
    finally:
        server.terminate()
        server.wait()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        # Chromium's sandbox refuses root; the pages are our own.
        flags = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield browser
        browser.close()


@contextlib.contextmanager
def opened(browser: sync_api.Browser, address: str, tab: str):
    """A tab of TensorBoard, which must open without an error in its scripts."""
    errors: list[str] = []
    page = browser.new_page(viewport={"width": 1600, "height": 1400})
    page.set_default_timeout(PATIENCE_MS)
    page.on("pageerror", lambda error: errors.append(str(error)))
    try:
        page.goto(f"{address}#{tab}")
        yield page
        assert errors == []
    finally:
        page.close()


def texts(page: sync_api.Page, selector: str) -> list[str]:
    return [text for text in map(str.strip, page.locator(selector).all_inner_texts()) if text]


def test_charts_come_in_order_and_runs_have_short_names(browser, address):
    with opened(browser, address, "timeseries") as page:
        page.locator(".group-title", has_text="worker_exchange").wait_for()
        groups = [title for title in texts(page, ".card-group .group-title") if title != "Pinned"]
        assert groups == [
            *(
                "loss",
                "metrics",
                "time",
                "time_stacked",
                "time_workers",
                "training",
                "validation",
                "weight_updates",
                "weights",
            ),
            "worker_exchange",
        ]
        sync_api.expect(page.locator("runs-data-table tb-data-table-content-row")).to_have_count(6)
        names = {name for name in texts(page, "runs-data-table tb-data-table-content-row") if name}
        assert {line for name in names for line in name.splitlines() if "run" in line} == {
            f"run{number}/{run}" for number in range(3) for run in ("train", "eval")
        }
        page.locator("button.group-toolbar", has_text="time_workers").click()
        page.locator("card-view", has_text="/fastest_ms").first.wait_for()  # those out of sight are not drawn yet


def test_the_layout_stacks_the_time_of_a_step(browser, address):
    with opened(browser, address, "custom_scalars") as page:
        page.get_by_text("milliseconds per step, stacked: input wait, compute, exchange, update").wait_for()
        for title in ("loss", "metrics", "slowest and fastest worker, milliseconds per step", "exchange"):
            assert page.get_by_text(title, exact=True).first.is_visible(), title
        stack = page.locator("tf-custom-scalar-margin-chart-card")
        sync_api.expect(stack.locator("path.area")).to_have_count(4 * 3)  # a band for each part of each run
        # Bands lie on each other, and are as high as the parts are long: 10, 50, 20 and 20 ms.
        bands = stack.locator("path.area")
        boxes = [band.bounding_box() for band in bands.all()]
        while not all(boxes):  # while the chart is drawn again; a test has a time limit
            page.wait_for_timeout(100)
            boxes = [band.bounding_box() for band in bands.all()]
        spans = {(round(box["y"] + box["height"]), round(box["y"])) for box in boxes}
        (bottom, _), *_, (_, top) = stacked = sorted(spans, reverse=True)
        assert [lower for lower, _ in stacked[1:]] == [upper for _, upper in stacked[:-1]]
        shares = [(lower - upper) / (bottom - top) for lower, upper in stacked]
        assert shares == pytest.approx([0.1, 0.5, 0.2, 0.2], abs=0.02)
        assert not page.get_by_text("is required for the margin chart").first.is_visible()


def test_hparams_have_a_row_for_each_run_and_a_column_for_what_was_given(browser, address):
    with opened(browser, address, "hparams") as page:
        trials = page.locator("vaadin-grid-cell-content", has_text="exchange=int8")
        sync_api.expect(trials).to_have_count(3)
        names = [name.strip() for name in trials.all_inner_texts()]
        assert len(set(names)) == 3
        assert all(re.fullmatch(r"\d{4}-\d{6}\.\d{3} exchange=int8 learning_rate=0\.(25|5)", name) for name in names)
        grid = texts(page, "vaadin-grid-cell-content")
        assert grid[:2] == ["Trial ID", "Show Metrics"]
        assert set(grid[2:4]) == {"exchange", "learning_rate"}
        assert grid[4:6] == ["loss", "metrics/accuracy"]


def test_images_and_text_are_shown(browser, address):
    with opened(browser, address, "text") as page:
        page.get_by_text("Options that differ from their defaults").first.wait_for()
        for title in ("exchange", "what_charts_show"):
            page.get_by_text(title, exact=True).first.wait_for()
    with opened(browser, address, "images") as page:
        page.get_by_text("validation/confusion_matrix").first.wait_for()
