"""Both forms of attention: of absorbed queries over latents, and of heads whose keys and values are expanded."""

from mla_fx.ops.emitted.attention import samples

OPERANDS = ("query", "query_rope", "kv_cache", "kr_cache")


def latents(dtype, seed, steps=3):
    """Dense operands by name, without a mask."""
    return dict(zip(OPERANDS, samples.sample(dtype, seed, steps), strict=False))


def heads(dtype, seed, steps=3):
    """The same with weights."""
    operands, weights = samples.with_heads(samples.sample(dtype, seed, steps), {})
    return dict(zip(OPERANDS, operands, strict=False)) | weights


FORMS = (latents, heads)
