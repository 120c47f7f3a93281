"""The pattern language: every way to match, choices taken back, and the nearest miss."""

import inspect
import itertools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.errors import NoMatch
from mla_fx.matching.match import Match, NearestMiss
from mla_fx.matching.pattern import AttentionPattern, CallPattern, Operand
from mla_fx.matching.words import bound, contract, either, rms_norm, rope, stored, var
from mla_fx.readings.attention import anchors, attention
from mla_fx.readings.reading import Reading

A, X, W, U, G = var("a"), var("x"), var("w"), var("u"), var("g")


def trace(function, *shapes):
    """The graph of `function`, its inputs named like the arguments."""
    inputs = [torch.randn(shape) for shape in shapes]
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    for node, name in zip(graph.find_nodes(op="placeholder"), inspect.signature(function).parameters, strict=False):
        node._rename(name)
    return graph


def match(pattern, function, *shapes):
    """Every match of the value that `function` returns, and the nearest miss."""
    return match_all({"out": pattern}, function, *shapes)


def match_all(operands, function, *shapes):
    result = trace(function, *shapes).output_node().args[0]
    results = result if isinstance(result, (list, tuple)) else [result]
    nearest = NearestMiss()
    arguments = dict(zip(operands, results, strict=True))
    letters = iter("abcdefghijkl")
    named = {
        name: Operand("".join(itertools.islice(letters, arguments[name].meta["val"].ndim)), pattern)
        for name, pattern in operands.items()
    }
    return list(CallPattern(named).bindings(None, arguments, nearest)), nearest


def bound_to(found):
    """Variable -> the input of the function that it is bound to."""
    return {name: element.node.name for name, element in found.elements.items()}


def normed(x, g, epsilon=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon) * g


# --- words -------------------------------------------------------------------------------------------------------


def test_a_variable_is_any_element_seen_through_views():
    (found,), _ = match(X, lambda x: x.reshape(12).clone(), (3, 4))
    assert bound_to(found) == {"x": "x"}


def test_a_product_matches_both_ways_around():
    found, _ = match(contract(A, X, name="p"), lambda a, x: a @ x, (3, 4), (4, 5))
    assert [bound_to(way) for way in found] == [{"a": "a", "x": "x"}, {"a": "x", "x": "a"}]
    assert found[0].readings["p"].factor == 1.0


def test_a_product_of_a_norm_is_found_on_either_side():
    pattern = contract(W, rms_norm(X, G, name="norm"), name="p")
    for function in (lambda x, g, w: normed(x, g) @ w, lambda x, g, w: (w.t() @ normed(x, g).t()).t()):
        (found,), _ = match(pattern, function, (3, 4), (4,), (4, 5))
        assert bound_to(found) == {"x": "x", "g": "g", "w": "w"}


def test_a_product_without_a_name_has_no_factor():
    (*_, found), _ = match(contract(A, X), lambda a, x: a @ x, (3, 4), (4, 5))
    assert bound_to(found) == {"a": "x", "x": "a"}
    found, nearest = match(contract(A, X), lambda a, x: a @ x * 2, (3, 4), (4, 5))
    assert (found, str(nearest.miss.reason)) == ([], "a product is multiplied by a number, 2")


def test_a_variable_may_have_to_be_a_parameter():
    pattern = contract(A, var("x", is_parameter=True), name="p")
    found, nearest = match(pattern, lambda a, x: a.sin() @ x, (3, 4), (4, 5))
    assert [bound_to(way)["x"] for way in found] == ["x"]
    assert str(nearest.miss.reason) == "x is computed in the graph, expected a parameter"


# --- letters: those of the value are a and b ---------------------------------------------------------------------

UP = contract(var("x", "a n c"), var("u", "n v c"), over="c")
OUT = contract(UP, var("o", "n v b"))


def sizes(found, letters):
    return [axis.size for axis in found.settled().axes(letters)]


def heads(x, u, o):
    return torch.einsum("tnc,nvc->tnv", x, u).flatten(1) @ o.flatten(0, 1)


def test_a_letter_is_what_is_left_of_an_operand():
    shapes = (7, 3, 5), (3, 4, 5), (3, 4, 6)
    found = next(way for way in match(OUT, heads, *shapes)[0] if bound_to(way) == {"x": "x", "u": "u", "o": "o"})
    assert [sizes(found, letter) for letter in "ncv1"] == [[3], [5], [4], []]
    assert sizes(found, "nvc") == [3, 4, 5]
    laid_out = found.settled().tensor("o", "nv b").value
    assert (laid_out.target, laid_out.args[1]) == (torch.ops.aten.reshape.default, [12, 6])
    with pytest.raises(NoMatch, match="nothing that matched has a dimension z"):
        sizes(found, "z")


