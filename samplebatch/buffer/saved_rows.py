"""SavedRows: the folder, the files and the state of a replay buffer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast

from samplebatch.batch.saved import Saved
from samplebatch.buffer.sequence_sampling import SequenceSampling
from samplebatch.buffer.table import Journal

if TYPE_CHECKING:
    from samplebatch.buffer.replay import ReplayBuffer


class SavedRows(SequenceSampling, Saved):
    """Rows of a replay buffer, with its folder, its files and its state; `ReplayBuffer` adds steps to them."""

    def _keep_in(self, storage: str | os.PathLike[str] | None) -> None:
        """Store the rows to come in a new folder, if one is given. The buffer must be empty."""
        if storage is not None:
            from samplebatch.storage import store_in_folder

            store_in_folder(cast("ReplayBuffer", self), storage)

    @property
    def _journal(self) -> Journal | None:
        """The journal of a buffer in a folder; parts of a buffer have none of their own."""
        return self._table.journal if self._ring is None else None

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, verify: bool | None = None) -> Self:
        """Open a buffer that was made with `storage`, in the state after the last step that it took.

        That is so however its process ended. Only the generator, priorities written back and `stack_num` may be those
        of a step before, if no step came after they changed and the buffer was not closed.

        Parameters
        ----------
        path
            The folder.
        verify
            Whether to hold all files against the checksums that they were closed with, which reads all of them. By
            default the files are that were touched since the folder was closed, which those of a copy are. If false,
            none are, and a folder is taken that was copied without being closed, or whose machine went down.

        Raises
        ------
        StorageError
            If another process has it open, or it is no buffer's folder.
        FormatError
            If it is damaged, or holds a buffer of another class; names the file and the column where bytes have
            changed. If it is a copy that was made while the buffer was open.

        Examples
        --------
        >>> import tempfile
        >>> from samplebatch import Batch, ReplayBuffer
        >>> path = tempfile.mkdtemp() + "/buffer"
        >>> with ReplayBuffer(4, storage=path) as buf:
        ...     for i in range(6):
        ...         added = buf.add(Batch(obs=i, act=0, rew=1.0, terminated=False, truncated=False))
        >>> with ReplayBuffer.open(path) as buf:
        ...     buf[:].obs, type(buf.obs)
        (array([2, 3, 4, 5]), <class 'numpy.ndarray'>)
        """
        from samplebatch.storage import open_buffer

        return cast("Self", open_buffer(cast("type[ReplayBuffer]", cls), path, verify=verify))

    def flush(self) -> None:
        """Wait until a buffer with `storage` is on the disk, so that it survives a failure of the machine.

        Any other buffer has nothing to wait for.

        Raises
        ------
        StorageError
            If it is closed.
        OSError
            If the disk fails.
        """
        if self._journal is not None:
            with self._table.lock:
                self._journal.flush()

    def close(self) -> None:
        """Flush a buffer with `storage`, write its checksums, and unlock its folder.

        It can still be read, but takes no more steps. Checksums are computed of all rows, at several gigabytes a
        second. Any other buffer stays as it is. Closing again does nothing.
        """
        with self._table.lock:
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer: its rows, and all that it needs to continue exactly as it would have.

        Returns
        -------
        dict
            Plain values, arrays, tensors and columns, which can be pickled, and a checksum for each part. Rows are
            copies.

        Examples
        --------
        >>> from samplebatch import Batch, ReplayBuffer
        >>> buf = ReplayBuffer(4)
        >>> added = buf.add(Batch(obs=7, act=0, rew=1.0, terminated=False, truncated=False))
        >>> again = ReplayBuffer(4)
        >>> again.load_state_dict(buf.state_dict())
        >>> again[0].obs
        array(7)
        """
        from samplebatch.storage import export_state

        return export_state(cast("ReplayBuffer", self))

    def load_state_dict(self, state: Mapping[str, Any], *, verify: bool = True) -> None:
        """Continue from the state of a buffer of the same class, sizes and options.

        Parameters
        ----------
        state
            The state.
        verify
            Whether to hold each part against its checksum. The state of an older version has none, and is taken.

        Raises
        ------
        ColumnMismatchError
            If it was another class, or of other sizes or options.
        FormatError
            If the state is not whole, or not as it was; names the part. Nothing has changed then.
        RingError
            If the buffer is a part of another.
        """
        from samplebatch.storage import load_state

        load_state(cast("ReplayBuffer", self), state, verify=verify)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        allow_pickle: bool = False,
        verify: bool = True,
        max_nbytes: int | None = None,
        **missing: Any,
    ) -> Self:
        """Read a buffer that `save` wrote; it goes on exactly as that one would have.

        Parameters
        ----------
        path
            The file, in any format that `save` writes.
        allow_pickle
            Whether to unpickle Python objects that the format has no type for. Only for files whose writer you trust: a
            pickle can run any code.
        verify
            Whether to hold the file against its checksums. One by an older version has none, and is read without.
        max_nbytes
            Bytes of memory that may be made of the file; 256 MiB or 1024 times its own, whichever is more, if None.
        **missing
            Arguments that no file can hold, such as the reward function of a hindsight buffer.

        Raises
        ------
        FormatError
            If the file is damaged, or holds a buffer of another class, or something else. Names the columns where
            bytes have changed.
        UntrustedPickleError
            If a column is pickled and `allow_pickle` is false; names it.
        CapacityError
            If more memory would be made of the file than `max_nbytes`; names the column.
        OSError
            If the file cannot be read.
        """
        from samplebatch.storage import load_buffer

        kind = cast("type[ReplayBuffer]", cls)
        trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
        return cast("Self", load_buffer(kind, path, missing=missing, **trust))

    def save_hdf5(self, path: str | os.PathLike[str], compression: str | None = None) -> None:
        """Write the buffer to an HDF5 file, which Tianshou can load.

        Parameters
        ----------
        path
            The file.
        compression
            A filter of h5py's: `"gzip"`, `"lzf"`.

        Raises
        ------
        UnstorableError
            If a value can be neither stored nor pickled; names it.
        MissingExtraError
            If h5py is not installed.
        OSError
            If the file cannot be written.
        """
        from samplebatch.storage import save_hdf5_buffer

        save_hdf5_buffer(cast("ReplayBuffer", self), path, compression)

    @classmethod
    def load_hdf5(
        cls,
        path: str | os.PathLike[str],
        device: str | None = None,
        *,
        allow_pickle: bool = False,
        verify: bool = True,
        max_nbytes: int | None = None,
        **missing: Any,
    ) -> Self:
        """Read a buffer from an HDF5 file that `save_hdf5`, ours or Tianshou's, wrote.

        Parameters
        ----------
        path
            The file.
        device
            Accepted as Tianshou does; a buffer's tensors are always in the host's memory.
        allow_pickle
            Whether to unpickle objects. Only for files whose writer you trust: a pickle can run any code.
        verify
            Whether to hold the file against its checksums. Tianshou's have none, and are read without.
        max_nbytes, **missing
            As of `load`.

        Raises
        ------
        FormatError
            If the file is damaged, or holds no buffer of this class. Names the columns where bytes have changed.
        UntrustedPickleError, CapacityError, OSError
            As of `load`.
        MissingExtraError
            If h5py is not installed.
        """
        from samplebatch.storage import load_hdf5_buffer

        kind = cast("type[ReplayBuffer]", cls)
        trust: dict[str, Any] = {"allow_pickle": allow_pickle, "verify": verify, "max_nbytes": max_nbytes}
        return cast("Self", load_hdf5_buffer(kind, path, missing=missing, **trust))
