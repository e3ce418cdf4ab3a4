"""A valid file of every format that smartprune reads, and the function that reads it."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import smartprune as sp
from helpers.box_folders import write_boxes
from helpers.cifar10_folders import write_binary, write_python
from helpers.finished_runs import write_run
from helpers.image_folders import make_tar, write_classes, write_pairs
from helpers.mutations import mutate
from helpers.training_jobs import small_config
from smartprune.arrays import read_array
from smartprune.artifacts.compact import compact  # noqa: F401 (all readers are imported before memory is measured)
from smartprune.experiments.compare.comparison import compare
from smartprune.experiments.compare.markdown import table_lines
from smartprune.experiments.compare.record import load_rows
from smartprune.experiments.sweep.grid import expand_grids, read_grids
from smartprune.experiments.sweep.history import read_history
from smartprune.hardware.npu import read_npu
from smartprune.reports.page import write_page
from smartprune.reports.runlog import read_run_log
from smartprune.tasks import TASKS, cifar10_files
from smartprune.tasks.detection_files import load_truth
from smartprune.tasks.images import ImageFiles, open_images
from smartprune.training.config import load_config
from smartprune.training.folder import load_weights
from smartprune.training.monitor import read_snapshot, status_line, status_lines
from smartprune.training.page import write_run_page
from smartprune.training.result import Result
from smartprune.training.train import resume, train

BLOCK = (4, 4)
CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 10), nn.Linear(10, 8))


@lru_cache(maxsize=1)
def pruned() -> tuple[nn.Module, sp.Receipt]:
    model = network()
    pruner = sp.attach(model, "magnitude", block=BLOCK, sparsity=0.5, steps=1, include="*")
    pruner.freeze()
    return model, sp.bake(model)


@dataclass(frozen=True)
class Format:
    """``make`` writes valid files to a folder; ``target`` is the one that is damaged; ``read`` gets its path."""

    name: str
    kind: str  # of damage
    target: str
    make: Callable[[Path], object]
    read: Callable[[Path], object]

    def prepare(self, folder: Path) -> Path:
        """A folder with valid files."""
        folder.mkdir(parents=True)
        self.make(folder)
        return folder

    def write(self, template: Path, folder: Path, rng: random.Random | None) -> Path:
        """A fresh copy of the template, with a damaged target unless ``rng`` is None. Returns the path of the target."""
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        path = folder / self.target
        if rng is not None:
            path.write_bytes(mutate(path.read_bytes(), self.kind, rng))
        return path


# ---- making


def _checkpoint(legacy: bool) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        state = {**pruned()[0].state_dict(), "half": torch.ones(2, 3).half(), "strided": torch.ones(4, 4).t()}
        torch.save({"state_dict": state, "epoch": 3}, folder / "x.pt", _use_new_zipfile_serialization=not legacy)

    return make


def _onnx(sparse: bool) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        model, receipt = pruned()
        sp.export_onnx(model, folder / "x.onnx", torch.zeros(1, 3, 4, 4), receipt=receipt, sparse=sparse)

    return make


def _with_receipt(folder: Path) -> None:
    model, receipt = pruned()
    save_file(model.state_dict(), folder / "x.safetensors")
    receipt.save(folder / "receipt.json")


def _run(folder: Path, stopped: bool = False) -> None:
    shutil.rmtree(folder)
    steps = iter(range(1000))
    try:
        train(small_config(folder), stop=lambda: stopped and next(steps) > 20)
    except sp.SmartpruneError:
        assert stopped


def _tar(folder: Path) -> None:
    inner = write_classes(folder / "inner", train=2)
    (inner / "train/ant/link.png").symlink_to("0.png")
    make_tar(inner, folder / "x.tar")
    shutil.rmtree(inner)


def _picture(suffix: str) -> Callable[[Path], object]:
    return lambda folder: write_classes(folder, suffix, train=1)


def _text(name: str, value: object) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def _array(folder: Path) -> None:
    import numpy as np

    np.save(folder / "x.npy", np.arange(48, dtype=np.float32).reshape(4, 3, 2, 2))


def _record(folder: Path) -> None:
    row = {"model": "m", "data": "d", "method": "smart", "block": "4x4", "sparsity": 0.5, "protocol": "p", "metric": "accuracy"}
    numbers = {"values": [0.5, 0.7], "mean": 0.6, "std": 0.02**0.5, "n": 2, "unit": "share"}
    (folder / "result.json").write_text(
        json.dumps({"rows": [{**row, **numbers}, {**row, **numbers, "method": "awg"}], "note": "n"})
    )


# ---- reading


def _costs(path: Path) -> object:
    return str(sp.plan(network(), BLOCK, budget=sp.costs(0.5, path), include="*"))


def _npu(path: Path) -> object:
    return str(read_npu(str(path)).estimate(network(), torch.zeros(1, 3, 4, 4), BLOCK))


def _images(path: Path) -> object:
    open_images.cache_clear()
    task = TASKS["imagefolder"](folder=str(path), size=16, memory=0.0)
    data = task.data("train", CPU)
    return next(iter(data.batches(2, 0, 0)))


def _count_classes(folder: Path) -> int:
    from smartprune.tasks.segmentation_files import count_classes

    return count_classes(ImageFiles(folder, ("images",)), 0)


def _view_run(path: Path) -> object:
    folder = path.parent
    snapshot = read_snapshot(folder)
    lines = [*status_lines(snapshot, True), status_line(snapshot)]
    write_page(folder / "page.html", folder)
    return lines, str(sp.report(folder)), read_run_log(folder).run_step("finetune", 1)


def _resume(path: Path) -> None:
    """Continues a run, and stops after one step."""
    try:
        resume(path.parent, stop=lambda: True)
    except sp.SmartpruneError as error:
        if not str(error).startswith("stopped in"):
            raise


def _compare(path: Path) -> object:
    comparison = compare([path.parent.parent])
    return str(comparison), comparison.csv(), json.dumps(comparison.to_json())


def _pruner_state(path: Path) -> object:
    from smartprune.artifacts.torch_file import read_torch_file

    state = read_torch_file(path)
    model = network()
    pruner = sp.attach(model, "smart", block=BLOCK, sparsity=0.5, steps=4, include="*")
    pruner.load_state_dict(state)  # type: ignore[arg-type]
    model(torch.ones(2, 3, 4, 4)).sum().backward()
    pruner.step()
    return pruner.summary()


def _save_pruner_state(folder: Path) -> None:
    model = network()
    pruner = sp.attach(model, "smart", block=BLOCK, sparsity=0.5, steps=4, include="*")
    pruner.step()
    torch.save(pruner.state_dict(), folder / "x.pt")


def _read_mask(path: Path) -> object:
    return sp.load_mask(path).apply(network())


GRID = {"methods": ["smart", "awg"], "sparsities": [0.5, 0.7], "seeds": [0, 1], "options": {"task": "digits"}, "settings": {}}
COSTS = {"name": "energy", "unit": "pJ", "costs": {"0": 3, "3": [[1.5] * 8] * 3, "4": 2}}
NPU = {"rows": 16, "columns": 8, "lanes": 1, "clock_mhz": 800, "dataflow": "weight_stationary", "weight_bandwidth": None}

FORMATS = (
    Format(
        "safetensors", "safetensors", "x.safetensors", _with_receipt, lambda p: (sp.verify(p, BLOCK), load_weights(network(), p))
    ),
    Format(
        "packed",
        "safetensors",
        "x.safetensors",
        lambda f: sp.pack(pruned()[0], f / "x.safetensors", receipt=pruned()[1]),
        sp.unpack,
    ),
    Format(
        "mask",
        "safetensors",
        "x.safetensors",
        lambda f: sp.save_mask(pruned()[0], f / "x.safetensors", receipt=pruned()[1]),
        _read_mask,
    ),
    Format("checkpoint", "torch", "x.pt", _checkpoint(False), lambda p: str(sp.verify(p, BLOCK))),
    Format("checkpoint of old torch", "torch", "x.pt", _checkpoint(True), lambda p: str(sp.verify(p, BLOCK))),
    Format("state of a pruner", "torch", "x.pt", _save_pruner_state, _pruner_state),
    Format("ONNX", "bytes", "x.onnx", _onnx(False), lambda p: str(sp.verify(p))),
    Format("ONNX, sparse", "bytes", "x.onnx", _onnx(True), lambda p: str(sp.verify(p))),
    Format("receipt", "json", "receipt.json", _with_receipt, lambda p: str(sp.verify(p.with_name("x.safetensors"), receipt=p))),
    Format("run: config.json", "json", "config.json", _run, lambda p: (_view_run(p), write_run_page(p.parent), load_config(p))),
    Format("run: result.json", "json", "result.json", _run, lambda p: (_view_run(p), Result.load(p.parent))),
    Format("run: metrics.jsonl", "json", "metrics.jsonl", _run, _view_run),
    Format("run: scores", "safetensors", "scores.safetensors", _run, _view_run),
    Format("run: model", "safetensors", "model.safetensors", _run, _view_run),
    Format("run: receipt.json", "json", "receipt.json", _run, _view_run),
    Format(
        "run: checkpoint.pt",
        "torch",
        "checkpoint.pt",
        lambda f: _run(f, stopped=True),
        _resume,
    ),
    Format(
        "run: metrics, resumed",
        "json",
        "metrics.jsonl",
        lambda f: _run(f, stopped=True),
        _resume,
    ),
    Format("runs to compare", "json", "a/result.json", lambda f: write_run(f, 0.8).rename(f / "a"), _compare),
    Format("configs to compare", "json", "a/config.json", lambda f: write_run(f, 0.8).rename(f / "a"), _compare),
    Format("record", "json", "result.json", _record, lambda p: table_lines(load_rows(p.parent), {}, "")),
    Format("grid", "json", "x.json", _text("x.json", GRID), lambda p: expand_grids(read_grids(p))),
    Format(
        "history of a sweep",
        "json",
        "sweep.json",
        _text("sweep.json", {"commands": ["a"], "sources": ["b"]}),
        lambda p: read_history(p.parent),
    ),
    Format("NPU", "json", "x.json", _text("x.json", NPU), _npu),
    Format("cost table, JSON", "json", "x.json", _text("x.json", COSTS), _costs),
    Format("cost table, CSV", "bytes", "x.csv", _text("x.csv", "layer,cost\n0,1\n3,2.5\n4,0.125\n"), _costs),
    Format("array", "bytes", "x.npy", _array, lambda p: torch.from_numpy(read_array(p, "").copy()).sum()),
    Format("CIFAR-10, Python", "bytes", "data_batch_1", write_python, lambda p: cifar10_files.read_python(p.parent, "train")),
    Format("CIFAR-10, binary", "bytes", "data_batch_1.bin", write_binary, lambda p: cifar10_files.read_binary(p.parent, "train")),
    Format("tar of pictures", "bytes", "x.tar", _tar, _images),
    Format("PNG", "bytes", "train/ant/0.png", _picture("png"), lambda p: _images(p.parents[2])),
    Format("JPEG", "bytes", "train/ant/0.jpg", _picture("jpg"), lambda p: _images(p.parents[2])),
    Format("WebP", "bytes", "train/ant/0.webp", _picture("webp"), lambda p: _images(p.parents[2])),
    Format("BMP", "bytes", "train/ant/0.bmp", _picture("bmp"), lambda p: _images(p.parents[2])),
    Format(
        "COCO annotations",
        "json",
        "annotations/instances_train.json",
        write_boxes,
        lambda p: load_truth(ImageFiles(p.parents[1], ("annotations",)), "train"),
    ),
    Format(
        "names of classes",
        "json",
        "classes.json",
        lambda f: (write_pairs(f), _text("classes.json", {"classes": ["a", "b", "c"]})(f)),
        lambda p: _count_classes(p.parent),
    ),
)
