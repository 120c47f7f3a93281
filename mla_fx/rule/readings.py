"""Readings of what no word reads: a rule asks for them itself."""

from __future__ import annotations

from mla_fx.readings.attention import anchors, attention, weighted_sum
from mla_fx.readings.calls import CASTS
from mla_fx.readings.constant import rounded
from mla_fx.readings.contraction import parted_at, segments
from mla_fx.readings.element import computed_between, computed_from
from mla_fx.readings.log_sum_exp import LogSumExp, beside, log_sum_exp, logarithms
from mla_fx.readings.low_rank import down_projection, is_cached_per_head, is_projected_from, rank, seems_low_rank
from mla_fx.readings.rms_norm import rms_norm
from mla_fx.readings.rope import rope
from mla_fx.readings.same_value import same_value
from mla_fx.readings.softmax import LOGARITHMS
from mla_fx.readings.views import seams, written_slice

__all__ = [
    "CASTS", "LOGARITHMS", "LogSumExp", "anchors", "attention", "beside", "computed_between", "computed_from",
    "down_projection", "is_cached_per_head", "is_projected_from", "log_sum_exp", "logarithms", "parted_at", "rank",
    "rms_norm", "rope", "rounded", "same_value", "seams", "seems_low_rank", "segments", "weighted_sum",
    "written_slice",
]  # fmt: skip
