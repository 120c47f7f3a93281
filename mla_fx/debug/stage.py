"""What a dumped graph imports: it runs the graph on random inputs and prints what comes out."""

import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from types import FunctionType
from typing import Any

import sympy
import torch
from torch import Tensor

import mla_fx.ops  # noqa: F401  registers the fused operators
from mla_fx.comparing.reproduce import any_like
from mla_fx.graph.torch_private import dtype_abbrs, tree_leaves

DTYPES = {name: dtype for dtype, name in dtype_abbrs.items()}
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>.*?)\](?: strides \((?P<strides>.*?)\))?(?: on (?P<device>\S+))?")
_RANGE = re.compile(r"\{([\d,-]+)\}")


def run(graph: FunctionType, types: Mapping[str, str]) -> None:
    """Compute a dumped graph on random inputs, and print shape and checksum of each result and each changed input.

    Inputs depend on their names and types alone, so the checksums of two stages compare. Whole numbers are 0 or 1: such
    positions are in any cache, such tokens in any vocabulary. Exits with a sentence if an input has no known type."""
    sizes = {name: size for name, size in vars(sys.modules[graph.__module__]).items() if type(size) is int}
    inputs = {name: random_input(name, type_, sizes) for name, type_ in expanded(types)}
    before = {name: value.clone() for name, value in inputs.items() if isinstance(value, Tensor)}
    with torch.no_grad():
        results = tree_leaves(graph(inputs))
    for place, result in enumerate(results):
        print(f"output {place}: {summary(result)}")
    for name, old in before.items():
        if not _is_same(inputs[name], old):
            print(f"written {name}: {summary(inputs[name])}")


def random_input(name: str, type_: str, sizes: Mapping[str, int]) -> Any:
    """A value of a type such as `bf16[s0, 64] strides (128, 1)`, the same for the same name."""
    found = _TENSOR.fullmatch(type_)
    if found is None:
        return _size(type_, sizes) if type_ else sys.exit(f"The graph needs {name}, whose type is unknown.")
    shape, dtype = _sizes(found["shape"], sizes), DTYPES[found["dtype"]]
    strides = (
        torch.empty(shape, device="meta").stride() if found["strides"] is None else _sizes(found["strides"], sizes)
    )
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return any_like(shape, strides, dtype, found["device"] or "cpu").draw(generator)


def summary(value: Any) -> str:
    """Type and checksum: the sum of all elements in float64, and that of their magnitudes."""
    if not isinstance(value, Tensor):
        return repr(value)
    type_ = f"{dtype_abbrs[value.dtype]}[{', '.join(map(str, value.shape))}]"
    if value.is_meta:
        return type_
    numbers = (torch.view_as_real(value) if value.is_complex() else value).double()
    return f"{type_} sum {numbers.sum():.6g}, of magnitudes {numbers.abs().sum():.6g}"


def _is_same(value: Tensor, old: Tensor) -> bool:
    return value.is_meta or torch.equal(_bytes(value), _bytes(old))


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _sizes(text: str, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(_size(part, sizes) for part in text.split(", ") if part)


def _size(text: str, sizes: Mapping[str, int]) -> int:
    return int(sympy.sympify(text, locals=dict(sizes)))


def expanded(types: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """One name for each number in the ranges, `layers.{0-2,5}.weight`."""
    for name, type_ in types.items():
        found = _RANGE.search(name)
        for number in _numbers(found[1]) if found else [""]:
            yield (f"{name[: found.start()]}{number}{name[found.end() :]}" if found else name), type_


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from map(str, range(int(first), int(last or first) + 1))
