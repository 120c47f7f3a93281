"""The wording of reports and misses: what users read when something did not fuse."""

import json
from collections import Counter
from dataclasses import fields, replace

import pytest
import torch
from expecttest import TestCase
from torch.fx.experimental.proxy_tensor import make_fx

import mla_fx.ops  # noqa: F401  registers torch.ops.mla_fx
from mla_fx.debug.memory import MemoryUse
from mla_fx.debug.report import Miss, PassRecord, Report
from mla_fx.graph.provenance import count_fused, fused_name, module_of, source_of


def miss(**changes):
    told = {"node": "mm_4", "source": "model.py:17", "module": "layers.3.self_attn", "depth": 4, "looks_like_mla": True}
    return Miss("mla_prolog", "expected a rotary embedding, found mul.Tensor", **{**told, **changes})


def report(**parts):
    return Report(target="inductor", passes=[PassRecord("recognise", 1.25), PassRecord("clean up", 0.5)], **parts)


class TestWording(TestCase):
    def test_a_miss(self):
        self.assertExpectedInline(
            str(miss()),
            """mla_prolog: expected a rotary embedding, found mul.Tensor (at mm_4, model.py:17, layers.3.self_attn)""",
        )

    def test_a_miss_of_unknown_origin(self):
        self.assertExpectedInline(
            str(miss(source="", module="")),
            """mla_prolog: expected a rotary embedding, found mul.Tensor (at mm_4)""",
        )

    def test_a_miss_without_a_place(self):
        self.assertExpectedInline(
            str(miss(node="", source="", module="")),
            """mla_prolog: expected a rotary embedding, found mul.Tensor""",
        )

    def test_nothing_fused(self):
        self.assertExpectedInline(str(report()), """mla_fx on inductor: fused nothing in 1.8 ms""")

    def test_fused_with_notes_and_misses(self):
        text = str(
            report(
                fused={"mla_prolog": 61, "latent_attention": 61},
                notes=["caches written in place: 122/122, copies: 0 bytes"],
                misses=[miss(), miss(node="mm_9", module="layers.4.self_attn"), miss(source="model.py:20")],
            )
        )
        self.assertExpectedInline(text, """\
mla_fx on inductor: fused mla_prolog x61, latent_attention x61 in 1.8 ms
  caches written in place: 122/122, copies: 0 bytes
nearest misses:
  mla_prolog: expected a rotary embedding, found mul.Tensor (at mm_4, model.py:17, layers.3.self_attn); 2 times, the last in layers.4.self_attn
  mla_prolog: expected a rotary embedding, found mul.Tensor (at mm_4, model.py:20, layers.3.self_attn)""")  # noqa: E501  # the text as it is printed

    def test_pieces_beside_operators(self):
        found = report(fused={"mla_prolog": 2}, pieces={"norm_linear": 1, "rope": 1})
        self.assertExpectedInline(
            str(found), """mla_fx on inductor: fused mla_prolog x2, and also norm_linear x1, rope x1 in 1.8 ms"""
        )
        self.assertExpectedInline(
            Report.merged([found] * 2).headline,
            """mla_fx on inductor: fused mla_prolog x4, and also norm_linear x2, rope x2 in 2 graphs""",
        )

    def test_memory_before_the_notes(self):
        alike = [MemoryUse(61, 61 * 18 * 2**20, 0, 27 * 2**20, 2586 * 2**20, 0)] * 2
        text = str(report(fused={"latent_attention": 61}, memory=alike, notes=["caches written in place"]))
        self.assertExpectedInline(text, """\
mla_fx on inductor: fused latent_attention x61 in 1.8 ms
  memory, per layer of 61: 0.0 KiB of copies of weights, 18.0 MiB of caches read; temporaries about 27.0 MiB, unfused 2586.0 MiB
  caches written in place""")  # noqa: E501  # the text as it is printed

    def test_two_patterns_that_failed_alike(self):
        layers = [miss(), miss(node="mm_9", module="layers.4.self_attn")]
        others = [replace(one, pattern="kv_rmsnorm_rope_cache") for one in layers]
        self.assertExpectedInline(str(report(misses=[*layers, *others])), """\
mla_fx on inductor: fused nothing in 1.8 ms
nearest misses:
  mla_prolog, kv_rmsnorm_rope_cache: expected a rotary embedding, found mul.Tensor (at mm_4, model.py:17, layers.3.self_attn); 2 times, the last in layers.4.self_attn""")  # noqa: E501  # the text as it is printed

    def test_equal_misses_of_one_module(self):
        self.assertExpectedInline(
            str(report(misses=[miss(), miss()])),
            """\
mla_fx on inductor: fused nothing in 1.8 ms
nearest misses:
  mla_prolog: expected a rotary embedding, found mul.Tensor (at mm_4, model.py:17, layers.3.self_attn); 2 times""",
        )


def test_time_is_the_sum_of_the_passes():
    assert report().milliseconds == 1.75


def test_reports_do_not_share_anything():
    first, second = Report(), Report()
    first.fused["mla_prolog"] = 1
    first.notes.append("noted")
    assert (second.fused, second.notes) == ({}, [])


