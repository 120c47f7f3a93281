"""Reports by layers: equal layers are one row, in text, in tables and in notebooks."""

import io
import json

import pytest
import torch
from expecttest import TestCase
from rich.console import Console
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.debug.dump import kinds, layers_of
from mla_fx.debug.memory import MemoryUse
from mla_fx.debug.outcomes import layer_of, outcomes_of, rows_of
from mla_fx.debug.report import Miss, Report

BIASED = "expected a product without a bias, found addmm"


def miss(layer, *, depth=4, reason=BIASED, source="model.py:17", looks_like_mla=True):
    module = f"model.layers.{layer}.self_attn.q_b_proj"
    return Miss("mla_prolog", reason, f"addmm_{layer}", source, module, depth, looks_like_mla)


def fused(*layers, name="mla_prolog"):
    return {name: [f"model.layers.{layer}.self_attn" for layer in layers]}


def report(modules, misses=()):
    counts = {name: len(paths) for name, paths in modules.items()}
    return Report(target="inductor", fused=counts, modules=modules, misses=list(misses), has_attention=True)


def named(found):
    return [row.layers for row in rows_of(found.layers)]


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model.layers.3.self_attn", "model.layers.3"),
        ("layers.3.self_attn.q_b_proj", "layers.3"),
        ("layers.3.projections.0", "layers.3"),
        ("stages.1.layers.3.attention", "stages.1.layers.3"),
        ("3.attention", "3"),
        ("layers.3", "layers.3"),
        ("self_attn", "self_attn"),
        ("", ""),
    ],
)
def test_the_layer_of_a_module(path, layer):
    assert layer_of(path) == layer


@pytest.mark.parametrize(
    ("layers", "row"),
    [
        (range(61), "model.layers.0 … 60 (61)"),
        ([0, 1], "model.layers.0, 1 (2)"),
        ([10, 9, 2, 0, 1, 11, 12, 5], "model.layers.0 … 2, 5, 9 … 12 (8)"),
        ([7], "model.layers.7"),
    ],
    ids=str,
)
def test_equal_layers_are_one_row(layers, row):
    assert named(report(fused(*layers))) == [row]


def test_layers_that_differ_have_rows_of_their_own():
    """In what fused, in the reason, and in the line; not in the numbers of nodes and layers."""
    misses = [miss(2), miss(4), miss(3, source="model.py:18"), miss(5, reason="other")]
    assert named(report(fused(0, 1, 1), misses)) == [
        "model.layers.0",
        "model.layers.1",
        "model.layers.2, 4 (2)",
        "model.layers.3",
        "model.layers.5",
    ]


def test_the_nearest_miss_of_a_layer_is_shown():
    """The deepest, but first of all one that looks like MLA."""
    deeper = miss(0, depth=9, looks_like_mla=False)
    (outcome,) = outcomes_of(report({}, [miss(0, depth=2), miss(0, depth=3, reason="deep"), deeper]))["model.layers.0"]
    assert (outcome.fused, outcome.missed.reason) == ((), "deep")


def test_what_fused_and_what_did_not_are_shown_together():
    (outcome,) = outcomes_of(report(fused(0, name="latent_attention"), [miss(0)]))["model.layers.0"]
    assert (outcome.fused, outcome.missed) == ((("latent_attention", 1),), miss(0))


def several():
    prompt = {**fused(*range(3), name="kv_rmsnorm_rope_cache"), **fused(*range(3), name="mla_attention")}
    token = {**fused(0, 1), **fused(0, 1, 2, name="latent_attention")}
    return Report.merged([report(prompt), report(token, [miss(2)]), report(token, [miss(2)])])


def test_graphs_with_the_same_outcome_share_it():
    told = json.loads(json.dumps(several().to_dict()))["layers"]
    assert list(told) == [f"model.layers.{layer}" for layer in range(3)]
    assert told["model.layers.2"] == [
        {"graphs": [0], "fused": {"kv_rmsnorm_rope_cache": 1, "mla_attention": 1}, "missed": None},
        {
            "graphs": [1, 2],
            "fused": {"latent_attention": 1},
            "missed": {
                "pattern": "mla_prolog",
                "reason": f"{BIASED} (at addmm_2, model.py:17, model.layers.2.self_attn.q_b_proj)",
            },
        },
    ]


def test_layers_that_others_represent():
    traced = report(fused(0, 3), [miss(3)])
    groups = {0: range(3), 3: range(3, 6)}
    paths = {f"model.layers.{first}": [f"model.layers.{layer}" for layer in group] for first, group in groups.items()}
    found = traced.standing_for(paths)
    assert (found.fused, found.modules) == ({"mla_prolog": 6}, fused(*range(6)))
    assert [miss.module for miss in found.misses] == [f"model.layers.{layer}.self_attn.q_b_proj" for layer in (3, 4, 5)]
    assert named(found) == ["model.layers.0 … 2 (3)", "model.layers.3 … 5 (3)"]
    assert traced.standing_for({}) is traced


