"""Operators that the compiler emits, with shapes and options of its own."""
