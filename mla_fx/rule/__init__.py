"""The content of a file in `patterns/`: a rule with its cases. Everything that a rule needs comes from here. Rules
that read more than the words of patterns do find it in the rooms of this package: `caches`, `codes`, `indices`,
`operands` and `readings`.

For each anchor, the engine goes through the matches and takes the first that works: `rewrite` makes a plan, which says
which operator is called on which operands, and which old values its results replace. `rewrite` may refuse with
`NoMatch`; then the next match is tried. The engine refuses, too, before it changes anything: if a value that the old
results are computed from would not enter the operator, or if the program rounds more coarsely than the operator.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from torch.fx import Graph, Node

from mla_fx.cases import Appended, Case, Layer, NoRotaryPart, WeightedQuery
from mla_fx.errors import NoMatch
from mla_fx.graph.torch_private import OpOverload
from mla_fx.matching.match import Match, NearestMiss, OperandAxes
from mla_fx.matching.pattern import AttentionPattern, CallPattern, Operand, Pattern, ValuePattern
from mla_fx.matching.words import (
    behind,
    bound,
    coded,
    contract,
    either,
    gathered,
    having,
    last_dimension,
    normed,
    quantised,
    refused,
    rms_norm,
    rope,
    scaled,
    stored,
    tokens,
    var,
)
from mla_fx.readings.attention import Attention
from mla_fx.readings.axes import Axes, axes, ordered
from mla_fx.readings.cache_places import CacheUpdate
from mla_fx.readings.calls import args_of, named_argument, operands_of, options_of
from mla_fx.readings.contraction import Contraction
from mla_fx.readings.dequantised import Dequantised
from mla_fx.readings.element import Element, element_of, is_coarser, is_parameter
from mla_fx.readings.paged import Paged
from mla_fx.readings.reading import Reading
from mla_fx.readings.rms_norm import RmsNorm
from mla_fx.readings.rope import Rope
from mla_fx.readings.views import shape_of
from mla_fx.rewriting.materialize import tensor
from mla_fx.rewriting.plan import (
    ByHoisting,
    ByTarget,
    Call,
    Cast,
    Expression,
    Inlined,
    Plan,
    Replaced,
    ViewOf,
    result,
    times,
)
from mla_fx.rewriting.replacement import ATTENTION, LATENT_ATTENTION, replaced

__all__ = [
    "ATTENTION", "LATENT_ATTENTION", "Appended", "Attention", "AttentionPattern", "Axes", "ByHoisting", "ByTarget",
    "CacheUpdate", "Call", "CallPattern", "Case", "Cast", "Contraction", "Dequantised", "Element", "Expression",
    "Inlined", "Layer", "Match", "NearestMiss", "NoMatch", "NoRotaryPart", "Operand", "OperandAxes", "Paged",
    "Pattern", "Plan", "Reading", "Replaced", "RmsNorm", "Root", "Rope", "Rule", "Stage", "ValuePattern", "ViewOf",
    "WeightedQuery", "args_of", "axes", "behind", "bound", "coded", "contract", "either", "element_of", "gathered",
    "having", "is_coarser", "is_parameter", "last_dimension", "named_argument", "normed", "operands_of",
    "options_of", "ordered", "quantised", "refused", "replaced", "result", "rms_norm", "rope", "scaled", "shape_of",
    "stored", "tensor", "times", "tokens", "var",
]  # fmt: skip


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
    yields_to_target: ClassVar[bool] = False
    """Whether the rule refuses if the target refuses its operator, so that a smaller fusion can be tried."""

    tells_misses: ClassVar[bool] = True
    """Whether a user may want to know where it almost applied."""

    def __init__(self) -> None:
        if getattr(self, "stage", None) not in tuple(Stage):
            stage, allowed = repr(getattr(self, "stage", None)), ", ".join(repr(stage.value) for stage in Stage)
            raise TypeError(f"rule {type(self).__name__} has stage = {stage}; it takes {allowed}")

    @property
    def name(self) -> str:
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
