"""Lowers the operators that only users call."""
