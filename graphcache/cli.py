"""The console script: parses, calls, prints. A sub-command is one function, listed in `COMMANDS`.

Errors of the package print one line to stderr, exit status 2, as argparse's own do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

from graphcache import checking, planreport, plotting
from graphcache import demo as demonstration
from graphcache.arguments import FORM, count, names, nbytes, per_dim
from graphcache.demo import DemoReport
from graphcache.errors import GraphCacheError
from graphcache.frames import told
from graphcache.padding import Fill
from graphcache.planning.cost import read_costs
from graphcache.version import __version__

Run = Callable[[argparse.Namespace], int]

_BACKENDS = {
    "cuda": "cuda ({device})",
    "recorded": "recorded ({device}): shows behaviour, not speed; no launch cost is saved on a CPU",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 0, 1 of `check` with findings, or 2 after an
    error, printed on one line.

    Args:
        argv: arguments without the program's name; None: those of the process.

    Raises:
        SystemExit: from argparse, on `--help`, `--version` and a command line that does not parse.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except GraphCacheError as error:
        print("graphcache:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "graphcache", description="CUDA graphs for variable shapes, for any PyTorch module."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command_parser = commands.add_parser(
            command.__name__, help=command.__doc__, description=command.__doc__
        )
        command_parser.set_defaults(run=command(command_parser))
    return parser


def demo(parser: argparse.ArgumentParser) -> Run:
    """Serve a MiniLM-shaped encoder's stream of batches, eagerly and by GraphCache."""
    parser.add_argument("--trace", metavar="FILE.csv", help="sizes, in the columns batch and seq")
    parser.add_argument("--rows", type=count, metavar="N", help="serve at most N calls")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")

    def run(options: argparse.Namespace) -> int:
        progress = not options.json and sys.stderr.isatty()
        report = demonstration.run(options.trace, options.rows, progress)
        print(json.dumps(dataclasses.asdict(report)) if options.json else _demo_table(report))
        return 0

    return run


