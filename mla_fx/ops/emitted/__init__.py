"""Operators that the compiler emits."""
