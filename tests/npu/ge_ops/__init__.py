"""What GE operators compute, one function for each type, with the names of its definition."""
