"""Schedules: numbers that change with the steps made, such as how much a policy explores."""

from __future__ import annotations

from abc import ABC, abstractmethod

from samplebatch.arguments import fraction, whole


class Schedule(ABC):
    """A number that changes with the steps made: of exploration, of a learning rate, of the exponent of weights."""

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the value after a number of steps."""


class LinearSchedule(Schedule):
    """A value that goes from one number to another at an even pace, and stays there.

    Parameters
    ----------
    start, end
        The first value and the last.
    steps
        When it is reached.
    begin
        The step until which the first value holds.

    Raises
    ------
    ArgumentError
        If `steps` is no whole number from 1 on, or `begin` none from 0 on.

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
        """Return the value after a number of steps."""
        done = min(1.0, max(0.0, (step - self.begin) / self.steps))
        return self.start * (1.0 - done) + self.end * done


class ExponentialSchedule(Schedule):
    """A value that shrinks towards a number by the same factor with each step.

    Parameters
    ----------
    start, end
        The first value, and the one that is approached.
    decay
        The part of the distance that is left after a step.

    Raises
    ------
    ArgumentError
        If `decay` is no number from 0 to 1.

    Examples
    --------
    >>> epsilon = ExponentialSchedule(1.0, 0.0, decay=0.5)
    >>> epsilon(0), epsilon(3)
    (1.0, 0.125)
    """

    def __init__(self, start: float, end: float, decay: float) -> None:
        self.start, self.end, self.decay = float(start), float(end), fraction("decay", decay)

    def __call__(self, step: int) -> float:
        """Return the value after a number of steps."""
        return self.end + (self.start - self.end) * self.decay**step
