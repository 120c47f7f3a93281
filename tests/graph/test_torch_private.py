"""One try of every private name of torch that the compiler needs: what a new release moved fails here by name."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path

import pytest
import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_fx.graph import torch_compilers, torch_private

aten = torch.ops.aten


FakeTensorMode = torch._subclasses.FakeTensorMode


def names_of(module):
    """The names of torch that a module passes on, and those of its own functions."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    imported = (part for node in tree.body if isinstance(node, ast.ImportFrom) for part in node.names)
    passed = [part.asname for part in imported if part.asname]
    own = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {*passed, *own, *getattr(module, "__all__", ())}


def plus_one(x):
    return (x + 1,)


def graph_of(function, *inputs):
    return torch_private.make_fx(function)(*inputs)


@pytest.mark.parametrize("module", [torch_private, torch_compilers], ids=lambda module: module.__name__)
def test_every_name_is_tried_here(module):
    short = module.__name__.rpartition(".")[2]
    source = Path(__file__).with_name(f"test_{short}.py").read_text(encoding="utf-8")
    assert [name for name in sorted(names_of(module)) if f"{short}.{name}" not in source] == []


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
    assert aten.mm.default.overloadpacket is aten.mm
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
