"""The top of a report page: the verdict in one sentence, the key figures, and problems."""

from __future__ import annotations

from ..artifacts.counts import Requested, removed_blocks
from ..budgets import budget_label
from ..hardware.estimate import Estimate
from ..text import percent
from .runlog import RunLog
from .shell import html_text
from .view import View

SIZES, COUNTS = ("smaller", "larger", "about as large"), ("fewer", "more", "about as many")
MAX_PROBLEMS = 20
MINUS, TIMES, MIDDLE_DOT = "\u2212", "\u00d7", "\u00b7"


def verdict(view: View) -> str:
    """What was requested and what was achieved, in one sentence of escaped HTML."""
    parts = [_budget_verdict(view)]
    log, receipt = view.log, view.receipt
    if log is not None and (pruned := log.result_number("pruned")) is not None:
        dense = log.result_number("dense")
        change = "" if dense is None else f" (dense {100 * dense:.2f} %, {_points(pruned - dense)})"
        parts.append(f"{log.measure or 'metric'} {100 * pruned:.2f} %{change}")
    if receipt is not None and receipt.model_macs is not None and not view.problems:
        parts.append(f"{share(receipt.model_macs.kept, receipt.model_macs.total)} of the MACs of the model left")
    if view.sizes is not None and view.sizes[1] * 1.05 < view.sizes[0]:
        parts.append(f"{_times(view.sizes[0] / view.sizes[1], SIZES)} when packed")
    if view.estimate is not None:
        parts.append(f"{_times(view.estimate.speedup, COUNTS)} cycles on an NPU")
    if (speed := _cpu_speed(view.log)) is not None:
        parts.append(f"{speed[1] / speed[2]:.1f}{TIMES} as fast on this CPU")
    return html_text("; ".join(parts) + ".").replace(" %", "&nbsp;%")


def _budget_verdict(view: View) -> str:
    receipt, blocks = view.receipt, view.blocks
    if view.problems:
        return "The weights do not match the receipt"
    if receipt is None:
        label, value, note = _zeros_figure(view)
        return f"{label} {value} ({note})"
    sparsity = (
        f"sparsity {share(blocks.removed, blocks.total)} ({blocks.kept:,} of {blocks.total:,} blocks of the pruned layers left)"
    )
    budget = receipt.requested
    if budget is None:
        return sparsity[0].upper() + sparsity[1:]
    goal = requested_share(budget)
    if not receipt.met:
        return (
            f"Budget not met: {goal} should be removed, but {budget.used:,} of {budget.total:,} are left where "
            f"{budget.limit:,} are allowed; {sparsity}"
        )
    if budget.is_exact:
        return f"Pruned exactly as requested: {sparsity}"
    removed = share(budget.total - budget.used, budget.total)
    return f"Pruned as requested: {removed} of {_budget_whole(budget)} removed, at least {goal} requested; {sparsity}"


def _zeros_figure(view: View) -> tuple[str, str, str]:
    """Label, share and note without a receipt: of all blocks, or of single weights where the order of axes is assumed."""
    report = view.report
    if report.assumed:
        note = f"{report.zeros:,} of {report.params:,} single weights of the model"
        return "Zero weights", share(report.zeros, report.params), note
    blocks = report.blocks
    layers = "the only layer" if len(report.layers) == 1 else f"all {len(report.layers)} layers"
    return "Zero blocks", share(blocks.removed, blocks.total), f"{blocks.removed:,} of {blocks.total:,} blocks of {layers}"


def requested_share(budget: Requested) -> str:
    """What a budget asks for, such as ``95 % of the blocks``."""
    return f"{100 * float(budget.share):g} % of {_budget_whole(budget)}"


def _budget_whole(budget: Requested) -> str:
    """What the share of a budget is a share of."""
    if budget.is_exact:
        return "the blocks"
    return f"the {budget_label(budget.kind)} of the {'model' if budget.of == 'model' else 'pruned layers'}"


def key_figures(view: View) -> list[tuple[str, str, str]]:
    """Label, value and note of every tile. Figures that are not known are left out."""
    receipt, log = view.report.receipt, view.log
    figures = [_first_figure(view)]
    if log is not None and log.result is not None:
        figures.append(_metric_figure(log))
    if receipt is not None and receipt.model_macs is not None:
        macs, pruned = receipt.model_macs, receipt.macs
        note = f"{macs.kept:,} of {macs.total:,} per sample" + (f", {_times(macs.total / macs.kept, COUNTS)}" if macs.kept else "")
        note += "" if pruned is None else f"; {share(pruned.kept, pruned.total)} of the MACs of the pruned layers"
        figures.append(("MACs of the model left", share(macs.kept, macs.total), note))
    if view.sizes is not None:
        plain, packed = view.sizes
        figures.append(("Size, packed", _bytes(packed), f"{_bytes(plain)} plain, {_times(plain / packed, SIZES)}"))
    if view.estimate is not None:
        estimate = view.estimate
        note = f"{estimate.latency:,} of {estimate.dense.latency:,}, estimated for {npu_label(estimate)}"
        note += f"; {estimate.mac_speedup:.1f}{TIMES} by MACs alone"
        figures.append(("Cycles on an NPU", _times(estimate.speedup, COUNTS), note))
    if log is not None and (speed := _cpu_speed(log)) is not None:
        engine, dense_ms, ms = speed
        int8 = log.engine_times().get("smartprune int8")
        note = f"{ms:.3g} ms vs. {dense_ms:.3g} ms in {engine}, batch 1" + ("" if int8 is None else f"; int8 {int8:.3g} ms")
        figures.append(("Speed on this CPU", f"{dense_ms / ms:.1f}{TIMES}", note))
    return figures


