"""The notebook runs from top to bottom and shows its plots."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import smartprune as sp

NOTEBOOK = Path(__file__).parents[2] / "examples" / "inside_a_search.ipynb"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What all cells print and show, in order."""
    for package in ("nbclient", "ipykernel", "matplotlib", "sklearn"):
        pytest.importorskip(package)
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler")
    import nbclient
    import nbformat

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(sp.__file__).parents[1]))
        patch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
        patch.setenv("MPLCONFIGDIR", str(tmp_path_factory.mktemp("matplotlib")))
        patch.setenv("OMP_NUM_THREADS", "1")
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(notebook, timeout=280, kernel_name="python3").execute()
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.filterwarnings("ignore")  # those of the packages that run notebooks
def test_the_notebook_prunes_and_keeps_the_accuracy(outputs: list[dict[str, Any]]) -> None:
    text = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    pruned, dense = (float(value) for value in re.findall(r"accuracy ([\d.]+)%, dense ([\d.]+)%", text)[0])
    assert dense > 90
    assert pruned > 90
    assert re.search(r"blocks of the pruned layers\s+864\s+87\s+777", text)
    assert float(re.findall(r"largest difference (\S+)", text)[0]) < 1e-3


@pytest.mark.filterwarnings("ignore")
def test_the_notebook_shows_two_plots(outputs: list[dict[str, Any]]) -> None:
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


def test_the_notebook_is_stored_without_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    assert not [cell for cell in cells if cell.get("outputs")]
