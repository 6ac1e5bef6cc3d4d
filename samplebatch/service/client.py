"""ReplayClient: a table of a replay service, with the methods of a replay buffer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.tensors import as_array
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.sampling import convert_rows
from samplebatch.errors import ArgumentError, ColumnLengthError
from samplebatch.service.drawing import SampleSession
from samplebatch.service.fragments import step_rows, with_info_columns
from samplebatch.service.protocol import Draw, Fragment
from samplebatch.service.remote_table import RemoteTable
from samplebatch.service.samples import Drawn
from samplebatch.service.writing import WriteCounts

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device
    from samplebatch.batch.targets import Floats


_MAX_DRAWS: Final = 64
"""Requests that a client remembers to have checked."""


class ReplayClient(RemoteTable):
    """A table of a replay service, with the methods of a replay buffer, for writers and learners on any machine.

    Fragments are sent without waiting for each to be acknowledged; `flush`, and all methods that look at the table,
    wait for those of this client. A sample is drawn when it is asked for, so that with the same seed the samples are
    those of a local buffer; with `prefetch`, some are drawn ahead.

    Where client and service share a machine, large samples are mapped from shared memory; else their arrays lie in the
    memory that they were received in. Arrays that were received are read-only.

    A client that loses the service tries to reach it again, sends the fragments that were not acknowledged once more,
    and goes on. It goes to other processes by pickle, and connects there by itself; a forked child cannot use it.
    Threads may share one.

    Parameters
    ----------
    uri
        The service's address, such as `"grpc://127.0.0.1:5000"`.
    table
        The table's name.
    token
        The word that the service wants; None for none.
    tls_root_certs
        Path of the certificates, in PEM, that the service's own is checked by; None for those of the system.
    writer
        The name of the writer, which the service shows, and whose environments have rings of their own; by default one
        that nobody else has. At most 256 bytes in UTF-8.
    prefetch
        How many samples to have drawn ahead of the one that is handed out.
    max_unacknowledged
        How many fragments may be under way before the oldest is acknowledged.
    timeout_s
        Seconds for which the limits of the table may hold back an insert or a sample; None for as long as they do.
    reconnect_s
        Seconds for which to try again where the service cannot be reached.
    fragment_steps
        The steps of an environment that `add` makes a fragment of. More of them take less time a step, and are in the
        table later.
    shared_memory
        Whether to map samples from shared memory, where the service is on this machine.

    Raises
    ------
    ArgumentError
        If a number is not of its values, or the address is none.
    CapacityError
        If the writer's name has more than 256 bytes in UTF-8.
    OSError
        If the certificates cannot be read.

    Attributes
    ----------
    uri, table, writer
        As given.

    Examples
    --------
    >>> from samplebatch import SampleBatch
    >>> from samplebatch.service import ReplayClient, ReplayServer, ReplayTable
    >>> table = ReplayTable("prio", kind="prioritized", capacity=100, alpha=0.6, seed=1)
    >>> with ReplayServer([table]) as server, ReplayClient(server.uri, "prio") as buffer:
    ...     buffer.extend(SampleBatch(obs=[1, 2], actions=[0, 1], rewards=[0.0, 1.0], terminateds=[False, True]))
    ...     batch, indices = buffer.sample(4)
    ...     buffer.update_weight(indices, batch.rew + 1.0, generation=batch.generation)
    ...     len(buffer), bool((batch.obs == indices + 1).all())
    (2, True)
    """

    # Writing

    def add(
        self,
        batch: Batch | Mapping[str, Any] | None = None,
        buffer_ids: npt.NDArray[Any] | Sequence[int] | None = None,
        **columns: Any,
    ) -> None:
        """Send a step, or one or several steps of some environments.

        With `fragment_steps`, steps are kept until an environment has as many, or its episode ends, and go as one
        fragment. `flush`, and all methods that look at the table, send those that are kept.

        Parameters
        ----------
        batch
            Its values by name, as `ReplayBuffer.add` takes them.
        buffer_ids
            The environment of each row, shape (n,), if the values have a leading axis; None for a single step.

        Raises
        ------
        SampleBatchError
            As `extend` does.
        """
        rows = step_rows(batch, buffer_ids, columns)
        if self._fragment_steps == 1:
            # A copy, as the values may be written over before it is acknowledged.
            self._put(self._encoder.encode(rows if buffer_ids is None else rows.copy()), Fragment())
        else:
            self._keep_step(rows if buffer_ids is None else rows.copy())

    def _keep_step(self, rows: SampleBatch) -> None:
        """Keep a step, and send those that make a fragment with it; if that fails, the step is not kept."""
        with self._lock:
            self._open()
            if not self._open_steps.fits(rows):
                self._send_steps(self._open_steps.groups())
            self._open_steps.add(rows)
            complete = self._open_steps.complete()
            try:
                self._send_steps([complete] if complete else [])
            except BaseException:
                self._open_steps.undo()
                raise

    def extend(self, batch: Any, *, priorities: Any = None, key: str | None = None) -> None:
        """Send all steps of a batch as one fragment.

        Parameters
        ----------
        batch
            What `ReplayBuffer.extend` takes.
        priorities
            One for each step, shape (n,), or of a table of fragments one number; by default the largest so far.
        key
            The fragment's key, for a table that is read by key.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        LimitTimeoutError
            If the table's limits hold back a fragment for `timeout_s` seconds; that one is not inserted.
        SampleBatchError
            If the service refuses a fragment, this one or an earlier one; that one is not inserted. Refused in this
            process are what is no batch, and objects that would have to be pickled.

        Notes
        -----
        The fragment is a view of the batch's arrays until the service has acknowledged it, so they must not be written
        over before `flush` has returned.
        """
        single = None if priorities is None or np.ndim(priorities) else float(priorities)
        rows = self._encoder.encode(batch, priorities if single is None else None)
        self._put(rows, Fragment(key=key, priority=single))

    def add_fragment(self, fragment: SampleBatch | MultiAgentBatch) -> None:
        """Send a fragment of a collector or worker.

        The infos of steps become columns of their own, as in the buffers that collectors write to; infos without
        anything are left out. In tables of fragments they stay as they are.

        Parameters
        ----------
        fragment
            The fragment, with the ids of its environments and episodes.

        Raises
        ------
        SampleBatchError
            As `extend` does.
        """
        with self._lock:
            if self._holds_steps is None:
                self._holds_steps = self._table_info()["items"] == "steps"
            rows = with_info_columns(fragment) if self._holds_steps else fragment
            self._put(self._encoder.encode(rows), Fragment())

    def _put(self, rows: Any, fragment: Fragment) -> None:
        with self._lock:
            self._open()
            self._send_steps(self._open_steps.groups())
            if rows.num_rows:
                timed = Fragment(0, self._timeout_s, fragment.key, fragment.priority)
                self._writer.put(rows, timed)

    @property
    def written(self) -> WriteCounts:
        """The fragments and rows that the service has acknowledged, and those that it refused.

        Steps that `fragment_steps` keeps are in no fragment yet.
        """
        return self._writer.counts

    # Sampling

    def sample(
        self,
        batch_size: int,
        *,
        n_step: int | None = None,
        gamma: float | None = None,
        beta: float | None = None,
        key: str | None = None,
        seed: int | None = None,
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> tuple[Any, Any]:
        """Draw steps, or fragments from a table of fragments.

        Parameters
        ----------
        batch_size
            How many.
        n_step, gamma, device, floats
            As `ReplayBuffer.sample` takes them; the n-step returns are computed by the service.
        beta
            The exponent of importance weights, in place of the table's.
        key
            The key of the fragment, in a table that is read by key.
        seed
            Of a generator for these samples alone; None for the table's own.

        Returns
        -------
        batch
            The rows: a `Batch`, as the buffer gives them, or fragments as they were inserted.
        indices
            Where they are, for `update_weight`; of fragments their numbers.

        Raises
        ------
        ServiceError
            If the service cannot be reached.
        LimitTimeoutError
            If the table's limits hold the sample back for `timeout_s` seconds.
        SampleBatchError
            If the service refuses.
        """
        draw = self._draw(batch_size, None, n_step=n_step, gamma=gamma, beta=beta, key=key, seed=seed)
        return Delivery(device, floats).one(tuple(self._next(draw)), convert_rows)

    def sample_sequences(
        self,
        batch_size: int,
        length: int,
        *,
        burn_in: int = 0,
        padded: bool = True,
        beta: float | None = None,
        seed: int | None = None,
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> tuple[Batch, Any]:
        """Draw sequences; parameters and result as of `ReplayBuffer.sample_sequences`, raises as `sample` does."""
        draw = self._draw(batch_size, "sequences", length=length, burn_in=burn_in, padded=padded, beta=beta, seed=seed)
        return Delivery(device, floats).one(tuple(self._next(draw)), convert_rows)

    def sample_episodes(
        self, n: int, *, unfinished: bool = False, seed: int | None = None
    ) -> tuple[list[Batch], list[npt.NDArray[np.int64]]]:
        """Draw whole episodes; result as of `ReplayBuffer.sample_episodes`, raises as `sample` does."""
        return tuple(self._next(self._draw(n, "episodes", unfinished=unfinished, seed=seed)))

    def stream(self, batch_size: int = 1, *, prefetch: int = 2, **options: Any) -> Iterator[Any]:
        """Yield samples without end, some of them drawn ahead.

        From a FIFO table that is read once, this is the receiving end of a channel between machines: each fragment goes
        to one reader. Those that were drawn ahead are lost with a reader that stops.

        Where the service is lost and comes back within `reconnect_s` seconds, the stream goes on with the samples of
        the restarted one, after those that have arrived. Fragments that were on their way are lost, unless the
        checkpoint that it was restored from has them: it hands these out again.

        Parameters
        ----------
        batch_size
            As of `sample`.
        prefetch
            How many samples are drawn ahead of the one that is handed out.
        **options
            Further arguments of `sample`; or `mode`, `"sequences"` or `"episodes"`, and the arguments of that method.

        Yields
        ------
        Fragments as they were inserted; or rows, with their indices as the column `batch_indexes`.

        Raises
        ------
        SampleBatchError
            As `sample` does.
        """
        device, floats = options.pop("device", None), options.pop("floats", None)
        draw = self._draw(batch_size, options.pop("mode", None), **options)
        delivery = Delivery(device, floats)
        with closing(self._stream(draw, whole("prefetch", prefetch))) as samples:
            while True:
                batch, indices = delivery.one(tuple(next(samples)), convert_rows)
                if isinstance(batch, Batch):
                    batch[names.BATCH_INDEXES] = indices
                yield batch
                del batch, indices

    def _draw(self, batch_size: int, mode: str | None, **options: Any) -> Draw:
        """Make a request for samples, and check it as the service does, once for all that are alike."""
        # With their types: True is equal to 1, and refused.
        asked = batch_size, type(batch_size), mode, *options.items(), *map(type, options.values())
        try:
            found = self._draws.get(asked)
        except TypeError:
            found = None
        if found is None:
            draw = Draw(self.table, batch_size, mode, timeout_s=self._timeout_s, **options)
            found = Draw.read(draw.write(), "the request")
            if len(self._draws) >= _MAX_DRAWS:
                self._draws.clear()
            self._draws[asked] = found
        return found

    def _next(self, draw: Draw) -> Drawn:
        """Return the next sample of a kind, on a stream that is opened when it is first asked for."""
        with self._lock:
            self._open()
            return self._link.retry(lambda: self._with_session(draw, SampleSession.next))

    def update_weight(self, index: Any, new_weight: Any, *, generation: Any = None) -> None:
        """Send new priorities of rows; they are carried out before the next sample of this client is drawn.

        Parameters
        ----------
        index
            The rows, as samples have them; n of them.
        new_weight
            Their priorities, shape (n,) or one for all; arrays or tensors.
        generation
            The `generation` of the rows when they were sampled, shape (n,): priorities of rows that have been written
            over since are dropped.

        Raises
        ------
        ColumnLengthError
            If there are not n priorities, or not n generations.
        ServiceError
            If the service cannot be reached.
        SampleBatchError
            If the service refuses an earlier update; for this one, the next method that looks at the table raises.
        """
        indices = np.ascontiguousarray(as_array(index), np.int64).reshape(-1)
        given = np.asarray(as_array(new_weight), np.float64)
        priorities = np.full(len(indices), given) if not given.ndim else np.ascontiguousarray(given).reshape(-1)
        known = None if generation is None else np.ascontiguousarray(as_array(generation), np.int64).reshape(-1)
        for name, values in ((names.PRIORITY, priorities), (names.GENERATION, known)):
            if values is not None and len(values) != len(indices):
                raise ColumnLengthError(f"column {name!r} must have {len(indices)} rows, one a row, got {len(values)}")
        with self._lock:
            self._open()
            draw = next(reversed(self._sessions), Draw(self.table))
            self._link.retry(
                lambda: self._with_session(draw, lambda session: session.update(indices, priorities, known))
            )

    def sample_indices(self, batch_size: int | None) -> npt.NDArray[Any]:
        """Refuse to draw indices alone: their rows may be others before they can be asked for.

        Raises
        ------
        ArgumentError
            Always.
        """
        raise ArgumentError(
            "indices cannot be drawn without their rows from a table of a service, where others write meanwhile; use "
            "sample, which gives both"
        )
