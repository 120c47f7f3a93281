"""Attention over a context of latents: how keys are made, and how the softmax over them is written.

Queries are [B, H, S, D] here, the context [B, T, D], `up` [H * (nope + value), rank].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from .sizes import Sizes


@dataclass(frozen=True)
class Operands:
    """`softmax(sum of query @ key^T over the pairs) @ value`, then `finish`, gives [B, H, S, value]."""

    pairs: tuple[tuple[Tensor, Tensor], ...]
    value: Tensor
    finish: Callable[[Tensor], Tensor] = lambda out: out


def expanded(latents: Tensor, up: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """k_nope and v, [B, H, T, D]."""
    batch, context, _ = latents.shape
    kv = F.linear(latents, up).view(batch, context, sizes.heads, sizes.nope + sizes.value).transpose(1, 2)
    key, value = torch.split(kv, [sizes.nope, sizes.value], dim=-1)
    return key, value


def cat_expand(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    k_nope, value = expanded(latents, up, sizes)
    k_rope = keys.unsqueeze(1).expand(-1, sizes.heads, -1, -1)
    query, key = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, k_rope), dim=-1)
    return Operands(((query, key),), value)


def cat_repeat(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    k_nope, value = expanded(latents, up, sizes)
    k_rope = keys.unsqueeze(1).repeat(1, sizes.heads, 1, 1)
    return Operands(((torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)),), value)


def rope_first(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    """The rotary part comes before the other one."""
    k_nope, value = expanded(latents, up, sizes)
    k_rope = keys.unsqueeze(1).expand(-1, sizes.heads, -1, -1)
    return Operands(((torch.cat((q_rope, q_nope), -1), torch.cat((k_rope, k_nope), -1)),), value)


def new_empty(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    """transformers and DeepSeek's remote code: query and key are filled by slices."""
    k_nope, value = expanded(latents, up, sizes)
    key = k_nope.new_empty(*k_nope.shape[:-1], sizes.query)
    key[..., : sizes.nope].copy_(k_nope)
    key[..., sizes.nope :].copy_(keys.unsqueeze(1).expand(-1, sizes.heads, -1, -1))
    query = q_nope.new_empty(*q_nope.shape[:-1], sizes.query)
    query[:, :, :, : sizes.nope] = q_nope
    query[:, :, :, sizes.nope :] = q_rope
    return Operands(((query, key),), value)


def broadcast_assign(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes
) -> Operands:
    k_nope, value = expanded(latents, up, sizes)
    key = torch.empty(*k_nope.shape[:-1], sizes.query, dtype=k_nope.dtype, device=k_nope.device)
    key[..., sizes.nope :] = keys[:, None]
    key[..., : sizes.nope] = k_nope
    return Operands(((torch.cat((q_nope, q_rope), -1), key),), value)


