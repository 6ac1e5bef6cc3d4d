"""Published weights that a collector loads into its policy between two calls to `collect`."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any, Protocol

from samplebatch.arguments import positive
from samplebatch.errors import ArgumentError, SampleBatchError
from samplebatch.policy.source import load_weights

_CLOSE_S = 1.0
"""Seconds that `close` waits for an in-flight request."""


class WeightsPublication(Protocol):
    """Weights and their version, as returned by `ReplayClient.latest` and `Subscription.latest`."""

    version: int
    value: Any


class PublishedWeightsSource(Protocol):
    """Source that is polled for published weights, such as a `ReplayClient`."""

    def latest(self, newer_than: int = 0) -> WeightsPublication | None:
        """Return the newest weights, or None if the version of these weights is not greater than `newer_than`."""


class WeightsSubscription(Protocol):
    """Reader of a broadcast in shared memory, such as a `Subscription`; reading `version` requires no communication."""

    @property
    def version(self) -> int:
        """Version of the newest weights; 0 before the first publication."""

    def latest(self) -> WeightsPublication:
        """Copy the newest weights."""


class FollowedWeights:
    """Published weights that are loaded into a policy between two calls to `collect`.

    The weights of a `Subscription` are read from shared memory. A thread with its own connection polls any other
    source, so that collection is never blocked by communication.

    - `source`: a `ReplayClient` or a `Subscription`.
    - `poll_s`: polling interval of the thread, in seconds.

    Raises ArgumentError if `source` has no method `latest`, or `poll_s` is not positive.

    Instance attributes:
    - `version`: version of the policy's weights; 0 before the first publication.
    """

    def __init__(self, source: WeightsSubscription | PublishedWeightsSource, *, poll_s: float = 0.1) -> None:
        if not callable(getattr(source, "latest", None)):
            raise ArgumentError(f"weights must be a ReplayClient or a Subscription, got a {type(source).__name__}")
        self.version = 0
        self._source: Any = source
        self._is_subscription = hasattr(type(source), "version")
        self._poll_s = positive("poll_s", poll_s)
        self._thread: threading.Thread | None = None
        self._has_ended = threading.Event()
        self._newest: WeightsPublication | None = None
        self._error: SampleBatchError | None = None

    def load_newest(self, policy: Any) -> None:
        """Load the newest weights into a policy, unless the policy already has these weights.

        If polling the source has failed since the last call, the polling error is raised, such as `ServiceError` for an
        unreachable service. After an error, the next call loads the newest weights that have been received. Raises
        PolicySpecError if the policy cannot load weights.
        """
        if self._is_subscription:
            newest = self._source.latest() if self._source.version > self.version else None
        else:
            if self._thread is None:
                self._thread = threading.Thread(target=self._poll, name="followed-weights", daemon=True)
                self._thread.start()
            error, self._error = self._error, None
            if error is not None:
                raise error
            newest, self._newest = self._newest, None
        if newest is not None:
            load_weights(policy, newest.value)
            self.version = newest.version

    def close(self) -> None:
        """Stop the thread; the source stays open."""
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _poll(self) -> None:
        # A separate connection, so that the collector's writes never wait for a request for weights.
        source, version = copy.copy(self._source), 0
        try:
            while not self._has_ended.is_set():
                try:
                    newest = source.latest(newer_than=version)
                except SampleBatchError as error:
                    self._error = error
                else:
                    if newest is not None:
                        self._newest, version = newest, newest.version
                self._has_ended.wait(self._poll_s)
        finally:
            if source is not self._source and hasattr(source, "close"):
                with contextlib.suppress(SampleBatchError):
                    source.close()
