"""One try of every private name of torch that the compiler needs: what a new release moved fails here by name."""

from __future__ import annotations

import ast
import json
import logging
import os
from collections import Counter
from pathlib import Path

import pytest
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_fx.graph import torch_compilers, torch_private

aten = torch.ops.aten
FakeTensorMode = torch._subclasses.FakeTensorMode


def plus_one(x):
    return (x + 1,)


def graph_of(function, *inputs):
    return torch_private.make_fx(function)(*inputs)


@pytest.mark.parametrize("module", [torch_private, torch_compilers], ids=lambda module: module.__name__)
def test_every_name_is_tried_here(module):
    source, short = Path(__file__).read_text(encoding="utf-8"), module.__name__.rpartition(".")[2]
    assert [name for name in module.__all__ if f"{short}.{name}" not in source] == []


ROOT = Path(__file__).parents[2]
OPERATORS = ROOT / "mla_fx" / "ops"  # which import torch alone
HOMES = [ROOT / "mla_fx" / "graph" / f"{name}.py" for name in ("torch_private", "torch_compilers")]
FILES = sorted(path for folder in ("mla_fx", "patterns", "lowering") for path in (ROOT / folder).rglob("*.py"))
ANYWHERE = {"_opname", "_schema", "_erased", "_parameters", "_buffers"}  # as the docstring of torch_private says
ANYWHERE |= {"_torchair_is_parameter"}  # not torch's own
OTHERS = {"self", "cls", "aten", "torchair", "ge", "npu"}  # ours, operators by name, and another library


def is_private(name):
    return name.startswith("_") and not name.endswith("__")


