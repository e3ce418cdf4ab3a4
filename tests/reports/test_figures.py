"""The figures of a report as files."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import torch

from smartprune.cli import main
from smartprune.errors import SmartpruneError
from smartprune.reports.block_map import block_map
from smartprune.reports.draw import COLOURS
from smartprune.reports.figures import save_figures, threshold
from smartprune.reports.plot import short
from smartprune.reports.view import gather

SVG = "{http://www.w3.org/2000/svg}"


def test_figures_are_saved_as_svg_and_png(run: Path, tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    view = gather(run)
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


def test_unwritable_figures_are_exit_code_1(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown layer is a wrong argument, which is exit code 2."""
    folder = tmp_path / "figures"
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run), "--figures", str(folder), "--map", "conv99"])
    assert stop.value.code == 2
    assert not folder.exists()
    (folder / "layers.svg").mkdir(parents=True)
    assert main(["report", str(run), "--figures", str(folder)]) == 1
    assert "layers.svg: cannot be written" in capsys.readouterr().err


def test_figures_without_pillow_are_svg_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["report", str(run), "--figures", str(tmp_path / "figures")]) == 0
    assert {path.suffix for path in (tmp_path / "figures").iterdir()} == {".svg"}
    assert "pip install pillow matplotlib" in capsys.readouterr().err


def test_area_of_a_block_map_is_the_share_of_kept_blocks() -> None:
    weight = torch.zeros(40, 24, 3, 3)
    weight[::7, ::5, 1] = 1
    layer = gather({"conv.weight": weight}, (4, 4)).layers[0]
    root = ElementTree.fromstring(block_map(layer).svg())
    rects = [rect.attrib for rect in root.iter(f"{SVG}rect")]
    ink = sum(float(r["width"]) * float(r["height"]) for r in rects if r["fill"] == COLOURS["accent"])
    paper = sum(float(r["width"]) * float(r["height"]) for r in rects if r["fill"] == COLOURS["band"])
    assert ink / paper == pytest.approx(layer.row.blocks.kept / layer.row.blocks.total, rel=1e-2)
    wide = gather({"fc.weight": torch.ones(3, 3000)}, (1, 1)).layers[0]
    assert len(block_map(wide).strokes) < 3000  # blocks share cells


def test_numbers_of_an_axis_are_short() -> None:
    assert [short(value) for value in (0, 0.5, 1200, 3.4e6, 2e-5, -1e-4)] == ["0", "0.5", "1.2k", "3.4M", "2e-5", "-1e-4"]


def test_threshold_is_none_where_scores_overlap_or_nothing_is_removed() -> None:
    assert threshold(np.array([1.0, 3.0, 2.0]), np.array([True, False, True])) is None
    assert threshold(np.array([1.0]), np.array([True])) is None
