"""The masks of paged_attention, all read as rows of one table.

E entries (sequences or, with compression, the key heads of each), K key heads of an entry, S query rows of an entry,
G query heads of a key head, W key positions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mla_fx.ops.common.sizes import statically_known_true

from .arguments import ALIBI, MASK_FREE, NORM, NZ_WIDTH, SPEC, Arguments, Options

FREE_BLOCK = 128
TABLE = 2048
HIDDEN = -3e38


class MaskRows(NamedTuple):
    """What is added to the scores of each query row: a row [C] of `table`, or a window of it.

    `row` [E, K, S, G], or sizes 1. Column c of a row belongs to key position c or, with `shift` [E, 1, S or 1, 1], to
    key position shift + c. Earlier positions are visible; positions after the last column are hidden.
    """

    table: Tensor
    row: Tensor
    shift: Tensor | None = None

    def at(self, positions: Tensor) -> Tensor:
        """The summands of `positions` [W], [E, K, S, G, W] or sizes 1."""
        if self.shift is None:
            return self.table[:, positions][self.row]
        column = positions - self.shift.unsqueeze(-1)
        width = self.table.shape[1]
        biases = self.table[self.row.unsqueeze(-1), column.clamp(0, width - 1)]
        return torch.where(column < 0, 0, torch.where(column < width, biases, -torch.inf))


def read_mask(
    a: Arguments, o: Options, sequence: Tensor, first_head: Tensor, position: Tensor, rows: Tensor
) -> MaskRows | None:
    """The mask of entries that belong to `sequence` [E] and begin at query head `first_head` [E].

    `position` [E, S] is the key position of each query row, `rows` [E, S] its row of query.
    """
    if a.mask is None:
        return None
    mask = from_nz(a.mask, o) if is_nz(a.mask, o) else a.mask
    sequence, position, rows = sequence.view(-1, 1, 1, 1), position[:, None, :, None], rows[:, None, :, None]
    if o.mask == NORM:
        own = sequence if mask.dim() == 3 else position
        return MaskRows(mask.flatten(0, -2), torch.zeros_like(sequence) if mask.shape[0] == 1 else own)
    if o.mask == ALIBI:
        return MaskRows(mask.flatten(0, -2), alibi_rows(mask, o, sequence, first_head))
    if o.mask == SPEC:
        inverted = o.inverted_mask and mask.dtype == torch.bfloat16
        return MaskRows(mask.float() * HIDDEN if inverted else mask, rows)
    if o.mask == MASK_FREE:
        return free_mask(mask, position)
    return compressed_mask(mask.flatten(0, -2), position)


def is_nz(mask: Tensor, o: Options) -> bool:
    """Whether a mask is in NZ format. An ND mask may have 16 columns, too, but then it has one row, [B, H, 1, 16]."""
    nz = o.nz and mask.dim() == 4 and mask.shape[3] == NZ_WIDTH
    return nz and not (o.mask == ALIBI and statically_known_true(mask.shape[2] == 1))


def from_nz(mask: Tensor, o: Options) -> Tensor:
    """The ND mask of [X, C/16, R, 16]: its element (x, r, c) is at [x, c // 16, r, c % 16].

    A mask with one row has 16 in NZ format; only the first counts.
    """
    if o.mask not in (NORM, ALIBI):
        return mask[0].transpose(0, 1).flatten(1)
    first_rows = mask[:, :, 0].flatten(1).unsqueeze(1)
    per_sequence = o.mask == ALIBI and len(mask) != o.heads
    return torch.unflatten(first_rows, 0, (-1, o.heads)) if per_sequence else first_rows


def alibi_rows(mask: Tensor, o: Options, sequence: Tensor, first_head: Tensor) -> Tensor:
    """The row of each query head in a mask [H, 1, C] or [B, H or 1, 1, C] that is flattened to a table of rows [C]."""
    key_head = torch.arange(o.kv_heads // o.tables_per_sequence, device=mask.device).view(-1, 1, 1)
    head = first_head.view(-1, 1, 1, 1) + key_head * o.group + torch.arange(o.group, device=mask.device)
    if mask.dim() == 3:
        return head
    return sequence * mask.shape[1] + (head if mask.shape[1] > 1 else 0)


def free_mask(table: Tensor, position: Tensor) -> MaskRows:
    """The table of one block [128, 128], for each block of queries over the block of keys on its diagonal."""
    first = position[:, :, :1]
    row = (position - first) % FREE_BLOCK
    return MaskRows(table, row, position - row)


def compressed_mask(table: Tensor, position: Tensor) -> MaskRows:
    """The causal table over the last 2048 positions of a context, or over all positions of a shorter one."""
    shift = (position.amax(2, keepdim=True) + 1 - TABLE).clamp(min=0)
    return MaskRows(table, position - shift, shift)
