"""Codes: values that the program quantises, or keeps quantised."""

from mla_fx.readings.behind import quantised_up_projection as quantised_up_projection
from mla_fx.readings.codes.dequantised import codes_behind as codes_behind
from mla_fx.readings.codes.dequantised import dequantised as dequantised
from mla_fx.readings.codes.given import StaticCodes as StaticCodes
from mla_fx.readings.codes.given import computed_otherwise as computed_otherwise
from mla_fx.readings.codes.products import Scaling as Scaling
from mla_fx.readings.codes.products import quantised_product as quantised_product
from mla_fx.readings.codes.tiles import PRODUCT as PRODUCT
from mla_fx.readings.codes.tiles import QUOTIENT as QUOTIENT
from mla_fx.readings.codes.tiles import QuantisedTiles as QuantisedTiles
from mla_fx.readings.codes.tiles import quantised_tiles as quantised_tiles
from mla_fx.readings.codes.tokens import QuantisedTokens as QuantisedTokens
from mla_fx.readings.codes.tokens import rounded_in as rounded_in
from mla_fx.readings.codes.whole_numbers import check_codes as check_codes
from mla_fx.readings.paged import gathered_codes as gathered_codes
from mla_fx.rewriting.materialize import scaled_by as scaled_by
