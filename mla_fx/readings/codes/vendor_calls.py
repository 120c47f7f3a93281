"""Ascend's operators for quantised values, which a program calls itself.

    codes, scale = npu_dynamic_quant(x)     m = max |x| over the last axis, codes = round(x * 127 / m), scale = m / 127
    npu_quant_matmul(codes, weight, column_scale, pertoken_scale=scale)
                                            codes @ weight in whole numbers, times both scales, rounded once

They are known by name, so torch_npu need not be installed.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from mla_fx.errors import NoMatch
from mla_fx.graph.provenance import label_of
from mla_fx.graph.torch_private import OpOverload
from mla_fx.readings.axes import Index, fresh
from mla_fx.readings.calls import args_of, argument, named_argument
from mla_fx.readings.contraction import BIAS, Contraction, matmul
from mla_fx.readings.element import Element, Scales, operand, resolve
from mla_fx.readings.same_value import read_along
from mla_fx.readings.sizes import product
from mla_fx.readings.views import shape_of

PRODUCT, QUANTISER = "npu_quant_matmul", "npu_dynamic_quant"
SCALES = (torch.float32, torch.bfloat16)
PACKED = ("x1_dtype", "x2_dtype", "pertoken_scale_dtype", "scale_dtype")
INT8 = (None, torch.int8, 1)  # torch_npu numbers dtypes, too


def _is_call(node: Any, name: str) -> bool:
    target = node.target if isinstance(node, Node) else None
    return isinstance(target, OpOverload) and target.namespace == "npu" and target._opname == name


# --- products --------------------------------------------------------------------------------------------------------


def is_quant_matmul(node: Node) -> bool:
    return _is_call(node, PRODUCT)


def quant_matmul(element: Element) -> Contraction:
    """Read npu_quant_matmul as a product of codes with scales per row, or none, and per column. Raises NoMatch if it
    does more."""
    node = element.origin
    _check_operands(node)
    _check_result(node)
    *_, row, column = element.index
    found = matmul(element, argument(node, 0), argument(node, 1))
    dtype = element.coarsest or element.dtype
    left = replace(found.left, scales=Scales(_of_rows(node, row), dtype))
    right = replace(found.right, scales=Scales((_of_columns(node, column),), dtype))
    return replace(found, left=left, right=right)


def _check_operands(node: Node) -> None:
    """Raises NoMatch unless both operands are int8, one code in each byte."""
    left, right = (argument(node, place).meta["val"].dtype for place in (0, 1))
    if (left, right) != (torch.int8, torch.int8):
        raise NoMatch(f"{PRODUCT} multiplies {left} by {right}; torch.int8 by torch.int8 is read", node)
    for name in PACKED:
        if (dtype := named_argument(node, name)) is not None:
            raise NoMatch(f"{PRODUCT} reads a tensor as another dtype, {name}={dtype}", node)
    if any(sizes := named_argument(node, "group_sizes") or ()):
        raise NoMatch(f"{PRODUCT} has scales of groups, group_sizes={list(sizes)}", node)


def _check_result(node: Node) -> None:
    """Raises NoMatch unless the result is the product and its scales, rounded to a dtype that holds it."""
    if named_argument(node, "bias") is not None:
        raise NoMatch(BIAS, node)
    if named_argument(node, "offset") is not None:
        raise NoMatch(f"{PRODUCT} adds an offset to its result", node)
    if named_argument(node, "y_scale") is not None:
        raise NoMatch(f"{PRODUCT} has a scale for its result, y_scale", node)
    dtype = node.meta["val"].dtype
    if dtype not in SCALES:
        raise NoMatch(f"{PRODUCT} gives {dtype}; torch.bfloat16 and torch.float32 are read", node)


def _of_columns(node: Node, column: Index) -> Element:
    scale = argument(node, 2)
    dtype, shape = scale.meta["val"].dtype, shape_of(scale)
    if dtype not in SCALES:
        raise NoMatch(f"the scale of {PRODUCT} is {dtype}; torch.float32 and torch.bfloat16 are read", scale)
    if len(shape) != 1:
        raise NoMatch(f"the scale of {PRODUCT} is {list(shape)}; one number per column is read", scale)
    return operand(scale, (column,))


def _of_rows(node: Node, row: Index) -> tuple[Element, ...]:
    scale = named_argument(node, "pertoken_scale")
    if scale is None:
        return ()
    *batch, rows, _ = shape_of(argument(node, 0))
    if product(batch) != 1 or shape_of(scale) != (rows,):
        shapes = f"pertoken_scale of {PRODUCT} is {list(shape_of(scale))} for x1 {[*batch, rows, '*']}"
        raise NoMatch(f"{shapes}; one number per row of a matrix is read", scale)
    return (operand(scale, (row,)),)


# --- tokens ----------------------------------------------------------------------------------------------------------


def is_dynamic_quant(node: Node) -> bool:
    """Whether a node is the codes that npu_dynamic_quant returns."""
    return node.target is operator.getitem and args_of(node)[1] == 0 and _is_call(args_of(node)[0], QUANTISER)


def dynamic_quant(codes: Element, scales: tuple[Element, ...]) -> tuple[Element, tuple[Index, ...]]:
    """What npu_dynamic_quant quantised, and the indices that run over a token. Raises NoMatch unless the scale is that
    of the codes' token."""
    call = args_of(codes.origin)[0]
    _check_quantiser(call)
    scale, *others = scales
    if others:
        raise NoMatch(f"the codes of {QUANTISER} have {len(scales)} scales, expected that of the call", codes.origin)
    if scale.origin.target is not operator.getitem or args_of(scale.origin) != (call, 1):
        because = f"the scale of the codes of {QUANTISER} is not that of the same call, but {label_of(scale.origin)}"
        raise NoMatch(because, codes.origin)
    if scale.roundings:
        raise NoMatch(f"the scale of {QUANTISER} is rounded to {scale.roundings[0]}", scale.origin)
    *token, _ = codes.index
    if scale.index != tuple(token):
        raise NoMatch(f"codes of {QUANTISER} are multiplied by the scale of another token", scale.origin)
    codes, run = replace(codes, scales=None), fresh(shape_of(codes.origin)[-1])
    over = read_along(codes, replace(codes, index=(*token, run)), (run,))
    if over is None:
        raise NoMatch(f"a part of a token is read that {QUANTISER} quantised as a whole", codes.origin)
    return resolve(argument(call, 0), codes.index).times(scale.factor), over


def _check_quantiser(call: Node) -> None:
    """Raises NoMatch unless each token is quantised alone, to int8 and as it is."""
    if named_argument(call, "smooth_scales") is not None:
        raise NoMatch(f"{QUANTISER} multiplies tokens by smooth_scales; multiply them before", call)
    if named_argument(call, "group_index") is not None:
        raise NoMatch(f"{QUANTISER} has groups of tokens, group_index", call)
    if (mode := named_argument(call, "quant_mode")) not in (None, "pertoken"):
        raise NoMatch(f"{QUANTISER} has quant_mode={mode!r}; 'pertoken' is read", call)
    if (dtype := named_argument(call, "dst_type")) not in INT8:
        raise NoMatch(f"{QUANTISER} quantises to dst_type={dtype}; torch.int8 is read", call)
    if largest := named_argument(call, "dst_type_max"):
        raise NoMatch(f"{QUANTISER} has dst_type_max={largest:.6g}; codes up to 127 are read", call)
