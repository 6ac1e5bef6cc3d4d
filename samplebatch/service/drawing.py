"""SampleSession: a learner's stream of samples, some of which are asked for ahead."""

from __future__ import annotations

import queue
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from samplebatch import names
from samplebatch.column.stream_layout import Bytes
from samplebatch.errors import SampleBatchError, ServiceError
from samplebatch.service.local_memory import take
from samplebatch.service.protocol import MAX_ASKED, Draw, LostError, read_error, read_json, write_json
from samplebatch.service.sample_streams import SampleReader, cut_inline, split_inline
from samplebatch.service.samples import Drawn, unpack, with_batch_text
from samplebatch.service.writing import close_quietly

if TYPE_CHECKING:
    from samplebatch.service.link import Link

_UPDATES: Final = pa.schema(
    [
        pa.field(names.BATCH_INDEXES, pa.int64(), nullable=False),
        pa.field(names.PRIORITY, pa.float64(), nullable=False),
        pa.field(names.GENERATION, pa.int64(), nullable=False),
    ]
)


class SampleSession:
    """A learner's stream of samples of one kind, some of which are asked for ahead, and of the priorities that go back.

    The service answers in order. With samples ahead, a thread reads the answers, so that they come while the learner
    computes.

    Parameters
    ----------
    link
        The connection.
    draw
        The samples.
    ahead
        How many are asked for beyond the one that is handed out.
    nonce
        The secret by which the service knows that samples can be mapped; None to be sent them.
    """

    def __init__(self, link: Link, draw: Draw, ahead: int, nonce: str | None) -> None:
        self._link = link
        self._writer, self._reader = link.exchange(replace(draw, nonce=nonce, inline=True, ahead=ahead > 0))
        self._samples = SampleReader()
        self._parts: list[Bytes] = []
        """Columns that came by themselves, of a sample that is not complete."""
        self._ahead = ahead
        self._asked = 0
        """Samples that were asked for and not handed out."""
        self._updates = 0
        """Updates that were sent and not answered."""
        self._has_begun = False
        self._is_cancelled = False
        self._found: deque[Drawn | SampleBatchError] = deque()
        """Samples, or the errors in their place, that came before they were asked for."""
        self._answers: queue.Queue[Any] | None = None
        if ahead:
            self._answers = queue.Queue(ahead + 1)
            self._reading = threading.Thread(target=self._read_ahead, name="samplebatch-read", daemon=True)
            self._closed = threading.Event()
            self._reading.start()

    def next(self) -> Drawn:
        """Return the next sample, and ask for those ahead.

        Raises
        ------
        LostError
            If the connection is gone.
        SampleBatchError
            If the service refuses the draw; the session goes on.
        """
        self._ask(1)
        while not self._found:
            self._take_answer()
        found = self._found.popleft()
        self._asked -= 1
        if isinstance(found, SampleBatchError):
            raise found
        # Several in one request, which may come in one message.
        if self._asked <= self._ahead // 2:
            # This one has come: that the connection is gone since, the next call tells.
            with suppress(SampleBatchError):
                self._ask(self._ahead)
        return found

    def _ask(self, count: int) -> None:
        """Ask for samples until that many are on their way, or have come."""
        wanted = count - self._asked
        with self._link.errors():
            while wanted > 0:
                part = min(wanted, MAX_ASKED)
                self._writer.write_metadata(b"{}" if part == 1 else write_json({"count": part}))
                self._asked += part
                wanted -= part

    def update(self, indices: Any, priorities: Any, generations: Any) -> None:
        """Send new priorities of rows, shape (n,) each; generations may be None. `settle` tells how it went.

        Raises
        ------
        LostError
            If the connection is gone.
        """
        known = np.zeros(len(indices), np.int64) if generations is None else generations
        rows = pa.RecordBatch.from_arrays([pa.array(own) for own in (indices, priorities, known)], schema=_UPDATES)
        with self._link.errors():
            if not self._has_begun:
                self._writer.begin(_UPDATES)
                self._has_begun = True
            self._writer.write_with_metadata(rows, write_json({"any_generation": generations is None}))
        self._updates += 1

    def settle(self) -> None:
        """Wait until all updates have been carried out; raises as `next` does."""
        while self._updates:
            self._take_answer()

    def _take_answer(self) -> None:
        """Take the next answer."""
        if self._answers is None:
            answer = self._read()
        else:
            answer = self._answers.get()
            if isinstance(answer, BaseException):
                raise answer
        if isinstance(answer, list):
            self._found.extend(answer)
            return
        if "updated" in answer:
            self._updates -= 1
        elif answer.get("of") == "update":
            self._updates -= 1
            raise read_error(answer)
        else:
            self._found.append(read_error(answer))

    def _read(self) -> list[Drawn] | dict[str, Any]:
        """Read an answer: one or several samples, or words about an update or an error."""
        try:
            with self._link.errors():
                chunk = self._reader.read_chunk()
        except (StopIteration, LostError) as error:
            if self._is_cancelled:
                raise ServiceError("the client must be open to be used, it has been closed") from None
            if isinstance(error, LostError):
                raise
            raise LostError("the service has ended the session") from None
        said = b"" if chunk.app_metadata is None else chunk.app_metadata
        if chunk.data is not None:
            return self._read_rows(chunk.data, said)
        self._parts.clear()
        head, streams = cut_inline(said)
        told = read_json(head, "an answer")
        if "error" in told or "updated" in told:
            return told
        found = [take(told["at"])] if "at" in told else split_inline(streams, told.get("streams"))
        return [self._samples.read(stream, told) for stream in found]

    def _read_rows(self, rows: pa.RecordBatch, said: Any) -> list[Drawn]:
        """Read a sample that is a record batch; or parts of one, of which no sample is complete but with the last."""
        if rows.schema.metadata is not None:
            told = read_json(said, "an answer")
            return [unpack(with_batch_text(rows, told.get("batch")), told)]
        self._parts.append(rows.column(0).to_numpy())
        if not said:
            return []
        head, rest = cut_inline(said)
        parts, self._parts = self._parts, []
        return [self._samples.read_parts(parts, rest, read_json(head, "an answer"))]

    def _read_ahead(self) -> None:
        """Read answers until the session is closed, or the connection is gone."""
        answers = self._answers
        assert answers is not None
        while not self._closed.is_set():
            answer: Any
            try:
                answer = self._read()
            except Exception as error:
                answer = error
            while not self._closed.is_set():
                try:
                    answers.put(answer, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(answer, BaseException):
                return

    def cancel(self) -> None:
        """Let a thread that waits for an answer raise; any thread may call it."""
        self._is_cancelled = True
        self._reader.cancel()

    def close(self) -> None:
        """End the session."""
        if self._answers is not None:
            self._closed.set()
        self._reader.cancel()
        close_quietly(self._writer)
