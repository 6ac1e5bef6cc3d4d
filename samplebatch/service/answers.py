"""AnswerReader and InterruptibleCalls: blocking Flight calls during which signal handlers run."""

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
    """Ordered answers of a service's stream, received by a background thread.

    A signal such as Ctrl-C can interrupt a wait for an answer; no answer is lost. The receiving thread stops at the
    first error. The method `next` returns all answers received before the error, then raises the error.

    - `read`: function that blocks until it returns the next answers. The function must not reference the owner of this
      reader, because the thread would keep the owner alive.
    - `end`: function that ends the stream without waiting, so that a blocked `read` returns or raises an error.
    - `close`: function that closes the ended stream. The receiving thread calls `close`, because gRPC may block while a
      stream is closed or deleted.

    >>> sent = queue.SimpleQueue()
    >>> answers = AnswerReader(lambda: [sent.get()], lambda: None, lambda: None)
    >>> answers.expect(1)
    >>> sent.put("first")
    >>> answers.next()
    'first'
    >>> sent.put("second")
    >>> answers.next()
    Traceback (most recent call last):
    samplebatch.errors.FormatError: an answer of a service must have a request, got 2 answers to 1
        requests
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
        """Register `count` requests before they are sent; an answer without a registered request is an error."""
        self._inbox.expected += count

    def wait(self) -> None:
        """Wait until an answer is available or an error has ended the stream."""
        inbox = self._inbox
        while not inbox.answers and inbox.error is None:
            inbox.arrival.acquire()

    def next(self) -> T:
        """Wait for the next answer and return it; after the last answer, raise the error that ended the stream."""
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
    """State shared by a receiving thread and its AnswerReader; the thread may outlive the reader."""

    __slots__ = ("answers", "arrival", "closed", "error", "expected", "received")

    def __init__(self) -> None:
        self.answers: deque[Any] = deque()
        self.error: BaseException | None = None
        self.arrival = threading.Lock()
        """Released by the receiving thread when an answer or an error is available."""
        self.closed = threading.Lock()
        """Released by the reader when the stream is no longer used."""
        self.closed.acquire()
        self.expected = self.received = 0


def _receive(read: Callable[[], Sequence[Any]], close: Callable[[], Any], inbox: _Inbox) -> None:
    while inbox.error is None:
        try:
            answers = read()
            inbox.received += len(answers)
            if inbox.received > inbox.expected:
                raise FormatError(
                    f"an answer of a service must have a request, got {inbox.received} answers to {inbox.expected} "
                    "requests"
                )
            inbox.answers.extend(answers)
            # Release the memory of these answers before waiting for the next answer.
            del answers
        except BaseException as error:  # raised by `AnswerReader.next`
            inbox.error = error
        if inbox.arrival.locked():
            inbox.arrival.release()
    inbox.closed.acquire()
    with suppress(Exception):
        # The error that ended the stream is raised by `AnswerReader.next`.
        close()


class InterruptibleCalls:
    """Executor of sequential blocking Flight calls, during which signal handlers can run.

    A background thread executes the calls of the main thread, so signal handlers run while the main thread waits.
    Threads other than the main thread call the function directly. If a signal interrupts the main thread, the call
    continues in the background thread: see `finish`.

    >>> calls = InterruptibleCalls()
    >>> calls.call(lambda: print(threading.current_thread().name))
    samplebatch-call
    >>> calls.finish(lambda: None)
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] | None = None

    def call(self, function: Callable[[], Any]) -> None:
        """Call a function without arguments; raise the function's errors and discard its result."""
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
        """Schedule a final function to run after an interrupted call; errors of the function are ignored.

        The background thread ends after this function; a later `call` starts another thread. If no background thread
        is running, the function is called directly.
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
