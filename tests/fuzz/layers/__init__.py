"""Layers of latent attention that the zoo lacks: other masks, caches, pages, projections; two steps, two layers."""

from __future__ import annotations

from . import caches, heads, masks, pages, projections, rotations
from .plain import Layer, Sizes

S = Sizes()
EVEN = Sizes(batch=3, tokens=3, context=8, heads=4, hidden=8, q_rank=8, rank=8, nope=4, rope=4, value=4)
SAME = Sizes(batch=2, tokens=6, context=6, heads=3, hidden=6, q_rank=6, rank=6, nope=6, rope=4, value=6, start=0)
LEVEL = Sizes(batch=4, tokens=4, context=4, heads=4, hidden=4, q_rank=4, rank=4, nope=4, rope=4, value=4, start=0)
SINGLE = Sizes(batch=3, tokens=1)
SQUARE = Sizes(tokens=4, context=4, heads=4, rank=4, start=0)
TWINS = Sizes(batch=2, tokens=2, context=8, heads=2, hidden=4, q_rank=4, rank=4, nope=2, rope=4, value=4, start=2)
WIDE = Sizes(batch=2, tokens=2, context=8, heads=2, hidden=6, q_rank=5, rank=8, nope=2, rope=4, value=4, start=2)
BLOCKS = Sizes(batch=2, tokens=2, context=4, heads=2, hidden=4, q_rank=4, rank=4, nope=2, rope=4, value=4, start=1)

LAYERS: dict[str, tuple[type[Layer], Sizes]] = {
    "plain": (Layer, S),
    "plain even": (Layer, EVEN),
    "plain same": (Layer, SAME),
    "causal same": (heads.Causal, SAME),
    "plain level": (Layer, LEVEL),
    "bool added": (masks.BoolAdded, S),
    "flags written": (masks.FlagsWritten, EVEN),
    "bool as fill": (masks.BoolAsFill, S),
    "bool and flags": (masks.BoolAndFlags, S),
    "minus ten thousand": (masks.MinusTenThousand, S),
    "smallest number": (masks.SmallestNumber, S),
    "blind row": (masks.BlindRow, EVEN),
    "blind added": (masks.BlindAdded, S),
    "exp over sum": (masks.ExpOverSum, SQUARE),
    "exp over sum unsqueezed": (masks.ExpOverSumUnsqueezed, SQUARE),
    "safe softmax": (masks.SafeSoftmax, S),
    "sink": (masks.Sink, S),
    "sink first": (masks.SinkFirst, EVEN),
    "sink level": (masks.Sink, LEVEL),
    "unrotated": (heads.Unrotated, S),
    "one key": (heads.OneKey, S),
    "causal": (heads.Causal, EVEN),
    "absorbed": (heads.Absorbed, S),
    "absorbed grouped": (heads.AbsorbedGrouped, S),
    "absorbed causal": (heads.AbsorbedCausal, EVEN),
    "heads as rows": (heads.HeadsAsRows, S),
    "one context": (heads.OneContext, EVEN),
    "one context causal": (heads.OneContextCausal, EVEN),
    "complex": (rotations.ComplexRope, EVEN),
    "complex factor": (rotations.ComplexFactor, S),
    "conjugated table": (rotations.ConjugatedTable, S),
    "at slice": (caches.AtSlice, EVEN),
    "at number": (caches.AtNumber, SINGLE),
    "at last": (caches.AtLast, SINGLE),
    "at last slice": (caches.AtLastSlice, S),
    "at index": (caches.AtIndex, EVEN),
    "at index from the end": (caches.AtIndexFromTheEnd, S),
    "read from the end": (caches.ReadFromTheEnd, S),
    "cloned and copied": (caches.ClonedAndCopied, S),
    "old and new": (caches.OldAndNew, S),
    "batched": (caches.Batched, EVEN),
    "one buffer": (caches.OneBuffer, S),
    "one buffer by layer": (caches.OneBufferByLayer, S),
    "two steps": (caches.TwoSteps, S),
    "two layers": (caches.TwoLayers, S),
    "two layers even": (caches.TwoLayers, EVEN),
    "two layers level": (caches.TwoLayers, LEVEL),
    "groups": (heads.Groups, EVEN),
    "grouped queries": (heads.GroupedQueries, S),
    "two ups": (heads.TwoUps, S),
    "two ups even": (heads.TwoUps, EVEN),
    "order of keys": (heads.OrderOfKeys, EVEN),
    "two orders": (heads.TwoOrders, EVEN),
    "order of values": (heads.OrderOfValues, EVEN),
    "riffled query": (heads.RiffledQuery, EVEN),
    "flat cache": (caches.FlatCache, SINGLE),
    "flat cache, last": (caches.FlatCacheLast, SINGLE),
    "appended": (caches.Appended, EVEN),
    "combined": (caches.Combined, TWINS),
    "combined in two": (caches.CombinedInTwo, S),
    "combined in two, twins": (caches.CombinedInTwo, TWINS),
    "combined, keys first": (caches.CombinedKeysFirst, EVEN),
    "combined, by number": (caches.CombinedByNumber, EVEN),
    "combined, by sequence": (caches.CombinedBySequence, S),
    "pages, twins": (pages.Pages, TWINS),
    "blocks and offsets": (pages.BlocksAndOffsets, EVEN),
    "heads before rows": (pages.HeadsBeforeRows, S),
    "counted twice": (pages.CountedTwice, EVEN),
    "two tables": (pages.TwoTables, EVEN),
    "sink pages": (pages.SinkPages, S),
    "combined pages, square": (pages.CombinedPages, BLOCKS),
    "combined pages in two": (pages.CombinedPagesInTwo, TWINS),
    "biased": (projections.Biased, WIDE),
    "lora": (projections.Lora, EVEN),
    "presplit": (projections.Presplit, S),
    "tied": (projections.Tied, EVEN),
    "scaled apart": (projections.ScaledApart, LEVEL),
    "quantised": (projections.Quantised, S),
    "dequantised": (projections.Dequantised, EVEN),
}
