"""Patterns over readings, and what a match binds."""
