"""Commands `samplebatch serve` and `samplebatch top`."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samplebatch import service
from samplebatch.cli.terminal import FAILED, INTERRUPTED, Interruption, complain, console, megabytes, number, say
from samplebatch.errors import ArgumentError, SampleBatchError
from samplebatch.names import for_rich, for_terminal
from samplebatch.service.server import read_pair

if TYPE_CHECKING:
    from rich.console import Group


@dataclass(frozen=True)
class Serving:
    """Options of `samplebatch serve`."""

    tables: Sequence[str]
    host: str
    port: int
    checkpoint: Path | None
    every_s: float | None
    keep: int
    token_file: Path | None
    tls: tuple[Path, Path] | None
    metrics_port: int | None
    allow_pickle: bool


def serve(options: Serving) -> int:
    """Serve tables until Ctrl-C or SIGTERM; return the exit status, which is 1 if the last checkpoint failed."""
    tables = [service.parse_table(text) for text in options.tables]
    checkpoints, weights = None, service.PublishedWeights()
    if options.checkpoint is not None:
        checkpoints = service.Checkpoints(options.checkpoint, keep=options.keep, allow_pickle=options.allow_pickle)
        restored = checkpoints.restore(tables, weights)
        if restored is not None:
            say(f"Restored {_sizes(tables, {table.name: len(table) for table in tables})} from {restored}")
    token = None if options.token_file is None else read_token(options.token_file)
    with Interruption() as interruption, contextlib.ExitStack() as stack:
        write = None if checkpoints is None else lambda: checkpoints.write(tables, weights).path
        server = stack.enter_context(_make_server(options, tables, token, write, weights))
        say(f"Serving {', '.join(map(repr, tables))} at {server.uri}")
        if token is None and not _is_loopback(options.host):
            say(
                f"Anybody who reaches port {server.port} may read and write: pass --token-file to require a token",
                stderr=True,
            )
        if options.metrics_port is not None:
            metrics = stack.enter_context(service.MetricsServer(tables, port=options.metrics_port))
            say(f"Metrics at {metrics.url}")
        while not interruption.wait(options.every_s):
            if checkpoints is not None:
                # A failure is reported, and serving continues.
                _write(checkpoints, tables, weights)
    # No client can write any more.
    if checkpoints is not None and not _write(checkpoints, tables, weights):
        return FAILED
    # SIGTERM is the regular way to stop a service.
    return INTERRUPTED if interruption.status == INTERRUPTED else 0


def _make_server(
    options: Serving,
    tables: Sequence[service.ReplayTable | service.RowTable],
    token: str | None,
    write: Callable[[], Any] | None,
    weights: service.PublishedWeights,
) -> service.ReplayServer:
    """Create the server and print warnings; errors about a TLS file contain the option that specifies the file."""
    if options.tls is not None:
        read_pair(options.tls, ("--tls-cert", "--tls-key"))
    with warnings.catch_warnings(record=True) as caught:
        server = service.ReplayServer(
            tables,
            host=options.host,
            port=options.port,
            token=token,
            tls=options.tls,
            checkpoint=write,
            weights=weights,
        )
    for warning in caught:
        say(f"Warning: {warning.message}", stderr=True)
    return server


def read_token(path: Path) -> str:
    """Read from a file the token that clients must send."""
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise ArgumentError(f"{str(path)!r} must contain a token, got an empty file")
    return token


def _is_loopback(host: str) -> bool:
    """Return whether a server that listens on an address is reachable only from this machine.

    >>> _is_loopback("127.0.0.2"), _is_loopback("::1"), _is_loopback("localhost"), _is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _write(
    checkpoints: service.Checkpoints,
    tables: Sequence[service.ReplayTable | service.RowTable],
    weights: service.PublishedWeights | None = None,
) -> bool:
    try:
        saved = checkpoints.write(tables, weights)
    except (SampleBatchError, OSError) as error:
        complain(f"no checkpoint was written: {error}")
        return False
    except Exception as error:
        # For example out of memory: continue, because only the service has the rows.
        complain(f"no checkpoint was written: {type(error).__name__}: {error}")
        return False
    say(f"Wrote {_sizes(tables, saved.sizes)} ({megabytes(saved.nbytes)}) to {saved.path} in {saved.seconds:.1f} s")
    return True


def _sizes(tables: Sequence[service.ReplayTable | service.RowTable], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{sizes[table.name]} {table.unit} of {table.name!r}" for table in tables)


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
    """Show the tables of a service until Ctrl-C, or only once, and return the exit status."""
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
    """Yield the rendered tables in an endless loop."""
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
    """Render tables, at most 80 characters wide, with rates since the status `before`."""
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
        blocked += [_describe_blocked(name, request) for request in info["held_back"]]
    notes += blocked[:_SHOWN_HELD] + [f"and {len(blocked) - _SHOWN_HELD} more"] * (len(blocked) > _SHOWN_HELD)
    return Group(table, Text("\n".join(for_terminal(line, 400) for line in notes)))


_COUNTS = ("inserted", "sampled")


def _columns(declared: Mapping[str, Any]) -> str:
    """Format declared columns, prefixed with the policy id if there are several policies.

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


def _describe_blocked(table: str, request: Mapping[str, Any]) -> str:
    client = repr(request["who"]) if request["who"] else "a client"
    seconds = max(time.time() - request["since"], 0.0)
    return f"{table}: the {request['action']} of {client} has been blocked for {seconds:.1f} s: {request['why']}"
