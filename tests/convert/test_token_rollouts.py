"""Token rollouts in the forms of verl, Hugging Face, TensorDict and plain dicts, and back."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest

from samplebatch import SampleBatch
from samplebatch.convert import (
    from_dicts,
    from_tensordict,
    from_token_dataset,
    from_verl,
    to_dicts,
    to_tensordict,
    to_token_dataset,
    to_verl,
)
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnNotFoundError, ColumnTypeError
from tests.optional import torch


class DataProto:
    """Subset of verl's class that the conversions use."""

    def __init__(self, batch, non_tensor_batch, meta_info):
        self.batch, self.non_tensor_batch, self.meta_info = batch, non_tensor_batch, meta_info

    @classmethod
    def from_dict(cls, tensors=None, non_tensors=None, meta_info=None):
        from tensordict import TensorDict

        rows = len(next(iter(tensors.values())))
        assert all(value.dtype == object for value in non_tensors.values())
        return cls(TensorDict(tensors, batch_size=[rows]), non_tensors, meta_info)


def rollouts():
    lengths = [(2, 3), (1, 0), (4, 1)]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 9, p) for p, _ in lengths]
    responses = [rng.integers(1, 9, r) for _, r in lengths]
    return SampleBatch(
        prompts=prompts,
        responses=responses,
        old_log_probs=[rng.normal(size=r).astype("f4") for _, r in lengths],
        values=[rng.normal(size=p + r).astype("f4") for p, r in lengths],
        score=np.arange(3.0),
        uid=["a", "a", "b"],
        extra=[{"turns": 1}, {"turns": 2}, None],
        ragged=["prompts", "responses", "old_log_probs", "values"],
    )


def lists(column):
    return [np.asarray(row).tolist() for row in column]


def test_verl_round_trip():
    pytest.importorskip("tensordict")
    batch = rollouts()
    data = to_verl(batch, DataProto, meta_info={"step": 3}, pad_token_id=-7)
    assert data.meta_info == {"step": 3}
    for i in range(3):
        prompt, answer = batch["prompts"][i], batch["responses"][i]
        spare = 4 - len(prompt), 3 - len(answer)
        assert data.batch["input_ids"][i].tolist() == [-7] * spare[0] + [*prompt, *answer] + [-7] * spare[1]
        mask = [0] * spare[0] + [1] * (len(prompt) + len(answer)) + [0] * spare[1]
        assert data.batch["attention_mask"][i].tolist() == mask
        assert data.batch["position_ids"][i][spare[0] :].tolist()[: len(prompt)] == list(range(len(prompt)))
        assert data.batch["values"][i].tolist() == [0] * spare[0] + batch["values"][i].tolist() + [0] * spare[1]
        assert data.batch["old_log_probs"][i].tolist() == batch["old_log_probs"][i].tolist() + [0] * spare[1]
    assert data.non_tensor_batch["uid"].tolist() == ["a", "a", "b"]
    back = from_verl(data)
    assert "attention_mask" not in back
    for name in ("prompts", "responses", "old_log_probs", "values"):
        assert lists(back[name]) == lists(batch[name])
    assert lists(back["position_ids"]) == [list(range(n)) for n in (5, 1, 5)]
    assert back["score"].tolist() == [0, 1, 2]
    assert back["extra"].tolist() == [{"turns": 1}, {"turns": 2}, None]
    dense = from_verl(data, padded=True)
    assert dense["input_ids"].data_ptr() == data.batch["input_ids"].data_ptr()
    wide = to_verl(batch, DataProto, prompt_length=6, response_length=5)
    assert wide.batch["input_ids"].shape == (3, 11)


