"""``smartprune train``: starts, resumes or repeats a run."""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from .. import run_files
from ..errors import SmartpruneError
from ..files import check_folder
from ..training.config import BUDGET_SETTINGS, Config, flags
from .common import Verbs, add_verb, arguments
from .streams import tell

if TYPE_CHECKING:
    from ..training.result import Result


def train_verb(verbs: Verbs) -> None:
    parser = add_verb(
        verbs,
        "train",
        "train, search, fine-tune, bake and verify; with no arguments, the small job on handwritten digits",
        "  smartprune train                                          about half a minute on a CPU\n"
        "  smartprune train digits --method magnitude --sparsity 0.95 --out runs/mine\n"
        "  smartprune train --set start=1 --set ramp=cubic           settings of the method\n"
        "  smartprune train cifar10 --model resnet18 --data DIR --device cuda --sparsity 0.97\n"
        "  smartprune train --resume --out runs/mine                 goes on after Ctrl-C, SIGTERM or kill -9\n"
        "  torchrun --nproc-per-node=2 -m smartprune train ...       the same with two processes\n"
        "  smartprune train --config runs/mine/config.json           repeats a run\n\n"
        "Ctrl-C and SIGTERM finish the step, write a checkpoint and exit with code 1; once more stops at once.",
    )
    parser.add_argument("task", nargs="?", help="what to train on (default: digits)")
    parser.add_argument("--out", metavar="DIR", help="run folder (default: runs/TASK-METHOD-BLOCK-SPARSITY-sSEED)")
    parser.add_argument("--resume", action="store_true", help="continue the run in --out from its last checkpoint")
    parser.add_argument("--config", metavar="FILE", help="settings from a config.json; other arguments win over it")
    parser.add_argument("--set", action="append", metavar="NAME=VALUE", help="a setting of the method")
    parser.add_argument("--task-set", action="append", metavar="NAME=VALUE", help="a setting of the task")
    parser.add_argument("--data", metavar="DIR", help="where the task's data lies (default: $SMARTPRUNE_DATA)")
    parser.add_argument("--json", action="store_true", help="print the result and the receipt as JSON")
    add_flags(parser)
    parser.set_defaults(run=run_train)


