"""`tokens.*`: 512 token rollouts, compared with TensorDict (jagged), torch (padded), Awkward Array and Python."""

from __future__ import annotations

import heapq
import itertools
import pickle
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np

from benchmarks.harness import Row, Way, row
from benchmarks.peers import ray_alone

ROWS_OF_BATCH, LONGEST, PARTS, RANKS, BUDGET = 512, 8192, 16, 8, 8192
FLOATS = ("old_logp", "ref_logp", "rewards")
NAMES = ("ids", *FLOATS, "mask")


@cache
def lengths() -> Any:
    """Draw rollout lengths from a log-normal distribution: most are short, and a few have the maximum length."""
    values = np.random.default_rng(0).lognormal(6.95, 0.95, ROWS_OF_BATCH).astype(int)
    return np.clip(values, 8, LONGEST)


@cache
def lists() -> dict[str, Any]:
    """Create columns as lists of arrays; number columns contain no zeros, so that zeros are padding."""
    rng = np.random.default_rng(1)
    columns: dict[str, Any] = {"ids": [rng.integers(1, 32_000, n) for n in lengths()]}
    for name in FLOATS:
        columns[name] = [rng.random(n, np.float32) + np.float32(0.5) for n in lengths()]
    columns["mask"] = [rng.random(n) < 0.7 for n in lengths()]
    return columns


def order() -> Any:
    return np.random.default_rng(2).permutation(ROWS_OF_BATCH)


def flat(result: Any) -> Any:
    """Return the values of a result's columns without padding (zeros), or the moments of an array."""
    if isinstance(result, np.ndarray):
        # Sums of a few thousand values have different last digits in float32 and float64.
        numbers = result.astype(np.float64)
        return {"": np.round([numbers.mean() + 1 / 7, numbers.std() + 1 / 7], 2)}
    columns = {}
    for name in [key for key in result.keys() if key != "mask"]:  # noqa: SIM118 - a TensorDict iterates over rows
        values = result[name]
        if hasattr(values, "elements"):
            values = values.flat
        elif getattr(values, "is_nested", False):
            values = values.values()
        elif hasattr(getattr(values, "layout", None), "to_packed"):
            values = values.layout.to_packed()
            values = getattr(values, "content", values).data
        values = np.asarray(values)
        columns[name] = np.round(values[values != 0].astype(np.float64), 2)
    return columns


# Data of each contestant


def our_batch(lib: Any, data: Any) -> Any:
    return lib.SampleBatch(data)


def jagged(lib: Any, data: Any) -> Any:
    torch = lib.torch
    counts = torch.tensor([len(values) for values in next(iter(data.values()))])
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    columns = {
        name: torch.nested.nested_tensor_from_jagged(torch.cat([torch.from_numpy(a) for a in values]), bounds)
        for name, values in data.items()
    }
    return lib.TensorDict(columns, batch_size=[len(counts)])


def padded(lib: Any, data: Any) -> Any:
    pad = lib.torch.nn.utils.rnn.pad_sequence
    return {name: pad([lib.torch.from_numpy(a) for a in values], batch_first=True) for name, values in data.items()}


def bare_flat(_: Any, data: Any) -> Any:
    return {name: np.concatenate(values) for name, values in data.items()}


def awkward(lib: Any, data: Any) -> Any:
    counts = np.fromiter(map(len, next(iter(data.values()))), np.int64)
    return {name: lib.ak.unflatten(np.concatenate(values), counts) for name, values in data.items()}


def starts() -> Any:
    return np.concatenate([[0], np.cumsum(lengths())])


BUILD = {
    "ours": Way(lambda lib, data: partial(our_batch, lib, data)),
    "tensordict": Way(lambda lib, data: partial(jagged, lib, data)),
    "torch padded": Way(lambda lib, data: partial(padded, lib, data)),
    "awkward": Way(lambda lib, data: partial(awkward, lib, data)),
    "bare": Way(lambda lib, data: partial(bare_flat, lib, data)),
}


