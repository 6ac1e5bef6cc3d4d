"""Replay buffer of several agents, with one buffer per policy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from samplebatch import errors, names
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
from samplebatch.buffer.samplers import Sample, convert_sample
from samplebatch.buffer.table import new_lock
from samplebatch.buffer.writing import end_flags
from samplebatch.names import PolicyID, for_html, for_terminal

if TYPE_CHECKING:
    from samplebatch.batch.delivery import Device, Floats


FRAGMENT_END: Final = "fragment_end"
"""Column that marks steps that count as truncated because a fragment ended."""

_FLAGS: Final = {names.TERMINATEDS: "terminated", names.TRUNCATEDS: "truncated", names.DONES: "done"}


class Form(NamedTuple):
    """Properties of a policy's batches that the policy's buffer does not store: flag columns and reward dtype."""

    flags: frozenset[str]
    """Flags of the batches."""
    rewards: np.dtype[Any]
    """Reward dtype of the batches, or the requested `reward_dtype`."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """Validated rows of one policy, which can be added to the policy's buffer."""

    buffer: ReplayBuffer
    rows: dict[str, Any]
    """The last rows, at most one per slot."""
    count: int
    """Number of rows in the fragment."""
    streams: Streams
    form: Form
    action_unit: ActionUnit | None


def prepare_fragment(
    policy: PolicyID, part: SampleBatch, buffer: ReplayBuffer, tail: Tail | None, form: Form | None
) -> Fragment:
    """Order the rows of a policy by stream, and check that a buffer accepts the rows, without changes to the buffer.

    part: batch of at least one row.
    tail: newest row of the buffer; None if no further row can continue the newest row's episode.
    form: flag columns and reward dtype of earlier batches; None before the first batch.

    Raises ColumnNotFoundError if a required column is missing. Raises SampleBatchError if the rows are sequences, or a
    column cannot store its rows.
    """
    column_names = set(part.column_names)
    if names.SEQ_LENS in column_names:
        raise errors.SequenceError(f"rows of policy {policy!r} must be plain steps, got sequences; add steps only")
    if FRAGMENT_END in column_names:
        raise errors.ColumnMismatchError(
            f"rows of policy {policy!r} must not have a column {FRAGMENT_END!r}; rename it"
        )
    for name in (names.OBS, names.ACTIONS, names.REWARDS):
        if name not in part:
            raise errors.ColumnNotFoundError(
                f"policy {policy!r} must have column {name!r}; {errors.near_names(name, column_names)}"
            )
    flags = frozenset(_FLAGS) & column_names
    if not flags & {names.TERMINATEDS, names.DONES}:
        hint = errors.near_names(names.TERMINATEDS, column_names)
        raise errors.ColumnNotFoundError(f"policy {policy!r} must have column {names.TERMINATEDS!r}; {hint}")
    episode, agent, t = (
        np.asarray(part[name]) if name in column_names else None for name in (names.EPS_ID, names.AGENT_INDEX, names.T)
    )
    streams = find_streams(part.count, episode, agent, t, tail)
    if streams.order is not None:
        part = part.take(streams.order)
    count, stored_count = part.count, min(part.count, buffer.maxsize)
    part, ends = part.slice(count - stored_count, count), streams.ends[count - stored_count :]
    rows = dict(part.as_batch(convention="tianshou").__dict__)
    terminated, truncated = end_flags(rows, stored_count)
    rows.pop("done", None)
    cut = ends & ~(terminated | truncated)
    rows |= {"terminated": terminated, "truncated": truncated | cut, FRAGMENT_END: cut}
    buffer._table.check(rows, stored_count)
    unit = common_unit([buffer.action_unit if len(buffer) else None, part.action_unit])
    requested_dtype = buffer.options.get("reward_dtype")
    earlier = form or Form(
        frozenset(), np.dtype(requested_dtype) if requested_dtype else np.asarray(part[names.REWARDS]).dtype
    )
    return Fragment(buffer, rows, count, streams, Form(earlier.flags | flags, earlier.rewards), unit)


