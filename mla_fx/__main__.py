"""`python -m mla_fx`: `demo` compares a stock and a fused decode step, `explain` reports what fuses in a model,
`bisect` which rewrite changes its answer, `coverage` what fuses in all of them, `report` shows a dump in a browser,
`doctor` what works on this machine."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .commands import CommandError
from .commands.bisect import run_bisect
from .commands.costs import Machine, Step
from .commands.demo import run_demo
from .commands.doctor import run_doctor
from .commands.explain import ALL, BY_DEFAULT, Asked, run_explain
from .commands.pages import run_coverage, run_report
from .errors import FusionError, OptionError

STATUS = (
    "Exit status: 0 if all that looks like MLA fused as far as the targets can, 1 if the program keeps some of it from "
    "fusing, 2 for an error."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given, argparse.Namespace(arguments=given))
    try:
        return int(options.run(options))
    except (CommandError, FusionError, ModuleNotFoundError, OptionError) as error:
        # Dynamo appends advice on reporting its own bugs to errors that pass through it.
        print("mla_fx:", str(error).partition("\n\nSet TORCHDYNAMO")[0], file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m mla_fx", description=__doc__)
    parser.add_argument("--version", action="version", version=f"mla_fx {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser("demo", help="compare a decode step of DeepSeek-V3's attention, stock and fused")
    demo.add_argument("--context", type=int, default=4096, help="tokens in the cache (%(default)s)")
    demo.add_argument("--layers", type=int, default=1, help="decoder layers (%(default)s)")
    demo.set_defaults(run=_demo)
    explain = commands.add_parser(
        "explain", help="report what fuses in a model, what almost does, and why not", epilog=STATUS
    )
    explain.add_argument(
        "model",
        metavar="MODEL",
        help="a model type of transformers, a config.json or its folder, or a .py file with a build()",
    )
    # The rules are the same for every target; the reference compiles in seconds.
    explain.add_argument(
        "--target", action="append", help=f"what to compile for, several times or {ALL!r} ({BY_DEFAULT})"
    )
    explain.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="an option of the backend or of a target"
    )
    explain.add_argument(
        "--cann",
        action="append",
        dest="option",
        type="cann={}".format,
        metavar="RELEASE",
        help="the release of CANN whose limits NPU targets check (all known ones)",
    )
    explain.add_argument("--layers", type=int, metavar="N", help="the first layers of a full model alone (all)")
    explain.add_argument("--full", action="store_true", help="a model type's full model on meta, not a tiny one")
    step, machine = Step(), Machine()
    for name, default, what in (
        ("batch", step.batch, "sequences in a step of a full model"),
        ("tokens", step.tokens, "new tokens per sequence"),
        ("context", step.context, "tokens per sequence in the cache after the step"),
    ):
        explain.add_argument(f"--{name}", type=int, default=default, help=f"{what} (%(default)s)")
    for name, rate, what in (
        ("bandwidth", machine.bandwidth, "GB/s of memory, to predict times"),
        ("flops", machine.flops, "TFLOP/s of products"),
    ):
        explain.add_argument(f"--{name}", type=float, default=rate, help=f"{what} (%(default)s)")
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
    needed = "Exit status: 0, or 1 if something that is needed does not work."
    doctor = commands.add_parser("doctor", help="say what works on this machine", epilog=needed)
    doctor.add_argument("--json", action="store_true", help="the findings for programs, as JSON")
    doctor.set_defaults(run=lambda options: run_doctor(as_json=options.json))
    coverage = commands.add_parser("coverage", help="regenerate the tables of docs/coverage.md, in a clone")
    coverage.add_argument("--only", default="", help="one family or one axis of the zoo: shown, not written")
    coverage.set_defaults(run=lambda options: run_coverage(options.only))
    return parser


def _demo(options: argparse.Namespace) -> int:
    if options.context < 2 or options.layers < 1:
        raise CommandError("--context takes two tokens or more and --layers one or more.")
    return 0 if run_demo(options.context, options.layers).agree else 1


def _explain(options: argparse.Namespace) -> int:
    step = Step(options.batch, options.tokens, options.context)
    machine = Machine(options.bandwidth, options.flops)
    if step.batch < 1 or not 1 <= step.tokens <= step.context:
        raise CommandError("--batch and --tokens take one or more, and --context at least as many as --tokens.")
    if not (machine.bandwidth > 0 and machine.flops > 0):
        raise CommandError("--bandwidth and --flops take numbers above zero.")
    unreadable = [given for given in options.option if "=" not in given]
    if unreadable:
        raise CommandError(f"--option is {unreadable[0]!r}; it takes NAME=VALUE, such as soc=Ascend910B3.")
    given = dict(one.split("=", 1) for one in options.option)
    targets, layers = options.target or [BY_DEFAULT], options.layers
    shown = options.full, options.json, options.arguments
    return run_explain(Asked(options.model, targets, given, step, machine, layers, *shown))


def _report(options: argparse.Namespace) -> int:
    run_report(options.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
