"""The content of a file in `patterns/`: a rule with its cases. Everything that a rule needs comes from here: the class,
the words of patterns, the match. Rules that read or build more find it in the rooms of this package: `readings`,
`operands` and `caches`.

For each anchor, the engine goes through the matches and takes the first that works: `rewrite` makes a plan, which says
which operator is called on which operands, and which old values its results replace. `rewrite` may refuse with
`NoMatch`; then the next match is tried. The engine refuses, too, before it changes anything: if a value that the old
results are computed from would not enter the operator, or if the program rounds more coarsely than the operator.
"""

import enum
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from torch.fx import Graph, Node

from mla_fx.cases import Case as Case
from mla_fx.cases import Layer as Layer
from mla_fx.errors import ByDesign as ByDesign
from mla_fx.errors import NoMatch as NoMatch
from mla_fx.errors import attempt as attempt
from mla_fx.graph.torch_private import OpOverload
from mla_fx.matching.match import Match as Match
from mla_fx.matching.match import NearestMiss as NearestMiss
from mla_fx.matching.pattern import AttentionPattern as AttentionPattern
from mla_fx.matching.pattern import CallPattern as CallPattern
from mla_fx.matching.pattern import Operand as Operand
from mla_fx.matching.pattern import Pattern as Pattern
from mla_fx.matching.pattern import Reads as Reads
from mla_fx.matching.pattern import ValuePattern as ValuePattern
from mla_fx.matching.words import behind as behind
from mla_fx.matching.words import bound as bound
from mla_fx.matching.words import coded as coded
from mla_fx.matching.words import contract as contract
from mla_fx.matching.words import either as either
from mla_fx.matching.words import gathered as gathered
from mla_fx.matching.words import having as having
from mla_fx.matching.words import last_dimension as last_dimension
from mla_fx.matching.words import normed as normed
from mla_fx.matching.words import quantised as quantised
from mla_fx.matching.words import refused as refused
from mla_fx.matching.words import rms_norm as rms_norm
from mla_fx.matching.words import rope as rope
from mla_fx.matching.words import scaled as scaled
from mla_fx.matching.words import stored as stored
from mla_fx.matching.words import tokens as tokens
from mla_fx.matching.words import var as var
from mla_fx.rewriting.plan import Plan as Plan


class Stage(str, enum.Enum):
    """The stages, in the order in which rules are tried. Rules of one stage are sorted by name, and come after those in
    `after`."""

    ATTENTION = "attention"
    CONTEXT = "context"
    PROLOG = "prolog"
    CACHE = "cache"
    PIECE = "piece"


class Root(Protocol):
    """A pattern that a match starts from."""

    def at(self, node: Node, nearest: NearestMiss) -> Iterator[Match]: ...


class Rule:
    """Something to recognise: `pattern`, tried at every call of `targets`. A rule has no state about any graph."""

    stage: ClassVar[str]
    after: ClassVar[Sequence[str]] = ()
    """Names of the rules of the same stage that are tried before this one."""

    targets: ClassVar[Sequence[OpOverload]] = ()
    pattern: ClassVar[Root]
    accepts: ClassVar[Sequence[Case]] = ()
    rejects: ClassVar[Sequence[Case]] = ()
    yields_to_target: ClassVar[bool] = True
    """Whether the rule refuses if the target's lowering refuses, so that a smaller fusion can be tried."""

    tells_misses: ClassVar[bool] = True
    """Whether a user may want to know where it almost applied."""

    def __init__(self) -> None:
        if getattr(self, "stage", None) not in tuple(Stage):
            stage, allowed = repr(getattr(self, "stage", None)), ", ".join(repr(stage.value) for stage in Stage)
            raise TypeError(f"rule {type(self).__name__} has stage = {stage}; it takes {allowed}")

    @property
    def name(self) -> str:
        """The file's, unless a class names itself: a folder may hold several rules."""
        return type(self).__module__.rsplit(".", 1)[-1]

    def anchors(self, graph: Graph) -> Iterator[Node]:
        """Yield the nodes at which the pattern may apply."""
        return (node for target in self.targets for node in graph.find_nodes(op="call_function", target=target))

    def bindings(self, anchor: Node, nearest: NearestMiss) -> Iterator[Match]:
        """Yield every way in which the pattern matches at `anchor`."""
        return self.pattern.at(anchor, nearest)

    def rewrite(self, match: Match) -> Plan:
        """Return the plan that replaces the matched values. Raises NoMatch with the reason if they must not be
        replaced."""
        raise NotImplementedError

    def looks_like_mla(self, anchor: Node) -> bool:
        """Whether a failed match at `anchor` is close enough to MLA to warn the user."""
        return False