def test_layers_that_others_represent_in_several_graphs():
    """The rows, the memory, and the counts speak of the same layers."""
    one = report(fused(0, 1))
    one.memory = [MemoryUse(2, 2048, 0, None, None, 0)]
    equal = [f"model.layers.{layer}" for layer in range(1, 7)]
    whole = Report.merged([one, report({})]).standing_for({"model.layers.1": equal})
    assert named(whole) == ["model.layers.0 … 6 (7)"]
    assert whole.fused == whole.parts[0].fused == {"mla_prolog": 7}
    read = "0.0 KiB of copies of weights, 1.0 KiB of caches read"
    assert str(whole.memory[0]) == f"memory, per layer of the 2 traced for 7: {read}"


def test_memory_of_layers_that_are_all_traced():
    one = report(fused(0))
    one.memory = [MemoryUse(1, 2048, 0, None, None, 0)]
    found = one.standing_for({"model.layers.8": ["model.layers.8", "model.layers.9"]})
    assert str(found.memory[0]).startswith("memory, per layer of 1: ")


@pytest.mark.parametrize(
    ("modules", "shown"),
    [
        (["", "attention"], {"the model itself"}),
        (["", "layers.0", "layers.1", ""], {"layers.0", "layers.1", "outside the layers"}),
    ],
)
def test_a_model_without_layers_is_named_on_the_page(modules, shown):
    """It has nothing that anything could be outside of."""

    def function(x):
        for _ in range(6 * len(modules)):
            x = x.exp()
        return x

    graph = make_fx(function)(torch.randn(2)).graph
    for place, node in enumerate(graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)):
        node.meta["nn_module_stack"] = {"a": (modules[place // 6], object)}
    found = layers_of(graph)
    assert {kind["paths"] for kind in kinds(found, found)} == shown


def test_the_root_module_is_named_in_a_table():
    assert named(report({"mla_prolog": [""]})) == ["the model itself"]


class TestText(TestCase):
    maxDiff = None

    def test_a_table(self):
        written = io.StringIO()
        Console(file=written, width=100, color_system=None).print(several())
        text = "\n".join(line.rstrip() for line in written.getvalue().splitlines())
        self.assertExpectedInline(text, """\
mla_fx on inductor: fused kv_rmsnorm_rope_cache x3, mla_attention x3, mla_prolog x4,
latent_attention x6 in 3 graphs

  layers                  fused                                 why not more
 ──────────────────────────────────────────────────────────────────────────────────────────────────
  model.layers.0, 1 (2)   kv_rmsnorm_rope_cache,
                          mla_attention in graph 0
                          mla_prolog, latent_attention in
                          graphs 1, 2
  model.layers.2          kv_rmsnorm_rope_cache,
                          mla_attention in graph 0
                          latent_attention in graphs 1, 2       mla_prolog: expected a product
                                                                without a bias, found addmm (at
                                                                addmm_2, model.py:17,
                                                                model.layers.2.self_attn.q_b_proj)
""")

    def test_text(self):
        self.assertExpectedInline(str(several()), """\
mla_fx on inductor: fused kv_rmsnorm_rope_cache x3, mla_attention x3, mla_prolog x4, latent_attention x6 in 3 graphs in 0.0 ms
  graph 0: fused kv_rmsnorm_rope_cache x3, mla_attention x3
  graphs 1, 2: fused mla_prolog x2, latent_attention x3
  model.layers.0, 1 (2): kv_rmsnorm_rope_cache, mla_attention in graph 0; mla_prolog, latent_attention in graphs 1, 2
  model.layers.2: kv_rmsnorm_rope_cache, mla_attention in graph 0; latent_attention in graphs 1, 2
nearest misses:
  mla_prolog: expected a product without a bias, found addmm (at addmm_2, model.py:17, model.layers.2.self_attn.q_b_proj); 2 times""")  # noqa: E501  # the text as it is printed

    def test_html(self):
        found = report(fused(0), [miss(1, reason="a < b & c")])
        found.notes.append("<noted>")
        style = ' style="text-align: left; padding: 0.3em 0.6em; border: 1px solid"'
        html = found._repr_html_()
        assert html.count(style) == html.count("<td") + html.count("<th") == 9
        self.assertExpectedInline(html.replace(style, "").replace("<tr>", "\n<tr>"), """\
<table style="border-collapse: collapse"><caption style="text-align: left">mla_fx on inductor: fused mla_prolog x1</caption>
<tr><th>layers</th><th>fused</th><th>why not more</th></tr>
<tr><td>model.layers.0</td><td>mla_prolog</td><td></td></tr>
<tr><td>model.layers.1</td><td>nothing</td><td>mla_prolog: a &lt; b &amp; c (at addmm_1, model.py:17, model.layers.1.self_attn.q_b_proj)</td></tr></table><ul><li>&lt;noted&gt;</li></ul>""")  # noqa: E501  # the text as it is written


def test_nothing_compiled():
    assert str(Report()) == "mla_fx: nothing was compiled"
    assert Report().layers == {}
    assert "nothing was compiled" in Report()._repr_html_()


def test_brackets_in_a_reason_are_no_markup():
    written = io.StringIO()
    Console(file=written, width=200).print(report({}, [miss(0, reason="x[bold]y")]))
    assert "x[bold]y" in written.getvalue()


def test_without_rich_a_table_is_a_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"this needs rich; pip install 'mla_fx\[demo\]' brings it"):
        several().table()
    assert "<table " in several()._repr_html_()
