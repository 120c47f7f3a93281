"""The passes, in the order of `pipeline`: each changes a graph, or says why not."""
