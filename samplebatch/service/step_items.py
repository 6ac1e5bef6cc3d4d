"""StepItems: the steps of a replay table, stored in a replay buffer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from samplebatch import names
from samplebatch.arguments import fraction, whole
from samplebatch.batch.action_unit import common_unit
from samplebatch.batch.multi_agent import MultiAgentBatch
from samplebatch.buffer.columns import take_rows
from samplebatch.buffer.extending import add_steps, as_flat, env_ids, flatten_rows, steps_of
from samplebatch.buffer.prioritized import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer
from samplebatch.buffer.replay import ReplayBuffer
from samplebatch.buffer.samplers import Prioritized, exponent
from samplebatch.buffer.sequences import draw_episodes
from samplebatch.buffer.vector import VectorReplayBuffer
from samplebatch.buffer.views import slots_of
from samplebatch.errors import ArgumentError, CapacityError, ColumnMismatchError, FormatError, PriorityError
from samplebatch.service.declared_columns import DeclaredColumns
from samplebatch.service.items import Items, Pause, Request, Sample, take_options
from samplebatch.service.limiter import Hold
from samplebatch.storage.buffers.file import LiveBuffer
from samplebatch.storage.buffers.state import plain

Slots = npt.NDArray[np.intp]

_ROUNDS = 3
"""Number of rejection sampling rounds before steps are drawn from a list of all steps with remaining draws."""


class DrawsLeft:
    """Remaining draws per slot of a buffer, for tables that limit how often each step is sampled.

    - `capacity`: number of slots.
    - `max_draws`: maximum number of draws per step.

    Its attributes:
    - `counts`: remaining draws of each slot, shape (capacity,); 0 for slots without a step.
    - `total`: sum of `counts`.
    """

    def __init__(self, capacity: int, max_draws: int) -> None:
        self.counts = np.zeros(capacity, np.int64)
        self.max_draws = max_draws
        self.total = 0

    def renew(self, slots: Slots) -> None:
        """Set the remaining draws of slots with new steps to `max_draws`."""
        slots = np.unique(slots)
        self.total += len(slots) * self.max_draws - int(self.counts[slots].sum())
        self.counts[slots] = self.max_draws

    def spent(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return a mask of the slots without remaining draws, shape (n,)."""
        is_spent: npt.NDArray[np.bool_] = self.counts[slots] == 0
        return is_spent

    @contextmanager
    def draw(self, buffer: ReplayBuffer, n: int) -> Iterator[Slots]:
        """Draw n slots from a buffer; at the end of the `with` block, remove exhausted slots from the sampler.

        Gather the rows within the block, because exhausted slots lose their sampling weights at the end of the block.
        At least n draws must remain in total. If the block raises an exception, the draws are not counted.
        """
        sampler = buffer._sampler if isinstance(buffer._sampler, Prioritized) else None
        slots = np.zeros(0, np.intp)
        exhausted: list[Slots] = []
        weights: list[npt.NDArray[np.float64]] = []
        rounds = 0
        while len(slots) < n:
            rounds += 1
            candidates = self._pick(buffer, n - len(slots), by_count=sampler is None and rounds > _ROUNDS)
            accepted = candidates[_ordinals(candidates) < self.counts[candidates]]
            np.subtract.at(self.counts, accepted, 1)
            slots = np.concatenate([slots, accepted])
            newly_exhausted = np.unique(accepted[self.counts[accepted] == 0])
            if sampler is not None and len(newly_exhausted):
                exhausted.append(newly_exhausted)
                weights.append(sampler.tree.get(newly_exhausted))
                sampler.on_remove(newly_exhausted)
        self.total -= n
        if sampler is not None and exhausted:
            sampler.tree.set(np.concatenate(exhausted), np.concatenate(weights))
        try:
            yield slots
        except BaseException:
            np.add.at(self.counts, slots, 1)
            self.total += n
            raise
        if sampler is not None and exhausted:
            sampler.on_remove(np.concatenate(exhausted))

    def _pick(self, buffer: ReplayBuffer, n: int, *, by_count: bool) -> Slots:
        """Draw n slots with replacement, ignoring remaining draws; with `by_count`, exhausted slots are excluded."""
        if by_count:
            remaining = np.flatnonzero(self.counts)
            return remaining[buffer._rng.integers(0, len(remaining), n)]
        return buffer._draw(n)

    def set_max_draws(self, buffer: ReplayBuffer, max_draws: int) -> None:
        """Change the maximum number of draws per step; previous draws count towards the new maximum."""
        slots = buffer._table.rings.stored_slots()
        revived = slots[self.counts[slots] == 0]
        self.counts[slots] = np.maximum(self.counts[slots] + max_draws - self.max_draws, 0)
        self.max_draws, self.total = max_draws, int(self.counts.sum())
        if isinstance(buffer._sampler, Prioritized):
            buffer._sampler.on_add(revived[self.counts[revived] > 0])
            buffer._sampler.on_remove(slots[self.counts[slots] == 0])

    def lift(self, buffer: ReplayBuffer) -> None:
        """Add exhausted steps to the sampler again, with the largest priority so far."""
        slots = buffer._table.rings.stored_slots()
        if isinstance(buffer._sampler, Prioritized):
            buffer._sampler.on_add(slots[self.counts[slots] == 0])

    def load(self, counts: npt.NDArray[np.int64]) -> None:
        """Restore counts of remaining draws.

        Raises FormatError if the shape of `counts` is not (capacity,), or a count is not from 0 to `max_draws`.
        """
        if counts.shape != self.counts.shape:
            raise FormatError(f"remaining draws must have shape {self.counts.shape}, got {counts.shape}")
        if (counts < 0).any() or (counts > self.max_draws).any():
            raise FormatError(
                f"remaining draws must be from 0 to {self.max_draws}, got values from {counts.min()} to {counts.max()}"
            )
        self.counts = counts.astype(np.int64)
        self.total = int(counts.sum())


