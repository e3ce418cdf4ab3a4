"""A Ray cluster of this machine alone, which sends nothing and listens on free ports."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PORTS = ("port", "dashboard-agent-grpc-port", "dashboard-agent-listen-port", "runtime-env-agent-port", "metrics-export-port")
SECONDS = 400  # it takes five where nothing else runs


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def ray_cluster(cpus: int) -> Iterator[dict[str, str]]:
    """Starts the cluster, and yields the environment variables with which a process connects to it.

    A cluster that runs at RAY_ADDRESS already is used as it is.
    """
    if "RAY_ADDRESS" in os.environ:
        yield {}
        return
    folder = tempfile.mkdtemp(prefix="ray")  # short, because a path of a socket has at most 107 characters
    ports = free_ports(len(PORTS))
    environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": str(SECONDS)}
    words = [f"--{name}={port}" for name, port in zip(PORTS, ports, strict=True)]
    words += ["--node-ip-address=127.0.0.1", f"--num-cpus={cpus}", "--object-store-memory=80000000", f"--temp-dir={folder}"]
    program = str(Path(sys.executable).with_name("ray"))
    log = Path(folder) / "start.log"
    with log.open("wb") as file:
        head = subprocess.Popen(
            [program, "start", "--head", "--block", "--include-dashboard=false", "--disable-usage-stats", *words],
            env={**os.environ, **environment}, stdout=file, stderr=file, start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + SECONDS
        while "Ray runtime started" not in log.read_text():
            assert head.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{ports[0]}"}
    finally:
        head.terminate()  # it ends all processes of the cluster
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)
        head.wait()
        shutil.rmtree(folder, ignore_errors=True)
