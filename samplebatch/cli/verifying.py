"""`samplebatch verify`."""

from __future__ import annotations

from pathlib import Path

from samplebatch.cli.display import complain, console, megabytes
from samplebatch.storage import verifying


def verify(path: Path) -> int:
    """Print for each file whether it is whole, and return the exit status: 1 if one is damaged."""
    from rich.table import Table

    reports = verifying.verify(path)
    table = Table()
    for heading in ("file", "format", "size", "found"):
        table.add_column(heading, justify="right" if heading == "size" else "left")
    for report in reports:
        name = str(report.path.relative_to(path)) if report.path != path else path.name
        whole = "whole" if report.has_checksums else "readable; it has no checksums"
        table.add_row(name, report.format, megabytes(report.nbytes), "damaged" if report.fault else whole)
    console().print(table)
    faults = [report.fault for report in reports if report.fault]
    if faults:
        complain(faults[0] + (f"; {len(faults) - 1} more files are damaged" if faults[1:] else ""))
    return 1 if faults else 0
