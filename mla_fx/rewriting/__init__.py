"""Turns a plan into graph nodes: expressions, layouts, drafts, and the replacement of values."""
