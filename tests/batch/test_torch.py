"""Conversion of batches to torch and back, and minibatches on a device.

One rule for all: a dtype is meant for floating-point numbers; integers, flags and images are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from samplebatch import Batch, MultiAgentBatch, SampleBatch, to_torch
from samplebatch.batch.delivery import Delivery, tree_to
from samplebatch.errors import ArgumentError, DeviceError
from tests.batch.every_kind import every_kind, in_sequences
from tests.ids import plain_repr
from tests.optional import torch

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FLOATS = [torch.float32, np.float32, np.dtype("f4"), "float32"]


def columns() -> dict[str, Any]:
    """Return columns with dtypes that a cast of floats changes, and columns that it preserves."""
    return {
        "rewards": np.array([0.5, 1.5, 2.5]),
        "half": np.array([0.5, 1.5, 2.5], np.float16),
        "actions": np.array([0, 1, 2]),
        "dones": np.array([False, False, True]),
        "image": np.zeros((3, 2, 2), np.uint8),
        "wave": np.array([1j, 2, 3]),
    }


def dtypes(values: Any) -> dict[str, str]:
    return {name: str(values[name].dtype).removeprefix("torch.") for name in columns()}


CAST = {
    "rewards": "float32",
    "half": "float32",
    "actions": "int64",
    "dones": "bool",
    "image": "uint8",
    "wave": "complex128",
}


def flat() -> SampleBatch:
    return SampleBatch(columns())


def nested() -> Batch:
    return Batch(columns())


def of_policies() -> MultiAgentBatch:
    return MultiAgentBatch({"walker": flat()}, 3)


BATCHES: list[Callable[[], Any]] = [flat, nested]
each_batch = pytest.mark.parametrize("make", BATCHES, ids=lambda make: make.__name__)


@each_batch
@pytest.mark.parametrize("floats", FLOATS, ids=plain_repr)
def test_only_floating_point_columns_are_cast(make: Callable[[], Any], floats: Any) -> None:
    tensors = make().to_torch(floats=floats)
    assert all(isinstance(tensors[name], torch.Tensor) for name in columns())
    assert dtypes(tensors) == CAST
    assert dtypes(make().to_numpy(floats=floats)) == CAST
    assert dtypes(tensors.to_numpy(floats="float32")) == CAST
    assert isinstance(tensors.to_numpy()["rewards"], np.ndarray)


def test_dtype_is_an_alias_of_floats_for_a_flat_batch() -> None:
    assert dtypes(flat().to_torch(torch.float32)) == CAST
    assert dtypes(flat().to_torch(dtype="float32")) == CAST
    with pytest.raises(ArgumentError, match="only one of dtype and floats"):
        flat().to_torch("float32", floats="float32")


def test_dtype_of_a_nested_batch_applies_to_all_values() -> None:
    tensors = Batch(a=[1, 2], b=[0.5, 1.5]).to_torch(dtype=torch.float32)
    assert tensors.a.dtype == tensors.b.dtype == torch.float32
    with pytest.raises(ArgumentError, match="only one of dtype, for all values, and floats"):
        Batch(a=[1]).to_torch(dtype=torch.float32, floats="float32")


def test_each_policy_is_converted() -> None:
    batch = of_policies()
    tensors = batch.to_torch(floats="float32")
    assert dtypes(tensors["walker"]) == CAST
    assert tensors.count == 3
    assert isinstance(batch["walker"]["rewards"], np.ndarray)
    assert dtypes(tensors.to_numpy(floats="float32")["walker"]) == CAST
    assert batch.to_dict()["walker"]["rewards"] is batch["walker"]["rewards"]


@each_batch
@pytest.mark.parametrize("floats", ["int64", "f32", np.int64, torch.int8, object(), 3], ids=plain_repr)
def test_other_dtypes_are_rejected(make: Callable[[], Any], floats: Any) -> None:
    for convert in (make().to_torch, make().to_numpy):
        with pytest.raises(ArgumentError, match="floats must be one of 'float16', 'float32', 'float64', 'bfloat16'"):
            convert(floats=floats)


@each_batch
def test_conversion_to_arrays_rejects_bfloat16(make: Callable[[], Any]) -> None:
    assert make().to_torch(floats="bfloat16")["rewards"].dtype == torch.bfloat16
    assert make().to_torch(floats="bfloat16").to_numpy()["rewards"].dtype == np.float32
    with pytest.raises(ArgumentError, match="floats must be a dtype of NumPy"):
        make().to_numpy(floats="bfloat16")


@each_batch
def test_memory_is_shared_where_nothing_changes(make: Callable[[], Any]) -> None:
    batch = make()
    tensors = batch.to_torch(floats="float64")
    assert tensors is not batch
    assert tensors["rewards"].data_ptr() == batch["rewards"].ctypes.data
    assert isinstance(batch["rewards"], np.ndarray)
    assert tensors.to_numpy(floats="float64")["rewards"].ctypes.data == batch["rewards"].ctypes.data


def test_every_kind_of_column_round_trips() -> None:
    batch = SampleBatch(every_kind(4), squeezed=np.zeros((4, 2))).compress(columns={"squeezed"})
    tensors = batch.to_torch()
    assert list(tensors) == list(batch)
    assert tensors.column("squeezed") is batch.column("squeezed")
    back = tensors.to_numpy()
    for name in batch.column_names:
        if batch.column(name).kind == "tensor":
            assert back.column(name).equals(batch.column(name)), name


def test_sequences_and_flags_are_preserved() -> None:
    batch = in_sequences(padded=True)
    tensors = batch.to_torch(floats="float32")
    assert tensors.zero_padded
    assert tensors.num_grad_updates == batch.num_grad_updates
    assert len(tensors) == len(batch)
    assert tensors[2:]["a"].tolist() == batch[2:]["a"].tolist()
    assert tensors.to_numpy()["seq_lens"].tolist() == batch["seq_lens"].tolist()


def test_the_returned_dict_has_nested_columns() -> None:
    batch = SampleBatch(obs={"x": [1, 2], "y": ([3, 4],)}, rewards=[0.5, 1.0])
    actual = batch.to_dict()
    assert type(actual) is dict
    assert actual["rewards"] is batch["rewards"]
    assert actual["obs"]["y"][0].tolist() == [3, 4]


# -- minibatches -------------------------------------------------------------------------------------------------------


@each_batch
@pytest.mark.parametrize("prefetch", [0, 2, 9])
def test_minibatches_are_tensors(make: Callable[[], Any], prefetch: int) -> None:
    plain = list(make().minibatches(2, epochs=2, rng=0))
    parts = list(make().minibatches(2, epochs=2, rng=0, device="cpu", floats="float32", prefetch=prefetch))
    assert [len(part) for part in parts] == [2, 1, 2, 1]
    assert all(dtypes(part) == CAST for part in parts)
    assert [part["rewards"].tolist() for part in parts] == [part["rewards"].tolist() for part in plain]


@each_batch
def test_minibatches_of_arrays_are_cast_too(make: Callable[[], Any]) -> None:
    (part,) = make().minibatches(3, shuffle=False, floats="float32")
    assert dtypes(part) == CAST
    assert isinstance(part["rewards"], np.ndarray)


def test_minibatches_of_a_nested_batch_have_every_row_once_per_epoch() -> None:
    parts = list(Batch(a=np.arange(5)).minibatches(2, epochs=3, rng=1))
    assert [len(part) for part in parts] == [2, 2, 1] * 3
    for epoch in range(3):
        assert sorted(np.concatenate([part.a for part in parts[3 * epoch : 3 * epoch + 3]])) == [0, 1, 2, 3, 4]
    assert [part.a.tolist() for part in Batch(a=[1, 2, 3]).minibatches(2, shuffle=False)] == [[1, 2], [3]]
    for wrong in ({"size": 0}, {"size": 2, "epochs": -1}):
        with pytest.raises(ArgumentError, match="must be a whole number"):
            Batch(a=[1]).minibatches(**wrong)


@each_batch
def test_wrong_arguments_of_minibatches_are_rejected_immediately(make: Callable[[], Any]) -> None:
    for wrong, words in (
        ({"prefetch": 2}, "prefetch must be 0 without a device"),
        ({"prefetch": -1, "device": "cpu"}, "prefetch must be a whole number from 0"),
        ({"floats": "int8"}, "floats must be one of"),
    ):
        with pytest.raises(ArgumentError, match=words):
            make().minibatches(2, **wrong)


def test_objects_are_unchanged_in_minibatches() -> None:
    batch = Batch(a=[0.5, 1.5], infos=np.array([{}, None], object))
    (part,) = batch.minibatches(2, shuffle=False, device="cpu")
    assert part.infos.tolist() == [{}, None]
    (part,) = SampleBatch(a=[0.5, 1.5], infos=[{}, {"x": 1}]).minibatches(2, shuffle=False, device="cpu")
    assert part["infos"].tolist() == [{}, {"x": 1}]


def test_parts_are_prefetched_up_to_the_limit() -> None:
    created = []

    def parts() -> Iterator[Batch]:
        for number in range(6):
            created.append(number)
            yield Batch(a=[float(number)])

    brought = Delivery("cpu", None, 2).each(parts(), tree_to)
    assert created == []
    assert [next(brought).a.item(), created] == [0.0, [0, 1, 2]]
    assert [next(brought).a.item(), created] == [1.0, [0, 1, 2, 3]]
    assert [part.a.item() for part in brought] == [2, 3, 4, 5]


@cuda
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_minibatches_on_a_gpu_equal_minibatches_on_the_host(prefetch: int, where: str) -> None:
    values = np.random.default_rng(0).normal(size=(4096, 256))
    batch = SampleBatch(a=values, i=np.arange(4096)).to_torch(device=where)
    if where == "cpu":
        batch = batch.to_numpy()
    # A learner that is still busy with earlier parts, while later ones are copied and memory is reused.
    weight = torch.randn(256, 256, device="cuda")
    recorded, sums = [], []
    for part in batch.minibatches(64, epochs=3, rng=0, device="cuda", floats="float32", prefetch=prefetch):
        assert part["a"].is_cuda
        assert part["a"].dtype == torch.float32
        busy = part["a"]
        for _ in range(20):
            busy = torch.tanh(busy @ weight)
        sums.append(part["a"].double().sum(1))
        recorded.append(part["i"])
    order = torch.cat(recorded).cpu().numpy()
    assert np.allclose(torch.cat(sums).cpu().numpy(), values.astype("f4").sum(1, dtype="f8")[order])
    assert sorted(order[:4096]) == list(range(4096))


ASKED_FOR_A_DEVICE: dict[str, Callable[[Any], object]] = {
    "to_torch of a flat batch": lambda device: flat().to_torch(device=device),
    "to_torch of a nested batch": lambda device: nested().to_torch(device=device),
    "to_torch in place": lambda device: nested().to_torch_(device=device),
    "to_torch of policies": lambda device: of_policies().to_torch(device=device),
    "to_torch of a value": lambda device: to_torch([1.0], device=device),
    "to_device": lambda device: flat().to_device(device),
    "minibatches of a flat batch": lambda device: flat().minibatches(2, device=device),
    "minibatches of a nested batch": lambda device: nested().minibatches(2, device=device),
    "minibatches of policies": lambda device: of_policies().minibatches(2, device=device),
}


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
@pytest.mark.parametrize("ask", ASKED_FOR_A_DEVICE.values(), ids=ASKED_FOR_A_DEVICE)
def test_an_unavailable_device_is_rejected_without_a_column_name(ask: Callable[[Any], object], device: str) -> None:
    with pytest.raises(DeviceError, match=f"^device must be one that torch can use here, got '{device}': .+") as raised:
        ask(device)
    assert "\n" not in str(raised.value)


@each_batch
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_memory_is_not_page_locked_without_a_device(make: Callable[[], Any]) -> None:
    with pytest.raises(DeviceError, match=r"^pin_memory must be left out where torch cannot page-lock: \w+"):
        make().to_torch(pin_memory=True)


def lidar() -> SampleBatch:
    """Return three steps with ragged columns of numbers, pixels, and strings, which torch cannot represent."""
    return SampleBatch(
        rays=[[0.5, 1.5], [2.5], []],
        maps=[np.ones((1, 2), np.uint8), np.ones((2, 2), np.uint8), np.ones((0, 3), np.uint8)],
        days=[np.array(["2020-01-01"], "M8[D]"), np.array([], "M8[D]"), np.array([], "M8[D]")],
        obs={"hits": [[1], [2, 3], []]},
    )


def test_ragged_columns_become_tensors_and_arrays_again() -> None:
    batch = lidar()
    tensors = batch.to_torch()
    assert tensors["rays"][0].tolist() == [0.5, 1.5]
    assert tensors["rays"].elements.data_ptr() == batch["rays"].elements.ctypes.data
    assert tensors["rays"].pad(-1).tolist() == [[0.5, 1.5], [2.5, -1.0], [-1.0, -1.0]]
    assert tensors["maps"][1].shape == (2, 2)
    assert tensors["obs"]["hits"][1].tolist() == [2, 3]
    assert tensors.column("days") is batch.column("days")
    again = tensors.to_numpy()
    assert again == batch
    assert np.shares_memory(again["rays"].elements, batch["rays"].elements)
    assert isinstance(batch["rays"][0], np.ndarray)


def test_floats_casts_ragged_columns_like_other_columns() -> None:
    tensors = lidar().to_torch(floats="bfloat16")
    assert (tensors["rays"].dtype, tensors["maps"].dtype) == (torch.bfloat16, torch.uint8)
    assert tensors["obs"]["hits"].dtype == torch.int64
    assert tensors.to_numpy()["rays"].dtype == np.float32
    arrays = lidar().to_numpy(floats="float32")
    assert (arrays["rays"].dtype, arrays["maps"].dtype) == (np.float32, np.uint8)
    assert arrays["days"].dtype == np.dtype("M8[D]")
    assert tensors.to_numpy(floats="float64")["rays"][0].tolist() == [0.5, 1.5]


def test_a_view_of_a_ragged_column_moves_its_elements_only() -> None:
    moved = lidar()[1:].to_device("meta")
    assert moved["rays"].elements.shape == (1,)
    assert moved["rays"].elements.is_meta
    assert [tuple(row.shape) for row in moved["maps"]] == [(2, 2), (0, 3)]
    back = lidar().to_torch()[1:].to_device("cpu")
    assert back["rays"].elements.tolist() == [2.5]


def test_read_only_elements_are_not_aliased() -> None:
    batch = lidar()
    batch["rays"].elements.flags.writeable = False
    batch.to_torch()["rays"][0][0] = 100
    assert batch["rays"][0].tolist() == [0.5, 1.5]


def test_minibatches_and_policies_move_ragged_columns_to_the_device() -> None:
    for part in lidar().minibatches(2, device="meta", floats="float32", rng=0, prefetch=1):
        assert part["rays"].elements.is_meta
        assert part["rays"].dtype == torch.float32
    policies = MultiAgentBatch({"walker": lidar()}, 3)
    assert policies.to_torch(device="meta")["walker"]["rays"].elements.is_meta
    assert policies.to_torch().to_numpy() == policies
    (part,) = policies.minibatches(3, device="cpu", shuffle=False)
    assert part["walker"]["rays"].pad().tolist() == [[0.5, 1.5], [2.5, 0.0], [0.0, 0.0]]
    assert policies.to_device("meta")["walker"]["rays"].elements.is_meta


def test_ragged_tensors_are_selected_and_joined_with_their_batch() -> None:
    tensors = lidar().select("rays", "maps").to_device("cpu")
    joined = tensors.concat(tensors).take([4, 0, 2])
    assert [row.tolist() for row in joined["rays"]] == [[2.5], [0.5, 1.5], []]
    assert joined["maps"][0].shape == (2, 2)
    assert tensors.copy() == tensors
    assert tensors != lidar().select("rays", "maps")


def test_a_nested_batch_stores_rows_of_ragged_columns_as_tensors() -> None:
    batch = lidar().to_torch().as_batch()
    assert [row.tolist() for row in batch.rays] == [[0.5, 1.5], [2.5], []]
    assert all(isinstance(row, torch.Tensor) for row in batch[:2].obs.hits)


def test_data_frames_show_the_rows_of_ragged_tensors() -> None:
    frame = lidar().to_torch(floats="bfloat16").to_pandas()
    assert isinstance(frame["rays"][0], np.ndarray)
    assert frame["rays"][0].tolist() == [0.5, 1.5]


@cuda
def test_ragged_columns_are_moved_to_the_gpu_and_back() -> None:
    batch = lidar()
    moved = batch.copy().to_device("cuda", pin_memory=True)
    torch.cuda.synchronize()
    assert moved["rays"].pad(-1).is_cuda
    assert moved.take([1, 0])["rays"][1].tolist() == [0.5, 1.5]
    assert moved.to_numpy() == batch
