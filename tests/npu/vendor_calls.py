"""A vendor's operator compared bit by bit with its kernel."""

import torch

from npu.lowered import A2, Call

# Unlike each other and unlike the defaults, and so large that they show.
NUMBERS = {"rmsnorm_epsilon_cq": 0.1, "rmsnorm_epsilon_ckv": 0.3, "qc_qr_scale": 1.25, "kc_scale": 0.75}


def check(converted, kernel, operator, args, surface=A2, **options):
    """Bit by bit, though the interpreter's kernels are written for themselves: both round where the vendor does."""
    call = Call(operator, args, options, surface)
    torch.testing.assert_close(call.on_npu(converted), call.wanted(), rtol=0, atol=0)
    assert converted.types(converted.graphs[0]).count(kernel) == 1
