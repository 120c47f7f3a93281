"""Attention over latents: `operator.py` says what it computes, and the others each a part of it."""
