"""Graphs as text, and the folder that `dump` fills."""

import ast
import re
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from expecttest import TestCase
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx.ops  # noqa: F401  registers torch.ops.mla_fx
from mla_fx.debug.dump import Dump
from mla_fx.debug.graph_text import graph_text, recorded
from mla_fx.debug.report import Miss, PassRecord, Report

aten = torch.ops.aten


def traced(function, *inputs, dynamic=False):
    return make_fx(function, tracing_mode="symbolic" if dynamic else "fake")(*inputs).graph


def fused_graph():
    """One latent_attention, as the rewriter emits it."""

    def function(q, q_rope, kv, k_rope):
        return torch.ops.mla_fx.attention(q, q_rope, kv, k_rope, None, scale=0.5)

    shapes = (1, 1, 2, 4), (1, 1, 2, 2), (1, 3, 4), (1, 3, 2)
    graph = traced(function, *(torch.randn(shape, dtype=torch.bfloat16) for shape in shapes))
    (node,) = graph.find_nodes(op="call_function", target=torch.ops.mla_fx.attention.default)
    node.meta["mla_fx_rule"] = "mla_attention"
    node.meta["mla_fx_replaced"] = [
        ("bmm", "/usr/lib/site-packages/model.py:41", "layers.0"),
        ("view_2", "/usr/lib/site-packages/model.py:41", "layers.0"),
        ("view_3", "/usr/lib/site-packages/model.py:41", "layers.0.mix"),
        ("div", "model.py:42", ""),
        ("clone", "", ""),
    ]
    return graph


