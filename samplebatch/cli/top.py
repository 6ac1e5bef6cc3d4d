"""`samplebatch top`."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samplebatch.cli.serving import read_token
from samplebatch.cli.terminal import console, megabytes, number
from samplebatch.names import for_rich, for_terminal

if TYPE_CHECKING:
    from rich.console import Group

_HEADINGS = ("table", "items", "memory", "inserted", "sampled")
_SHOWN_HELD = 8
"""Maximum number of blocked requests to list individually."""


@dataclass(frozen=True)
class Top:
    """Options of `samplebatch top`."""

    uri: str
    interval_s: float
    once: bool
    token_file: Path | None
    tls_roots: Path | None


def top(options: Top) -> int:
    """Show the tables of a service until Ctrl-C, or once, and return the exit status."""
    from rich.live import Live

    pictures = watch(options)
    if options.once:
        next(pictures)
        console().print(next(pictures))
        return 0
    screen = console()
    if not screen.is_terminal:
        # Output to a file or pipe: print every update.
        for picture in pictures:
            screen.print(picture)
    with Live(next(pictures), console=screen, auto_refresh=False) as live:
        for picture in pictures:
            live.update(picture, refresh=True)
    return 0


def watch(options: Top) -> Iterator[Group]:
    """Yield the rendered tables repeatedly, without end."""
    from samplebatch.service.link import Link

    token = None if options.token_file is None else read_token(options.token_file)
    roots = None if options.tls_roots is None else options.tls_roots.read_bytes()
    link = Link(options.uri, token, roots, 5.0)
    before: Mapping[str, Any] = {}
    then = time.monotonic()
    while True:
        (answer,) = link.retry(lambda: link.act("info", b"{}"))
        tables, now = json.loads(bytes(answer))["tables"], time.monotonic()
        yield draw_tables(tables, before, now - then, options.uri)
        before, then = tables, now
        time.sleep(options.interval_s)


def draw_tables(tables: Mapping[str, Any], before: Mapping[str, Any], seconds: float, title: str) -> Group:
    """Render tables with rates since `before`, in at most 80 columns."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title=for_rich(title), title_justify="left", title_style="bold")
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "table" else "right")
    notes: list[str] = []
    blocked: list[str] = []
    for name, info in tables.items():
        rates = [_rate(info[count], before[name][count], seconds) if name in before else "-" for count in _COUNTS]
        counts = [f"{info[count]:,}\n{rate}/s" for count, rate in zip(_COUNTS, rates, strict=True)]
        items = f"{info['size']:,} {for_terminal(info['items'])}\nof {info['capacity']:,}"
        table.add_row(
            Text(f"{for_terminal(name)}\n{for_terminal(info['kind'])}"), Text(items), megabytes(info["nbytes"]), *counts
        )
        limits = ", ".join(f"{limit}={value:g}" for limit, value in info["limits"].items() if value)
        notes += [f"{name}: limits {limits}"] * bool(limits)
        notes += [f"{name}: columns {_columns(info.get('columns') or {})}"] * bool(info.get("columns"))
        blocked += [_held(name, request) for request in info["held_back"]]
    notes += blocked[:_SHOWN_HELD] + [f"and {len(blocked) - _SHOWN_HELD} more"] * (len(blocked) > _SHOWN_HELD)
    return Group(table, Text("\n".join(for_terminal(line, 400) for line in notes)))


_COUNTS = ("inserted", "sampled")


def _columns(declared: Mapping[str, Any]) -> str:
    """Format declared columns, prefixed by the policy if there are several policies.

    >>> _columns({"obs": "float32[4]"}), _columns({"left": {"obs": "float32[4]"}})
    ('obs:float32[4]', 'left/obs:float32[4]')
    """
    flat = {
        f"{name}/{inner}" if isinstance(form, Mapping) else name: column_form
        for name, form in declared.items()
        for inner, column_form in (form if isinstance(form, Mapping) else {name: form}).items()
    }
    return ", ".join(f"{name}:{form}" for name, form in flat.items())


def _rate(now: int, before: int, seconds: float) -> str:
    return number((now - before) / seconds) if now >= before and seconds > 0 else "-"


def _held(table: str, request: Mapping[str, Any]) -> str:
    who = repr(request["who"]) if request["who"] else "somebody"
    seconds = max(time.time() - request["since"], 0.0)
    return f"{table}: the {request['action']} of {who} has been held back for {seconds:.1f} s: {request['why']}"
