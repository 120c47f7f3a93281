"""What a graph holds, before any pattern is tried: attention, and projections as Multi-head Latent Attention has them.

Cheap, by the names of what is called, so that it reads Dynamo's graphs and operator graphs alike. It decides nothing
but what is said of a graph, and whether one in which nothing could be recognised may hold MLA all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.fx import Graph, Node

from .canonical.softmax import SOFTMAX, anchors
from .debug.report import Report, count_fused
from .torch_private import OpOverload

PROJECTIONS = frozenset({"linear", "matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm", "einsum"})
PRODUCTS = PROJECTIONS | {"scaled_dot_product_attention"}
CUTS = frozenset({"getitem", "__getitem__", "narrow", "slice", "select", "index_select"})
RANDOM = frozenset({"native_dropout", "dropout", "bernoulli", "rand", "rand_like", "inductor_random"})
STEPS_BACK = 48

TRAINING = "training graph: left alone, mla_fx fuses inference only"
NO_ATTENTION = "no attention in this graph: there is nothing to fuse"
FLEX = "attention by flex_attention is not read"
DROPOUT = "attention with dropout is left alone; model.eval() turns it off"
CUT_BEHIND = "latents are projected down and up again, but no attention follows; a graph break may cut the layer"
CUT_BEFORE = "attention without the projections that feed it; a graph break may cut the layer"


def survey(graph: Graph, report: Report, *, is_inference: bool = True) -> bool:
    """Notes in the report what there is, and what keeps a graph that may hold MLA from being looked at.

    Returns whether there is anything that patterns, or a target, can be tried on."""
    first = next(anchors(graph), None)
    has_own_calls = bool(count_fused(graph))
    hindrances = [] if is_inference else [TRAINING]
    hindrances += [FLEX] if any(called(node) == "flex_attention" for node in graph.nodes) else []
    hindrances += [DROPOUT] if any(map(_is_dropped, _softmaxes(graph))) else []
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


def called(node: Node) -> str:
    """The bare name of what a node calls, however it is called."""
    if isinstance(node.target, OpOverload):
        return str(node.target._opname)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def joins_cut_products(graph: Graph, products: frozenset[str], joins: Callable[[Node], bool] = lambda _: True) -> bool:
    """Whether a piece cut out of the result of one product enters another that `joins`, through a few operations."""
    candidates = (node for node in graph.nodes if called(node) in products and joins(node))
    return any(_is_from_cut_product(node, products) for node in candidates)


def has_bottleneck(graph: Graph) -> bool:
    """Whether a piece of a projection is projected up again, as latents are."""
    return joins_cut_products(graph, PROJECTIONS, _projects_up)


def _is_from_cut_product(product: Node, products: frozenset[str]) -> bool:
    pending, seen = [(product, False)], set[tuple[Node, bool]]()
    while pending and len(seen) < STEPS_BACK:
        node, is_cut = pending.pop()
        for operand in node.all_input_nodes:
            if operand.op in ("placeholder", "get_attr") or (operand, is_cut) in seen:
                continue
            seen.add((operand, is_cut))
            if called(operand) not in products:
                pending.append((operand, is_cut or called(operand) in CUTS))
            elif is_cut:
                return True
    return False


def _projects_up(product: Node) -> bool:
    """One operand is a weight, and what comes out is wider than what goes in."""
    weights = [operand for operand in product.all_input_nodes if _is_weight(operand)]
    data = [operand for operand in product.all_input_nodes if operand not in weights]
    return bool(weights and data) and _width(product) > _width(data[-1])


def _is_weight(node: Node) -> bool:
    """A graph input, perhaps through views and casts, which have one operand."""
    while node.op not in ("placeholder", "get_attr"):
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return True


def _width(node: Node) -> int:
    value: Any = node.meta.get("val", node.meta.get("example_value"))
    width = value.shape[-1] if getattr(value, "ndim", 0) else 0
    return width if isinstance(width, int) else 0


def _softmaxes(graph: Graph) -> Iterator[Node]:
    for target in SOFTMAX:
        yield from graph.find_nodes(op="call_function", target=target)


def _is_dropped(softmax: Node) -> bool:
    """What is multiplied with the probabilities, or made of them, is random."""
    reached = [softmax]
    for _ in range(3):
        reached = [user for node in reached for user in node.users]
        if any(called(node) in RANDOM or any(map(_is_random, node.all_input_nodes)) for node in reached):
            return True
    return False


def _is_random(node: Node) -> bool:
    for _ in range(4):
        if called(node) in RANDOM:
            return True
        if len(node.all_input_nodes) != 1:
            return False
        node = node.all_input_nodes[0]
    return False


def _is_fed(graph: Graph, attention: Node) -> bool:
    """A weight has entered a product before the attention."""
    for node in graph.nodes:
        if node is attention:
            return False
        if called(node) in PROJECTIONS and any(map(_is_weight, node.all_input_nodes)):
            return True
    return False
