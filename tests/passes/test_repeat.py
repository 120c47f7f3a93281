"""A rewrite is repeated in layers that are equal, and in no other."""

from types import SimpleNamespace

import pytest
import torch
from lib.layers import QUIET, Layer, Sizes, arguments, check, variant
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_aggregate

from mla_fx.driver import discovery
from mla_fx.passes import repeat
from mla_fx.passes.repeat import MOST_NODES, recipe, replay
from mla_fx.rewriting.emitter import Emitter
from mla_fx.rewriting.fake_values import signature
from mla_fx.rewriting.plan import Call, Plan, Replacement, Value
from mla_fx.rewriting.replacement import change_of, check_nothing_is_lost

aten = torch.ops.aten

pytestmark = [pytest.mark.filterwarnings(mark) for mark in QUIET]


class Stack(nn.Module):
    """Layers one after the other, each with its own caches unless `shared`."""

    def __init__(self, *layers, shared=False):
        super().__init__()
        self.layers, self.shared = nn.ModuleList(layers), shared

    def forward(self, x, tables, position, caches):
        x = x.tanh()
        for place, layer in enumerate(self.layers):
            own = caches[0 if self.shared else place]
            x = x + layer(x, tables, position, own)
        return x


def given(count, sizes=None):
    x, tables, position, _ = arguments(sizes)
    caches = [tuple(cache + place for cache in arguments(sizes)[3]) for place in range(count)]
    return x, tables, position, caches


def drawn_anew(layer):
    """Other weights, so that a layer used in place of another would show."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in layer.parameters():
            scale = weight.std() if weight.ndim > 1 else 0.3
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype) * scale
            weight.copy_(noise if weight.ndim > 1 else 1 + noise)
    return layer


@pytest.fixture
def matched(monkeypatch):
    """How often each rule was asked for matches."""
    counts = {}
    for rule in discovery.rules():
        kind, bindings = type(rule), type(rule).bindings

        def counting(self, anchor, nearest, bindings=bindings):
            counts[self.name] = counts.get(self.name, 0) + 1
            return bindings(self, anchor, nearest)

        monkeypatch.setattr(kind, "bindings", counting)
    return counts


def test_equal_layers_are_matched_once(matched):
    stack = Stack(Layer(), drawn_anew(Layer()), drawn_anew(Layer()))
    report = check(stack, given(3))
    assert report.fused == {"mla_prolog": 3, "latent_attention": 3}
    assert matched == {"mla_attention": 1, "mla_prolog": 1}


@pytest.mark.refutes
def test_a_layer_with_another_number_that_is_taken_for_equal(monkeypatch):
    """The option prove finds it, and it is matched anew."""
    is_same_call = repeat._is_same_call

    def careless(call, other, pending):
        args, kwargs = map_aggregate((other.args, other.kwargs), lambda leaf: 1e-6 if leaf == 0.1 else leaf)
        return is_same_call(call, SimpleNamespace(target=other.target, args=args, kwargs=kwargs), pending)

    monkeypatch.setattr(repeat, "_is_same_call", careless)
    report = check(Stack(Layer(), OtherEpsilon()), given(2))
    assert report.fused == {"mla_prolog": 2, "latent_attention": 2}
    [reason] = report.refuted
    assert reason.startswith("mla_prolog would change ")


def test_two_kinds_in_turn_are_matched_once_each(matched):
    layers = (Layer(), Scaled(), drawn_anew(Layer()), drawn_anew(Scaled()))
    report = check(Stack(*layers), given(4))
    assert report.fused == {"mla_prolog": 4, "latent_attention": 4}
    assert matched == {"mla_attention": 2, "mla_prolog": 1}


Scaled = variant("Scaled", scores=lambda my, query, key: Layer.scores(my, query, key) * 0.5)
NegativeScores = variant("NegativeScores", scores=lambda my, query, key: -Layer.scores(my, query, key))
TablesExchanged = variant("TablesExchanged", rotate_key=lambda my, x, cos, sin: my.rotate(x, sin, cos))
TurnedBack = variant("TurnedBack", rotate_key=lambda my, x, cos, sin: my.rotate(x, cos, -sin))
QueryOfOtherTokens = variant("QueryOfOtherTokens", query=lambda my, x: Layer.query(my, x.flip(1)))
TransposedKeys = variant("TransposedKeys", query=lambda my, x: Layer.query(my, x).transpose(1, 2))  # tokens for heads
Unmasked = variant("Unmasked", mask=lambda my, position: torch.zeros_like(Layer.mask(my, position)))


class OtherEpsilon(Layer):
    def norm(self, x, gamma):
        return gamma * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1))


class OtherPlaces(Layer):
    """Latents and rotary keys are written at different positions."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache.index_copy_(2, position, latent)
        kr_cache.index_copy_(2, position.flip(0), k_rope)
        return kv_cache, kr_cache


