"""Inductor: fused operators become decompositions that it compiles well. It compiles the rest of the graph as usual."""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from mla_fx.errors import NoMatch, OptionError
from mla_fx.graph.torch_compilers import (
    compile_fx,
    compile_fx_frozen,
    compile_fx_inner,
    inductor_decompositions,
    inductor_key,
    inductor_modes,
    inductor_options,
    inductor_type,
    is_freezing,
    is_packaging,
    not_cached,
)
from mla_fx.graph.torch_private import OpOverload
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.readings.sizes import Size
from mla_fx.rewriting.draft import Change
from mla_fx.rewriting.emitter import Emitter
from mla_fx.target import Compiled, Fusing, Lowering, Target

from . import cpu, cuda, loops
from .cpu import costs, few_coded_rows, few_rows

aten = torch.ops.aten
DOT_PRODUCTS = "dot_products"
KERNELS = "kernels"
OWN = frozenset((DOT_PRODUCTS, KERNELS))
HALVES = (torch.bfloat16, torch.float16)
CODES = (torch.int8, torch.uint8)
INDEXED = aten.index_put.default, aten._unsafe_index_put.default
UPDATES = *INDEXED, aten.slice_scatter.default, aten.select_scatter.default
FEW_ROWS = 8  # measured: with more, the library is faster despite its copies
MOST_STREAMS = 8  # measured, for weights of 16 bits; half as many for 8 bits
SMALL = 2**12  # multiplications; a loop takes about 40 ms more to compile, and saves about 3 us per call
SMALL_FOR_HEADS = 2**20  # the same for a batched product, whose library call takes about 25 us; measured


