"""AnswerReader and InterruptibleCalls: calls that block in Flight, while signal handlers continue to run."""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar

from samplebatch.errors import FormatError

T = TypeVar("T")


class AnswerReader(Generic[T]):
    """Answers of a service's stream in order, received by one retained thread.

    Signals interrupt a thread that waits for an answer, such as Ctrl-C the main thread; no answer is lost. The
    receiving thread ends at the first error, which is raised after the answers before it.

    - `read`: function that blocks until it returns the next answers; it must not refer to the owner of this object.
    - `end`: function that ends the stream without waiting, so that a blocked `read` returns or raises.
    - `close`: function that closes the ended stream. The receiving thread calls it, because gRPC may wait in it, and in
      destructors.

    >>> sent = queue.SimpleQueue()
    >>> answers = AnswerReader(lambda: [sent.get()], lambda: None, lambda: None)
    >>> answers.expect(1)
    >>> sent.put("first")
    >>> answers.next()
    'first'
    >>> sent.put("second")
    >>> answers.next()
    Traceback (most recent call last):
    samplebatch.errors.FormatError: an answer of a service must have a request, got 2 answers to
        requests of 1
    >>> answers.is_broken
    True
    """

    def __init__(self, read: Callable[[], Sequence[T]], end: Callable[[], Any], close: Callable[[], Any]) -> None:
        self._end = end
        self._process = os.getpid()
        self._inbox = _Inbox()
        self._is_closed = False
        self.is_broken = False
        """Whether the stream must be replaced: its error was raised, or an interrupt left it in an unknown state."""
        arguments = read, close, self._inbox
        threading.Thread(target=_receive, args=arguments, name="samplebatch-read", daemon=True).start()

    def expect(self, count: int) -> None:
        """Announce requests before they are sent, with one answer each; further answers are an error."""
        self._inbox.expected += count

    def wait(self) -> None:
        """Wait until there is an answer, or an error has ended the stream."""
        inbox = self._inbox
        while not inbox.answers and inbox.error is None:
            inbox.arrival.acquire()

    def next(self) -> T:
        """Return the next answer; raise the error that ended the stream if there are no answers before it."""
        self.wait()
        if not self._inbox.answers:
            assert self._inbox.error is not None
            self.is_broken = True
            raise self._inbox.error.with_traceback(None)
        answer: T = self._inbox.answers.popleft()
        return answer

    def close(self) -> None:
        """End the stream without waiting; idempotent."""
        # gRPC's threads do not exist in a forked child.
        if not self._is_closed and self._process == os.getpid():
            self._is_closed = True
            with suppress(Exception):
                self._end()
            self._inbox.closed.release()

    __del__ = close


class _Inbox:
    """State that a receiving thread shares with its AnswerReader, which may be deleted meanwhile."""

    __slots__ = ("answers", "arrival", "closed", "error", "expected", "received")

    def __init__(self) -> None:
        self.answers: deque[Any] = deque()
        self.error: BaseException | None = None
        self.arrival = threading.Lock()
        """Released by the thread when there is something to read."""
        self.closed = threading.Lock()
        """Released when the stream is no longer used."""
        self.closed.acquire()
        self.expected = self.received = 0


def _receive(read: Callable[[], Sequence[Any]], close: Callable[[], Any], inbox: _Inbox) -> None:
    while inbox.error is None:
        try:
            answers = read()
            inbox.received += len(answers)
            if inbox.received > inbox.expected:
                raise FormatError(
                    f"an answer of a service must have a request, got {inbox.received} answers to requests of "
                    f"{inbox.expected}"
                )
            inbox.answers.extend(answers)
            # The thread must not keep the memory of an answer while it waits for the next one.
            del answers
        except BaseException as error:  # raised by `AnswerReader.next`
            inbox.error = error
        if inbox.arrival.locked():
            inbox.arrival.release()
    inbox.closed.acquire()
    with suppress(Exception):
        # The error that ended the stream was raised before.
        close()


class InterruptibleCalls:
    """Calls of functions that block in Flight, one after the other.

    The main thread lets a retained thread call the function, so that signal handlers run meanwhile; other threads call
    the function themselves. After an interrupt the call continues: see `finish`.

    >>> calls = InterruptibleCalls()
    >>> calls.call(lambda: print(threading.current_thread().name))
    samplebatch-call
    >>> calls.finish(lambda: None)
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] | None = None

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function without arguments, and raise its error; its result is discarded."""
        if threading.current_thread() is not threading.main_thread():
            function()
            return
        if self._calls is None:
            self._calls = queue.SimpleQueue()
            threading.Thread(target=_serve, args=(self._calls,), name="samplebatch-call", daemon=True).start()
        call = _Call(function)
        self._calls.put(call)
        call.done.acquire()
        if call.error is not None:
            raise call.error

    def finish(self, function: Callable[[], Any]) -> None:
        """Call a function without waiting after a call that was interrupted; its errors are ignored.

        Without a retained thread the function is called at once. The thread ends afterwards; later calls start another
        one.
        """
        calls, self._calls = self._calls, None
        if calls is None:
            with suppress(Exception):
                function()
        else:
            calls.put(_Call(function))
            calls.put(None)

    def __del__(self) -> None:
        if self._calls is not None:
            self._calls.put(None)


class _Call:
    __slots__ = ("done", "error", "function")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()


def _serve(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            call.function()
        except BaseException as error:  # raised by `InterruptibleCalls.call`
            call.error = error
        call.done.release()
        del call
