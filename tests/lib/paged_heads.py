"""A serving engine's layer with paged keys and values per head, in many spellings, compared with eager mode."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.functional import embedding, pad, scaled_dot_product_attention

import mla_fx
from lib.comparing import check_same
from lib.layers import Rewritten, variant

GATHERS = ("index.Tensor", "index_select", "embedding")
HIDDEN, HEADS, BLOCK = 32, 4, 16
STARTS = (19, 7, 3, 12, 25)


@dataclass(frozen=True)
class Sizes:
    batch: int = 3
    tokens: int = 5
    blocks: int = 6
    kv_heads: int = 2
    width: int = 8
    columns: int = 8
    block: int = BLOCK


class Engine(nn.Module):
    """A layer of a serving engine in pieces that tests override: rows are written by slot, contexts gathered through a
    table."""

    def __init__(self, sizes=None):
        super().__init__()
        z = self.sizes = sizes or Sizes()
        # numbers, even if sizes are symbols
        self.kv_heads, self.width, self.columns, self.block = z.kv_heads, z.width, z.columns, z.block
        generator = torch.Generator().manual_seed(0)
        widths = HEADS * z.width, z.kv_heads * z.width, z.kv_heads * z.columns
        self.qkv = nn.ParameterList(
            torch.randn(HIDDEN, width, generator=generator, dtype=torch.float64) * HIDDEN**-0.5 for width in widths
        )

    def forward(self, x, table, starts, key_cache, value_cache):
        query, *rows = self.project(x)
        positions = starts.unsqueeze(1) + torch.arange(x.shape[1])
        slots = table.gather(1, positions // self.block) * self.block + positions % self.block
        for cache, row in zip((key_cache, value_cache), rows, strict=True):
            self.store(cache, slots, row)
        tables = self.tables(table)
        key, value = (self.context(cache, own) for cache, own in zip((key_cache, value_cache), tables, strict=True))
        return self.attend(query, self.keys(key), self.values(value), positions)

    def project(self, x):
        """[B, S, heads, columns] of queries, keys and values."""
        heads = HEADS, self.kv_heads, self.kv_heads
        return [(x @ weight).unflatten(-1, (n, -1)) for weight, n in zip(self.qkv, heads, strict=True)]

    def store(self, cache, slots, row):
        self.flat(cache)[slots] = row

    def flat(self, cache):
        """[BlockNum * BlockSize, Hkv, columns]."""
        return cache.view(-1, *cache.shape[2:])

    def tables(self, table):
        return table, table

    def context(self, cache, table):
        """[B, T, Hkv, columns]."""
        return cache[table].flatten(1, 2)

    def keys(self, key):
        return key

    def values(self, value):
        return value

    def seen(self, keys, positions):
        """[B, S, T]."""
        return keys <= positions

    def mask(self, key, positions):
        """[B, 1, S, T]."""
        return self.seen(torch.arange(key.shape[1]), positions.unsqueeze(-1)).unsqueeze(1)

    def repeated(self, rows):
        return rows.repeat_interleave(HEADS // self.kv_heads, 2)

    def attend(self, query, key, value, positions):
        parts = (part.transpose(1, 2) for part in (query, self.repeated(key), self.repeated(value)))
        return scaled_dot_product_attention(*parts, attn_mask=self.mask(key, positions)).transpose(1, 2)


def arguments(sizes, dtype=torch.float64):
    """More pages than are named, with tables in any order."""
    z, generator = sizes, torch.Generator().manual_seed(sizes.batch)
    blocks = z.batch * z.blocks + 1
    table = torch.randperm(blocks, generator=generator)[: z.batch * z.blocks].view(z.batch, z.blocks)
    shapes = (blocks, z.block, z.kv_heads, z.width), (blocks, z.block, z.kv_heads, z.columns)
    caches = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    x = torch.randn(z.batch, z.tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    return x, table, torch.tensor(STARTS[: z.batch]), *caches


def heads_first(given):
    """The same with caches of pages [Hkv, BlockSize, columns]."""
    return *given[:3], *(cache.transpose(1, 2).contiguous() for cache in given[3:])


def table_of_each_head(sizes, dtype=torch.float64):
    """Tables and lengths of B * Hkv heads; caches have pages of one."""
    x, *_ = arguments(sizes, dtype)
    _, *rest = arguments(replace(sizes, batch=sizes.batch * sizes.kv_heads, kv_heads=1), dtype)
    return x, *rest


def compared(run, module, given, close):
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", mla_fx.MlaWarning)
        check_same(module, given, run, **close)


CLOSE = {"rtol": 1e-6, "atol": 1e-7}  # of float64
FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}


def check(module, *, close=CLOSE, given=None, **options):
    """Check that results and caches are eager's, in float64; return the report."""
    torch._dynamo.reset()
    run = Rewritten(module, **options)
    compared(run, module, arguments(module.sizes) if given is None else given, close)
    return run.report


