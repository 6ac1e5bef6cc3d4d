"""ParquetDataset: a folder of Parquet files, a batch in each."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from samplebatch.batch.concat import concat_samples
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.errors import FormatError
from samplebatch.storage.parquet import read_parquet, write_parquet

_PART = re.compile(r"part-(\d{6,})-[0-9a-f]{8}\.parquet")


class ParquetDataset:
    """A folder of Parquet files, a batch in each: fragments as they came, read back one by one or joined.

    Every part is written whole or not at all, so a writer that is killed costs the part in flight and nothing else.
    Several processes may append to one folder at once. Other tools read the folder as one table wherever the parts
    have the same columns: `polars.scan_parquet("folder/*.parquet")`.

    Parameters
    ----------
    folder
        The folder. It is made with the first part; the one that it lies in must exist.
    allow_pickle
        Whether reading may unpickle columns of Python objects that Arrow has no type for. Only for files whose writer
        you trust: a pickle can run any code.
    max_nbytes
        Bytes of memory that may be made of each file; 256 MiB or 1024 times its own, whichever is more, if None.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     dataset = ParquetDataset(f"{folder}/steps")
    ...     for rewards in ([1.0, 2.0], [3.0]):
    ...         path = dataset.append(SampleBatch(rewards=rewards))
    ...     [len(part) for part in dataset], dataset.read()["rewards"].tolist()
    ([2, 1], [1.0, 2.0, 3.0])
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, allow_pickle: bool = False, max_nbytes: int | None = None
    ) -> None:
        self.folder = Path(folder)
        self._allow_pickle = allow_pickle
        self._max_nbytes = max_nbytes
        self._next: int | None = None

    def __repr__(self) -> str:
        return f"ParquetDataset({os.fspath(self.folder)!r}: {len(self)} parts)"

    def append(self, batch: SampleBatch | MultiAgentBatch, *, compression: str = "zstd") -> Path:
        """Write a batch as the next part, and return its file; raises as `write_parquet` does.

        Raises
        ------
        FormatError
            If the folder's path is that of a file.
        """
        if self._next is None:
            if self.folder.exists() and not self.folder.is_dir():
                raise FormatError(f"{os.fspath(self.folder)!r} must be a folder of Parquet files, and it is a file")
            self.folder.mkdir(exist_ok=True)
            self._next = max((_number(path) for path in self.parts()), default=-1) + 1
        # Whoever else appends may count alike: the second half keeps the names apart.
        path = self.folder / f"part-{self._next:06d}-{secrets.token_hex(4)}.parquet"
        write_parquet(batch, path, compression=compression)
        self._next += 1
        return path

    def parts(self) -> list[Path]:
        """List the files of all parts, in the order in which they were appended.

        Raises
        ------
        OSError
            If there is no such folder.
        """
        found = [Path(entry.path) for entry in os.scandir(self.folder) if _PART.fullmatch(entry.name)]
        return sorted(found, key=lambda path: (_number(path), path.name))

    def __len__(self) -> int:
        return len(self.parts()) if self.folder.exists() else 0

    def __iter__(self) -> Iterator[SampleBatch | MultiAgentBatch]:
        for path in self.parts():
            yield read_parquet(path, allow_pickle=self._allow_pickle, max_nbytes=self._max_nbytes)

    def read(self) -> SampleBatch | MultiAgentBatch:
        """Read all parts, and join them as `concat_samples` does.

        Raises
        ------
        FormatError, UntrustedPickleError, CapacityError, OSError
            As `read_parquet` does.
        ColumnMismatchError
            If the parts differ in their columns, dtypes or row shapes.
        """
        return concat_samples(self)


def _number(path: Path) -> int:
    found = _PART.fullmatch(path.name)
    return int(found[1]) if found else -1
