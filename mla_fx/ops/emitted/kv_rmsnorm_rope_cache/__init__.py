"""The key side of one layer: norm, rotation, cache write."""