def test_a_letter_names_as_many_axes_as_a_dimension_was_made_of():
    """Heads are two dimensions."""
    ways, _ = match(
        OUT, lambda x, u, o: torch.einsum("tghc,ghvc,ghve->te", x, u, o), (7, 3, 2, 5), (3, 2, 4, 5), (3, 2, 4, 6)
    )
    (found, *_) = (way for way in ways if bound_to(way) == {"x": "x", "u": "u", "o": "o"})
    assert sizes(found, "n") == [3, 2]


def test_letters_that_no_operand_has_alone_cannot_be_told_apart():
    pattern = contract(var("x", "a n c"), var("u", "n c b"))
    (found, *_), _ = match(pattern, lambda x, u: torch.einsum("tnc,nce->te", x, u), (7, 3, 5), (3, 5, 6))
    with pytest.raises(NoMatch, match="n and c of x cannot be told apart: no operand has one of them alone"):
        sizes(found, "n")


def test_an_operand_may_repeat_along_a_dimension():
    """One weight for all heads: n is in x and o alone."""
    ways, _ = match(OUT, lambda x, u, o: (x @ u).flatten(1) @ o.flatten(0, 1), (7, 3, 5), (5, 4), (3, 4, 6))
    (found, *_) = (way for way in ways if bound_to(way) == {"x": "x", "u": "u", "o": "o"})
    assert [sizes(found, letter) for letter in "ncv"] == [[3], [5], [4]]


def test_bound_names_an_element_that_has_a_pattern_too():
    pattern = contract(bound("low", contract(X, W, name="down")), U, name="up")
    found, _ = match(pattern, lambda x, w, u: (x @ w) @ u, (3, 4), (4, 2), (2, 5))
    assert {way.elements["low"].node.name for way in found} == {"mm"}


def test_alternatives_are_all_tried_and_the_tag_says_which():
    pattern = either("rank", low=contract(X, W, name="p"), full=A)
    found, _ = match(pattern, lambda x, w: x @ w, (3, 4), (4, 5))
    assert [way.choices["rank"] for way in found] == ["low", "low", "full"]
    (only,), _ = match(pattern, lambda x: x.sin(), (3, 4))
    assert only.choices == {"rank": "full"}


def test_rows_that_enter_a_cache_or_are_used_as_they_are():
    for kind, function in {
        "append": lambda cache, x: torch.cat([cache, x], 1),
        "write": lambda cache, x: cache.slice_scatter(x, 1, 2, 4),
        "none": lambda cache, x: x.clone(),
    }.items():
        (found,), _ = match(stored(X, name="kept"), function, (1, 4, 6), (1, 2, 6))
        assert (found.choices["kept"], bound_to(found)) == (kind, {"x": "x"})


def test_a_rotation_runs_along_the_dimension_that_the_match_names():
    def rotated(x, cos, sin):
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    pattern = rope(X, name="turn", along=lambda match: match.readings["out.axes"].dims[-1].axis)
    found, _ = match(pattern, rotated, (3, 8), (3, 4), (3, 4))
    assert {"x": "x"} in [bound_to(way) for way in found]
    assert found[0].readings["turn"].layout == "half_half"


# --- one name, one tensor ----------------------------------------------------------------------------------------


def test_a_variable_used_twice_is_one_tensor():
    operands = {"left": contract(X, W, name="left"), "right": contract(X, U, name="right")}
    found, _ = match_all(operands, lambda x, w, u: (x @ w, x @ u), (3, 4), (4, 5), (4, 6))
    assert [bound_to(way) for way in found] == [{"x": "x", "w": "w", "u": "u"}]


def test_two_tensors_do_not_share_a_name():
    operands = {"left": contract(X, W, name="left"), "right": contract(X, U, name="right")}
    found, nearest = match_all(operands, lambda x, y, w, u: (x @ w, y @ u), (3, 4), (3, 4), (4, 5), (4, 6))
    assert not found
    assert nearest.miss.reason == "x is not one tensor: x in one place and y in another"
    assert nearest.miss.node.name == "y"


@pytest.mark.parametrize(
    "second",
    [lambda x: x.flip(0), lambda x: x * 2, lambda x: torch.cat([x[1:], x[:1]])],
    ids=["reversed", "doubled", "rolled"],
)
def test_one_tensor_read_in_two_ways_does_not_share_a_name(second):
    found, _ = match_all({"left": X, "right": X}, lambda x: (x.clone(), second(x)), (4, 4))
    assert not found


def test_one_part_of_a_tensor_is_not_another():
    found, nearest = match_all({"left": X, "right": X}, lambda x: (x[:, :2].clone(), x[:, 2:].clone()), (4, 4))
    assert not found
    assert nearest.miss.reason == "x is read in two different ways"


