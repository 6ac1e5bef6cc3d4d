"""Returns, advantages and n-step targets of steps in time order: functions of arrays, batches and buffers.

`discounted_returns`, `gae`, `nstep` and `vtrace` accept arrays. `compute_episodic_return`, `compute_nstep_return` and
`compute_vtrace_return` accept a batch and the buffer's slots that it comes from, in Tianshou's words. `gae_of_rows`,
`discounted_returns_of_rows` and `vtrace_of_rows` accept ragged columns, whose rows are one trajectory each.

Throughout, an episode that was *terminated* is over: what would come next is worth 0. One that was *truncated* goes on
unseen, as does one that the last row leaves unfinished: learners bootstrap there, with an estimate that the caller
gives. The sums are float64 for any dtypes given. The loops are compiled: see `samplebatch.kernels` for what the
first call of a process costs.
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
    from samplebatch.returns.arrays import nstep_of_rings as nstep_of_rings
    from samplebatch.returns.arrays import vtrace as vtrace
    from samplebatch.returns.batches import compute_episodic_return as compute_episodic_return
    from samplebatch.returns.batches import compute_nstep_return as compute_nstep_return
    from samplebatch.returns.batches import compute_vtrace_return as compute_vtrace_return
    from samplebatch.returns.batches import value_mask as value_mask
    from samplebatch.returns.rows import discounted_returns_of_rows as discounted_returns_of_rows
    from samplebatch.returns.rows import gae_of_rows as gae_of_rows
    from samplebatch.returns.rows import vtrace_of_rows as vtrace_of_rows

__getattr__, __dir__, __all__ = exports(__name__)
