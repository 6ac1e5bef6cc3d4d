"""Copies and string representations of nested batches."""

from __future__ import annotations

import copy

import numpy as np

from samplebatch.batch.nested.batch import Batch
from tests.optional import torch


def test_copies() -> None:
    info = {"x": [1]}
    batch = Batch(a=np.zeros(3), t=torch.zeros(3), n=Batch(o=[info, None]))
    for converted in (batch.copy(), Batch(batch, copy=True), copy.deepcopy(batch)):
        assert isinstance(converted, Batch)
        assert converted == batch
        assert not np.shares_memory(converted.a, batch.a)
        assert converted.t.data_ptr() != batch.t.data_ptr()
        assert converted.n.o[0] is not info
    shallow = copy.copy(batch)
    assert shallow.a is batch.a
    assert shallow.n is not batch.n
    assert shallow.n.o is batch.n.o


def test_printing() -> None:
    class Steps(Batch):
        pass

    assert str(Batch()) == "Batch()"
    assert str(Steps(a=np.float32(2), r={})) == "Steps(\n    a: array(2., dtype=float32),\n    r: Batch(),\n)"
    assert "s: 'line\\nbreak'," in str(Batch(s="line\nbreak"))
    wide = str(Batch(n=Batch(o=np.arange(60))))
    assert wide.splitlines()[3] == " " * 21 + "17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33,"
