"""What a file in `patterns/` holds: a rule, with its own cases.

For each anchor the engine asks for matches, one after the other, and takes the first that gets through: `check` turns
it into facts, `rewrite` adds the fused operator and says which old values its results replace. Either may refuse with
`NoMatch`; what was added is then taken back, and the next match is tried. The engine refuses too: if a value that the
old results are computed from would not enter the operator, or if the program rounds coarser than it on the way.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from torch.fx import Graph, Node

from .cases import Case
from .graph.torch_private import OpOverload
from .matching.match import Match
from .matching.pattern import NearestMiss
from .rewriting.emitter import Emitter
from .rewriting.replacement import Replacement

Facts = TypeVar("Facts")


class Stage(str, enum.Enum):
    """When rules are tried, in this order; those of one stage by their names, but each behind those in its `after`."""

    ATTENTION = "attention"
    CONTEXT = "context"
    PROLOG = "prolog"
    CACHE = "cache"
    PIECE = "piece"


class Root(Protocol):
    """A pattern that a match starts from."""

    def at(self, node: Node, nearest: NearestMiss) -> Iterator[Match]: ...


class Rule(Generic[Facts]):
    """One thing that is recognised: `pattern`, tried at every call of `targets`. It holds nothing about any graph."""

    stage: ClassVar[str]
    after: ClassVar[Sequence[str]] = ()
    """The rules of the same stage that are tried before this one, by name."""

    targets: ClassVar[Sequence[OpOverload]] = ()
    pattern: ClassVar[Root]
    accepts: ClassVar[Sequence[Case]] = ()
    rejects: ClassVar[Sequence[Case]] = ()
    yields_to_target: ClassVar[bool] = False
    """Whether the rule refuses where the target refuses its operator, so that a smaller fusion gets its turn."""

    tells_misses: ClassVar[bool] = True
    """Whether a user may want to know where it nearly applied."""

    def __init__(self) -> None:
        if getattr(self, "stage", None) not in tuple(Stage):
            stage, allowed = repr(getattr(self, "stage", None)), ", ".join(repr(stage.value) for stage in Stage)
            raise TypeError(f"rule {type(self).__name__} has stage = {stage}; it takes {allowed}")

    @property
    def name(self) -> str:
        return type(self).__module__.rsplit(".", 1)[-1]

    def anchors(self, graph: Graph) -> Iterator[Node]:
        """The nodes at which the pattern may apply."""
        return (node for target in self.targets for node in graph.find_nodes(op="call_function", target=target))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        """Every way in which the pattern matches at `anchor`."""
        return self.pattern.at(anchor, nearest)

    def check(self, match: Match) -> Facts:
        """What the rewrite needs to know. Raises NoMatch with the reason if the match must not be rewritten."""
        raise NotImplementedError

    def rewrite(self, emit: Emitter, facts: Facts) -> Iterable[Replacement]:
        """Adds the fused operator and yields what its results replace, by `replaced`: all of that is done, or none."""
        raise NotImplementedError

    def looks_like_mla(self, anchor: Node) -> bool:
        """True if what failed to match at `anchor` is near enough for the user to be told without asking."""
        return False
