"""The dense models of a sweep. Each is trained once, in a hidden run folder, and then kept as one file."""

from __future__ import annotations

import shutil
from pathlib import Path

from ...files import write_atomic
from ...run_files import DENSE


class DenseModels:
    """Dense models by name, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def run_folder(self, name: str) -> Path:
        """Where the dense model is trained."""
        return self.folder / f".{name}"

    def collect(self, name: str) -> bool:
        """Copies the dense model out of its run folder as soon as the dense stage has written it. True once it is there."""
        path, trained = self.path(name), self.run_folder(name) / DENSE
        if not path.exists() and trained.exists():
            write_atomic(path, trained.read_bytes())
        return path.exists()

    def remove_run_folder(self, name: str) -> None:
        shutil.rmtree(self.run_folder(name), ignore_errors=True)
