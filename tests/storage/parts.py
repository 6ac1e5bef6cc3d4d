"""Parts of datasets that no dataset wrote, committed as if one had, and parts that a child process appends."""

from __future__ import annotations

from pathlib import Path

from pyarrow import parquet

from samplebatch import Dataset, SampleBatch
from samplebatch.storage.datasets.commit_log import CommitLog, Part, add, begin, encode_schema


def commit(path: Path) -> Path:
    """Create a dataset folder from one Parquet file and return the folder."""
    log = CommitLog(path.parent)
    about = parquet.read_metadata(path)
    groups = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    log.append(begin({"type": "SampleBatch", "schema": encode_schema(parquet.read_schema(path))}), log.read())
    log.append(add(Part(path.name, path.stat().st_size, groups, 1000, None), []), log.read())
    return path.parent


def append_some(folder: Path, writer: int) -> None:
    """Append five fragments of one row."""
    dataset = Dataset(folder)
    for i in range(5):
        dataset.extend(SampleBatch(who=[writer], i=[i]))
