"""The commands of `python -m mla_fx`. The library does not need them."""

from __future__ import annotations


class CommandError(Exception):
    """An invalid command line; the message is a sentence."""
