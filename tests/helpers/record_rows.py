"""Rows of records."""

from __future__ import annotations

from typing import Any


def row(**changes: Any) -> dict[str, Any]:
    values = changes.pop("values", [1.0, 2.0, 3.0])
    fields = {"model": "m", "data": "d", "method": "smart", "block": "4x2", "sparsity": 0.5, "protocol": "p"}
    fields |= {"metric": "accuracy", "values": values, "mean": 2.0, "std": 1.0, "n": 3}
    return {**fields, **changes}