class TestGraphText(TestCase):
    def test_shapes_dtypes_and_arguments(self):
        def function(x, w):
            left, right = (x.to(torch.bfloat16) @ w).split([2, 3], dim=-1)
            return left.transpose(0, 1) * -torch.inf, right[0, ::2]

        self.assertExpectedInline(
            graph_text(traced(function, torch.randn(3, 4), torch.randn(4, 5, dtype=torch.bfloat16))),
            """\
# a graph: 12 nodes. Run this file to compute it on random inputs.


import torch

from mla_fx.debug.stage import run


aten = torch.ops.aten

INPUTS = {
    "x_1": "f32[3, 4]",
    "w_1": "bf16[4, 5]",
}


def graph(inputs):
    _to_copy = aten._to_copy(inputs["x_1"], dtype=torch.bfloat16)  # bf16[3, 4]
    mm = aten.mm(_to_copy, inputs["w_1"])  # bf16[3, 5]
    split_with_sizes = aten.split_with_sizes(mm, [2, 3], -1)  # (bf16[3, 2] strides (5, 1), bf16[3, 3] strides (5, 1))
    getitem = split_with_sizes[0]  # bf16[3, 2] strides (5, 1)
    getitem_1 = split_with_sizes[1]  # bf16[3, 3] strides (5, 1)
    transpose = aten.transpose.int(getitem, 0, 1)  # bf16[2, 3] strides (1, 5)
    mul = aten.mul.Tensor(transpose, float('-inf'))  # bf16[2, 3] strides (1, 2)
    select = aten.select.int(getitem_1, 0, 0)  # bf16[3]
    slice_1 = aten.slice.Tensor(select, 0, 0, 9223372036854775807, 2)  # bf16[2] strides (2)
    return (mul, slice_1)


if __name__ == "__main__":
    run(graph, INPUTS)
""",
        )

    def test_symbolic_sizes_by_name(self):
        text = graph_text(traced(lambda x: x.reshape(-1, 2, 4).sum(0), torch.randn(3, 5, 8), dynamic=True))
        # PyTorch decides the numbers of symbols.
        names = {symbol: f"s{position}" for position, symbol in enumerate(dict.fromkeys(re.findall(r"\bs\d+", text)))}
        self.assertExpectedInline(
            re.sub(r"\bs\d+", lambda found: names[found[0]], text),
            """\
# a graph: 4 nodes. Run this file to compute it on random inputs.


import torch

from mla_fx.debug.stage import run


aten = torch.ops.aten
s0 = 3  # in this example
s1 = 5  # in this example
s2 = 8  # in this example

INPUTS = {
    "x_1": "f32[s0, s1, s2]",
}


def graph(inputs):
    view = aten.view(inputs["x_1"], [-1, 2, 4])  # f32[s0*s1, 2, (s2//2)] strides (s2, (s2//2), 1)
    sum_1 = aten.sum.dim_IntList(view, [0])  # f32[2, (s2//2)] strides (Max(1, (s2//2)), 1)
    return sum_1


if __name__ == "__main__":
    run(graph, INPUTS)
""",
        )

    def test_a_fused_operator_says_what_it_replaced(self):
        self.assertExpectedInline(
            graph_text(fused_graph()),
            """\
# a graph: 8 nodes. Run this file to compute it on random inputs.


import torch

from mla_fx.debug.stage import run


mla_fx = torch.ops.mla_fx

INPUTS = {
    "q_1": "bf16[1, 1, 2, 4]",
    "q_rope_1": "bf16[1, 1, 2, 2]",
    "kv_1": "bf16[1, 3, 4]",
    "k_rope_1": "bf16[1, 3, 2]",
}


def graph(inputs):
    # latent_attention, by rule mla_attention, replaces 5 nodes
    #   model.py:41, layers.0: bmm view_2
    #   model.py:41, layers.0.mix: view_3
    #   model.py:42: div
    #   unknown source: clone
    attention = mla_fx.attention(inputs["q_1"], inputs["q_rope_1"], inputs["kv_1"], inputs["k_rope_1"], scale=0.5)  # (bf16[1, 1, 2, 4], f32[0])
    getitem = attention[0]  # bf16[1, 1, 2, 4]
    getitem_1 = attention[1]  # f32[0]
    return (getitem, getitem_1)


if __name__ == "__main__":
    run(graph, INPUTS)
""",
        )

    def test_every_kind_of_node_and_argument(self):
        graph = Graph()
        x = graph.placeholder("x")
        held = graph.get_attr("layers.0.weight")
        value = graph.call_method("view", (x, (2, -1)), {})
        value = graph.call_function(torch.add, (value, held), {"out": None})
        value = graph.call_function(aten.index.Tensor, (value, [None, x]))
        odd = ({"a": 1}, slice(None, x), ..., torch.strided, "two\nlines", object())
        value = graph.call_function(torch.sym_max, odd)
        graph.output((value,))
        self.assertExpectedInline(
            graph_text(graph),
            """\
# a graph: 7 nodes. Run this file to compute it on random inputs.


import torch

from mla_fx.debug.stage import run


aten = torch.ops.aten

INPUTS = {
    "x": "",
    "layers.0.weight": "",
}


def graph(inputs):
    view = inputs["x"].view((2, -1))
    add = torch.add(view, inputs["layers.0.weight"], out=None)
    index_tensor = aten.index.Tensor(add, [None, inputs["x"]])
    sym_max = torch.sym_max({'a': 1}, slice(None, inputs["x"], None), ..., torch.strided, 'two\\nlines', value('object'))
    return (sym_max,)


if __name__ == "__main__":
    run(graph, INPUTS)
""",
        )


def run_text(text):
    """The module that a text defines."""
    module = {"__name__": "dumped"}
    exec(compile(text, "dumped", "exec"), module)
    return module


@pytest.mark.parametrize("graph", [fused_graph(), traced(lambda x: x + 1, torch.ones(2))], ids=["fused", "plain"])
def test_the_text_is_python_that_assigns_every_node(graph):
    function = next(part for part in ast.parse(graph_text(graph)).body if isinstance(part, ast.FunctionDef))
    assigned = [statement.targets[0].id for statement in function.body if isinstance(statement, ast.Assign)]
    assert assigned == [node.name for node in graph.nodes if node.op == "call_function"]
    assert list(run_text(graph_text(graph))["INPUTS"]) == [node.name for node in graph.find_nodes(op="placeholder")]


def test_equal_graphs_have_equal_texts():
    assert graph_text(fused_graph()) == graph_text(fused_graph())


def test_no_value_of_a_tensor_is_shown():
    secret = torch.tensor([123456.0, 654321.0])
    graph = traced(lambda x: x * 2, secret)
    graph.owning_module.register_buffer("held", secret)
    with graph.inserting_before(graph.output_node()):
        held = graph.get_attr("held")
        graph.output_node().args = (graph.call_function(aten.add.Tensor, (held, secret)),)
    text = graph_text(graph)
    assert "123456" not in text and "654321" not in text
    assert 'inputs["held"]' in text and '"held": "f32[2]"' in text


