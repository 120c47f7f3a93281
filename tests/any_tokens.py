"""The layer of `mla_fx.cases` for any number of query tokens, which it takes from its input."""

import torch

from mla_fx import cases


class AnyTokens(cases.Layer):
    def forward(self, x, cos, sin, position):
        q = self.query(x).view(cases.B, x.shape[1], cases.N, -1).transpose(1, 2)
        q_nope, q_rope = q.split([cases.D, cases.DR], dim=-1)
        latent, k_rope = self.rows(x)
        q_rope, k_rope = self.rotate(q_rope, cos, sin), self.rotate(k_rope, cos, sin)
        latent, k_rope = self.store(latent, k_rope, position)
        mask = torch.zeros(x.shape[1], cases.T).masked_fill(torch.arange(cases.T) > position[:, None], -torch.inf)
        return self.attend(q_nope, q_rope, latent, k_rope, mask).transpose(1, 2).flatten(2) @ self.o.T


def inputs(count):
    angle = torch.rand(count, cases.DR // 2, generator=torch.Generator().manual_seed(count)).repeat(1, 2) * 6
    x = torch.randn(cases.B, count, cases.HE, generator=torch.Generator().manual_seed(count))
    return x, angle.cos(), angle.sin(), torch.arange(2, 2 + count)