def rows_as_added(buffer_rows: dict[str, Any], form: Form, action_unit: ActionUnit | None) -> SampleBatch:
    """Convert rows of a buffer to a batch with the columns of the added batches, under RLlib's names."""
    rows = dict(buffer_rows)
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
    """Replay buffer of several agents, with one `ReplayBuffer` per policy, for `MultiAgentBatch`es.

    Rows of one agent in one episode are contiguous and in time order, as n-step targets, stacked frames and sequences
    require. The columns `eps_id` and `agent_index` identify the episode and the agent of a row, and `t` identifies the
    step. If later rows cannot be matched to the last step of a fragment, the buffers treat the step as truncated.
    Sampled rows contain the same flag columns as the added batches.

    Parameters
    ----------
    size
        Capacity of each policy's buffer in rows: one number for all policies, or a mapping from policy ids to numbers.
    lockstep
        Whether to sample environment steps with the rows of all policies, instead of sampling the rows of each policy
        independently. In lockstep, an environment step can be sampled as long as all of its rows are stored.
    kind
        Class of the buffers, such as `PrioritizedReplayBuffer`.
    seed
        Seed of the generator for all sampling.
    **options
        Further arguments of the class `kind`. The options `compress` and `ragged` contain column names of
        `MultiAgentBatch`es. Each name must be a column of at least one policy; the first call to `sample` checks the
        names. If a named column is added only by a policy that acts after the first sample, `size` must list all
        policies.

    Attributes
    ----------
    buffers
        Buffers by policy id, for each policy whose rows have been added. Read-only.
    lockstep
        The argument.

    Raises
    ------
    ColumnTypeError
        If `kind` is not a class of buffers with one ring.
    StorageError
        If `storage` is passed, because policies cannot share a folder.

    Examples
    --------
    >>> buf = MultiAgentReplayBuffer(100)
    >>> def rows(n):
    ...     return SampleBatch(
    ...         obs=np.arange(n),
    ...         actions=np.zeros(n),
    ...         rewards=np.ones(n),
    ...         terminateds=np.zeros(n, bool),
    ...     )
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
            raise errors.StorageError("the buffers of several policies cannot share a folder; remove 'storage'")
        self.buffers: dict[PolicyID, ReplayBuffer] = {}
        self.lockstep = lockstep
        self._size = dict(size) if isinstance(size, Mapping) else size
        self._kind = kind
        self._options = options | {name: _as_stored(options[name]) for name in _COLUMN_OPTIONS if name in options}
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
            sizes = ", ".join(
                f"{for_terminal(policy)}: {len(buffer)}/{buffer.maxsize}" for policy, buffer in self.buffers.items()
            )
        return f"{type(self).__name__}({sizes})"

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
        """Size of all buffers in bytes."""
        with self._lock:
            return sum(buffer.nbytes for buffer in self.buffers.values())

    def _new(self, policy: PolicyID) -> ReplayBuffer:
        size = self._size
        if isinstance(size, dict):
            if policy not in size:
                raise errors.PolicyNotFoundError(
                    f"size must include policy {policy!r}; {errors.near_names(policy, size)}"
                )
            size = size[policy]
        # The seed must not depend on the order in which policies appear.
        seed = int(np.random.SeedSequence([self._seed, crc32(names.policy_seed(policy))]).generate_state(1)[0])
        buffer = self._kind(size, random_seed=seed, **self._options)
        if not isinstance(buffer, ReplayBuffer) or len(buffer.subbuffer_edges) != 2:
            raise errors.ColumnTypeError(f"the buffer of a policy must have one ring, got a {self._kind.__name__}")
        # A common lock makes samples of all policies consistent.
        buffer._table.lock = self._lock
        return buffer

    # Adding

    def add(self, batch: MultiAgentBatch) -> None:
        """Add the rows of every policy.

        Parameters
        ----------
        batch
            Batch with the columns `obs`, `actions`, `rewards`, at least one of `terminateds` and `dones`, and any
            further columns. If the first batch of a policy has the column `new_obs`, all batches of the policy must
            have this column. The batch is not modified.

        Raises
        ------
        ColumnNotFoundError
            If a required column is missing.
        ColumnLengthError, ColumnMismatchError, ColumnTypeError
            If a column cannot store its rows exactly.
        PolicyNotFoundError
            If `size` does not include a policy.
        SequenceError
            If rows are sequences, or if `lockstep` is true and rows cannot be assigned to environment steps. An error
            changes nothing.
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
        buffer, streams = fragment.buffer, fragment.streams
        self.buffers[policy] = buffer
        self._forms[policy], buffer.action_unit = fragment.form, fragment.action_unit
        if streams.goes_on:
            newest = buffer.last_index
            for name in ("truncated", FRAGMENT_END):
                buffer.set_array_at_key(np.zeros(1, np.bool_), name, newest)
        rings = buffer._table.rings
        stored_count = min(fragment.count, buffer.maxsize)
        if self.lockstep:
            next_slots = (int(rings.cursors_of_all()[0]) + np.arange(stored_count)) % max(buffer.maxsize, 1)
            self._steps.lose(policy, next_slots[next_slots < len(buffer)])
        slots = buffer._table.append(0, fragment.rows, fragment.count)
        self._tails.pop(policy, None)
        if streams.tail is not None and stored_count and fragment.rows[FRAGMENT_END][-1]:
            self._tails[policy] = streams.tail
        return slots[len(slots) - stored_count :]

    def reset(self, keep_statistics: bool = False) -> None:
        """Empty all buffers.

        Parameters
        ----------
        keep_statistics
            As in `ReplayBuffer.reset`.
        """
        with self._lock:
            for buffer in self.buffers.values():
                buffer.reset(keep_statistics)
            self._tails.clear()
            self._steps = EnvSteps()

    def extend(self, batch: Any) -> int:
        """Add a multi-agent batch, or steps of the default policy, in any form that `ReplayBuffer.extend` accepts.

        The batches of a `Dataset` are added in the order in which they were appended to the dataset. Returns the number
        of added steps of all agents.

        Raises
        ------
        ColumnTypeError
            If `batch` is neither a batch nor a mapping of columns.
        SampleBatchError
            As in `add` and `Dataset.fragments`.
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
        """Return the number of complete environment steps, from which lockstep sampling selects."""
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
        """Sample rows with replacement.

        Parameters
        ----------
        batch_size
            Number of rows per policy; in lockstep, number of environment steps, whose rows are grouped by step. 0: all
            rows in time order; None: all rows in random order; negative: no rows.
        n_step, gamma
            As in `ReplayBuffer.sample`; n-step rows have the columns `returns`, `discount` and `new_obs`.
        device, floats
            As in `ReplayBuffer.sample`.

        Returns
        -------
        Sample
            A `MultiAgentBatch` with the columns of the added batches, and the indices of the rows by policy; unpacks as
            `batch, indices`. Prioritized buffers add `weights`, `generation` and `batch_indexes`, which
            `update_priorities` requires. In lockstep, policies without rows at the sampled steps are omitted.

        Raises
        ------
        ArgumentError, DeviceError
            As in `ReplayBuffer.sample`. ArgumentError is also raised if no policy has a column that is named in
            `compress` or `ragged`.
        EmptyBufferError
            If there are no rows to sample.
        """
        if batch_size is not None:
            whole("batch_size", batch_size, None)
        delivery = Delivery(device, floats)
        with self._lock:
            self._check_names()
            for buffer in self.buffers.values():
                check_window(buffer._table, n_step, gamma)
            indices, count = self._draw(batch_size)
            rows = {policy: self._rows(policy, slots, n_step, gamma) for policy, slots in indices.items()}
        return delivery.one(Sample(MultiAgentBatch(rows, count), indices), convert_sample)

    def _check_names(self) -> None:
        """Validate the column names in `compress` and `ragged` after all known policies have received rows."""
        if self._has_checked_names or not self.buffers:
            return
        if not isinstance(self._size, dict) or self._size.keys() <= self.buffers.keys():
            columns = [buffer._table.columns for buffer in self.buffers.values()]
            columns[0].stores.check_names(*(policy_columns.tree for policy_columns in columns))
            self._has_checked_names = True

    def _draw(self, batch_size: int | None) -> tuple[dict[PolicyID, Ints], int]:
        """Sample slots for each policy; return the slots by policy and the number of environment steps."""
        if self.lockstep:
            positions = self._draw_steps(batch_size)
            indices = {policy: self._steps.rows(policy, positions) for policy in self.buffers}
            return {policy: slots for policy, slots in indices.items() if len(slots)}, len(positions)
        if not self.buffers and batch_size is not None and batch_size > 0:
            raise errors.EmptyBufferError("a buffer must have rows to sample, got an empty buffer; add some first")
        indices = {policy: buffer._draw(batch_size) for policy, buffer in self.buffers.items()}
        return indices, max((len(slots) for slots in indices.values()), default=0)

    def _draw_steps(self, batch_size: int | None) -> Ints:
        if batch_size is not None and batch_size > 0:
            return self._steps.draw(batch_size, self._rng)
        every = self._steps.all()
        if batch_size is None:
            return self._rng.permutation(every)
        return every if batch_size == 0 else every[:0]

    def _rows(self, policy: PolicyID, slots: Ints, n_step: int | None, gamma: float) -> SampleBatch:
        """Read rows of a policy with the columns and dtypes of the added batches."""
        buffer = self.buffers[policy]
        rows = dict(buffer._rows(slots).__dict__)
        if n_step is not None:
            rows |= buffer._nstep_columns(slots, n_step, gamma)
        if isinstance(buffer, PrioritizedReplayBuffer):
            rows["weights"] = rows.pop(names.WEIGHT)
            rows[names.BATCH_INDEXES] = slots
        return rows_as_added(rows, self._forms[policy], self.buffers[policy].action_unit)

    def update_priorities(self, batch: MultiAgentBatch, priorities: Mapping[PolicyID, npt.ArrayLike]) -> None:
        """Set priorities of sampled rows; skip rows that have since been overwritten.

        Parameters
        ----------
        batch
            Batch returned by `sample`.
        priorities
            Priorities by policy, with one priority per row, shape (n,). Signs are ignored.

        Raises
        ------
        ColumnNotFoundError
            If the batch was not sampled from prioritized buffers.
        PolicyNotFoundError
            If a policy does not exist.
        ColumnLengthError, ColumnTypeError, PriorityError
            As in `PrioritizedReplayBuffer.update_weight`.
        """
        for policy, policy_priorities in priorities.items():
            part, buffer = batch[policy], self.buffers.get(policy)
            if buffer is None:
                raise errors.PolicyNotFoundError(f"no policy {policy!r}; {errors.near_names(policy, self.buffers)}")
            where, generation = part[names.BATCH_INDEXES], part[names.GENERATION]
            if not isinstance(buffer, PrioritizedReplayBuffer):
                raise errors.ColumnTypeError(
                    f"the buffer of policy {policy!r} must be prioritized, got a {type(buffer).__name__}"
                )
            buffer.update_weight(where, policy_priorities, generation=generation)

    # Files and states

    def save(self, path: str | os.PathLike[str], *, compression: str | None = None, durable: bool = True) -> None:
        """Write the buffer to a folder with one file per policy.

        The parameters and errors are the same as for `SampleBatch.save`.
        """
        from samplebatch.storage import save

        save(self, path, compression, durable=durable)

    def state_dict(self) -> dict[str, Any]:
        """Return the complete, picklable state of the buffer."""
        from samplebatch.storage import export_state

        return export_state(self)

    def load_state_dict(self, state: Mapping[str, Any], *, verify: bool = True) -> None:
        """Restore the state of a buffer with the same arguments as this buffer; see `ReplayBuffer.load_state_dict`.

        Raises
        ------
        ColumnMismatchError, FormatError
            As in `ReplayBuffer.load_state_dict`. An error changes nothing.
        """
        from samplebatch.storage import load_state

        load_state(self, state, verify=verify)

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in self.__dict__.items() if name not in _BOUND}
        return attributes | {"state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        attributes = dict(state)
        buffer_state = attributes.pop("state")
        self.__dict__.update(attributes)
        self._lock = new_lock()
        self.load_state_dict(buffer_state)


_COLUMN_OPTIONS = ("compress", "ragged")
"""Options that name columns."""


def _as_stored(selection: Any) -> Any:
    """Convert names of batch columns to the names under which buffers store the columns."""
    if isinstance(selection, bool):
        return selection
    parts = [name.partition(".") for name in ([selection] if isinstance(selection, str) else selection)]
    return ["".join([names.TO_NESTED.get(top, top), *nested]) for top, *nested in parts]


_BOUND = frozenset(("buffers", "_rng", "_forms", "_tails", "_steps", "_lock"))
"""Attributes that pickles store in another form."""
