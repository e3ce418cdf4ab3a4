"""Promise 8: every form of a model shows the same sparsity, and every other share says what it is a share of.

The model has odd channels, transposed and grouped layers. Its figures are counted again by slow loops. Every percentage in the
receipt, reports, pages, ``verify``, ``pack``, the ONNX export and ``compare`` must have a known label and the value of that label.
"""

from __future__ import annotations

import csv
import html
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import smartprune as sp
from helpers import reference, zoo
from helpers.finished_runs import write_run
from helpers.training_jobs import run_cli
from smartprune.experiments.compare import compare
from smartprune.experiments.compare.page import comparison_page
from smartprune.experiments.compare.panels import comparison_charts
from smartprune.reports.page import write_page

BLOCK, SPARSITY = (4, 3), 0.7
GROUPS = {"down": 3, "up2": 3}
TRANSPOSED = ("up1", "up2")
POSITIONS = {"enter": 64, "down": 16, "deep": 4, "up1": 4, "up2": 16, "mix": 64, "out": 64}  # uses of every weight, by hand


class OddUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Conv2d(3, 9, 3, padding=1)
        self.down = nn.Conv2d(9, 15, 3, stride=2, padding=1, groups=3)
        self.norm = nn.BatchNorm2d(15)
        self.deep = nn.Conv2d(15, 21, 3, stride=2, padding=1)
        self.up1 = nn.ConvTranspose2d(21, 15, 2, stride=2)
        self.up2 = nn.ConvTranspose2d(30, 9, 2, stride=2, groups=3)
        self.mix = nn.Conv2d(18, 11, 3, padding=1)
        self.out = nn.Conv2d(11, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.relu(self.enter(x))
        b = torch.relu(self.norm(self.down(a)))
        c = self.up1(torch.relu(self.deep(b)))
        d = torch.relu(self.up2(torch.cat([b, c], 1)))
        return self.out(torch.relu(self.mix(torch.cat([a, d], 1))))


@dataclass(frozen=True)
class Figures:
    """Percentages with two digits, by label."""

    by_label: dict[str, str]
    by_layer: dict[str, str]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f}"


def count(model: nn.Module, pruned: list[str]) -> Figures:
    """Counts everything with loops over single weights, from the baked model. ``pruned`` are the pruned layers."""
    blocks: dict[str, tuple[int, int]] = {}  # total, removed
    weights: dict[str, tuple[int, int]] = {}
    for name in POSITIONS:
        weight = model.get_parameter(f"{name}.weight")
        index = reference.block_index(tuple(weight.shape), BLOCK, GROUPS.get(name, 1), name in TRANSPOSED)
        live = reference.occupied(weight.flatten().tolist(), index)
        sizes = reference.block_counts(index)
        blocks[name] = len(live), live.count(False)
        weights[name] = sum(sizes), sum(size for size, bit in zip(sizes, live, strict=True) if not bit)

    def total(counts: dict[str, tuple[int, int]], names: list[str]) -> str:
        return share(sum(counts[n][1] for n in names), sum(counts[n][0] for n in names))

    macs = {name: (a * POSITIONS[name], b * POSITIONS[name]) for name, (a, b) in weights.items()}
    everything = [value for p in model.parameters() for value in p.flatten().tolist()]
    removed, all_layers = sum(b for _, b in weights.values()), list(POSITIONS)
    labels = {
        "sparsity": total(blocks, pruned),
        "all layers": total(blocks, all_layers),
        "weights of the pruned layers": total(weights, pruned),
        "weights of all layers": total(weights, all_layers),
        "weights of the model": share(removed, len(everything)),
        "MACs of the pruned layers": total(macs, pruned),
        "MACs of the model": total(macs, all_layers),
        "MACs of the pruned layers left": share(*(sum(macs[n][0] - i * macs[n][1] for n in pruned) for i in (1, 0))),
        "MACs of the model left": share(*(sum(macs[n][0] - i * macs[n][1] for n in all_layers) for i in (1, 0))),
        "single zeros": share(everything.count(0), len(everything)),
        "requested": f"{100 * SPARSITY:g}",
    }
    return Figures(labels, {name: share(b, a) for name, (a, b) in blocks.items()})


