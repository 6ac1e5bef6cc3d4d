"""Writers and consumers of a table of rows in processes of their own, which tests kill."""

from __future__ import annotations

import numpy as np

from samplebatch.service import RowClient


def write(uri: str, number: int, path: str) -> None:
    """Put rows in two parts of columns; log each key that the service has acknowledged."""
    with RowClient(uri, "rows") as rows, open(path, "ab", 0) as log:
        for count in range(1 << 30):
            keys = number * 1_000_000 + 4 * count + np.arange(4)
            rows.put(keys, {"ids": [np.arange(key % 7) for key in keys.tolist()], "text": list(map(str, keys))})
            rows.put(keys, {"reward": keys * 0.5})
            log.write(keys.tobytes())


def consume(uri: str, _: int, path: str) -> None:
    """Take rows, verify their columns and log each taken key."""
    with RowClient(uri, "rows") as rows, open(path, "ab", 0) as log:
        while True:
            batch = rows.take(16, columns=["ids", "text", "reward"], at_least=1)
            keys = batch["key"]
            assert batch["text"].tolist() == list(map(str, keys))
            assert (batch["ids"].lengths == keys % 7).all()
            assert (batch["reward"] == keys * 0.5).all()
            log.write(keys.tobytes())
