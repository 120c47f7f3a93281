"""Lowers mla_prolog_v3 to torch_npu.npu_mla_prolog_v3_functional, which is MlaPrologV3 in graphs."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mla_fx.errors import NoMatch
from mla_fx.ops.common.sizes import statically_known_true
from mla_fx.ops.emitted.mla_prolog_v3.arguments import Arguments
from mla_fx.target import Compiled

from .. import limits, prolog_form
from ..lengths import as_tensor
from ..mla_prolog_v3_rules import RULES, Rules
from ..surface import Surface
from ..weights import in_fractals

OPERATOR = "mla_prolog_v3"
KERNEL = "MlaPrologV3"

PER_TILE = 3  # kv_cache_quant_mode of packed rows, which have no kr_cache

OWN = ("rope_layout", "gamma_after_cast")  # not in the vendor's interface
# Arguments that torch_npu takes by keyword only.
OPTIONS = tuple(name for name in list(Arguments.__dataclass_fields__)[11:] if name not in OWN)


def lower(surface: Surface, a: Arguments) -> Compiled:
    if surface.prolog != "v3":
        chosen = f"{surface.prolog} here, by its version or by option prolog"
        raise NoMatch(f"the prolog of torch_npu is {chosen}; {KERNEL} is v3")
    prolog_form.refuse_rotations(surface, a, KERNEL)
    if a.cache_mode == "Norm":
        prolog_form.refuse_formats(surface, KERNEL)
        prolog_form.refuse_unpaged(a, KERNEL)
    refuse_unsupported(surface, prolog_form.paged(a, prolog_form.page_shapes))
    return prolog


def refuse_unsupported(surface: Surface, a: Arguments) -> None:
    """Raises NoMatch unless the kernel takes this call. The operator has already checked how its arguments combine."""
    rules = limits.rules(surface, KERNEL, RULES)
    kernel = limits.of_release(surface, KERNEL)
    prolog_form.refuse_sizes(a, rules, KERNEL, kernel)
    refuse_modes(a, kernel, rules)
    for name in ("weight_uk", "rmsnorm_gamma_cq", "rmsnorm_gamma_ckv", "rope_sin", "rope_cos"):
        limits.dtype(name, getattr(a, name), KERNEL, (torch.bfloat16,))
    refuse_caches(a, kernel, rules)


def refuse_modes(a: Arguments, kernel: str, rules: Rules) -> None:
    allowed = {
        "cache_mode": rules.cache_modes,
        "weight_quant_mode": rules.weight_quant_modes,
        "kv_cache_quant_mode": rules.cache_quant_modes,
        "query_norm_flag": rules.query_norm_flags,
    }
    for name, values in allowed.items():
        limits.choice(name, getattr(a, name), kernel, values)


def refuse_caches(a: Arguments, kernel: str, rules: Rules) -> None:
    if rules.misplaces_scales and a.kv_cache_quant_mode == PER_TILE and a.cache_mode.startswith("PA"):
        misplaced = "the scales of a token without a slot before the first page"
        raise NoMatch(f"kv_cache_quant_mode is {PER_TILE}; {kernel} writes {misplaced}")
    names = ("kv_cache",) if a.kv_cache_quant_mode == PER_TILE else ("kv_cache", "kr_cache")
    for name in names:
        cache: Tensor = getattr(a, name)
        limits.dense(name, cache, KERNEL, first=1)
        if a.cache_mode.startswith("PA"):
            limits.page_size(name, cache.shape[1], kernel, rules.pages)


def prolog(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """The results of `mla_fx.mla_prolog_v3`.

    The kernel multiplies by gamma before it rounds, regardless of `gamma_after_cast`. This is one rounding less."""
    *others, kv_cache, kr_cache = vendor_call(surface, prolog_form.formed(a))
    return *others, kv_cache.view(a.kv_cache.shape), kr_cache.view(a.kr_cache.shape)


def is_long(surface: Surface, a: Arguments) -> bool:
    """Whether each sequence may have more tokens than the kernel takes of one."""
    most = limits.rules(surface, KERNEL, RULES).tokens
    return most is not None and a.token_x.ndim == 3 and not statically_known_true(a.token_x.shape[1] <= most)


def one_by_one(a: Arguments) -> Arguments:
    """The same call with tokens [T, He], in any number. Slots count through all pages anyway."""
    assert a.cache_index is not None and a.cache_mode.startswith("PA"), "other cache modes were refused"
    names = ("token_x", "rope_sin", "rope_cos", "cache_index")
    return replace(a, **{name: getattr(a, name).flatten(0, 1) for name in names})


def vendor_call(surface: Surface, a: Arguments) -> tuple[Tensor, ...]:
    """The same for a call in the vendor's own form."""
    if is_long(surface, a):
        query, query_rope, query_scale, query_norm, *others = vendor_call(surface, one_by_one(a))
        lead = a.token_x.shape[:2]
        query, query_rope = (part.view(*lead, *part.shape[1:]) for part in (query, query_rope))
        query_norm = query_norm.view(*lead, -1) if a.query_norm_flag else query_norm
        return query, query_rope, query_scale, query_norm, *others
    dense = (a.rmsnorm_gamma_cq, a.rmsnorm_gamma_ckv, a.rope_sin, a.rope_cos)
    ends = None if a.actual_seq_len is None else as_tensor(a.actual_seq_len, torch.int32, a.token_x.device)
    query, query_rope, query_scale, query_norm, norm_scale, kv_cache, kr_cache = (
        torch.ops.npu.npu_mla_prolog_v3_functional(
            a.token_x.contiguous(),
            in_fractals(surface, a.weight_dq),
            in_fractals(surface, a.weight_uq_qr),
            a.weight_uk.contiguous(),
            in_fractals(surface, a.weight_dkv_kr),
            *(tensor.contiguous() for tensor in dense),
            a.kv_cache,
            a.kr_cache,
            **{name: getattr(a, name) for name in OPTIONS} | {"actual_seq_len": ends},
        )
    )
    # results that a mode does not have are [1] up to CANN 8.5, and [0] in later versions
    query_scale = query_scale if a.kv_cache_quant_mode == 1 else query_scale[:0]
    query_norm = query_norm if a.query_norm_flag else query_norm[:0]
    norm_scale = norm_scale if a.query_norm_flag and a.weight_quant_mode > 0 else norm_scale[:0]
    return query, query_rope, query_scale, query_norm, norm_scale, kv_cache, kr_cache
