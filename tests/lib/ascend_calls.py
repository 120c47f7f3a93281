"""Calls of operators with vendor kernels, on fake tensors, and their lowerings."""

import dataclasses

import pytest
import torch
from mla_fx.lowering.ascend import toolchain
from mla_fx.lowering.ascend.limits import Surface
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mla_fx.errors import NoMatch
from mla_fx.target import modules_of_operators

A2 = Surface("Ascend910B3", "ge", hoists=True, cann="8.5.0")
B, S, HE, HCQ, N, D, HCKV, DR, T = 2, 3, 7168, 1536, 32, 128, 512, 64, 256


def fakes():
    """Tensors made within are fake: nothing is computed."""
    return FakeTensorMode(shape_env=ShapeEnv())


def of(release, **others):
    return dataclasses.replace(A2, cann=release, **others)


def make(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype)


def prolog_weights(he=HE, hcq=HCQ, n=N, d=D, hckv=HCKV, dr=DR):
    return {
        "token_x": make(B, S, he),
        "weight_dq": make(he, hcq),
        "weight_uq_qr": make(hcq, n * (d + dr)),
        "weight_uk": make(n, d, hckv),
        "weight_dkv_kr": make(he, hckv + dr),
        "rmsnorm_gamma_cq": make(hcq),
        "rmsnorm_gamma_ckv": make(hckv),
        "rope_sin": make(B, S, dr),
        "rope_cos": make(B, S, dr),
    }


def caches(*lead, hckv=HCKV, dr=DR):
    return {"kv_cache": make(*lead, hckv), "kr_cache": make(*lead, dr)}


def index(*shape):
    return make(*shape, dtype=torch.int64)


def calls():
    """A call of each operator that its kernel supports."""
    lengths = [5, 200]
    tables = make(B, 3, dtype=torch.int32)
    return {
        "mla_prolog": {**prolog_weights(), "cache_index": index(B, S), **caches(8, 128, 1)},
        "mla_prolog_v3": {**prolog_weights(), **caches(8, 128, 1), "cache_index": index(B, S)},
        "kv_rmsnorm_rope_cache": {
            "kv": make(B, 1, S, HCKV + DR),
            "gamma": make(HCKV),
            "cos": make(B, 1, S, DR),
            "sin": make(B, 1, S, DR),
            "index": index(B * S),
            "k_cache": make(8, 128, 1, DR),
            "ckv_cache": make(8, 128, 1, HCKV),
            "cache_mode": "PA_NZ",
        },
        "latent_attention": {
            "query": make(B, S, N, HCKV),
            "query_rope": make(B, S, N, DR),
            **caches(B, T),
            "scale": 0.1,
            "is_causal": True,
        },
        "mla_attention": {
            "query": make(1, T, N, D),
            "query_rope": make(1, T, N, DR),
            **caches(1, T),
            "weight_uk": make(N, D, HCKV),
            "weight_uv": make(N, D, HCKV),
            "scale": 0.1,
            "is_causal": True,
        },
        "rms_norm": {"x": make(B, S, HE), "gamma": make(HE), "epsilon": 1e-6},
        "rope": {"x": make(B, S, N, DR), "cos": make(1, S, DR), "sin": make(1, S, DR)},
        "multi_latent_attention": {
            "q_nope": make(B, N, HCKV),
            "q_rope": make(B, N, DR),
            "ctkv": make(8, 128, 1, HCKV),
            "k_rope": make(8, 128, 1, DR),
            "block_tables": tables,
            "context_lens": lengths,
        },
        "paged_attention": {
            "query": make(B, N, D),
            "key_cache": make(8, 128, 4, D),
            "value_cache": make(8, 128, 4, D),
            "block_tables": tables,
            "context_lens": lengths,
            "kv_head_num": 4,
        },
    }


def module_of(operator):
    """The module that lowers an operator, which may be named by a form of it."""
    own = "attention" if operator in ("latent_attention", "mla_attention") else operator
    return next(module for entry, module in modules_of_operators(toolchain.HERE) if entry.name == own)


def missing(record):
    """None for each required argument that may be positional."""
    positional = [field for field in dataclasses.fields(record) if not field.kw_only]
    return {field.name: None for field in positional if field.default is dataclasses.MISSING}


def lower(operator, surface=A2, **changes):
    """The plain function, or the sentence that says why the call stays."""
    module = module_of(operator)
    call = calls()[operator] | changes
    try:
        return module.lower(surface, module.Arguments(**{**missing(module.Arguments), **call}))
    except NoMatch as refusal:
        return refusal.reason


def limits(operator, sentences, surface=A2):
    """For a test of the operator: the surface, and the change of its call that each sentence refuses."""
    cases = ((operator, surface, change, sentence) for sentence, change in sentences.items())
    return [pytest.param(*case, id=f"{operator}: {case[-1]}") for case in cases]
