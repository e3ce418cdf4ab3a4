"""``smartprune eval``: evaluates a stored model, or scores stored detections."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import run_files
from ..errors import SmartpruneError, explain_memory_errors
from .common import NAME_OR_TRUST, Subparsers, add_command, add_trust, argument_errors
from .settings import parse_settings
from .streams import print_message

if TYPE_CHECKING:
    from ..training.config import Config
    from ..training.evaluate import Metrics

MAX_BYTES = 4 << 30


def add_eval(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "eval",
        "evaluate a stored model on the data of its task, or score detections",
        "  smartprune eval runs/mine                    the pruned model of a run, on the test split\n"
        "  smartprune eval runs/mine --dense --json     the dense model\n"
        "  smartprune eval model.safetensors --task bccd --data DIR\n"
        "  smartprune eval --detections detections.json --annotations instances_val.json\n\n"
        "If the detections of a run are not scored yet, because a package for scoring was not installed, they are scored now,\n"
        "and the metrics are added to its result.json.",
    )
    parser.add_argument("path", nargs="?", help="a run folder or a .safetensors file")
    parser.add_argument("--dense", action="store_true", help="the dense model of the run instead of the pruned one")
    parser.add_argument(
        "--split", choices=("test", "validation", "train"), default="test", help="split to evaluate on (default: test)"
    )
    parser.add_argument("--task", metavar="NAME", help="task of a model file outside a run folder")
    parser.add_argument("--model", metavar="NAME", help="network of that file (default: the task's)")
    parser.add_argument("--task-set", action="append", metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--data", metavar="DIR", help="folder of the task's data (default: the run's, or $SMARTPRUNE_DATA)")
    parser.add_argument("--device", metavar="NAME", default="auto", help="auto, cpu or cuda (default: auto)")
    parser.add_argument("--detections", metavar="FILE", help="detections to score, in COCO format; with --annotations")
    parser.add_argument("--annotations", metavar="FILE", help="true boxes, in COCO format; with --detections")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_trust(parser)
    parser.set_defaults(run=run_eval)


def run_eval(args: argparse.Namespace) -> int:
    with argument_errors(args):
        if bool(args.detections) != bool(args.annotations):
            raise SmartpruneError("--detections and --annotations are only used together; give both")
        if bool(args.path) == bool(args.detections):
            raise SmartpruneError("give either a run folder or a .safetensors file, or --detections and --annotations")
        for name in ("dense", "task", "model", "task_set", "data"):
            if args.detections and getattr(args, name):
                raise SmartpruneError(f"--{name.replace('_', '-')} is not used with --detections; remove it")
        stored = None if args.path is None else _find_weights(args)
    if stored is None:
        return _print(args, [_score_file(Path(args.detections), Path(args.annotations))])
    path, config = stored
    if _is_unscored(args):
        return _print(args, _score_run(Path(args.path), config))
    return _print(args, [_evaluate(path, config, args.split)])


def _find_weights(args: argparse.Namespace) -> tuple[Path, Config]:
    """The file of the weights, and the settings of its run."""
    from ..artifacts.packfile import is_packed_file
    from ..training.check import resolve
    from ..training.config import configure, load_config
    from ..training.trust import check_trusted

    source = Path(args.path)
    path = source / (run_files.DENSE if args.dense else run_files.MODEL) if source.is_dir() else source
    if source.is_dir() and not (source / run_files.CONFIG).exists():
        raise SmartpruneError(f"{source} holds no run (no {run_files.CONFIG}); give a run folder or a .safetensors file")
    if args.dense and not source.is_dir():
        raise SmartpruneError("--dense is for run folders; give the file of the dense model itself")
    if not path.is_file() and not _is_unscored(args):
        raise SmartpruneError(f"{path} does not exist" + ("; the run is not finished" if source.is_dir() else ""))
    if is_packed_file(path):
        raise SmartpruneError(
            f"{path} is a packed file, which eval does not read; unpack it first: "
            f"smartprune unpack {shlex.quote(str(path))} --out model.safetensors"
        )
    if args.task is None and (path.parent / run_files.CONFIG).exists():
        values = asdict(load_config(path.parent / run_files.CONFIG))
    elif args.task is None:
        raise SmartpruneError(f"{path} is not in a run folder; give its task, such as --task digits")
    else:
        values = {"task": args.task, "task_settings": {}}
    task_settings = parse_settings("task", values["task"], args.task_set or [])
    if args.data:
        task_settings["folder"] = str(Path(args.data).absolute())
    values["task_settings"] = {**values["task_settings"], **task_settings}
    if args.model:
        values["model"] = args.model
    config = resolve(configure({**values, "device": args.device, "graph": "auto"}))
    check_trusted(config.model, path.parent / run_files.CONFIG, args.model, args.trust, NAME_OR_TRUST, print_message)
    return path, config


def _evaluate(path: Path, config: Config, split: str) -> dict[str, Any]:
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
        metrics, *_ = evaluate(task, model.to(device), split, device)
    figures = _require_scored(metrics, task)
    return {"file": str(path), "task": config.task, "model": config.model, "split": split, "figures": figures}


def _is_unscored(args: argparse.Namespace) -> bool:
    """Whether the detections of the run are to be scored. The weights, which are large, may be missing then."""
    from ..training.result import Result

    folder = Path(args.path)
    if not (folder / run_files.RESULT).exists() or args.split != "test":
        return False
    result = Result.load(folder)
    return result.dense is None or result.pruned is None


def _score_run(folder: Path, config: Config) -> list[dict[str, Any]]:
    """Scores the detections of a run's models and adds the metrics to its ``result.json``."""
    from ..files import parse_json, read_limited
    from ..training.config import make_task
    from ..training.folder import locked, write_json
    from ..training.page import write_run_page
    from ..training.result import Result

    rows, task = [], make_task(config.task, config.task_settings)
    with locked(folder):
        result = asdict(Result.load(folder))
        for form, name in run_files.DETECTIONS.items():
            path = folder / name
            detections = parse_json(read_limited(path, MAX_BYTES), str(path))
            try:
                figures = _require_scored(task.score(detections, "test"), task)  # type: ignore[attr-defined]
            except SmartpruneError as error:
                raise SmartpruneError(f"{path}: {error}") from None
            result[form] = figures[task.measure]
            result["also"][form] = {key: value for key, value in figures.items() if key != task.measure}
            rows.append({"file": str(path), "task": config.task, "model": config.model, "split": "test", "figures": figures})
        write_json(folder / run_files.RESULT, result)
        if (folder / run_files.MODEL).exists():
            write_run_page(folder)  # the old page lacks the metrics
    return rows