def test_one_reading_used_twice_is_one_reading():
    operands = {"left": rms_norm(X, G, name="norm"), "right": rms_norm(X, G, name="norm")}
    same, _ = match_all(operands, lambda x, g: (normed(x, g), normed(x, g)), (3, 4), (4,))
    other, _ = match_all(operands, lambda x, g: (normed(x, g), normed(x, g, epsilon=0.5)), (3, 4), (4,))
    assert len(same) == 1
    assert not other, "two norms with different epsilons were read as one"


def test_one_tag_used_twice_is_one_choice():
    latent = either("rank", low=contract(X, W, name="down"), full=X)
    mixed, _ = match_all({"left": latent, "right": latent}, lambda x, w: (x @ w, x.clone()), (3, 4), (4, 4))
    assert not mixed, "one operand was read as low rank, the other as full, under one tag"


# --- backtracking ------------------------------------------------------------------------------------------------


def test_a_choice_that_fails_later_is_taken_back():
    operands = {"left": contract(A, X, name="left"), "right": contract(X, W, name="right")}
    found, _ = match_all(operands, lambda a, x, w: (x.t() @ a, x @ w), (3, 4), (3, 5), (5, 6))
    assert [bound_to(way) for way in found] == [{"a": "a", "x": "x", "w": "w"}]


SCORES = AttentionPattern(
    scores=(
        contract(var("q"), contract(var("latent"), var("up"), name="keys"), name="nope"),
        contract(var("q_rope"), var("k_rope"), name="rope"),
    ),
    value=contract(var("latent"), var("down"), name="values"),
)
SHAPES = {"q": (3, 4), "latent": (5, 6), "up": (6, 4), "q_rope": (3, 2), "k_rope": (5, 2), "down": (6, 7)}


def match_attention(function, pattern=SCORES):
    graph = trace(function, *SHAPES.values())
    (anchor,) = anchors(graph)
    found, nearest = attention(anchor), NearestMiss()
    return list(pattern.bindings(found, found.scores, nearest)), nearest


@pytest.mark.parametrize("rope_first", [False, True])
def test_the_terms_of_the_scores_come_in_any_order(rope_first):
    def function(q, latent, up, q_rope, k_rope, down):
        scores = [q @ (latent @ up).t(), q_rope @ k_rope.t()]
        first, second = reversed(scores) if rope_first else scores
        return (first + second).softmax(-1) @ (latent @ down)

    found, _ = match_attention(function)
    assert {name: name for name in SHAPES} in [bound_to(way) for way in found]
    assert all(bound_to(way)["latent"] == "latent" for way in found)


def test_a_number_of_scores_that_cannot_match_is_the_reason():
    def function(q, latent, up, q_rope, k_rope, down):
        return (q @ (latent @ up).t()).softmax(-1) @ (latent @ down)

    found, nearest = match_attention(function)
    assert not found
    assert nearest.miss.reason == "the scores are one product of query and key, not a nope and a rope part"


# --- misses ------------------------------------------------------------------------------------------------------


def test_the_deepest_miss_is_kept():
    pattern = contract(rms_norm(contract(X, W, name="down"), G, name="norm"), U, name="up")
    shapes = (3, 4), (4, 6), (6,), (6, 5)
    _, shallow = match(pattern, lambda x, w, g, u: (x @ w).sin() @ u, *shapes)
    _, deep = match(pattern, lambda x, w, g, u: normed((x @ w).sin(), g) @ u, *shapes)
    assert shallow.miss.reason == "expected an RMSNorm, found sin"
    assert deep.miss.reason == "expected a matrix product, found sin"
    assert (deep.miss.node.name, shallow.miss.node.name) == ("sin", "sin")
    assert deep.depth > shallow.depth


def test_the_first_of_equally_deep_misses_is_kept():
    nearest, match, reading = NearestMiss(), Match(), Reading(None)
    nearest.fail(match, NoMatch("first"))
    nearest.fail(match, NoMatch("second"))
    assert nearest.miss.reason == "first"
    nearest.fail(match.read("name", reading), NoMatch("deeper"))
    assert nearest.miss.reason == "deeper"


def test_only_refusals_are_caught():
    def along(match):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        match(rope(X, name="turn", along=along), lambda x: x.sin(), (4, 4))


def test_a_pattern_is_a_value():
    pattern = contract(rms_norm(X, G, name="norm"), W, name="p")
    before = repr(pattern)
    for _ in range(2):
        found, _ = match(pattern, lambda x, g, w: normed(x, g) @ w, (3, 4), (4,), (4, 5))
        assert len(found) == 1
    assert repr(pattern) == before
