"""MultiAgentReplayBuffer: the newest steps of several agents, in a buffer for each policy that acted for them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import whole
from samplebatch.batch.action_unit import ActionUnit, common_unit
from samplebatch.batch.delivery import Delivery
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.batch.nested.batch import Batch
from samplebatch.batch.nested.node import node
from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.buffer.env_steps import EnvSteps, env_steps_of
from samplebatch.buffer.extending import Streams, Tail, as_flat, find_streams, is_dataset
from samplebatch.buffer.gather import check_window
from samplebatch.buffer.prioritized import PrioritizedReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.sampling import Sample, convert_sample
from samplebatch.buffer.table import new_lock
from samplebatch.buffer.writing import end_flags
from samplebatch.errors import (
    ColumnMismatchError,
    ColumnNotFoundError,
    ColumnTypeError,
    EmptyBufferError,
    PolicyNotFoundError,
    SequenceError,
    StorageError,
    near_names,
)
from samplebatch.names import PolicyID, for_html, for_terminal

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device, Floats


FRAGMENT_END: Final = "fragment_end"
"""The column that tells the steps that count as truncated because a fragment ended with them."""

_FLAGS: Final = {names.TERMINATEDS: "terminated", names.TRUNCATEDS: "truncated", names.DONES: "done"}


class Form(NamedTuple):
    """The flags and the dtype of rewards of a policy's batches, which its buffer does not keep."""

    flags: frozenset[str]
    """Which flags they have."""
    rewards: np.dtype[Any]
    """The dtype of their rewards, or the one that the buffer was told."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Rows of one policy, ready for its buffer."""

    buffer: ReplayBuffer
    rows: dict[str, Any]
    """The last rows, as many as there are slots."""
    count: int
    """How many rows there were."""
    streams: Streams
    form: Form
    action_unit: ActionUnit | None


def prepare_fragment(
    policy: PolicyID, part: SampleBatch, buffer: ReplayBuffer, tail: Tail | None, form: Form | None
) -> Fragment:
    """Arrange the rows of a policy stream by stream, and check that a buffer can take them; nothing is changed.

    Parameters
    ----------
    policy
        The policy id, for errors.
    part
        The rows, one at least.
    buffer
        Where they are to go.
    tail
        The newest row of the buffer, if another could follow it.
    form
        That of the batches before, if there were any.

    Raises
    ------
    ColumnNotFoundError
        If a column is missing that rows must have; names policy and column.
    SampleBatchError
        If the rows are sequences, or a column cannot take its rows; names it.
    """
    held = set(part.column_names)
    if names.SEQ_LENS in held:
        raise SequenceError(f"rows of policy {policy!r} must be plain steps, they come as sequences; unpad them first")
    if FRAGMENT_END in held:
        raise ColumnMismatchError(f"rows of policy {policy!r} have a column {FRAGMENT_END!r} of their own; rename it")
    for name in (names.OBS, names.ACTIONS, names.REWARDS):
        if name not in part:
            raise ColumnNotFoundError(f"policy {policy!r} must have column {name!r}; {near_names(name, held)}")
    flags = frozenset(_FLAGS) & held
    if not flags & {names.TERMINATEDS, names.DONES}:
        raise ColumnNotFoundError(
            f"policy {policy!r} must have column {names.TERMINATEDS!r}; {near_names(names.TERMINATEDS, held)}"
        )
    episode, agent, t = (
        np.asarray(part[name]) if name in held else None for name in (names.EPS_ID, names.AGENT_INDEX, names.T)
    )
    streams = find_streams(part.count, episode, agent, t, tail)
    if streams.order is not None:
        part = part.take(streams.order)
    count, kept = part.count, min(part.count, buffer.maxsize)
    part, ends = part.slice(count - kept, count), streams.ends[count - kept :]
    rows = dict(part.as_batch(convention="tianshou").__dict__)
    terminated, truncated = end_flags(rows, kept)
    rows.pop("done", None)
    cut = ends & ~(terminated | truncated)
    rows |= {"terminated": terminated, "truncated": truncated | cut, FRAGMENT_END: cut}
    buffer._table.check(rows, kept)
    unit = common_unit([buffer.action_unit if len(buffer) else None, part.action_unit])
    asked = buffer.options.get("reward_dtype")
    known = form or Form(frozenset(), np.dtype(asked) if asked else np.asarray(part[names.REWARDS]).dtype)
    return Fragment(buffer, rows, count, streams, Form(known.flags | flags, known.rewards), unit)


