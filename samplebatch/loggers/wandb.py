"""Weights & Biases as a logger of trainers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samplebatch.errors import require
from samplebatch.loggers.logger import UNITS, Logger


class WandbLogger(Logger):
    """Logger for Weights & Biases.

    Parameters
    ----------
    run
        A run that `wandb.init` returned; by default one is begun with the rest of the arguments.
    project, name, run_id, config, mode
        The run's project, name, id, settings, and whether it is `"online"` or `"offline"`. A training that is resumed
        goes on in the run of the same id.
    training_interval, test_interval, update_interval, info_interval
        As for `Logger`.

    Attributes
    ----------
    run
        The run.

    Raises
    ------
    MissingExtraError
        If `wandb` is not installed.
    """

    def __init__(
        self,
        run: Any = None,
        *,
        project: str | None = None,
        name: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
        **intervals: int,
    ) -> None:
        super().__init__(**intervals)
        if run is None:
            wandb: Any = require("wandb", "wandb")
            settings = None if config is None else dict(config)
            run = wandb.init(project=project, name=name, id=run_id, resume="allow", config=settings, mode=mode)
        self.run = run
        for scope, unit in UNITS.items():
            self.run.define_metric(f"{scope}/{unit}")
            self.run.define_metric(f"{scope}/*", step_metric=f"{scope}/{unit}")

    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Log all figures of a report as one row, with the step that they are drawn over."""
        scope = step_type.partition("/")[0]
        self.run.log({step_type: step} | {f"{scope}/{name}": value for name, value in data.items()})

    def finalize(self) -> None:
        """Finish the run."""
        self.run.finish()
