"""Codes: values that the program quantises, or keeps quantised."""

from mla_fx.readings.dequantised import codes_behind
from mla_fx.readings.paged import gathered_codes
from mla_fx.readings.quantised import quantised_up_projection
from mla_fx.readings.quantised_product import quantised_product
from mla_fx.readings.quantised_tiles import PRODUCT, QUOTIENT, QuantisedTiles, quantised_tiles
from mla_fx.readings.quantised_tokens import QuantisedTokens, check_codes, rounded_in
from mla_fx.readings.scaling import Scaling
from mla_fx.readings.static_codes import StaticCodes, computed_otherwise
from mla_fx.rewriting.materialize import scaled_by

__all__ = [
    "PRODUCT", "QUOTIENT", "QuantisedTiles", "QuantisedTokens", "Scaling", "StaticCodes", "check_codes",
    "codes_behind", "computed_otherwise", "gathered_codes", "quantised_product", "quantised_tiles",
    "quantised_up_projection", "rounded_in", "scaled_by",
]  # fmt: skip
