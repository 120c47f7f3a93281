"""Which form of attention takes less time on CUDA devices."""

from mla_fx.errors import ByDesign
from mla_fx.ops.emitted.attention.arguments import Arguments
from mla_fx.readings.sizes import Size

from ..cpu import costs

MOST_ABSORBED = 128  # query tokens


def most_absorbed_tokens(context: Size) -> int:
    """The number of query tokens from which on heads are expanded."""
    return MOST_ABSORBED


def refuse(a: Arguments) -> None:
    """Raise ByDesign for a call that takes longer than what it would replace. Fewer keys that are chosen were measured
    on CPUs alone."""
    if a.lens is not None:
        raise ByDesign("only CPUs attend to packed sequences by one call")
    if a.indices is not None and a.weight_uk is not None:
        raise ByDesign("only CPUs read the chosen keys alone for a prompt")
    costs.refuse(a)
