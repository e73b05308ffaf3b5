"""Hooks and callbacks that call the trainer on one of two real workers only."""

from __future__ import annotations

from tests.integration.test_multi_worker import launch

import pytest

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("hook", "worker 0 is in predict(), while worker 1 is in the hooks after step 12. All workers must make"),
        ("evaluate", "worker 0 is in evaluate(), while worker 1 is in the hooks after step 12. All workers must"),
        ("begin", "worker 0 is in predict(), while worker 1 is in on_train_begin() of the callbacks. All workers"),
        ("epoch", "worker 0 is in predict(), while worker 1 is in the hooks after step 4. All workers must"),
        ("hooks", "run at different steps: every [5] on worker 0, every none on worker 1. Give every worker the same"),
        ("both", ""),
    ],
)
def test_a_call_on_the_chief_only_is_named(what, text):
    result = launch(2, "-m", "tests.integration.scripts.unequal_calls", what)
    output = result.stdout + result.stderr
    assert (result.returncode == 0) == (not text), output
    assert text in output, output
    assert "Traceback" not in output, output


def test_batch_methods_on_the_chief_only_are_refused():
    result = launch(2, "-m", "tests.integration.scripts.unequal_calls", "batches")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    for method in ("evaluate", "predict", "fit"):
        text = f"refused: {method}(callbacks=...): only worker 0 has callbacks with methods for the batches"
        assert output.count(text) == 2, output  # on every worker
