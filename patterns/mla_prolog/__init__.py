"""The prolog: everything between a layer's hidden states and its attention, including the cache write, as one operator.

    c     = rms_norm(token_x weight_dq) gamma_cq          or token_x itself, without a low-rank query
    q     = c weight_uq_qr = [q_nope, q_rope]             query = q_nope weight_uk, query_rope = rope(q_rope)
    k     = token_x weight_dkv_kr = [latent, k_rope]      caches[index] = rms_norm(latent) gamma_ckv, rope(k_rope)

Variants: with and without a low-rank query (DeepSeek-V2-Lite), with and without rotation (Kimi Linear), without any
rotary part (GLM-5 Next), with rows written into a cache (index_copy, index_put, scatter, slice), appended to one (cat),
or used directly. All are read and planned alike (dataflow.py, prolog.py). The form of the caches and the mode of the
weights choose the operator:

    caches             no weight int8      q_b int8            all weights int8    rule
    rows as they are   mla_prolog          mla_prolog_v3       mla_prolog_v3       mla_prolog           plain.py
    packed rows        refused             mla_prolog_v3       mla_prolog_v3       mla_prolog_packed    packed.py
    codes and scales   refused             mla_prolog_quant    refused             mla_prolog_quant     tiled.py

Other mixtures of int8 weights are refused. Codes and scales in caches are visible, so a program that computes them
otherwise than the operator is refused, unless it asks for the vendor's.
"""

from __future__ import annotations

from mla_fx.cases import Case, GrowingCache, Layer, NoRotaryPart

from . import cases
from .packed import Packed
from .plain import Plain
from .tiled import Tiled


def _one_each(prolog: str) -> dict[str, int]:
    return {prolog: 1, "latent_attention": 1}


ONE_EACH = _one_each("mla_prolog")


class MlaProlog(Plain):
    after = ("mla_prolog_quant", "mla_prolog_packed")
    accepts = (
        Case("low-rank query, halves rotated, rows written", Layer, ONE_EACH),
        Case("direct query", cases.DirectQuery, ONE_EACH),
        Case("complex rotation", cases.Complex, ONE_EACH),
        Case("no rotation", cases.NoRotation, ONE_EACH),
        Case("no rotary part", NoRotaryPart, ONE_EACH),
        Case("rows appended", GrowingCache, ONE_EACH),
        Case("query and latent multiplied by numbers", cases.Scaled, ONE_EACH),
        Case("query multiplied by a number per token and head", cases.ScaledByToken, ONE_EACH),
    )
    rejects = (
        Case("projection with a bias", cases.Bias, because="has a bias"),
        Case("LayerNorm", cases.LayerNorm, because="LayerNorm"),
        Case("key rotated by other tables", cases.OtherTables, because="different tensors"),
        Case("query computed from other tokens", cases.OtherTokens, because="token_x is not one tensor"),
    )


class MlaPrologPacked(Packed):
    name = "mla_prolog_packed"
    accepts = (Case("packed rows", cases.PackedRows, _one_each("mla_prolog_v3")),)
    rejects = (
        Case(
            "scales before keys",
            cases.ScalesFirst,
            because="rows hold torch.float32, expected a rotary key in 16 bits",
        ),
        Case("tiles of 64", cases.NarrowTiles, because="one scale for 64 latents"),
        Case("scales that are quotients", cases.Divided, because="scales are computed otherwise"),
    )


class MlaPrologQuant(Tiled):
    name = "mla_prolog_quant"
    accepts = (Case("latents in four tiles", cases.FourTiles, _one_each("mla_prolog_quant")),)
    rejects = (
        Case("latents in five tiles", cases.FiveTiles, because="latents have 5 scales"),
        Case("values divided by scales", cases.OtherFactor, because="codes are computed otherwise"),
        Case("halves rotated", cases.Halves, because="rotated in layout half_half"),
        Case(
            "q_b dequantised",
            cases.PlainQuery,
            because="int8 weights of q_b alone; weight_uq is torch.float32",
        ),
    )
