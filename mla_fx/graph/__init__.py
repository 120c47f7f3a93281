"""What PyTorch knows of a graph: memory, origins of nodes, and all private names of torch."""
