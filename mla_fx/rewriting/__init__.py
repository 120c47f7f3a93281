"""From a plan to nodes of a graph: expressions, layouts, drafts, and what they replace."""
