"""StepItems: the steps of a replay table, in one of the library's replay buffers."""

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
"""Rounds of drawing and refusing before all steps are looked at."""


class DrawsLeft:
    """The draws that are left of each slot of a buffer, for tables that limit how often a step is sampled.

    - `capacity`: slots of the buffer.
    - `most`: how often each step may be sampled.

    Its attributes:
    - `counts`: the draws that are left of each slot, 0 where there is no step; shape (capacity,).
    - `total`: their sum.
    """

    def __init__(self, capacity: int, most: int) -> None:
        self.counts = np.zeros(capacity, np.int64)
        self.most = most
        self.total = 0

    def renew(self, slots: Slots) -> None:
        """Note that new steps were written to slots."""
        slots = np.unique(slots)
        self.total += len(slots) * self.most - int(self.counts[slots].sum())
        self.counts[slots] = self.most

    def spent(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Return which slots have no draws left, shape (n,)."""
        is_spent: npt.NDArray[np.bool_] = self.counts[slots] == 0
        return is_spent

    @contextmanager
    def draw(self, buffer: ReplayBuffer, n: int) -> Iterator[Slots]:
        """Draw n slots one by one as a buffer does, then remove exhausted ones from the sampler.

        Gather rows within the block, where their priorities are unchanged. At least n draws must be left. An error
        within the block undoes the draw.
        """
        sampler = buffer._sampler if isinstance(buffer._sampler, Prioritized) else None
        drawn = np.zeros(0, np.intp)
        spent: list[Slots] = []
        weights: list[npt.NDArray[np.float64]] = []
        rounds = 0
        while len(drawn) < n:
            rounds += 1
            picked = self._pick(buffer, n - len(drawn), by_count=sampler is None and rounds > _ROUNDS)
            picked = picked[_ordinals(picked) < self.counts[picked]]
            np.subtract.at(self.counts, picked, 1)
            drawn = np.concatenate([drawn, picked])
            gone = np.unique(picked[self.counts[picked] == 0])
            if sampler is not None and len(gone):
                spent.append(gone)
                weights.append(sampler.tree.get(gone))
                sampler.on_remove(gone)
        self.total -= n
        if sampler is not None and spent:
            sampler.tree.set(np.concatenate(spent), np.concatenate(weights))
        try:
            yield drawn
        except BaseException:
            np.add.at(self.counts, drawn, 1)
            self.total += n
            raise
        if sampler is not None and spent:
            sampler.on_remove(np.concatenate(spent))

    def _pick(self, buffer: ReplayBuffer, n: int, *, by_count: bool) -> Slots:
        """Draw n slots, some of which may be exhausted; with `by_count`, none of the first draw is."""
        if by_count:
            left = np.flatnonzero(self.counts)
            return left[buffer._rng.integers(0, len(left), n)]
        return buffer._draw(n)

    def set_most(self, buffer: ReplayBuffer, most: int) -> None:
        """Change how often each step may be sampled; draws so far count."""
        slots = buffer._table.rings.stored_slots()
        revived = slots[self.counts[slots] == 0]
        self.counts[slots] = np.maximum(self.counts[slots] + most - self.most, 0)
        self.most, self.total = most, int(self.counts.sum())
        if isinstance(buffer._sampler, Prioritized):
            buffer._sampler.on_add(revived[self.counts[revived] > 0])
            buffer._sampler.on_remove(slots[self.counts[slots] == 0])

    def lift(self, buffer: ReplayBuffer) -> None:
        """Let spent steps be drawn again, with the largest priority so far."""
        slots = buffer._table.rings.stored_slots()
        if isinstance(buffer._sampler, Prioritized):
            buffer._sampler.on_add(slots[self.counts[slots] == 0])

    def load(self, counts: npt.NDArray[np.int64]) -> None:
        """Carry on from the counts of another.

        Raises FormatError if they are of other slots, or more than there may be.
        """
        if counts.shape != self.counts.shape or (counts < 0).any() or (counts > self.most).any():
            raise FormatError(
                f"the draws left must be from 0 to {self.most} for {len(self.counts)} slots, they are not"
            )
        self.counts = counts.astype(np.int64)
        self.total = int(counts.sum())


def _ordinals(values: Slots) -> Slots:
    """Return how often each value occurs before its position: [5, 2, 5, 5, 2] becomes [0, 0, 1, 2, 1]."""
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
"""A writer and the number of one of its environments."""


def step_options(kind: str) -> dict[str, Any]:
    """Return the options of tables of steps of a kind, with their defaults."""
    return {**_BUFFER, **(_PRIORITIZED if kind == "prioritized" else {}), **_N_STEP}


class StepItems(Items):
    """Steps of a replay table, for `ReplayTable`; each draw equals the draw of the buffer.

    - `kind`: `"uniform"` or `"prioritized"`.
    - `capacity`: how many steps there may be, rounded up so that all rings have as many.
    - `streams`: number of rings. Each environment of each writer has its own ring while there are enough; then it
      replaces the owner of the least recently written ring.
    - `max_times`: how often each step may be sampled; 0 for any number of times.
    - `seed`: of the buffer's generator.
    - `options`: options of the buffer, and the default `n_step` and `gamma` of samples.
    - `columns`: columns that steps must have; None if the first steps decide.

    Raises ArgumentError if an option is unknown, or not of its values; or if columns are declared by policy. Raises
    PriorityError if alpha or beta is negative or no number.
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
        """Accept only steps with these columns from now on.

        Raises ArgumentError if columns are by policy, or two have one name.
        """
        self.declared = None if columns is None else columns.for_steps()

    # Inserting

    def prepare(self, rows: Any, priorities: Any, key: Any) -> tuple[Any, int, int]:
        """Check a fragment of steps, and bring its columns under the names of buffers.

        Raises ArgumentError if there is a key. Raises CapacityError if there are more steps than a ring has slots.
        Raises PriorityError if there are priorities, and steps have none; if they are not one, or one for each step, or
        no finite numbers. Raises ColumnMismatchError if the table declares columns, and the steps have others; names
        one. Raises SampleBatchError as `ReplayBuffer.extend` does.
        """
        if key is not None:
            raise ArgumentError("steps have no keys; keys are for tables of kind 'key'")
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
                raise PriorityError("steps have priorities in tables of kind 'prioritized' only; leave them out")
            priorities = np.asarray(priorities)
            if priorities.dtype.kind not in "biuf":
                raise PriorityError(f"priorities must be numbers, got dtype {priorities.dtype}")
            if priorities.size not in (1, count):
                raise PriorityError(f"priorities must be one, or one for each of {count} steps, got {priorities.size}")
            if count:
                # Before any write: a rejected fragment leaves no steps in the table.
                sampler.sizes(priorities.astype(np.float64))
        return (steps, count, priorities, unit), count, count

    @staticmethod
    def _match(rows: Any, declared: DeclaredColumns) -> Any:
        if hasattr(rows, "policy_batches"):
            parts = {policy: declared.match_steps(as_flat(part)) for policy, part in rows.policy_batches.items()}
            return MultiAgentBatch(parts, rows.env_steps())
        return declared.match_steps(as_flat(rows))

    def hold_insert(self, ready: Any) -> Hold | None:
        """Hold nothing back: the oldest steps of a ring are written over."""
        return None

    def insert(self, ready: Any, writer: str) -> Any:
        """Insert steps as `ReplayBuffer.extend` does, and return their slots, shape (n,)."""
        steps, count, priorities, unit = ready
        self.buffer._merge_action_unit(unit)
        slots = add_steps(self.buffer, dict(steps), count, self._rings_of(steps, count, writer))
        if priorities is not None:
            self.buffer.update_weight(slots, priorities if priorities.size == count else priorities.reshape(())[()])
        if self.left is not None:
            self.left.renew(slots)
        return slots

    def _rings_of(self, steps: Mapping[str, Any], count: int, writer: str) -> npt.NDArray[np.intp] | None:
        """Find the ring of each row by writer and environment; None if the buffer decides."""
        if self._rings == 1 or not writer:
            return None
        environments = env_ids(steps, count)
        if environments is None:
            environments = np.zeros(count, np.int64)
        numbers, positions = np.unique(environments, return_inverse=True)
        rings = [self._ring_of((writer, int(environment))) for environment in numbers]
        return np.array(rings, _INTP)[positions.reshape(-1)]

    def _ring_of(self, stream: Stream) -> int:
        """Return the ring of a stream: its own, else a free one, else the least recently written one."""
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
        """Check a request for steps, sequences or episodes.

        Options are `beta`, of a prioritized table; of steps `n_step` and `gamma`; of sequences `length`, `burn_in` and
        `padded`; of episodes `unfinished`.

        Raises ArgumentError if an option is unknown or not of its values, or steps are counted and cannot be in that
        mode. Raises PriorityError if `beta` is negative or no number.
        """
        defaults: dict[str, Any] = {
            "steps": self._n_step,
            "sequences": {"length": None, "burn_in": 0, "padded": True},
            "episodes": {"unfinished": False},
        }[mode]
        prioritized = {"beta": None} if self._prioritized is not None else {}
        merged = take_options(options, {**defaults, **prioritized}, f"samples of {mode}")
        if mode == "steps":
            self._check_n_step(merged)
        if mode == "sequences" and whole("burn_in", merged["burn_in"]) >= whole("length", merged["length"], 1):
            raise ArgumentError(f"burn_in must leave a step of {merged['length']}, got {merged['burn_in']}")
        if merged.get("beta") is not None:
            exponent("beta", merged["beta"])
        if self.max_times:
            if mode == "episodes" or not merged.get("padded", True):
                raise ArgumentError(
                    "steps with max_times_sampled must be drawn as steps or padded sequences, which start with them; "
                    "leave out max_times_sampled to draw complete episodes, or sequences without padding"
                )
            if batch_size > self.capacity * self.max_times:
                raise ArgumentError(
                    f"batch_size must be at most {self.capacity * self.max_times} here, which a full table has, got "
                    f"{batch_size}"
                )
        return Request(batch_size, mode, merged, seed)

    def hold_sample(self, request: Request) -> Hold | None:
        """Hold a sample while too few steps may be drawn."""
        if self.left is None or self.left.total >= request.batch_size:
            return None
        return Hold(f"{request.batch_size} steps are asked for, and {self.left.total} may be sampled", needs_items=True)

    def draw(self, request: Request, pause: Pause) -> tuple[Any, int]:
        """Draw a sample as the buffer does; steps that were sampled often enough are not drawn.

        Raises CapacityError if the sample would have too many bytes; nothing is gathered then.
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
            options = {name: request.options[name] for name in ("length", "burn_in", "padded")}
            batch, indices = self.buffer.sample_sequences(request.batch_size, **options)
            return self._sequences(batch, indices)
        n_step, gamma = request.options["n_step"], request.options["gamma"]
        batch, slots = self.buffer.sample(request.batch_size, n_step=n_step, gamma=gamma)
        return self._sample(batch, slots, slots), len(slots)

    @contextmanager
    def _drawing(self, request: Request) -> Iterator[None]:
        """Use the seed and the exponent of a request for the buffer's draws."""
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
                sequences = buffer._sequences(slots, request.options["length"], request.options["burn_in"])
                return self._sequences(*sequences)
            rows = buffer._rows(slots)
            if request.options["n_step"] is not None:
                rows.__dict__.update(buffer._nstep_columns(slots, request.options["n_step"], request.options["gamma"]))
            return self._sample(rows, slots, slots), len(slots)

    def _sequences(self, batch: Any, indices: npt.NDArray[np.intp]) -> tuple[Sample, int]:
        starts = indices[np.arange(len(indices)), batch.burn_in.sum(1)]
        return self._sample(batch, indices, starts), int(np.count_nonzero(batch.mask))

    def _sample(self, batch: Any, indices: Any, slots: Any, lengths: Any = None) -> Sample:
        """Create a sample of rows; generations and weights are looked up by `slots`."""
        columns = batch.__dict__
        if names.GENERATION in columns and self._prioritized is not None:
            return Sample(batch, indices, columns[names.GENERATION], columns[names.WEIGHT], lengths)
        return Sample(batch, indices, self.buffer._table.rings.generation(slots), None, lengths)

    def finish(self, drawn: Any) -> Sample:
        """Return the sample; its rows were gathered while the lock was held."""
        sample: Sample = drawn
        return sample

    # Changing

    def update_weight(self, indices: Any, weights: Any, generations: Any) -> int:
        """Give steps new priorities as the buffer does, and return how many were there.

        Raises PriorityError if steps have no priorities; or as `PrioritizedReplayBuffer.update_weight` does. Raises
        SampleBatchError as that does.
        """
        buffer: Any = self.buffer
        if self._prioritized is None:
            raise PriorityError("steps have priorities in tables of kind 'prioritized' only; this one is 'uniform'")
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
            # Their weights are 0, so that they are not drawn.
            slots, is_stored = slots[~spent], is_stored[~spent]
            weights = np.broadcast_to(np.asarray(weights), spent.shape)[~spent]
            generations = None if generations is None else np.asarray(generations).reshape(-1)[~spent]
        buffer.update_weight(slots, weights, generation=generations)
        return int(np.count_nonzero(is_stored))

    def set_max_times(self, times: int) -> None:
        """Change how often each step may be sampled, counted from when there was such a limit.

        Raises ArgumentError if the buffer draws only steps with all frames of a stack.
        """
        if times and self.buffer.options["sample_avail"]:
            raise ArgumentError("max_times_sampled counts every step, and sample_avail draws only some; leave one out")
        if not times and self.left is not None:
            self.left.lift(self.buffer)
            self.left = None
        elif times and self.left is None:
            self.left = DrawsLeft(self.capacity, times)
            self.left.renew(self.buffer._table.rings.stored_slots())
        elif self.left is not None:
            self.left.set_most(self.buffer, times)
        self.max_times = times

    def reset(self) -> None:
        """Remove all steps."""
        self.buffer.reset()
        self._streams.clear()
        if self.left is not None:
            self.left = DrawsLeft(self.capacity, self.max_times)

    @property
    def weight(self) -> float:
        """The number of steps, or the sum of their priorities to the power of alpha."""
        sampler = self._prioritized
        return float(len(self)) if sampler is None else sampler.tree.total

    @property
    def nbytes(self) -> int:
        """Bytes of the slots of all columns."""
        return self.buffer.nbytes

    # Carrying on elsewhere

    def streams(self) -> list[list[Any]]:
        """List the writer, environment and ring of each stream, the one written to last at the end."""
        return [[writer, environment, ring] for (writer, environment), ring in self._streams.items()]

    def set_streams(self, streams: Any) -> None:
        """Restore the writers' rings that `streams` returned; raises FormatError if there are not as many rings."""
        rings_of_streams = OrderedDict(
            ((str(writer), int(environment)), int(ring)) for writer, environment, ring in streams
        )
        rings = set(rings_of_streams.values())
        if len(rings) < len(rings_of_streams) or not rings <= set(range(self._rings)):
            raise FormatError(f"the state must be of {self._rings} rings with a stream each, it is of others")
        self._streams = rings_of_streams

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the buffer, the streams, and the draws that are left of each step."""
        left = None if self.left is None else self.left.counts.copy()
        return {"buffer": self.buffer.state_dict(), "streams": self.streams(), "left": left}

    def freeze(self) -> dict[str, Any]:
        """Return the state with the buffer as a `LiveBuffer`, which must be closed."""
        left = None if self.left is None else self.left.counts.copy()
        return {"buffer": LiveBuffer(self.buffer), "streams": self.streams(), "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Carry on from a state, which may have the buffer itself."""
        buffer = state["buffer"]
        if isinstance(buffer, ReplayBuffer):
            self._check_stored(buffer)
            self._adopt(buffer)
        else:
            before = None if self.declared is None else self.buffer.state_dict()
            self.buffer.load_state_dict(buffer)
            try:
                self._check_stored(self.buffer)
            except ColumnMismatchError:
                if before is not None:
                    self.buffer.load_state_dict(before)
                raise
        self.set_streams(state["streams"])
        if self.left is not None and state["left"] is not None:
            self.left.load(np.asarray(state["left"]))

    def _check_stored(self, buffer: ReplayBuffer) -> None:
        """Check the columns of a buffer against the declared ones, by a stored step."""
        slots = buffer._table.rings.stored_slots()[:1]
        if self.declared is not None and len(slots):
            row = flatten_rows(take_rows(buffer._table.columns.tree, slots), "rllib")
            self.declared.check_stored(row, last_frames=buffer.options["save_only_last_obs"])

    def _adopt(self, buffer: ReplayBuffer) -> None:
        """Replace the buffer by another one of the same class, sizes and options."""
        current = self.buffer
        same = type(buffer) is type(current) and buffer.subbuffer_edges.tolist() == current.subbuffer_edges.tolist()
        if not same or plain(buffer.options) != plain(current.options):
            raise ColumnMismatchError("the buffer must be of the class, sizes and options of the table's, it is not")
        buffer._table.lock = self.lock
        self.buffer = buffer
