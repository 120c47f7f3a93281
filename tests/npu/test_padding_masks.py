"""Padding masks by arithmetic, converted to GE: attention fuses as with a plain mask, and outputs and caches are as
exact as eager's."""

import functools

import pytest
import torch
from lib.layers import Sizes, check_no_further
from lib.padding_masks import QUICK, SPELLINGS, Padded, given, without_padding

from npu.converted import types

pytestmark = pytest.mark.filterwarnings("ignore::mla_fx.MlaWarning")
ATTENTION = "FusedInferAttentionScore"
REAL = {"context": 256, "heads": 4, "hidden": 1024, "query_rank": 1536, "rank": 512, "nope": 128, "rope": 64}


def layer(spelling, tokens, grows=False):
    return Padded(spelling, Sizes(tokens=tokens, value=128, **REAL), grows).bfloat16()


@functools.cache
def plain(tokens, grows):
    """What fuses where padding is hidden by a condition."""
    module = layer(None, tokens, grows)
    return check_no_further(module, given(module, torch.bfloat16), target="ge").fused


@pytest.mark.parametrize("grows", [False, True], ids=["static", "growing"])
@pytest.mark.parametrize("tokens", [1, 20], ids=["step", "prompt"])
@pytest.mark.parametrize(
    "spelling", [name if name in QUICK else pytest.param(name, marks=pytest.mark.campaign) for name in SPELLINGS]
)
def test_padding_masks_fuse(spelling, tokens, grows):
    module = layer(SPELLINGS[spelling], tokens, grows)
    flags = torch.int64 if tokens == 1 else torch.bfloat16
    report = check_no_further(module, given(module, torch.bfloat16, flags), target="ge")
    assert report.fused == plain(tokens, grows), str(report)
    assert {"latent_attention", "mla_attention"} & {*report.fused}


@pytest.mark.parametrize("spelling", QUICK)
def test_flags_of_lengths_are_lengths_of_the_kernel(converted, spelling):
    """A declared mask gives each sequence its length."""
    module = layer(SPELLINGS[spelling], 1)
    lengths = torch.tensor([[200], [37]])
    arguments = *without_padding(module, torch.bfloat16), (torch.arange(256) < lengths).long()
    report = check_no_further(module, arguments, target="ge", causal_masks=True)
    assert types(converted.graphs[0]).count(ATTENTION) == 1, str(report)
