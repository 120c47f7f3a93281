"""Calls of this package's operators by users: a prolog, and comparisons."""

import torch
from torch import nn

import mla_fx
from mla_fx.ops.common.sample import Sampler
from npu.calls import BLOCKS, DR, HCKV, PAGE, D
from npu.converted import types

BF16 = torch.bfloat16
HE, HCQ, N = 1024, 1536, 4


def compiled(function, dynamic=False):
    return torch.compile(function, backend=mla_fx.get_backend(target="ge", soc="Ascend910B3"), dynamic=dynamic)


def check(run, eager, given, rtol=0, atol=0):
    """Outputs and what became of the arguments, which the call may write."""
    mine, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
    torch.testing.assert_close(run(*mine), eager(*theirs), rtol=rtol, atol=atol)
    torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)


class Prolog(nn.Module):
    """One layer's call, and a product that reads the cache after it."""

    def __init__(self, form, **options):
        super().__init__()
        draw = Sampler(BF16)
        weights = (
            draw.weight(HE, HCQ, fan_in=HE),
            draw.weight(HCQ, N * (D + DR), fan_in=HCQ),
            draw.weight(N, D, HCKV, fan_in=D),
            draw.weight(HE, HCKV + DR, fan_in=HE),
            draw.gamma(HCQ),
            draw.gamma(HCKV),
        )
        self.weights = nn.ParameterList(weights)
        self.form, self.options = form, options

    def forward(self, token_x, *rest):
        *tables, kv_cache, kr_cache = rest
        call = token_x, *self.weights, *tables, kv_cache, kr_cache
        if self.form == "twin":
            query, query_rope = torch.ops.mla_fx.mla_prolog_(*call, **self.options)
        else:
            query, query_rope, kv, kr = torch.ops.mla_fx.mla_prolog(*call, **self.options)
            kv_cache.copy_(kv)
            kr_cache.copy_(kr)
        return query, query_rope, kv_cache * 2


def prolog_call(cache_mode, batch=2, steps=3, page=PAGE, room=256, shared=False):
    """The arguments beside the weights; the first token has no place. `shared`: one row of positions, and of tables."""
    draw, is_contiguous, rows = Sampler(BF16, seed=1), cache_mode == "Norm", 1 if shared else batch
    lead = (batch, 1, room) if is_contiguous else (BLOCKS, page, 1)
    index = draw.slots(rows * steps, room if is_contiguous else BLOCKS * page, skip=1).view(rows, steps)
    tables = draw.tables(rows, steps, DR)
    return [draw.normal(batch, steps, HE), *tables, index, draw.normal(*lead, HCKV), draw.normal(*lead, DR)]


def check_one_graph_for_pages_of_several_sizes(converted):
    layer = Prolog("twin")
    run = compiled(layer, dynamic=True)
    for page in (PAGE, 64, 256):
        check(run, layer, prolog_call("PA_BSND", page=page))
    (graph,) = converted.graphs
    counts = [types(graph).count(name) for name in ("MlaPrologV3", "TensorMove")]
    assert counts == [1, 0], f"prologs and copies: {counts}"


def check_exact(found, wanted):
    """Weights of attention are rounded to bfloat16 as well as the result, each by up to 2^-9 of itself."""
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=2**-8 * float(wanted.abs().max()))