def check_no_context_is_gathered(report):
    """In what a report keeps of graphs."""
    gathered = [sum(f"aten.{name}" in report.graphs[stage] for name in GATHERS) for stage in ("captured", "lower")]
    assert gathered[0] and not gathered[1], report.graphs["lower"]


def check_all_sizes(kind, given_of, target="reference"):
    """One graph: batch, tokens, blocks and those of a sequence are symbols."""
    torch._dynamo.reset()
    shapes = [Sizes(3, 5, 7, 2, 8, 6), Sizes(5, 7, 9, 2, 8, 6), Sizes(2, 3, 11, 2, 8, 6)]
    module = kind(shapes[0])
    run = torch.compile(fixed(module), backend=mla_fx.get_backend(target=target), dynamic=True, fullgraph=True)
    compared(run, module, given_of(shapes[0]), CLOSE)
    assert mla_fx.last_report().fused == {"paged_attention": 1}, str(mla_fx.last_report())
    with torch.compiler.set_stance("fail_on_recompile"):
        for sizes in shapes[1:]:
            compared(run, module, given_of(sizes), CLOSE)


def check_no_coarser(module, given):
    """Against the program in float64. Caches are the program's."""
    torch._dynamo.reset()
    exact = copy.deepcopy(module).double()(*[part.double() if part.is_floating_point() else part for part in given])
    theirs, ours = copy.deepcopy(given), copy.deepcopy(given)
    with torch.no_grad():
        near = module(*theirs)
        found = (run := Rewritten(module))(*ours)
    report = run.report
    assert report.fused == {"paged_attention": 1} and report.checked, str(report)
    assert (found - exact).norm() <= 1.5 * (near - exact).norm() + 1e-6 * exact.norm()
    assert found.dtype == near.dtype and all(map(torch.equal, ours, theirs))


class Eager(Engine):
    fill = -torch.inf

    def attend(self, query, key, value, positions):
        query, key, value = (part.transpose(1, 2) for part in (query, self.repeated(key), self.repeated(value)))
        seen = self.mask(key.transpose(1, 2), positions)
        scores = (query @ key.mT * self.width**-0.5).masked_fill(~seen, self.fill)
        return (self.weights(scores) @ value).transpose(1, 2)

    def weights(self, scores):
        return scores.softmax(-1)


class Filled(Eager):
    fill = torch.finfo(torch.float64).min


class Expanded(Eager):
    def repeated(self, rows):
        group = HEADS // self.kv_heads
        return rows.unsqueeze(3).expand(-1, -1, -1, group, -1).flatten(2, 3)


class Turned(Eager):
    """Head n reads key head n % Hkv."""

    def repeated(self, rows):
        group = HEADS // self.kv_heads
        return rows.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(2, 3)


class Grouped(Engine):
    def attend(self, query, key, value, positions):
        group = query.unflatten(2, (self.kv_heads, -1))
        added = torch.zeros((), dtype=query.dtype).where(self.mask(key, positions), -torch.inf)
        scores = torch.einsum("bshgd,bthd->bhgst", group, key) * 0.3 + added.unsqueeze(2)
        return torch.einsum("bhgst,bthd->bshgd", scores.softmax(-1), value).flatten(2, 3)


class Gqa(Engine):
    def attend(self, query, key, value, positions):
        parts = (part.transpose(1, 2) for part in (query, key, value))
        mask = self.mask(key, positions)
        return scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def read(name, context):
    """Another way to read contexts."""
    return variant(name, Engine, context=context)


def selected(my, cache, table):
    return cache.index_select(0, table.flatten()).view(table.shape[0], -1, *cache.shape[2:])


def embedded(my, cache, table):
    return embedding(table, cache.flatten(1)).view(table.shape[0], -1, *cache.shape[2:])


def slots_of(table):
    return (table.unsqueeze(-1) * BLOCK + torch.arange(BLOCK)).flatten(1)


