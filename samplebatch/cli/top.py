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
"""Requests that are held back and shown by themselves."""


@dataclass(frozen=True)
class Top:
    """The options of `samplebatch top`."""

    uri: str
    interval_s: float
    once: bool
    token_file: Path | None
    tls_roots: Path | None


def top(options: Top) -> int:
    """Show how the tables of a service stand until Ctrl-C, or once, and return the exit status."""
    from rich.live import Live

    pictures = watch(options)
    if options.once:
        next(pictures)
        console().print(next(pictures))
        return 0
    screen = console()
    if not screen.is_terminal:
        # A file, or a pipe: one picture after the other.
        for picture in pictures:
            screen.print(picture)
    with Live(next(pictures), console=screen, auto_refresh=False) as live:
        for picture in pictures:
            live.update(picture, refresh=True)
    return 0


def watch(options: Top) -> Iterator[Group]:
    """Yield a picture of the tables every so often, for ever."""
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
    """Draw how tables stand, with the rates since they stood as before: 80 columns of text hold it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = Table(title=for_rich(title), title_justify="left", title_style="bold")
    for heading in _HEADINGS:
        found.add_column(heading, justify="left" if heading == "table" else "right")
    told: list[str] = []
    held: list[str] = []
    for name, info in tables.items():
        rates = [_rate(info[count], before[name][count], seconds) if name in before else "-" for count in _COUNTS]
        counts = [f"{info[count]:,}\n{rate}/s" for count, rate in zip(_COUNTS, rates, strict=True)]
        items = f"{info['size']:,} {for_terminal(info['items'])}\nof {info['capacity']:,}"
        found.add_row(
            Text(f"{for_terminal(name)}\n{for_terminal(info['kind'])}"), Text(items), megabytes(info["nbytes"]), *counts
        )
        limits = ", ".join(f"{limit}={value:g}" for limit, value in info["limits"].items() if value)
        told += [f"{name}: limits {limits}"] * bool(limits)
        told += [f"{name}: columns {_columns(info.get('columns') or {})}"] * bool(info.get("columns"))
        held += [_held(name, one) for one in info["held_back"]]
    told += held[:_SHOWN_HELD] + [f"and {len(held) - _SHOWN_HELD} more"] * (len(held) > _SHOWN_HELD)
    return Group(found, Text("\n".join(for_terminal(line, 400) for line in told)))


_COUNTS = ("inserted", "sampled")


def _columns(declared: Mapping[str, Any]) -> str:
    """Word declared columns, those of several policies with the policy.

    >>> _columns({"obs": "float32[4]"}), _columns({"left": {"obs": "float32[4]"}})
    ('obs:float32[4]', 'left/obs:float32[4]')
    """
    flat = {
        f"{name}/{inner}" if isinstance(form, Mapping) else name: one
        for name, form in declared.items()
        for inner, one in (form if isinstance(form, Mapping) else {name: form}).items()
    }
    return ", ".join(f"{name}:{form}" for name, form in flat.items())


def _rate(now: int, before: int, seconds: float) -> str:
    return number((now - before) / seconds) if now >= before and seconds > 0 else "-"


def _held(table: str, held: Mapping[str, Any]) -> str:
    """Word who is held back, why and for how long."""
    who = repr(held["who"]) if held["who"] else "somebody"
    seconds = max(time.time() - held["since"], 0.0)
    return f"{table}: the {held['action']} of {who} has been held back for {seconds:.1f} s: {held['why']}"
