"""A try of every private name of torch's own compilers that is needed: what a new release moved fails here by name."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mla_fx.graph import torch_compilers

aten = torch.ops.aten


def plus_one(x):
    return (x + 1,)


def test_an_error_passes_dynamo_as_what_it_is():
    def backend(gm, example_inputs):
        raise torch_compilers.passing_dynamo(KeyError("mine"))

    with pytest.raises(KeyError, match="mine"):
        torch.compile(plus_one, backend=backend)(torch.ones(2))
    error = torch_compilers.passing_dynamo(KeyError("mine"))
    assert torch_compilers.passing_dynamo(error) is error


@pytest.mark.parametrize("is_inference", [True, False])
def test_aot_autograd_hands_on_operators(is_inference):
    seen = []

    def compiler(gm, inputs, is_inference):
        seen.append(
            (is_inference, [node.target for node in gm.graph.find_nodes(op="call_function", target=aten.copy_.default)])
        )
        return gm.forward

    def step(x, cache):
        cache.copy_(x.detach())
        return x * 2

    backend = torch_compilers.aot_autograd(compiler, lambda gm, inputs: gm.forward)
    x, cache = torch.ones(2, requires_grad=not is_inference), torch.zeros(2)
    out = torch.compile(step, backend=backend)(x, cache)
    if not is_inference:
        out.sum().backward()
        torch.testing.assert_close(x.grad, torch.full((2,), 2.0))
    assert [kind for kind, _ in seen] == [is_inference]
    assert cache.tolist() == [1, 1]


def test_aot_autograd_tells_weights_from_inputs():
    """A weight is the first input of the graph, or the second."""
    model, found = torch.nn.Linear(3, 2), []

    def compiler(gm, inputs, **_):
        found.append([list(inputs[place].shape) for place in sorted(torch_compilers.static_inputs())])
        return gm.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(model, backend=torch_compilers.aot_autograd(compiler, compiler))(torch.ones(5, 3))
    assert found == [[[2, 3], [2]]]
    assert torch_compilers.static_inputs() == frozenset()


def test_inductor_compiles_through_the_callers_compiler():
    seen = []

    def inner(gm, inputs, **given):
        seen.append(given["is_inference"])
        return torch_compilers.compile_fx_inner(gm, inputs, **given)

    def backend(gm, example_inputs):
        return torch_compilers.compile_fx(gm, example_inputs, inner, {"max_autotune": False}, None)

    with torch.no_grad():
        (found,) = torch.compile(plus_one, backend=backend)(torch.ones(3))
    assert (seen, found.tolist()) == ([True], [2, 2, 2])


def test_compiled_graphs_may_take_a_list():
    def call(given):
        return given

    assert not torch_compilers.is_boxed(call)
    assert torch_compilers.as_boxed(call) is call and torch_compilers.is_boxed(call)


def test_inductor_freezes_through_the_callers_compiler():
    """Weights become constants of the graph, which takes the other inputs."""
    model, seen = torch.nn.Linear(3, 2), []

    def backend(gm, example_inputs):
        def inner(graph_module, inputs, **given):
            compiled = torch_compilers.compile_fx_frozen(gm, graph_module, inputs, **given)
            seen.extend(graph_module.graph.find_nodes(op="get_attr"))
            return compiled

        assert torch_compilers.is_freezing()
        return torch_compilers.compile_fx(gm, example_inputs, inner, {"freezing": False}, None)

    assert not torch_compilers.is_freezing()
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        x = torch.ones(5, 3)
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert seen


def test_a_cache_keeps_what_it_was_given_a_key_for():
    """With Inductor's key, which is known both times; and not what must not be kept."""
    fresh, found, calls = [], [], iter([("a", True), ("a", True), ("b", False), ("b", True), ("b", True)])

    def backend(gm, example_inputs):
        key, is_kept = next(calls)

        def inner(gm, inputs, **given):
            compiled = torch_compilers.compile_fx_inner(gm, inputs, **given)
            fresh.append(torch_compilers.inductor_key(compiled))
            return compiled if is_kept else torch_compilers.not_cached(compiled)

        before = len(fresh)
        compiled = torch_compilers.compile_fx(gm, example_inputs, inner, {}, key)
        found.append(torch_compilers.inductor_key(compiled) if len(fresh) == before else None)
        return compiled

    with torch.no_grad(), torch._functorch.config.patch(enable_autograd_cache=True):
        for _ in range(5):
            torch._dynamo.reset()
            torch.compile(plus_one, backend=backend)(torch.ones(3))
    assert len(fresh) == 3 and fresh[0] and set(fresh) == {fresh[0]}
    assert found == [None, fresh[0], None, None, fresh[0]]