BlocksSelected, BlocksEmbedded = read("BlocksSelected", selected), read("BlocksEmbedded", embedded)
Slots = read("Slots", lambda my, cache, table: my.flat(cache)[slots_of(table)])
BlocksAndOffsets = read(
    "BlocksAndOffsets", lambda my, cache, table: cache[table.unsqueeze(-1), torch.arange(BLOCK)].flatten(1, 2)
)
# Caches [BlockNum, Hkv, BlockSize, columns], with these as views.
HeadsFirst = read(
    "HeadsFirst", lambda my, cache, table: cache.transpose(1, 2)[table].transpose(2, 3).flatten(1, 2)
)


class SlotOfEachToken(Engine):
    """Rows from anywhere: blocks of one row."""

    def tables(self, table):
        slots = slots_of(table).flip(1)
        return slots, slots

    def context(self, cache, table):
        return self.flat(cache)[table]


class PagesOfHeads(Engine):
    """Caches [BlockNum, Hkv, BlockSize, columns]."""

    def store(self, cache, slots, row):
        cache[slots // self.block, :, slots % self.block] = row

    def context(self, cache, table):
        return cache[table].transpose(2, 3).flatten(1, 2)


class RowsOfHeads(PagesOfHeads):
    """The same, written as rows of one head."""

    def store(self, cache, slots, row):
        first = (slots // self.block).unsqueeze(-1) * self.kv_heads + torch.arange(self.kv_heads)
        cache.view(-1, row.shape[-1])[first * self.block + (slots % self.block).unsqueeze(-1)] = row


class TableOfEachHead(Gqa):
    """Compressed heads: each key head of a sequence has a table and a length of its own, in pages of one head."""

    def project(self, x):
        return [part.unflatten(2, (self.kv_heads, -1)).transpose(1, 2).flatten(0, 1) for part in super().project(x)]


class LogarithmOfLength(Gqa):
    """Queries are scaled by the length of their context, as in Qwen."""

    def attend(self, query, key, value, positions):
        lengths = positions.view(*positions.shape, 1, 1) + 1
        return super().attend(query * (lengths.to(query.dtype).log() / 2).clamp(min=1), key, value, positions)


class Padded(Engine):
    """Values as wide as the keys."""

    def values(self, value):
        return pad(value, (0, 3))


class Scaled(Engine):
    def keys(self, key):
        return key * 1.5

    def values(self, value):
        return value * -0.5


class ByLength(Engine):
    """The number of keys that the last token of each sequence sees."""

    def seen(self, keys, positions):
        steps = positions.shape[1]
        return keys < positions[:, -1:] + 1 - steps + 1 + torch.arange(steps).unsqueeze(-1)


class OneFurther(Engine):
    """No length describes this: it stays a mask, also of the operator."""

    def seen(self, keys, positions):
        return keys <= positions + 1


class Window(Engine):
    def seen(self, keys, positions):
        return (keys <= positions) & (keys > positions - 6)


class Slopes(Eager):
    """ALiBi."""

    def mask(self, key, positions):
        self.distance = torch.arange(key.shape[1]) - positions.unsqueeze(-1)
        return super().mask(key, positions)

    def weights(self, scores):
        slopes = torch.arange(1, HEADS + 1, dtype=scores.dtype).view(-1, 1, 1)
        return (scores + self.distance.unsqueeze(1) * slopes * 0.1).softmax(-1)


class Biases(Slopes):
    """Biases depend on head and key alone."""

    def mask(self, key, positions):
        mask = super().mask(key, positions)
        self.distance = torch.arange(key.shape[1]).view(1, 1, -1)
        return mask


class Unmasked(Engine):
    def mask(self, key, positions):
        return None


class Upcast(Eager):
    """Everything in a wider dtype than the caches."""

    def attend(self, query, key, value, positions):
        return super().attend(query.double(), key.double(), value.double(), positions)


def fixed(module):
    """What an engine's config says about its caches."""

    def run(x, table, starts, *caches):
        for cache, columns in zip(caches, (module.width, module.columns), strict=True):
            for size, known in zip(cache.shape[1:], (BLOCK, module.kv_heads, columns), strict=True):
                torch._check(size == known)
        return module(x, table, starts, *caches)

    return run


SPELLINGS = [Engine, Eager, Filled, Expanded, Turned, Grouped, Gqa, BlocksSelected, BlocksEmbedded, Slots]
SPELLINGS += [BlocksAndOffsets, SlotOfEachToken, HeadsFirst, Padded, Scaled, ByLength, OneFurther, Window, Slopes]
SPELLINGS += [Biases, Unmasked, Upcast, LogarithmOfLength]
