"""Forks while other threads run accelerated models, as data loaders make them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import smartprune as sp
from smartprune.runtime.forks import ForkLock

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
FORKS = 30
PROGRAM = """
import os, signal, sys, threading
import torch
from torch import nn
import smartprune as sp

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(8, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 8, 3, padding=1)).eval()
x = torch.randn(4, 8, 24, 24)
fast = sp.accelerate(model, threads=int(sys.argv[1]), example=x)
expected = fast(x)
makes_plans = sys.argv[2] == "plans"
ends = threading.Event()


def work():
    sizes = iter(range(1, 1_000_000))
    while not ends.is_set():
        if makes_plans:
            sp.accelerate(model, threads=1)(torch.randn(1, 8, 6, 3 + next(sizes) % 50))
        else:
            fast(x)


thread = threading.Thread(target=work)
thread.start()
status = []
for _ in range(int(sys.argv[3])):
    child = os.fork()
    if child == 0:  # exceptions must not leave this branch
        signal.alarm(120)  # ends a child that would wait forever
        try:
            new = sp.accelerate(model, threads=2)(x) if makes_plans else fast(x)
            close = torch.equal(fast(x), expected) and float((new - expected).abs().max()) < 1e-4
            os._exit(0 if close else 3)
        finally:
            os._exit(4)
    status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if status[-1]:
        break
ends.set()
thread.join()
print(status)
"""


@pytest.mark.parametrize(("threads", "work"), [(1, "calls"), (3, "calls"), (1, "plans")])
def test_children_run_the_model_while_another_thread_of_the_parent_does(threads: int, work: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(sp.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(threads), work, str(FORKS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == str([0] * FORKS), done.stderr


def test_a_lock_is_free_after_a_fork() -> None:
    lock, held, ends = ForkLock(threading.Lock), threading.Event(), threading.Event()

    def hold() -> None:
        with lock.lock:
            held.set()
            ends.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if lock.lock.acquire(blocking=False) else 3)  # type: ignore[attr-defined]
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not lock.lock.acquire(blocking=False)  # type: ignore[attr-defined]
    ends.set()
    thread.join()