class Inductor(Target):
    name = "inductor"
    writes_in_place = False  # Inductor reinplaces by itself, and fuses functional graphs better
    fuses_loops = True
    is_fallback = True
    is_saved = True
    left_out = MappingProxyType(
        {
            prolog: f"int8 projections are faster one by one than in {prolog}"
            for prolog in ("mla_prolog_v3", "mla_prolog_quant")
        }
    )

    def serves(self, example_inputs: Sequence[Any]) -> bool:
        return True

    def accepts(self) -> frozenset[str]:
        return inductor_options() | OWN

    def check(self, options: Mapping[str, Any]) -> None:
        _wants_dot_products(options)
        _kernels(options)
        for name, value in _of_inductor(options).items():
            taken = inductor_type(name)
            if not isinstance(value, taken):
                raise OptionError(f"option {name} is {value!r}; Inductor takes {taken.__name__}")

    def mode_options(self, mode: Any) -> Mapping[str, Any]:
        modes = inductor_modes()
        if mode not in tuple(modes):
            raise OptionError(f"mode is {mode!r}; target {self.name!r} has {', '.join(map(repr, modes))}")
        return modes[mode]

    def lowerings(self, options: Mapping[str, Any], *, prepares: bool) -> Mapping[OpOverload, Lowering]:
        """Few calls may stay in a package of AOTInductor, whose process has none of the operators and kernels."""
        alone = is_packaging()
        plain = loops.lowerings(alone=alone)
        return plain if alone else cuda.lowerings(cpu.lowerings(plain), _kernels(options))

    def most_absorbed_tokens(self, device: torch.device, context: Size) -> int:
        return costs.most_absorbed_tokens(device, context)

    def refuse(self, a: Arguments) -> None:
        costs.refuse(a)

    def plain_lowerings(self, options: Mapping[str, Any]) -> Mapping[OpOverload, Lowering]:
        """Lowerings of products of few rows with weights, from fused operators and from all others."""
        wants = _wants_dot_products(options)
        by_loops = {aten.mm.default: _of_rows, aten.bmm.default: _of_heads} if wants else {}
        kernels = functools.partial(_few_rows_or, wants and not is_packaging())
        return {
            name: functools.partial(kernels, other)
            for name, other in {aten._int_mm.default: _of_one_row, **by_loops}.items()
        }

    def coded_lowerings(self, options: Mapping[str, Any]) -> Mapping[OpOverload, Lowering]:
        """Lowerings of products of few rows with codes."""
        has_kernels = _wants_dot_products(options) and not is_packaging()
        products = aten.mm.default, aten.bmm.default, aten.addmm.default
        return dict.fromkeys(products, few_coded_rows.lower) if has_kernels else {}

    def mended(self, emit: Emitter) -> Iterator[tuple[str, Change]]:
        """Updates of inputs that are reordered afterwards write copies.

        Inductor lets both write the input, and fuses loops that read and write a buffer at different places if that was
        written before: its scheduler looks for reads by the buffer's first name. It leaves views alone."""
        for copy in emit.graph.find_nodes(op="call_function", target=aten.copy_.default):
            source, value = copy.args
            for update in [] if value.target in UPDATES else [*source.users]:
                if update.target in UPDATES and update.args[0] is source:
                    view = emit.call(aten.expand.default, source, [-1] * source.meta["val"].dim())
                    new = emit.call(update.target, view, *update.args[1:], **update.kwargs)
                    note = f"{update.target._opname} writes a copy, which Inductor would reorder while it reads it"
                    yield note, Change.of([(update, new)], {*update.all_input_nodes})

    def decompositions(self) -> Mapping[Any, Compiled]:
        """Inductor's own, but with a batched product of one batch as a plain product, which has the better kernel."""
        table = inductor_decompositions()
        batched = table.get(aten.bmm.default)

        def bmm(left: Tensor, right: Tensor) -> Tensor:
            if isinstance(left.shape[0], int) and left.shape[0] == 1:
                return torch.mm(left[0], right[0]).unsqueeze(0)
            return NotImplemented if batched is None else batched(left, right)

        return {**table, aten.bmm.default: bmm}

    def compile(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        fusing: Fusing,
        options: Mapping[str, Any],
    ) -> Compiled:
        """Compile with a single AOTAutograd pass.

        Inductor traces, and the graph is rewritten just before the inner compiler, so that compiler's cache is keyed by
        the rewritten graph. AOTAutograd's cache comes first, and a graph from it needs its saved report."""
        is_frozen, is_fresh = is_freezing(), False
        fused = fusing(_freezing(gm, fusing) if is_frozen else compile_fx_inner)
        own = _wants_dot_products(options), _kernels(options), cuda.installed()
        key = None if fusing.key is None else f"{fusing.key} {own}"

        def inner(graph_module: GraphModule, inputs: Sequence[Any], **given: Any) -> Compiled:
            nonlocal is_fresh
            if given.get("is_backward"):
                return compile_fx_inner(graph_module, inputs, **given)
            is_fresh = True
            compiled = fused(graph_module, inputs, **given)
            return compiled if fusing.save_report(inductor_key(compiled)) else not_cached(compiled)

        settings = {**_for_meta(example_inputs), **_of_inductor(options)}
        if is_frozen:
            settings["freezing"], key = False, None  # the inner compiler freezes, after fusing
        compiled = compile_fx(gm, example_inputs, inner, settings, key)
        if is_fresh or fusing.load_report(inductor_key(compiled)):
            return compiled
        return compile_fx(gm, example_inputs, inner, settings, None)


def _freezing(traced: GraphModule, fusing: Fusing) -> Compiled:
    """Inductor's freezing compiler, which packs weights. It reports the memory of the constants it adds to them."""
    own = {_memory(weight) for weight in (*traced.parameters(), *traced.buffers())}

    def compile_frozen(graph_module: GraphModule, inputs: Sequence[Any], **given: Any) -> Compiled:
        compiled = compile_fx_frozen(traced, graph_module, inputs, **given)
        names = {str(node.target) for node in graph_module.graph.find_nodes(op="get_attr")}
        constants = [operator.attrgetter(name)(graph_module) for name in names]
        kept = (value for value in constants if isinstance(value, Tensor) and _memory(value) not in own)
        fusing.report_weights(sum(value.nbytes for value in kept))
        return compiled

    return compile_frozen


