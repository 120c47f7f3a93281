"""The notebook among the examples runs, and shows the report as a table."""

from __future__ import annotations

from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[1] / "examples" / "report.ipynb"
FUSED = {"graphs": [0], "fused": {"mla_prolog": 1, "latent_attention": 1}, "missed": None}


@pytest.fixture(scope="module")
def written():
    return nbformat.read(NOTEBOOK, as_version=4)


def test_the_notebook_is_kept_without_outputs(written):
    nbformat.validate(written)
    assert not any(cell.outputs or cell.execution_count for cell in written.cells if cell.cell_type == "code")


@pytest.mark.slow
def test_the_notebook_shows_a_table(written):
    run = nbclient.NotebookClient(written.copy(), timeout=300, kernel_name="python3").execute()
    outputs = (output for cell in run.cells if cell.cell_type == "code" for output in cell.outputs)
    shown, layers = (output.data for output in outputs if output.output_type == "execute_result")
    assert "<caption>mla_fx on reference: fused mla_prolog x2, latent_attention x2</caption>" in shown["text/html"]
    assert "<td>model.layers.0, 1 (2)</td><td>mla_prolog, latent_attention</td>" in shown["text/html"]
    assert shown["text/plain"] == "<Report on reference: fused mla_prolog x2, latent_attention x2; 0 misses>"
    assert eval(layers["text/plain"]) == {f"model.layers.{layer}": [FUSED] for layer in range(2)}
