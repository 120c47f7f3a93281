"""What torch knows of a graph: memory, and all private names."""
