"""Layers whose masks hide all keys of some tokens."""

from __future__ import annotations

import torch

from lib.layers import Layer

# --- masks -----------------------------------------------------------------------------------------------------------


class LeftPadded(Layer):
    """Two of three tokens of the first sequence see nothing at all."""

    def mask(self, position):
        z = self.sizes
        later = torch.arange(z.context) > position[:, None]
        blind = torch.arange(z.batch * z.tokens).view(z.batch, 1, z.tokens, 1) < 2
        return later | blind
