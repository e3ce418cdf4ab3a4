"""``smartprune eval``: judges a stored model again, or finds that were written down but not scored."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from .common import Verbs, add_verb, arguments
from .train import read_settings

if TYPE_CHECKING:
    from ..training.config import Config
    from ..training.evaluate import Metrics

LARGEST_FILE = 4 << 30


def eval_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "eval",
        "judge a stored model again on the data of its task, or score what a detector found",
        "  smartprune eval runs/mine                    the pruned model of a run, on the test split\n"
        "  smartprune eval runs/mine --dense --json     the dense one\n"
        "  smartprune eval model.safetensors --task bccd --data DIR\n"
        "  smartprune eval --detections detections.json --annotations instances_val.json\n\n"
        "A run whose finds were written but not scored, because nothing that scores them was installed, is scored from these,\n"
        "and the figures go to its result.json.",
    )
    parser.add_argument("path", nargs="?", help="a run folder or a .safetensors file")
    parser.add_argument("--dense", action="store_true", help="the dense model of the run in place of the pruned one")
    parser.add_argument(
        "--split", choices=("test", "validation", "train"), default="test", help="split to judge on (default: test)"
    )
    parser.add_argument("--task", metavar="NAME", help="task of a model file that lies in no run folder")
    parser.add_argument("--model", metavar="NAME", help="network of that file (default: the task's own)")
    parser.add_argument("--task-set", action="append", metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--data", metavar="DIR", help="where the task's data lies (default: as in the run, or $SMARTPRUNE_DATA)")
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--detections", metavar="FILE", help="score this list of finds in COCO's form ...")
    parser.add_argument("--annotations", metavar="FILE", help="... by the boxes in this file of COCO's form")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    with arguments(args):
        if bool(args.detections) != bool(args.annotations):
            raise SmartpruneError("--detections and --annotations go together")
        if bool(args.path) == bool(args.detections):
            raise SmartpruneError("give a run folder or a .safetensors file, or --detections and --annotations")
        for name in ("dense", "task", "model", "task_set", "data"):
            if args.detections and getattr(args, name):
                raise SmartpruneError(f"--{name.replace('_', '-')} is for a model; finds are scored by --annotations alone")
        place = None if args.path is None else _place(args)
    if place is None:
        return _show(args, [_score_file(Path(args.detections), Path(args.annotations))])
    path, config = place
    if _unscored(args):
        return _show(args, _score_run(Path(args.path), config))
    return _show(args, [_judged(path, config, args.split)])


def _place(args: argparse.Namespace) -> tuple[Path, Config]:
    """The file of the weights, and the settings it was made with."""
    from ..artifacts.packfile import is_packed_file
    from ..training.check import resolve
    from ..training.config import configure, load_config

    given = Path(args.path)
    path = given / (run_files.DENSE if args.dense else run_files.MODEL) if given.is_dir() else given
    if given.is_dir() and not (given / run_files.CONFIG).exists():
        raise SmartpruneError(f"{given} holds no run (no {run_files.CONFIG}); give a run folder or a .safetensors file")
    if args.dense and not given.is_dir():
        raise SmartpruneError("--dense is for run folders; give the file of the dense model itself")
    if not path.is_file() and not _unscored(args):
        raise SmartpruneError(f"{path} is not there" + ("; the run is not finished" if given.is_dir() else ""))
    if is_packed_file(path):
        raise SmartpruneError(
            f"{path} is a packed file, and eval reads plain ones; make one first: "
            f"smartprune unpack {shlex.quote(str(path))} --out model.safetensors"
        )
    if args.task is None and (path.parent / run_files.CONFIG).exists():
        values = asdict(load_config(path.parent / run_files.CONFIG))
    elif args.task is None:
        raise SmartpruneError(f"{path} lies in no run folder; say what it was trained on with --task, such as --task digits")
    else:
        values = {"task": args.task, "task_settings": {}}
    own = read_settings("task", values["task"], args.task_set or [])
    if args.data:
        own["folder"] = str(Path(args.data).absolute())
    values["task_settings"] = {**values["task_settings"], **own}
    if args.model:
        values["model"] = args.model
    return path, resolve(configure({**values, "device": args.device, "graph": "auto"}))


def _judged(path: Path, config: Config, split: str) -> dict[str, Any]:
    import torch

    from ..training.check import model_flags
    from ..training.config import make_task
    from ..training.evaluate import evaluate
    from ..training.folder import load_weights
    from ..training.run import deterministic

    device = torch.device(config.device)
    with deterministic(config):
        task = make_task(config.task, config.task_settings)
        with explain_memory_errors(model_flags(config)):
            model = task.model(config.model)
        load_weights(model, path)
        if task.data(split, device).steps(1) == 0:
            raise SmartpruneError(f"{config.task} has no {split} split")
        figures, _ = evaluate(task, model.to(device), split, device)
    return {"file": str(path), "task": config.task, "model": config.model, "split": split, "figures": _scored(figures, task)}


def _unscored(args: argparse.Namespace) -> bool:
    """Whether a run is to be scored by what its models found; their weights, which are large, may be elsewhere then."""
    from ..training.result import Result

    folder = Path(args.path)
    if not (folder / run_files.RESULT).exists() or args.split != "test":
        return False
    result = Result.load(folder)
    return result.dense is None or result.pruned is None


def _score_run(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Scores what the models of a run found, and writes that down in its ``result.json``."""
    from ..files import parse_json, read_limited
    from ..training.config import make_task
    from ..training.folder import locked, write_json
    from ..training.page import write_run_page
    from ..training.result import Result

    out, task = [], make_task(config.task, config.task_settings)
    with locked(folder):
        result = asdict(Result.load(folder))
        for form, name in run_files.DETECTIONS.items():
            path = folder / name
            found = parse_json(read_limited(path, LARGEST_FILE), str(path))
            try:
                figures = _scored(task.score(found, "test"), task)  # type: ignore[attr-defined]
            except SmartpruneError as error:
                raise SmartpruneError(f"{path}: {error}") from None
            result[form] = figures[task.measure]
            result["also"][form] = {key: value for key, value in figures.items() if key != task.measure}
            out.append({"file": str(path), "task": config.task, "model": config.model, "split": "test", "figures": figures})
        write_json(folder / run_files.RESULT, result)
        if (folder / run_files.MODEL).exists():
            write_run_page(folder)  # the old one says that it is not scored
    return out


