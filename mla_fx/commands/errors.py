"""What is wrong with a command line."""

from __future__ import annotations


class CommandError(Exception):
    """An invalid command line; the message is a sentence."""
