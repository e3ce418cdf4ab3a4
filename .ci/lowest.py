"""Prints the oldest version that pyproject.toml allows of every package, as constraints for pip. torch is not listed.

python .ci/lowest.py > constraints.txt
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

LEFT_OUT = ("torch", "triton")  # make selects torch, and triton has to fit it
OTHER_EXTRAS = ("dev", "mlflow", "wandb")  # extras that these tests do not use; make hosts tests the trackers


def lowest(project: dict) -> list[str]:
    """``name==version`` for every lower bound of the dependencies and the extras."""
    extras = [lines for name, lines in project["optional-dependencies"].items() if name not in OTHER_EXTRAS]
    bounds = [re.match(r"([\w-]+)>=([\d.]+)", line) for lines in [project["dependencies"], *extras] for line in lines]
    return sorted({f"{bound[1]}=={bound[2]}" for bound in bounds if bound is not None and bound[1] not in LEFT_OUT})


if __name__ == "__main__":
    print("\n".join(lowest(tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"])))
