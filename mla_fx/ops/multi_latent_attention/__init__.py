"""Attention over paged latents."""
