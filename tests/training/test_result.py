"""result.json: read with checks, and errors that say how to repair it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from smartprune import SmartpruneError
from smartprune.training.result import Result
from smartprune.training.train import resume


@pytest.mark.parametrize(
    "wrong",
    [
        {"seconds": "x"}, {"also": 3}, {"also": {"dense": {"top5": []}}}, {"files": []}, {"stage_seconds": [1]}, {"dense": "a"},
        {"pruned": True}, {"versions": {"torch": 2}}, {"folder": None}, {"verified": 1}, {"seconds": 10**400},
    ],
)  # fmt: skip
def test_damaged_result_says_how_to_finish_the_run_again(wrong: dict[str, object], finished_run: Path, tmp_path: Path) -> None:
    result = json.loads((finished_run / "result.json").read_text())
    assert asdict(Result.load(finished_run)) == result
    (tmp_path / "config.json").write_bytes((finished_run / "config.json").read_bytes())
    (tmp_path / "result.json").write_text(json.dumps(result | wrong))
    where = f"{tmp_path / 'result.json'}: "
    with pytest.raises(
        SmartpruneError, match=rf"^{where}.*; it must be .*Delete result.json and finish the run again from its last checkpoint"
    ):
        resume(tmp_path)
    for text in ("", "[]", "{}", '{"a": NaN}'):
        (tmp_path / "result.json").write_text(text)
        with pytest.raises(SmartpruneError, match=r"Delete result\.json and finish the run again from its last checkpoint"):
            resume(tmp_path)
