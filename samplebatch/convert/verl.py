"""Conversion of verl's `DataProto` from and to batches: padded tensors of prompts and responses become ragged columns.

A `DataProto` is recognized by its attributes `batch` and `non_tensor_batch`; verl is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from samplebatch.batch.sample_batch import SampleBatch
from samplebatch.column.convert import unpad
from samplebatch.column.ragged_rows import RaggedRows
from samplebatch.column.tensor import TensorColumn
from samplebatch.column.torch_tensor import TorchColumn
from samplebatch.errors import ColumnLengthError, ColumnMismatchError, ColumnTypeError

_TOKENS: Final = ("input_ids", "prompts", "responses")
"""Columns that are padded with `pad_token_id`; others are padded with 0."""


def from_verl(data: Any, *, padded: bool = False) -> SampleBatch:
    """Convert a `DataProto` to a batch, with padded tensors as ragged columns.

    Padding is removed from tensors of the same width as `attention_mask`, `prompts` or `responses`. `attention_mask` is
    omitted, because row lengths replace it. Other tensors and non-tensor columns are unchanged. `data.meta_info` is
    ignored.

    Parameters
    ----------
    data
        A `DataProto`, or any object with the attributes `batch` and `non_tensor_batch`.
    padded
        Whether to return all tensors padded and without a copy, including `attention_mask`.

    Raises
    ------
    ColumnTypeError
        If `data` lacks the attribute `batch` or `non_tensor_batch`.
    ColumnMismatchError
        If `responses` are wider than `attention_mask`, or a tensor and a non-tensor column have the same name.

    Examples
    --------
    >>> import torch
    >>> from types import SimpleNamespace
    >>> tensors = {
    ...     "responses": torch.tensor([[5, 6], [7, 0]]),
    ...     "attention_mask": torch.tensor([[1, 1], [1, 0]]),
    ... }
    >>> batch = from_verl(
    ...     SimpleNamespace(
    ...         batch=tensors, non_tensor_batch={"uid": np.array(["a", "b"], object)}
    ...     )
    ... )
    >>> batch["responses"][1], batch["uid"].tolist()
    (tensor([7]), ['a', 'b'])
    """
    for name in ("batch", "non_tensor_batch"):
        if not hasattr(data, name):
            raise ColumnTypeError(
                f"data must have the attributes of a DataProto, got {type(data).__name__} without {name!r}"
            )
    tensors = dict(data.batch.items()) if data.batch is not None else {}
    others = dict(data.non_tensor_batch or {})
    for name in tensors.keys() & others.keys():
        raise ColumnMismatchError(f"column {name!r} must be either a tensor or a non-tensor column, got both")
    mask = tensors.get("attention_mask")
    if mask is None or padded:
        return SampleBatch(tensors | others)
    del tensors["attention_mask"]
    is_token = mask.bool().cpu().numpy()
    width = is_token.shape[1]
    answer = tensors["responses"].shape[1] if "responses" in tensors else width
    if answer > width:
        raise ColumnMismatchError(
            f"'responses' must be at most {width} wide, the width of 'attention_mask', got {answer}"
        )
    masks = {width - answer: is_token[:, : width - answer], answer: is_token[:, width - answer :], width: is_token}
    columns: dict[str, Any] = {}
    for name, tensor in tensors.items():
        is_sequence = tensor.ndim == 2 and not tensor.is_nested and tensor.shape[1] in masks
        if name == "prompts":
            columns[name] = unpad(tensor, mask=is_token[:, : tensor.shape[1]])
        else:
            columns[name] = unpad(tensor, mask=masks[tensor.shape[1]]) if is_sequence and tensor.shape[1] else tensor
    return SampleBatch(columns | others)


def to_verl(
    batch: SampleBatch[Any],
    data_proto: Any,
    *,
    meta_info: Mapping[str, Any] | None = None,
    pad_token_id: int = 0,
    prompt_length: int | None = None,
    response_length: int | None = None,
) -> Any:
    """Convert a batch to a `DataProto`, with ragged columns padded according to verl's conventions.

    Prompts are padded on the left, responses on the right, and columns that contain prompts and responses on both
    sides. `attention_mask` and `position_ids` are added, and `input_ids` if there are prompts and responses. Columns of
    strings and objects become non-tensor columns.

    Parameters
    ----------
    batch
        A batch with ragged columns `prompts` and `responses`; or with other ragged columns of equal row lengths, which
        are padded on the right.
    data_proto
        The class `verl.DataProto`, or any class with an equivalent method `from_dict`.
    meta_info
        Metadata of the `DataProto`.
    pad_token_id
        Token id for padding; columns that do not contain tokens are padded with 0.
    prompt_length, response_length
        Padded widths of prompts and responses; None for the length of the longest row.

    Raises
    ------
    ColumnLengthError
        If a ragged column's row lengths match neither the prompt lengths, the response lengths nor their sums, or a row
        is longer than `prompt_length` or `response_length`.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> made = SimpleNamespace(from_dict=lambda tensors, non_tensors, meta_info: tensors)
    >>> tensors = to_verl(SampleBatch(prompts=[[1], [2, 3]], responses=[[4, 5], [6]]), made)
    >>> tensors["input_ids"].tolist(), tensors["attention_mask"].tolist()
    ([[0, 1, 4, 5], [2, 3, 6, 0]], [[0, 1, 1, 1], [1, 1, 1, 0]])
    """
    import torch

    moved = batch.to_torch()
    columns = {name: moved.column(name) for name in moved.column_names}
    ragged: dict[str, Any] = {name: item for name, item in columns.items() if isinstance(item, RaggedRows)}
    prompts, responses = ragged.get("prompts"), ragged.get("responses")
    if responses is None and ragged:
        responses = ragged.get("input_ids", next(iter(ragged.values())))
        prompts = None
    tensors: dict[str, Any] = {}
    before = np.zeros(len(batch), np.int64) if prompts is None else prompts.seq_lens
    after = before if responses is None else responses.seq_lens
    if responses is not None and prompts is not None and "input_ids" not in ragged:
        ragged["input_ids"] = prompts.join(responses)
    left = 0 if prompts is None else _width(prompts, prompt_length, "prompt_length")
    right = 0 if responses is None else _width(responses, response_length, "response_length")
    for name, column in ragged.items():
        value = pad_token_id if name in _TOKENS else 0
        lengths = column.seq_lens
        if prompts is not None and name == "prompts":
            tensors[name] = column.pad(value, side="left", length=left)
        elif np.array_equal(lengths, after) and name != "input_ids":
            tensors[name] = column.pad(value, length=right)
        elif np.array_equal(lengths, before + after):
            first, second = column.split(before)
            tensors[name] = torch.cat([first.pad(value, side="left", length=left), second.pad(value, length=right)], 1)
        elif np.array_equal(lengths, before):
            tensors[name] = column.pad(value, side="left", length=left)
        else:
            raise ColumnLengthError(
                f"column {name!r} must have rows of the same lengths as the prompts, the responses, or their sums, got "
                "others"
            )
    if responses is not None:
        masks = [] if prompts is None else [prompts.mask(side="left", length=left)]
        mask = torch.cat([*masks, responses.mask(length=right)], 1).long()
        tensors["attention_mask"] = mask
        tensors["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    others: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, TorchColumn):
            tensors[name] = column.values
        elif isinstance(column, TensorColumn) or not isinstance(column, RaggedRows):
            rows = np.empty(len(column), object)
            rows[:] = column.to_numpy().tolist()
            others[name] = rows
    return data_proto.from_dict(tensors=tensors, non_tensors=others, meta_info=dict(meta_info or {}))


def _width(column: RaggedRows, length: int | None, argument: str) -> int:
    if length is not None and length < column.max_seqlen:
        raise ColumnLengthError(f"{argument} must be at least {column.max_seqlen}, the longest row, got {length}")
    return column.max_seqlen if length is None else length
