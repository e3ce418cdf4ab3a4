"""Which runs count as the same: their task, model, block, protocol, method, budget and seed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...budgets import SPARSITY, budget_fields, budget_names
from ...fields import Fields
from ...training.config import BUDGET_SETTINGS, budget_share
from .labels import format_setting, method_label, task_label

# settings with a place of their own in a table, and settings that only say where and how fast a run was
SHOWN_APART = ("task", "task_settings", "model", "method", "settings", "block", *BUDGET_SETTINGS, "seed")
IGNORED = (
    "out",
    "dense",
    "device",
    "threads",
    "compile",
    "graph",
    "checkpoint_seconds",
    "parallel",
    "tensorboard",
    "track",
    "onnx",
)
# settings without effect at this value, and settings that have no effect if another one has none
NEUTRAL = {
    "amp": "off", "schedule_over": "stage", "accumulate": 1, "warmup_epochs": 0, "clip_norm": 0, "ema": 0, "distill": 0,
    "augment": 0, "score_decay": 0, "deterministic": "off", "sync_bn": "off",
}  # fmt: skip
DEPENDS_ON = {"warmup_start": "warmup_epochs", "distill_temperature": "distill", "augment_over": "augment"}
MAX_SEEDS, MAX_TEXT = 10_000, 10_000  # of a row

RunKey = tuple[str, str, str, str, str, tuple[str, float], int]  # task, model, block, protocol, method, budget, seed


def run_key(config: Mapping[str, Any]) -> RunKey:
    """What identifies a run. Two runs with the same key are the same run."""
    method = method_label(config["method"], config["settings"])
    return task_label(config), config["model"], config["block"], protocol(config), method, budget_share(config), config["seed"]


def row_keys(row: Mapping[str, Any], where: str) -> list[RunKey]:
    """The keys of the runs in a row of a result file; none for a row of other measurements."""
    if "seeds" not in row:
        return []
    checked = Fields(dict(row), where)
    task, model, block, line, method = (checked.text(name, MAX_TEXT) for name in ("data", "model", "block", "protocol", "method"))
    method = method_label(method.partition("(")[0], checked.nested("settings").data)
    kind = next((name for name in budget_names() if row.get(name) is not None), SPARSITY)
    seeds = checked.integers("seeds", 0, MAX_SEEDS)
    if len(seeds) != row["n"]:
        raise checked.error("seeds", f"a list of {row['n']} integers, one per value")
    return [(task, model, block, line, method, (kind, checked.number(kind)), seed) for seed in seeds]


def protocol(config: Mapping[str, Any]) -> str:
    """How a run was trained, in one line. Runs with the same line were trained in the same way.

    >>> protocol({"dense_epochs": 30, "search_epochs": 40, "finetune_epochs": 30, "batch": 64, "floor": None})
    '30 dense + 40 search + 30 fine-tuning epochs, batch 64'
    """
    settings = {name: value for name, value in config.items() if name not in (*SHOWN_APART, *IGNORED)}
    epochs = [settings.pop(name, "?") for name in ("dense_epochs", "search_epochs", "finetune_epochs")]
    parts = ["{} dense + {} search + {} fine-tuning epochs".format(*epochs)]
    if "npu" not in budget_fields(budget_share(config)[0]):
        settings.pop("npu", None)
    elif isinstance(settings.get("npu"), str):
        settings["npu"] = os.path.basename(settings["npu"])  # the folder of an NPU file does not matter
    if isinstance(settings.get("cost_table"), str):
        settings["cost_table"] = os.path.basename(settings["cost_table"])
    if "poly" not in (settings.get("schedule"), settings.get("search_schedule")):
        settings.pop("poly_power", None)
    unused = {name for name, value in NEUTRAL.items() if name in settings and settings[name] == value}
    unused |= {name for name, other in DEPENDS_ON.items() if other in unused}
    for name, value in settings.items():
        if name in unused or value in (None, "", [], ()):
            continue
        shown = " ".join(value) if isinstance(value, (list, tuple)) else format_setting(value)
        parts.append(shown if name == "optimizer" else f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)
