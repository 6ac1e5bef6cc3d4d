"""Figures of a training: the numbers of its reports, their recent means, and their words for people."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, isnan
from typing import Any

from samplebatch.rollout.collect_statistics import PrintedAsDict

_WINDOW = 100
"""Values that a mean of recent ones is taken of."""

Figures = dict[str, Any]
"""Numbers by name, in groups that may be nested: `{"loss": 0.5, "returns_stat": {"mean": 200.0}}`."""


def figures_of(stats: Any) -> Figures:
    """Return the numbers of a report by name, summaries of several nested; arrays, batches and None are left out.

    Examples
    --------
    >>> import numpy as np
    >>> from samplebatch.rollout import CollectStats
    >>> found = figures_of(CollectStats.from_counts(steps=6, time_s=2.0, returns=np.array([1.0]), lens=np.array([2])))
    >>> found["n_collected_steps"], found["returns_stat"]["mean"], "returns" in found
    (6, 1.0, False)
    """
    own = vars(stats) if hasattr(stats, "__dict__") else dict(stats)
    found: Figures = {}
    for name, value in own.items():
        if isinstance(value, PrintedAsDict):
            found[name] = figures_of(value)
        elif isinstance(value, Mapping):
            if nested := figures_of(value):
                found[name] = nested
        elif isinstance(value, int | float):
            found[name] = value
    return found


def flat_figures(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return figures with `/` between the names of groups and those in them; others than numbers are left out.

    Examples
    --------
    >>> flat_figures({"loss": 1, "returns_stat": {"mean": 2.5, "of": None}})
    {'loss': 1.0, 'returns_stat/mean': 2.5}
    """
    found: dict[str, float] = {}
    for name, value in figures.items():
        if isinstance(value, Mapping):
            found |= {f"{name}/{inner}": number for inner, number in flat_figures(value).items()}
        elif isinstance(value, int | float):
            found[str(name)] = float(value)
    return found


def short(value: Any) -> str:
    """Write a figure in few characters.

    >>> short(12345), short(0.25), short(float("nan"))
    ('12345', '0.25', '-')
    """
    if isinstance(value, int):
        return str(value)
    return "-" if isnan(value) else f"{value:.4g}"


@dataclass
class RecentMeans:
    """Means of figures over their last 100 values, for trainers; values that are not finite are left out.

    Examples
    --------
    >>> losses = RecentMeans()
    >>> losses.add({"loss": 1.0}), losses.add({"loss": 3.0}), losses.add({"loss": float("nan")})
    ({'loss': 1.0}, {'loss': 2.0}, {'loss': 2.0})
    """

    values: dict[str, deque[float]] = field(default_factory=dict)

    def add(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Add a value of some figures, and return their means."""
        for name, value in figures.items():
            own = self.values.setdefault(name, deque(maxlen=_WINDOW))
            if isfinite(value):
                own.append(float(value))
        return {name: self.mean(name) for name in figures}

    def mean(self, name: str) -> float:
        """Return the mean of a figure; 0 if it has no value."""
        own = self.values.get(name)
        return sum(own) / len(own) if own else 0.0

    def state_dict(self) -> dict[str, list[float]]:
        """Return the values that means are taken of, for `load_state_dict`."""
        return {name: list(own) for name, own in self.values.items()}

    def load_state_dict(self, state: Mapping[str, list[float]]) -> None:
        """Go on with the values of another training."""
        self.values = {name: deque(own, maxlen=_WINDOW) for name, own in state.items()}
