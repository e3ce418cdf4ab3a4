"""The tables of README and docs agree with the records, and the records are consistent."""

from __future__ import annotations

import importlib.util
import json
import shutil
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from helpers.record_rows import row
from smartprune import SmartpruneError
from smartprune.experiments.compare.record import check_rows, load_rows, save_record

ROOT = Path(__file__).parents[2]
RECORDS = sorted(path.parent for path in (ROOT / "records").glob("*/result.json"))


def load_tables() -> ModuleType:
    sys.path[:0] = [str(ROOT / "records")] * (str(ROOT / "records") not in sys.path)  # where tables.py finds paper_tables.py
    spec = importlib.util.spec_from_file_location("record_tables", ROOT / "records" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


tables = load_tables()


def test_tables_of_the_pages_equal_the_records() -> None:
    assert tables.differing(ROOT) == []


@pytest.mark.parametrize("folder", RECORDS, ids=lambda path: path.name)
def test_every_record_is_complete(folder: Path) -> None:
    data = json.loads((folder / "result.json").read_text())
    check_rows(data, folder.name)
    assert data["note"].strip()
    assert json.loads((folder / "config.json").read_text())
    assert data["note"] in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mean": 2.1}, "mean is 2.1, but the mean of the values is 2.0"),
        ({"std": 0.8}, "std is 0.8, but the standard deviation of the values is 1.0"),
        ({"std": None}, "std is None"),
        ({"n": 4}, "n is 4, but there are 3 values"),
        ({"values": []}, "must be a list of numbers"),
        ({"values": ["high"]}, "must be a list of numbers"),
        ({"values": [2.0], "n": 1}, "std is 1.0, but the standard deviation of the values is None"),
        ({"dense": {"values": [1.0], "mean": 2.0, "std": None, "n": 1}}, "dense: mean is 2.0"),
    ],
)
def test_inconsistent_rows_raise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SmartpruneError, match=r"here: rows\[0\]") as caught:
        check_rows({"rows": [row(**changes)]}, "here")
    assert message in str(caught.value)


def test_incomplete_rows_raise() -> None:
    short = row()
    del short["protocol"], short["n"]
    with pytest.raises(SmartpruneError, match="lacks protocol, n"):
        check_rows({"rows": [short]}, "here")
    empty: list[object] = [{}, {"rows": []}, [], None]
    for data in empty:
        with pytest.raises(SmartpruneError, match="has no rows"):
            check_rows(data, "here")


