"""Expectations about what fuses in the graphs that a block of code compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mla_fx.errors import FusionError
from mla_fx.options import expectation

from .report_log import listening


@contextlib.contextmanager
def expecting(**counts: int | tuple[int, ...]) -> Iterator[None]:
    """Raise FusionError at the end of the block if what it compiled, in this thread, did not fuse exactly these
    operators.

    `with expecting(mla_prolog=61, latent_attention=61): model(...)` counts over all graphs of the model, whether they
    come from graph breaks or from several models. Graphs that were compiled before and only run do not count."""
    wanted = expectation(counts)
    with listening() as reports:
        yield
    from mla_fx.debug.report import Report

    fused = Report.merged(reports).fused
    if not wanted.is_met(fused):
        listed = "\n".join(map(str, reports)) or "nothing was compiled"
        raise FusionError(f"expected {wanted}, fused {fused} in {len(reports)} graphs\n{listed}")