class FromTheEnd(Layer):
    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        kv_cache[:, :, position - self.sizes.context] = latent
        kr_cache[:, :, position - self.sizes.context] = k_rope
        return kv_cache, kr_cache


class OldRotaryKeys(Layer):
    """The rotary key is written, and the old content is read."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        before = kr_cache.clone()
        super().store(latent, k_rope, position, kv_cache, kr_cache)
        return kv_cache, before


class KeptProbabilities(Layer):
    """The probabilities are used a second time."""

    def combine(self, scores, value):
        probabilities = scores.softmax(-1)
        return probabilities @ value + probabilities.sum() * 0.01


TWINS = [
    Scaled, OtherEpsilon, TablesExchanged, TurnedBack, OtherPlaces, FromTheEnd, OldRotaryKeys, TransposedKeys,
    QueryOfOtherTokens, NegativeScores, Unmasked, KeptProbabilities,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("twin", TWINS, ids=lambda twin: twin.__name__)
def test_near_twins_keep_their_own_answers(twin, order):
    sizes = Sizes(tokens=4, heads=4)
    layers = [Layer(sizes), drawn_anew(twin(sizes))]
    check(Stack(*(layers if order == "after" else layers[::-1])), given(2, sizes))


def test_layers_over_one_cache():
    check(Stack(Layer(), drawn_anew(Layer()), shared=True), given(1))


class Mixed(Stack):
    """The second layer's rotary keys are computed from the first one's input."""

    def forward(self, x, tables, position, caches):
        first, second = self.layers
        x = x.tanh()
        between = x + first(x, tables, position, caches[0])
        rows = second.rows
        second.rows = lambda hidden: (rows(hidden)[0], rows(x)[1])
        try:
            return second(between, tables, position, caches[1])
        finally:
            second.rows = rows


def test_operands_that_were_one_in_the_first_layer_are_one_in_the_next():
    report = check(Mixed(Layer(), drawn_anew(Layer())), given(2))
    assert report.fused["mla_prolog"] == 1


@pytest.mark.slow
def test_shapes_may_be_symbols(matched):
    report = check(Stack(Layer(), drawn_anew(Layer())), given(2), dynamic=True)
    assert report.fused == {"mla_attention": 2, "kv_rmsnorm_rope_cache": 2}
    assert matched == {"mla_attention": 1, "kv_rmsnorm_rope_cache": 1}


# --- recipes by themselves -------------------------------------------------------------------------------------------


def sines(function, *inputs):
    """The graph of a function, and its calls of sin: the anchors of the recipes below."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return graph, graph.find_nodes(op="call_function", target=aten.sin.default)


def recorded(graph, anchor, old=None, reads=None, looked_into=None):
    """The recipe that replaces `old` by the cosine of the next graph input after it, or of what `reads` returns."""
    emit = Emitter(graph)
    source = anchor
    while source.op != "placeholder":
        source = source.all_input_nodes[0]
    with emit.at(graph.output_node(), "test"):
        new = Call(aten.cos.default, Value(reads or source, source))
        looked_into = set(graph.nodes) if looked_into is None else looked_into
        plan = change_of(emit, Plan(Replacement(old or anchor, new)))
        return emit, recipe(emit, anchor, looked_into, plan)


X, Y = torch.randn(3, 4), torch.randn(3, 4)


def test_a_recipe_is_done_again():
    graph, (first, second) = sines(lambda x, y: (x.relu().sin(), y.relu().sin()), X, Y)
    emit, found = recorded(graph, first)
    images = found.images(second, emit.fakes)
    assert {one.name: other.name for one, other in images.items()} == {"sin": "sin_1", "relu": "relu_1", "x_1": "y_1"}
    with emit.at(graph.output_node(), "test"):
        ((old, new),) = replay(emit, found, images).replacements
    assert old is second
    assert (new.target, new.args[0].name) == (aten.cos.default, "y_1")