# A line of text with percentages -> the labels of its percentages, in order. None: any value, because the label says so.
LINES: list[tuple[str, tuple[str | None, ...]]] = [
    (r"sparsity [\d.]+%: [\d,]+ of [\d,]+ blocks of the pruned layers removed", ("sparsity",)),
    (r"blocks of the pruned layers .*", ("sparsity",)),
    (r"pruned layers .*", ("sparsity",)),
    (r"zeros .* blocks of all \d+ layers are zero", ("all layers",)),
    (r"zeros .* blocks of \S+ of all \d+ layers in the file: .*", ("all layers",)),
    (r"zero blocks, all layers above .*|all layers above .*", ("all layers",)),
    (r"blocks of all layers above .*", ("all layers",)),
    (r"(zero blocks|weights in zero blocks|all), axes assumed .*", (None,)),
    (r"blocks of all layers above, some axes assumed .*", (None,)),
    (r"weights of the pruned layers .*", ("weights of the pruned layers",)),
    (r"weights in zero blocks, all layers above .*", ("weights of all layers",)),
    (r"(weights of the model|weights in zero blocks, of the model) .*", ("weights of the model",)),
    (r"MACs of the pruned layers .*", ("MACs of the pruned layers",)),
    (r"MACs of the model .*", ("MACs of the model",)),
    (r"single zeros, of all stored weights .*", ("single zeros",)),
    (r"zeros .* single weights of the model are zero", ("single zeros",)),
    (r"budget   remove .*", ("requested",)),
    (r"packed   .*% of the dense bytes.*", (None,)),
]


def check_text(text: str, figures: Figures, primary: bool = True, stored_zeros: bool = True) -> None:
    """Every percentage of a text has a known label and its value. ``primary``: whether the sparsity is known."""
    sparsities = 0
    for line in text.splitlines():
        values = re.findall(r"(\d+(?:\.\d+)?)%", line)
        layer = re.match(r"(\w+) +\d+x\d+.* ([\d.]+)%( +\*)?$", line)
        if not values:
            continue
        if layer:
            assert layer[1] in figures.by_layer, line
            if not layer[3]:
                assert layer[2] == figures.by_layer[layer[1]], line
            continue
        labels = next((labels for pattern, labels in reversed(LINES) if re.fullmatch(pattern, line)), None)
        assert labels is not None, f"no label: {line}"
        assert len(labels) == len(values), line
        for label, value in zip(labels, values, strict=True):
            if label is not None and (stored_zeros or label != "single zeros"):
                assert value == figures.by_label[label], line
        sparsities += labels == ("sparsity",)
    assert bool(sparsities) == primary, text


PAGE_LABELS: list[tuple[str, str | None]] = [
    (r"[\d.]+ % of the blocks removed", "sparsity"),
    (r"Sparsity [\d.]+ % [\d,]+ of [\d,]+ blocks of the pruned layers removed", "sparsity"),
    (r"requested: [\d.]+ % of the blocks, keep exactly .*", "requested"),
    (r"MACs of the model left .* per sample.*", "MACs of the model left"),
    (r"[\d.]+ % of the MACs of the model left", "MACs of the model left"),
    (r"[\d.]+ % of the MACs of the pruned layers", "MACs of the pruned layers left"),
    (r"Zero blocks .* blocks of all \d+ layers.*|Zero blocks: [\d.]+ %", "all layers"),
    (r"Zero weights .* single weights of the model.*|Zero weights: [\d.]+ %", "single zeros"),
    (r"accuracy .*|(Accuracy .*)?test split.*|dense [\d.]+ %, .* points", None),
]


def visible(page: str) -> Iterator[str]:
    """The headline and the tiles of a page, in pieces that have one statement each."""
    plain = lambda text: html.unescape(re.sub(r"<[^>]*>", " ", text)).replace("\xa0", " ")  # noqa: E731
    parts = re.findall(r"<h1>(.*?)</h1>", page, re.S)
    tiles = re.search(r'<dl class="tiles">(.*?)</dl>', page, re.S)
    assert tiles is not None
    parts += re.findall(r"<div><dt>(.*?)</dd></div>", tiles[1], re.S)
    for part in parts:
        yield from (re.sub(r"\s+", " ", piece).strip(" .") for piece in plain(part).split(";"))


