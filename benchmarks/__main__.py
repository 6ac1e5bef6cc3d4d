"""Command line of the benchmarks."""

from __future__ import annotations

import argparse
import os
import sys
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

import benchmarks
from benchmarks import report
from benchmarks.harness import FULL, QUICK, Row, measure

LAYERS = sorted(m.name.removeprefix("bench_") for m in iter_modules(benchmarks.__path__) if m.name.startswith("bench_"))


def rows_of(layers: list[str], pattern: str = "*") -> list[Row]:
    """Return the rows of layers, filtered by a pattern for row names."""
    rows: list[Row] = []
    for layer in layers:
        rows += import_module(f"benchmarks.bench_{layer}").ROWS
    return [row for row in rows if fnmatchcase(row.name, pattern)]


def _progress(line: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)


def _start_on_one_core() -> None:
    """Restart this process on one core, because libraries count the cores on import."""
    if len(os.sched_getaffinity(0)) > 1:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        os.execv(sys.executable, sys.orig_argv)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print the requested rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=benchmarks.__doc__)
    parser.add_argument("layers", nargs="*", metavar="layer", help=f"any of: {', '.join(LAYERS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="one call per contestant, to test that the rows run")
    parser.add_argument("--filter", default="*", metavar="PATTERN", help="only rows whose name matches, such as 'sb.*'")
    parser.add_argument("--only", metavar="NAMES", help="only these contestants, such as 'ours,bare'")
    parser.add_argument("--one-core", action="store_true", help="pin all processes to one core, as on a busy machine")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all medians to a file")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    if unknown := set(options.layers) - set(LAYERS):
        parser.error(f"layers must be among {', '.join(LAYERS)}; got {', '.join(sorted(unknown))}")

    if options.one_core:
        if not hasattr(os, "sched_setaffinity"):
            parser.error("--one-core requires a system that can pin processes to cores, such as Linux")
        _start_on_one_core()

    rows = rows_of(options.layers or LAYERS, options.filter)
    if not rows:
        parser.error(f"no row matches {options.filter!r}")
    only = frozenset(options.only.split(",")) if options.only else None
    outcomes = []
    for index, row in enumerate(rows):
        _progress(f"{index}/{len(rows)} {row.name}")
        outcomes.append(measure(row, QUICK if options.quick else FULL, only))
    _progress("")

    if options.markdown:
        print(report.markdown(outcomes))
    else:
        report.show(outcomes)
    if options.json:
        report.write_json(outcomes, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
