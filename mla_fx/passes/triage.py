"""Looks for attention, and for projections like those of Multi-head Latent Attention, before any pattern is tried.

Triage is cheap and goes by the names of the called functions, so it reads Dynamo's graphs and operator graphs alike. It
decides only what the report says about a graph, whether patterns are tried on it, and whether it may contain MLA even
though nothing was recognised."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from mla_fx.debug.report import Report
from mla_fx.graph.node_text import value_of
from mla_fx.graph.provenance import count_fused
from mla_fx.graph.schemas import owner, written
from mla_fx.graph.torch_private import OpOverload
from mla_fx.readings.attention import anchors
from mla_fx.readings.merged_sums import weights

aten = torch.ops.aten

PROJECTIONS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum", "_int_mm"})
CUTS = frozenset({"getitem", "__getitem__", "narrow", "slice", "select", "index_select"})
NORMS = frozenset({"rms_norm", "_fused_rms_norm", "layer_norm", "native_layer_norm", "rsqrt", "pow"})
SCALINGS = frozenset({"mul", "div", "sub"})  # these dequantise a weight stored in 8 bits
ADDITIONS = frozenset({"add", "__add__", "iadd", "add_"})
SOFTMAX = frozenset({"softmax", "_softmax", "_safe_softmax"})
EXPONENTIALS = SOFTMAX | {"exp"}
ATTENTION = "scaled_dot_product_attention"
PRODUCTS = PROJECTIONS | {ATTENTION}
RANDOM = frozenset({"native_dropout", "dropout", "bernoulli", "rand", "rand_like", "inductor_random"})
# Operators that AOTAutograd always decomposes, and that an undecomposed graph of torch.export still calls.
WHOLE = frozenset({aten.matmul.default, aten.numpy_T.default, aten.scaled_dot_product_attention.default})
STEPS_BACK = 48

TRAINING = "training graph: left unchanged, mla_fx fuses inference only"
NO_ATTENTION = "no attention in this graph: there is nothing to fuse"
EMPTY = "all results are empty: there is nothing to compute"
FLEX = "attention by flex_attention is not supported"
DROPOUT = "attention with dropout is not fused; model.eval() turns it off"
UNDECOMPOSED = "the operators of this graph are not decomposed; call run_decompositions() on the exported program"
CUT_BEHIND = (
    "latents are projected down and up again, but no softmax follows: the attention is of another kind, or "
    "a graph break cut the layer"
)
CUT_BEFORE = "attention without the projections that feed it; a graph break may have cut the layer"


def triage(graph: Graph, report: Report, *, is_inference: bool = True) -> bool:
    """Note in the report what the graph contains, and what prevents fusion in a graph that may contain MLA.

    Returns whether there is anything for the patterns or a target to work on."""
    if _is_empty(graph):
        report.notes.append(EMPTY)
        return False
    first = next(itertools.chain(anchors(graph), weights(graph)), None)
    has_own_calls = bool(count_fused(graph))
    hindrances = [] if is_inference else [TRAINING]
    calls = [(called(node), node) for node in graph.nodes]
    hindrances += [FLEX] if any(name == "flex_attention" for name, _ in calls) else []
    hindrances += [DROPOUT] if any(name in RANDOM and _is_dropped(node) for name, node in calls) else []
    report.has_attention = bool(first or has_own_calls or {FLEX, DROPOUT} & set(hindrances))
    if not report.has_attention and not hindrances:
        hindrances += [CUT_BEHIND] if has_bottleneck(graph) else []
        report.notes += hindrances or [NO_ATTENTION]
        report.hindrances += hindrances
        return False
    report.notes += hindrances
    if hindrances and has_bottleneck(graph):
        report.hindrances += hindrances
    if first is not None and not _is_fed(graph, first):
        report.notes.append(CUT_BEFORE)
    return is_inference and (first is not None or has_own_calls)


def _is_empty(graph: Graph) -> bool:
    """Whether each result has no elements, as in a batch without sequences."""
    results = (node.meta.get("val") for node in graph.output_node().all_input_nodes)
    sizes = [value.numel() for value in results if isinstance(value, torch.Tensor)]
    return bool(sizes) and all(isinstance(size, int) and size == 0 for size in sizes)


def is_functional(graph: Graph) -> bool:
    """Whether readings apply to a graph. In one that writes its inputs before its end, they would miss the writes."""
    return not any(map(_writes_an_input, graph.nodes))


def _writes_an_input(node: Node) -> bool:
    """Whether one of PyTorch's operators writes an input, other than by the copies that end a functional graph."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    inputs = [operand for operand in written(node) if owner(operand).op == "placeholder"]
    return bool(inputs) and not (node.target is aten.copy_.default and inputs[0].op == "placeholder")


def tell_undecomposed(graph: Graph, report: Report) -> None:
    """Note in the report of an unfused graph that its operators are not decomposed, if this is so."""
    is_whole = not is_functional(graph) or any(node.target in WHOLE for node in graph.nodes)
    if report.has_attention and is_whole:
        report.notes.append(UNDECOMPOSED)
        report.hindrances.append(UNDECOMPOSED)