def test_verl_without_prompts_is_padded_on_the_right():
    pytest.importorskip("tensordict")
    data = to_verl(SampleBatch(input_ids=[[1, 2], [3]], loss=[[0.5, 1.0], [2.0]]), DataProto)
    assert data.batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    assert data.batch["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert data.batch["loss"].tolist() == [[0.5, 1.0], [2.0, 0.0]]
    assert lists(from_verl(data)["loss"]) == [[0.5, 1.0], [2.0]]
    plain = to_verl(SampleBatch(score=[1.0, 2.0]), DataProto)
    assert plain.batch["score"].tolist() == [1.0, 2.0]
    assert from_verl(SimpleNamespace(batch=None, non_tensor_batch={"uid": np.array(["a"], object)}))[
        "uid"
    ].tolist() == ["a"]


def test_verl_conversion_rejects_unsupported_values():
    batch = rollouts()
    with pytest.raises(ColumnLengthError, match="column 'odd' must have rows of the same lengths as the prompts"):
        to_verl(batch.assign(odd=batch["values"].truncate(2)), DataProto)
    with pytest.raises(ColumnLengthError, match="prompt_length must be at least 4, the longest row, got 2"):
        to_verl(batch, DataProto, prompt_length=2)
    with pytest.raises(ColumnTypeError, match="got dict without 'batch'"):
        from_verl({})
    tensors = {"responses": torch.zeros(1, 3), "attention_mask": torch.zeros(1, 2)}
    with pytest.raises(ColumnMismatchError, match=r"'responses' must be at most 2 wide, .*, got 3"):
        from_verl(SimpleNamespace(batch=tensors, non_tensor_batch={}))
    with pytest.raises(ColumnMismatchError, match="column 'responses' must be either a tensor or a non-tensor column"):
        from_verl(SimpleNamespace(batch=tensors, non_tensor_batch={"responses": np.zeros(1)}))


def test_jagged_tensordict_round_trip():
    pytest.importorskip("tensordict")
    batch = SampleBatch(ids=[[1, 2], [3], []], text=["a", "b", "c"])
    result = to_tensordict(batch)
    assert result["ids"].is_nested
    assert result["ids"].values().data_ptr() == batch["ids"].elements.ctypes.data
    back = from_tensordict(result)
    assert lists(back["ids"]) == [[1, 2], [3], []]
    assert back["ids"].elements.data_ptr() == batch["ids"].elements.ctypes.data
    assert list(back["text"]) == ["a", "b", "c"]


def test_tokenized_dataset_round_trip():
    datasets = pytest.importorskip("datasets")
    rows = {
        "input_ids": [[1, 2, 3], [4]],
        "completion_mask": [[0, 1, 1], [1]],
        "prompt": ["ab", "c"],
        "messages": [[{"role": "user", "content": "x"}], [{"role": "user", "content": "y"}] * 2],
        "reward": [0.5, 1.0],
    }
    dataset = datasets.Dataset.from_dict(rows)
    batch = from_token_dataset(dataset)
    assert lists(batch["input_ids"]) == rows["input_ids"]
    assert batch["messages"].tolist() == rows["messages"]
    assert lists(from_token_dataset(dataset.select([1, 0]))["input_ids"]) == rows["input_ids"][::-1]
    assert list(from_token_dataset(dataset, ["reward", "prompt"])) == ["reward", "prompt"]
    back = to_token_dataset(batch.assign(flags=[True, False], image=np.zeros((2, 2, 2)), keep=batch["input_ids"] > 1))
    assert back[0]["input_ids"] == [1, 2, 3]
    assert back[1]["messages"] == rows["messages"][1]
    assert back[1]["flags"] is False
    assert back[0]["keep"] == [False, True, True]
    assert back[0]["prompt"] == "ab"
    assert np.shape(back[0]["image"]) == (2, 2)
    assert back.features["completion_mask"].feature.dtype == "int64"
    with pytest.raises(ColumnTypeError, match="dataset must be a Hugging Face Dataset or an Arrow table, got a list"):
        from_token_dataset([])
    with pytest.raises(ColumnNotFoundError, match="no column 'labels'"):
        from_token_dataset(dataset, ["labels"])
    with pytest.raises(ColumnTypeError, match="column 'ids' must have no nulls"):
        from_token_dataset(pa.table({"ids": [[1], None]}))


def test_arrow_lists_are_read_without_copies():
    array = pa.array([[1, 2], [3]], pa.large_list(pa.int64()))
    batch = from_token_dataset(pa.table({"ids": array}))
    assert batch["ids"].elements.ctypes.data == array.values.buffers()[1].address


def test_dict_round_trip():
    rows = [
        {"ids": [1, 2], "logp": [0.5, 0.25], "uid": "a", "info": {"x": 1}},
        {"ids": [3, 4], "logp": [1.0, 2.0], "uid": "b", "info": {"x": 2}},
    ]
    batch = from_dicts(rows)
    assert batch["ids"].kind == "ragged"
    assert to_dicts(batch) == rows
    assert from_dicts(rows, ragged={"ids": "int32", "logp": "float32"})["ids"].dtype == np.int32
    assert list(from_dicts([])) == []
    assert to_dicts(SampleBatch(obs={"x": [1, 2]})) == [{"obs": {"x": 1}}, {"obs": {"x": 2}}]
    with pytest.raises(ColumnMismatchError, match="got row 1 with other keys: 'b', 'c'"):
        from_dicts([{"a": 1, "b": 2}, {"a": 1, "c": 2}])
    with pytest.raises(ColumnTypeError, match="rows must be dicts, got a list in row 0"):
        from_dicts([[1]])
