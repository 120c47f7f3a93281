"""Operators that the compiler emits and no vendor has."""
