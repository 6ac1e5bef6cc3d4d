"""Random histories of a table of rows compared with a plain dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from samplebatch.errors import ArgumentError, LimitTimeoutError, RowIndexError, SampleBatchError
from samplebatch.service import Checkpoints, RowTable
from samplebatch.service.row_table import Selection

COLUMNS = ("a", "b", "ids")
CONSUMERS = ("critic", "trainer")
CAPACITY = 24
MAX_LAG = 3


class Model:
    """Reference implementation: a table of rows as a dict of dicts without indices."""

    def __init__(self, remover: str) -> None:
        self.remover = remover
        self.rows: dict[int, dict[str, int]] = {}
        self.takers: dict[int, set[str]] = {}
        self.former: dict[int, str] = {}
        self.version = -1

    def put(self, keys: list[int], columns: dict[str, list[int]], update: bool | None) -> type[SampleBatchError] | None:
        """Store columns, or return the error that the table must raise."""
        valid = [key in self.rows for key in keys]
        if update is None and any(key in self.former for key in keys):
            return RowIndexError
        if self.remover == "none" and len(self.rows) + valid.count(False) > CAPACITY and False in valid:
            return LimitTimeoutError
        if update is True and not all(valid):
            return RowIndexError
        if update is False and any(valid):
            return ArgumentError
        if any(name in self.rows.get(key, {}) for key in keys for name in columns):
            return ArgumentError
        for position, key in enumerate(keys):
            self.former.pop(key, None)
            self.takers.setdefault(key, set())
            self.rows.setdefault(key, {}).update({name: values[position] for name, values in columns.items()})
        self.version = max([self.version, *columns.get("version", [])])
        self.evict()
        return None

    def evict(self) -> None:
        """Remove rows that are too old, or exceed the capacity."""
        for key, row in list(self.rows.items()):
            if row.get("version", self.version) < self.version - MAX_LAG:
                self.remove(key, "evicted")
        while self.remover == "fifo" and len(self.rows) > CAPACITY:
            self.remove(next(iter(self.rows)), "evicted")

    def remove(self, key: int, how: str) -> None:
        del self.rows[key], self.takers[key]
        self.former[key] = how

    def complete(self, columns: list[str], consumer: str | None = None) -> list[int]:
        """Return the keys of complete rows that a consumer has not taken, oldest first."""
        return [
            key
            for key, row in self.rows.items()
            if row.keys() >= set(columns) and (consumer is None or consumer not in self.takers[key])
        ]

    def take(self, keys: list[int], consumer: str) -> None:
        """Mark rows as taken by a consumer."""
        for key in [key for key in keys if key in self.rows]:
            self.takers[key].add(consumer)
            if len(self.takers[key]) == len(CONSUMERS):
                self.remove(key, "taken")


def make_table(remover: str) -> RowTable:
    lag = {"version": "version", "max_lag": MAX_LAG}
    return RowTable("rows", CAPACITY, consumers=CONSUMERS, remover=remover, ragged={"ids": "int64"}, **lag)


def check_rows(batch, keys: list[int], columns: list[str], rows: dict[int, dict[str, int]]) -> None:
    """Compare a batch with rows of a model."""
    assert batch["key"].tolist() == keys
    for name in columns:
        values = batch[name].lengths if name == "ids" else batch[name]
        assert values.tolist() == [rows[key][name] for key in keys]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("remover", ["none", "fifo"])
def test_random_histories_match_a_dictionary(remover, seed, tmp_path):
    """Puts, takes, samples, evictions, checkpoints, abandoned requests and restarts leave the rows of the model."""
    rng, table, model = np.random.default_rng([seed, remover == "fifo"]), make_table(remover), Model(remover)
    handed: dict[str, set[int]] = {consumer: set() for consumer in CONSUMERS}
    created = 0
    with Checkpoints(tmp_path / "service") as checkpoints:
        for number in range(1, 400):
            columns = [name for name in COLUMNS if rng.random() < 0.5] or ["a"]
            consumer = CONSUMERS[rng.integers(2)]
            action = rng.choice(["put", "late", "take", "abandon", "sample", "get", "remove", "version", "restart"])
            if action in ("put", "late"):
                count = int(rng.integers(1, 6))
                keys = list(range(created, created + count))
                if action == "late" and created:
                    keys = rng.choice(created, min(count, created), replace=False).tolist()
                values = {name: rng.integers(0, 5, len(keys)) for name in columns}
                if rng.random() < 0.4:
                    values["version"] = max(model.version, 0) + rng.integers(0, 2, len(keys))
                update = (None, None, True, False)[rng.integers(4)]
                sent = {name: [[7] * n for n in part] if name == "ids" else part for name, part in values.items()}
                expected = model.put(keys, {name: part.tolist() for name, part in values.items()}, update)
                if expected is None:
                    table.put(keys, sent, update=update, timeout_s=0)
                    created = max(created, keys[-1] + 1) if action == "put" else created
                    for item in handed.values():
                        # A row that is created again is another row.
                        item -= set(keys) if update is False else set()
                else:
                    with pytest.raises(expected):
                        table.put(keys, sent, update=update, timeout_s=0)
            elif action in ("take", "abandon"):
                completed = model.complete(columns, consumer)
                count = int(rng.integers(1, 6))
                if len(completed) < count:
                    with pytest.raises(LimitTimeoutError):
                        table.take(count, columns=columns, consumer=consumer, timeout_s=0)
                    continue
                lease = table.lease(Selection.of(count, {"columns": columns}), consumer, reader="r", number=number)
                check_rows(lease.gather(), completed[:count], columns, model.rows)
                if action == "abandon":
                    # A client that was killed: the service returns its rows.
                    table.release(lease)
                    assert not table.settle("r", number)
                    continue
                assert table.commit(lease)
                assert not handed[consumer] & set(completed[:count]), "a row was handed twice"
                handed[consumer].update(completed[:count])
                model.take(completed[:count], consumer)
            elif action == "sample" and model.complete(columns):
                batch = table.sample(3, columns=columns, at_least=1, timeout_s=0)
                assert set(batch["key"].tolist()) <= set(model.complete(columns))
                check_rows(batch, batch["key"].tolist(), columns, model.rows)
            elif action == "get" and model.complete(columns):
                keys = rng.permutation(model.complete(columns)).tolist()
                check_rows(table.get(keys, columns=columns), keys, columns, model.rows)
            elif action == "remove" and model.rows and rng.random() < 0.3:
                key = int(rng.choice(list(model.rows)))
                assert table.remove([key, created + 1000]) == 1
                model.remove(key, "removed")
            elif action == "version" and rng.random() < 0.3:
                model.version = max(model.version, 0) + 1
                table.set_version(model.version)
                model.evict()
            elif action == "restart" and rng.random() < 0.3:
                checkpoints.write([table])
                table = make_table(remover)
                checkpoints.restore([table])
            assert len(table) == len(model.rows)
        assert table._removed_keys == model.former
        for consumer in CONSUMERS:
            for name in COLUMNS:
                completed = model.complete([name], consumer)
                if completed:
                    batch = table.take(len(completed), columns=[name], consumer=consumer, timeout_s=0)
                    check_rows(batch, completed, [name], model.rows)
                    model.take(completed, consumer)
    assert len(table) == len(model.rows)
