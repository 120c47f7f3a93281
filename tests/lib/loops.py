"""Attention in parts whose sums of exponentials a loop merges, as flash attention does."""

import torch

from .zoo import parts, servers


class Loop(parts.Shards):
    """Three parts of a context of 16 keys. The loop gets scores [B,N,S,T] and values [B,1,T,R] of each."""

    cuts = (slice(0, 6), slice(6, 12), slice(12, 16))

    def __init__(self, loop, cuts=cuts):
        super().__init__()
        self.loop, self.cuts = loop, cuts

    def forward(self, x, positions, caches):
        q_nope, q_pe, *rows = self.rows(x, positions)
        lines = torch.arange(x.shape[0]).unsqueeze(-1)
        for cache, new in zip(caches, rows, strict=True):
            cache[lines, positions] = new
        query, chunks = self.in_latent_space(q_nope), []
        for cut in self.cuts:
            latent, k_pe = (cache[:, cut] for cache in caches)
            scores = torch.einsum("bsnc,btc->bnst", query, latent) + torch.einsum("bsnr,btr->bnst", q_pe, k_pe)
            hidden = torch.arange(caches[0].shape[1])[cut] > positions.unsqueeze(-1)
            chunks.append((scores * self.scale, hidden.unsqueeze(1), latent.unsqueeze(1)))
        weight = self.kv_b.unflatten(0, (q_nope.shape[2], -1))[:, self.sizes.nope :]
        return self.project(torch.einsum("bnsc,nvc->bsnv", self.loop(chunks), weight))


def same(value):
    return value


def running_sums(own=same, whole=same, end=same):
    """Flash attention's loop, whose sum of each part, whole sum and result are changed."""

    def run(chunks):
        out = total = largest = None
        for scores, hidden, latent in chunks:
            scores = hide(scores, hidden)
            new = scores.amax(-1, keepdim=True)
            new = new if largest is None else torch.maximum(largest, new)
            weights = (scores - new).exp()
            found, more = weights @ latent, own(weights.sum(-1, keepdim=True))
            if largest is not None:
                shrink = (largest - new).exp()
                found, more = out * shrink + found, total * shrink + more
            out, total, largest = found, more, new
        return end(out / whole(total))

    return run


def hide(scores, hidden):
    return scores.masked_fill(hidden, -torch.inf)


def drafts():
    """The second token of the first sequence is at position 0, which two of the parts do not see."""
    given = servers.drafts(3, 2)
    given[1][0] = torch.tensor([1, 0])
    return given