def _memory(value: Tensor) -> int | None:
    """The address of a tensor's storage; None if it has no strided one, like a packed weight."""
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else None


def _for_meta(example_inputs: Sequence[Any]) -> Mapping[str, Any]:
    """Inductor's constant folding drops results on meta, and everything they are computed from."""
    is_meta = any(isinstance(value, Tensor) and value.is_meta for value in example_inputs)
    return {"joint_graph_constant_folding": False} if is_meta else {}


def _of_inductor(options: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in options.items() if name not in OWN}


def _kernels(options: Mapping[str, Any]) -> str:
    """The target's own option: which kernels attend over latents on CUDA devices. Raises OptionError."""
    word = options.get(KERNELS, cuda.KERNELS[0])
    if not isinstance(word, str) or word not in cuda.KERNELS:
        raise OptionError(f"option {KERNELS} is {word!r}; it takes {', '.join(map(repr, cuda.KERNELS))}")
    return word


def _wants_dot_products(options: Mapping[str, Any]) -> bool:
    """The target's own option: whether products of few rows with weights are lowered. Raises OptionError."""
    word = options.get(DOT_PRODUCTS, True)
    if not isinstance(word, bool):
        raise OptionError(f"option {DOT_PRODUCTS} is {word!r}; it takes False, True")
    return word


def _few_rows_or(
    has_kernels: bool, other: Lowering, rows: Tensor, weight: Tensor, *, are_parameters: Sequence[bool]
) -> Compiled:
    """Lower a product of few rows and a large weight to its kernel; other products as `other` does. Loops read what a
    weight is computed from, such as codes; a kernel would have it stored first."""
    if has_kernels and are_parameters[1]:
        with contextlib.suppress(NoMatch):
            return few_rows.lower(rows, weight)
    return other(rows, weight)


def _of_rows(rows: Tensor, weight: Tensor) -> Compiled:
    """Lower a plain product on a CPU in three cases. Raises NoMatch otherwise.

    One is a product so small that a library call takes longer than its multiplications. The others are one row times a
    16-bit weight, and a few rows times a weight of 8-bit integers, both transposed in memory, as `nn.Linear` stores
    them."""
    sizes = *rows.shape, weight.shape[1]
    if weight.device.type != "cpu" or not all(isinstance(size, int) for size in sizes):
        raise NoMatch("Inductor's own product is for other devices and symbolic sizes")
    is_float = rows.dtype == weight.dtype and weight.dtype in (*HALVES, torch.float32)
    if is_float and 0 < rows.shape[0] <= FEW_ROWS and math.prod(sizes) <= SMALL:
        return small_products
    most = FEW_ROWS if weight.dtype in CODES else 1
    if not 0 < rows.shape[0] <= most or weight.stride(0) != 1 or not _are_narrow(rows, weight):
        raise NoMatch("a library multiplies such rows faster")
    return dot_products


def _of_one_row(rows: Tensor, weight: Tensor) -> Compiled:
    """Lower a product of one row of integers. Raises NoMatch otherwise.

    A CPU library reads the row by its stride, and Inductor gives one row the stride 0."""
    if weight.device.type != "cpu" or not isinstance(rows.shape[0], int) or rows.shape[0] != 1:
        raise NoMatch("Inductor multiplies several rows of integers right")
    return product_of_one_row


