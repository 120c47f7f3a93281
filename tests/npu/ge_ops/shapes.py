"""Operators that make, move and pick elements without computing."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchair.ge._ge_graph import ge_type_to_torch_type


def _numbers(x: Tensor) -> list[int]:
    """The numbers of an operand, which may be a single one."""
    return x.flatten().tolist()


def Identity(x: Tensor) -> Tensor:
    return x


def TensorMove(x: Tensor) -> Tensor:
    return x.clone()


def Assign(ref: Tensor, value: Tensor, **_: Any) -> Tensor:
    return ref.copy_(value)


def Shape(x: Tensor, dtype: int) -> Tensor:
    return torch.tensor(x.shape, dtype=ge_type_to_torch_type(dtype))


def Reshape(x: Tensor, shape: Tensor, axis: int, num_axes: int) -> Tensor:
    if axis or num_axes != -1:
        raise NotImplementedError(f"Reshape with axis {axis} and num_axes {num_axes}; they must be 0 and -1")
    return x.reshape(_numbers(shape))


def Transpose(x: Tensor, perm: Tensor) -> Tensor:
    return x.permute(_numbers(perm)).contiguous()


def Unsqueeze(x: Tensor, axes: list[int]) -> Tensor:
    for axis in axes:
        x = x.unsqueeze(axis)
    return x


def ExpandDims(x: Tensor, axis: Tensor) -> Tensor:
    return x.unsqueeze(int(axis))


def Squeeze(x: Tensor, axis: list[int]) -> Tensor:
    return x.squeeze(axis) if axis else x.squeeze()


def ReverseV2(x: Tensor, axis: Tensor) -> Tensor:
    return x.flip(_numbers(axis))


def BroadcastTo(x: Tensor, shape: Tensor) -> Tensor:
    """Sizes of -1 stay as they are."""
    return x.expand(_numbers(shape)).contiguous()


Expand = BroadcastTo


def Tile(x: Tensor, multiples: Tensor) -> Tensor:
    return x.tile(_numbers(multiples))


def Fill(dims: Tensor, value: Tensor) -> Tensor:
    return value.reshape(()).expand(_numbers(dims)).contiguous()


def Empty(shape: Tensor, dtype: int, init: bool) -> Tensor:
    """Elements that need not be 0 are a number that shows if it is read."""
    out = torch.empty(_numbers(shape), dtype=ge_type_to_torch_type(dtype))
    return out.fill_(0 if init or not out.is_floating_point() else torch.nan)


def ZerosLike(x: Tensor) -> Tensor:
    return torch.zeros_like(x)


def OnesLike(x: Tensor) -> Tensor:
    return torch.ones_like(x)


def Range(start: Tensor, limit: Tensor, delta: Tensor, **_: Any) -> Tensor:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


def Pack(x: list[Tensor], N: int, axis: int) -> Tensor:
    return torch.stack(x, axis)


def Unpack(x: Tensor, num: int, axis: int) -> list[Tensor]:
    return list(x.unbind(axis))


def ConcatV2(x: list[Tensor], concat_dim: Tensor, N: int) -> Tensor:
    return ConcatD(x, int(concat_dim), N)


Concat = ConcatV2


def ConcatD(x: list[Tensor], concat_dim: int, N: int) -> Tensor:
    if len({part.dtype for part in x}) > 1:
        raise ValueError(f"parts are {[part.dtype for part in x]}; GE operators take one dtype")
    return torch.cat(x, concat_dim)


def SplitV(x: Tensor, size_splits: Tensor, split_dim: Tensor, num_split: int) -> list[Tensor]:
    return SplitVD(x, _numbers(size_splits), int(split_dim), num_split)


def SplitVD(x: Tensor, size_splits: list[int], split_dim: int, num_split: int) -> list[Tensor]:
    rest = x.shape[split_dim] - sum(size for size in size_splits if size != -1)
    return list(x.split([rest if size == -1 else size for size in size_splits], split_dim))


def Split(split_dim: Tensor, x: Tensor, num_split: int) -> list[Tensor]:
    return SplitD(x, int(split_dim), num_split)


def SplitD(x: Tensor, split_dim: int, num_split: int) -> list[Tensor]:
    return list(x.tensor_split(num_split, split_dim))


def Slice(x: Tensor, offsets: Tensor, size: Tensor) -> Tensor:
    """A size of -1 reaches to the end."""
    ends = (
        None if count == -1 else start + count for start, count in zip(_numbers(offsets), _numbers(size), strict=True)
    )
    return x[tuple(slice(start, end) for start, end in zip(_numbers(offsets), ends, strict=True))]


def StridedSlice(
    x: Tensor,
    begin: Tensor,
    end: Tensor,
    strides: Tensor,
    begin_mask: int,
    end_mask: int,
    ellipsis_mask: int,
    new_axis_mask: int,
    shrink_axis_mask: int,
) -> Tensor:
    """Bit i of a mask is for axis i: leave out its begin or end, or take the one element at begin."""
    if ellipsis_mask or new_axis_mask:
        raise NotImplementedError("StridedSlice with an ellipsis_mask or new_axis_mask")
    index: list[slice | int] = []
    for axis, (first, last, step) in enumerate(zip(_numbers(begin), _numbers(end), _numbers(strides), strict=True)):
        bit = 1 << axis
        piece = slice(None if begin_mask & bit else first, None if end_mask & bit else last, step)
        index.append(first if shrink_axis_mask & bit else piece)
    return x[tuple(index)]


def StridedSliceV2(
    x: Tensor, begin: Tensor, end: Tensor, axes: Tensor | None = None, strides: Tensor | None = None, **masks: int
) -> Tensor:
    """Without axes the first ones, without strides each element."""
    if any(masks.values()):
        raise NotImplementedError(f"StridedSliceV2 with masks {masks}; they must be 0")
    index = [slice(None)] * x.ndim
    for place, (first, last) in enumerate(zip(_numbers(begin), _numbers(end), strict=True)):
        axis = place if axes is None else _numbers(axes)[place]
        index[axis] = slice(first, last, None if strides is None else _numbers(strides)[place])
    return x[tuple(index)]


StridedSliceV3 = StridedSliceV2


def Gather(x: Tensor, indices: Tensor, batch_dims: int, negative_index_support: bool, **_: Any) -> Tensor:
    return GatherV2(x, indices, torch.tensor(0), batch_dims, negative_index_support)


def GatherV2(
    x: Tensor, indices: Tensor, axis: Tensor, batch_dims: int, negative_index_support: bool, **_: Any
) -> Tensor:
    if batch_dims:
        raise NotImplementedError(f"batch_dims is {batch_dims}, it must be 0")
    dimension = int(axis) % x.ndim
    places = indices.flatten()
    if negative_index_support:
        places = torch.where(places < 0, places + x.shape[dimension], places)
    picked = x.index_select(dimension, places)
    return picked.reshape([*x.shape[:dimension], *indices.shape, *x.shape[dimension + 1 :]])


def GatherElements(x: Tensor, index: Tensor, dim: int) -> Tensor:
    return x.gather(dim, index.long())


def GatherNd(x: Tensor, indices: Tensor, **_: Any) -> Tensor:
    return x[indices.long().unbind(-1)]


def IndexByTensor(x: Tensor, indices: list[Tensor], indices_mask: list[int]) -> Tensor:
    """x[indices], where the mask says which axes have an index."""
    given = iter(indices)
    return x[tuple(next(given) if is_given else slice(None) for is_given in indices_mask)]


def ScatterElements(data: Tensor, indices: Tensor, updates: Tensor, axis: int, reduction: str) -> Tensor:
    if reduction == "none":
        return data.scatter(axis, indices.long(), updates)
    return data.scatter_reduce(axis, indices.long(), updates, {"add": "sum"}.get(reduction, reduction))


ScatterElementsV2 = ScatterElements


def ScatterNdUpdate(var: Tensor, indices: Tensor, updates: Tensor, **_: Any) -> Tensor:
    """In place. On a device places are numbers from 0 on."""
    if (indices < 0).any():
        raise ValueError("indices are negative; ScatterNdUpdate counts from 0")
    var[indices.long().unbind(-1)] = updates
    return var


def ScatterUpdate(var: Tensor, indices: Tensor, updates: Tensor, **_: Any) -> Tensor:
    """In place, along axis 0."""
    var[indices.long()] = updates
    return var


def Scatter(var: Tensor, indices: Tensor, updates: Tensor, reduce: str, axis: int) -> Tensor:
    """In place: the rows of batch row b go to positions indices[b] and the following ones of `axis`."""
    if reduce != "update":
        raise NotImplementedError(f"Scatter with reduce {reduce!r}; it must be 'update'")
    for row, start in enumerate(_numbers(indices)):
        var[row].narrow(axis % var.ndim - 1, start, updates.shape[axis]).copy_(updates[row])
    return var


def MaskedFill(x: Tensor, mask: Tensor, value: Tensor) -> Tensor:
    return x.masked_fill(mask, value.to(x.dtype).reshape(()))


def Select(condition: Tensor, x1: Tensor, x2: Tensor) -> Tensor:
    return torch.where(condition, x1, x2)


def SelectV2(condition: Tensor, then: Tensor, **otherwise: Tensor) -> Tensor:
    """Its third input is named else, a keyword in Python."""
    return torch.where(condition, then, otherwise["else"])


def PadV3(x: Tensor, paddings: Tensor, constant_values: Tensor, mode: str, paddings_contiguous: bool) -> Tensor:
    """Paddings are [before, after] of each axis, the first axis first."""
    if mode != "constant" or not paddings_contiguous:
        raise NotImplementedError(f"PadV3 with mode {mode!r} and paddings_contiguous {paddings_contiguous}")
    pairs = paddings.reshape(-1, 2).flip(0)
    return torch.nn.functional.pad(x, _numbers(pairs), value=constant_values.item())


def Triu(x: Tensor, diagonal: int) -> Tensor:
    return x.triu(diagonal)


def Tril(x: Tensor, diagonal: int) -> Tensor:
    return x.tril(diagonal)


def TopKV2(x: Tensor, k: Tensor, sorted: bool, dim: int, largest: bool, **_: Any) -> tuple[Tensor, Tensor]:
    values, indices = x.topk(int(k), dim, largest, sorted)
    return values, indices.int()


TopK = TopKV2


def AsStrided(x: Tensor, size: Tensor, stride: Tensor, storage_offset: Tensor) -> Tensor:
    return x.contiguous().as_strided(_numbers(size), _numbers(stride), int(storage_offset)).contiguous()
