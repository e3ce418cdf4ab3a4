"""The page of a model or a run: its content, and that it is safe to open."""

from __future__ import annotations

import base64
import html
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import reference, zoo
from helpers.hostile_names import HOSTILE
from helpers.html_pages import HtmlPage, read_page
from smartprune.artifacts.receipt import Receipt
from smartprune.cli import main
from smartprune.errors import SmartpruneError
from smartprune.models import MODELS
from smartprune.reports.figures import figures, save_figures
from smartprune.reports.page import render, write_page
from smartprune.reports.runlog import read_rows, read_run_log
from smartprune.reports.view import gather
from smartprune.run_files import PAGE
from smartprune.training.page import run_cycles, run_network, write_run_page


def bits(text: str, n: int) -> list[bool]:
    data = base64.b64decode(text)
    return [bool(data[i // 8] >> (i % 8) & 1) for i in range(n)]


def test_a_run_writes_its_page(run: Path) -> None:
    page = (run / PAGE).read_text(encoding="utf-8")
    found, receipt = HtmlPage(page), Receipt.load(run / "receipt.json")
    result = json.loads((run / "result.json").read_text())
    heading = re.search(r"<h1>(.*?)</h1>", page, re.S)
    assert heading is not None
    shown = heading[1].replace("&nbsp;", " ")
    assert shown == "50.00 % of the blocks removed"
    estimate = run_cycles(run)
    assert estimate is not None
    assert f"{estimate.speedup:.1f}" == "1.0"
    for words in (
        receipt.mask_hash,
        f"{receipt.blocks.removed:,} of {receipt.blocks.total:,} blocks of the pruned layers removed",
        f'<div class="big">{100 * result["pruned"]:.2f} %</div>',
        f"may be chance ({result['samples']:,} samples)",
        "about as many</div>",
        "too small to expect a speed from its MACs",
        f"{result['finished']} \u00b7 smartprune {result['versions']['smartprune']} \u00b7 torch {result['versions']['torch']}",
        f"<code>{html.escape(result['command'])}</code>",
        f"{receipt.model_macs.kept:,} of {receipt.model_macs.total:,}",
        f"dense {100 * result['dense']:.2f} %",
    ):
        assert words in page
    for key in ("loss", "metric", "temperature", "undecided", "scores", "mask"):
        assert f'id="figure-{key}"' in page
    order = [re.search(f'id="{key}"', page).start() for key in ("layers", "map-section", "run", "scores", "receipt", "settings")]  # type: ignore[union-attr]
    assert order == sorted(order)
    addresses = {value for _, values in found.tags for name, value in values.items() if name in ("src", "href") and value}
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert re.findall(r"https?://[^\"' ]+", page.replace("http://www.w3.org/2000/svg", "")) == []


def test_metric_names_keep_their_case_and_a_measured_speed_is_shown(run: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "receipt.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "result.json").write_text('{"dense": 0.5, "pruned": 0.4, "measure": "mAP"}')
    rows = [row | {"mAP": 0.1} for row in read_rows(run / "metrics.jsonl")]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    timings = [{"engine": name, "batch": 1, "ms": ms, "failed": None} for name, ms in (("torch", 3.0), ("smartprune", 1.5))]
    (tmp_path / "bench.json").write_text(json.dumps({"timings": timings}))
    write_run_page(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert '<dt>Speed on this CPU</dt><dd><div class="big">2.0\u00d7</div>' in page
    assert "its noise is not known" in page
    assert "<dt>mAP</dt>" in page
    assert "<h3>mAP</h3>" in page
    assert "<dt>Accuracy</dt>" in (run / PAGE).read_text()


def test_map_norms_and_scores_match_the_weights(run: Path) -> None:
    data, receipt = read_page(run / PAGE).data, Receipt.load(run / "receipt.json")
    weights, scores = load_file(run / "model.safetensors"), load_file(run / "scores.safetensors")["scores"].tolist()
    by_name = {layer["name"]: layer for layer in data["layers"]}
    start = 0
    for row in receipt.layers:
        layer, weight = by_name[row.name], weights[row.weight]
        index = reference.block_index(weight.shape, (4, 2))
        kept = bits(layer["kept"], row.blocks.total)
        assert kept == row.mask().tolist()
        assert layer["counts"] == [sum(kept), len(kept)]
        squares = reference.block_sums([value * value for value in weight.flatten().tolist()], index)
        factor, packed = layer["norms"]
        norms = factor * np.frombuffer(base64.b64decode(packed), "<f2").astype(np.float64)
        wanted = [math.sqrt(square) for square, keep in zip(squares, kept, strict=True) if keep]
        np.testing.assert_allclose(norms, wanted, rtol=2e-3, atol=1e-3 * factor)
        factor, packed = layer["scores"]
        values = factor * np.frombuffer(base64.b64decode(packed), "<f2").astype(np.float64)
        np.testing.assert_allclose(values, scores[start : start + len(kept)], rtol=2e-3, atol=1e-3 * factor)
        start += len(kept)
    assert start == len(scores)


def test_page_of_a_single_file_leaves_out_what_is_not_known(tmp_path: Path) -> None:
    model, _ = zoo.plain_cnn()
    with torch.no_grad():
        model[3].weight[4:] = 0
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    write_page(tmp_path / "page.html", tmp_path / "model.safetensors", (4, 4))
    page = (tmp_path / "page.html").read_text()
    for absent in ("<figure", 'id="receipt"', 'id="run"', "Accuracy", "MACs", "Cycles", "NaN", "None"):
        assert absent not in re.sub(r"<script>.*?</script>|<style>.*?</style>", "", page, flags=re.S), absent
    assert "no receipt found" in page
    assert "Size, packed" in page


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    torch.save(HOSTILE, tmp_path / "model.pt")
    write_page(tmp_path / "page.html", tmp_path / "model.pt", (8, 8))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    parsed = HtmlPage(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert not set("<>&") & set(parsed.scripts[0])
    assert "img" not in {tag for tag, _ in parsed.tags}
    assert not [name for _, values in parsed.tags for name in values if name.startswith("on")]
    assert not set("\u202e\u2066\u2028\x1b") & set(page)
    assert "\\u202egnp" in parsed.text
    names = [layer["name"] for layer in parsed.data["layers"]]
    assert "</script><script>window.hit=1</script>" in names
    for figure in figures(gather(tmp_path / "model.pt", (8, 8))):
        ElementTree.fromstring(figure.drawing.svg())
    written, _ = save_figures(gather(tmp_path / "model.pt", (8, 8)), tmp_path / "figures")
    assert all(path.parent == tmp_path / "figures" and re.fullmatch(r"[\w.-]+", path.name) for path in written)


def test_a_damaged_run_still_has_a_page(run: Path, tmp_path: Path) -> None:
    for name in ("model.safetensors", "receipt.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "config.json").write_text('{"dense_epochs": "many", "seed": {"a": [1]}, "model": 7, "settings": null}')
    (tmp_path / "result.json").write_text('{"dense": "x", "pruned": true, "measure": 3, "versions": [], "stage_seconds": 1}')
    (tmp_path / "scores.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    odd = [
        '{"stage": "search", "step": -1, "epoch": 1}',
        "[1]",
        "nonsense",
        '{"stage": "x"}',
        '{"stage": "dense", "step": 1e400, "epoch": 1}',
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines[:3], *odd, '{"stage": "search", "st']))
    write_run_page(tmp_path)
    page = read_page(tmp_path / PAGE)
    assert "not scored" in page.text
    assert all(layer["scores"] is None for layer in page.data["layers"])
    assert run_cycles(tmp_path) is None
    assert len(read_run_log(tmp_path).rows) == 3


def test_weights_that_do_not_match_the_receipt_are_reported(run: Path, tmp_path: Path) -> None:
    receipt = Receipt.load(run / "receipt.json")
    weights = load_file(run / "model.safetensors")
    weights[receipt.layers[0].weight] += 1
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "receipt.json").write_bytes((run / "receipt.json").read_bytes())
    page = render(gather(tmp_path))
    assert "Do not ship this file as it is." in page
    assert "The weights do not match the receipt" in page
    assert "exactly as requested" not in page


def test_run_folders_do_not_make_foreign_networks(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model": "antigravity:fly"}))
    assert run_cycles(tmp_path) is None
    assert run_network(tmp_path) is None
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("width", [100_000, 10**10, 10**30])
def test_run_folders_do_not_make_huge_networks(run: Path, tmp_path: Path, width: int) -> None:
    for name in ("model.safetensors", "receipt.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "task_settings": {"width": width}}))
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "Cycles on an NPU" not in (tmp_path / "page.html").read_text()
    assert run_network(tmp_path) is None


def test_axes_come_from_the_network_of_the_settings(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """This also holds for layers that the receipt does not list, such as the stem."""
    assert "axes of" not in read_page(run / PAGE).text
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert "axes of" not in read_page(tmp_path / "page.html").text
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axes_assumed"] == []
    for name in ("model.safetensors", "receipt.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    config = json.loads((run / "config.json").read_text())
    for change in ({"model": "resnet18"}, {"model": "antigravity:fly"}, {"task": "nothing"}):  # not the network of these weights
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert main(["report", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["axes_assumed"] == ["conv1.weight"]


def test_page_of_resnet50_is_below_five_megabytes() -> None:
    torch.manual_seed(0)
    view = gather(MODELS["resnet50"](), (16, 8))
    size = len(render(view).encode())
    assert view.blocks.total > 180_000
    assert size < 5_000_000


def test_packed_size_may_be_larger() -> None:
    """The header of a packed file outweighs what a tiny or dense model saves."""
    assert "164 bytes plain, 3.7\u00d7 larger" in render(gather({"w": torch.eye(3)}, (1, 1)))
    dense = render(gather({"w": torch.ones(512, 512)}, (16, 8)))
    assert "1.05 MB plain, about as large" in dense
    assert "when packed" not in dense


def test_page_leaves_out_norms_above_a_million_blocks() -> None:
    data = HtmlPage(render(gather({"fc.weight": torch.ones(1001, 1000)}, (1, 1)))).data
    assert data["layers"][0]["norms"] is None
    assert len(data["layers"][0]["kept"]) < 200_000


def test_report_command_writes_a_page_and_figures(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--html", str(tmp_path / "a.html"), "--figures", str(tmp_path / "f")]) == 0
    out = capsys.readouterr()
    assert out.out == ""
    assert "figures written to" in out.err
    assert (tmp_path / "a.html").read_bytes() == (run / PAGE).read_bytes()
    assert main(["report", str(run / "model.safetensors"), "--block", "4x2", "--html", str(tmp_path / "b.html")]) == 0
    for words, message in (
        (["--json"], "--html and --figures write files: remove --json"),
        (["--figures", str(tmp_path / "f"), "--map", "x"], "no layer 'x'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["report", str(run), "--html", str(tmp_path / "c.html"), *words])
        assert message in capsys.readouterr().err
    with pytest.raises(SmartpruneError, match=r"report: .* is the model itself"):
        write_page(run / "model.safetensors", run)
    with pytest.raises(SystemExit, match="2"):
        main(["report", str(run), "--html", str(tmp_path / "absent" / "c.html")])
    assert "cannot be written" in capsys.readouterr().err


def test_comparison_page_has_a_chart_and_a_table(run: Path, tmp_path: Path) -> None:
    assert main(["compare", str(run), "--html", str(tmp_path / "c.html")]) == 0
    page = (tmp_path / "c.html").read_text()
    result = json.loads((run / "result.json").read_text())
    assert f"{100 * result['pruned']:.2f}" in page
    assert "MACs of the pruned layers left, %" in page
    assert "too few to call one the best" in page  # one run
    assert [tag for tag, _ in HtmlPage(page).tags].count("svg") == 1


def test_control_characters_in_names_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.save(HOSTILE, tmp_path / "model.pt")
    assert main(["report", str(tmp_path / "model.pt"), "--block", "8x8"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert max(map(len, out.splitlines())) <= 80
    assert main(["report", str(tmp_path / "model.pt"), "--block", "8x8", "--map", list(HOSTILE)[2]]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_nan_and_infinity_are_reported(run: Path, tmp_path: Path) -> None:
    """With and without a receipt, in layers that the receipt lists and in others."""
    good, bad = torch.ones(8, 8), torch.ones(8, 8)
    bad[0, 0] = math.nan
    page = render(gather({"good.weight": good, "bad.weight": bad}, (4, 4)))
    assert "Do not ship this file as it is." in page
    assert "bad.weight: holds NaN or infinity" in page
    assert "good.weight: holds" not in page
    state = load_file(run / "model.safetensors")
    listed = {row.weight for row in Receipt.load(run / "receipt.json").layers}
    name = next(name for name, tensor in state.items() if tensor.dim() > 1 and name not in listed)
    state[name].view(-1)[0] = math.inf
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "receipt.json").write_bytes((run / "receipt.json").read_bytes())
    assert f"{name}: holds NaN or infinity" in render(gather(tmp_path))
    assert "holds NaN" not in render(gather(run))