OTHERS = {
    "another call": (lambda x, y: (x.relu().sin(), y.abs().sin()), Y),
    "no call": (lambda x, y: (x.relu().sin(), y.sin()), Y),
    "another type": (lambda x, y: (x.relu().sin(), y.relu().sin()), Y.double()),
    "another shape": (lambda x, y: (x.relu().sin(), y.relu().sin()), Y.T),
    "an integer for a float": (lambda x, y: ((x * 2.0).sin(), (y * 2).sin()), Y),
    "another number": (lambda x, y: ((x * 2.0).sin(), (y * 3.0).sin()), Y),
    "one operand for two": (lambda x, y: ((x + y).sin(), (y + y).sin()), Y),
    "two operands for one": (lambda x, y: ((x + x).sin(), (x + y).sin()), Y),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_not_the_same_is_not_taken_for_it(name):
    function, other = OTHERS[name]
    graph, (first, second) = sines(function, X, other)
    emit, found = recorded(graph, first)
    assert found.images(second, emit.fakes) is None


@pytest.mark.parametrize("looks", [True, False])
def test_what_was_looked_into_is_compared_though_it_is_an_operand(looks):
    """A rule that reads what a factor is computed from may rely on it; one that does not takes any."""
    graph, (first, second) = sines(lambda x, y: ((x * x.relu()).sin(), (y * y.abs()).sin()), X, Y)
    (product,) = first.all_input_nodes
    looked_into = {first, product, *(product.all_input_nodes if looks else ())}
    emit, found = recorded(graph, first, looked_into=looked_into)
    assert (found.images(second, emit.fakes) is None) == looks


TWINS = {
    "lends its shape": (lambda x, y: (x.relu() + torch.zeros_like(y)).sin(), lambda x, y: (x.relu() + y.abs()).sin()),
    "is overwritten": (
        lambda x, y: torch.slice_scatter(y, x.relu()).sin(),
        lambda x, y: torch.slice_scatter(torch.slice_scatter(y, x.abs(), 0, 0, 1), x.relu()).sin(),
    ),
}


@pytest.mark.parametrize("is_twin", [False, True])
@pytest.mark.parametrize("name", TWINS)
def test_what_the_check_for_lost_inputs_passes_over_is_compared(name, is_twin):
    """The rule looks into what enters its operator; the check alone looks at what lends a shape or is overwritten."""
    function, other = TWINS[name][0], TWINS[name][is_twin]
    graph, (first, second) = sines(lambda x, y, z: (function(x, z), other(y, z)), X, Y, X + Y)
    (outer,) = first.all_input_nodes
    (relu,) = (node for node in outer.all_input_nodes if node.target is aten.relu.default)
    checked = check_nothing_is_lost([first], {relu}, torch.float32)
    emit, found = recorded(graph, first, reads=relu, looked_into={first, outer, relu, *checked})
    assert (found.images(second, emit.fakes) is None) == is_twin


def test_what_nobody_looked_into_is_not_replaced_elsewhere():
    graph, (first, _) = sines(lambda x, y: (x.sin(), y.sin()), X, Y)
    assert recorded(graph, first, looked_into=set())[1] is None


def test_a_result_of_another_kind_is_not_the_same():
    """Each call is compared with its result, whose size depends on data."""
    graph, (first, second) = sines(lambda x, y: (x.relu().sin(), y.relu().sin()), X, Y)
    emit, found = recorded(graph, first)
    relu = second.all_input_nodes[0]
    relu.meta["val"] = relu.meta["val"].T.contiguous().T
    assert found.images(second, emit.fakes) is None


def test_conjugated_numbers_are_of_another_kind():
    numbers = torch.randn(3, dtype=torch.complex64)
    assert signature(numbers) == signature(numbers + 1) != signature(numbers.conj())


def test_a_way_that_ends_early_leads_nowhere():
    graph, (first, second) = sines(lambda x, y: (x.sin().neg(), y.sin()), X, Y)
    emit, found = recorded(graph, first, old=next(iter(first.users)))
    second.graph.output_node().args = ((second.graph.output_node().args[0][0],),)  # nobody uses the second sine
    assert found.images(second, emit.fakes) is None


def test_what_cannot_be_reached_from_the_anchor_makes_no_recipe():
    graph, (first, _) = sines(lambda x, y: (x.sin(), y.sin()), X, Y)
    (other,) = (node for node in graph.find_nodes(op="placeholder") if node.name == "y_1")
    assert recorded(graph, first, old=other)[1] is None


def test_a_long_part_of_a_graph_makes_no_recipe():
    def long(x):
        for _ in range(MOST_NODES):
            x = x.relu()
        return x.sin()

    graph, (anchor,) = sines(long, X)
    assert recorded(graph, anchor)[1] is None


def test_what_reads_an_unknown_input_makes_no_recipe():
    graph, (first, _) = sines(lambda x, y: (x.sin(), y.sin()), X, Y)
    unknown = graph.find_nodes(op="placeholder")[1]
    assert recorded(graph, first, reads=unknown)[1] is None
