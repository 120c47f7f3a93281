"""The arguments of paged_attention; its options, how they are spelled, and which go together."""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from mla_fx.ops.called.enumerators import enumerator
from mla_fx.ops.common.check import check_optional, known_to_differ
from mla_fx.ops.common.sizes import statically_known_true

NZ_WIDTH = 16

UNMASKED = "undefined"
NORM, ALIBI, SPEC = "mask_type_norm", "mask_type_alibi", "mask_type_spec"
MASK_FREE, NORM_COMPRESS = "mask_type_mask_free", "mask_type_norm_compress"
MASKS = (UNMASKED, NORM, ALIBI, SPEC, MASK_FREE, NORM_COMPRESS)

UNQUANTIZED, DEQUANT_FUSION = "type_quant_undefined", "type_dequant_fusion"
OFFLINE, ONLINE = "type_quant_qkv_offline", "type_quant_qkv_online"

UNCOMPRESSED, KVHEAD, KVHEAD_ROPE = "compress_type_undefined", "compress_type_kvhead", "compress_type_kvhead_rope"
DECODING, PARALLEL_DECODING = "calc_type_undefined", "calc_type_spec"
PLAIN_SCALE, LOGN = "scale_type_tor", "scale_type_logn"
BSND, BNSD = "type_bsnd", "type_bnsd"

RUN_STATUS, COMBINED, NZ = "batch_run_status_enable", "mla_v_head_size", "NZ"

COMPRESSED = (KVHEAD, KVHEAD_ROPE)
FULLY_QUANTIZED = (OFFLINE, ONLINE)
QUANTIZED = (DEQUANT_FUSION, *FULLY_QUANTIZED)
SECOND_QUANT_NAMES = {"type_quant_unquant": UNQUANTIZED}

EXCLUSIONS = (
    (PARALLEL_DECODING, (RUN_STATUS, *COMPRESSED, *QUANTIZED, LOGN, BNSD, ALIBI)),
    (KVHEAD_ROPE, (*MASKS[1:], RUN_STATUS)),
    (LOGN, (*QUANTIZED, *COMPRESSED, COMBINED, BNSD)),
    (COMBINED, (ALIBI, *COMPRESSED, DEQUANT_FUSION, BNSD)),
    (BNSD, (*COMPRESSED, *QUANTIZED)),
    (KVHEAD, FULLY_QUANTIZED),
    (KVHEAD_ROPE, FULLY_QUANTIZED),
    (NZ, (RUN_STATUS, *COMPRESSED, *QUANTIZED, COMBINED, BNSD)),
)


@dataclass(frozen=True)
class Arguments:
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor | None = None
    # Required nevertheless: in the document's order, value_cache, which is optional, comes before them.
    block_tables: Tensor = None  # type: ignore[assignment]  # None is refused by name, as for every required tensor
    context_lens: Tensor = None  # type: ignore[assignment]
    mask: Tensor | None = None
    batch_run_status: Tensor | None = None
    k_descale: Tensor | None = None
    k_offset: Tensor | None = None
    v_descale: Tensor | None = None
    v_offset: Tensor | None = None
    q_seq_lens: Tensor | None = None
    razor_offset: Tensor | None = None
    p_scale: Tensor | None = None
    log_n: Tensor | None = None
    _: KW_ONLY
    head_num: int = 0
    kv_head_num: int = 0
    qk_scale: float = 1.0
    q_scale: float = 1.0
    mask_type: str = UNMASKED
    batch_run_status_enable: bool = False
    quant_type: str = UNQUANTIZED
    out_data_type: torch.dtype | None = None
    has_quant_offset: bool = False
    compress_type: str = UNCOMPRESSED
    calc_type: str = DECODING
    scale_type: str = PLAIN_SCALE
    input_layout: str = BSND
    mla_v_head_size: int = 0


@dataclass(frozen=True)
class Options:
    """The options in the documents' spelling, and what they imply."""

    heads: int
    kv_heads: int
    mask: str
    quant: str
    compress: str
    calc: str
    scale: str
    layout: str
    combined: bool
    nz: bool

    @property
    def compressed(self) -> bool:
        return self.compress != UNCOMPRESSED

    @property
    def fully_quantized(self) -> bool:
        return self.quant in FULLY_QUANTIZED

    @property
    def parallel(self) -> bool:
        return self.calc == PARALLEL_DECODING

    @property
    def inverted_mask(self) -> bool:
        """Whether the bfloat16 kernel reads 1 as hidden."""
        return self.parallel and self.combined and self.mask == SPEC

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def tables_per_sequence(self) -> int:
        """The number of entries of context_lens, and of rows of block_tables, per sequence."""
        return self.kv_heads if self.compressed else 1


def read_options(a: Arguments) -> Options:
    heads = a.query.shape[1] if statically_known_true(a.head_num == 0) else a.head_num
    return Options(
        heads=heads,
        kv_heads=heads if statically_known_true(a.kv_head_num == 0) else a.kv_head_num,
        mask=enumerator("mask_type", a.mask_type, "mask_type_", MASKS, {"mask_type_free": MASK_FREE}),
        quant=enumerator("quant_type", a.quant_type, "type_", (UNQUANTIZED, *QUANTIZED), SECOND_QUANT_NAMES),
        compress=enumerator("compress_type", a.compress_type, "compress_type_", (UNCOMPRESSED, *COMPRESSED)),
        calc=enumerator("calc_type", a.calc_type, "calc_type_", (DECODING, PARALLEL_DECODING)),
        scale=enumerator("scale_type", a.scale_type, "scale_type_", (PLAIN_SCALE, LOGN)),
        layout=enumerator("input_layout", a.input_layout, "type_", (BSND, BNSD)),
        combined=a.value_cache is None,
        nz=a.key_cache.shape[-1] == NZ_WIDTH and a.query.shape[-1] != NZ_WIDTH,
    )


