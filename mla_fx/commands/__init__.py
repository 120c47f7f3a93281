"""The commands of `python -m mla_fx`. The library does not need them."""


class CommandError(Exception):
    """An invalid command line; the message is a sentence."""