def check_page(page: str, figures: Figures, primary: bool = True) -> None:
    sparsities = 0
    for piece in visible(page):
        values = re.findall(r"([\d.]+) %", piece)
        if not values:
            continue
        label = next((label for pattern, label in PAGE_LABELS if re.fullmatch(pattern, piece)), "unknown")
        assert label != "unknown", f"no label: {piece}"
        if label is not None:
            assert values == [figures.by_label[label]], piece
        sparsities += label == "sparsity"
    assert bool(sparsities) == primary
    section = re.search(r'<section id="layers".*?</section>', page, re.S)
    assert section is not None
    titles = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', section[0])
    for row in re.findall(r"<tr[ >].*?</tr>|<tr>.*?</tr>", section[0], re.S):
        cells = re.findall(r'<td class="[^"]*">(.*?)</td>', row)
        name = re.search(r'<bdi class="name">(\w+)</bdi>', row)
        if name is None or len(cells) != len(titles) - 1:
            continue
        by_title = dict(zip(titles[1:], cells, strict=True))
        if not by_title["Sparsity"].endswith("*"):
            assert by_title["Sparsity"] == f"{figures.by_layer[name[1]]} %"
        for title, cell in by_title.items():
            bars = re.findall(r'aria-label="[\d.]+ % of its (?:blocks|MACs) kept"', cell)
            assert "%" not in re.sub(r"<[^>]*>", "", cell) or title in ("Sparsity", "Share of the pruned layers\u2019 MACs"), title
            assert cell.count(" %") <= len(bars) + 1


@pytest.fixture(scope="module")
def pruned() -> tuple[nn.Module, sp.Receipt, Tensor]:
    torch.manual_seed(3)
    model, x = OddUNet(), torch.randn(2, 3, 8, 8)
    pruner = sp.attach(model, sp.Magnitude(), block=BLOCK, sparsity=SPARSITY, steps=1, example=x[:1], include=["down", "up2"])
    pruner.freeze()
    receipt = sp.bake(model)
    return model.eval(), receipt, x


@pytest.fixture(scope="module")
def figures(pruned: tuple[nn.Module, sp.Receipt, Tensor]) -> Figures:
    names = [row.name for row in pruned[1].layers]
    assert {*TRANSPOSED, *GROUPS} <= {*names}
    assert len(names) < len(POSITIONS)  # some layers are left dense, so that the denominators differ
    out = count(pruned[0], names)
    assert len(set(out.by_label.values())) == len(out.by_label)
    return out


def test_receipt_report_and_verify_of_the_model(pruned: tuple[nn.Module, sp.Receipt, Tensor], figures: Figures) -> None:
    model, receipt, _ = pruned
    check_text(str(receipt), figures)
    check_text(str(sp.report(model, receipt=receipt)), figures)
    check_text(str(sp.report(model, BLOCK)), figures, primary=False)
    check_text(str(sp.verify(model, receipt=receipt)), figures)
    check_text(str(sp.verify(model, BLOCK)), figures, primary=False)