def check_options(a: Arguments, o: Options) -> None:
    check_heads(a, o)
    check_exclusions(a, o)
    check_mask_type(o)
    check_given(a, o)
    if a.has_quant_offset and o.quant != DEQUANT_FUSION:
        raise ValueError(f"has_quant_offset is True with quant_type {o.quant!r}; only {DEQUANT_FUSION!r} has offsets.")
    allowed = (torch.float16, torch.bfloat16) if o.fully_quantized else (None,)
    if a.out_data_type not in allowed:
        shown = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"out_data_type is {a.out_data_type}; it must be {shown} with quant_type {o.quant!r}.")
    if o.fully_quantized and a.q_scale not in (0.0, 1.0):
        raise ValueError(f"q_scale is {a.q_scale}; it must be 0.0 or 1.0 with an int8 query, which it cannot scale.")


def check_heads(a: Arguments, o: Options) -> None:
    if statically_known_true(a.head_num < 0) or known_to_differ(a.query.shape[1], o.heads):
        raise ValueError(f"head_num is {a.head_num}; it must be 0 or {a.query.shape[1]}, the heads of query.")
    if statically_known_true(o.kv_heads < 1) or statically_known_true(o.heads % o.kv_heads != 0):
        raise ValueError(f"kv_head_num is {o.kv_heads}; it must be 0 or divide the {o.heads} heads of query.")
    check_combined(a.mla_v_head_size, o)
    if o.combined and known_to_differ(o.kv_heads, 1):
        raise ValueError(f"kv_head_num is {o.kv_heads}; it must be 1 with mla_v_head_size {a.mla_v_head_size}.")


def check_combined(columns: int, o: Options) -> None:
    if statically_known_true(columns < 0):
        raise ValueError(f"mla_v_head_size is {columns}; it must be 0 or the columns of a key that are its value.")
    if o.combined and statically_known_true(columns == 0):
        raise ValueError(f"value_cache is None; it must be a tensor with mla_v_head_size {columns}.")
    if not o.combined and statically_known_true(columns > 0):
        raise ValueError(f"value_cache is given; it must be None with mla_v_head_size {columns}.")


def check_exclusions(a: Arguments, o: Options) -> None:
    chosen = dict(features(a, o))
    for left, others in EXCLUSIONS:
        for right in others:
            if left in chosen and right in chosen:
                raise ValueError(f"{chosen[left]} and {chosen[right]} exclude each other.")


def features(a: Arguments, o: Options) -> Iterator[tuple[str, str]]:
    """The conditions of `EXCLUSIONS`, each with its words in a message."""
    for argument, value in (
        ("mask_type", o.mask),
        ("quant_type", o.quant),
        ("compress_type", o.compress),
        ("calc_type", o.calc),
        ("scale_type", o.scale),
        ("input_layout", o.layout),
    ):
        yield value, f"{argument} {value!r}"
    if a.batch_run_status_enable:
        yield RUN_STATUS, "batch_run_status_enable True"
    if o.combined:
        yield COMBINED, f"mla_v_head_size {a.mla_v_head_size}"
    if o.nz:
        yield NZ, f"the NZ key_cache {list(a.key_cache.shape)}"


def check_mask_type(o: Options) -> None:
    """Check what a mask needs in addition to `EXCLUSIONS`."""
    if o.mask in (SPEC, MASK_FREE) and not o.parallel:
        raise ValueError(f"mask_type is {o.mask!r}; it must come with calc_type {PARALLEL_DECODING!r}.")
    if o.mask in (MASK_FREE, NORM_COMPRESS) and not o.nz:
        raise ValueError(f"mask_type is {o.mask!r}; it must come with NZ caches [BlockNum, Hkv*D/16, BlockSize, 16].")
    if not o.parallel:
        return
    if o.mask == UNMASKED and not (o.nz or o.combined):
        raise ValueError(
            f"mask_type is {o.mask!r}; with {PARALLEL_DECODING!r} and ND caches it must be one with a mask."
        )
    if o.mask == NORM and (o.nz or o.combined):
        caches = "a combined cache" if o.combined else "NZ caches"
        raise ValueError(
            f"mask_type is {o.mask!r}; with {PARALLEL_DECODING!r} and {caches} it must be {SPEC!r} or none."
        )


def check_given(a: Arguments, o: Options) -> None:
    """Check that every optional tensor is given exactly in the scenario that reads it."""
    quant, offset = f"quant_type {o.quant!r}", f"has_quant_offset {a.has_quant_offset}"
    check_optional("mask", a.mask, o.mask != UNMASKED, f"mask_type {o.mask!r}")
    status = f"batch_run_status_enable {a.batch_run_status_enable}"
    check_optional("batch_run_status", a.batch_run_status, a.batch_run_status_enable, status)
    check_optional("k_descale", a.k_descale, o.quant != UNQUANTIZED, quant)
    check_optional("k_offset", a.k_offset, a.has_quant_offset, offset)
    check_optional("v_descale", a.v_descale, o.quant != UNQUANTIZED, quant)
    check_optional("v_offset", a.v_offset, a.has_quant_offset, offset)
    check_optional("q_seq_lens", a.q_seq_lens, o.parallel, f"calc_type {o.calc!r}")
    check_optional("razor_offset", a.razor_offset, o.compress == KVHEAD_ROPE, f"compress_type {o.compress!r}")
    check_optional("p_scale", a.p_scale, o.quant == OFFLINE, quant)
    check_optional("log_n", a.log_n, o.scale == LOGN, f"scale_type {o.scale!r}")
