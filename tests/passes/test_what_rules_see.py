"""Rules and readings access a graph in ways that are recorded, so that a replay compares everything that a rule has
seen."""

import ast
import inspect
from pathlib import Path

import pytest

import mla_fx
from mla_fx import readings
from mla_fx.driver import discovery
from mla_fx.readings import calls as asked

ROOT = Path(inspect.getfile(mla_fx)).parent
PATTERNS = Path(inspect.getfile(type(discovery.rules()[0]))).parent
READINGS = [path for path in Path(readings.__path__[0]).rglob("*.py") if path.stem != "sizes"]  # which sees no nodes
WORDS = [ROOT / "matching" / f"{name}.py" for name in ("match", "pattern", "words")]
OPERANDS = [ROOT / "rewriting" / f"{name}.py" for name in ("caches", "materialize", "operands")]
FILES = sorted({*PATTERNS.rglob("*.py"), *READINGS, *WORDS, *OPERANDS})

# Arguments are read and recorded here.
NOTING = {"args_of", "options_of", "operands_of"}
# Only here readers of values are looked up, to find where to begin; what is found is then read like anything else.
# Whatever depends on who reads a value is decided where a replacement is applied.
FINDING = {"anchors", "written_alike", "_guards", "_first_result", "products", "_rounded", "readers"}
FINDING |= {"_users", "logarithms", "merges", "feeds_alone", "results", "_writes", "_following", "weights"}
# Anchors that this refuses come first, before there is a rewrite to repeat.
FINDING |= {"check_read_alone"}
# The same for the nearest readers, which `readers` finds.
NEAREST = {"first_reader", "ends_of_sums", "logarithms", "weights", "is_softmax", "division", "weighted_sum"}
# Whether a rewrite pays depends on who else reads exponentials; whether it is right does not.
NEAREST |= {"_alone"}
# A plan's check looks at these, and a replay compares what it looked at.
NEAREST |= {"_rounding_to"}
# A replay checks again whether an attribute is a literal. Names of sizes are for messages.
FINDING |= {"_is_literal", "_names"}
# A call's layout is read here, where a replacement is applied.
LAYING_OUT = {"_is_whole", "_strides_and_offset"}

SEEN_IN = {
    **dict.fromkeys(("args", "kwargs", "all_input_nodes", "_input_nodes"), NOTING),
    **dict.fromkeys(("users", "prev", "next", "find_nodes", "computed_with"), FINDING),
    "readers": NEAREST,
    **dict.fromkeys(("storage_offset", "untyped_storage", "data_ptr", "requires_grad", "_base"), LAYING_OUT),
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_nothing_is_seen_that_a_replay_does_not_compare(path):
    for function in ast.walk(ast.parse(path.read_text())):
        if not isinstance(function, (ast.FunctionDef, ast.Lambda)):
            continue
        name = getattr(function, "name", "a lambda")
        for node in ast.walk(function):
            asked = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if asked in ("computed_with", "readers") or isinstance(node, ast.Attribute):
                assert name in SEEN_IN.get(asked, {name}), f"{path.name}:{node.lineno}: {name} asks for {asked}"


def test_what_is_asked_for_is_noted():
    from torch.fx import Graph

    graph = Graph()
    x = graph.placeholder("x")
    calls = [graph.call_function(max, (x,), {"key": None}) for _ in range(4)]
    with asked.noting() as noted:
        asked.args_of(calls[0])
        assert asked.options_of(calls[1]) == {"key": None}
        assert asked.operands_of(calls[2]) == [x]
    asked.args_of(calls[3])
    assert noted == set(calls[:3])
