"""The grid of the paper: it has every cell of its tables, with the settings of its Appendix G, and every cell can run."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest

from helpers.box_folders import write_boxes
from helpers.image_folders import write_classes, write_pairs
from smartprune.experiments.compare.identity import run_key
from smartprune.experiments.sweep.grid import Cell, expand_grids, read_grids
from smartprune.training.check import check
from smartprune.training.config import Config, configure, make_task
from smartprune.training.run import attach_pruner

RECORDS = Path(__file__).parents[3] / "records"
METHODS = ("smart", "gradual", "pdp", "pas", "awg", "acdc")
CIFAR_STEPS = 391  # batches of 128 in one epoch
NETWORKS = ("resnet18", "densenet", "googlenet", "mobilenetv2")
SPARSITIES = (0.93, 0.95, 0.97)


@pytest.fixture(scope="module")
def paper() -> list[Cell]:
    return expand_grids(read_grids(RECORDS / "paper.json"))


@pytest.fixture(scope="module")
def queue() -> list[Cell]:
    return expand_grids(read_grids(RECORDS / "gpu.json"))


def cells_of(paper: list[Cell], label: str) -> list[Config]:
    return [cell.config for cell in paper if f"-{label}-" in cell.name]


def test_the_grid_has_every_cell_of_table_2(paper: list[Cell]) -> None:
    short = {
        (c.model, c.block, c.sparsity, c.method)
        for c in cells_of(paper, "short")
        if c.task == "cifar10" and (c.search_epochs, c.finetune_epochs) == (12, 48)
    }
    assert set(product(NETWORKS, ("16x8",), SPARSITIES, METHODS)) <= short
    assert set(product(NETWORKS, ("8x8", "16x16"), SPARSITIES, ("smart", "gradual"))) <= short
    with (RECORDS / "paper-table2.csv").open() as file:
        table = {
            (r["model"], r["block"], float(r["sparsity"]), r["method"]) for r in csv.DictReader(file) if r["method"] != "dense"
        }
    appendix = {(c.model, c.block, c.sparsity, c.method) for c in cells_of(paper, "appendix") if c.task == "cifar10"}
    assert table <= appendix
    assert len(appendix) == 4 * 3 * 3 * 5


def test_three_seeds_at_97_percent_for_smart_and_gradual(paper: list[Cell]) -> None:
    seeds = Counter((c.model, c.method) for c in cells_of(paper, "short") if (c.sparsity, c.block) == (0.97, "16x8"))
    assert all(seeds[network, method] >= 3 for network, method in product(NETWORKS, ("smart", "gradual")))


def test_cells_are_distinct_runs(paper: list[Cell]) -> None:
    assert len({cell.name for cell in paper}) == len({run_key(asdict(cell.config)) for cell in paper}) == len(paper)


def test_networks_on_cifar10_share_one_dense_model(paper: list[Cell]) -> None:
    dense = Counter((cell.config.model, cell.config.dense_epochs) for cell in paper if cell.config.task == "cifar10")
    assert {key for key in dense if key[1] == 60} == {(network, 60) for network in NETWORKS[1:]}
    names = {cell.dense for cell in paper if cell.config.task == "cifar10" and cell.config.model == "resnet18"}
    assert len(names) == 1


def appendix_rows() -> Iterator[dict[str, str]]:
    with (RECORDS / "paper-appendix-g.csv").open() as file:
        yield from csv.DictReader(file)


def test_cells_have_the_settings_of_appendix_g(paper: list[Cell]) -> None:
    """The file is a transcription of the appendix. Lengths in steps are rounded to epochs."""
    cells = {(c.task, c.model, c.block, c.sparsity, c.method): c for c in cells_of(paper, "appendix")}
    seen = set()
    for row in appendix_rows():
        for sparsity in [float(row["sparsity"])] if row["sparsity"] else [0.3, 0.5, 0.7]:
            key = (row["data"], row["network"], row["block"], sparsity, row["method"])
            config = cells[key]
            seen.add(key)
            assert config.search_lr == config.finetune_lr == float(row["lr"]), key
            assert config.batch == int(row["batch"]), key
            assert config.schedule_over == "pruning"
            for name in ("score_lr", "score_decay"):
                if row[name]:
                    assert getattr(config, name) == float(row[name]), (key, name)
            for name in ("start", "end", "strength", "mspl"):
                if row[name]:
                    assert config.settings[name] == float(row[name]), (key, name)
            if row["search_iterations"]:
                steps = config.search_epochs * steps_per_epoch(config)
                assert abs(steps - int(row["search_iterations"])) <= 0.55 * steps_per_epoch(config), (key, steps)
            length, unit = row["length"].split()
            epochs = int(length) if unit == "epochs" else int(length) / steps_per_epoch(config)
            assert config.search_epochs + config.finetune_epochs == pytest.approx(epochs, abs=1), key
    assert seen == set(cells)


def steps_per_epoch(config: Config) -> int:
    """Batches in one epoch of CIFAR-10, ImageNet, COCO (with its 1,021 images without objects) and Cityscapes."""
    images = {"cifar10": 50_000, "imagefolder": 1_281_167, "detection": 118_287, "segmentation": 2_975}[config.task]
    return -(-images // config.batch)


def test_smart_has_the_form_of_the_paper(paper: list[Cell]) -> None:
    for config in (c for label in ("appendix", "table5") for c in cells_of(paper, label) if c.method == "smart"):
        assert config.settings["unit"] == "absolute"
        assert config.settings["follow"] is False
        assert config.settings["reach"] is None


def test_table_5_changes_one_setting_at_a_time(paper: list[Cell]) -> None:
    base, *others = [c for c in cells_of(paper, "table5") if c.search_epochs == 100]
    assert (base.sparsity, base.settings["start"], base.settings["end"]) == (0.5, 0.5, 1e-5)
    for config in others:
        changed = {name for name, value in config.settings.items() if value != base.settings[name]}
        if config.settings["schedule"] == "fixed":
            assert changed - {"end"} == {"schedule", "start"}
        elif config.settings["start"] - config.settings["end"] >= 1:  # the printed schedule does not exist
            assert changed == {"schedule", "start"}
        else:
            assert len(changed) == 1
    lengths = {c.config.search_epochs for c in paper if "-table5" in c.name}
    assert lengths == {14, 29, 100, 200, 400}
    assert len([c for c in paper if "-table5" in c.name]) == 1 + 23  # the default, and the rows of the table


def test_the_queue_for_a_gpu_starts_with_the_forms_of_smart(paper: list[Cell], queue: list[Cell]) -> None:
    """Then come the paper's own SMART, the settings of its rivals and cells of Table 2. All networks have one dense model."""
    names = [cell.name for cell in queue]
    assert len({run_key(asdict(cell.config)) for cell in queue}) == len(queue)
    labels = [next(label for label in ("forms", "appendix", "rivals", "short") if f"-{label}" in name) for name in names]
    assert list(dict.fromkeys(labels)) == ["forms", "appendix", "rivals", "short"]
    assert labels == sorted(labels, key=["forms", "appendix", "rivals", "short"].index)
    forms = [cell.config for cell, label in zip(queue, labels, strict=True) if label == "forms"]
    groups = list(dict.fromkeys((c.model, c.sparsity, c.search_epochs) for c in forms))
    resnet = [("resnet18", sparsity, search) for search in (12, 24) for sparsity in (0.97, 0.95)]
    assert groups == [*resnet, ("densenet", 0.97, 12), ("mobilenetv2", 0.97, 12)]
    assert Counter((c.model, c.sparsity, c.search_epochs, c.seed) for c in forms) == {
        (*group, seed): 4 for group, seed in product(groups, (10, 11, 12))
    }
    held_out = {cell.dense for cell, label in zip(queue, labels, strict=True) if label == "rivals"}
    dense = {cell.config.model: cell.dense for cell, label in zip(queue, labels, strict=True) if label != "rivals"}
    assert len(held_out) == 1
    assert {cell.dense for cell in queue} == {*dense.values(), *held_out}
    assert {cell for cell, label in zip(names, labels, strict=True) if label in ("appendix", "short")} <= {c.name for c in paper}


