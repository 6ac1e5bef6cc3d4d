"""Delivery: how samples and minibatches reach a learner."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

from samplebatch.arguments import whole
from samplebatch.batch.targets import ArrayTarget, Target, TorchTarget
from samplebatch.errors import ArgumentError

if TYPE_CHECKING:
    import torch

    from samplebatch.batch.targets import Floats

    Device = str | int | torch.device
    """Where tensors lie, as torch names it."""

T = TypeVar("T")


class Delivery:
    """Hands samples and minibatches to a learner: on its device, in its floating-point dtype, some of them ahead.

    Parts that are made ahead for a GPU are gathered and copied from page-locked memory on a stream of their own, while
    the learner computes; its own stream waits for a part before it is handed out. On the host they are only made
    earlier.

    Parameters
    ----------
    device
        The device of tensors; None for values as they are.
    floats
        The dtype of floating-point values; None for their own.
    prefetch
        How many parts to make ahead of the one that is handed out.

    Raises
    ------
    ArgumentError
        If `floats` is no floating-point dtype, or `prefetch` no whole number from 0 on, or above 0 without a device.
    DeviceError
        If torch cannot use the device.

    Examples
    --------
    >>> from samplebatch import Batch
    >>> from samplebatch.batch.nested.tensors import tree_to
    >>> [part.a for part in Delivery("cpu", "float32", 2).each(iter([Batch(a=[0.5]), Batch(a=[1.5])]), tree_to)]
    [tensor([0.5000]), tensor([1.5000])]
    """

    __slots__ = ("_ahead", "_device", "_floats", "_target")

    def __init__(self, device: Device | None, floats: Floats | None, prefetch: int = 0) -> None:
        self._ahead = whole("prefetch", prefetch)
        if self._ahead and device is None:
            raise ArgumentError("prefetch must come with the device that parts are brought to ahead of their turn")
        self._device, self._floats = device, floats
        self._target: Target | None = None
        if device is not None:
            self._target = TorchTarget(device=device, floats=floats, keep_objects=True)
        elif floats is not None:
            self._target = ArrayTarget(floats)

    def one(self, part: T, convert: Callable[[T, Target], T]) -> T:
        """Bring one part to the learner."""
        return part if self._target is None else convert(part, self._target)

    def each(self, parts: Iterator[T], convert: Callable[[T, Target], T]) -> Iterator[T]:
        """Bring parts to the learner, in their order."""
        if self._target is None:
            return parts
        brought = (self.one(part, convert) for part in parts)
        if not self._ahead:
            return brought
        on_gpu = isinstance(self._target, TorchTarget) and str(self._target.device).startswith("cuda")
        return self._each_on_stream(parts, convert) if on_gpu else _make_ahead(brought, self._ahead)

    def _each_on_stream(self, parts: Iterator[T], convert: Callable[[T, Target], T]) -> Iterator[T]:
        import torch

        learner = torch.cuda.current_stream(self._device)
        copies = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        # Parts may be cut from tensors that the learner's stream is still writing.
        copies.wait_stream(learner)
        target = TorchTarget(
            device=self._device,
            floats=self._floats,
            pin_memory=True,
            non_blocking=True,
            keep_objects=True,
            used_on=learner,
        )
        for part, copied in _make_ahead(_copy_on(copies, parts, convert, target), self._ahead):
            learner.wait_event(copied)
            yield part


def _make_ahead(items: Iterator[T], count: int) -> Iterator[T]:
    """Yield items, of which the next ones are made already."""
    made = deque(islice(items, count))
    while made:
        item = made.popleft()
        made.extend(islice(items, 1))
        yield item


def _copy_on(
    stream: torch.cuda.Stream, parts: Iterator[T], convert: Callable[[T, Target], T], target: Target
) -> Iterator[tuple[T, Any]]:
    """Make and convert parts on a stream, and yield each with the event of its end."""
    import torch

    nothing: Any = object()
    while True:
        with torch.cuda.stream(stream):
            part = next(parts, nothing)
            if part is nothing:
                return
            brought = convert(part, target)
            end = stream.record_event()
        yield brought, end
