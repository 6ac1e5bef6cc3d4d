"""N-step sampling: what the next steps of each row brought, and where an estimate of the rest belongs."""

from __future__ import annotations

from typing import Any

from samplebatch.arguments import fraction, whole
from samplebatch.buffer.reading import column_at
from samplebatch.buffer.ring import Ints
from samplebatch.buffer.table import Table
from samplebatch.errors import no_such_column
from samplebatch.returns import nstep_of_rings


def check_window(table: Table, n_step: int | None, gamma: float) -> None:
    """Check, before anything is drawn, that rows can stand for several steps; `n_step` is None for one.

    Raises
    ------
    ArgumentError
        If `n_step` is no whole number from 1 on, or `gamma` none from 0 to 1.
    ColumnNotFoundError
        If there are rows, and no next observations.
    """
    fraction("gamma", gamma)
    if n_step is not None:
        whole("n_step", n_step, 1)
        tree = table.columns.tree
        if table.keeps_next and tree and "obs_next" not in tree:
            raise no_such_column("obs_next", tree)


def nstep_columns(table: Table, slots: Ints, n_step: int, gamma: float, stack: int) -> dict[str, Any]:
    """Return what rows have beside their own values if they stand for several steps.

    A window ends early with its episode, however that ended, and with the newest step of the ring.

    Parameters
    ----------
    table, slots
        The rows, shape (n,).
    n_step
        The most steps of a window.
    gamma
        The discount of a step.
    stack
        How many steps to stack where observations are read.

    Returns
    -------
    dict
        `returns`, the discounted sum of the rewards, of their shape; `discount`, gamma to the number of steps, 0 where
        the last one is terminated, shape (n,); `obs_next`, the observation after the last step.

    Raises
    ------
    ArgumentError
        As `check_window` does.
    """
    rings, tree = table.rings, table.columns.tree
    flags = tree["terminated"].values, table.done
    found = nstep_of_rings(tree["rew"].values, *flags, rings.edges, rings.last_index, slots, n_step, gamma)
    obs_next = column_at(table, "obs_next", found.last, stack)
    return {"returns": found.returns, "discount": found.discount, "obs_next": obs_next}
