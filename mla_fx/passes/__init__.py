"""The passes. `pipeline` lists them in order; each changes the graph or says why not."""
