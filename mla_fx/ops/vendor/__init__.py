"""Operators of the vendor that the compiler never emits."""
