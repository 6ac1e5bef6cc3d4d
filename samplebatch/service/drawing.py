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
from samplebatch.service.sample_streams import SampleReader, cut_inline, split_columns, split_inline
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
_LARGE_NBYTES: Final = 1 << 16
"""Bytes of a record batch from which one more request is little beside it."""


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
        self._told: tuple[bytes, dict[str, Any]] = b"", {}
        """The JSON of the last sample in parts, and its value: those of a form have the same."""
        self._ahead = ahead
        self._asked = 0
        """Samples that were asked for and not handed out."""
        self._updates = 0
        """Updates that were sent and not answered."""
        self._are_large = False
        """Whether samples are sent by themselves, and not several in a message."""
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
        # Several small ones in one request, as they come in one message; large ones each come by themselves.
        if self._asked <= (self._ahead - 1 if self._are_large else self._ahead // 2):
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
        parts: list[Bytes] = []
        rows, said = self._receive()
        while rows is not None and rows.schema.metadata is None:
            # Parts of a sample; the last message brings what else it has.
            parts += split_columns(rows)
            if said:
                self._are_large = True
                head, rest = cut_inline(said)
                if head != self._told[0]:
                    self._told = head, read_json(head, "an answer")
                return [self._samples.read_parts(parts, rest, self._told[1])]
            rows, said = self._receive()
        if rows is not None:
            self._are_large = rows.nbytes >= _LARGE_NBYTES
            told = read_json(said, "an answer")
            return [unpack(with_batch_text(rows, told.get("batch")), told)]
        head, streams = cut_inline(said)
        told = read_json(head, "an answer")
        if "error" in told or "updated" in told:
            return told
        self._are_large = "at" in told
        found = [take(told["at"])] if "at" in told else split_inline(streams, told.get("streams"))
        return [self._samples.read(stream, told) for stream in found]

    def _receive(self) -> tuple[pa.RecordBatch | None, Any]:
        """Receive a message: its rows, if it has any, and its metadata."""
        try:
            with self._link.errors():
                chunk = self._reader.read_chunk()
        except (StopIteration, LostError) as error:
            if self._is_cancelled:
                raise ServiceError("the client must be open to be used, it has been closed") from None
            if isinstance(error, LostError):
                raise
            raise LostError("the service has ended the session") from None
        return chunk.data, b"" if chunk.app_metadata is None else chunk.app_metadata

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