def rows_as_added(held: dict[str, Any], form: Form, action_unit: ActionUnit | None) -> SampleBatch:
    """Turn rows of a buffer into a batch with the columns that were added, under RLlib's names."""
    rows = dict(held)
    rows["truncated"] = rows["truncated"] & ~rows.pop(FRAGMENT_END)
    rows["done"] = rows["terminated"] | rows["truncated"]
    for flat, nested in _FLAGS.items():
        if flat not in form.flags:
            del rows[nested]
    rows["rew"] = rows["rew"].astype(form.rewards, copy=False)
    batch = node(Batch, rows).as_sample_batch("rllib")
    batch.action_unit = action_unit
    return batch


class MultiAgentReplayBuffer:
    """A replay buffer of several agents, with a `ReplayBuffer` for each policy: takes and samples `MultiAgentBatch`es.

    Rows of one agent in one episode are kept together, in time order, as n-step targets, stacked frames and sequences
    need them. Agents are told apart by the columns `eps_id` and
    `agent_index`, steps by `t`. Where the rows of a fragment end and it cannot be told that the next fragment goes on,
    the last step counts as truncated in the buffers; sampled rows have the flags that were added.

    Parameters
    ----------
    size
        How many rows to keep for each policy; one number for all, or one for each policy id.
    lockstep
        Whether to sample steps of the environment, with the rows of all policies at them, rather than rows of each
        policy by itself. Such a step can be drawn as long as all of its rows are there.
    kind
        The class of the buffers, such as `PrioritizedReplayBuffer`.
    seed
        Seed of all draws.
    **options
        Further arguments of the buffers. `compress` and `ragged` name columns as batches do, each a column of some
        policy: the first sample is rejected otherwise. If a policy that acts later is to bring the column, `size` must
        name all policies.

    Attributes
    ----------
    buffers
        The buffer of each policy that has had rows, by policy id. They are for reading.
    lockstep
        As given.

    Raises
    ------
    ColumnTypeError
        If `kind` is no buffer of one ring.
    StorageError
        If a folder is given: each policy would have to have its own.

    Examples
    --------
    >>> buf = MultiAgentReplayBuffer(100)
    >>> def rows(n):
    ...     return SampleBatch(obs=np.arange(n), actions=np.zeros(n), rewards=np.ones(n), terminateds=np.zeros(n, bool))
    >>> buf.add(MultiAgentBatch({"walker": rows(6), "guard": rows(3)}, env_steps=6))
    >>> batch, indices = buf.sample(4)
    >>> {policy: part["obs"].shape for policy, part in batch.items()}, batch.env_steps()
    ({'walker': (4,), 'guard': (4,)}, 4)
    >>> len(buf), len(buf.buffers["guard"])
    (9, 3)
    """

    _has_checked_names = False

    def __init__(
        self,
        size: int | Mapping[PolicyID, int],
        *,
        lockstep: bool = False,
        kind: type[ReplayBuffer] = ReplayBuffer,
        seed: int = 42,
        **options: Any,
    ) -> None:
        if "random_seed" in options:
            raise TypeError("MultiAgentReplayBuffer has no argument 'random_seed'; did you mean 'seed'?")
        if options.get("storage") is not None:
            raise StorageError("the buffers of several policies cannot share a folder; leave out 'storage'")
        self.buffers: dict[PolicyID, ReplayBuffer] = {}
        self.lockstep = lockstep
        self._size = dict(size) if isinstance(size, Mapping) else size
        self._kind = kind
        self._options = options | {name: _as_stored(options[name]) for name in _NAMING if name in options}
        self._seed = seed
        self._rng = np.random.default_rng(seed)
        self._forms: dict[PolicyID, Form] = {}
        self._tails: dict[PolicyID, Tail] = {}
        self._steps = EnvSteps()
        self._lock = new_lock()
        for policy in self._size if isinstance(self._size, dict) else [""]:
            self._new(policy)

    def __len__(self) -> int:
        with self._lock:
            return sum(len(buffer) for buffer in self.buffers.values())

    def __repr__(self) -> str:
        with self._lock:
            held = ", ".join(
                f"{for_terminal(policy)}: {len(buffer)}/{buffer.maxsize}" for policy, buffer in self.buffers.items()
            )
        return f"{type(self).__name__}({held})"

    def __str__(self) -> str:
        return "\n".join(
            [repr(self), *(f"policy {for_terminal(repr(policy))}, {buffer}" for policy, buffer in self.buffers.items())]
        )

    def _repr_html_(self) -> str:
        parts = [f"<p>policy {for_html(repr(policy))}</p>{b._repr_html_()}" for policy, b in self.buffers.items()]
        return f"<p>{for_html(repr(self), 1000)}</p>" + "".join(parts)

    def __contains__(self, policy: object) -> bool:
        return policy in self.buffers

    def __iter__(self) -> Iterator[PolicyID]:
        return iter(list(self.buffers))

    @property
    def nbytes(self) -> int:
        """Bytes that the slots of all buffers occupy."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self.buffers.values())

    def _new(self, policy: PolicyID) -> ReplayBuffer:
        size = self._size
        if isinstance(size, dict):
            if policy not in size:
                raise PolicyNotFoundError(f"no size was given for policy {policy!r}; {near_names(policy, size)}")
            size = size[policy]
        # The order in which policies turn up decides nothing.
        seed = int(np.random.SeedSequence([self._seed, crc32(names.policy_seed(policy))]).generate_state(1)[0])
        buffer = self._kind(size, random_seed=seed, **self._options)
        if not isinstance(buffer, ReplayBuffer) or len(buffer.subbuffer_edges) != 2:
            raise ColumnTypeError(f"the buffer of a policy must have one ring, a {self._kind.__name__} has not")
        # One lock for all, so that all rows of a sample are of one moment.
        buffer._table.lock = self._lock
        return buffer

    # Adding

    def add(self, batch: MultiAgentBatch) -> None:
        """Add the rows of every policy.

        Parameters
        ----------
        batch
            With the columns `obs`, `actions`, `rewards`, one at least of `terminateds` and `dones`, and any others;
            `new_obs`, if it is there in the first batch of a policy, must be in all. It is not changed.

        Raises
        ------
        ColumnNotFoundError
            If a column is missing that rows must have; names policy and column.
        ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If a column cannot take its rows without loss; names it.
        PolicyNotFoundError
            If no size was given for a policy.
        SequenceError
            If rows come as sequences; or, for lockstep, if it cannot be told which rows belong to the same step of the
            environment. Nothing has changed after any error.
        """
        parts = {policy: part for policy, part in batch.items() if part.count}
        with self._lock:
            self._add(parts, batch.env_steps())

    def _add(self, parts: dict[PolicyID, SampleBatch], env_steps: int) -> None:
        count, steps = env_steps_of(parts, env_steps) if self.lockstep else (0, {})
        fragments = {
            policy: prepare_fragment(
                policy,
                part,
                self.buffers[policy] if policy in self.buffers else self._new(policy),
                self._tails.get(policy),
                self._forms.get(policy),
            )
            for policy, part in parts.items()
        }
        rows: dict[PolicyID, tuple[Ints, Ints, int]] = {}
        for policy, fragment in fragments.items():
            slots = self._write(policy, fragment)
            if self.lockstep:
                order = fragment.streams.order
                step = steps[policy] if order is None else steps[policy][order]
                rows[policy] = (step, slots, fragment.buffer.maxsize)
        if self.lockstep:
            self._steps.add(count, rows)

    def _write(self, policy: PolicyID, fragment: Fragment) -> Ints:
        """Add rows that are ready; return the slots that they went to."""
        buffer, streams = fragment.buffer, fragment.streams
        self.buffers[policy] = buffer
        self._forms[policy], buffer.action_unit = fragment.form, fragment.action_unit
        if streams.goes_on:
            newest = buffer.last_index
            for name in ("truncated", FRAGMENT_END):
                buffer.set_array_at_key(np.zeros(1, np.bool_), name, newest)
        rings = buffer._table.rings
        kept = min(fragment.count, buffer.maxsize)
        if self.lockstep:
            next_slots = (int(rings.cursors_of_all()[0]) + np.arange(kept)) % max(buffer.maxsize, 1)
            self._steps.lose(policy, next_slots[next_slots < len(buffer)])
        slots = buffer._table.append(0, fragment.rows, fragment.count)
        self._tails.pop(policy, None)
        if streams.tail is not None and kept and fragment.rows[FRAGMENT_END][-1]:
            self._tails[policy] = streams.tail
        return slots[len(slots) - kept :]

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty all buffers.

        Parameters
        ----------
        keep_statistics
            As of `ReplayBuffer.reset`.
        """
        with self._lock:
            for buffer in self.buffers.values():
                buffer.reset(keep_statistics)
            self._tails.clear()
            self._steps = EnvSteps()

    def extend(self, batch: Any) -> int:
        """Add a batch of several policies, or steps of the default one: all that `ReplayBuffer.extend` takes.

        The batches of a `Dataset` go in as they were appended. Returns the steps of all agents that were added.

        Raises
        ------
        ColumnTypeError
            If it is no batch and no mapping of columns.
        SampleBatchError
            As `add` and `Dataset.fragments` do.
        """
        if is_dataset(batch):
            return sum(map(self.extend, batch.fragments()))
        if hasattr(batch, "policy_batches"):
            parts = {name: as_flat(part) for name, part in batch.policy_batches.items()}
            steps = MultiAgentBatch(parts, batch.count)
        else:
            steps = as_flat(batch).as_multi_agent()
        self.add(steps)
        return steps.agent_steps()

    # Sampling

    def env_steps(self) -> int:
        """Return the number of environment steps that can be drawn in lockstep: the complete ones."""
        return len(self._steps)

    def sample(
        self,
        batch_size: int | None,
        *,
        n_step: int | None = None,
        gamma: float = 0.99,
        device: Device | None = None,
        floats: Floats | None = None,
    ) -> Sample[MultiAgentBatch, dict[PolicyID, Ints]]:
        """Draw rows with replacement.

        Parameters
        ----------
        batch_size
            How many rows of each policy; in lockstep, how many steps of the environment, whose rows come step by step.
            0 for all in time order, None for all in random order, a negative number for none.
        n_step, gamma
            As `ReplayBuffer.sample` takes them; the columns are `returns`, `discount` and `new_obs`.
        device, floats
            As `ReplayBuffer.sample` takes them.

        Returns
        -------
        Sample
            A `MultiAgentBatch` of the columns that were added, and for each policy where its rows are; unpacks as
            `batch, indices`. Of prioritized buffers there are also `weights`, `generation` and `batch_indexes`, from
            which `update_priorities` knows the rows. In lockstep, policies without rows at the steps are left out.

        Raises
        ------
        ArgumentError, DeviceError
            As `ReplayBuffer.sample` does. If no policy has a column that `compress` or `ragged` names.
        EmptyBufferError
            If there is nothing to draw from.
        """
        if batch_size is not None:
            whole("batch_size", batch_size, None)
        delivery = Delivery(device, floats)
        with self._lock:
            self._check_names()
            for buffer in self.buffers.values():
                check_window(buffer._table, n_step, gamma)
            drawn, count = self._draw(batch_size)
            rows = {policy: self._rows(policy, slots, n_step, gamma) for policy, slots in drawn.items()}
        return delivery.one(Sample(MultiAgentBatch(rows, count), drawn), convert_sample)

    def _check_names(self) -> None:
        """Check that options name columns of a policy, once, when all policies that are known of have had rows."""
        if self._has_checked_names or not self.buffers:
            return
        if not isinstance(self._size, dict) or self._size.keys() <= self.buffers.keys():
            columns = [buffer._table.columns for buffer in self.buffers.values()]
            columns[0].stores.check_names(*(own.tree for own in columns))
            self._has_checked_names = True

    def _draw(self, batch_size: int | None) -> tuple[dict[PolicyID, Ints], int]:
        """Draw slots per policy; return them and the number of environment steps."""
        if self.lockstep:
            places = self._places(batch_size)
            drawn = {policy: self._steps.rows(policy, places) for policy in self.buffers}
            return {policy: slots for policy, slots in drawn.items() if len(slots)}, len(places)
        if not self.buffers and batch_size is not None and batch_size > 0:
            raise EmptyBufferError("a buffer must have rows to draw from, it has none; add some first")
        drawn = {policy: buffer._draw(batch_size) for policy, buffer in self.buffers.items()}
        return drawn, max((len(slots) for slots in drawn.values()), default=0)

    def _places(self, batch_size: int | None) -> Ints:
        """Draw steps of the environment."""
        if batch_size is not None and batch_size > 0:
            return self._steps.draw(batch_size, self._rng)
        every = self._steps.all()
        if batch_size is None:
            return self._rng.permutation(every)
        return every if batch_size == 0 else every[:0]

    def _rows(self, policy: PolicyID, slots: Ints, n_step: int | None, gamma: float) -> SampleBatch:
        """Read rows of a policy, as they were added."""
        buffer = self.buffers[policy]
        held = dict(buffer._rows(slots).__dict__)
        if n_step is not None:
            held |= buffer._nstep_columns(slots, n_step, gamma)
        if isinstance(buffer, PrioritizedReplayBuffer):
            held["weights"] = held.pop(names.WEIGHT)
            held[names.BATCH_INDEXES] = slots
        return rows_as_added(held, self._forms[policy], self.buffers[policy].action_unit)

    def update_priorities(self, batch: MultiAgentBatch, priorities: Mapping[PolicyID, npt.ArrayLike]) -> None:
        """Give rows that were sampled new priorities; those overwritten since keep theirs.

        Parameters
        ----------
        batch
            As `sample` returned it.
        priorities
            For each policy one for each row, shape (n,). Their signs do not count.

        Raises
        ------
        ColumnNotFoundError
            If the batch did not come from prioritized buffers.
        PolicyNotFoundError
            If there is no such policy.
        ColumnLengthError, ColumnTypeError, PriorityError
            As `PrioritizedReplayBuffer.update_weight` does.
        """
        for policy, given in priorities.items():
            part, buffer = batch[policy], self.buffers.get(policy)
            if buffer is None:
                raise PolicyNotFoundError(f"no policy {policy!r}; {near_names(policy, self.buffers)}")
            where, generation = part[names.BATCH_INDEXES], part[names.GENERATION]
            if not isinstance(buffer, PrioritizedReplayBuffer):
                raise ColumnTypeError(f"the buffer of policy {policy!r} must be prioritized, it is none")
            buffer.update_weight(where, given, generation=generation)

    # Files and states

    def save(self, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True) -> None:
        """Write the buffer to a folder, with a file for each policy; parameters and errors as of `SampleBatch.save`."""
        from samplebatch.storage import save

        save(self, path, compression, durable=durable)

    def state_dict(self) -> dict[str, Any]:
        """Return the state from which another buffer goes on exactly as this one would; it can be pickled."""
        from samplebatch.storage import export_state

        return export_state(self)

    def load_state_dict(self, state: Mapping[str, Any], *, verify: bool = True) -> None:
        """Load the `state_dict` of a buffer that was made with the same arguments; see `ReplayBuffer.load_state_dict`.

        Raises
        ------
        ColumnMismatchError, FormatError
            As `ReplayBuffer.load_state_dict` does. Nothing has changed then.
        """
        from samplebatch.storage import load_state

        load_state(self, state, verify=verify)

    def __getstate__(self) -> dict[str, Any]:
        own = {name: value for name, value in self.__dict__.items() if name not in _BOUND}
        return own | {"state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        own = dict(state)
        kept = own.pop("state")
        self.__dict__.update(own)
        self._lock = new_lock()
        self.load_state_dict(kept)


_NAMING = ("compress", "ragged")
"""Options that name columns."""


def _as_stored(given: Any) -> Any:
    """Turn names of columns into those that buffers have for them."""
    if isinstance(given, bool):
        return given
    parts = [name.partition(".") for name in ([given] if isinstance(given, str) else given)]
    return ["".join([names.TO_NESTED.get(top, top), *rest]) for top, *rest in parts]


_BOUND = frozenset(("buffers", "_rng", "_forms", "_tails", "_steps", "_lock"))
"""Attributes that a pickle holds in another form."""
