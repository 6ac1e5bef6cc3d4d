"""Parts of datasets that no dataset wrote, committed as if one had."""

from __future__ import annotations

from pathlib import Path

from pyarrow import parquet

from samplebatch.storage.datasets.commit_log import CommitLog, Part, add, begin, encode_schema


def commit(path: Path) -> Path:
    """Create a dataset folder from one Parquet file and return the folder."""
    log = CommitLog(path.parent)
    about = parquet.read_metadata(path)
    groups = [about.row_group(i).num_rows for i in range(about.num_row_groups)]
    log.append(begin({"type": "SampleBatch", "schema": encode_schema(parquet.read_schema(path))}), log.read())
    log.append(add(Part(path.name, path.stat().st_size, groups, 1000, None), []), log.read())
    return path.parent
