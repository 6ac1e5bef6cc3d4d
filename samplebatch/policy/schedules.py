"""Schedules of hyperparameters over training steps, for example of the exploration rate."""

from __future__ import annotations

from abc import ABC, abstractmethod

from samplebatch.arguments import fraction, whole


class Schedule(ABC):
    """Hyperparameter as a function of the step: an exploration rate, learning rate or importance exponent."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the value after `step` steps."""


class LinearSchedule(Schedule):
    """Schedule that interpolates linearly from `start` to `end`, and then remains at `end`.

    Parameters
    ----------
    start, end
        First and last value.
    steps
        Number of steps after `begin` at which the value reaches `end`.
    begin
        Step at which the interpolation starts.

    Raises
    ------
    ArgumentError
        If `steps` is not an integer >= 1, or `begin` is not an integer >= 0.

    Examples
    --------
    >>> epsilon = LinearSchedule(1.0, 0.1, steps=900)
    >>> epsilon(0), round(epsilon(300), 3), epsilon(5000)
    (1.0, 0.7, 0.1)
    """

    def __init__(self, start: float, end: float, steps: int, *, begin: int = 0) -> None:
        self.start, self.end = float(start), float(end)
        self.steps, self.begin = whole("steps", steps, 1), whole("begin", begin)

    def __call__(self, step: int) -> float:
        """Return the value after `step` steps."""
        progress = min(1.0, max(0.0, (step - self.begin) / self.steps))
        return self.start * (1.0 - progress) + self.end * progress


class ExponentialSchedule(Schedule):
    """Exponential decay from `start` towards `end`.

    Parameters
    ----------
    start, end
        First value, and limit of the value after many steps.
    decay
        Factor by which the distance to `end` is multiplied per step.

    Raises
    ------
    ArgumentError
        If `decay` is not a number from 0 to 1.

    Examples
    --------
    >>> epsilon = ExponentialSchedule(1.0, 0.0, decay=0.5)
    >>> epsilon(0), epsilon(3)
    (1.0, 0.125)
    """

    def __init__(self, start: float, end: float, decay: float) -> None:
        self.start, self.end, self.decay = float(start), float(end), fraction("decay", decay)

    def __call__(self, step: int) -> float:
        """Return the value after `step` steps."""
        return self.end + (self.start - self.end) * self.decay**step
