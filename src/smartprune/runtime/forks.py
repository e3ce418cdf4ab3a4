"""Locks that are free after a fork: the thread that held one does not exist in the new process."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

_LOCKS: weakref.WeakSet[ForkLock] = weakref.WeakSet()


class ForkLock:
    """Holds a lock, and replaces it in a forked process. Use it as ``with owner.lock:``."""

    def __init__(self, kind: Callable[[], AbstractContextManager[bool]] = threading.RLock) -> None:
        self._kind = kind
        self.lock = kind()
        _LOCKS.add(self)

    def renew(self) -> None:
        self.lock = self._kind()


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