# Reordering, concatenating, padding


def take_jagged(lib: Any, data: Any) -> Any:
    inputs, rows = jagged(lib, data), order().tolist()

    def call() -> Any:
        columns = {}
        for name in NAMES:
            parts = inputs[name].unbind()
            columns[name] = lib.torch.nested.as_nested_tensor([parts[i] for i in rows], layout=lib.torch.jagged)
        return lib.TensorDict(columns, batch_size=inputs.batch_size)

    return call


def take_padded(lib: Any, data: Any) -> Any:
    columns, rows = padded(lib, data), lib.torch.from_numpy(order())
    return lambda: {name: values[rows] for name, values in columns.items()}


def take_awkward(lib: Any, data: Any) -> Any:
    columns, rows, ak = awkward(lib, data), order(), lib.ak
    return lambda: {name: ak.to_packed(values[rows]) for name, values in columns.items()}


def take_bare(_: Any, data: Any) -> Any:
    columns, rows, edges = bare_flat(None, data), order().tolist(), starts().tolist()
    out = {name: np.empty_like(values) for name, values in columns.items()}

    def call() -> Any:
        for name, values in columns.items():
            np.concatenate([values[edges[i] : edges[i + 1]] for i in rows], out=out[name])
        return out

    return call


def in_parts(data: Any) -> list[dict[str, Any]]:
    size = ROWS_OF_BATCH // PARTS
    return [{name: values[i * size : (i + 1) * size] for name, values in data.items()} for i in range(PARTS)]


def concat_ours(lib: Any, data: Any) -> Any:
    return partial(lib.concat_samples, [our_batch(lib, part) for part in in_parts(data)])


def concat_jagged(lib: Any, data: Any) -> Any:
    parts, torch = [jagged(lib, part) for part in in_parts(data)], lib.torch

    def call() -> Any:
        columns = {}
        for name in NAMES:
            values = torch.cat([part[name].values() for part in parts])
            counts = torch.cat([part[name].offsets().diff() for part in parts])
            bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            columns[name] = torch.nested.nested_tensor_from_jagged(values, bounds)
        return lib.TensorDict(columns, batch_size=[ROWS_OF_BATCH])

    return call


def concat_padded(lib: Any, data: Any) -> Any:
    parts, torch = [padded(lib, part) for part in in_parts(data)], lib.torch
    width = max(part["ids"].shape[1] for part in parts)

    def call() -> Any:
        pad = torch.nn.functional.pad
        return {n: torch.cat([pad(part[n], (0, width - part[n].shape[1])) for part in parts]) for n in NAMES}

    return call


def concat_awkward(lib: Any, data: Any) -> Any:
    parts, ak = [awkward(lib, part) for part in in_parts(data)], lib.ak
    return lambda: {name: ak.concatenate([part[name] for part in parts]) for name in NAMES}


def concat_bare(_: Any, data: Any) -> Any:
    parts = [bare_flat(None, part) for part in in_parts(data)]
    out = {name: np.empty_like(values) for name, values in bare_flat(None, data).items()}

    def call() -> Any:
        for name, values in out.items():
            np.concatenate([part[name] for part in parts], out=values)
        return out

    return call


def pad_ours(lib: Any, data: Any) -> Any:
    columns = our_batch(lib, data)
    return lambda: {name: columns[name].pad() for name in NAMES}


def pad_jagged(lib: Any, data: Any) -> Any:
    columns = jagged(lib, data)
    # torch has no kernel for booleans.
    numbers = {name: columns[name].byte() if name == "mask" else columns[name] for name in NAMES}

    def call() -> Any:
        return {name: lib.torch.nested.to_padded_tensor(values, 0) for name, values in numbers.items()}

    return call


def pad_awkward(lib: Any, data: Any) -> Any:
    columns, ak, width = awkward(lib, data), lib.ak, int(lengths().max())

    def call() -> Any:
        return {name: ak.to_numpy(ak.fill_none(ak.pad_none(columns[name], width, clip=True), 0)) for name in NAMES}

    return call


