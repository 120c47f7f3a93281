"""Causal attention by PyTorch's option: rows and keys are counted as the program counts them."""

import copy

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from lib.layers import CLOSE, FUSED, QUIET, Absorbed, Layer, Sizes, arguments, check, check_no_further, in_type, variant

import mla_fx

pytestmark = [pytest.mark.filterwarnings(line) for line in QUIET]
ATTENTION = "latent_attention"


class Causal(Absorbed):
    """One key for all heads, and the mask left to PyTorch."""

    def over_latents(self, query, key, latent, mask):
        return self.causal(query, key, F.pad(latent, (0, key.shape[-1] - latent.shape[-1])))[..., : self.sizes.rank]

    def causal(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class CausalNarrow(Causal):
    """Values narrower than keys: PyTorch decomposes this attention."""

    def over_latents(self, query, key, latent, mask):
        return self.causal(query, key, latent)


class CausalExpanded(Causal):
    def causal(self, query, key, value):
        key, value = (x.expand(-1, query.shape[1], -1, -1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class CausalRows(Causal):
    """All heads' queries as rows of one head: the mask counts them all."""

    def causal(self, query, key, value):
        rows = query.flatten(1, 2).unsqueeze(1)
        out = F.scaled_dot_product_attention(rows, key, value, is_causal=True)
        return out.squeeze(1).unflatten(1, query.shape[1:3])


class CausalRowsOfTokens(Causal):
    """The same, token by token."""

    def causal(self, query, key, value):
        rows = query.transpose(1, 2).flatten(1, 2).unsqueeze(1)
        out = F.scaled_dot_product_attention(rows, key, value, is_causal=True)
        return out.squeeze(1).unflatten(1, (query.shape[2], query.shape[1])).transpose(1, 2)


class CausalRowsNarrow(CausalRows, CausalNarrow):
    pass


class CausalGroups(Causal):
    """Two groups of heads, each with the one key."""

    def causal(self, query, key, value):
        key, value = (x.expand(-1, 2, -1, -1) for x in (key, value))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


CAUSAL = [Causal, CausalNarrow, CausalExpanded, CausalRows, CausalRowsOfTokens, CausalRowsNarrow, CausalGroups]


@pytest.mark.slow
@pytest.mark.parametrize("context", [6, 16])
@pytest.mark.parametrize("kind", CAUSAL)
def test_causal_over_shared_keys(kind, context, outcome):
    sizes = Sizes(tokens=6, context=context)
    outcome(check(kind(sizes), arguments(sizes, first=0)))


@pytest.mark.parametrize("kind", [Causal, CausalExpanded, CausalRows])
def test_causal_in_single_precision(kind, outcome):
    """The dtype in which PyTorch's fused kernels run."""
    sizes = Sizes(tokens=6)
    outcome(check_no_further(kind(sizes).float(), in_type(arguments(sizes, first=0), torch.float32)))


class OneLatentForAll(Causal):
    """The caches have no batch: all sequences are rows over one context."""

    def store(self, latent, k_rope, position, kv_cache, kr_cache):
        rows = position.unsqueeze(0) + len(position) * torch.arange(latent.shape[0]).unsqueeze(1)
        kv_cache.index_copy_(2, rows.flatten(), latent.reshape(1, 1, -1, latent.shape[-1]))
        kr_cache.index_copy_(2, rows.flatten(), k_rope.reshape(1, 1, -1, k_rope.shape[-1]))
        return kv_cache, kr_cache

    def over_latents(self, query, key, latent, mask):
        rows = query.transpose(0, 1).flatten(1, 2).unsqueeze(0)
        out = self.over_one(rows, key, latent)
        return out.squeeze(0).unflatten(1, (query.shape[0], query.shape[2])).transpose(0, 1)

    def over_one(self, rows, key, latent):
        return super().over_latents(rows, key, latent, None)


class OneLatentForAllNarrow(OneLatentForAll):
    def over_one(self, rows, key, latent):
        return self.causal(rows, key, latent)


class OneContext(Causal):
    """The same caches, repeated for each sequence."""

    def store(self, latent, k_rope, position, *caches):
        written = OneLatentForAll.store(self, latent, k_rope, position, *caches)
        return tuple(cache.expand(latent.shape[0], -1, -1, -1) for cache in written)


class OneContextNarrow(OneContext, CausalNarrow):
    pass


class CausalKeys(Layer):
    """Keys and values of every head, with equal widths."""

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        out = F.scaled_dot_product_attention(torch.cat((q_nope, q_rope), -1), key, value, is_causal=True)
        return out[..., : self.sizes.value]


class OneContextForKeys(CausalKeys):
    store = OneContext.store


@pytest.mark.parametrize(
    "kind", [OneLatentForAll, OneLatentForAllNarrow, OneContext, OneContextNarrow, OneContextForKeys]
)
def test_causal_over_one_latent(kind, outcome):
    x, tables, position, _ = arguments(Sizes(), first=0)
    caches = arguments(Sizes(batch=1))[-1]
    outcome(check(kind(), (x, tables, position, caches)))


def test_causal_over_keys_of_each_head():
    sizes = Sizes(tokens=6)
    assert check(CausalKeys(sizes), arguments(sizes, first=0)).fused == FUSED


SDPA = torch.ops.aten.scaled_dot_product_attention.default


def exported(module, given):
    """The graph of a module that still contains scaled_dot_product_attention, with all its options."""
    table = torch.export.default_decompositions()
    table.pop(SDPA)
    graph = torch.export.export(module.eval(), copy.deepcopy(given)).run_decompositions(table).module()
    assert any(node.target is SDPA for node in graph.graph.nodes)
    return graph


def check_exported(module):
    given = arguments(module.sizes, first=0)
    theirs, ours = copy.deepcopy(given), copy.deepcopy(given)
    fuse = mla_fx.MlaPass(target="reference")
    with torch.no_grad():
        graph = exported(module, given)
        fuse(graph)
        torch.testing.assert_close((graph(*ours), ours), (module(*theirs), theirs), **CLOSE)
    return fuse.report


@pytest.mark.slow
@pytest.mark.parametrize("context", [3, 16])
@pytest.mark.parametrize("kind", [*CAUSAL, CausalKeys])
def test_causal_in_a_graph_that_keeps_the_operator(kind, context):
    report = check_exported(kind(Sizes(context=context)))
    assert kind is not CausalKeys or report.fused.get(ATTENTION)


class GroupedKeys(CausalKeys):
    """Each key and value head serves two query heads."""

    def __init__(self, sizes=None):
        super().__init__(sizes)
        self.kv_b = torch.nn.Parameter(self.kv_b[: self.kv_b.shape[0] // 2].clone())

    def keys(self, latent, k_rope):
        z = self.sizes
        expanded = (latent.squeeze(1) @ self.kv_b.T).unflatten(-1, (z.heads // 2, -1)).transpose(1, 2)
        k_nope, value = expanded.split([z.nope, z.value], dim=-1)
        return torch.cat((k_nope, k_rope.expand(-1, z.heads // 2, -1, -1)), dim=-1), value

    def attend(self, q_nope, q_rope, latent, k_rope, mask):
        key, value = self.keys(latent, k_rope)
        value = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
        return self.grouped(torch.cat((q_nope, q_rope), -1), key, value, mask)[..., : self.sizes.value]

    def grouped(self, query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def grouped(name, repeated=None):
    """Keys and values as `repeated` has them, or one for two query heads."""

    def attend(self, query, key, value, mask):
        if repeated is not None:
            key, value = repeated(key), repeated(value)
        given = {"attn_mask": mask} if name == "GroupedMasked" else {"is_causal": True}
        return F.scaled_dot_product_attention(query, key, value, **given, enable_gqa=repeated is None)

    return variant(name, GroupedKeys, grouped=attend)


GroupedMasked = grouped("GroupedMasked")
GroupedRepeated = grouped("GroupedRepeated", lambda x: x.repeat_interleave(2, dim=1))
GroupedInTurn = grouped("GroupedInTurn", lambda x: x.repeat(1, 2, 1, 1))  # query heads 0 and 2 share a key
GROUPED = [GroupedKeys, GroupedMasked, GroupedRepeated, GroupedInTurn]


@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_keys(kind, outcome):
    sizes = Sizes(tokens=6)
    outcome(check(kind(sizes), arguments(sizes, first=0)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_keys_in_a_graph_that_keeps_the_operator(kind):
    check_exported(kind())
