"""What PyTorch knows about a graph: memory, origins of nodes, and all private names of torch."""
