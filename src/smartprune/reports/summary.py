"""The top of a report page: the verdict in one sentence, the key figures, and problems."""

from __future__ import annotations

from ..artifacts.counts import Requested, removed_blocks
from ..hardware.estimate import Estimate
from ..runtime.speed import expected_speedup
from ..text import percent
from .noise import accuracy_noise
from .runlog import RunLog
from .shell import MIDDLE_DOT, html_text, origin_line
from .view import View

SIZES, COUNTS = ("smaller", "larger", "about as large"), ("fewer", "more", "about as many")
MAX_PROBLEMS = 20
MINUS, TIMES = "\u2212", "\u00d7"


def verdict(view: View) -> str:
    """What was requested and what was achieved, in one line of escaped HTML. The tiles hold the figures."""
    return html_text(_budget_verdict(view)).replace(" %", "&nbsp;%")


def _budget_verdict(view: View) -> str:
    receipt, blocks = view.receipt, view.blocks
    if view.problems:
        return "The weights do not match the receipt"
    if receipt is None:
        label, value, _ = _zeros_figure(view)
        return f"{label}: {value}"
    budget = receipt.requested
    if budget is None or budget.is_exact:
        removed = f"{share(blocks.removed, blocks.total)} of the blocks removed"
    else:
        removed = f"{share(budget.total - budget.used, budget.total)} of the {budget.label} removed"
    if budget is None:
        return removed
    return removed if receipt.met else f"{removed}, not {100 * float(budget.share):g} % as requested"


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
    return f"the {budget.label} of the {'model' if budget.of == 'model' else 'pruned layers'}"


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
    return [*figures, *_speed_figure(view)]


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
    dense, pruned, samples = (log.result_number(name) for name in ("dense", "pruned", "samples"))
    note = "test split" if dense is None else f"test split; dense {100 * dense:.2f} %"
    if dense is not None and pruned is not None:
        known = (
            log.measure == "accuracy"
            and samples is not None
            and samples >= 1
            and 0 <= min(dense, pruned) <= max(dense, pruned) <= 1
        )
        noise = accuracy_noise(dense, pruned, samples or 0) if known else None
        note += f", {_points(pruned - dense)}; one run, so "
        note += "its noise is not known" if noise is None else f"up to ±{100 * noise:.2f} may be chance ({samples:,.0f} samples)"
    return log.title, "not scored" if pruned is None else f"{100 * pruned:.2f} %", note


def _speed_figure(view: View) -> list[tuple[str, str, str]]:
    """The speed on a CPU: measured where a benchmark ran, else expected from the MACs that are left."""
    if view.log is not None and (speed := _cpu_speed(view.log)) is not None:
        engine, dense_ms, ms = speed
        int8 = view.log.engine_times().get("smartprune int8")
        note = f"measured: {ms:.3g} ms, {dense_ms:.3g} ms in {engine}, batch 1" + ("" if int8 is None else f"; int8 {int8:.3g} ms")
        return [("Speed on this CPU", f"{dense_ms / ms:.1f}{TIMES}", note)]
    macs = None if view.report.receipt is None else view.report.receipt.model_macs
    if macs is None:
        return []
    expected = expected_speedup(macs.kept, macs.total)
    if expected is None:
        return [("Speed on a CPU", "not measured", "too small to expect a speed from its MACs; smartprune bench measures it")]
    note = f"from the MACs left, {expected.low:.1f} to {expected.high:.1f}{TIMES} likely; smartprune bench measures it"
    return [("Speed on a CPU, expected", f"{expected.typical:.1f}{TIMES}", note)]


def _cpu_speed(log: RunLog | None) -> tuple[str, float, float] | None:
    """The fastest dense engine, its milliseconds, and the milliseconds of smartprune; None without a benchmark."""
    times = {} if log is None else log.engine_times()
    dense = {name: ms for name, ms in times.items() if not name.startswith("smartprune") and not name.endswith(("int8", "bf16"))}
    if not dense or "smartprune" not in times:
        return None
    fastest = min(dense, key=dense.__getitem__)
    return fastest, dense[fastest], times["smartprune"]


def origin(view: View) -> str:
    """When, with what and how the model was made, as far as it is known: a line of escaped HTML, or nothing."""
    result = (view.log.result if view.log is not None else None) or {}
    versions = result.get("versions")
    named = versions if isinstance(versions, dict) else {}
    parts = [str(result["finished"])] if isinstance(result.get("finished"), str) else []
    parts += [f"{name} {named[name]}" for name in ("smartprune", "torch", "python") if isinstance(named.get(name), str)]
    command = result.get("command")
    return origin_line(parts, command if isinstance(command, str) else "")


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
