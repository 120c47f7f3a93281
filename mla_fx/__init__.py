"""A graph-mode compiler plugin that finds Multi-head Latent Attention and fuses it."""
