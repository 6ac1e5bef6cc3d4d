"""Private storage of batches and buffers in files; lower layers import this package on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samplebatch.exports import exports

if TYPE_CHECKING:
    from samplebatch.storage.buffers.mapped import open_buffer as open_buffer
    from samplebatch.storage.buffers.mapped import store_in_folder as store_in_folder
    from samplebatch.storage.buffers.state import export_state as export_state
    from samplebatch.storage.buffers.state import load_state as load_state
    from samplebatch.storage.buffers.tianshou import load_hdf5_buffer as load_hdf5_buffer
    from samplebatch.storage.buffers.tianshou import save_hdf5_buffer as save_hdf5_buffer
    from samplebatch.storage.saving import load_buffer as load_buffer
    from samplebatch.storage.saving import save as save

__getattr__, __dir__, _ = exports(__name__)
