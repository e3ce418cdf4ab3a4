"""A sweep as one Slurm array script: every task runs one cell with ``smartprune sweep --only NAME``."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ...errors import SmartpruneError
from ...files import write_atomic
from .grid import Cell
from .sweep import LOGS

NOT_IN_TASKS = ("--slurm", "--jobs", "--minutes", "--only")  # flags with a value that belong to the whole sweep

SCRIPT = """\
#!/bin/bash
# {count} runs of a sweep. Submit them with: bash {file} [options of sbatch, such as --gres=gpu:1 --time=4:00:00]
# Submit it again to continue: finished runs are skipped, interrupted runs are resumed.
#SBATCH --job-name=smartprune
#SBATCH --output={logs}/slurm-%A_%a.txt
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
set -eu
first=({first})  # each trains a dense model first
rest=({rest})  # these use the dense models
if [ -z "${{SLURM_ARRAY_TASK_ID:-}}" ]; then
  mkdir -p {logs}
  job=$(sbatch --parsable "$@" --array=0-$((${{#first[@]}} - 1)) "$0" first)
  if [ ${{#rest[@]}} -gt 0 ]; then
    sbatch --parsable "$@" --dependency="afterany:${{job%%;*}}" --array=0-$((${{#rest[@]}} - 1)) "$0" rest
  fi
  exit
fi
if [ "$1" = first ]; then name=${{first[$SLURM_ARRAY_TASK_ID]}}; else name=${{rest[$SLURM_ARRAY_TASK_ID]}}; fi
cd {folder}
exec {command} --jobs 1 --only "$name"
"""


def write_script(path: Path, cells: Sequence[Cell], out: Path, words: Sequence[str], python: str) -> None:
    """Writes the script. ``words`` are the arguments of the command that describes the grid.

    Cells that share a dense model wait for the first of them, which trains it.
    """
    if not cells:
        raise SmartpruneError(f"--slurm {path}: all runs of the grid are done, so there is nothing to submit; leave --slurm out")
    first = list({cell.name if cell.dense is None else cell.dense: cell.name for cell in reversed(cells)}.values())[::-1]
    rest = [cell.name for cell in cells if cell.name not in first]
    text = SCRIPT.format(
        count=len(cells),
        file=path,
        logs=shlex.quote(str((out / LOGS).absolute())),
        first=shlex.join(first),
        rest=shlex.join(rest),
        folder=shlex.quote(str(Path.cwd())),
        command=shlex.join([python, "-m", "smartprune", *without_flags(words, NOT_IN_TASKS)]),
    )
    try:
        write_atomic(path, text.encode())
        path.chmod(0o755)
    except OSError as error:
        raise SmartpruneError(f"--slurm {path}: the script cannot be written ({error.strerror or error})") from None


def without_flags(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without these flags and their values."""
    out, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in flags:
            skip = True
        elif word.partition("=")[0] not in flags:
            out.append(word)
    return out
