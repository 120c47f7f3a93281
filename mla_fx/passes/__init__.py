"""The passes. `pipeline` lists them in order. Each one changes the graph or reports why it does not."""