def test_several_graphs_make_one_report():
    first = report(fused={"mla_prolog": 1}, misses=[miss()], graphs={"captured": "a"})
    second = report(fused={"mla_prolog": 2, "latent_attention": 1}, notes=["noted"], graphs={"captured": "b"})
    whole = Report.merged([first, second])
    assert whole.fused == {"mla_prolog": 3, "latent_attention": 1}
    assert (whole.misses, whole.notes, whole.target) == ([miss()], ["noted"], "inductor")
    assert whole.graphs == {"graph 0: captured": "a", "graph 1: captured": "b"}
    assert whole.milliseconds == 3.5


def test_the_text_of_several_graphs_has_a_line_for_each():
    parts = [report(has_attention=True, fused={"mla_prolog": 1})] * 2 + [report(notes=["nothing here"])] * 2
    assert str(Report.merged([*parts, report(has_attention=True)])).splitlines() == [
        "mla_fx on inductor: fused mla_prolog x2 in 5 graphs in 8.8 ms",
        "  graphs 0, 1: fused mla_prolog x1",
        "  graphs 2, 3: fused nothing, no attention",
        "  graph 4: fused nothing",
        "  nothing here (2 times)",
    ]


def test_the_parts_of_parts_are_parts():
    one, two, three = (report(fused={name: 1}) for name in ("mla_prolog", "rope", "rms_norm"))
    assert Report.merged([Report.merged([one, two]), three]).parts == [one, two, three]
    assert Report.merged([one]).parts == []


# --- for programs and notebooks ---------------------------------------------------------------------------------------


def filled():
    memory = MemoryUse(1, None, 2, 3, 4, 0)
    one = report(fused={"mla_prolog": 61}, misses=[miss()] * 3, memory=[memory], modules={"mla_prolog": ["layers.0"]})
    one.passes[0].fired["mla_prolog"] += 1
    one.graphs["captured"] = "x" * 300_000
    return one


def test_the_repr_is_a_line():
    assert repr(filled()) == "<Report on inductor: fused mla_prolog x61; 3 misses>"
    assert repr(Report.merged([filled()] * 2)) == "<Report on inductor: fused mla_prolog x122 in 2 graphs; 6 misses>"
    assert repr(Report()) == "<Report on no target: fused nothing; 0 misses>"


@pytest.mark.parametrize("made", [filled(), Report.merged([filled()] * 2)], ids=["one", "several"])
def test_a_report_as_json(made):
    """Every field under its name but the texts, with those of each part."""
    told = json.loads(json.dumps(made.to_dict()))
    assert set(told) == {part.name for part in fields(Report)} - {"graphs"} | {"layers"}
    assert told["fused"] == made.fused
    assert told["misses"][0] == vars(miss())
    assert told["passes"][0]["fired"] == {"mla_prolog": 1}
    assert told["memory"][0]["temporaries"] == 3
    assert [part["fused"] for part in told["parts"]] == [{"mla_prolog": 61}] * len(made.parts)
    assert len(json.dumps(told)) < 20_000


def test_no_graph_at_all_makes_a_report():
    assert Report.merged([]).fused == {}
    assert Report.merged([report()]).fused == {}


def latent_attention(query, query_rope, kv_cache, kr_cache):
    return torch.ops.mla_fx.attention(query, query_rope, kv_cache, kr_cache, None, scale=0.5)[0]


SHAPES = (1, 1, 2, 4), (1, 1, 2, 2), (1, 3, 4), (1, 3, 2)


def test_fused_operators_are_counted_by_name():
    def twice(*inputs):
        return latent_attention(*inputs) + latent_attention(*inputs)

    graph = make_fx(twice, tracing_mode="fake")(*map(torch.randn, SHAPES)).graph
    assert count_fused(graph) == {"latent_attention": 2}
    assert Counter(map(fused_name, graph.nodes))[None] == len(graph.nodes) - 2


def test_an_operator_and_its_in_place_form_share_a_name():
    graph = torch.fx.Graph()
    nodes = [graph.call_function(op.default) for op in (torch.ops.mla_fx.mla_prolog, torch.ops.mla_fx.mla_prolog_)]
    assert [fused_name(node) for node in nodes] == ["mla_prolog", "mla_prolog"]


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        (None, ""),
        ("no frames here", ""),
        ('  File "a.py", line 3, in forward\n    x @ w\n  File "b.py", line 5, in attend\n    y', "b.py:5"),
        ('  File "with space.py", line 12, in <lambda>\n    x', "with space.py:12"),
    ],
)
def test_the_source_is_the_innermost_line(trace, expected):
    node = torch.fx.Graph().placeholder("x")
    node.meta["stack_trace"] = trace
    assert source_of(node) == expected


def test_the_module_is_the_innermost_one():
    node = torch.fx.Graph().placeholder("x")
    assert module_of(node) == ""
    node.meta["nn_module_stack"] = {"a": ("layers.0", object), "b": ("layers.0.self_attn", object)}
    assert module_of(node) == "layers.0.self_attn"
    assert (module_of(None), source_of(None)) == ("", "")


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("L['self'].model.layers.3.self_attn", "model.layers.3.self_attn"),
        ("L['fn'].layers.3", "layers.3"),
        ("G['model'].layers.3", "model.layers.3"),
        ("L['self']", ""),
    ],
)
def test_a_module_is_named_as_its_user_writes_it(path, expected):
    node = torch.fx.Graph().placeholder("x")
    node.meta["nn_module_stack"] = {"a": (path, object)}
    assert module_of(node) == expected
