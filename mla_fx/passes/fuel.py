"""How many rewrites may be applied: what finds the one that is wrong."""

import functools
import math
import os
from dataclasses import dataclass, field

from mla_fx.errors import OptionError

VARIABLE = "MLA_FX_FUEL"


@dataclass(frozen=True)
class Rewrite:
    """A rewrite that was applied: by which pattern, where, and the fused calls that it added; or a pass over a whole
    graph that may be left out."""

    pattern: str
    module: str = ""
    source: str = ""
    calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        module, source = (f" in {self.module}" if self.module else ""), (f" ({self.source})" if self.source else "")
        return f"{self.pattern}{module}{source}"


@dataclass
class Fuel:
    """The number of rewrites that may be applied, in the order in which graphs are compiled, and those that were."""

    limit: float = math.inf
    applied: list[Rewrite] = field(default_factory=list)

    @property
    def is_limited(self) -> bool:
        return self.limit < math.inf

    @property
    def is_empty(self) -> bool:
        return len(self.applied) >= self.limit

    def burn(self, rewrite: Rewrite) -> None:
        self.applied.append(rewrite)


def fuel_of_process() -> Fuel:
    """What MLA_FX_FUEL leaves of the rewrites of this process. Raises OptionError if it is no number."""
    given = os.environ.get(VARIABLE)
    return Fuel() if given is None else _limited(given)


@functools.lru_cache(maxsize=1)
def _limited(given: str) -> Fuel:
    if not given.isdecimal():
        raise OptionError(f"{VARIABLE} is {given!r}; it takes a number of rewrites, such as 12")
    return Fuel(int(given))
