"""The page of a comparison."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from helpers.finished_runs import write_run
from smartprune.experiments.compare import compare
from smartprune.experiments.compare.page import comparison_page


@pytest.mark.parametrize("seeds", [2, 3])
def test_a_best_change_needs_three_runs(seeds: int, tmp_path: Path) -> None:
    for seed in range(seeds):
        write_run(tmp_path, 0.8 + 0.01 * seed, seed=seed)
    page = comparison_page(compare([tmp_path]), [])
    assert ("Best change by pruning" in page) == (seeds == 3)
    assert ("too few to call one the best" in page) == (seeds == 2)
    if seeds == 3:
        assert "\u22129.00 points" in page
        assert "± 1.00, n = 3; " in page


def test_the_page_says_when_with_what_and_how_it_was_made(tmp_path: Path) -> None:
    for seed in range(2):
        write_run(tmp_path, 0.8, seed=seed)
    for file, day in zip(sorted(tmp_path.rglob("result.json")), ("2026-02-03 04:05", "2026-02-01 10:00"), strict=True):
        file.write_text(json.dumps({**json.loads(file.read_text()), "finished": day}))
    comparison = compare([tmp_path])
    (line,) = re.findall(r'<p class="note origin">(.*?)</p>', comparison_page(comparison, [], "smartprune compare <x>"))
    assert line.startswith("2026-02-01 10:00 to 2026-02-03 04:05 ")
    assert f" torch {comparison.runs[0].versions['torch']} " in line
    assert line.endswith("<code>smartprune compare &lt;x&gt;</code>")


def test_single_runs_are_not_called_best_because_others_were_repeated(tmp_path: Path) -> None:
    write_run(tmp_path, 0.89, method="gradual")
    for seed in range(3):
        write_run(tmp_path, 0.8, seed=seed)
    page = comparison_page(compare([tmp_path]), [])
    assert "\u221210.00 points" in page
    assert "n = 3; smart at" in page
