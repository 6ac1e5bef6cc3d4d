"""ResumableWorkers: the state of workers, which each of them tells, and from which others that are made alike go on."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from samplebatch.column.unpickling import require_permission
from samplebatch.errors import ArgumentError, FormatError, WorkerError
from samplebatch.rollout.resuming import Uncopied, has_pickles
from samplebatch.workers.backend import Backend
from samplebatch.workers.buffer_writer import BufferWriter
from samplebatch.workers.pool import WorkerPool
from samplebatch.workers.spec import StateRequest, WorkerSpec
from samplebatch.workers.statistics import Received
from samplebatch.workers.task import Fragment

NOT_STARTED = "workers must be started before they can send anything; use them in a with statement"

_NAMES = ("workers", "num_envs", "failures", "version", "weights", "received", "rings", "fragments")


class ResumableWorkers(Uncopied, ABC):
    """Workers that can resume a run, between calls of `collect`: the base of `RolloutWorkers`."""

    _specs: Sequence[WorkerSpec]
    _backend: Backend
    _pool: WorkerPool | None
    _received: Received
    _writer: BufferWriter | None
    _leftover: list[Fragment]
    _is_iterating: bool
    _one_version: threading.RLock
    _earlier_versions: int

    @abstractmethod
    def _finish_collect(self) -> None:
        """Receive all that workers still send for earlier requests."""

    def _started(self) -> WorkerPool:
        if self._pool is None:
            raise WorkerError(NOT_STARTED)
        if not self._pool.workers:
            raise WorkerError("workers must be running to collect, and they have been stopped")
        return self._pool

    def _idle(self, purpose: str) -> WorkerPool:
        """Return workers that have done all that they were asked for."""
        pool = self._started()
        if self._is_iterating and pool.busy:
            raise WorkerError(f"an iteration over workers must have come to its end before they {purpose}")
        self._finish_collect()
        return self._started()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run between two calls of `collect`, for `load_state_dict`.

        Each worker tells that of its collector (see `Collector.state_dict`), of its policy's exploration, such as a
        noise's drift, and of its process's own generators. With
        these go the newest weights that were published and their number, the episodes under way, the report `stats`,
        and all that keeps replacements from repeating data. The policy, the hooks and the buffer have states of their
        own; `worker_stats` begins again.

        Returns
        -------
        dict
            Plain values, arrays and tensors, which can be pickled, and `why_reset`: None if environments go on exactly.

        Raises
        ------
        WorkerError
            If workers have not been started, an iteration has not come to its end, a policy's state cannot be saved,
            or a worker fails that cannot be replaced.

        Examples
        --------
        >>> from samplebatch import RolloutWorkers
        >>> one, other = (RolloutWorkers("CartPole-v1", backend="inline", seed=seed) for seed in (1, 2))
        >>> with one, other:
        ...     _ = one.collect(n_step=100)
        ...     other.load_state_dict(one.state_dict(), allow_pickle=True)
        ...     (one.collect(n_step=100).batch["obs"] == other.collect(n_step=100).batch["obs"]).all()
        np.True_
        """
        with self._one_version:
            self._idle("tell their state")
            told = self._exchange([StateRequest()] * len(self._specs))
            pool = self._started()
            version = self._backend.weights.version
            for place, (worker, own) in enumerate(zip(pool.workers, told, strict=True)):
                if "refused" in own:
                    raise WorkerError(f"worker {place} cannot tell its state: {own['refused']}")
                own["seed"] = worker.spec.seed
                own["next_unroll_id"] = worker.spec.first_unroll_id + worker.fragments
            return {
                "workers": told,
                "num_envs": self._specs[0].num_envs,
                "failures": pool.earlier_failures + len(pool.failures),
                "version": self._earlier_versions + version,
                "weights": self._backend.weights.latest().value if version else None,
                "received": self._received.state_dict(),
                "rings": None if self._writer is None else self._writer.state_dict(),
                "fragments": [fragment.copy() for fragment in self._leftover],
                "why_reset": next((why for own in told if (why := own["task"]["collector"]["why_reset"])), None),
            }

    def load_state_dict(self, state: Mapping[str, Any], *, allow_pickle: bool = False) -> None:
        """Continue where workers were that were made with the same arguments; the seed is the one of those.

        Workers get the weights that were the newest, and number those to come from there on.

        Parameters
        ----------
        state
            A state that `state_dict` returned.
        allow_pickle
            Whether the environments in it may be unpickled, which runs code that the state's writer chose.

        Raises
        ------
        UntrustedPickleError
            If there are environments in it and `allow_pickle` is false. Nothing has changed then.
        FormatError
            If the state is not whole. Nothing has changed then.
        ArgumentError
            If it is of other numbers of workers or environments, or of another kind of collector; or it has no weights,
            and some have been published here. Nothing has changed then.
        WorkerError
            If workers have not been started, an iteration has not come to its end, or a worker fails that cannot be
            replaced, as it does where environments are of other classes.
        """
        missing = [name for name in _NAMES if name not in state]
        if missing:
            raise FormatError(f"the state of workers must have {missing[0]!r}, got one without it")
        with self._one_version:
            self._idle("load a state")
            found, wanted = (
                (len(workers), envs)
                for workers, envs in ((state["workers"], state["num_envs"]), (self._specs, self._specs[0].num_envs))
            )
            if found != wanted:
                raise ArgumentError(
                    f"the state must be of {wanted[0]} workers with {wanted[1]} environments each, got one of "
                    f"{found[0]} with {found[1]}"
                )
            published = self._backend.weights.version
            if state["weights"] is None and published:
                raise ArgumentError("a state without weights must be loaded before any are published")
            collectors = [own["task"]["collector"] for own in state["workers"]]
            if any(map(has_pickles, collectors)):
                require_permission("the state of workers", allow_pickle=allow_pickle)
            # A worker that is still starting reads nothing: to send it much would be to wait without an end.
            for own, its in zip(self._exchange([StateRequest()] * len(self._specs)), collectors, strict=True):
                _check_alike(own, its)
            earlier_versions = state["version"] - published - (state["weights"] is not None)
            self._exchange([StateRequest(state=own, earlier_versions=earlier_versions) for own in state["workers"]])
            self._load(state, earlier_versions)

    def _load(self, state: Mapping[str, Any], earlier_versions: int) -> None:
        """Load the part of a state that is not the workers'."""
        pool = self._started()
        for worker, own in zip(pool.workers, state["workers"], strict=True):
            worker.spec = replace(
                worker.spec,
                seed=own["seed"],
                first_unroll_id=own["next_unroll_id"],
                earlier_versions=earlier_versions,
            )
        pool.earlier_failures = state["failures"]
        self._earlier_versions = earlier_versions
        if state["weights"] is not None:
            self._backend.weights.publish(state["weights"])
        self._received.load_state_dict(state["received"])
        if self._writer is not None and state["rings"] is not None:
            self._writer.load_state_dict(state["rings"])
        self._leftover = [fragment.copy() for fragment in state["fragments"]]

    def _exchange(self, requests: Sequence[StateRequest]) -> list[dict[str, Any]]:
        """Send workers a request each, and return their answers."""
        self._started().ask(dict(enumerate(requests)))
        self._finish_collect()
        return [dict(worker.answer) for worker in self._started().workers if requests[0].state is None]


def _check_alike(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Refuse the state of a collector for a worker that has another one."""
    mine = own.get("task", {}).get("collector")
    if mine is None:
        return
    wanted, found = ((one["collector"], one["num_envs"]) for one in (mine, state))
    if found != wanted:
        raise ArgumentError(
            f"the state must be of workers with a {wanted[0]} of {wanted[1]} environments, got one with a {found[0]} "
            f"of {found[1]}"
        )