def _score_file(detections: Path, annotations: Path) -> dict[str, Any]:
    from ..files import parse_json, read_limited
    from ..tasks.coco_eval import mean_average_precision
    from ..tasks.detection import Detection
    from ..tasks.detection_files import check_detections, parse_annotations

    truth = parse_annotations(read_limited(annotations, MAX_BYTES), str(annotations))
    checked = check_detections(parse_json(read_limited(detections, MAX_BYTES), str(detections)), truth, str(detections))
    figures = _require_scored(mean_average_precision(truth, checked), Detection)
    return {"file": str(detections), "annotations": str(annotations), "figures": figures}


def _require_scored(metrics: Metrics | dict[str, float] | None, task: Any) -> Metrics:
    if metrics is None or metrics[task.measure] is None:
        raise SmartpruneError(f"{task.measure} needs {task.needs}")
    return {**metrics}


def _print(args: argparse.Namespace, rows: list[dict[str, Any]]) -> int:
    if args.json:
        print(json.dumps(rows[0] if len(rows) == 1 else {"results": rows}, indent=2))
        return 0
    for row in rows:
        origin = ", ".join(str(row[key]) for key in ("task", "model", "split") if key in row)
        print(row["file"] + (f" ({origin})" if origin else ""))
        width = max(map(len, row["figures"]))
        for name, value in row["figures"].items():
            print(f"  {name:<{width}}  {100 * value:.2f} %")
    return 0
