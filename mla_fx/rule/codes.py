"""Codes: values that the program quantises, or keeps quantised."""

from mla_fx.readings.behind import quantised_up_projection
from mla_fx.readings.codes.dequantised import codes_behind, dequantised
from mla_fx.readings.codes.given import StaticCodes, computed_otherwise
from mla_fx.readings.codes.products import Scaling, quantised_product
from mla_fx.readings.codes.tiles import PRODUCT, QUOTIENT, QuantisedTiles, quantised_tiles
from mla_fx.readings.codes.tokens import QuantisedTokens, rounded_in
from mla_fx.readings.codes.whole_numbers import check_codes
from mla_fx.readings.paged import gathered_codes
from mla_fx.rewriting.materialize import scaled_by

__all__ = [
    "PRODUCT", "QUOTIENT", "QuantisedTiles", "QuantisedTokens", "Scaling", "StaticCodes", "check_codes",
    "codes_behind", "computed_otherwise", "dequantised", "gathered_codes", "quantised_product", "quantised_tiles",
    "quantised_up_projection", "rounded_in", "scaled_by",
]  # fmt: skip