def _first_figure(view: View) -> tuple[str, str, str]:
    """The sparsity with its budget. Without a receipt that the weights match, the share of zeros."""
    receipt = view.report.receipt
    if receipt is None:
        label, value, note = _zeros_figure(view)
        if view.report.assumed:
            note += "; blocks are not counted here, because the order of some axes is assumed"
        return label, value, f"{note}; {'the receipt does not match' if view.problems else 'no receipt found'}"
    note, budget = removed_blocks(receipt.blocks), receipt.requested
    if budget is not None:
        note += f"; requested: {requested_share(budget)}, keep {budget.bound} {budget.limit:,} of {budget.total:,}"
        note += f"; kept {budget.used:,}"
    return "Sparsity", share(receipt.blocks.removed, receipt.blocks.total), note


def _metric_figure(log: RunLog) -> tuple[str, str, str]:
    dense, pruned = log.result_number("dense"), log.result_number("pruned")
    note = "test split" if dense is None else f"test split; dense {100 * dense:.2f} %"
    note += "" if dense is None or pruned is None else f", {_points(pruned - dense)}"
    return log.title, "not scored" if pruned is None else f"{100 * pruned:.2f} %", note


def _cpu_speed(log: RunLog | None) -> tuple[str, float, float] | None:
    """The fastest dense engine, its milliseconds and those of smartprune; None without a benchmark."""
    times = {} if log is None else log.engine_times()
    dense = {name: ms for name, ms in times.items() if not name.startswith("smartprune") and not name.endswith(("int8", "bf16"))}
    if not dense or "smartprune" not in times:
        return None
    fastest = min(dense, key=dense.__getitem__)
    return fastest, dense[fastest], times["smartprune"]


def chips(view: View) -> str:
    """Short statements on the budget, the receipt and the run."""
    receipt = view.receipt
    entries = []
    if receipt is not None and receipt.requested is not None:
        entries.append(("good", "as requested") if receipt.met else ("bad", "budget not met"))
    if receipt is None:
        entries.append(("", view.report.note or "no receipt: counted from the weights"))
    elif view.problems:
        entries.append(("bad", "weights do not match the receipt"))
    else:
        entries.append(("good", "weights match the receipt"))
    if view.report.assumed:
        count = len(view.report.assumed)
        entries.append(("", f"the order of axes is assumed in {'1 layer' if count == 1 else f'{count} layers'}"))
    if view.log is not None and view.log.result is None:
        entries.append(("", "the run is not finished"))
    return f'<ul class="chips">{"".join(f"<li class={kind!r}>{html_text(label)}</li>" for kind, label in entries)}</ul>'.replace(
        "'", '"'
    )


def alert(view: View) -> str:
    """A warning with all problems of the weights; empty without problems."""
    problems = list(dict.fromkeys([*view.problems, *(f"{weight}: holds NaN or infinity" for weight in view.nonfinite)]))
    if not problems:
        return ""
    lines = "".join(f"<li>{html_text(problem)}</li>" for problem in problems[:MAX_PROBLEMS])
    more = f"<li>and {len(problems) - MAX_PROBLEMS:,} more</li>" if len(problems) > MAX_PROBLEMS else ""
    return f'<div class="alert" role="alert"><strong>Do not ship this file as it is.</strong><ul>{lines}{more}</ul></div>'


def kicker(view: View) -> str:
    """The line above the verdict: the model, its task and its method."""
    config = view.log.config if view.log is not None else {}
    names = [str(config[key]) for key in ("model", "task", "method") if isinstance(config.get(key), str)]
    return f" {MIDDLE_DOT} ".join([view.title, *names, f"blocks of {view.report.block}"])


def share(part: int, whole: int) -> str:
    return percent(part, whole).replace("%", " %")


def npu_label(estimate: Estimate) -> str:
    npu = estimate.npu
    return f"a {npu.rows}{TIMES}{npu.columns} array at {npu.clock_mhz:g} MHz"


def _times(ratio: float, nouns: tuple[str, str, str]) -> str:
    """``2.0x smaller`` for a ratio of 2, ``2.0x larger`` for a ratio of 0.5."""
    factor, (less, more, same) = f"{max(ratio, 1 / ratio):.1f}", nouns
    return same if factor == "1.0" else f"{factor}{TIMES} {less if ratio > 1 else more}"


def _points(change: float) -> str:
    points = f"{100 * change:+.2f}"
    return "same as the dense model" if float(points) == 0 else f"{points} points".replace("-", MINUS)


def _bytes(size: int) -> str:
    for unit, step in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= step:
            return f"{size / step:.3g} {unit}" if size < 1000 * step else f"{size / step:,.0f} {unit}"
    return f"{size} bytes"