def _ordinals(values: Slots) -> Slots:
    """Count the earlier occurrences of each element's value: [5, 2, 5, 5, 2] becomes [0, 0, 1, 2, 1]."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    starts = np.flatnonzero(np.concatenate([np.ones(1, np.bool_), ordered[1:] != ordered[:-1]]))
    ordinals = np.empty(len(values), np.intp)
    ordinals[order] = np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values))))
    return ordinals


_INTP = np.dtype(np.intp)
_BUFFER = {
    "stack_num": 1,
    "ignore_obs_next": False,
    "save_only_last_obs": False,
    "sample_avail": False,
    "compress": False,
    "ragged": (),
    "reward_dtype": "float64",
}
_PRIORITIZED = {"alpha": 0.6, "beta": 0.4, "weight_norm": True, "stratified": False}
_N_STEP: dict[str, Any] = {"n_step": None, "gamma": 0.99}

Stream = tuple[str, int]
"""Name of a writer and number of one of the writer's environments."""


def step_options(kind: str) -> dict[str, Any]:
    """Return the options of a table of steps with their default values."""
    return {**_BUFFER, **(_PRIORITIZED if kind == "prioritized" else {}), **_N_STEP}


class StepItems(Items):
    """Steps of a replay table, sampled exactly as from a local buffer with the same seed.

    - `kind`: `"uniform"` or `"prioritized"`.
    - `capacity`: maximum number of steps, rounded up to a multiple of `streams`.
    - `streams`: number of rings. Each environment of each writer is assigned a free ring. If no ring is free, the least
      recently written ring is reassigned.
    - `max_times`: maximum number of times that each step is sampled; 0 for no limit.
    - `seed`: seed of the buffer's generator.
    - `options`: options of the buffer, and the default `n_step` and `gamma` of samples.
    - `columns`: required columns; None if the first steps determine them.

    Raises ArgumentError if an option is unknown or out of range, or columns are declared separately for each policy.
    Raises PriorityError if alpha or beta is negative or not a number.
    """

    unit = "steps"
    modes = ("steps", "sequences", "episodes")

    def __init__(
        self,
        kind: str,
        capacity: int,
        streams: int,
        max_times: int,
        seed: Any,
        options: Mapping[str, Any],
        columns: DeclaredColumns | None = None,
    ) -> None:
        self.declare(columns)
        buffer_options = take_options(options, step_options(kind), f"tables of kind {kind!r}")
        self._n_step = {name: buffer_options.pop(name) for name in _N_STEP}
        self._check_n_step(self._n_step)
        self.buffer: ReplayBuffer
        if kind == "prioritized":
            self.buffer = (
                PrioritizedReplayBuffer(capacity, random_seed=seed, **buffer_options)
                if streams == 1
                else PrioritizedVectorReplayBuffer(capacity, streams, random_seed=seed, **buffer_options)
            )
        elif streams == 1:
            self.buffer = ReplayBuffer(capacity, random_seed=seed, **buffer_options)
        else:
            self.buffer = VectorReplayBuffer(capacity, streams, random_seed=seed, **buffer_options)
        self.lock = self.buffer._table.lock
        self.capacity = self.buffer.maxsize
        self._rings = streams
        self._streams: OrderedDict[Stream, int] = OrderedDict()
        self.left: DrawsLeft | None = None
        self.max_times = 0
        if max_times:
            self.set_max_times(max_times)

    @staticmethod
    def _check_n_step(options: Mapping[str, Any]) -> None:
        if options["n_step"] is not None:
            whole("n_step", options["n_step"], 1)
        fraction("gamma", options["gamma"])

    @property
    def _prioritized(self) -> Prioritized | None:
        sampler = self.buffer._sampler
        return sampler if isinstance(sampler, Prioritized) else None

    def __len__(self) -> int:
        return len(self.buffer)

    def declare(self, columns: DeclaredColumns | None) -> None:
        """Set the columns that later steps must have; None lets the first steps determine the columns.

        Raises ArgumentError if columns are declared separately for each policy, or a name is declared twice.
        """
        self.declared = None if columns is None else columns.for_steps()

    # Inserting

    def prepare(self, rows: Any, priorities: Any, key: Any) -> tuple[Any, int, int]:
        """Validate a fragment of steps and rename its columns to the column names of buffers.

        Raises ArgumentError if a key is passed, because steps have no keys. Raises CapacityError if the fragment has
        more steps than a ring has slots. Raises PriorityError if priorities are passed to a uniform table, a priority
        is not a finite number, or the number of priorities is neither 1 nor the number of steps. Raises
        ColumnMismatchError if the columns differ from the declared columns. Raises SampleBatchError in the same cases
        as `ReplayBuffer.extend`.
        """
        if key is not None:
            raise ArgumentError(
                f"a fragment for a table of steps must have no key, got {key!r}; tables of kind 'key' have keys"
            )
        steps, count, unit = steps_of(rows if self.declared is None else self._match(rows, self.declared))
        common_unit([self.buffer.action_unit, unit])
        if self._rings > 1:
            env_ids(steps, count)
        ring_slots = self.capacity // self._rings
        if count > ring_slots:
            raise CapacityError(f"a fragment must have at most {ring_slots} steps, the slots of a ring, got {count}")
        if priorities is not None:
            sampler = self._prioritized
            if sampler is None:
                raise PriorityError("priorities must be omitted for tables of kind 'uniform', got some")
            priorities = np.asarray(priorities)
            if priorities.dtype.kind not in "biuf":
                raise PriorityError(f"priorities must be numbers, got dtype {priorities.dtype}")
            if priorities.size not in (1, count):
                raise PriorityError(f"priorities must have 1 or {count} values, one per step, got {priorities.size}")
            if count:
                # Validated before any write, so that a rejected fragment leaves no steps in the table.
                sampler.sizes(priorities.astype(np.float64))
        return (steps, count, priorities, unit), count, count

    @staticmethod
    def _match(rows: Any, declared: DeclaredColumns) -> Any:
        if hasattr(rows, "policy_batches"):
            parts = {policy: declared.match_steps(as_flat(part)) for policy, part in rows.policy_batches.items()}
            return MultiAgentBatch(parts, rows.env_steps())
        return declared.match_steps(as_flat(rows))

    def hold_insert(self, prepared: Any) -> Hold | None:
        """Return None: inserts are never blocked, because new steps overwrite the oldest steps of a ring."""
        return None

    def insert(self, prepared: Any, writer: str) -> Any:
        """Insert steps as `ReplayBuffer.extend` does; return their slots, shape (n,)."""
        steps, count, priorities, unit = prepared
        self.buffer._merge_action_unit(unit)
        slots = add_steps(self.buffer, dict(steps), count, self._rings_of(steps, count, writer))
        if priorities is not None:
            self.buffer.update_weight(slots, priorities if priorities.size == count else priorities.reshape(())[()])
        if self.left is not None:
            self.left.renew(slots)
        return slots

    def _rings_of(self, steps: Mapping[str, Any], count: int, writer: str) -> npt.NDArray[np.intp] | None:
        """Return the ring of each row by writer and environment; None if the buffer selects the rings."""
        if self._rings == 1 or not writer:
            return None
        environments = env_ids(steps, count)
        if environments is None:
            environments = np.zeros(count, np.int64)
        numbers, positions = np.unique(environments, return_inverse=True)
        rings = [self._ring_of((writer, int(environment))) for environment in numbers]
        return np.array(rings, _INTP)[positions.reshape(-1)]

    def _ring_of(self, stream: Stream) -> int:
        """Return the ring of a stream: its current ring, else a free ring, else the least recently written ring."""
        ring = self._streams.pop(stream, None)
        if ring is None:
            if len(self._streams) < self._rings:
                free = set(range(self._rings)).difference(self._streams.values())
                ring = stream[1] if stream[1] in free else min(free)
            else:
                ring = self._streams.popitem(last=False)[1]
        self._streams[stream] = ring
        return ring

    # Sampling

    def request(self, batch_size: int, mode: Any, options: Mapping[str, Any], seed: int | None) -> Request:
        """Validate a request for steps, sequences or episodes.

        Options are `beta` for a prioritized table; `n_step` and `gamma` for steps; `length`, `burn_in`, `padded` and
        `per_sequence` for sequences; `unfinished` for episodes.

        Raises ArgumentError if an option is unknown or out of range, or the mode is incompatible with
        `max_times_sampled`. Raises PriorityError if `beta` is negative or not a number.
        """
        defaults: dict[str, Any] = {
            "steps": self._n_step,
            "sequences": {"length": None, "burn_in": 0, "padded": True, "per_sequence": ()},
            "episodes": {"unfinished": False},
        }[mode]
        prioritized = {"beta": None} if self._prioritized is not None else {}
        merged = take_options(options, {**defaults, **prioritized}, f"samples of {mode}")
        if mode == "steps":
            self._check_n_step(merged)
        if mode == "sequences" and whole("burn_in", merged["burn_in"]) >= whole("length", merged["length"], 1):
            raise ArgumentError(f"burn_in must be less than length, {merged['length']}, got {merged['burn_in']}")
        if merged.get("beta") is not None:
            exponent("beta", merged["beta"])
        if self.max_times:
            if mode == "episodes" or not merged.get("padded", True):
                actual = "'episodes'" if mode == "episodes" else "unpadded 'sequences'"
                raise ArgumentError(
                    f"mode must be 'steps' or padded 'sequences' for a table with max_times_sampled, got {actual}; "
                    "omit max_times_sampled to sample episodes or unpadded sequences"
                )
            if batch_size > self.capacity * self.max_times:
                raise ArgumentError(
                    f"batch_size must be at most {self.capacity * self.max_times}, the draws of a full table, got "
                    f"{batch_size}"
                )
        return Request(batch_size, mode, merged, seed)

    def hold_sample(self, request: Request) -> Hold | None:
        """Return why a request must wait for more draws; None if enough draws remain."""
        if self.left is None or self.left.total >= request.batch_size:
            return None
        return Hold(f"{request.batch_size} steps are requested, and {self.left.total} may be sampled", needs_items=True)

    def draw(self, request: Request, pause: Pause) -> tuple[Any, int]:
        """Draw a sample as the buffer does, but without exhausted steps.

        Raises CapacityError if the sample would exceed `max_nbytes` of the request; no rows are gathered.
        """
        table = self.buffer._table
        table.max_gather_nbytes = request.max_nbytes
        try:
            if request.seed is None and request.options.get("beta") is None:
                return self._draw(request)
            with self._drawing(request):
                return self._draw(request)
        finally:
            table.max_gather_nbytes = None

    def _draw(self, request: Request) -> tuple[Sample, int]:
        if request.mode == "episodes":
            return self._draw_episodes(request)
        if self.left is not None:
            return self._draw_counted(request)
        if request.mode == "sequences":
            options = {name: request.options[name] for name in ("length", "burn_in", "padded", "per_sequence")}
            batch, indices = self.buffer.sample_sequences(request.batch_size, **options)
            return self._sequences(batch, indices)
        n_step, gamma = request.options["n_step"], request.options["gamma"]
        batch, slots = self.buffer.sample(request.batch_size, n_step=n_step, gamma=gamma)
        return self._sample(batch, slots, slots), len(slots)

    @contextmanager
    def _drawing(self, request: Request) -> Iterator[None]:
        """Apply the seed and `beta` of a request to the buffer within the `with` block."""
        buffer, sampler = self.buffer, self._prioritized
        rng, beta = buffer._rng, None if sampler is None else sampler.beta
        try:
            if request.seed is not None:
                buffer._rng = np.random.default_rng(request.seed)
            if sampler is not None and request.options["beta"] is not None:
                sampler.beta = float(request.options["beta"])
            yield
        finally:
            buffer._rng = rng
            if sampler is not None and beta is not None:
                sampler.beta = beta

    def _draw_episodes(self, request: Request) -> tuple[Sample, int]:
        buffer = self.buffer
        table, unfinished = buffer._table, request.options["unfinished"]
        slots, ends = draw_episodes(table, None, request.batch_size, buffer._rng, unfinished=unfinished)
        return self._sample(buffer._rows(slots), slots, slots, np.diff(ends)), len(slots)

    def _draw_counted(self, request: Request) -> tuple[Sample, int]:
        buffer, left = self.buffer, self.left
        assert left is not None
        with left.draw(buffer, request.batch_size) as slots:
            if request.mode == "sequences":
                options = [request.options[name] for name in ("length", "burn_in", "per_sequence")]
                return self._sequences(*buffer._sequences(slots, *options))
            rows = buffer._rows(slots)
            if request.options["n_step"] is not None:
                rows.__dict__.update(buffer._nstep_columns(slots, request.options["n_step"], request.options["gamma"]))
            return self._sample(rows, slots, slots), len(slots)

    def _sequences(self, batch: Any, indices: npt.NDArray[np.intp]) -> tuple[Sample, int]:
        starts = indices[np.arange(len(indices)), batch.burn_in.sum(1)]
        return self._sample(batch, indices, starts), int(np.count_nonzero(batch.mask))

    def _sample(self, batch: Any, indices: Any, slots: Any, lengths: Any = None) -> Sample:
        """Create a sample of rows; `slots` determine the generations if the table does not use priorities."""
        columns = batch.__dict__
        if names.GENERATION in columns and self._prioritized is not None:
            return Sample(batch, indices, columns[names.GENERATION], columns[names.WEIGHT], lengths)
        return Sample(batch, indices, self.buffer._table.rings.generation(slots), None, lengths)

    def finish(self, selection: Any) -> Sample:
        """Return the sample unchanged; `draw` has already gathered its rows under the lock."""
        sample: Sample = selection
        return sample

    # Changing

    def update_weight(self, indices: Any, weights: Any, generations: Any) -> int:
        """Set new priorities of steps; return the number of steps that still exist.

        Raises PriorityError if the table is uniform, or a priority is invalid. Raises SampleBatchError in the same
        cases as `PrioritizedReplayBuffer.update_weight`.
        """
        buffer: Any = self.buffer
        if self._prioritized is None:
            raise PriorityError("the table must be of kind 'prioritized' to update priorities, got 'uniform'")
        slots = np.ascontiguousarray(slots_of(buffer, indices)).reshape(-1)
        is_stored = np.ones(len(slots), np.bool_)
        if generations is not None:
            rings = buffer._table.rings
            row_generations = np.asarray(generations).reshape(-1)
            is_stored = rings.holds(slots) & (
                rings.generation(slots) == row_generations if len(row_generations) == len(slots) else True
            )
        spent = np.zeros(len(slots), np.bool_) if self.left is None else self.left.spent(slots)
        if spent.any():
            # Exhausted steps retain the weight 0.
            slots, is_stored = slots[~spent], is_stored[~spent]
            weights = np.broadcast_to(np.asarray(weights), spent.shape)[~spent]
            generations = None if generations is None else np.asarray(generations).reshape(-1)[~spent]
        buffer.update_weight(slots, weights, generation=generations)
        return int(np.count_nonzero(is_stored))

    def set_max_times(self, times: int) -> None:
        """Change how often each step may be sampled; draws made while there was no limit are not counted.

        Raises ArgumentError if `times` is positive and the buffer has `sample_avail`.
        """
        self._check_max_times(times)
        if not times and self.left is not None:
            self.left.lift(self.buffer)
            self.left = None
        elif times and self.left is None:
            self.left = DrawsLeft(self.capacity, times)
            self.left.renew(self.buffer._table.rings.stored_slots())
        elif self.left is not None:
            self.left.set_max_draws(self.buffer, times)
        self.max_times = times

    def _check_max_times(self, times: int) -> None:
        if times and self.buffer.options["sample_avail"]:
            raise ArgumentError(
                "max_times_sampled must be 0 for a table with sample_avail, which never samples some steps, got "
                f"{times}"
            )

    def reset(self) -> None:
        """Remove all steps."""
        self.buffer.reset()
        self._streams.clear()
        if self.left is not None:
            self.left = DrawsLeft(self.capacity, self.max_times)

    @property
    def weight(self) -> float:
        """Sum of all priorities to the power of alpha; the number of steps if the table is uniform."""
        sampler = self._prioritized
        return float(len(self)) if sampler is None else sampler.tree.total

    @property
    def nbytes(self) -> int:
        """Size of all columns in bytes."""
        return self.buffer.nbytes

    # Checkpoints

    def streams(self) -> list[list[Any]]:
        """Return the writer, the environment and the ring of each stream, the least recently written stream first."""
        return [[writer, environment, ring] for (writer, environment), ring in self._streams.items()]

    def _read_streams(self, streams: Any) -> OrderedDict[Stream, int]:
        """Read the assignment of rings to streams from the result of `streams`.

        Raises FormatError if a ring does not exist or is assigned to several streams.
        """
        rings_of_streams = OrderedDict(
            ((str(writer), int(environment)), int(ring)) for writer, environment, ring in streams
        )
        rings = set(rings_of_streams.values())
        if len(rings) < len(rings_of_streams) or not rings <= set(range(self._rings)):
            raise FormatError(
                f"streams must have different rings from 0 to {self._rings - 1}, got {list(rings_of_streams.values())}"
            )
        return rings_of_streams

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer, the streams and the remaining draws of each step."""
        left = None if self.left is None else self.left.counts.copy()
        return {"buffer": self.buffer.state_dict(), "streams": self.streams(), "left": left}

    def freeze(self) -> dict[str, Any]:
        """Return the state with the buffer as a `LiveBuffer`; the caller must close the `LiveBuffer`."""
        left = None if self.left is None else self.left.counts.copy()
        return {"buffer": LiveBuffer(self.buffer), "streams": self.streams(), "left": left}

    def load_state_dict(self, state: Mapping[str, Any], max_times: int) -> None:
        """Restore a state whose `buffer` entry is a buffer or a buffer's state; an error leaves the items unchanged."""
        self._check_max_times(max_times)
        streams, counts = self._read_streams(state["streams"]), state["left"]
        left = DrawsLeft(self.capacity, max_times) if max_times else None
        if left is not None and counts is not None:
            left.load(np.asarray(counts))
        self._load_buffer(state["buffer"])
        if left is not None and counts is None:
            left.renew(self.buffer._table.rings.stored_slots())
        self._streams, self.left, self.max_times = streams, left, max_times

    def _load_buffer(self, buffer: Any) -> None:
        if isinstance(buffer, ReplayBuffer):
            self._check_stored(buffer)
            self._adopt(buffer)
            return
        previous_state = None if self.declared is None else self.buffer.state_dict()
        self.buffer.load_state_dict(buffer)
        try:
            self._check_stored(self.buffer)
        except ColumnMismatchError:
            if previous_state is not None:
                self.buffer.load_state_dict(previous_state)
            raise

    def _check_stored(self, buffer: ReplayBuffer) -> None:
        """Validate the columns of a buffer against the declared columns, using a stored step."""
        slots = buffer._table.rings.stored_slots()[:1]
        if self.declared is not None and len(slots):
            row = flatten_rows(take_rows(buffer._table.columns.tree, slots), "rllib")
            self.declared.check_stored(row, last_frames=buffer.options["save_only_last_obs"])

    def _adopt(self, buffer: ReplayBuffer) -> None:
        """Replace the buffer with another buffer that has the same class, ring sizes and options."""
        current = self.buffer
        edges, current_edges = buffer.subbuffer_edges.tolist(), current.subbuffer_edges.tolist()
        is_same_layout = type(buffer) is type(current) and edges == current_edges
        if not is_same_layout or plain(buffer.options) != plain(current.options):
            raise ColumnMismatchError(
                f"the buffer must have the class, ring sizes and options of the table's buffer, {current.options} with "
                f"rings {current_edges}, got {buffer.options} with rings {edges}"
            )
        buffer._table.lock = self.lock
        self.buffer = buffer
