"""Contact sheets: frames of an image column side by side, as a picture that stands within a page."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode

import numpy as np
import numpy.typing as npt

from samplebatch.column.interface import Column

_MAX_FRAMES = 24
_FRAMES_A_ROW = 8
_MIN_SIDE = 8
"""Pixels that a side of an image has at least; smaller rows are features."""
_GAP = 2
_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def contact_sheet(column: Column) -> str:
    """Draw evenly spaced frames of a column as a data URI of a PNG; "" if its rows are no images.

    Images are rows of bytes of shape (height, width), with up to four channels before or after. Three channels are
    colours; of others, such as stacked frames, the last is drawn.

    Examples
    --------
    >>> from samplebatch.column import as_column
    >>> contact_sheet(as_column(np.zeros((30, 16, 16, 3), np.uint8), "obs"))[:22]
    'data:image/png;base64,'
    >>> contact_sheet(as_column(np.zeros((30, 4)), "obs"))
    ''
    """
    shape = column.row_shape
    if str(column.dtype).removeprefix("torch.") != "uint8" or None in shape or not len(column):
        return ""
    channels = _channels_at(tuple(extent for extent in shape if extent is not None))
    if channels is None:
        return ""
    chosen = np.linspace(0, len(column) - 1, min(len(column), _MAX_FRAMES)).astype(np.intp)
    frames = column.take(chosen).to_numpy()
    if channels:
        frames = np.moveaxis(frames, channels, -1)
        frames = frames if frames.shape[-1] == 3 else frames[..., -1]
    return "data:image/png;base64," + b64encode(_png(_tile(frames))).decode()


def _channels_at(shape: tuple[int, ...]) -> int | None:
    """Return the axis of the channels of rows, 0 if images have none, or None if rows are no images."""
    if len(shape) == 2 and min(shape) >= _MIN_SIDE:
        return 0
    for axis, sides in ((3, shape[:2]), (1, shape[1:])):
        if len(shape) == 3 and min(sides) >= _MIN_SIDE and shape[axis - 1] <= 4:
            return axis
    return None


def _tile(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Lay frames of shape (n, height, width, ...) in rows, with white between them."""
    n, height, width = frames.shape[:3]
    across = min(n, _FRAMES_A_ROW)
    down = -(-n // across)
    sheet = np.full((down * (height + _GAP), across * (width + _GAP), *frames.shape[3:]), 255, np.uint8)
    for place, frame in enumerate(frames):
        top, left = place // across * (height + _GAP), place % across * (width + _GAP)
        sheet[top : top + height, left : left + width] = frame
    return sheet[:-_GAP, :-_GAP]


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    """Encode an image of shape (height, width) or (height, width, 3) as PNG."""
    height, width = image.shape[:2]
    colour = 2 if image.ndim == 3 else 0
    lines = np.zeros((height, 1 + image[0].size), np.uint8)
    lines[:, 1:] = image.reshape(height, -1)
    chunks = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes())),
        (b"IEND", b""),
    )
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    )
