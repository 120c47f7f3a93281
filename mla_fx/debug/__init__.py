"""Seeing what the compiler did: report and dumps."""
