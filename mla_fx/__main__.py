"""`python -m mla_fx`: `demo` compares a stock and a fused decode step, `explain` reports what fuses in a model,
`bisect` which rewrite changes its answer, `coverage` what fuses in all of them, `report` shows a dump in a browser."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .commands.bisect import run_bisect
from .commands.coverage import run_coverage
from .commands.demo import run_demo
from .commands.explain import CommandError, run_explain
from .commands.report import run_report
from .errors import FusionError, OptionError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (CommandError, FusionError, ModuleNotFoundError, OptionError) as error:
        # Dynamo appends advice on reporting its own bugs to errors that pass through it.
        print("mla_fx:", str(error).partition("\n\nSet TORCHDYNAMO")[0], file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mla_fx", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="compare a decode step of DeepSeek-V3's attention, stock and fused")
    demo.add_argument("--context", type=int, default=4096, help="tokens in the cache (%(default)s)")
    demo.add_argument("--layers", type=int, default=1, help="decoder layers (%(default)s)")
    demo.set_defaults(run=_demo)
    explain = commands.add_parser("explain", help="report what fuses in a model, what almost does, and why not")
    explain.add_argument(
        "model", metavar="MODEL_OR_SCRIPT", help="a transformers model type, or a .py file with a build()"
    )
    # Passes are the same for every target; this one compiles in seconds.
    explain.add_argument("--target", default="reference", help="what the graph is compiled for (%(default)s)")
    explain.add_argument(
        "--full", action="store_true", help="the full model on the meta device, not a tiny one"
    )
    explain.add_argument("--json", action="store_true", help="the report for programs, as JSON")
    explain.set_defaults(run=_explain)
    report = commands.add_parser("report", help="write the pages of a dump, for a browser")
    report.add_argument("folder", type=Path, metavar="DIR", help="what option dump or MLA_FX_DUMP filled")
    report.set_defaults(run=_report)
    bisect = commands.add_parser("bisect", help="find the first rewrite that makes an answer wrong")
    bisect.add_argument("script", metavar="SCRIPT", help="a .py file with a build()")
    bisect.add_argument("--target", default="reference", help="what the graph is compiled for (%(default)s)")
    bisect.add_argument("--json", action="store_true", help="the result for programs, as JSON")
    bisect.set_defaults(run=lambda options: run_bisect(options.script, options.target, as_json=options.json))
    coverage = commands.add_parser("coverage", help="regenerate the tables of docs/coverage.md, in a clone")
    coverage.add_argument("--only", default="", help="one family or one axis of the zoo: shown, not written")
    coverage.set_defaults(run=lambda options: run_coverage(options.only))
    return parser


def _demo(options: argparse.Namespace) -> int:
    if options.context < 2 or options.layers < 1:
        raise CommandError("--context takes two tokens or more and --layers one or more.")
    return 0 if run_demo(options.context, options.layers).agree else 1


def _explain(options: argparse.Namespace) -> int:
    run_explain(options.model, options.target, is_full=options.full, as_json=options.json)
    return 0


def _report(options: argparse.Namespace) -> int:
    run_report(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
