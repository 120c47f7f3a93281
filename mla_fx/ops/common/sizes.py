"""What is known about sizes that may be symbols."""

import torch


def statically_known_true(relation: bool | torch.SymBool) -> bool:
    """Whether a relation of sizes is known to hold; asking adds no guard.

    PyTorch's function of the same name is imported only when there is a symbol to ask about: it imports sympy, which
    takes longer than importing this whole package."""
    if isinstance(relation, bool):
        return relation
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(relation)


def largest(size: int | torch.SymInt) -> int | None:
    """The largest number that a size may be, such as 2048 for min(2048, T); None if there is none."""
    if isinstance(size, int):
        return size
    found = size.node.shape_env.bound_sympy(size.node.expr).upper
    return int(found) if found.is_Integer else None
