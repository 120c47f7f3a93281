"""Readings of what no word reads: a rule asks for them itself."""

from mla_fx.matching.match import OperandAxes
from mla_fx.readings.attention import Attention, anchors, attention, weighted_sum
from mla_fx.readings.calls import CASTS, args_of, keywords, named_argument, operands_of, options_of, positional
from mla_fx.readings.codes.dequantised import Dequantised
from mla_fx.readings.concatenation import own_part
from mla_fx.readings.constant import rounded
from mla_fx.readings.contraction import PRODUCTS, Contraction, parted_at, segments
from mla_fx.readings.element import (
    Element,
    computed_between,
    computed_from,
    computed_with,
    element_of,
    has_8_bits,
    is_coarser,
    is_parameter,
    narrows,
)
from mla_fx.readings.index_scores import TOPK, IndexScores, check_read_alone, has_index_scores, index_scores
from mla_fx.readings.log_sum_exp import LogSumExp, beside, log_sum_exp, logarithms
from mla_fx.readings.low_rank import down_projection, is_cached_per_head, is_projected_from, rank, seems_low_rank
from mla_fx.readings.merged_parts import Merge, merge_before, merges
from mla_fx.readings.merged_sums import MergedSums, ends_of_sums, merged_sums
from mla_fx.readings.paged import Paged
from mla_fx.readings.reading import Reading
from mla_fx.readings.rms_norm import RmsNorm, rms_norm
from mla_fx.readings.rope import Rope, Table, rope
from mla_fx.readings.same_value import are_neighbours, is_same, joined, same_value
from mla_fx.readings.selection import Selection, choices, seems_chosen, selection
from mla_fx.readings.softmax import LOGARITHMS
from mla_fx.readings.views import seams, shape_of, written_slice

__all__ = [
    "CASTS", "LOGARITHMS", "PRODUCTS", "TOPK", "Attention", "Contraction", "Dequantised", "Element", "IndexScores",
    "LogSumExp", "Merge", "MergedSums", "OperandAxes", "Paged", "Reading", "RmsNorm", "Rope", "Selection", "Table",
    "anchors", "are_neighbours", "args_of", "attention", "beside", "check_read_alone", "choices", "computed_between",
    "computed_from", "computed_with", "down_projection", "element_of", "ends_of_sums", "has_8_bits", "has_index_scores",
    "index_scores", "is_cached_per_head", "is_coarser", "is_parameter", "is_projected_from", "is_same", "joined",
    "keywords", "log_sum_exp", "logarithms", "merge_before", "merged_sums", "merges", "named_argument", "narrows",
    "operands_of", "options_of", "own_part", "parted_at", "positional", "rank", "rms_norm", "rope", "rounded",
    "same_value", "seams", "seems_chosen", "seems_low_rank", "segments", "selection", "shape_of", "weighted_sum",
    "written_slice",
]  # fmt: skip
