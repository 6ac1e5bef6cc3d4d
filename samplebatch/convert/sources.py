"""Sources of rows to learn from: opened by path, datasets as they are, Parquet files of other libraries as a buffer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.convert.parquet_tables import read_tables
from samplebatch.errors import ArgumentError
from samplebatch.storage.commit_log import LOG
from samplebatch.storage.dataset import Dataset


def open_source(source: Any) -> Any:
    """Open the rows that a path names; others are returned as they are.

    Parameters
    ----------
    source
        The path of a dataset's folder; or of Parquet files that another library wrote, under the names of RLlib or
        Tianshou, whose rows a replay buffer then takes. A replay buffer, `Dataset` or `MixedSampler`.

    Raises
    ------
    ArgumentError
        If it is neither a path nor a thing with `sample`.
    FormatError
        If a folder has no Parquet files, or one is damaged.
    SampleBatchError
        As `ReplayBuffer.extend` does.
    OSError
        If there is no such path, or a file cannot be read.

    Examples
    --------
    >>> import tempfile
    >>> from samplebatch import SampleBatch
    >>> folder = tempfile.mkdtemp() + "/steps"
    >>> path = Dataset(folder).append(SampleBatch(obs=[0.0, 1.0], actions=[0, 1]))
    >>> len(open_source(folder))
    2
    """
    if not isinstance(source, str | os.PathLike):
        if not callable(getattr(source, "sample", None)):
            raise ArgumentError(
                f"rows to learn from must be in a buffer, a dataset or files, got {type(source).__name__}"
            )
        return source
    if (Path(source) / LOG).exists():
        return Dataset(source)
    tables = [table for table, _ in read_tables(source)]
    buffer = ReplayBuffer(sum(map(len, tables)))
    for table in tables:
        buffer.extend(table)
    return buffer
