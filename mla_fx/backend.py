"""The torch.compile entry: a captured graph in, a callable out. What is heavy is imported by the first compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .debug.report import Report

_last: list[Report] = []


def mla_backend(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compiles a Dynamo graph, Multi-head Latent Attention fused: `torch.compile(model, backend=mla_backend)`.

    `options` are those of `mla_fx.options.Options` and of the target; `mode` is handed to the target.
    Raises OptionError for an option that does not exist, FusionError where `strict` or `expect` is not met."""
    return _compile(gm, example_inputs, mode, options, None)


def get_backend(**options: Any) -> Callable[..., Any]:
    """A backend with options bound: `torch.compile(model, backend=get_backend(target="reference"))`."""

    def backend(gm: GraphModule, example_inputs: Sequence[Any], **given: Any) -> Callable[..., Any]:
        merged = {**options, **(given.get("options") or {})}
        return _compile(gm, example_inputs, given.get("mode"), merged, None)

    return backend


def explain(function: Callable[..., Any], **options: Any) -> Callable[..., Report]:
    """`explain(model, **options)(*args, **kwargs)` compiles and runs once; returns a Report of what fused and why not.

    As with `torch._dynamo.explain`, what was compiled before is forgotten."""

    @functools.wraps(getattr(function, "forward", function))
    def explained(*args: Any, **kwargs: Any) -> Report:
        import torch

        from .debug.report import Report

        reports: list[Report] = []

        def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            return _compile(gm, example_inputs, None, options, reports.append)

        torch._dynamo.reset()
        try:
            with torch.no_grad():
                torch.compile(function, backend=backend)(*args, **kwargs)
        finally:
            torch._dynamo.reset()
        return Report.merged(reports)

    return explained


def last_report() -> Report | None:
    """The report of the last compilation in this process, or None before the first."""
    return _last[-1] if _last else None


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None,
    given: Mapping[str, Any] | None,
    sink: Callable[[Report], None] | None,
) -> Callable[..., Any]:
    from .compilation import Compilation, through_dynamo

    try:
        compilation = Compilation.prepare(example_inputs, mode, given, keep_text=sink is not None)
        _last[:] = [compilation.report]
        if sink is not None:
            sink(compilation.report)
        return compilation.compile(gm, example_inputs)
    except Exception as error:
        raise through_dynamo(error) from error.__cause__
