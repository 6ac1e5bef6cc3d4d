"""Saved: the one way in which batches and buffers go to files."""

from __future__ import annotations

import os


class Saved:
    """The method `save` of batches and replay buffers, which `samplebatch.load` undoes."""

    __slots__ = ()

    def save(self, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True) -> None:
        """Write it to a file or folder, whole or not at all, from which `samplebatch.load` makes the same again.

        Parameters
        ----------
        path
            The file. The ending of its name says in which format: `.arrow` to be mapped, `.parquet` to be kept small
            and given away, `.hdf5` for readers of that. A name without ending is a folder: a `Dataset` of a batch, a
            folder for `ReplayBuffer.open` of a buffer, or with one Arrow file where its rows cannot be mapped, a file
            for each policy of a `MultiAgentReplayBuffer`.
        compression
            Of the columns. `"lz4"`, `"zstd"` or `"none"` for Arrow, which is compressed with LZ4 by default where a
            column is in memory; these, `"snappy"`, `"gzip"` or `"brotli"` for Parquet, `"zstd"` by default; `"gzip"` or
            `"lzf"` for HDF5, `"lzf"` by default where a column is compressed in memory, else none.
        durable
            Whether to wait until a file is on the disk, so that it outlives a power cut. Without that, the end of this
            process still loses nothing; after a power cut the file may be damaged, which `load(verify=True)` tells.
            Folders are always durable.

        Raises
        ------
        FormatError
            If no format has that ending, or it is that of another format than this can be written in.
        ColumnTypeError, UnstorableError
            If a column holds values that the format cannot hold and that cannot be pickled; names it.
        ArgumentError
            If the format has no such compression, or a folder is not to be durable.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> import tempfile
        >>> import samplebatch
        >>> path = tempfile.mkdtemp() + "/steps.parquet"
        >>> samplebatch.SampleBatch(obs=[[1.0, 2.0], [3.0, 4.0]], rewards=[0.5, 1.0]).save(path)
        >>> samplebatch.load(path, columns=["rewards"], filters=[("rewards", ">", 0.5)])["rewards"]
        array([1.])
        """
        from samplebatch.storage import save

        save(self, path, compression, durable=durable)