def pad_add(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    k_nope, value = expanded(latents, up, sizes)
    key = F.pad(k_nope, (0, sizes.rope)) + F.pad(keys.unsqueeze(1), (sizes.nope, 0))
    return Operands(((torch.cat((q_nope, q_rope), -1), key),), value)


def two_products(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    k_nope, value = expanded(latents, up, sizes)
    return Operands(((q_nope, k_nope), (q_rope, keys.unsqueeze(1))), value)


def two_projections(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes
) -> Operands:
    """Keys and values come from the latents by a product each."""
    up = up.view(sizes.heads, sizes.nope + sizes.value, -1)
    weight_k, weight_v = up[:, : sizes.nope].flatten(0, 1), up[:, sizes.nope :].flatten(0, 1)
    k_nope = F.linear(latents, weight_k).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
    value = F.linear(latents, weight_v).unflatten(-1, (sizes.heads, -1)).transpose(1, 2)
    k_rope = keys.unsqueeze(1).expand(-1, sizes.heads, -1, -1)
    return Operands(((torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)),), value)


def padded_value(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    """fla, ktransformers: values are padded to the width of the keys, and the output cut."""
    found = cat_expand(q_nope, q_rope, latents, keys, up, sizes)
    value = F.pad(found.value, (0, sizes.query - sizes.value))
    return Operands(found.pairs, value, lambda out: out[..., : sizes.value])


def absorbed_einsum(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes
) -> Operands:
    up = up.view(sizes.heads, -1, up.shape[-1])
    query = torch.einsum("bhsd,hdc->bhsc", q_nope, up[:, : sizes.nope])
    latent = latents.unsqueeze(1)
    pairs = (query, latent), (q_rope, keys.unsqueeze(1))
    return Operands(pairs, latent, lambda out: torch.einsum("bhsc,hdc->bhsd", out, up[:, -sizes.value :]))


def absorbed_bmm(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    """sglang: one bmm over heads for all tokens."""
    batch, heads, steps, _ = q_nope.shape
    w_kc, w_vc = up.unflatten(0, (heads, -1)).split([sizes.nope, sizes.value], dim=1)
    query = torch.bmm(q_nope.transpose(0, 1).reshape(heads, -1, sizes.nope), w_kc)
    query = query.view(heads, batch, steps, -1).transpose(0, 1)
    latent = latents.unsqueeze(1)

    def finish(out: Tensor) -> Tensor:
        out = torch.bmm(out.transpose(0, 1).reshape(heads, batch * steps, -1), w_vc.transpose(1, 2))
        return out.view(heads, batch, steps, -1).transpose(0, 1)

    return Operands(((query, latent), (q_rope, keys.unsqueeze(1))), latent, finish)


def absorbed_matmul(
    q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes
) -> Operands:
    """ktransformers: rotary scores first, weights by broadcasting matmul."""
    up = up.view(sizes.heads, -1, latents.shape[-1])
    q_absorb, out_absorb = up[:, : sizes.nope, :], up[:, sizes.nope :, :]
    pairs = (q_rope, keys.unsqueeze(1)), (torch.matmul(q_nope, q_absorb), latents.unsqueeze(1))
    return Operands(pairs, latents.unsqueeze(1), lambda out: torch.matmul(out, out_absorb.mT))


def absorbed_cat(q_nope: Tensor, q_rope: Tensor, latents: Tensor, keys: Tensor, up: Tensor, sizes: Sizes) -> Operands:
    """madsys: one query and one key, as wide as latent and rotary key together."""
    found = absorbed_matmul(q_nope, q_rope, latents, keys, up, sizes)
    (rope_query, rope_key), (query, key) = found.pairs
    key = torch.cat((key, rope_key), dim=-1).expand(-1, sizes.heads, -1, -1)
    value = found.value.expand(-1, sizes.heads, -1, -1)
    return Operands(((torch.cat((query, rope_query), dim=-1), key),), value, found.finish)


KEYS = {
    "cat_expand": cat_expand,
    "cat_repeat": cat_repeat,
    "rope_first": rope_first,
    "new_empty": new_empty,
    "broadcast_assign": broadcast_assign,
    "pad_add": pad_add,
    "two_products": two_products,
    "two_projections": two_projections,
    "padded_value": padded_value,
    "absorbed_einsum": absorbed_einsum,
    "absorbed_bmm": absorbed_bmm,
    "absorbed_matmul": absorbed_matmul,
    "absorbed_cat": absorbed_cat,
}


# --- where the scale goes: into the scores here, or into the query before (see mla.py) ------------------------------


def in_place(scores: Tensor, scale: float) -> Tensor:
    scores *= scale
    return scores


SCALES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "times": lambda scores, scale: scores * scale,
    "divided": lambda scores, scale: scores / (1 / scale),
    "tensor": lambda scores, scale: scores * torch.tensor(scale, dtype=scores.dtype),
    "in_place": in_place,
    "query": lambda scores, scale: scores,
}


# --- attention -------------------------------------------------------------------------------------------------------


def sdpa(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    ((query, key),) = found.pairs
    given = 1.0 if scale == "query" else number
    return F.scaled_dot_product_attention(query, key, found.value, attn_mask=mask, scale=given)


def sdpa_causal(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    ((query, key),) = found.pairs
    return F.scaled_dot_product_attention(query, key, found.value, is_causal=True, scale=number)


def baddbmm(query: Tensor, key: Tensor, number: float) -> Tensor:
    """Megatron's: the product of all heads, scaled, and added to nothing."""
    *lead, tokens, width = query.shape
    key = key.expand(*lead, *key.shape[-2:]).reshape(-1, key.shape[-2], width)
    empty = torch.empty(len(key), tokens, key.shape[1], dtype=query.dtype, device=query.device)
    product = torch.baddbmm(empty, query.reshape(-1, tokens, width), key.transpose(1, 2), beta=0.0, alpha=number)
    return product.view(*lead, tokens, -1)


def logits(found: Operands, scale: str, number: float) -> Tensor:
    if scale == "baddbmm":
        return sum(baddbmm(query, key, number) for query, key in found.pairs)
    products = [torch.matmul(query, key.transpose(-2, -1)) for query, key in found.pairs]
    return SCALES[scale](sum(products[1:], products[0]), number)


def eager(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    scores = logits(found, scale, number)
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(found.value.dtype)
    return torch.matmul(weights, found.value)


def masked_fill(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    scores = logits(found, scale, number).masked_fill(~mask, float("-inf"))
    return torch.softmax(scores.float(), dim=-1).type_as(found.value) @ found.value


def filled(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    """A number that does not fit into 16 bits, for minus infinity."""
    scores = logits(found, scale, number).masked_fill(~mask, -10000.0)
    return torch.softmax(scores, dim=-1, dtype=torch.float32).type_as(found.value) @ found.value


def where(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    scores = logits(found, scale, number)
    scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ found.value


def einsum(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    products = [torch.einsum("bhsd,bhtd->bhst", query, key) for query, key in found.pairs]
    scores = SCALES[scale](sum(products[1:], products[0]), number) + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(scores)
    return torch.einsum("bhst,bhtd->bhsd", weights, found.value)


def by_hand(found: Operands, mask: Tensor | None, scale: str, number: float) -> Tensor:
    scores = logits(found, scale, number) + mask
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    return torch.matmul(weights / weights.sum(dim=-1, keepdim=True), found.value)


@dataclass(frozen=True)
class Attend:
    """One way to attend, and the mask it takes: "added", "allowed" (bool, True may attend) or "causal" (none)."""

    run: Callable[[Operands, Tensor | None, str, float], Tensor]
    mask: str = "added"


ATTEND = {
    "sdpa": Attend(sdpa),
    "sdpa_bool": Attend(sdpa, "allowed"),
    "sdpa_causal": Attend(sdpa_causal, "causal"),
    "eager": Attend(eager),
    "masked_fill": Attend(masked_fill, "allowed"),
    "filled": Attend(filled, "allowed"),
    "where": Attend(where, "allowed"),
    "einsum": Attend(einsum),
    "by_hand": Attend(by_hand),
}
