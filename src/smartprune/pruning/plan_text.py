"""A plan as text and as plain data."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from .. import text
from ..budgets import removal
from ..core.budget import scope
from ..core.layers import FROZEN, TRANSFORMED, UNREACHED
from ..core.macs import COUNTED

if TYPE_CHECKING:
    from .expected import Expected
    from .plan import Plan


def plan_line(plan: Plan) -> str:
    """The blocks and the budget."""
    budget = "" if plan.budget is None else f", {removal(float(plan.share), plan.budget.label, scope(plan.budget))}"
    return f"{text.counted(plan.n, 'block')} of {plan.block} in {text.counted(len(plan.layers), 'layer')}{budget}"


def plan_text(plan: Plan, width: int) -> str:
    """Tables of the layers that are pruned and of those that are not, and the totals."""
    header = ["layer", "kind", "weight", "grid", "blocks", "weights", "padding"]
    rows = [
        [
            layer.name,
            layer.kind,
            text.format_shape(layer.grid.weight_shape),
            text.format_shape(layer.grid.shape),
            f"{layer.n:,}",
            f"{layer.params:,}",
            text.percent(plan.layer_padding(layer).numerator, plan.layer_padding(layer).denominator),
        ]
        for layer in plan.layers
    ]
    if plan.uses is not None:
        header.insert(6, "MACs")
        for row, layer in zip(rows, plan.layers, strict=True):
            row.insert(6, f"{plan.layer_macs(layer):,}")
    align = "<<<<" + ">" * (len(header) - 4)
    lines = [f"Blocks of {plan.block}", "", *text.table(header, rows, align, width, (0, 1))]
    if plan.skipped:
        skipped = [(s.name, s.kind, text.format_shape(s.shape), s.reason) for s in plan.skipped]
        lines += ["", *text.table(("not pruned", "kind", "weight", "reason"), skipped, "<<<<", width, (0, 1))]
    return "\n".join([*lines, "", *_totals(plan), *_notes(plan, width)])


def _notes(plan: Plan, width: int) -> list[str]:
    """Lines about layers that are left out for a reason that may surprise."""
    meanings = {
        UNREACHED: "inference never uses {}, so the budget does not count them; include= prunes them anyway",
        FROZEN: "frozen, so not pruned: {}; include= prunes them anyway",
        TRANSFORMED: "transformed before use, so zeros would not survive: {}",
    }
    lines = []
    for cause, meaning in meanings.items():
        names = [layer.name for layer in plan.skipped if layer.cause == cause]
        if names:
            note = meaning.format(text.some_names(names))
            lines += textwrap.wrap(note, width, initial_indent="note     ", subsequent_indent=" " * 9, break_on_hyphens=False)
    return lines


def _totals(plan: Plan) -> list[str]:
    layers = f"{len(plan.layers)} layer{'' if len(plan.layers) == 1 else 's'}"
    lines = [
        f"blocks   {plan.n:,} in {layers}; {100 * float(plan.padding):.2f}% of their elements are padding",
        f"weights  {plan.params:,} of {plan.model_params:,} in the model",
    ]
    if plan.macs is not None and plan.model_macs is not None:
        lines.append(f"MACs     {plan.macs:,} of {plan.model_macs:,} in the model, for one sample")
        lines.append(f"         counted in {COUNTED}")
    if plan.not_counted:
        lines.append(f"         not counted in {', '.join(plan.not_counted)}")
    if plan.min_keep is not None and plan.floor is not None:
        lines.append(
            f"floor    every layer keeps at least {100 * float(plan.floor):g}% of its blocks: {int(plan.min_keep.sum()):,} in all"
        )
    if plan.budget is None or plan.limit is None:
        return [*lines, "budget   none given"]
    bound = "exactly" if plan.cost is None else "at most"
    limit, total = plan.bound
    wanted = removal(float(plan.share), plan.budget.label, scope(plan.budget))
    lines.append(f"budget   {wanted}: keep {bound} {limit:,} of {total:,} {plan.unit}")
    lines += _promise(plan)
    return [*lines, *_expected(plan)] if plan.problem is None else [*lines, f"problem  {plan.problem}"]


def _promise(plan: Plan) -> list[str]:
    """What a budget in time promises."""
    table = {} if plan.resolved is None else plan.resolved.table or {}
    if "promise" not in table:
        return []
    threads = f"{table['threads']} thread{'' if table['threads'] == 1 else 's'}"
    times = f"{table['promised_ms']:.3g} of {table['dense_ms']:.3g} ms"
    return [f"promise  {table['promise']}", f"         {times} when they were measured ({table['machine']}, {threads})"]


def _expected(plan: Plan) -> list[str]:
    """What the budget would leave, and how that is known."""
    expected = plan.expected
    if expected is None:
        return []
    lines = ["", "expected, if the blocks with the smallest weights were removed now (a search chooses other blocks)"]
    if expected.macs is not None:
        total = expected.macs.total
        even = (
            "" if expected.even_macs is None else f"; {text.percent(expected.even_macs, total)} if every layer lost the same share"
        )
        lines.append(f"MACs     {text.percent(expected.macs.kept, total)} left in the model{even}")
    if expected.bytes is not None:
        plain, packed = expected.bytes.total, expected.bytes.kept
        lines.append(f"packed   {packed:,} of {plain:,} bytes, {_times(plain, packed)}")
    if expected.cycles is not None:
        dense, pruned, npu = expected.cycles.total, expected.cycles.kept, expected.npu
        array = f"{npu.rows}x{npu.columns} MACs at {npu.clock_mhz:g} MHz"
        lines.append(f"NPU      {npu.ms(pruned):.3g} of {npu.ms(dense):.3g} ms, {dense / max(1, pruned):.1f}x as fast ({array})")
    lines += _expected_speed(expected)
    return lines


def _times(plain: int, packed: int) -> str:
    return f"{plain / packed:.1f}x smaller" if packed <= plain else f"{packed / plain:.1f}x larger"


def _expected_speed(expected: Expected) -> list[str]:
    """The expected and the measured speed on a CPU, and the budgets that would give other speeds."""
    lines = []
    if expected.macs is None:
        lines.append("CPU      unknown without an input of the model (example=, or --input)")
    elif expected.speedup is None:
        measure = "" if expected.measured is not None else "; measure=True (--measure) times it"
        lines.append(f"CPU      unknown for so small a network{measure}")
    else:
        low, typical, high = expected.speedup
        lines.append(f"CPU      about {typical:.1f}x as fast ({low:.1f}x to {high:.1f}x) as the fastest dense engine, in float32")
        goals = [f"{times}x at {share:g}" for times in (2, 3, 4) if (share := expected.macs_for(times)) is not None]
        if goals:
            lines.append(f"         a budget in MACs (--macs) chooses the speed: about {', '.join(goals)}")
    if (speed := expected.measured) is not None:
        threads = f"{speed.threads} thread{'' if speed.threads == 1 else 's'}"
        lines.append(
            f"measured {speed.ms:.3g} ms, {speed.speedup:.1f}x as fast as {speed.engine} ({speed.dense_ms:.3g} ms; {threads})"
        )
    return lines


def plan_json(plan: Plan) -> dict[str, object]:
    """Plain data: numbers, strings, lists and dictionaries."""
    least = None if plan.min_keep is None else plan.min_keep.tolist()
    limit, total = plan.bound
    return {
        "block": str(plan.block),
        "n": plan.n,
        "budget": None if plan.budget is None else {"kind": plan.budget.kind, "share": str(plan.share)},
        "floor": None if plan.floor is None else str(plan.floor),
        "unit": plan.unit,
        "total": total,
        "limit": limit,
        "keep": plan.keep,
        "feasible": plan.feasible,
        "problem": plan.problem,
        "params": plan.params,
        "model_params": plan.model_params,
        "macs": plan.macs,
        "model_macs": plan.model_macs,
        "not_counted": None if plan.not_counted is None else list(plan.not_counted),
        "padding": float(plan.padding),
        "expected": None if plan.expected is None else plan.expected.to_json(),
        "layers": [
            {
                "name": layer.name,
                "weight": layer.weight,
                "kind": layer.kind,
                "shape": list(layer.grid.weight_shape),
                "grid": list(layer.grid.shape),
                "parts": layer.grid.axes[0].parts,
                "transposed": layer.transposed,
                "blocks": layer.n,
                "min_keep": None if least is None else least[i],
                "params": layer.params,
                "macs": plan.layer_macs(layer),
                "padding": float(plan.layer_padding(layer)),
            }
            for i, layer in enumerate(plan.layers)
        ],
        "skipped": [{"name": s.name, "kind": s.kind, "shape": list(s.shape), "reason": s.reason} for s in plan.skipped],
    }
