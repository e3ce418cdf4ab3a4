"""The cells of a grid: their order, their names and their dense models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.sweeps import CELL, OPTIONS, finish, small_grid
from helpers.training_jobs import small_config
from smartprune import SmartpruneError
from smartprune.experiments.sweep import Sweep
from smartprune.experiments.sweep.grid import dense_config, dense_name, expand_grids, read_grids


def test_cells_are_ordered_by_method_sparsity_and_seed() -> None:
    cells = expand_grids([small_grid(methods=("magnitude", "smart"), sparsities=(0.75, 0.5), seeds=(1, 0))])
    assert [cell.name for cell in cells] == [
        CELL.format(m, s, seed) for m in ("magnitude", "smart") for s in (0.75, 0.5) for seed in (1, 0)
    ]
    assert len({cell.dense for cell in cells}) == 2


def test_settings_of_a_method_are_part_of_the_name() -> None:
    (cell, other) = expand_grids([small_grid(settings={"smart": {"ramp": "cubic", "end": 1e-4}})])
    assert cell.name == "digits-resnet8-smart-ramp=cubic-end=0.0001-4x2-0.5-s0"
    assert cell.config.settings["ramp"] == "cubic"
    assert other.name == CELL.format("magnitude", 0.5, 0)
    with pytest.raises(SmartpruneError, match="settings for pdp, which is not one of the methods"):
        expand_grids([small_grid(settings={"pdp": {}})])
    with pytest.raises(SmartpruneError, match="is in two grids with different options; give each grid a label"):
        expand_grids([small_grid(), small_grid(options={**OPTIONS, "search_epochs": 3})])
    assert len(expand_grids([small_grid(), small_grid()])) == 2


def test_labels_keep_grids_with_different_options_apart() -> None:
    longer = {**OPTIONS, "search_epochs": 3, "block": "8x4"}
    settings = {"smart": {"end": 0.01}}
    cells = expand_grids([small_grid(), small_grid(label="long-3_a", options=longer), small_grid(label="b", settings=settings)])
    assert [cell.name for cell in cells[:3]] == [
        "digits-resnet8-smart-4x2-0.5-s0", "digits-resnet8-magnitude-4x2-0.5-s0", "digits-resnet8-long-3_a-smart-8x4-0.5-s0"
    ]  # fmt: skip
    assert len({cell.name for cell in cells}) == 6
    assert len({cell.dense for cell in cells}) == 1
    wrong: list[Any] = ["", "a b", "a/b", "..", "ü", 3, ["a"]]
    for label in wrong:
        with pytest.raises(SmartpruneError, match="must be a word of letters, digits, - and _"):
            small_grid(label=label)


def test_dense_seed_gives_all_seeds_one_dense_model(tmp_path: Path) -> None:
    cells, shared = expand_grids([small_grid(seeds=(0, 1, 7))]), expand_grids([small_grid(seeds=(0, 1, 7), dense_seed=7)])
    assert len({cell.dense for cell in cells}) == 3
    assert {cell.dense for cell in shared} == {cells[2].dense}
    assert [cell.config for cell in shared] == [cell.config for cell in cells]
    assert {cell.dense_config(tmp_path).seed for cell in shared} == {7}
    assert dense_name(shared[0].dense_config(tmp_path)) == cells[2].dense
    with pytest.raises(SmartpruneError, match="is in two grids"):
        expand_grids([small_grid(dense_seed=0), small_grid(dense_seed=1)])
    wrong: list[Any] = [-1, 2**32, 1.0, True, "0"]
    for seed in wrong:
        with pytest.raises(SmartpruneError, match=r"dense_seed .* must be an integer from 0"):
            small_grid(dense_seed=seed)
    with pytest.raises(SmartpruneError, match=r"dense_seed 0 and dense 'd\.safetensors': give only one of them"):
        small_grid(dense_seed=0, options={**OPTIONS, "dense": "d.safetensors"})
    finish(tmp_path, cells[1], dense=f"/elsewhere/{cells[1].dense}.safetensors")
    Sweep(tmp_path, cells)
    with pytest.raises(SmartpruneError, match="started from the dense model digits-resnet8-s1, but digits-resnet8-s7 is requested"):
        Sweep(tmp_path, shared)


def test_cells_with_the_same_dense_settings_share_a_dense_model(tmp_path: Path) -> None:
    base = small_config(tmp_path)
    after: list[dict[str, Any]] = [{"method": "magnitude"}, {"sparsity": 0.9}, {"search_epochs": 9}, {"block": "8x4"}]
    after += [{"augment": 1.0}, {"augment": 1.0, "augment_over": "pruning"}, {"augment_over": "all"}]
    before: list[dict[str, Any]] = [{"seed": 1}, {"dense_epochs": 3}, {"lr": 0.2}, {"task_settings": {"width": 5}}]
    before += [{"augment": 1.0, "augment_over": "all"}]
    assert {dense_name(small_config(tmp_path, **change)) for change in after} == {dense_name(base)}
    assert len({dense_name(small_config(tmp_path, **change)) for change in [{}, *before]}) == 6
    assert dense_name(dense_config(base, tmp_path / "d")) == dense_name(base)


@pytest.mark.parametrize("over", ["stage", "pruning"])
@pytest.mark.parametrize("epochs", [0.5, 1.0, 2.5])
def test_stages_after_the_dense_stage_are_longer_than_the_warm_up(tmp_path: Path, over: str, epochs: float) -> None:
    base = small_config(tmp_path, warmup_epochs=epochs, schedule_over=over, dense_epochs=3, search_epochs=3, finetune_epochs=3)
    shortest = dense_config(base, tmp_path / "d")
    assert (shortest.warmup_epochs, shortest.dense_epochs, dense_name(shortest)) == (epochs, 3, dense_name(base))


def test_dense_files_may_depend_on_the_seed(tmp_path: Path) -> None:
    cells = expand_grids([small_grid(options={**OPTIONS, "dense": "/models/s{seed}.safetensors"}, seeds=(0, 3))])
    assert [cell.config.dense for cell in cells[:2]] == ["/models/s0.safetensors", "/models/s3.safetensors"]
    assert all(cell.dense is None for cell in cells)


def test_names_contain_no_slash() -> None:
    given = {**OPTIONS, "model": "some/where:net"}
    for cell in expand_grids([small_grid(options=given)]):
        assert "/" not in cell.name
        assert cell.dense is not None
        assert "/" not in cell.dense


def test_grid_files_are_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    entry = {"methods": ["smart"], "seeds": [0, 1], "options": OPTIONS, "settings": {"smart": {"start": 2.0}}}
    path.write_text(json.dumps([entry, {"methods": ["magnitude"], "sparsities": [0.5], "options": {**OPTIONS, "sparsity": 0}}]))
    with pytest.raises(SmartpruneError, match=r"grid.json: \[1\]: options has sparsity"):
        read_grids(path)
    path.write_text(json.dumps([entry, {"methods": ["magnitude"], "sparsities": [0.5], "options": OPTIONS}]))
    names = [cell.name for cell in expand_grids([g.override({"batch": 64}, {"smart": {"end": 0.01}}) for g in read_grids(path)])]
    assert len(names) == 3
    assert "start=2-end=0.01" in names[0]
    (grid,) = [g for g in read_grids(path) if g.methods == ("magnitude",)]
    assert grid.override({"task_settings": {"folder": "/data"}}, {}).options["task_settings"] == {"width": 4, "folder": "/data"}
    for text, message in (
        ("[3]", "is of type int"),
        ("[]", "holds no grid"),
        ('{"method": []}', "unknown key 'method'"),
        ('{"methods": [["smart"]]}', r"methods has \['smart'\]"),
        ('{"seeds": 3}', "must be a list"),
        ('[{"label": "a b"}]', r"grid.json: \[0\]: label 'a b' must be a word"),
        ('{"dense_seed": "0"}', "grid.json: dense_seed '0' must be an integer"),
    ):
        path.write_text(text)
        with pytest.raises(SmartpruneError, match=message):
            read_grids(path)