def private_of_torch(path):
    """The private modules and attributes of torch that a file names; names that it defines itself do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own | ANYWHERE:
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
            if owner not in OTHERS and ast.unparse(node.value) != "super()":
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from filter(is_private, (*node.module.split("."), *(alias.name for alias in node.names)))
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if any(map(is_private, alias.name.split("."))))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_private_of_torch_is_in_one_place(path):
    found = set(private_of_torch(path))
    if path in HOMES:
        assert found
    elif path.is_relative_to(OPERATORS):
        assert found <= {"_ops", "_subclasses"}
    else:
        assert found == set()


def test_overloads_have_schemas():
    assert isinstance(aten.add.Tensor, torch_private.OpOverload)
    assert isinstance(aten.add, torch_private.OpOverloadPacket) and aten.mm.default.overloadpacket is aten.mm
    assert isinstance(torch.ops.higher_order.cond, torch_private.HigherOrderOperator)
    assert aten.add.Tensor._opname == "add" and aten.add.Tensor.namespace == "aten"
    assert aten.view.default.is_view and not aten.clone.default.is_view
    assert aten.copy_.default._schema.is_mutable


def test_dtypes_have_short_names():
    assert torch_private.dtype_abbrs[torch.bfloat16] == "bf16"


def test_fake_tensors_know_their_mode():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(torch.ones(2, 3))
    assert torch_private.is_fake(fake) and not torch_private.is_fake(torch.ones(2))
    assert torch_private.detect_fake_mode([fake]) is mode
    assert torch_private.has_symbolic_sizes(fake) and not torch_private.has_symbolic_sizes(torch.ones(2))
    with torch_private.in_kernel_invocation_manager(mode):
        view = aten.permute.default(fake, [1, 0])
    made = torch_private.fake_tensor(mode, view, fake.device)
    assert torch_private.is_fake(made) and made.shape == (3, 2) and made.device == fake.device
    assert torch_private.share_storage(made, fake) and not torch_private.share_storage(made, fake.clone())
    with mode, torch_private.unset_fake_temporarily():
        assert not torch_private.is_fake(torch.ones(2))


def test_numbers_are_symbols_without_a_value():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    first, second = (torch_private.unknown_number(mode) for _ in range(2))
    assert isinstance(first, torch.SymInt) and not first.node.has_hint()
    assert str(first) != str(second)


def test_symbols_have_the_sizes_of_the_example():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    (size, _) = mode.from_tensor(torch.ones(3, 5)).shape
    assert isinstance(size, torch.SymInt) and torch_private.hint_of(size) == 3
    assert torch_private.hint_of(torch_private.unknown_number(mode)) == 2


def test_custom_operators_know_where_they_are_defined():
    @torch.library.custom_op("mla_fx_tests::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert torch_private.defining_module(torch.ops.mla_fx_tests.doubled.default) == __name__
    assert torch_private.defining_module(torch.ops.aten.add.Tensor) is None


def test_memory_is_known_without_being_kept():
    tensor = torch.ones(2)
    reference = torch_private.StorageWeakRef(tensor.untyped_storage())
    assert reference.cdata == tensor.untyped_storage()._cdata and not reference.expired()
    known = torch_private.WeakIdKeyDictionary()
    known[tensor.untyped_storage()] = "known"
    assert known[tensor[1:].detach().untyped_storage()] == "known"
    del tensor
    assert reference.expired() and not known


def test_memory_is_a_number_and_writes_are_counted():
    tensor, other = torch.ones(2), torch.ones(2, device="meta")
    assert torch_private.memory_of(tensor) == torch_private.memory_of(tensor[1:]) != torch_private.memory_of(other)
    before = torch_private.version_of(tensor)
    tensor.add_(1)
    assert torch_private.version_of(tensor) == before + 1


def test_wrappers_of_tensors_are_told():
    from torch.testing._internal.two_tensor import TwoTensor

    wrapper = TwoTensor(torch.ones(2), torch.ones(2))
    assert torch_private.is_traceable_wrapper_subclass(wrapper)
    assert not torch_private.is_traceable_wrapper_subclass(torch.ones(2))


def test_nested_values_are_taken_apart():
    nested = {"one": (1, [2.5]), "two": 3}
    leaves, structure = torch_private.tree_flatten(nested)
    assert leaves == torch_private.tree_leaves(nested) == [1, 2.5, 3]
    assert torch_private.tree_unflatten(leaves, structure) == nested
    assert torch_private.tree_map(str, nested) == {"one": ("1", ["2.5"]), "two": "3"}
    assert torch_private.tree_map_only(float, str, nested) == {"one": (1, ["2.5"]), "two": 3}


def test_artefacts_go_to_a_trace_that_is_asked_for(monkeypatch):
    log, found = logging.getLogger("torch.__trace"), []
    monkeypatch.setattr(log, "handlers", [])
    torch_private.trace_artifact("untold", "string", lambda: 1 / 0)
    assert not torch_private.is_traced()
    log.addHandler(handler := logging.Handler())
    handler.emit = found.append
    torch_private.trace_artifact("told", "json", lambda: {"a": 1})
    assert torch_private.is_traced()
    assert found[-1].metadata["artifact"] == {"name": "told", "encoding": "json"}
    assert json.loads(found[-1].payload) == {"a": 1}


def test_a_graph_keeps_how_it_is_called():
    module = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),)).module()
    other = torch.fx.Graph()
    assert type(torch_private.codegen_of(other)) is not type(torch_private.codegen_of(module.graph))
    other.set_codegen(torch_private.codegen_of(module.graph))
    assert torch_private.codegen_of(other) is torch_private.codegen_of(module.graph)


def test_functions_are_traced():
    assert [node.target for node in graph_of(plus_one, torch.ones(2)).graph.nodes][1] is aten.add.Tensor


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


def test_a_shape_environment_is_asked_what_it_knows():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.ones(5)).shape[0]
    assert torch_private.is_known(mode.shape_env, sympy.Le(2, size.node.expr))
    assert not torch_private.is_known(mode.shape_env, sympy.Le(3, size.node.expr))
    assert mode.shape_env.guards == []


def test_guards_are_relations():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    size = mode.from_tensor(torch.ones(7)).shape[0]
    assert size + size < 20
    assert sympy.Lt(2 * size.node.expr, 20) in torch_private.guards(mode.shape_env)


def test_divisions_of_sizes_are_functions():
    number, divisor = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.ones(7, 3)).shape
    assert isinstance((number // divisor).node.expr, torch_private.floor_division())
    assert isinstance((number % divisor).node.expr, torch_private.remainders())


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
    (traced,) = graph_of(lambda x: x * literal, torch.ones(2)).graph.find_nodes(op="get_attr")
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


def test_inductor_tells_that_it_makes_a_package():
    assert not torch_compilers.is_packaging()
    with torch._inductor.virtualized.V.set_aot_compilation(True):
        assert torch_compilers.is_packaging()


def test_debug_files_have_a_folder(tmp_path):
    with torch._dynamo.config.patch(debug_dir_root=str(tmp_path)):
        assert torch_compilers.debug_folder().parent == tmp_path


def test_the_bisector_is_asked(monkeypatch):
    from torch._inductor import compiler_bisector

    assert not torch_compilers.is_bisected_out(lambda: "a rewrite")
    bisector = compiler_bisector.CompilerBisector
    subsystem = bisector.get_subsystem_object("inductor", "post_grad_passes")
    monkeypatch.setattr(bisector, "bisection_enabled", True)
    for name, value in (("BACKEND", "inductor"), ("SUBSYSTEM", subsystem.name), ("MAX", "0")):
        monkeypatch.setenv(f"TORCH_BISECT_{name}", value)
    monkeypatch.setattr(compiler_bisector, "get_env_val", os.environ.get)  # torch remembers what it read
    monkeypatch.setattr(compiler_bisector, "subsystem_call_counter", Counter())
    assert [torch_compilers.is_bisected_out(lambda: "a rewrite") for _ in range(3)] == [False, True, True]


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


def test_the_shape_of_a_pad_stays_a_symbol_in_python():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    value = mode.from_tensor(torch.ones(5, 3))
    with mode, torch_private.python_dispatcher():
        torch.nn.functional.pad(value, (0, 1))
    assert mode.shape_env.guards == []


def test_operators_run_in_cpp_alone():
    included, key = torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.PythonDispatcher
    with torch_private.python_dispatcher():
        assert included(key)
        with torch_private.python_dispatcher_off():
            assert not included(key)
