"""Batches of token rollouts: packing, balancing, minibatches with token limits, and groups of rows.

The functions of this package implement the `SampleBatch` methods of the same names. The functions of this package
accept any batch with ragged columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.tokens.packing import PackedBatch as PackedBatch
    from samplebatch.tokens.packing import Parts as Parts
    from samplebatch.tokens.packing import balance as balance
    from samplebatch.tokens.packing import chunk as chunk
    from samplebatch.tokens.packing import pack as pack
    from samplebatch.tokens.packing import token_minibatches as token_minibatches
    from samplebatch.tokens.rows import Groups as Groups
    from samplebatch.tokens.rows import assign as assign
    from samplebatch.tokens.rows import group_by as group_by
    from samplebatch.tokens.rows import repeat as repeat
    from samplebatch.tokens.rows import union as union

__getattr__, __dir__, __all__ = exports(__name__)