def _score_file(finds: Path, boxes: Path) -> dict[str, Any]:
    from ..files import parse_json, read_limited
    from ..tasks.coco_eval import mean_average_precision
    from ..tasks.detection import Detection
    from ..tasks.detection_files import check_detections, parse_annotations

    truth = parse_annotations(read_limited(boxes, LARGEST_FILE), str(boxes))
    found = check_detections(parse_json(read_limited(finds, LARGEST_FILE), str(finds)), truth, str(finds))
    return {"file": str(finds), "annotations": str(boxes), "figures": _scored(mean_average_precision(truth, found), Detection)}


def _scored(figures: Metrics | dict[str, float] | None, task: Any) -> Metrics:
    if figures is None or figures[task.measure] is None:
        raise SmartpruneError(f"{task.measure} needs {task.needs}")
    return {**figures}


def _show(args: argparse.Namespace, found: list[dict[str, Any]]) -> int:
    if args.json:
        print(json.dumps(found[0] if len(found) == 1 else {"results": found}, indent=2))
        return 0
    for each in found:
        about = ", ".join(str(each[key]) for key in ("task", "model", "split") if key in each)
        print(each["file"] + (f" ({about})" if about else ""))
        width = max(map(len, each["figures"]))
        for name, value in each["figures"].items():
            print(f"  {name:<{width}}  {100 * value:.2f} %")
    return 0
