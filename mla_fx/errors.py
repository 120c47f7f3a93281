"""Errors, and the refusal to fuse, which is not an error."""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.fx import Node

Given = ParamSpec("Given")
Found = TypeVar("Found")


class NoMatch(Exception):  # noqa: N818  a refusal, part of every normal compilation
    """A refusal: a pattern does not apply, or a target does not take a call. It has a sentence for the user, and the
    node that broke the pattern."""

    def __init__(self, reason: str, node: Node | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.node = node


def attempt(read: Callable[Given, Found], *given: Given.args, **options: Given.kwargs) -> Found | None:
    """What a reading finds; None if it refuses, where the reason does not matter."""
    try:
        return read(*given, **options)
    except NoMatch:
        return None


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


class ByDesign(NoMatch):
    """A refusal for which nothing in the program is to blame: the target or an option leaves the operator out, another
    form costs less, or there is nothing for the operator to do."""


class OptionError(ValueError):
    """An option or target that does not exist or does not apply; the message lists those that do."""


class FusionError(RuntimeError):
    """`strict` or `expect` was not met, or a pass failed with `strict`."""


class VerificationError(RuntimeError):
    """`verify` found that the fused and the unfused graph differ."""


class MlaWarning(UserWarning):
    """A model that looks like MLA was not fused, or a pass failed and the model runs unfused."""