def pad_bare(_: Any, data: Any) -> Any:
    width = int(lengths().max())
    out = {name: np.ones((ROWS_OF_BATCH, width), values[0].dtype) for name, values in data.items()}

    def call() -> Any:
        for name, target in out.items():
            target.fill(0)
            for target_row, values in zip(target, data[name], strict=True):
                target_row[: len(values)] = values
        return out

    return call


def round_trip(columns: Any) -> Any:
    return pickle.loads(pickle.dumps(columns, 5))


def by_ray(make: Callable[[Any, Any], Any]) -> Way:
    """Declare a round trip of the result of `make` through Ray's object store."""

    def setup(lib: Any, data: Any) -> Any:
        columns, ray = make(lib, data), ray_alone()
        return lambda: ray.get(ray.put(columns))

    return Way(setup)


# Masked means and advantages


def mean_ours(lib: Any, data: Any) -> Any:
    columns = our_batch(lib, data)
    return lambda: columns["old_logp"].mean(mask=columns["mask"])


def mean_jagged(lib: Any, data: Any) -> Any:
    columns = jagged(lib, data)
    logp, mask = columns["old_logp"], columns["mask"].float()
    return lambda: ((logp * mask).sum(1) / mask.sum(1)).numpy()


def mean_awkward(lib: Any, data: Any) -> Any:
    columns, ak = awkward(lib, data), lib.ak
    return lambda: ak.to_numpy(ak.mean(columns["old_logp"], axis=1, weight=columns["mask"]))


def mean_padded(lib: Any, data: Any) -> Any:
    columns = padded(lib, data)
    return lambda: ((columns["old_logp"] * columns["mask"]).sum(1) / columns["mask"].sum(1)).numpy()


def mean_bare(_: Any, data: Any) -> Any:
    columns, first = bare_flat(None, data), starts()[:-1]

    def call() -> Any:
        sums = np.add.reduceat(columns["old_logp"] * columns["mask"], first)
        return sums / np.add.reduceat(columns["mask"], first, dtype=np.int64)

    return call


def gae_ours(lib: Any, data: Any) -> Any:
    from samplebatch.returns import gae

    columns = our_batch(lib, data)
    return lambda: gae(columns["rewards"], values=columns["old_logp"], gamma=0.99, gae_lambda=0.95)[1].flat


def gae_padded(lib: Any, data: Any) -> Any:
    columns, torch = padded(lib, data), lib.torch
    rewards, values = columns["rewards"].double(), columns["old_logp"].double()
    is_step = torch.arange(rewards.shape[1]) < torch.from_numpy(lengths())[:, None]

    def call() -> Any:
        advantage, next_values, advantages = (
            torch.zeros(ROWS_OF_BATCH).double(),
            torch.zeros(ROWS_OF_BATCH).double(),
            [],
        )
        for t in range(rewards.shape[1] - 1, -1, -1):
            delta = rewards[:, t] + 0.99 * next_values - values[:, t]
            advantage = torch.where(is_step[:, t], delta + 0.99 * 0.95 * advantage, 0.0)
            next_values = values[:, t]
            advantages.append(advantage)
        return torch.stack(advantages[::-1], 1)[is_step].numpy()

    return call


# Packing, balancing, groups


def pack_python(_: Any, data: Any) -> Any:
    counts, edges = lengths().tolist(), starts().tolist()
    columns = bare_flat(None, data)

    def call() -> Any:
        bins: list[list[int]] = []
        room: list[int] = []
        for i in sorted(range(len(counts)), key=lambda i: -counts[i]):
            for index, free in enumerate(room):
                if free >= counts[i]:
                    bins[index].append(i)
                    room[index] -= counts[i]
                    break
            else:
                bins.append([i])
                room.append(BUDGET - counts[i])
        packed: dict[str, list[Any]] = {name: [] for name in (*NAMES, "position_ids")}
        for values in map(sorted, bins):
            for name in NAMES:
                packed[name].append(np.concatenate([columns[name][edges[i] : edges[i + 1]] for i in values]))
            packed["position_ids"].append(np.concatenate([np.arange(counts[i]) for i in values]))
        return packed["ids"]

    return call


