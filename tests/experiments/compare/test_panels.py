"""The panels of a comparison."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from helpers.finished_runs import write_macs_left, write_run
from smartprune.experiments.compare import compare
from smartprune.experiments.compare.chart import svg
from smartprune.experiments.compare.panels import comparison_charts


def test_the_metric_is_drawn_over_the_macs_with_its_deviation(tmp_path: Path) -> None:
    values = [0.5, 0.6, 0.4]
    for seed, value in enumerate(values):
        write_macs_left(write_run(tmp_path, value, seed=seed, sparsity=0.9), 1000, 100 + 10 * seed)
    (chart,) = comparison_charts(compare([tmp_path]))
    assert chart.x == "MACs of the pruned layers left, %"
    ((point,),) = (series.points for series in chart.series)
    assert point.x == pytest.approx(11)
    assert point.y == pytest.approx(50)
    assert point.error == pytest.approx(100 * statistics.stdev(values))
    assert chart.level == ("dense", pytest.approx(90))
    assert svg([chart]).count('stroke-width="1.5"') == 4  # two ends of the bar, each a line and a cap


def test_several_shares_have_a_panel_of_their_own(runs: Path) -> None:
    """The runs have no receipts, so their MACs are not known."""
    (chart,) = comparison_charts(compare([runs]))
    assert chart.x == "sparsity (share of blocks removed)"
    assert [[point.x for point in series.points] for series in chart.series] == [[0.5, 0.9]] * 3
    for folder in runs.iterdir():
        write_macs_left(folder, 1000, 200)
    both = comparison_charts(compare([runs]))
    assert [chart.x for chart in both] == ["MACs of the pruned layers left, %", chart.x]
    assert [chart.title.rpartition(": ")[2] for chart in both] == ["accuracy by MACs left", "accuracy by sparsity"]