def test_report_verify_and_page_of_a_file(
    pruned: tuple[nn.Module, sp.Receipt, Tensor], figures: Figures, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, receipt, _ = pruned
    torch.save(model.state_dict(), tmp_path / "a.pt")
    receipt.save(tmp_path / "of_a.json")
    path, page, words = str(tmp_path / "a.pt"), tmp_path / "a.html", ["--receipt", str(tmp_path / "of_a.json")]
    for arguments in ([], words):
        check_text(str(sp.report(path, BLOCK)), figures, primary=False)
        block = [] if arguments else ["--block", "4x3"]
        assert run_cli("report", path, *block, *arguments) == 0
        check_text(capsys.readouterr().out, figures, primary=bool(arguments))
        assert run_cli("report", path, *block, *arguments, "--html", str(page)) == 0
        check_page(page.read_text(), figures, primary=bool(arguments))
    write_page(page, tmp_path / "a.pt", BLOCK, network=OddUNet())
    check_page(page.read_text(), figures, primary=False)
    write_page(page, tmp_path / "a.pt", network=OddUNet(), receipt=receipt)
    check_page(page.read_text(), figures)
    capsys.readouterr()
    assert run_cli("verify", path, *words) == 0
    check_text(capsys.readouterr().out, figures)
    assert run_cli("verify", path, "--block", "4x3") == 0
    check_text(capsys.readouterr().out, figures, primary=False)


def test_packed_files(pruned: tuple[nn.Module, sp.Receipt, Tensor], figures: Figures, tmp_path: Path) -> None:
    model, receipt, _ = pruned
    path, page = tmp_path / "a.packed.safetensors", tmp_path / "a.html"
    check_text(str(sp.pack(model, path, receipt=receipt)), figures)
    check_text(str(sp.report(path)), figures)
    check_text(str(sp.verify(path)), figures)
    write_page(page, path)
    check_page(page.read_text(), figures)
    check_text(str(sp.pack(model, path, BLOCK)), figures, primary=False)


def test_onnx_files(pruned: tuple[nn.Module, sp.Receipt, Tensor], figures: Figures, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    model, receipt, x = pruned
    exported = sp.export_onnx(model, tmp_path / "a.onnx", x, receipt=receipt)
    check_text(str(exported), figures)
    # batch normalization is folded, so that the file stores other single numbers than the model
    check_text(str(sp.report(tmp_path / "a.onnx")), figures, stored_zeros=False)
    check_text(str(sp.verify(tmp_path / "a.onnx")), figures)
    check_text(str(sp.export_onnx(model, tmp_path / "b.onnx", x, BLOCK)), figures, primary=False)


def test_run_folders_and_comparisons(
    pruned: tuple[nn.Module, sp.Receipt, Tensor], figures: Figures, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, receipt, _ = pruned
    folder = write_run(tmp_path / "runs", 0.8, sparsity=SPARSITY, block="4x3")
    receipt.save(folder / "receipt.json")
    save_file({key: value.clone() for key, value in model.state_dict().items()}, folder / "model.safetensors")
    assert run_cli("report", str(folder)) == 0
    check_text(capsys.readouterr().out, figures)
    write_page(tmp_path / "a.html", folder)
    check_page((tmp_path / "a.html").read_text(), figures)
    comparison = compare([folder])
    label, (row,) = figures.by_label, comparison.to_json()["rows"]
    assert [f"{100 * value:.2f}" for value in row["blocks_removed"]] == [label["sparsity"]]
    assert [f"{100 * value:.2f}" for value in row["macs_left"]] == [label["MACs of the pruned layers left"]]
    (line,) = csv.DictReader(comparison.csv().splitlines())
    assert f"{100 * float(line['blocks_removed']):.2f}" == label["sparsity"]
    assert f"{100 * float(line['macs_left']):.2f}" == label["MACs of the pruned layers left"]
    shown = str(comparison).splitlines()
    title = shown.index("MACs of the pruned layers left, in %")
    assert shown[title + 2].split()[-1] == label["MACs of the pruned layers left"]
    assert "%" not in "".join(line for line in shown if " in %" not in line)
    page = comparison_page(comparison, comparison_charts(comparison))
    titles = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', page)
    cells = dict(zip(titles[1:], re.findall(r'<td class="num[ a-z]*">(.*?)</td>', page), strict=True))
    assert f'<div class="small">{label["requested"]} % of blocks</div>' in page
    assert cells["Sparsity (blocks of the pruned layers), %"] == label["sparsity"]
    assert cells["MACs of the pruned layers left, %"] == label["MACs of the pruned layers left"]


def test_json_figures_are_the_same_counts(pruned: tuple[nn.Module, sp.Receipt, Tensor], figures: Figures, tmp_path: Path) -> None:
    model, receipt, _ = pruned
    packed = json.loads(json.dumps(sp.pack(model, tmp_path / "a", receipt=receipt).to_json()))
    reported = json.loads(json.dumps(sp.report(model, receipt=receipt).to_json()))
    for counted in (receipt.to_json()["achieved"]["blocks"], packed["pruned"], reported["pruned_blocks"]):  # type: ignore[index]
        assert share(counted["removed"], counted["total"]) == figures.by_label["sparsity"]
    assert packed["mask_hash"] == reported["mask_hash"] == receipt.mask_hash


def test_forms_of_a_pruned_model_find_its_receipt(tmp_path: Path) -> None:
    model, x = zoo.SMALL["plain_cnn"]()
    receipt = sp.prune(model, [x], block=(4, 4), sparsity=0.5)
    packed = sp.pack(model, tmp_path / "net.packed.safetensors")
    assert packed.pruned == receipt.blocks == sp.report(model).receipt.blocks  # type: ignore[union-attr]
    assert sp.verify(tmp_path / "net.packed.safetensors").receipt == receipt
    assert sp.export_onnx(model.eval(), tmp_path / "net.onnx", x).pruned == receipt.blocks
    with torch.no_grad():
        model[3].weight.fill_(1)
    with pytest.raises(sp.SmartpruneError, match="does not match its receipt"):
        sp.pack(model, tmp_path / "other")


def test_packed_files_of_wrapped_models_load_into_plain_ones(tmp_path: Path) -> None:
    model, _ = zoo.SMALL["plain_cnn"]()
    wrappers = (torch.compile(model, backend="eager"), nn.DataParallel(model), nn.Sequential(model))
    for given in wrappers[:2]:
        sp.pack(given, tmp_path / "p", (4, 4))
        other, _ = zoo.SMALL["plain_cnn"]()
        sp.unpack(tmp_path / "p", other)
        assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))
    sp.pack(model, tmp_path / "p", (4, 4))
    sp.unpack(tmp_path / "p", wrappers[0])
    with pytest.raises(sp.SmartpruneError, match="does not fit the model"):
        sp.unpack(tmp_path / "p", wrappers[2])
