"""The torch.compile entry: a captured graph in, a callable out. The first compilation imports the compiler."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .debug.report import Report
    from .passes.fuel import Fuel


def mla_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph and fuse Multi-head Latent Attention: `torch.compile(model, backend=mla_backend)`.

    `options` are those of `mla_fx.options.Options` and of the target; `mode` is passed to the target. Raises
    OptionError for an unknown option, FusionError if `strict` or `expect` is not met."""
    return _compile(gm, example_inputs, mode, options)


def get_backend(**options: Any) -> Backend:
    """Return a backend with bound options: `torch.compile(model, backend=get_backend(target="reference"))`.

    Raises OptionError at once for options that fit no graph."""
    from .driver.compilation import checked

    checked(options)
    return Backend(options)


@dataclass(frozen=True, eq=False)
class Backend:
    """The result of `get_backend`. Options of a call override the bound ones."""

    bound: Mapping[str, Any]

    def __call__(
        self,
        gm: GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        return _compile(gm, example_inputs, mode, options, bound=self.bound)


def limited(fuel: Fuel, **options: Any) -> Callable[..., Any]:
    """A backend that applies no more rewrites than `fuel` allows, in all graphs together."""
    return lambda gm, example_inputs: _compile(gm, example_inputs, None, options, fuel=fuel)


def explain(function: Callable[..., Any], **options: Any) -> Callable[..., Report]:
    """`explain(model, **options)(*args, **kwargs)` compiles and runs once, and returns a Report of what fused and why
    the rest did not.

    Like `torch._dynamo.explain`, this forgets what was compiled before. Of a model on meta tensors, one layer of each
    kind is traced and counted as often as there are such layers; with `expect`, all are traced. Its graphs are
    rewritten for the target, which does not compile them."""

    @functools.wraps(getattr(function, "forward", function))
    def explained(*args: Any, **kwargs: Any) -> Report:
        import torch

        from .debug.layer_kinds import one_of_each_kind
        from .debug.report import Report

        reports: list[Report] = []

        def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return _compile(gm, example_inputs, None, options, sink=reports.append)

        torch.compiler.reset()
        try:
            with torch.no_grad(), contextlib.ExitStack() as until_done:
                layers = {} if "expect" in options else until_done.enter_context(one_of_each_kind(function))
                torch.compile(function, backend=backend)(*args, **kwargs)
        finally:
            torch.compiler.reset()
        whole = Report.merged(reports).standing_for(layers)
        for report in reports:
            report.graphs = {}  # large, and the log keeps reports until the next compilation
        return whole

    return explained


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    *,
    bound: Mapping[str, Any] | None = None,
    sink: Callable[[Report], None] | None = None,
    fuel: Fuel | None = None,
) -> Callable[..., Any]:
    from .driver.compilation import Compilation, through_dynamo
    from .options import MODE, by_name

    try:
        given = {**(bound or {}), **by_name(options), **({} if mode is None else {MODE: mode})}
        compilation = Compilation.prepare(example_inputs, given, keep_text=sink is not None, fuel=fuel)
        if sink is not None:
            sink(compilation.report)
        return compilation.compile(gm, example_inputs)
    except Exception as error:
        raise through_dynamo(error) from error.__cause__
