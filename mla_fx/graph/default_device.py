"""The compiler's own tensors, which a user's default device does not move."""

import contextlib

import torch


def on_processor() -> contextlib.AbstractContextManager[object]:
    """A context in which new tensors are the processor's. Where they are anyway, nothing watches torch's calls."""
    is_default = torch.get_default_device().type == "cpu"
    return contextlib.nullcontext() if is_default else torch.device("cpu")