def add_flags(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """A flag for every setting of a run, of the setting's name and type."""
    hints = get_type_hints(Config)
    for field in flags():
        if field.name in without:
            continue
        flag, hint = "--" + field.name.replace("_", "-"), hints[field.name]
        if get_origin(hint) is tuple:
            parser.add_argument(flag, action="append", metavar="GLOB", help=field.metadata["help"])
        else:
            kind = next(part for part in (get_args(hint) or (hint,)) if part is not type(None))
            metavar = {int: "N", float: "X", str: "NAME"}[kind]
            parser.add_argument(flag, type=kind, metavar=metavar, help=field.metadata["help"])


def run_train(args: argparse.Namespace) -> int:
    with arguments(args):
        given = asked(args)
    if args.resume or _restarted(args):
        folder = _folder_to_resume(args, given)
        return _carry_out(args, folder, resuming=True)
    from ..training.check import check
    from ..training.config import configure

    with arguments(args):
        config = configure({"out": "", **given})
        if not args.out:
            config = configure({**asdict(config), "out": str(_free(_default_out(config)))})
        check_folder(config.out)
        check(config)
    return _carry_out(args, Path(config.out), resuming=False, config=config)


def _restarted(args: argparse.Namespace) -> bool:
    """Whether torchrun (--max-restarts) has started this command anew after a failure; the run is in its folder then."""

    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return again and bool(args.out) and (Path(args.out) / run_files.CONFIG).exists()


def _carry_out(args: argparse.Namespace, folder: Path, resuming: bool, config: Config | None = None) -> int:
    from ..training import ranks
    from ..training.progress import Progress
    from ..training.train import resume, train

    if resuming and (folder / run_files.RESULT).exists():
        tell(f"smartprune: the run in {folder} is finished; nothing to resume")
        return _print_result(args, folder, resume(folder))
    progress = Progress(None if ranks.rank() == 0 else io.StringIO())
    with stop_signals(progress.message) as stop:
        try:
            result = resume(folder, progress, stop) if config is None else train(config, progress, stop)
        finally:
            progress.close()
    return _print_result(args, Path(result.folder), result) if ranks.rank() == 0 else 0


@contextmanager
def stop_signals(say: Callable[[str], None]) -> Iterator[Callable[[], bool]]:
    """Turns the first SIGINT or SIGTERM into a request to stop; the second one acts as ever."""
    asked = False
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        restore()

    def stop() -> bool:
        if asked:
            say("stopping: writing a checkpoint")
        return asked

    for number in numbers:
        signal.signal(number, ask)
    try:
        yield stop
    finally:
        restore()


def asked(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that were asked for, from the file and the flags."""
    from ..training.config import load_config, read_config

    out: dict[str, Any] = {}
    if args.config:
        out = read_config(args.config)
        if "task" in out:
            load_config(args.config)  # whether it is right by itself, told with its name
        out = {"task": args.task or "digits", "method": "smart", **out}
        out.pop("out", None)
    flagged = {field.name: getattr(args, field.name) for field in flags() if getattr(args, field.name) is not None}
    if args.task is not None:
        flagged["task"] = args.task
    for name, settings, texts in (("task", "task_settings", args.task_set), ("method", "settings", args.set)):
        if flagged.get(name, out.get(name)) != out.get(name):
            out.pop(settings, None)  # they were another one's
        if texts and isinstance(out.get(settings, {}), dict):  # anything else is told with its name
            out[settings] = {**out.get(settings, {}), **read_settings(name, flagged.get(name, out.get(name)), texts)}
    if any(name in flagged for name in BUDGET_SETTINGS):  # in place of what a configuration file asks for
        out |= dict.fromkeys(BUDGET_SETTINGS)
    if args.data and isinstance(out.get("task_settings", {}), dict):
        out["task_settings"] = {**out.get("task_settings", {}), "folder": str(Path(args.data).absolute())}
    if args.out:
        flagged["out"] = args.out
    for name in ("dense", "npu"):  # a run may be resumed, and its page written, from another folder
        if flagged.get(name) and (name == "dense" or flagged[name].endswith(".json")):
            flagged[name] = str(Path(flagged[name]).absolute())
    return {**out, **flagged}


def read_settings(kind: str, name: object, texts: Iterable[str]) -> dict[str, Any]:
    """``end=1e-4`` as a number, ``ramp=cubic`` as a text, and what could be either, such as ``ramp=none``, as the setting of the
    ``"task"`` or ``"method"`` of that name takes it."""
    from ..methods import METHODS
    from ..tasks import TASKS
    from ..training.config import accepts

    usual = {"task": "digits", "method": "smart"}[kind]
    records: dict[Any, Any] = {"task": dict(TASKS), "method": dict(METHODS)}[kind]
    record = records.get(name if isinstance(name, str) else usual)
    out: dict[str, Any] = {}
    for text in texts:
        setting, equals, value = text.partition("=")
        if not equals or not setting:
            raise SmartpruneError(f"{text!r} is not a setting; write NAME=VALUE, such as end=1e-4")
        parsed = _parse(value)
        keep_text = record is not None and accepts(record, setting, value) and not accepts(record, setting, parsed)
        out[setting] = value if keep_text else parsed
    return out


def _parse(text: str) -> Any:
    words: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _default_out(config: Config) -> Path:
    from ..experiments.sweep.grid import safe_name
    from ..training.config import make_task

    own = make_task(config.task, config.task_settings).recipe.model
    kind, number = config.budget_share
    share = f"{kind if kind != 'sparsity' else ''}{number:g}"
    parts = [config.task, *([config.model] if config.model != own else []), config.method, config.block, share]
    return Path("runs") / safe_name("-".join([*parts, f"s{config.seed}"]).replace("*", "all"))


def _numbered(base: Path) -> Iterator[Path]:
    yield base
    number = 2
    while True:
        yield base.with_name(f"{base.name}-{number}")
        number += 1


def _free(base: Path) -> Path:
    return next(path for path in _numbered(base) if not path.exists())


def _folder_to_resume(args: argparse.Namespace, given: dict[str, Any]) -> Path:
    """The folder, once what was asked for agrees with the settings in it."""
    from ..training.config import check_names, configure, load_config

    with arguments(args):
        check_names(given)
    if args.out:
        folder = Path(args.out)
    else:
        with arguments(args):
            base = _default_out(configure(given))
        folder = base
        for path in _numbered(base):
            if not path.exists():
                break
            folder = path
    if not (folder / run_files.CONFIG).exists():
        raise SmartpruneError(f"{folder} holds no run to resume; start one without --resume, or give its folder as --out")
    stored = load_config(folder / run_files.CONFIG)
    with arguments(args):
        for name, value in given.items():
            kept = getattr(stored, name)
            if name != "out" and not _agrees(kept, value) and not _left_open(name, value):
                raise SmartpruneError(
                    f"--resume goes on with the settings in {folder / run_files.CONFIG}: {name} is {kept!r} there, "
                    f"{value!r} was given; leave it out, or start a new run"
                )
    return folder


def _left_open(name: str, value: Any) -> bool:
    """Whether the machine decides it when a run starts, so that config.json says what was decided."""
    return value == "auto" or (name, value) == ("threads", 0)


def _agrees(kept: Any, value: Any) -> bool:
    if isinstance(kept, dict):
        return isinstance(value, dict) and {**kept, **value} == kept
    return bool(kept == (tuple(value) if isinstance(value, list) else value))


def _print_result(args: argparse.Namespace, folder: Path, result: Result) -> int:
    from ..artifacts.receipt import Receipt
    from ..training.progress import format_duration

    receipt = Receipt.load(folder / run_files.RECEIPT)
    if args.json:
        print(json.dumps({**asdict(result), "receipt": receipt.to_json()}, indent=2))
        return 0
    stages = ", ".join(f"{stage} {format_duration(seconds)}" for stage, seconds in result.stage_seconds.items())
    print(receipt)
    print(f"dense    {result.measure} {result.metrics_line('dense')}")
    print(f"pruned   {result.measure} {result.metrics_line('pruned')}")
    print(f"verified {'yes' if result.verified else 'NO'}")
    for name, written in result.files.items():
        print(f"{name:<8} {written}")
    print(f"time     {result.seconds:.0f} s ({stages})")
    print(f"folder   {folder}")
    return 0
