"""From a match to nodes of a graph."""
