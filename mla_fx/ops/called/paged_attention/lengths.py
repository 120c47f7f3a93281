"""The checks of paged_attention's lengths and block tables: shapes, and values if they can be read."""

import torch
from torch import Tensor

from mla_fx.ops.common.check import INTEGERS, Sizes, check_dtypes, check_letters, readable
from mla_fx.ops.common.paged import host_lengths
from mla_fx.ops.common.sizes import statically_known_true

from .arguments import ALIBI, MASK_FREE, NORM, NORM_COMPRESS, NZ_WIDTH, SPEC, Arguments, Options
from .attention import query_counts
from .masks import FREE_BLOCK, TABLE, is_nz
from .tensors import LENGTHS, block_size


def check_lengths(a: Arguments, o: Options) -> None:
    check_dtypes(a, dict.fromkeys((*LENGTHS, "block_tables"), INTEGERS))
    lead, sizes = "B*Hkv" if o.compressed else "B", Sizes()
    check_letters(a, sizes, context_lens=lead)
    entries, each = a.context_lens.shape[0], o.tables_per_sequence
    if statically_known_true(entries % each != 0):
        raise ValueError(
            f"context_lens has {entries} entries; with {o.compress!r} it must have B*Hkv, Hkv being {each}."
        )
    check_letters(a, sizes, block_tables=f"{lead}, MaxBlocks")
    check_letters(a, {"B": entries // each}, batch_run_status="B", q_seq_lens="B")
    if o.combined and statically_known_true(entries > 8192):
        raise ValueError(f"context_lens has {entries} entries; there may be at most 8192 with mla_v_head_size.")
    if not o.parallel and statically_known_true(a.query.shape[0] > entries // each):
        raise ValueError(
            f"query has {a.query.shape[0]} tokens; it may have {entries // each}, one for each of context_lens."
        )
    # On a device too: the computation waits for them anyway.
    if not a.context_lens.is_meta and readable(contexts := host_lengths(a.context_lens)):
        check_length_values(a, o, contexts)


def check_length_values(a: Arguments, o: Options, contexts: Tensor) -> None:
    if bool((contexts < 0).any()):
        raise ValueError(f"context_lens holds {int(contexts.min())}; it must not be negative.")
    runs = contexts.view(-1, o.tables_per_sequence).amax(1) > 0
    if a.batch_run_status is not None:
        status = host_lengths(a.batch_run_status) != 0
        if not torch.equal(status, runs):
            raise ValueError(
                f"batch_run_status is {a.batch_run_status.tolist()} and context_lens {a.context_lens.tolist()}; "
                "it must be 0 exactly where context_lens is 0, because the kernels skip a sequence by it."
            )
    check_counts(a, o, contexts, runs)
    check_columns(a, o, contexts)
    check_blocks(a, o, contexts)


def check_counts(a: Arguments, o: Options, contexts: Tensor, runs: Tensor) -> None:
    counts = query_counts(contexts, a.q_seq_lens, o)
    total, tokens = int(counts.sum()), a.query.shape[0]
    if a.q_seq_lens is None:
        if total > tokens:
            raise ValueError(
                f"context_lens holds {total} sequences with a context; query has {tokens} tokens, one for each."
            )
        return
    given = f"q_seq_lens is {a.q_seq_lens.tolist()}"
    if bool((counts < runs.to(counts.dtype)).any()):
        raise ValueError(f"{given}; it must be 1 or more where context_lens is not 0.")
    if total != tokens:
        raise ValueError(
            f"{given}, {total} tokens in the sequences with a context; they must sum to {tokens}, the tokens of query."
        )
    rows_by_position = o.mask in (MASK_FREE, NORM_COMPRESS) or (o.mask == NORM and is_square(a.mask))
    if rows_by_position and bool((counts > contexts).any()):
        raise ValueError(f"{given}; with {o.mask!r} it must not exceed context_lens.")
    if o.mask == MASK_FREE and bool(((contexts - counts) % FREE_BLOCK != 0).any()):
        raise ValueError(
            f"{given} and context_lens {a.context_lens.tolist()}; "
            f"with {MASK_FREE!r} they must differ by a multiple of {FREE_BLOCK}."
        )
    if o.mask == NORM_COMPRESS and bool((counts > TABLE).any()):
        raise ValueError(f"q_seq_lens holds {int(counts.max())}; it must be at most {TABLE} with {NORM_COMPRESS!r}.")


def is_square(mask: Tensor | None) -> bool:
    return mask is not None and mask.dim() == 2 and mask.shape[0] != 1


def check_columns(a: Arguments, o: Options, contexts: Tensor) -> None:
    """Check that a mask reaches the longest context, and that the mask of bfloat16 parallel decoding with a combined
    cache is 0 or 1."""
    if a.mask is None:
        return
    longest = int(contexts.max()) if contexts.numel() else 0
    columns = NZ_WIDTH * a.mask.shape[1] if is_nz(a.mask, o) else a.mask.shape[-1]
    if o.mask in (NORM, ALIBI, SPEC) and columns < longest:
        raise ValueError(f"mask has {columns} columns; it must have {longest}, the largest of context_lens.")
    if not (o.inverted_mask and a.mask.dtype == torch.bfloat16 and readable(a.mask)):
        return
    if bool(((a.mask != 0) & (a.mask != 1)).any()):
        raise ValueError(
            f"mask holds values from {float(a.mask.min())} to {float(a.mask.max())}; with bfloat16, mla_v_head_size "
            f"and {o.calc!r} it must hold 0 (visible) and 1 (hidden) alone: the kernel multiplies it by -3e38."
        )


def check_blocks(a: Arguments, o: Options, contexts: Tensor) -> None:
    """Check that block_tables is wide enough, and names blocks of the cache up to the end of each context."""
    page = block_size(a, o)
    pages = (contexts + page - 1) // page
    most = int(pages.max()) if pages.numel() else 0
    if most > a.block_tables.shape[1]:
        raise ValueError(
            f"block_tables has {a.block_tables.shape[1]} columns; it must have {most} for context_lens up to "
            f"{int(contexts.max())} in blocks of {page}."
        )
    if not readable(a.block_tables):
        return
    used = torch.arange(a.block_tables.shape[1]) < pages.unsqueeze(1)
    blocks = a.block_tables.cpu()[used]
    wrong = blocks[(blocks < 0) | (blocks >= a.key_cache.shape[0])]
    if wrong.numel():
        raise ValueError(
            f"block_tables holds {int(wrong[0])} within a context; it must be at least 0 and below "
            f"{a.key_cache.shape[0]}, the blocks of key_cache."
        )