def _of_heads(rows: Tensor, weights: Tensor) -> Compiled:
    """Lower a batched product of each head's rows and weights of 16 or 8 bits on a CPU. Raises NoMatch otherwise.

    Weights of 16 bits are lowered if the product is small, or if they are not contiguous, like those of keys and values
    in one projection. The CPU library copies such weights at every call, slowly because it copies across their memory
    order."""
    is_fixed = all(isinstance(number, int) for number in (*weights.shape, *weights.stride()))
    if weights.device.type != "cpu" or not is_fixed or not _are_narrow(rows, weights):
        raise NoMatch("Inductor's own product is for other devices, dtypes and symbolic sizes")
    is_few = isinstance(rows.shape[1], int) and 0 < rows.shape[1] <= FEW_ROWS
    is_small = is_few and math.prod((*weights.shape, rows.shape[1])) <= SMALL_FOR_HEADS
    if not is_small and weights.dtype not in CODES and (weights.is_contiguous() or weights.mT.is_contiguous()):
        raise NoMatch("a library reads such weights in their own layout")
    if is_few:
        return sums_for_rows
    if weights.stride(1) != 1:
        raise NoMatch("a library copies such weights fast enough")
    return products_of_copies


def _are_narrow(rows: Tensor, weights: Tensor) -> bool:
    return rows.dtype in HALVES and weights.dtype in (rows.dtype, *CODES)


def product_of_one_row(row: Tensor, weight: Tensor) -> Tensor:
    """[1, K] @ [K, N] of integers, as the first row of two."""
    product: Tensor = aten._int_mm(row.expand(2, -1).contiguous(), weight)
    return product[:1]


def small_products(rows: Tensor, weight: Tensor) -> Tensor:
    """[Rows, K] @ [K, N] in a loop, which may fuse with neighbouring loops."""
    return sums_for_rows(rows.unsqueeze(0), weight.unsqueeze(0)).squeeze(0)


def sums_for_rows(rows: Tensor, weights: Tensor) -> Tensor:
    """[B, Rows, K] @ [B, K, N] in one loop, in which each weight is read once for all rows."""
    stored = _stored(rows)
    sums = [(stored[:, row].unsqueeze(-1) * weights.float()).sum(1) for row in range(rows.shape[1])]
    return torch.stack(sums, 1).to(rows.dtype)


def products_of_copies(rows: Tensor, weights: Tensor) -> Tensor:
    """[B, Rows, K] @ [B, K, N], with the weights copied in memory order."""
    return torch.bmm(rows, weights.to(rows.dtype).mT.contiguous().mT)


def dot_products(rows: Tensor, weight: Tensor) -> Tensor:
    """[Rows, K] @ [K, N] as N dot products per row along contiguous memory. Reading the weight is the only cost."""
    return torch.cat([_dot_products(row, weight) for row in torch.split(rows, 1)])


def _dot_products(row: Tensor, weight: Tensor) -> Tensor:
    """A long dot product is summed in several streams at once, so that it is bound by memory and not by its own sum."""
    inner, columns = weight.shape
    streams = _streams(inner, MOST_STREAMS // 2 if weight.dtype in CODES else MOST_STREAMS)
    weight_snk = weight.permute(1, 0).reshape(columns, streams, inner // streams).permute(1, 0, 2)
    row_s1k = _stored(row).reshape(streams, 1, inner // streams)
    products = (weight_snk[stream].float() * row_s1k[stream] for stream in range(streams))
    return functools.reduce(torch.add, products).sum(-1).to(row.dtype).unsqueeze(0)


def _stored(rows: Tensor) -> Tensor:
    """16-bit rows as float32, materialised by a read by strides.

    Otherwise Inductor would fuse the producer, such as a norm, and recompute it for each weight that its result
    multiplies."""
    if rows.dtype == torch.float32:
        return rows
    wide = rows.float()
    return wide.as_strided(wide.shape, wide.stride())


def _streams(inner: int, most: int) -> int:
    """The number of streams of a dot product. Measured: they pay from 4096 elements on, with at least 1024 each."""
    if inner < 4096:
        return 1
    return max(count for count in range(1, most + 1) if inner % count == 0 and inner // count >= 1024)
