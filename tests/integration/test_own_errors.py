"""An error of the program on one of two real workers, whose process goes on, and the same error on both."""

from __future__ import annotations

import re

from tests.integration.test_multi_worker import launch
from tfpar.process.exit_codes import PEER_LOST
from tfpar_ops.transport_library import why_unusable

import pytest

pytestmark = pytest.mark.cluster

TRANSPORTS = [
    "tensorflow",
    pytest.param(
        "gloo", marks=pytest.mark.skipif(bool(why_unusable()), reason="the transport over Gloo is not built here")
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_worker_ends_the_other(transport, failing):
    result = launch(2, "-m", "tests.integration.scripts.own_errors", transport, f"{failing}")
    output = result.stdout + result.stderr
    assert result.returncode == PEER_LOST, output
    assert f"caught on worker {failing}" in output
    assert f"caught on worker {1 - failing}" not in output
    said = rf"error: lost worker {failing} \(\S+\): it failed \(ValueError: of a hook é+…\)\. This worker ends too\. "
    assert re.search(said, output), output


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_after_an_error_of_all_workers_they_may_go_on(transport):
    result = launch(2, "-m", "tests.integration.scripts.own_errors", transport, "all")
    output = result.stdout + result.stderr
    assert result.returncode == 0, output
    assert all(f"caught on worker {rank}" in output for rank in range(2)), output
    assert output.count("went on with 64 examples") == 2, output
    assert output.count("another trainer went on") == 2, output
