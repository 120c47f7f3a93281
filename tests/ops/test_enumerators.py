"""How the options of the ATB operators may be written."""

import pytest

from mla_fx.ops.common.enumerators import enumerator

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