def test_every_cell_on_cifar10_can_be_attached(paper: list[Cell], queue: list[Cell]) -> None:
    """Otherwise, invalid settings and budgets that cannot be met would be reported only after the dense stage."""
    hardest: dict[str, Config] = {}
    for config in (cell.config for cell in [*paper, *queue] if cell.config.task == "cifar10"):
        settings = {name: value for name, value in config.settings.items() if name not in ("start", "end", "strength")}
        key = json.dumps([config.model, config.block, config.method, settings])
        if key not in hardest or (config.sparsity or 0) > (hardest[key].sparsity or 0):
            hardest[key] = config
    for config in hardest.values():
        task = make_task(config.task, config.task_settings)
        pruner = attach_pruner(task.model(config.model), config, task, 390 * config.search_epochs)
        assert pruner.phase == "search"
    assert len(hardest) > 60


@pytest.fixture(scope="module")
def other_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few small images in the layouts of ImageNet, COCO 2017 and Cityscapes."""
    pytest.importorskip("PIL")
    folder = tmp_path_factory.mktemp("data")
    write_classes(folder / "imagenet", train=90)
    write_boxes(folder / "coco", train=40, year="2017", test=False)
    write_pairs(folder / "cityscapes", city=True, train=20, test=False)
    return folder


SMALL = {
    "imagefolder": ("imagenet", {"size": 32, "side": 32}),
    "detection": ("coco", {"size": 32}),
    "segmentation": ("cityscapes", {"height": 32, "width": 32}),
}


@pytest.mark.parametrize("task", SMALL)
@pytest.mark.parametrize("method", ["smart", "pdp", "pas", "awg", "acdc"])
def test_cells_on_imagenet_coco_and_cityscapes_can_run(paper: list[Cell], other_data: Path, task: str, method: str) -> None:
    """The checks before a run read the data, build the network and attach the pruner."""
    name, settings = SMALL[task]
    config = next(c for c in cells_of(paper, "appendix") if (c.task, c.method, c.sparsity) == (task, method, 0.7))
    small = {**config.task_settings, **settings, "folder": str(other_data / name)}
    check(configure(asdict(replace(config, task_settings=small, batch=16, device="cpu", out="run"))))
