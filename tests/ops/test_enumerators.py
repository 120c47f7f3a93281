"""How the options of the ATB operators may be written."""

import pytest
import torch
from lib.operators.harness import CATALOGUE, by_name, samples

from mla_fx.ops.called.enumerators import enumerator

MASKS = ("undefined", "mask_type_spec", "mask_type_free")
SECOND_NAMES = {"mask_type_mask_free": "mask_type_free"}


def read(value):
    return enumerator("mask_type", value, "mask_type_", MASKS, SECOND_NAMES)


@pytest.mark.parametrize("spelling", ["mask_type_spec", "MASK_TYPE_SPEC", "spec", "Spec", "1"])
def test_a_choice_has_spellings_and_a_number(spelling):
    assert read(spelling) == "mask_type_spec"


@pytest.mark.parametrize("spelling", ["mask_type_mask_free", "MASK_FREE", "mask_type_free", "free", "2"])
def test_a_second_name_means_the_same_choice(spelling):
    assert read(spelling) == "mask_type_free"


@pytest.mark.parametrize("value", ["", "mask_type", "mask_type_", "calc_type_spec", "3", "-1", "1.0"])
def test_what_is_neither_a_name_nor_a_number_is_refused(value):
    message = (
        r"mask_type is '.*'; allowed: 'undefined', 'mask_type_spec', 'mask_type_free', or their numbers '0' to '2'"
    )
    with pytest.raises(ValueError, match=message):
        read(value)


NAMED = {
    "paged_attention": (
        ("mask_type", ("undefined", "norm", "alibi", "spec", "mask_free", "norm_compress")),
        ("quant_type", ("undefined", "dequant_fusion", "qkv_offline", "qkv_online")),
        ("compress_type", ("undefined", "kvhead", "kvhead_rope")),
        ("calc_type", ("undefined", "spec")),
        ("scale_type", ("tor", "logn")),
        ("input_layout", ("bsnd", "bnsd")),
    ),
    "multi_latent_attention": (
        ("mask_type", ("undefined", "mask_type_spec", "mask_type_free")),
        ("calc_type", ("undefined", "spec", "ring")),
        ("cache_mode", ("kvcache", "krope_ctkv", "int8_nzcache", "nzcache")),
    ),
}


def number_of(value, choices):
    """The place of a name, which may have a prefix; the longest match counts, as in kvhead_rope."""
    return max((len(name), place) for place, name in enumerate(choices) if value.lower().endswith(name))[1]


@pytest.mark.parametrize("as_lists", [False, True], ids=["tensors", "lists"])
@pytest.mark.parametrize("name", NAMED)
def test_numbers_mean_what_the_names_mean(name, as_lists):
    """Every sample in bfloat16, with numbers for all of its enumerators."""
    operator = CATALOGUE[name]
    packet = getattr(torch.ops.mla_fx, name)
    for sample in samples(name, torch.bfloat16):
        arguments = by_name(operator, sample.args, sample.kwargs)
        wanted = operator.overload(**arguments)
        numbered = arguments | {key: number_of(arguments[key], choices) for key, choices in NAMED[name]}
        if as_lists:
            lengths = ("context_lens", "q_seqlen", "batch_run_status", "q_seq_lens")
            numbered |= {key: numbered[key].tolist() for key in lengths if numbered.get(key) is not None}
        torch.testing.assert_close(packet(**numbered), wanted, rtol=0, atol=0, equal_nan=True)
