"""The notebook, run as a reader runs it: in a kernel, from its folder."""

from __future__ import annotations

import pathlib
import re

import nbclient
import nbformat
import pytest

pytestmark = pytest.mark.without_keras

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


def test_it_is_kept_without_outputs():
    """They would differ in every commit."""
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not [cell for cell in cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]


def test_its_links_lead_somewhere():
    text = "".join(cell.source for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((.+?)\)", text)
    assert links
    assert [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
def test_it_trains_predicts_and_shows_curves(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")  # jupyter_core 5 warns without it
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", shutdown_kernel="immediate")
    client.execute(cwd=str(NOTEBOOK.parent))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert float(re.search(r"held-out accuracy: (0\.\d+|1\.0)", text)[1]) > 0.95
    wrong, examples = map(int, re.search(r"(\d+) of (\d+) are wrong", text).groups())
    assert examples == 360
    assert wrong / examples < 0.05
    assert [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []
