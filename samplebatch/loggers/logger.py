"""Logger: the base of all that trainers tell their figures to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from samplebatch.arguments import whole
from samplebatch.loggers.figures import flat_figures

UNITS = {"training": "env_step", "test": "env_step", "update": "update_step", "info": "epoch"}
"""Kinds of figures, and the steps that each is told at."""


class Logger(ABC):
    """Base of loggers, which trainers call with the figures of collecting, tests, updates and epochs.

    Names of figures and of steps are those of Tianshou's loggers: `training/returns_stat/mean` at `training/env_step`.

    Parameters
    ----------
    training_interval, test_interval
        Environment steps from one report on collecting, or on a test, to the next that is written.
    update_interval
        Training steps from one report on updates to the next.
    info_interval
        Epochs from one report on the whole training to the next.

    Examples
    --------
    >>> class Printing(Logger):
    ...     def write(self, step_type, step, data):
    ...         print(step_type, step, data)
    >>> Printing().log_test_data({"returns_stat": {"mean": 200.0}}, 1000)
    test/env_step 1000 {'returns_stat/mean': 200.0}
    """

    def __init__(
        self,
        training_interval: int = 1000,
        test_interval: int = 1,
        update_interval: int = 1000,
        info_interval: int = 1,
    ) -> None:
        self._intervals = {
            "training": whole("training_interval", training_interval, 1),
            "test": whole("test_interval", test_interval, 1),
            "update": whole("update_interval", update_interval, 1),
            "info": whole("info_interval", info_interval, 1),
        }
        self._last_steps: dict[str, int] = {}

    @abstractmethod
    def write(self, step_type: str, step: int, data: dict[str, float]) -> None:
        """Write figures.

        Parameters
        ----------
        step_type
            The kind of figures and of steps, such as `"training/env_step"`.
        step
            The step that they belong to.
        data
            The figures, by names in which `/` parts groups.
        """

    def log_training_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of collecting."""
        self._tell("training", log_data, step)

    def log_test_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of a test."""
        self._tell("test", log_data, step)

    def log_update_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of an update."""
        self._tell("update", log_data, step)

    def log_info_data(self, log_data: Mapping[str, Any], step: int) -> None:
        """Tell the figures of the whole training, once an epoch."""
        self._tell("info", log_data, step)

    def _tell(self, scope: str, figures: Mapping[str, Any], step: int) -> None:
        last = self._last_steps.get(scope)
        if last is None or step - last >= self._intervals[scope]:
            self._last_steps[scope] = step
            self.write(f"{scope}/{UNITS[scope]}", step, flat_figures(figures))

    def flush(self) -> None:
        """Bring all that was written to where it lasts."""
        return None

    def finalize(self) -> None:
        """End the log."""
        self.flush()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the log, for checkpoints; all before it lasts."""
        self.flush()
        return {"last_steps": dict(self._last_steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the log of a training that is resumed."""
        self._last_steps = dict(state["last_steps"])
