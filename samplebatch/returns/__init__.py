"""Returns, advantages and n-step targets of arrays, ragged columns, batches and buffers.

`gae`, `vtrace` and `discounted_returns` accept arrays and ragged columns; `nstep` accepts only arrays.
`compute_episodic_return`, `compute_nstep_return` and `compute_vtrace_return` accept a batch and optionally its buffer
and slots, with Tianshou's interface.

After a *terminated* step, the value of the next state is 0. After a *truncated* step, and after an unfinished last row,
learners bootstrap from an estimate that the caller supplies. Sums are computed in float64 for all input dtypes. Loops
over steps are compiled; only the first calls in a process run in NumPy (see `samplebatch.deferred_kernels`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.returns.arrays import NStep as NStep
    from samplebatch.returns.arrays import VTrace as VTrace
    from samplebatch.returns.arrays import discounted_returns as discounted_returns
    from samplebatch.returns.arrays import gae as gae
    from samplebatch.returns.arrays import nstep as nstep
    from samplebatch.returns.arrays import vtrace as vtrace
    from samplebatch.returns.batches import compute_episodic_return as compute_episodic_return
    from samplebatch.returns.batches import compute_nstep_return as compute_nstep_return
    from samplebatch.returns.batches import compute_vtrace_return as compute_vtrace_return

__getattr__, __dir__, __all__ = exports(__name__)