def pack_ours(lib: Any, data: Any) -> Any:
    columns = our_batch(lib, data)
    return lambda: list(columns.pack(BUDGET).batch["ids"])


def balance_python(_: Any, __: Any) -> Any:
    """Return Karmarkar and Karp's largest differencing method in Python, as in training frameworks."""
    counts = lengths().tolist()

    def call() -> Any:
        heap: list[Any] = []
        for i, count in enumerate(counts):
            sets = [(count, [i]), *((0, []) for _ in range(RANKS - 1))]
            heapq.heappush(heap, (-count, i, sets))
        serial = len(counts)
        while len(heap) > 1:
            first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
            merged = [(a + b, [*rows_a, *rows_b]) for (a, rows_a), (b, rows_b) in zip(first, second[::-1], strict=True)]
            merged.sort(key=lambda subset: -subset[0])
            heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
            serial += 1
        return [values for _, values in heap[0][2]]

    return call


def balance_ours(lib: Any, _: Any) -> Any:
    columns = lib.SampleBatch(tokens=lengths())
    return lambda: columns.balance(RANKS, "tokens").rows


def scores() -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    return np.repeat([f"prompt-{i}" for i in range(ROWS_OF_BATCH // 8)], 8).astype(object), rng.random(ROWS_OF_BATCH)


def group_ours(lib: Any, _: Any) -> Any:
    uid, rewards = scores()
    columns = lib.SampleBatch(uid=uid.tolist(), score=rewards)
    return lambda: columns.group_by("uid").normalize("score")


def group_python(_: Any, __: Any) -> Any:
    uid, rewards = scores()

    def call() -> Any:
        members: dict[str, list[float]] = defaultdict(list)
        for key, reward in zip(uid, rewards, strict=True):
            members[key].append(reward)
        moments = {key: (np.mean(values), np.std(values)) for key, values in members.items()}
        return np.array([(r - moments[k][0]) / (moments[k][1] + 1e-6) for k, r in zip(uid, rewards, strict=True)])

    return call


COLUMNS = (*NAMES, "uid")


def six_columns(lib: Any, data: Any) -> Any:
    """Create the rollouts with an additional column of integers."""
    batch = our_batch(lib, data)
    return batch.assign(uid=np.arange(1, ROWS_OF_BATCH + 1))


def without_keys(result: Any) -> Any:
    """Return the values of the written columns, without the keys."""
    return flat({name: result[name] for name in COLUMNS})


class RowsOfService:
    """Call that writes and reads all rows, through a replay service on the same machine."""

    def __init__(self, lib: Any, data: Any) -> None:
        from samplebatch.service import ReplayServer, RowClient, RowTable

        self._batch, self._calls = six_columns(lib, data), 0
        self._server = ReplayServer([RowTable("rows", 2 * ROWS_OF_BATCH)]).start()
        self._rows = RowClient(self._server.uri, "rows")

    def __call__(self) -> Any:
        self._calls += 1
        self._rows.put(np.arange(ROWS_OF_BATCH) + self._calls * ROWS_OF_BATCH, self._batch)
        return self._rows.take(ROWS_OF_BATCH, columns=COLUMNS)

    def __del__(self) -> None:
        with suppress(Exception):
            self._rows.close()
            self._server.close()


class RowsOfFlight:
    """Call that writes and reads the same bytes with plain Arrow Flight."""

    def __init__(self, data: Any) -> None:
        from pyarrow import flight

        import samplebatch

        class Server(flight.FlightServerBase):
            """Flight server that stores one table."""

            def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
                self.table = reader.read_all()

            def do_get(self, context: Any, ticket: Any) -> Any:
                return flight.RecordBatchStream(self.table)

        self._table = six_columns(samplebatch, data).to_arrow()
        self._batch, self._flight = samplebatch.SampleBatch, flight
        self._server = Server("grpc://127.0.0.1:0")
        self._client = flight.connect(f"grpc://127.0.0.1:{self._server.port}")

    def __call__(self) -> Any:
        writer, _ = self._client.do_put(self._flight.FlightDescriptor.for_path("rows"), self._table.schema)
        writer.write_table(self._table)
        writer.close()
        table = self._client.do_get(self._flight.Ticket(b"rows")).read_all()
        return self._batch.from_arrow(table)

    def __del__(self) -> None:
        with suppress(Exception):
            self._client.close()
            self._server.shutdown()


def through_queue(lib: Any, data: Any) -> Any:
    """Put all rows as jagged tensors into a TransferQueue with default storage, then get and clear them."""
    queue, fields, calls = lib.queue, jagged(lib, data), itertools.count()
    fields["uid"] = lib.torch.arange(1, ROWS_OF_BATCH + 1)

    def call() -> Any:
        keys = [f"{next(calls)}-{row}" for row in range(ROWS_OF_BATCH)]
        queue.kv_batch_put(keys=keys, partition_id="rows", fields=fields)
        rows = queue.kv_batch_get(keys=keys, partition_id="rows")
        queue.kv_clear(keys=keys, partition_id="rows")
        return rows

    return call


def tokens(name: str, *, view: Any = flat, traffic: bool = True, **ways: Way) -> Row:
    """Declare a row of operations on the rollouts."""
    row_ways = {key.replace("_", " "): way for key, way in ways.items()}
    return row(f"tokens.{name}", lists, traffic=traffic, view=view, bar=2.5, **row_ways)


ROWS = [
    row("tokens.build", lists, traffic=True, view=flat, bar=2.5, **BUILD),
    tokens(
        "take",
        ours=Way(lambda lib, data: partial(our_batch(lib, data).take, order())),
        tensordict=Way(take_jagged),
        torch_padded=Way(take_padded),
        awkward=Way(take_awkward),
        bare=Way(take_bare),
    ),
    tokens(
        "concat16",
        ours=Way(concat_ours),
        tensordict=Way(concat_jagged),
        torch_padded=Way(concat_padded),
        awkward=Way(concat_awkward),
        bare=Way(concat_bare),
    ),
    tokens(
        "pad",
        ours=Way(pad_ours),
        tensordict=Way(pad_jagged),
        torch_padded=Way(lambda lib, data: partial(padded, lib, data)),
        awkward=Way(pad_awkward),
        bare=Way(pad_bare),
    ),
    tokens(
        "pickle5",
        ours=Way(our_batch, round_trip),
        tensordict=Way(jagged, round_trip),
        torch_padded=Way(padded, round_trip),
        awkward=Way(awkward, round_trip),
        bare=Way(bare_flat, round_trip),
    ),
    tokens(
        "masked_mean",
        ours=Way(mean_ours),
        tensordict=Way(mean_jagged),
        torch_padded=Way(mean_padded),
        awkward=Way(mean_awkward),
        bare=Way(mean_bare),
    ),
    *(
        []
        if find_spec("ray") is None
        else [
            tokens(
                "ray_put_get",
                ours=by_ray(our_batch),
                tensordict=by_ray(jagged),
                torch_padded=by_ray(padded),
                bare=by_ray(bare_flat),
            )
        ]
    ),
    tokens(
        "service",
        view=without_keys,
        ours=Way(RowsOfService),
        bare=Way(lambda _, data: RowsOfFlight(data)),
        **({} if find_spec("transfer_queue") is None else {"transfer_queue": Way(through_queue, quick=False)}),
    ),
    tokens("gae", ours=Way(gae_ours), torch_padded=Way(gae_padded)),
    tokens("pack", view=None, ours=Way(pack_ours), python=Way(pack_python)),
    tokens("balance8", view=None, traffic=False, ours=Way(balance_ours), python=Way(balance_python)),
    tokens("group_normalize", traffic=False, ours=Way(group_ours), python=Way(group_python)),
]
