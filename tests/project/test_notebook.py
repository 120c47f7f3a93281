"""The notebook among the examples runs, and is kept with the report as a table."""

import ast
import re
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "report.ipynb"
FUSED = {"graphs": [0], "fused": {"mla_prolog": 1, "latent_attention": 1}, "missed": None}


@pytest.fixture(scope="module")
def written():
    return nbformat.read(NOTEBOOK, as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def results(notebook):
    outputs = (output for cell in code(notebook) for output in cell.outputs)
    return [output.data for output in outputs if output.output_type == "execute_result"]


def check(notebook):
    shown, layers = results(notebook)
    assert ">mla_fx on reference: fused mla_prolog x2, latent_attention x2</caption>" in shown["text/html"]
    cells = re.findall("<td[^>]*>(.*?)</td>", shown["text/html"])
    assert cells == ["model.layers.0, 1 (2)", "mla_prolog, latent_attention", ""]
    assert shown["text/plain"] == "<Report on reference: fused mla_prolog x2, latent_attention x2; 0 misses>"
    assert ast.literal_eval(layers["text/plain"]) == {f"model.layers.{layer}": [FUSED] for layer in range(2)}


def test_the_notebook_is_kept_with_its_results(written):
    """And with nothing else that was printed: that differs between machines."""
    nbformat.validate(written)
    assert [cell.execution_count for cell in code(written)] == [1, 2, 3]
    assert sum(len(cell.outputs) for cell in code(written)) == len(results(written))
    check(written)


def test_the_notebook_imports_what_is_documented(written):
    tree = ast.walk(ast.parse("\n".join(cell.source for cell in code(written))))
    names = {node.module for node in tree if isinstance(node, ast.ImportFrom)}
    assert names == {"transformers"}


@pytest.mark.slow
def test_the_results_are_those_of_a_run(written):
    check(nbclient.NotebookClient(written.copy(), timeout=300, kernel_name="python3").execute())
