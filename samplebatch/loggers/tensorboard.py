"""TensorBoard as a logger of trainers."""

from __future__ import annotations

import os
from typing import Any

from samplebatch.errors import require
from samplebatch.loggers.logger import Logger


class TensorboardLogger(Logger):
    """Logger for TensorBoard, through torch's `SummaryWriter`.

    Parameters
    ----------
    writer
        A `SummaryWriter`, or the folder to make one for.
    training_interval, test_interval, update_interval, info_interval
        As for `Logger`.

    Raises
    ------
    MissingExtraError
        If `tensorboard` is not installed.
    """

    def __init__(self, writer: Any, **intervals: int) -> None:
        super().__init__(**intervals)
        require("tensorboard", "tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        self.writer = writer if hasattr(writer, "add_scalar") else SummaryWriter(os.fspath(writer))

    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Write a scalar for each figure, and one for the step."""
        scope = step_type.partition("/")[0]
        self.writer.add_scalar(step_type, step, global_step=step)
        for name, value in data.items():
            self.writer.add_scalar(f"{scope}/{name}", value, global_step=step)

    def flush(self) -> None:
        """Write to the disk."""
        self.writer.flush()

    def finalize(self) -> None:
        """Close the writer."""
        self.writer.close()
