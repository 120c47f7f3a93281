"""Converters to GE that torchair lacks, for the unfused operators in models with latent attention."""

import functools
import pkgutil
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from mla_fx.graph.provenance import name_of
from mla_fx.graph.schemas import owner


class _OfTorchair:
    """A module or class of torchair, which is imported when it is used."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __getattr__(self, name: str) -> Any:
        return getattr(pkgutil.resolve_name(self._place), name)


ge = _OfTorchair("torchair._ge_concrete_graph.ge_apis")  # GE's operators
DataType = _OfTorchair("torchair.ge._ge_graph:DataType")


@functools.cache
def register() -> None:
    """Register the converters through torchair's public decorator, once per process, like its own table."""
    from torchair import register_fx_node_ge_converter  # type: ignore[import-not-found]

    for operator, converter in (
        (torch.ops.aten.index_copy.default, index_copy),
        (torch.ops.aten.polar.default, polar),
        (torch.ops.aten.complex.default, complex_),
        (torch.ops.aten.all.dim, all_dim),
        (torch.ops.aten.amax.default, amax),
        (torch.ops.aten.index_put.default, index_put),
        (torch.ops.aten._assert_async.default, assert_async),
        (torch.ops.aten._assert_async.msg, assert_async),
        (torch.ops.mla_fx_ascend.copied.default, tensor_move),
    ):
        register_fx_node_ge_converter(operator)(converter)


def index_copy(
    self: Any,
    dim: int,
    index: Any,
    source: Any,
    meta_outputs: Any = None,  # torchair passes it to every converter
) -> Any:
    """`aten::index_copy(Tensor self, int dim, Tensor index, Tensor source)`: scatters rows, or elements along `dim`."""
    if dim == 0 and self.rank > 1:
        return written(self, ge.Unsqueeze(index, axes=[-1]), source)
    sizes = [1] * source.rank
    sizes[dim] = -1
    places = ge.BroadcastTo(ge.Reshape(index, sizes), ge.Shape(source))
    return ge.ScatterElements(self, places, source, axis=dim)


def polar(abs: Any, angle: Any, meta_outputs: Any = None) -> Any:
    """`aten::polar(Tensor abs, Tensor angle)`, which computes the tables of complex rotations."""
    return ge.Complex(ge.Mul(abs, ge.Cos(angle)), ge.Mul(abs, ge.Sin(angle)))


def complex_(real: Any, imag: Any, meta_outputs: Any = None) -> Any:
    """`aten::complex(Tensor real, Tensor imag)`."""
    return ge.Complex(real, imag)


def all_dim(self: Any, dim: int, keepdim: bool = False, meta_outputs: Any = None) -> Any:
    """`aten::all.dim(Tensor self, int dim, bool keepdim=False)`; any value other than 0 is true."""
    return ge.ReduceAll(ge.Cast(self, dst_type=DataType.DT_BOOL), [dim], keep_dims=keepdim)


def amax(self: Any, dim: Sequence[int] = (), keepdim: bool = False, meta_outputs: Any = None) -> Any:
    """`aten::amax(Tensor self, int[1] dim=[], bool keepdim=False)`; no dim means all."""
    return ge.ReduceMax(self, list(dim) or list(range(self.rank)), keep_dims=keepdim)


def index_put(
    self: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, meta_outputs: Any = None
) -> Any:
    """`aten::index_put(Tensor self, Tensor?[] indices, Tensor values, bool accumulate=False)` along the first axes, or
    along axes with gaps, the first among them."""
    is_bool = any(index is not None and index.dtype == DataType.DT_BOOL for index in indices)
    if accumulate or is_bool or indices[0] is None:
        raise NotImplementedError(
            f"aten.index_put with accumulate={accumulate} or indices without numbers is not converted"
        )
    axes, sizes = len(indices), _sizes(self)
    numbers = _numbers(self, indices)
    places = ge.Shape(functools.reduce(ge.Add, numbers))
    # FloorMod, because an index may count from the end
    found = [ge.FloorMod(ge.BroadcastTo(index, places), size) for index, size in zip(numbers, sizes, strict=False)]
    shape = places
    if rest := sizes[axes:]:
        columns = ge.Cast(ge.Pack(rest, N=len(rest), axis=0), dst_type=DataType.DT_INT32)
        shape = ge.ConcatV2([places, columns], 0, N=2)
    return written(self, ge.Pack(found, N=axes, axis=-1), ge.BroadcastTo(values, shape))


def _numbers(self: Any, indices: Sequence[Any]) -> list[Any]:
    """Int64 indices. Where there is none, every place is counted, in an axis behind those of the others."""
    found, gaps = [], [axis for axis, index in enumerate(indices) if index is None]
    for axis, index in enumerate(indices):
        behind = len(gaps)
        if index is None:
            behind -= gaps.index(axis) + 1
            index = ge.Range(ge.Const(0), ge.Cast(_sizes(self)[axis], dst_type=DataType.DT_INT32), ge.Const(1))
        number = ge.Cast(index, dst_type=DataType.DT_INT64)
        found.append(ge.Unsqueeze(number, axes=[-1 - axis for axis in range(behind)]) if behind else number)
    return found


def _sizes(self: Any) -> list[Any]:
    """Int64 numbers, or what reads them: a graph input that is read for a size as well keeps its copy."""
    if all(isinstance(size, int) for size in self.symsize):
        return [ge.Const(size, dtype=DataType.DT_INT64) for size in self.symsize]
    sizes = ge.Shape(self)
    return [ge.Cast(ge.Gather(sizes, axis), dst_type=DataType.DT_INT64) for axis in range(self.rank)]


def copied_caches(graph: Graph) -> Iterator[str]:
    """The graph inputs that `index_put` writes into a copy, because their sizes are read, too."""
    returned = {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)}
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.index_put.default):
        cache, sizes = node.args[0], node.args[0].meta["val"].shape
        if owner(cache) in returned and not all(isinstance(size, int) for size in sizes):
            yield f"{name_of(owner(cache))} is copied at each step, because a size of it is a symbol"


def written(self: Any, places: Any, updates: Any) -> Any:
    """A copy in which rows are written in place. torchair drops the copy of a graph input that the result goes back
    to."""
    return ge.ScatterNdUpdate(ge.TensorMove(self), places, updates)


def assert_async(self: Any, assert_msg: str = "", meta_outputs: Any = None) -> Any:
    """`aten::_assert_async.msg(Tensor self, str assert_msg)`: a no-op here, because GE has no assertions."""
    return self


@torch.library.custom_op("mla_fx_ascend::copied", mutates_args=())
def copied(cache: Tensor) -> Tensor:
    """A copy of a cache, for an operator that mutates an argument that its schema says it only reads."""
    return cache.clone()


@copied.register_fake
def _(cache: Tensor) -> Tensor:
    return torch.empty_like(cache)


def tensor_move(cache: Any, meta_outputs: Any = None) -> Any:
    """`mla_fx_ascend::copied`. `aten::clone` would become an Identity, which has no memory of its own."""
    return ge.TensorMove(cache)
