"""Thread pools, which all accelerated models of a process share."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import SmartpruneError
from ..forks import ForkLock
from .build import Library


@dataclass(frozen=True)
class Pool:
    """The address of a pool of threads, and the lock that its user holds. A forked process starts threads of its own."""

    address: int
    lock: ForkLock


_POOLS: dict[tuple[str, int], Pool] = {}


def shared_pool(library: Library | None, threads: int) -> Pool:
    """A pool of this many threads. Ten models share one instead of starting ten. A pool of one thread needs no common lock.

    Without a library it is empty.
    """
    if library is None:
        return Pool(0, ForkLock())
    key = library.code._name, threads
    if key not in _POOLS:
        address = library.code.sp_pool_new(threads)
        if not address:
            raise SmartpruneError(f"accelerate: there is not enough memory for a pool of {threads} threads; use fewer threads")
        _POOLS[key] = Pool(address, ForkLock())
    return _POOLS[key] if threads > 1 else Pool(_POOLS[key].address, ForkLock())
