"""Operators that only users call."""
