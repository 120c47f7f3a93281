"""What is known of sizes that may be symbols."""

import torch


def statically_known_true(relation: bool | torch.SymBool) -> bool:
    """Whether a relation of sizes is known to hold; asking adds no guard.

    PyTorch's function of that name, imported where a symbol is there to ask about: it brings sympy, which takes longer
    to import than all of this package."""
    if isinstance(relation, bool):
        return relation
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(relation)