def test_where_caches_lie(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    assert torch_compilers.cache_folder() == tmp_path / "caches"


def test_a_run_of_dynamo_ends_with_its_reset():
    found = []

    def backend(gm, inputs):
        found.append(torch_compilers.dynamo_run())
        return gm.forward

    for size in (1, 2):
        torch.compile(plus_one, backend=backend, dynamic=False)(torch.ones(size))
    torch._dynamo.reset()
    for size in (1, 2, 3):
        torch.compile(plus_one, backend=backend, dynamic=False)(torch.ones(size))
    first, same, other, *more = found
    assert first is same and other is not first and all(one is other for one in more)
    assert torch_compilers.dynamo_run() is None
    assert torch_compilers.was_reset(first) and not torch_compilers.was_reset(other)


def test_inductor_tells_of_itself():
    assert {"freezing", "max_autotune", "triton.cudagraphs"} <= torch_compilers.inductor_options()
    assert torch_compilers.inductor_type("freezing") is bool
    assert torch_compilers.inductor_type("post_grad_custom_pre_pass") is object
    assert "max-autotune" in torch_compilers.inductor_modes()
    assert aten.silu.default in torch_compilers.inductor_decompositions()


def test_graph_passes_are_told_of_training():
    assert issubclass(torch_compilers.GraphPass, torch._inductor.custom_graph_pass.CustomGraphPass)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        torch_compilers.nothing  # noqa: B018  the attempt is the test


def test_inputs_are_known_by_their_paths():
    layer, paths = torch.nn.Sequential(torch.nn.Linear(2, 2)), []

    def backend(gm, _):
        paths.extend(map(torch_compilers.input_path, gm.graph.find_nodes(op="placeholder")))
        return gm

    torch.compile(layer, backend=backend)(torch.ones(1, 2))
    assert len(paths) == 3 and any(path.endswith("._parameters['weight']") for path in paths), paths
    assert torch_compilers.input_path(torch.fx.Graph().placeholder("x")) == ""


def test_what_an_export_lifted_is_told_from_what_it_traced():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, x):
            return x * self.scale

    module = torch.export.export(Scaled(), (torch.ones(2),)).run_decompositions().module()
    (held,) = module.graph.find_nodes(op="get_attr")
    literal = torch.tensor(2.0)
    (traced,) = make_fx(lambda x: x * literal)(torch.ones(2)).graph.find_nodes(op="get_attr")
    assert torch_compilers.is_lifted(held) and not torch_compilers.is_lifted(traced)
    assert traced.target == "_tensor_constant0"


def test_frozen_weights_are_marked():
    from torch._inductor.freezing_utils import enter_freezing, maybe_set_is_frozen_param

    frozen = torch.ones(2)
    with enter_freezing():
        maybe_set_is_frozen_param(frozen)
    assert torch_compilers.is_frozen(frozen) and not torch_compilers.is_frozen(torch.ones(2))


def test_what_was_compiled_is_told_once():
    told = []
    for _ in range(2):
        torch_compilers.when_compiled(told.append)
    torch.compile(plus_one, backend="eager")(torch.ones(2))
    assert len(told) == 1
    torch._dynamo.reset()
    torch.compile(plus_one, backend="eager")(torch.ones(2))
    assert len(told) == 1


def test_inductor_counts():
    before = torch_compilers.inductor_counts()
    before["a count of ours"] += 1
    assert torch_compilers.inductor_counts()["a count of ours"] == before.pop("a count of ours")


def test_inductor_has_a_compiler():
    assert isinstance(torch_compilers.cpp_compiler(), str)


@pytest.mark.slow
def test_a_library_in_cpp_sees_vectors_of_the_processor():
    source = """
        #include <ATen/cpu/vec/vec.h>
        extern "C" int lanes() { return at::vec::Vectorized<float>::size(); }
    """
    assert torch_compilers.cpp_library(source).lanes() >= 4
    with pytest.raises(RuntimeError, match=r"C\+\+ compile error"):
        torch_compilers.cpp_library("no program")


def test_inductor_tells_that_it_makes_a_package():
    assert not torch_compilers.is_packaging()
    with torch._inductor.virtualized.V.set_aot_compilation(True):
        assert torch_compilers.is_packaging()


def test_debug_files_have_a_folder(tmp_path):
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        assert torch_compilers.debug_folder().parent == tmp_path


def test_what_is_compiled_to_be_saved_is_told_from_what_is_cached():
    told = [torch_compilers.is_saving()]

    def backend(gm, inputs):
        told.append(torch_compilers.is_saving())
        raise NotImplementedError

    with torch._dynamo.config.patch(enable_aot_compile=True), pytest.raises(NotImplementedError):
        run = torch.compile(torch.nn.Linear(2, 2), backend=backend, fullgraph=True)
        run.forward.aot_compile(((torch.ones(1, 2),), {}))
    with torch._functorch.config.patch(bundled_autograd_cache=True):
        told.append(torch_compilers.is_saving())
    assert told == [False, True, False]
