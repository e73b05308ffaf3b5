from __future__ import annotations

from tests.rl.harness import trained

import pytest


@pytest.fixture(scope="module")
def plain(request, tmp_path_factory):
    """A run of 20 steps on one device, in the module's `ENVIRONMENT` if it has one: trainer, summary and directory."""
    workdir = tmp_path_factory.mktemp("plain")
    trainer, summary = trained(**getattr(request.module, "ENVIRONMENT", {}), workdir=str(workdir))
    return trainer, summary, workdir
