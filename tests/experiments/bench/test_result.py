"""The text, the JSON and the bar chart of a benchmark."""

from __future__ import annotations

from smartprune.experiments.bench.engines import DENSE
from smartprune.experiments.bench.result import Bench, LayerTiming, Timing


def test_a_failed_engine_is_reported() -> None:
    failed = Timing("onnxruntime", 1, 0.0, (), 0.0, "no such file")
    result = Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 2.0, (2.0,), 0.0), failed), (), {}, {})
    assert "failed: onnxruntime, batch 1: no such file" in str(result)
    assert result.best(1, DENSE).engine == "torch"  # type: ignore[union-attr]
    assert "onnxruntime" not in result.drawing().svg()
    assert [(row["ms"], row["error"]) for row in result.to_json()["timings"]] == [(2.0, 0.0), (None, None)]


def test_drawing_works_where_every_engine_failed() -> None:
    result = Bench("m", "16x8", 1, 0.5, (Timing("torch", 1, 0.0, (), 0.0, "it failed"),), (), {}, {})
    assert "batch 1" in result.drawing().svg()
    assert "torch" not in result.drawing().svg()


def test_speedups_are_over_the_fastest_dense_engine_of_the_same_kind() -> None:
    timings = tuple(
        Timing(name, 1, ms, (ms,), 0.0)
        for name, ms in (
            ("torch", 4.0),
            ("onnxruntime", 2.0),
            ("smartprune", 0.5),
            ("onnxruntime int8", 1.0),
            ("smartprune int8", 0.25),
        )
    )
    layer = LayerTiming("a.very.long.name." * 8, "3x3 conv", 1, 10, 100, 8.0, 2.0, "onnxruntime")
    short = LayerTiming("short", "3x3 conv", 1, 10, 100, 8.0, 0.1, "onnxruntime")
    lines = str(Bench("m", "16x8", 1, 0.9, timings, (layer, short), {"GPU": "none"}, {})).splitlines()
    assert [line.split() for line in lines if line.startswith("engine")] == [
        ["engine", "ms", "vs", "onnxruntime", "error"],
        ["engine", "ms", "vs", "onnxruntime", "int8", "error"],
    ]
    speedups = {" ".join(line.split()[:-3]): line.split()[-2] for line in lines if line.endswith("e+00")}
    header = next(i for i, line in enumerate(lines) if line.startswith("layer "))
    assert "onnxruntime, us" in lines[header]
    assert [line.split()[-1] for line in lines[header + 1 : header + 3]] == ["4.0", "-"]
    assert speedups == {
        "torch": "0.50",
        "onnxruntime": "1.00",
        "smartprune": "4.00",
        "onnxruntime int8": "1.00",
        "smartprune int8": "4.00",
    }
    assert all(len(line) <= 80 for line in lines)


def test_the_first_line_says_what_the_share_is_of() -> None:
    timing = Timing("torch", 1, 2.0, (2.0,), 0.0)
    without = Bench("m", "16x8", 1, 0.5, (timing,), (), {}, {})
    assert str(without).startswith("m: 50.00 % of the 16x8 blocks of all layers are zero; 1 CPU thread")
    with_receipt = Bench("m", "16x8", 1, 0.5, (timing,), (), {}, {}, "pruned layers")
    assert str(with_receipt).startswith("m: sparsity 50.00 % (of the 16x8 blocks of the pruned layers); 1 CPU thread")
    assert "50.00 %" in with_receipt.drawing().svg()
