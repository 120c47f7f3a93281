"""A complete pattern and the operator that it fuses to: the output side of absorbed attention.

    out = (latents weight_uv) weight_o           from attention over latents to each head's values, and to the output

`python examples/add_a_pattern.py` tries it on its cases. Copied into `patterns/`, this file is part of the compiler: it
is found there, applied to every graph, and tested on its cases with all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mla_fx.cases import DV
from mla_fx.ops import Sample, Sampler, check_letters, check_tensors, define
from mla_fx.rule import (
    Call,
    Case,
    Contraction,
    Layer,
    Match,
    NoMatch,
    OperandAxes,
    Plan,
    Rule,
    ValuePattern,
    contract,
    is_parameter,
    replaced,
    result,
    tensor,
    var,
)

aten = torch.ops.aten

# --- the operator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arguments:
    latents: Tensor
    weight_uv: Tensor
    weight_o: Tensor


def body(a: Arguments) -> Tensor:
    """latents [T, N, Hckv], weight_uv [N, Dv, Hckv], weight_o [N*Dv, He], all of one dtype, to [T, He].

    Raises ValueError for arguments that do not fit. Inference only."""
    values = torch.einsum("tnc,nvc->tnv", a.latents, a.weight_uv)
    return values.flatten(1) @ a.weight_o


def check(a: Arguments) -> None:
    check_tensors(vars(a))
    sizes: dict[str, int] = {}
    check_letters(a, sizes, latents="T, N, Hckv", weight_uv="N, Dv, Hckv")
    sizes["N*Dv"] = sizes["N"] * sizes["Dv"]
    check_letters(a, sizes, weight_o="N*Dv, He")


def fake(a: Arguments) -> Tensor:
    return a.latents.new_empty(a.latents.shape[0], a.weight_o.shape[1])


def samples(dtype: torch.dtype) -> Iterator[Sample]:
    draw = Sampler(dtype, 0)
    weights = draw.weight(3, 5, 8, fan_in=8), draw.weight(15, 6, fan_in=15)
    yield Sample("plain", (draw.normal(4, 3, 8), *weights), {})


operator = define("latent_output", Arguments, body, returns=("out",), check=check, fake=fake, samples=samples)

# --- the pattern -----------------------------------------------------------------------------------------------------


class _ScaledOutput(Layer):
    """The values are multiplied by a number per column before they are projected."""

    def attend(self, *operands: Tensor) -> Tensor:
        return super().attend(*operands) * torch.arange(1.0, DV + 1)


class LatentOutput(Rule):
    stage = "cache"
    targets = (aten.mm.default,)
    pattern = ValuePattern(
        contract(contract(var("latents"), var("weight_uv"), name="up"), var("weight_o"), name="out"), rank=2
    )
    accepts = (Case("plain", Layer, {"mla_prolog": 1, "latent_attention": 1, "latent_output": 1}),)
    rejects = (Case("scaled values", _ScaledOutput, because="a matrix product is multiplied by another value"),)

    def rewrite(self, match: Match) -> Plan:
        """t are the axes of tokens, n of heads, hckv, dv and he of latent, value and hidden columns."""
        up, out = match.reading(Contraction, "up"), match.reading(Contraction, "out")
        if (up.factor, out.factor) != (1.0, 1.0):
            raise NoMatch("a product is multiplied by a number", out.node)
        for name in ("weight_uv", "weight_o"):
            if not is_parameter(match[name].node):
                raise NoMatch(f"{name} is computed in the graph, expected a parameter", match[name].node)
        t, he = match.roles("value")
        n, hckv = tuple(axis for axis in out.axes if axis in match["latents"].axes), up.axes
        dv = tuple(axis for axis in out.axes if axis not in n)
        call = Call(
            operator.overload,
            tensor(match["latents"], (t, n, hckv)),
            tensor(match["weight_uv"], (n, dv, hckv)),
            tensor(match["weight_o"], ((*n, *dv), he)),
        )
        value = match.reading(OperandAxes, "value.axes")
        return Plan(replaced(value.node, value.dims, result(call, (t, he))))


if __name__ == "__main__":
    from mla_fx.driver.try_cases import check_accepted, check_refused

    rule = LatentOutput()
    for case in rule.accepts:
        check_accepted(case, rule)
        print(f"{case.name}: fused {dict(case.fused)}, and answers as before")
    for case in rule.rejects:
        check_refused(rule, case, rule)
        print(f"{case.name}: refused, because {case.because!r}")
