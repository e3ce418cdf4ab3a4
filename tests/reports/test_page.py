"""The page of a model or a run: what it says, what it holds, and that it is safe to open."""

import base64
import json
import math
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers import reference, training_jobs, zoo
from helpers.hostile_names import HOSTILE
from smartprune.artifacts.receipt import Receipt
from smartprune.cli import main
from smartprune.errors import SmartpruneError
from smartprune.models import MODELS
from smartprune.reports.draw import COLOURS
from smartprune.reports.figures import figures, map_drawing, save_figures, short, threshold
from smartprune.reports.page import render, write_page
from smartprune.reports.runlog import Story, read_rows, read_story, sampled
from smartprune.reports.view import look
from smartprune.run_files import PAGE
from smartprune.training.page import run_cycles, run_network, write_run_page
from smartprune.training.train import train

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sklearn")
    folder = tmp_path_factory.mktemp("page") / "run"
    train(training_jobs.small_config(folder, search_epochs=4))
    return folder


class Reader(HTMLParser):
    """Elements and their attributes, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script" and not self.scripts[-1]:
            self.scripts[-1] = data
        else:
            self.words += data

    @property
    def data(self) -> Any:
        return json.loads(self.scripts[0])


def read(path: Path) -> Reader:
    return Reader(path.read_text(encoding="utf-8"))


def bits(text: str, n: int) -> list[bool]:
    data = base64.b64decode(text)
    return [bool(data[i // 8] >> (i % 8) & 1) for i in range(n)]


def test_a_run_ends_with_its_page(run: Path) -> None:
    page = (run / PAGE).read_text(encoding="utf-8")
    found, receipt = Reader(page), Receipt.load(run / "receipt.json")
    result = json.loads((run / "result.json").read_text())
    heading = re.search(r"<h1>(.*?)</h1>", page, re.S)
    assert heading is not None
    told = heading[1].replace("&nbsp;", " ")
    assert "Pruned exactly as asked: 50 % of the blocks removed" in told
    assert f"{receipt.blocks.kept:,} of {receipt.blocks.total:,} blocks left" in told
    assert f"accuracy {100 * result['pruned']:.2f} % (dense {100 * result['dense']:.2f} %, " in told
    estimate = run_cycles(run)
    assert estimate is not None
    assert f"{estimate.speedup:.1f}" == "1.0"
    assert "about as many cycles on an NPU" in told
    for words in (
        receipt.mask_hash,
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


def test_names_of_metrics_keep_their_letters_and_the_verdict_has_the_speed(run: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "receipt.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    (tmp_path / "result.json").write_text('{"dense": 0.5, "pruned": 0.4, "measure": "mAP"}')
    rows = [row | {"mAP": 0.1} for row in read_rows(run / "metrics.jsonl")]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    timings = [{"engine": name, "batch": 1, "ms": ms, "failed": None} for name, ms in (("torch", 3.0), ("smartprune", 1.5))]
    (tmp_path / "bench.json").write_text(json.dumps({"timings": timings}))
    write_run_page(tmp_path)
    page = (tmp_path / PAGE).read_text()
    assert "2.0\u00d7 as fast on this CPU." in page
    assert "<dt>mAP</dt>" in page
    assert "<h3>mAP</h3>" in page
    assert "<dt>Accuracy</dt>" in (run / PAGE).read_text()


def test_maps_norms_and_scores_against_the_weights(run: Path) -> None:
    data, receipt = read(run / PAGE).data, Receipt.load(run / "receipt.json")
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
        own = factor * np.frombuffer(base64.b64decode(packed), "<f2").astype(np.float64)
        np.testing.assert_allclose(own, scores[start : start + len(kept)], rtol=2e-3, atol=1e-3 * factor)
        start += len(kept)
    assert start == len(scores)


@pytest.mark.parametrize("method", ["smart", "gradual", "magnitude"])
def test_the_scores_of_a_run_are_those_its_mask_was_made_of(tmp_path: Path, method: str) -> None:
    pytest.importorskip("sklearn")
    train(training_jobs.small_config(tmp_path / "run", method=method, dense_epochs=1, finetune_epochs=1))
    scores = load_file(tmp_path / "run" / "scores.safetensors")["scores"].numpy()
    mask = Receipt.load(tmp_path / "run" / "receipt.json").mask().numpy()
    best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: int(mask.sum())]
    assert sorted(best) == np.flatnonzero(mask).tolist()
    border = threshold(scores, mask)
    assert border is not None
    assert scores[mask].min() >= border >= scores[~mask].max()
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["stage"] == "search"]
    places = sampled(len(mask))
    assert [len(row["sample"]) for row in rows] == [len(places)] * len(rows)
    assert rows[-1]["sample"] == mask[places].astype(float).tolist()  # hard by then
    assert all(0 <= value <= 1 for row in rows for value in row["sample"])


def test_a_file_without_a_run_shows_what_is_known_and_no_more(tmp_path: Path) -> None:
    model, _ = zoo.plain_cnn()
    with torch.no_grad():
        model[3].weight[4:] = 0
    save_file({key: value.clone() for key, value in model.state_dict().items()}, tmp_path / "model.safetensors")
    write_page(tmp_path / "page.html", tmp_path / "model.safetensors", (4, 4))
    page = (tmp_path / "page.html").read_text()
    for absent in ("<figure", 'id="receipt"', 'id="run"', "Accuracy", "MACs", "Cycles", "NaN", "None"):
        assert absent not in re.sub(r"<script>.*?</script>|<style>.*?</style>", "", page, flags=re.S), absent
    assert "nothing says what was asked" in page
    assert "Size, packed" in page


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    torch.save(HOSTILE, tmp_path / "model.pt")
    write_page(tmp_path / "page.html", tmp_path / "model.pt", (8, 8))
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Reader(page)
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not set("<>&") & set(found.scripts[0])
    assert "img" not in {tag for tag, _ in found.tags}
    assert not [name for _, values in found.tags for name in values if name.startswith("on")]
    assert not set("\u202e\u2066\u2028\x1b") & set(page)
    assert "\\u202egnp" in found.words
    names = [layer["name"] for layer in found.data["layers"]]
    assert "</script><script>window.hit=1</script>" in names
    for figure in figures(look(tmp_path / "model.pt", (8, 8))):
        ElementTree.fromstring(figure.drawing.svg())
    written, _ = save_figures(look(tmp_path / "model.pt", (8, 8)), tmp_path / "figures")
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
    page = read(tmp_path / PAGE)
    assert "not scored" in page.words
    assert all(layer["scores"] is None for layer in page.data["layers"])
    assert run_cycles(tmp_path) is None
    assert len(read_story(tmp_path).rows) == 3


def test_weights_that_disagree_with_the_receipt_are_called_out(run: Path, tmp_path: Path) -> None:
    receipt = Receipt.load(run / "receipt.json")
    weights = load_file(run / "model.safetensors")
    weights[receipt.layers[0].weight] += 1
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "receipt.json").write_bytes((run / "receipt.json").read_bytes())
    page = render(look(tmp_path))
    assert "Do not ship this file as it is." in page
    assert "The weights are not what the receipt says" in page
    assert "exactly as asked" not in page


def test_a_foreign_network_is_not_made_for_a_folder_from_elsewhere(run: Path, tmp_path: Path) -> None:
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model": "antigravity:fly"}))
    assert run_cycles(tmp_path) is None
    assert run_network(tmp_path) is None
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("width", [100_000, 10**10, 10**30])
def test_a_folder_from_elsewhere_does_not_choose_how_much_memory_is_taken(run: Path, tmp_path: Path, width: int) -> None:
    for name in ("model.safetensors", "receipt.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    config = json.loads((run / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "task_settings": {"width": width}}))
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "page.html")]) == 0
    assert "Cycles on an NPU" not in (tmp_path / "page.html").read_text()
    assert run_network(tmp_path) is None


def test_a_run_knows_the_axes_of_its_layers(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of those that its receipt is not about, such as the stem: the network of its settings says them."""
    assert "axes of" not in read(run / PAGE).words
    assert main(["report", str(run), "--html", str(tmp_path / "page.html")]) == 0
    assert "axes of" not in read(tmp_path / "page.html").words
    assert main(["report", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axes_assumed"] == []
    for name in ("model.safetensors", "receipt.json"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    config = json.loads((run / "config.json").read_text())
    for change in ({"model": "resnet18"}, {"model": "antigravity:fly"}, {"task": "nothing"}):  # not the network of these weights
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        assert main(["report", str(tmp_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["axes_assumed"] == ["conv1.weight"]


def test_resnet50_fits_in_five_megabytes() -> None:
    torch.manual_seed(0)
    view = look(MODELS["resnet50"](), (16, 8))
    size = len(render(view).encode())
    assert view.blocks.total > 180_000
    assert size < 5_000_000


def test_a_file_that_packing_makes_larger() -> None:
    """A packed file has a header; one of a tiny or of a dense model is no smaller."""
    assert "164 bytes plain, 3.7\u00d7 larger" in render(look({"w": torch.eye(3)}, (1, 1)))
    dense = render(look({"w": torch.ones(512, 512)}, (16, 8)))
    assert "1.05 MB plain, about as large" in dense
    assert "when packed" not in dense


def test_a_million_blocks_leave_out_what_would_be_too_much() -> None:
    data = Reader(render(look({"fc.weight": torch.ones(1001, 1000)}, (1, 1)))).data
    assert data["layers"][0]["norms"] is None
    assert len(data["layers"][0]["kept"]) < 200_000


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_any_kind_of_layer(name: str) -> None:
    model, _ = zoo.SMALL[name]()
    view = look(model, (4, 4))
    for layer, told in zip(view.layers, Reader(render(view)).data["layers"], strict=True):
        assert [parts * -(-length // step) for parts, length, step in told["axes"]] == list(layer.row.grid)


def test_figures_are_svg_and_png(run: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    view = look(run)
    written, png = save_figures(view, tmp_path / "figures", view.layers[0].row.name)
    assert png
    names = {path.name for path in written}
    assert {
        f"{key}.{end}" for key in ("layers", "loss", "metric", "temperature", "scores", "mask") for end in ("svg", "png")
    } <= names
    assert sum(name.startswith("map-") for name in names) == 2
    for path in written:
        if path.suffix == ".svg":
            ElementTree.parse(path)
            continue
        with image.open(path) as picture:
            picture.load()
            root = ElementTree.parse(path.with_suffix(".svg")).getroot()
            assert picture.size == (round(3 * float(root.attrib["width"])), round(3 * float(root.attrib["height"])))
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 2
    with pytest.raises(SmartpruneError, match="there is no layer 'conv99'"):
        save_figures(view, tmp_path / "figures", "conv99")


def test_figures_that_cannot_be_written_are_no_bad_arguments(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1; a layer that is not there is an argument, with 2."""
    folder = tmp_path / "figures"
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run), "--figures", str(folder), "--map", "conv99"])
    assert stop.value.code == 2
    assert not folder.exists()
    (folder / "layers.svg").mkdir(parents=True)
    assert main(["report", str(run), "--figures", str(folder)]) == 1
    assert "layers.svg: cannot be written" in capsys.readouterr().err


def test_figures_without_pillow(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["report", str(run), "--figures", str(tmp_path / "figures")]) == 0
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".svg"}
    assert "pip install 'smartprune[plot]'" in capsys.readouterr().err


def test_a_map_has_as_much_ink_as_blocks_are_kept() -> None:
    weight = torch.zeros(40, 24, 3, 3)
    weight[::7, ::5, 1] = 1
    layer = look({"conv.weight": weight}, (4, 4)).layers[0]
    root = ElementTree.fromstring(map_drawing(layer).svg())
    rects = [rect.attrib for rect in root.iter(f"{SVG}rect")]
    ink = sum(float(r["width"]) * float(r["height"]) for r in rects if r["fill"] == COLOURS["accent"])
    paper = sum(float(r["width"]) * float(r["height"]) for r in rects if r["fill"] == COLOURS["band"])
    assert ink / paper == pytest.approx(layer.row.blocks.kept / layer.row.blocks.total, rel=1e-2)
    wide = look({"fc.weight": torch.ones(3, 3000)}, (1, 1)).layers[0]
    assert len(map_drawing(wide).strokes) < 3000  # cells are shared


def test_numbers_of_an_axis() -> None:
    assert [short(value) for value in (0, 0.5, 1200, 3.4e6, 2e-5, -1e-4)] == ["0", "0.5", "1.2k", "3.4M", "2e-5", "-1e-4"]
    assert threshold(np.array([1.0, 3.0, 2.0]), np.array([True, False, True])) is None
    assert threshold(np.array([1.0]), np.array([True])) is None


def test_stages_follow_each_other() -> None:
    rows = tuple(
        {"stage": stage, "epoch": e, "step": 10 * e} for stage, n in (("dense", 3), ("search", 2)) for e in range(1, n + 1)
    )
    story = Story(Path("."), {"dense_epochs": 3, "search_epochs": 4, "finetune_epochs": 2, "dense": None}, None, rows)
    assert [story.length(stage) for stage in ("dense", "search", "finetune")] == [30, 40, 20]
    assert story.at("finetune", 5) == 75
    given = Story(Path("."), {**story.config, "dense": "dense.safetensors"}, None, rows[3:])
    assert given.at("search", 5) == 5


def test_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run), "--html", str(tmp_path / "a.html"), "--figures", str(tmp_path / "f")]) == 0
    out = capsys.readouterr()
    assert out.out == ""
    assert "figures written to" in out.err
    assert (tmp_path / "a.html").read_bytes() == (run / PAGE).read_bytes()
    assert main(["report", str(run / "model.safetensors"), "--block", "4x2", "--html", str(tmp_path / "b.html")]) == 0
    for words, message in (
        (["--json"], "are for the terminal"),
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


def test_runs_compared_on_a_page(run: Path, tmp_path: Path) -> None:
    assert main(["compare", str(run), "--html", str(tmp_path / "c.html")]) == 0
    page = (tmp_path / "c.html").read_text()
    result = json.loads((run / "result.json").read_text())
    assert f"{100 * result['pruned']:.2f}" in page
    assert "Metric over sparsity" in page
    assert [tag for tag, _ in Reader(page).tags].count("svg") == 1


def test_names_that_a_terminal_would_obey_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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


def test_a_weight_of_halves_and_of_linear_layers_alone() -> None:
    view = look(nn.Linear(32, 32).half(), (8, 8))
    weight = view.layers[0]
    assert weight.norms.dtype == np.float32
    assert np.isfinite(weight.norms).all()


def test_speed_is_shown_where_it_was_measured(tmp_path: Path) -> None:
    rows = [("torch", 4.0), ("onnxruntime", 2.0), ("smartprune", 0.5), ("onnxruntime int8", 0.9), ("smartprune int8", 0.25)]
    timings = [{"engine": name, "batch": 1, "ms": ms, "failed": None} for name, ms in rows]
    timings += [{"engine": "openvino", "batch": 1, "ms": 0.1, "failed": "off"}, {"engine": "torch", "batch": 8, "ms": 0.01}, 7]
    (tmp_path / "bench.json").write_text(json.dumps({"timings": timings}))
    assert read_story(tmp_path).times() == dict(rows)
    for damaged in (
        "[]",
        "{",
        json.dumps({"timings": {"a": 1}}),
        json.dumps({"timings": [{"engine": "torch", "batch": 1, "ms": "x"}]}),
    ):
        (tmp_path / "bench.json").write_text(damaged)
        assert read_story(tmp_path).times() == {}


def test_weights_that_are_no_numbers_are_shown(run: Path, tmp_path: Path) -> None:
    """With a receipt and without one, in layers that it lists and in those that it does not."""
    good, bad = torch.ones(8, 8), torch.ones(8, 8)
    bad[0, 0] = math.nan
    page = render(look({"good.weight": good, "bad.weight": bad}, (4, 4)))
    assert "Do not ship this file as it is." in page
    assert "bad.weight: holds NaN or infinity" in page
    assert "good.weight: holds" not in page
    state = load_file(run / "model.safetensors")
    listed = {row.weight for row in Receipt.load(run / "receipt.json").layers}
    name = next(name for name, tensor in state.items() if tensor.dim() > 1 and name not in listed)
    state[name].view(-1)[0] = math.inf
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "receipt.json").write_bytes((run / "receipt.json").read_bytes())
    assert f"{name}: holds NaN or infinity" in render(look(tmp_path))
    assert "holds NaN" not in render(look(run))