def called(node: Node) -> str:
    """The bare name of what a node calls, for any kind of target."""
    if isinstance(node.target, OpOverload):
        return str(node.target._opname)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def may_attend(graph: Graph) -> bool:
    """Whether exponentials, or a slice of a product's result, enter a product through a few operations."""
    products = [node for node in graph.nodes if called(node) in PRODUCTS]
    ways = (way for product in products for way in _ways(product, PRODUCTS | EXPONENTIALS))
    is_called = any(called(product) == ATTENTION for product in products)
    return is_called or any(way.is_cut or called(way.node) in EXPONENTIALS for way in ways)


def read_by_products(graph: Graph) -> set[Node]:
    """Return the nodes from which products are computed, or what is written in place: a product may read that."""
    found = set[Node]()
    for node in reversed(graph.nodes):
        if node in found or called(node) in PRODUCTS or _writes(called(node)):
            found.update(node.all_input_nodes)
    return found


def _writes(name: str) -> bool:
    return name == "setitem" or (name.endswith("_") and not name.startswith("__"))


def has_bottleneck(graph: Graph) -> bool:
    """Whether latents are projected up. Latents are the normalised result of a narrowing projection, or a normalised
    slice of a projection's result."""
    ups = (node for node in graph.nodes if called(node) in PROJECTIONS and _widening(node) > 0)
    ways = (way for up in ups for way in _ways(up, PROJECTIONS))
    return any(way.is_normed and (way.is_cut or _widening(way.node) < 0) for way in ways)


class _Way(NamedTuple):
    """A node from which a product is reached, and what happens to the node's result in between."""

    node: Node
    is_cut: bool = False
    is_normed: bool = False


def _ways(product: Node, products: frozenset[str]) -> Iterator[_Way]:
    """The products whose results enter `product`."""
    pending, seen = [_Way(product)], set[_Way]()
    while pending and len(seen) < STEPS_BACK:
        node, is_cut, is_normed = pending.pop()
        for operand in node.all_input_nodes:
            name = called(operand)
            way = _Way(operand, is_cut or name in CUTS, is_normed or name in NORMS)
            is_residual = name in ADDITIONS and len(operand.all_input_nodes) == 2
            if operand.op in ("placeholder", "get_attr") or way in seen or is_residual:
                continue
            seen.add(way)
            if name in products:
                yield way
            else:
                pending.append(way)


def _widening(product: Node) -> int:
    """How many columns a projection adds, below zero if it takes some away; zero for a product without a weight."""
    data = _data(product)
    return 0 if data is None else _width(product) - _width(data)


def _data(product: Node) -> Node | None:
    """The operand that is multiplied with a weight; None in a product without a weight."""
    weights = [operand for operand in product.all_input_nodes if _is_weight(operand)]
    rest = [operand for operand in product.all_input_nodes if operand not in weights]
    return next(iter(rest or weights), None) if weights else None


def _is_weight(node: Node) -> bool:
    """Whether a node is a graph input of at most three dimensions, perhaps through views, casts and dequantisation.

    Views and casts have one operand. Activations have more dimensions."""
    is_scaled = False
    while node.op not in ("placeholder", "get_attr"):
        operands = node.all_input_nodes
        if not operands or (len(operands) > 1 and called(node) not in SCALINGS):
            return False
        node, is_scaled = operands[0], is_scaled or len(operands) > 1
    fake = value_of(node)
    return getattr(fake, "ndim", 0) <= 3 and (not is_scaled or getattr(fake, "itemsize", 0) == 1)


def _width(node: Node) -> int:
    value = value_of(node)
    width = value.shape[-1] if getattr(value, "ndim", 0) else 0
    return width if isinstance(width, int) else 0


def _is_dropped(random: Node) -> bool:
    """Whether attention probabilities are multiplied with something random."""
    reached = [random]
    for _ in range(5):
        reached = [user for node in reached for user in node.users]
        if any(_is_softmax(operand) for node in reached for operand in (node, *node.all_input_nodes)):
            return True
    return False


def _is_softmax(node: Node) -> bool:
    """Whether a node is a softmax or the quotient of an exponential.

    It may be cast, expanded, or guarded by a `where` for fully masked rows."""
    for _ in range(4):
        operands = node.all_input_nodes[-1:] if called(node) == "where" else node.all_input_nodes
        if called(node) in SOFTMAX or (called(node) == "div" and operands and called(operands[0]) == "exp"):
            return True
        if len(operands) != 1:
            return False
        node = operands[0]
    return False


def _is_fed(graph: Graph, attention: Node) -> bool:
    """Whether a product with a weight precedes the attention."""
    for node in graph.nodes:
        if node is attention:
            return False
        if called(node) in PROJECTIONS and _data(node) is not None:
            return True
    return False