def fill(dump, stages):
    last = None
    for number, (name, made) in enumerate(stages.items()):
        last = recorded(number, name, made, last)
        dump.stage(last, made)


def report():
    return Report(
        target="inductor",
        fused={"mla_prolog": 2, "latent_attention": 2},
        misses=[Miss("mla_prolog", "expected a | rotary embedding", "mm_4", "model.py:17", "layers.3", 4, True)],
        passes=[
            PassRecord("recognise attention", 1.25, 108, 90, Counter(mla_attention=2)),
            PassRecord("clean up", 0.04, 90, 31),
        ],
        notes=["caches written in place: 2/2, copies: 0 bytes"],
    )


class TestIndex(TestCase):
    def test_index(self):
        with TemporaryDirectory() as folder:
            dump = Dump(folder)
            captured = traced(lambda x: x + 1, torch.ones(2))
            fill(dump, {"captured": captured, "recognise attention": fused_graph(), "clean up": fused_graph()})
            dump.finish(report())
            self.assertExpectedInline(
                (dump.folder / "index.md").read_text(),
                """\
# mla_fx on inductor

| pass | ms | fired | nodes before -> after | graph |
| --- | ---: | --- | --- | --- |
| captured |  |  | 3 | [00_captured.py](00_captured.py) |
| recognise attention | 1.2 | mla_attention x2 | 108 -> 90 | [01_recognise_attention.py](01_recognise_attention.py) |
| clean up | 0.0 |  | 90 -> 31 | [01_recognise_attention.py](01_recognise_attention.py) |

## Fused

- mla_prolog x2
- latent_attention x2

## Nearest misses

- mla_prolog: expected a | rotary embedding (at mm_4, model.py:17, layers.3)

## Notes

- caches written in place: 2/2, copies: 0 bytes
""",
            )


def test_stages_are_numbered_files_that_parse(tmp_path):
    dump = Dump(str(tmp_path / "deep" / "dump"))
    other = traced(lambda x: x + 1, torch.ones(2))
    fill(dump, {"captured": fused_graph(), "choose absorbed or expanded": other, "compiled": ["x = Add(y)"]})
    dump.finish(report())
    files = sorted(path.name for path in dump.folder.iterdir())
    stages = ["00_captured.py", "01_choose_absorbed_or_expanded.py", "02_compiled.txt"]
    assert files == [*stages, "graph.json", "index.md", "page.html"]
    for path in dump.folder.glob("*.py"):
        ast.parse(path.read_text())


def test_every_graph_has_a_folder_of_its_own(tmp_path):
    (tmp_path / "graph_001").mkdir()
    (tmp_path / "graph_002").write_text("in the way")
    names = [Dump(str(tmp_path)).folder.name for _ in range(3)]
    assert names == ["graph_000", "graph_003", "graph_004"]


@pytest.mark.parametrize("name", ["../../escape", "/absolute/path", "..", "", "a\0b", "CON: x|y", "x" * 500])
def test_nothing_is_written_outside_the_folder(tmp_path, name):
    dump = Dump(str(tmp_path / "dump"))
    fill(dump, {name: fused_graph()})
    dump.finish(report())
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parent for path in written} == {dump.folder}
    stage, *others = sorted(path.name for path in written)
    assert re.fullmatch(r"00_[a-z0-9_]{1,80}\.py", stage) and others == ["graph.json", "index.md", "page.html"]


def test_a_stage_is_named_after_its_pass_even_when_its_name_breaks_the_line(tmp_path):
    dump = Dump(str(tmp_path))
    fill(dump, {"one\nimport os": fused_graph()})
    (path,) = dump.folder.glob("*.py")
    imports = [part for part in ast.parse(path.read_text()).body if isinstance(part, ast.Import)]
    assert [name.name for part in imports for name in part.names] == ["torch"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"The dump folder '.*file' cannot be written: "):
        Dump(str(tmp_path / "file"))


def test_a_folder_that_disappears_is_named(tmp_path):
    dump = Dump(str(tmp_path))
    dump.folder.rmdir()
    with pytest.raises(OSError, match=re.escape(str(Path(tmp_path) / "graph_000"))):
        fill(dump, {"captured": fused_graph()})
