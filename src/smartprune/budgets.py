"""The budgets by kind. A budget's class is imported when it is first used, so listing the kinds does not load torch."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from dataclasses import MISSING, fields
from fractions import Fraction
from importlib import import_module
from typing import Any

SPARSITY = "sparsity"  # what settings and tables call the share of a budget in blocks


class BudgetTable(UserDict[str, Any]):
    """Kind -> class of a budget, or ``module:class`` of one that is not imported yet."""

    def __getitem__(self, kind: str) -> Any:
        budget = self.data[kind]
        if isinstance(budget, str):
            module, _, name = budget.partition(":")
            budget = self.data[kind] = getattr(import_module(module, __package__), name)
        return budget


# One line per budget. A budget of your own is added in the same way: BUDGETS["energy"] = Energy.
BUDGETS = BudgetTable(
    {
        "blocks": ".core.budget:BlockBudget",
        "params": ".core.budget:ParamBudget",
        "macs": ".core.budget:MacBudget",
        "cycles": ".hardware.cycles:CycleBudget",
        "costs": ".hardware.costs:CostBudget",
        "latency": ".runtime.latency:LatencyBudget",
    }
)


def budget_names() -> tuple[str, ...]:
    """What settings and tables call the budgets: ``sparsity``, then every other kind.

    >>> budget_names()
    ('sparsity', 'params', 'macs', 'cycles', 'costs', 'latency')
    """
    return (SPARSITY, *(kind for kind in BUDGETS if kind != "blocks"))


def budget_unit(name: str) -> str:
    """What a budget counts, or the name itself if no such budget is registered.

    >>> budget_unit("sparsity"), budget_unit("params"), budget_unit("joules")
    ('blocks', 'weights', 'joules')
    """
    kind = "blocks" if name == SPARSITY else name
    return str(BUDGETS[kind].unit) if kind in BUDGETS else name


def budget_label(name: str) -> str:
    """What the share of a budget is a share of, such as ``NPU cycles``, or the name itself if no such budget is registered."""
    kind = "blocks" if name == SPARSITY else name
    return str(BUDGETS[kind].label) if kind in BUDGETS else name


def table_unit(table: Mapping[str, Any]) -> str:
    """What a budget with a table of costs counts: multiples of the table's resolution.

    >>> table_unit({"unit": "pJ", "resolution": "1"}), table_unit({"unit": "pJ", "resolution": "1/10"})
    ('pJ', 'units of 0.1 pJ')
    """
    size = Fraction(table["resolution"])
    return str(table["unit"]) if size == 1 else f"units of {float(size):g} {table['unit']}"


def removal(share: float, label: str, of: str = "layers") -> str:
    """What a budget removes, in words.

    >>> removal(0.95, "blocks"), removal(0.5, "MACs", of="model")
    ('remove 95% of the blocks', "remove 50% of the model's MACs")
    """
    owner = "the model's" if of == "model" else "the"
    return f"remove {100 * share:g}% of {owner} {label}"


def budget_fields(name: str, required: bool = False) -> set[str]:
    """The fields of a budget's class, such as ``example`` and ``npu``; empty if no such budget is registered.

    With ``required``, only those without a default.

    >>> [sorted(budget_fields(name, required=True)) for name in ("params", "costs", "latency")]
    [['share'], ['share', 'table'], ['example', 'share']]
    """
    kind = "blocks" if name == SPARSITY else name
    if kind not in BUDGETS:
        return set()
    return {
        field.name
        for field in fields(BUDGETS[kind])
        if not required or (field.default is MISSING and field.default_factory is MISSING)
    }
