"""NVIDIA's Multi-Process Service, which runs kernels of several processes at the same time instead of in turns."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from ...errors import SmartpruneError

PROGRAM = "nvidia-cuda-mps-control"
FOLDERS = (Path("/usr/local/nvidia/bin"),)  # where containers have it, besides the search path
VARIABLES = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


def find_program() -> str:
    """The program that starts the service."""
    found = shutil.which(PROGRAM) or next((str(folder / PROGRAM) for folder in FOLDERS if (folder / PROGRAM).exists()), None)
    if found is None:
        raise SmartpruneError(f"--mps needs {PROGRAM}, which was not found; it is part of NVIDIA's driver. Leave --mps out")
    return found


class MultiProcessService:
    """Runs the service for the processes that are started inside of the context."""

    def __enter__(self) -> None:
        self.control, self.folder = find_program(), tempfile.mkdtemp()
        os.environ |= dict.fromkeys(VARIABLES, self.folder)
        try:
            subprocess.run([self.control, "-d"], check=True)
        except (OSError, subprocess.SubprocessError) as error:
            self._clean()
            raise SmartpruneError(f"--mps: {self.control} -d failed ({error}); leave --mps out") from None

    def __exit__(self, *_: object) -> None:
        subprocess.run([self.control], input="quit\n", text=True, check=False)
        self._clean()

    def _clean(self) -> None:
        for name in VARIABLES:
            os.environ.pop(name, None)
        shutil.rmtree(self.folder, ignore_errors=True)
