"""The short form of `make chaos`: one run of three faults, one of each kind."""

from __future__ import annotations

import random

from tests import nursery
from tests.faults import chaos
from tfpar_ops.transport_library import why_unusable

import pytest

pytestmark = pytest.mark.cluster
NEEDS_GLOO = pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here")
WORKERS, STEPS, LIMIT, SLACK = 3, 500, 240.0, 15.0  # other tests share the cores


@pytest.mark.proof
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("local_steps", "fragments", "transport"),
    [(1, 1, "tensorflow"), (30, 1, "tensorflow"), (30, 2, "tensorflow"), pytest.param(1, 1, "gloo", marks=NEEDS_GLOO)],
)
def test_a_disturbed_run_ends_with_the_weights_of_the_undisturbed_one(tmp_path, local_steps, fragments, transport):
    """Checkpoints come every 20 steps: within rounds of 30, and while fragments travel, which leave every 15."""
    faults = chaos.draw(random.Random(1), len(chaos.SIGNALS), WORKERS, STEPS)
    options = {"limit": LIMIT, "slack": SLACK, "start": nursery.Popen}
    options |= {"local_steps": local_steps, "fragments": fragments, "transport": transport}
    undisturbed = chaos.run(tmp_path / "undisturbed", [], WORKERS, STEPS, "int4", **options)
    disturbed = chaos.run(tmp_path / "disturbed", faults, WORKERS, STEPS, "int4", **options)
    assert disturbed["params_sha256"] == undisturbed["params_sha256"]
    assert disturbed["restarts"] == len(faults)
    assert disturbed["skipped_steps"] == 0
