"""Names of parametrized test cases."""

from __future__ import annotations

import re


def plain_repr(value: object) -> str:
    """Represent a value without addresses, which differ between the processes of one run.

    >>> plain_repr(object())
    '<object object>'
    """
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