def check(parser: argparse.ArgumentParser) -> Run:
    """Report what would stop a capture of a module, or make padding it wrong; status 1 if any."""
    parser.add_argument(
        "factory",
        metavar="PACKAGE.MODULE:FACTORY",
        help="a function that returns (module, args) or (module, args, kwargs) of one call",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object only")

    def run(options: argparse.Namespace) -> int:
        with contextlib.redirect_stdout(sys.stderr):  # what the user's code prints
            module, args, kwargs = _made_by(options.factory)
            report = checking.check(module, *args, **kwargs)
        print(json.dumps(_check_answer(report)) if options.json else report)
        return 0 if report.ok else 1

    return run


def plan(parser: argparse.ArgumentParser) -> Run:
    """Plan buckets for the sizes in a CSV file, and show what they save beside common lists."""
    parser.add_argument("trace", metavar="TRACE.csv", help="one call a row, sizes in columns")
    parser.add_argument(
        "--dims", type=names, default=("batch",), metavar="NAMES", help="columns, as batch,seq"
    )
    parser.add_argument("--max-graphs", type=count, default=32, metavar="N", help="default 32")
    for name, meaning in (("align", "multiples that buckets are"), ("limits", "largest sizes")):
        parser.add_argument(f"--{name}", type=per_dim, metavar="SIZES", help=f"{meaning}: {FORM}")
    parser.add_argument("--cost", metavar="FILE", help="measured costs, .csv or .json")
    parser.add_argument("--split", metavar="DIM", help="calls may be served in pieces along it")
    parser.add_argument("--grid", action="store_true", help="levels per dim and their product")
    parser.add_argument(
        "--held-out", type=float, default=0.5, metavar="SHARE",
        help="of the calls, the first ones, to plan on for a score on the rest; default 0.5",
    )  # fmt: skip
    parser.add_argument("--memory-budget", type=nbytes, metavar="SIZE", help="of all graphs: 2GiB")
    parser.add_argument(
        "--horizon", type=count, default=100_000, metavar="N", help="calls that pay a capture"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the search")
    parser.add_argument("--out", metavar="PLAN.json", help="save the plan")
    parser.add_argument("--plot", metavar="FILE.png", help="draw it; needs the extra `plot`")
    parser.add_argument("--json", action="store_true", help="print one JSON object only")

    def run(options: argparse.Namespace) -> int:
        report = planreport.report(
            options.trace,
            options.dims,
            options.cost and read_costs(options.cost, options.dims),
            options.held_out,
            **{name: getattr(options, name) for name in _PLAN_OPTIONS},
        )
        if options.out:
            report.plan.save(options.out)
        if options.plot:
            plotting.plot(report.plan, options.plot)
        files = {"out": options.out, "plot": options.plot}
        print(json.dumps(report.to_json() | files) if options.json else _told_plan(report, files))
        return 0

    return run


_PLAN_OPTIONS = (
    "max_graphs", "align", "limits", "split", "grid", "memory_budget", "horizon", "seed",
)  # fmt: skip


def _told_plan(report: planreport.PlanReport, files: dict[str, str | None]) -> str:
    told_files = {
        "out": "saved to {0}: GraphCache(model, buckets={0!r})",
        "plot": "drawn in {0}",
    }
    lines = [told_files[kind].format(file) for kind, file in files.items() if file]
    return "\n\n".join([str(report), *(["\n".join(lines)] if lines else [])])


def _check_answer(report: checking.Report) -> dict[str, Any]:
    findings = [found._asdict() | {"remedy": report.remedy(found)} for found in report.findings]
    dims = {
        name: {
            "neutral": facts.neutral,
            "reason": None if facts.neutral else facts.reason,
            "detail": facts.detail,
            "controls": {name: _json(fill) for name, fill in facts.controls.items()},
            "independent": facts.independent,
            "outputs": [[axis.axis for axis in output] for output in facts.axes or ()],
        }
        for name, facts in report.probe.dims.items()
    }
    return {"module": report.name, "ok": report.ok, "findings": findings, "dims": dims}


def _json(fill: Fill) -> Fill:
    """JSON has no infinities."""
    return fill if isinstance(fill, str) or math.isfinite(fill) else str(fill)


COMMANDS: tuple[Callable[[argparse.ArgumentParser], Run], ...] = (demo, check, plan)


def _made_by(factory: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """What a factory returns, given as package.module:name and imported from the current folder
    too.
    """
    path, _, name = factory.partition(":")
    sys.path.insert(0, "")
    try:
        make = getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError, ValueError) as error:
        how = "" if name else "; name the function after a colon, package.module:factory"
        raise GraphCacheError(f"cannot find {factory!r}: {error}{how}") from error
    except (Exception, SystemExit) as error:
        raise GraphCacheError(f"cannot import {factory!r}: {told(error)}") from error
    finally:
        sys.path.remove("")
    try:
        made = make()
    except (Exception, SystemExit) as error:
        raise GraphCacheError(f"{factory} raised {told(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise GraphCacheError(
            f"{factory} returned {type(made).__name__}; return (module, args) or "
            "(module, args, kwargs)."
        )
    module, args, kwargs = (*made, {})[:3]
    if not callable(module) or not isinstance(kwargs, dict):
        raise GraphCacheError(
            f"{factory} returned {type(module).__name__} as module and {type(kwargs).__name__} as "
            "kwargs; return something that can be called, and a dict."
        )
    return module, args if isinstance(args, tuple) else (args,), kwargs


def _demo_table(report: DemoReport) -> str:
    buckets = "; ".join(f"{dim} {', '.join(map(str, b))}" for dim, b in report.buckets.items())
    fallbacks = ", ".join(f"{reason}: {n}" for reason, n in report.fallbacks.items()) or "none"
    rows = {
        "backend": _BACKENDS[report.backend].format(device=report.device),
        "encoder": f"MiniLM's shape, random weights, {report.dtype}",
        "stream": f"{report.stream}, {report.calls_in_stream:,} calls of "
        f"{report.distinct_sizes:,} sizes",
        "buckets": buckets,
        "eager": f"{report.eager_ms:.3f} ms per call, median",
        "GraphCache": f"{report.graphcache_ms:.3f} ms per call, median",
        "warmup": f"{report.warmup_seconds:.2f} s",
        "first pass": f"{report.first_pass_seconds:.2f} s",
        "padding overhead": f"{report.padding_overhead:.1%}",
        "graphs": f"{report.graphs:,}, {report.graph_bytes / 2**20:,.0f} MiB",
        "served": f"{report.captures:,} captures, {report.replays:,} replays, "
        f"{report.eager_runs:,} eager",
        "fallbacks": fallbacks,
        "difference": f"{report.largest_relative_difference:.1e} of the norm, "
        f"{report.largest_difference:.1e} in an element, largest from eager",
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows.items())
