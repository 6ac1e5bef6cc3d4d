"""What a buffer does to outlive its process: folders, checkpoints, files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from samplebatch.buffer import checkpoint
from samplebatch.buffer.checkpoint import State
from samplebatch.buffer.description import checked, described_of, make, rowless
from samplebatch.buffer.journal import WEIGHTS, FolderJournal, MappedStores, adopt, unpacked
from samplebatch.buffer.mapped import MappedFolder
from samplebatch.buffer.rows import Rows
from samplebatch.buffer.samplers import Prioritized, Sampler
from samplebatch.buffer.state_checksums import check_state, with_checksums
from samplebatch.buffer.table import Table
from samplebatch.errors import ColumnMismatchError, FormatError, RingError, StorageError


class Durable(Rows):
    """Rows that can be kept: in a folder while they come, or in files."""

    _rng: np.random.Generator
    _folder: MappedFolder | None = None
    _committed: tuple[str, bytes] = ("", b"")

    if TYPE_CHECKING:

        def _use(self, sampler: Sampler) -> None: ...

    # A folder

    def _keep_in(self, storage: str | os.PathLike[str] | None) -> None:
        """Keep the rows to come in a new folder, if one is given. The buffer must be empty."""
        if storage is None:
            return
        table = self._table
        asked = table.columns.stores
        if asked.compress or asked.ragged:
            what = "compress" if asked.compress else "ragged"
            raise StorageError(f"rows in a folder must be numbers of one shape; leave out {what!r}, or 'storage'")
        described = described_of(self)
        if described["missing"]:
            raise StorageError(
                f"a {type(self).__name__} must be all plain values to be kept in a folder, "
                f"it has {described['missing'][0]!r}; leave out 'storage'"
            )
        about = described | {"maxsizes": table.rings.maxsizes.tolist()}
        folder = MappedFolder.create(storage, about, b"")
        try:
            stores = MappedStores(allocate=folder.allocate)
            sizes = table.rings.maxsizes.tolist()
            self._table = Table(sizes, stores, keeps_next=table.keeps_next, last_frame=table.last_frame)
            self._use(self._sampler)
            self._bind_folder(folder)
            self._note_state()
        except BaseException:
            folder.close()
            raise

    def _bind_folder(self, folder: MappedFolder) -> None:
        """Commit every step to a folder from now on."""
        if isinstance(self._sampler, Prioritized):
            if WEIGHTS not in folder.columns:
                folder.allocate(WEIGHTS, (self.maxsize,), np.dtype(np.float64))
            self._sampler.mirror = folder.columns[WEIGHTS]
        self._folder = folder
        self._table.journal = FolderJournal(folder, self._table, self._committed_state)
        self._table.forget_fast_add()

    def _committed_state(self) -> bytes:
        """Return what is committed of the buffer with every step, beside its rings, as JSON."""
        known = self._sampler.state_dict(np.zeros(0, np.intp))
        found = self._rng.bit_generator.state, known, self.stack_num
        # Most of what a step costs would be to write the same again.
        if repr(found) != self._committed[0]:
            state = {
                "generator": checkpoint.generator_state(self._rng),
                "sampler": checkpoint.plain(checkpoint.sampler_state(self._sampler, np.zeros(0, np.intp))),
                "stack_num": self.stack_num,
            }
            self._committed = repr(found), json.dumps(state, separators=(",", ":")).encode()
        return self._committed[1]

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
        folder = MappedFolder.open(path, verify=verify)
        try:
            return cls._opened(folder)
        except BaseException:
            folder.close()
            raise

    @classmethod
    def _opened(cls, folder: MappedFolder) -> Self:
        about = folder.about
        buffer: Self = rowless(cls, about, {})
        try:
            maxsizes = [int(size) for size in about["maxsizes"]]
            options = about["own"]["options"]
            keeps_next, last_frame = not options["ignore_obs_next"], bool(options["save_only_last_obs"])
            table = Table(maxsizes, MappedStores(), keeps_next=keeps_next, last_frame=last_frame)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"{str(folder.path)!r} must describe a buffer, it does not: {error!r}") from error
        stores = MappedStores(allocate=folder.allocate)
        table.columns.stores = stores
        if table.finals is not None:
            table.finals.columns.stores = stores
        adopt(folder, table)
        rest: State = about
        if folder.state:
            rew = table.columns.tree.get("rew")
            state, rest = unpacked(folder.state, maxsizes, () if rew is None else rew.row_shape)
            table.rings.load_state_dict(state)
        buffer._table = table
        buffer.maxsize = table.rings.capacity
        buffer._rng = checkpoint.generator_of(rest.get("generator"))
        buffer.stack_num = int(rest.get("stack_num", 1))
        sampler = checkpoint.sampler_of(rest.get("sampler"), table.rings.capacity, np.zeros(0, np.intp))
        if isinstance(sampler, Prioritized) and WEIGHTS in folder.columns:
            stored = table.rings.stored()
            weights = folder.columns[WEIGHTS][stored]
            # Emptying the buffer may have got as far as the weights; its rows are still there, and enter anew.
            weights = np.where(
                (weights > 0.0) & (weights < sampler.tree.limit), weights, sampler.largest**sampler.alpha
            )
            sampler.tree.set(stored, weights)
        buffer._use(sampler)
        buffer._bind_folder(folder)
        return buffer

    def flush(self) -> None:
        """Wait until a buffer with `storage` is on the disk, so that not even a failure of the machine can take it.

        Any other buffer has nothing to wait for.

        Raises
        ------
        StorageError
            If it is closed.
        OSError
            If the disk fails.
        """
        if self._folder is not None:
            with self._table.lock:
                self._note_state()
                self._folder.flush()

    def close(self) -> None:
        """Flush a buffer with `storage`, write its checksums, and unlock its folder.

        It can still be read, but takes no more steps. Checksums are computed of all rows, at several gigabytes a
        second. Any other buffer stays as it is. Closing again does nothing.
        """
        with self._table.lock:
            if self._folder is not None and not self._folder.closed:
                self._note_state()
                self._folder.close()

    def _note_state(self) -> None:
        """Commit what may have changed since the last step."""
        journal = self._table.journal
        if journal is not None:
            journal.begin([])
            journal.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    # Checkpoints

    def state_dict(self) -> State:
        """Return all there is to know of the buffer: the rows that count, and whatever it needs to go on exactly so.

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
        table = self._table
        with table.lock:
            slots = table.rings.stored() if self._ring is None else self._start + np.arange(len(self))
            state = described_of(self) | {
                "generator": checkpoint.generator_state(self._rng),
                "sampler": checkpoint.sampler_state(self._sampler, slots),
                "table": checkpoint.table_state(table, self._ring),
            }
        return with_checksums(state)

    def load_state_dict(self, state: Mapping[str, Any], *, verify: bool = True) -> None:
        """Take back what `state_dict` returned of a buffer of the same class, sizes and options.

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
        if self._ring is not None:
            raise RingError("a part of a buffer cannot be loaded by itself; load the whole")
        checked(state)
        if verify:
            check_state(state)
        with self._table.lock:
            self._take_back(state)

    def _take_back(self, state: Mapping[str, Any]) -> None:
        absent = {"table", "sampler", "generator"} - state.keys()
        if absent:
            raise FormatError(f"the state of a buffer must have {min(absent)!r}, it has not")
        own = self._table
        if state["class"] != type(self).__name__:
            raise ColumnMismatchError(f"the state must be of a {type(self).__name__}, it is of a {state['class']}")
        journal = own.journal
        if journal is not None:
            journal.begin([])
        table = checkpoint.table_of(state["table"], own.columns.stores)
        if table.rings.maxsizes.tolist() != own.rings.maxsizes.tolist():
            raise ColumnMismatchError(
                f"the state must be of rings of {own.rings.maxsizes.tolist()[:8]} slots, "
                f"it is of {table.rings.maxsizes.tolist()[:8]}"
            )
        for name, option in (("keeps_next", "ignore_obs_next"), ("last_frame", "save_only_last_obs")):
            if getattr(table, name) != getattr(own, name):
                raise ColumnMismatchError(f"the state must be of a buffer with the same {option!r}, it is of another")
        sampler = checkpoint.sampler_of(state["sampler"], self.maxsize, table.rings.stored())
        rng = checkpoint.generator_of(state["generator"])
        own.rings, own.columns = table.rings, table.columns
        if own.finals is not None and table.finals is not None:
            own.finals.adopt(table.finals.columns, table.finals.owners)
        own.forget_fast_add()
        self._rng = rng
        self._use(sampler)
        parts = self.__dict__.get("_parts")
        for part in () if parts is None else parts:
            part._sampler = sampler
        if self._folder is not None and isinstance(sampler, Prioritized):
            weights = self._folder.allocate(WEIGHTS, (self.maxsize,), np.dtype(np.float64))
            weights[:] = sampler.tree.weights
            sampler.mirror = weights
        if journal is not None:
            journal.commit()

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the buffer to an Arrow file, whole or not at all: the rows that count, and all that `load` needs.

        The rows are a table that other readers of Arrow files can read.

        Parameters
        ----------
        path
            The file. Its folder must exist.

        Raises
        ------
        ColumnTypeError
            If a column holds objects that cannot be pickled; names it.
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> import tempfile
        >>> from samplebatch import Batch, ReplayBuffer
        >>> buf = ReplayBuffer(4)
        >>> added = buf.add(Batch(obs=7, act=0, rew=1.0, terminated=False, truncated=False))
        >>> path = tempfile.mkdtemp() + "/buffer.arrow"
        >>> buf.save(path)
        >>> len(ReplayBuffer.load(path))
        1
        """
        from samplebatch.storage.buffer_file import write_buffer

        with self._table.lock:
            write_buffer(self, path)

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
            The file.
        allow_pickle
            Whether to unpickle columns of Python objects that Arrow has no type for. Only for files whose writer you
            trust: a pickle can run any code.
        verify
            Whether to hold the file against its checksums. One by an older version has none, and is read without.
        max_nbytes
            Bytes of memory that may be made of the file; 256 MiB or 1024 times its own, whichever is more, if None.
        **missing
            What no file can hold, such as the function that a hindsight buffer was made with.

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
        from samplebatch.storage.buffer_file import read_buffer

        described, table, sampler = read_buffer(path, allow_pickle=allow_pickle, verify=verify, max_nbytes=max_nbytes)
        buffer: Self = make(cls, described, table, sampler, missing)
        return buffer

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
        from samplebatch.storage.hdf5_buffer import save_buffer

        with self._table.lock:
            save_buffer(self, path, compression)

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
        from samplebatch.storage.hdf5_buffer import load_buffer

        buffer: Self = load_buffer(
            cls, path, allow_pickle=allow_pickle, verify=verify, max_nbytes=max_nbytes, missing=missing
        )
        return buffer
