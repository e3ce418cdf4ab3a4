"""Thread pools, which all accelerated models of a process share."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from ...errors import SmartpruneError
from .build import Library

_POOLS: dict[tuple[str, int, int], tuple[int, AbstractContextManager[bool]]] = {}


def shared_pool(library: Library, threads: int) -> tuple[int, AbstractContextManager[bool]]:
    """A pool of this many threads, and the lock that its user holds.

    Ten models share one pool instead of starting ten; a forked process starts its own. A pool of one thread needs no common lock.
    """
    key = (library.code._name, threads, os.getpid())
    if key not in _POOLS:
        handle = library.code.sp_pool_new(threads)
        if not handle:
            raise SmartpruneError(f"accelerate: there is not enough memory for a pool of {threads} threads; use fewer threads")
        _POOLS[key] = handle, threading.RLock()
    return _POOLS[key] if threads > 1 else (_POOLS[key][0], threading.RLock())