def test_method_labels_follow_the_current_defaults(tmp_path: Path) -> None:
    """A record keeps its meaning when a default changes, because its label is made from its settings."""
    defaults = {"ramp": 1.0, "updates": 200, "norm": "mean", "through": False}
    settings = [defaults, defaults | {"norm": "share", "through": True}]
    rows = [row(method="gradual(updates=200)", settings=values) for values in settings] + [row(method="old")]
    (tmp_path / "result.json").write_text(json.dumps({"rows": rows}))
    assert [loaded["method"] for loaded in load_rows(tmp_path)] == ["gradual", "gradual(norm=share, through=True)", "old"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("a\n<!-- table: one -->\n<!-- /table -->\nb\n")
    (tmp_path / "docs" / "page.md").write_text("<!-- table: two metric=ratio -->\nold\n<!-- /table -->\n")
    return tmp_path


def test_tables_are_filled_and_checked(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(["--check"], root) == 1
    assert "README.md: one: differs from the record" in capsys.readouterr().err
    assert tables.main([], root) == 0
    assert tables.main(["--check"], root) == 0
    assert (root / "README.md").read_text() == "a\n<!-- table: one -->\nnot recorded yet\n<!-- /table -->\nb\n"
    save_record(root / "records" / "one", {"rows": [row()]}, {}, "note", [], [])
    assert tables.main(["--check"], root) == 1
    assert tables.main([], root) == 0
    text = (root / "README.md").read_text()
    assert "| smart | 2 ± 1 |" in text
    assert "[records/one](records/one)" in text
    (root / "README.md").write_text(text.replace("2 ± 1", "9 ± 1"))
    capsys.readouterr()
    assert tables.main(["--check"], root) == 1
    assert capsys.readouterr().err == "README.md: one: differs from the record; run: python records/tables.py\n"


def test_an_unclosed_table_is_an_error(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "README.md").write_text("<!-- table: one -->\n")
    assert tables.main(["--check"], root) == 1
    assert "a table is not closed" in capsys.readouterr().err


TOPK = {
    "torch": "2.13", "python": "3.11", "device": "a cpu", "threads": 1,
    "results": [
        {"N": 1000, "tau": 0.01, "k": 100, "rows": {
            "bisection 50, both": {"ms": 2.0, "low": 1.9, "high": 2.1, "n": 20},
            "cpu warm, both": {"ms": 0.5, "low": 0.4, "high": 0.6, "n": 20},
        }}
    ],
}  # fmt: skip
STEP = {
    "model": "resnet18", "batch": 8, "block": [16, 8], "sparsity": 0.95, "device": "a gpu",
    "versions": {"torch": "2.13", "triton": "3"},
    "steps": {
        kind: {"median": 2.0, "low": 1.9, "high": 2.1, "n": 5, "ratio": 1.1, "ratio_low": 1.0, "ratio_high": 1.2}
        for kind in ("eager dense", "eager search")
    },
    "parts": {"top-k": {"eager": {"median": 0.1, "low": 0.1, "high": 0.1, "n": 3}, "graph": None}},
}  # fmt: skip


def test_benchmark_output_becomes_a_record(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data in (("one", TOPK), ("two", STEP)):
        (root / "bench.json").write_text(json.dumps(data))
        arguments = ["add", str(root / "bench.json"), "--name", name, "--note", "one machine", "--command", "python x.py"]
        assert tables.main(arguments, root) == 0
        page = (root / "records" / name / "README.md").read_text()
        assert "`python x.py`" in page
        assert f"device {data['device']}" in page
        assert "torch 2.13" in page
    assert "recorded in records/one" in capsys.readouterr().out
    rows = json.loads((root / "records/one/result.json").read_text())["rows"]
    assert [(r["method"], r["metric"], r["mean"]) for r in rows] == [
        ("bisection 50, both", "ms", 2.0), ("cpu warm, both", "ms", 0.5), ("cpu warm, both", "ratio", 0.25)
    ]  # fmt: skip
    page = (root / "docs" / "page.md").read_text()
    assert "| eager search | 1.1 [1, 1.2] |" in page
    assert "ratio, against eager dense" in page
    assert "[../records/two](../records/two)" in page
    (root / "bench.json").write_text("{}")
    assert tables.main(["add", str(root / "bench.json"), "--name", "three", "--note", "x"], root) == 1
    (root / "bench.json").write_text(json.dumps({"steps": {"a": {}}, "model": "m"}))
    assert tables.main(["add", str(root / "bench.json"), "--name", "three", "--note", "x"], root) == 1
    assert "not in the format of the benchmark (KeyError: 'block')" in capsys.readouterr().err


SHORT = "200 dense + 12 search + 48 fine-tuning epochs, batch 128"
FULL = "200 dense + 40 search + 160 fine-tuning epochs, x"


def paper_row(method: str, protocol: str, values: list[float], difference: float, **changes: Any) -> dict[str, Any]:
    fields = {"data": "cifar10", "model": "densenet", "block": "8x8", "metric": "accuracy", "unit": "share", "sparsity": 0.95}
    n = len(values)
    statistic = {"mean": statistics.fmean(values), "std": statistics.stdev(values) if n > 1 else None, "n": n}
    summary = {"values": values, "seeds": list(range(n)), "difference": difference, **statistic}
    return {**fields, "method": method, "protocol": protocol, **summary, **changes}


PAPER_ROWS = [
    paper_row("smart", SHORT, [0.8, 0.9], -0.1, sparsity=0.97),
    paper_row("smart", FULL, [0.875], -0.075, sparsity=0.97),
    paper_row("gradual", SHORT, [0.9], -0.05),
    paper_row("awg", f"{SHORT}, distill 1", [0.9], 0),
    paper_row("pdp", f"{SHORT}, augment 1, augment over search", [0.9], 0),
    paper_row("pas", f"{SHORT}, search lr 0.1, finetune lr 0.1", [0.9], 0),
    paper_row("acdc", SHORT, [0.9], 0, sparsity=None, macs=0.95),
    paper_row("pdp", "10 dense epochs", [0.1], -0.8),
]


def test_paper_table_compares_records_with_the_paper(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    (tmp_path / "docs").mkdir()
    for path in (ROOT / "records").glob("paper-table*.csv"):
        shutil.copy(path, tmp_path / "records")
    save_record(tmp_path / "records" / "some", {"rows": PAPER_ROWS}, {"a": 1}, "a note", ["command"], ["machine"])
    page = tmp_path / "docs" / "paper.md"
    page.write_text("<!-- table: paper-table2 -->\n<!-- /table -->\n")
    assert load_tables().update(tmp_path)
    text = page.read_text()
    assert "| densenet | 8x8 | 95 % | gradual | - | [90.00 (-5.00), n=1](../records/some) | - |" in text
    assert (
        "| densenet | 8x8 | 97 % | smart | 85.0 (-9.8) | [85.00 ± 7.07 (-10.00), n=2](../records/some) | "
        "[87.50 (-7.50), n=1](../records/some) |"
    ) in text
    assert "| densenet | 8x8 | 0 % | dense | 94.8 | [95.00](../records/some) | [95.00](../records/some) |" in text
    assert "pdp" not in text  # its protocol is neither short nor full
    assert "awg" not in text  # another protocol
    assert "pas" not in text
    assert "acdc" not in text  # another budget
    assert "Of the 162 numbers in the paper's table, 1 have one of ours" in text


TABLE3 = {"metric": "mAP", "data": "bccd", "model": "yolov5m", "block": "16x8"}
PRINTED = "start=0.5, end=1e-05, unit=absolute, schedule=paper_exponential, follow=False, reach=None"
OTHER_ROWS = [
    paper_row("smart", "300 dense + 100 search + 200 fine-tuning epochs", [0.5, 0.6], 0.02, sparsity=0.5, **TABLE3),
    paper_row("pas", "300 dense + 100 search + 200 fine-tuning epochs", [0.4, 0.4], -0.13, sparsity=0.5, **TABLE3),
    paper_row("gradual", "300 dense + 100 search + 200 fine-tuning epochs", [0.6], 0.05, sparsity=0.5, **TABLE3),
    paper_row(
        f"smart({PRINTED}, mask_type=binary)", "1 dense + 100 search + 1 fine-tuning epochs", [0.3], -0.2, sparsity=0.5, **TABLE3
    ),
    paper_row(f"smart({PRINTED})", "1 dense + 14 search + 1 fine-tuning epochs", [0.25], -0.2, sparsity=0.5, **TABLE3),
]


def filled(root: Path, name: str, rows: list[dict[str, Any]]) -> str:
    """The text of a page with this table, next to a record of these rows."""
    for folder in ("records", "docs"):
        (root / folder).mkdir(exist_ok=True)
    for path in (ROOT / "records").glob("paper-table*.csv"):
        shutil.copy(path, root / "records")
    save_record(root / "records" / "some", {"rows": rows}, {"a": 1}, "a note", ["command"], ["machine"])
    page = root / "docs" / "page.md"
    page.write_text(f"<!-- table: {name} -->\n<!-- /table -->\n")
    load_tables().update(root)
    return page.read_text()


def test_every_cell_of_the_papers_tables_is_listed_and_counted(tmp_path: Path) -> None:
    text = filled(tmp_path, "paper-cells", PAPER_ROWS)
    assert len([line for line in text.splitlines() if " % |" in line]) == 4 * 3 * 3
    assert "| densenet | 8x8 | 97 % | 85.0 / 85.00 (2) / 87.50 (1) | - / - | 78.5 / - | N/A / - | 74.5 / - | 82.4 / - |" in text
    rows = [*PAPER_ROWS, *OTHER_ROWS]
    text = filled(tmp_path, "paper-table3", rows)
    assert len([line for line in text.splitlines() if " % |" in line]) == 3 * 3
    assert (
        "| yolov5m | coco / bccd | 50 % | -0.9 / +2.0 (2) | - / +5.0 (1) | -4.2 / - | -1.9 / -13.0 (2) | -3.4 / - | -4.7 / - |"
        in text
    )
    text = filled(tmp_path, "paper-table5", rows)
    assert len(text.splitlines()) == 2 + 2 + 24 + 2
    assert "| mask type | binary mask | 32.6 | 30.00 (1) |" in text
    assert "| search iteration | 5000 | 41.4 | 25.00 (1) |" in text
    assert "| none |  | 41.7 | - |" in text
    text = filled(tmp_path, "paper-count", rows)
    assert [line.split("|")[2:4] for line in text.splitlines()[3:6]] == [[" 162 ", " 1 "], [" 45 ", " 2 "], [" 24 ", " 2 "]]


def test_the_summary_counts_where_smart_is_ahead(tmp_path: Path) -> None:
    """The rows of two and one seeds give: 0.55 +- 0.07 against 0.4, and one run of gradual magnitude."""
    text = filled(tmp_path, "summary", OTHER_ROWS)
    assert "| gradual | yolov5m, bccd | 0 | 0 | 0 | 1 | -5.0 |" in text
    assert "| the best of PDP, PaS, AWG, AC/DC | all | 1 | 0 | 0 | 0 | +15.0 |" in text
    wider = [{**OTHER_ROWS[0], "values": [0.3, 0.7], "mean": 0.5, "std": statistics.stdev([0.3, 0.7])}, OTHER_ROWS[1]]
    assert "| all | 0 | 1 | 0 | 0 | +10.0 |" in filled(tmp_path, "summary", wider)
    text = filled(tmp_path, "comparisons", OTHER_ROWS)
    assert (
        "| 50 % of 16x8 | 300 dense + 100 search + 200 fine-tuning | 55.00 (2) | 60.00 (1) | one seed | pas 40.00 (2) | ahead |"
        in text
    )


@pytest.mark.parametrize(("table", "numbers"), [("paper-table2", 162), ("paper-table3", 45), ("paper-table5", 24)])
def test_the_papers_tables_have_all_their_numbers(table: str, numbers: int) -> None:
    """Without the dense networks and the marks N/A."""
    lines = (ROOT / "records" / f"{table}.csv").read_text().splitlines()[1:]
    values = [line.rsplit(",", 1)[1] for line in lines if ",dense," not in line]
    assert sum(value != "N/A" for value in values) == numbers
    assert all(0 < float(value) < 1 for value in values if value != "N/A")
