"""The command line as a whole: help, exit codes, stdout and stderr."""

from __future__ import annotations

import argparse
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import smartprune
from helpers.training_jobs import SMALL_FLAGS, environment, run_cli
from smartprune.cli import COMMANDS, settings
from smartprune.cli.common import Parser
from smartprune.training.config import configure

pytestmark = pytest.mark.usefixtures("in_work_folder")


def test_results_go_to_stdout_and_progress_to_stderr(work: Path) -> None:
    output, errors = (work / "stdout.txt").read_text(), (work / "stderr.txt").read_text()
    for word in ("kept/blocks", "remove 50% of the blocks", "kept     ", "dense    test accuracy", "pruned   test accuracy"):
        assert word in output
    assert "folder   runs/a" in output
    assert "loss" not in output
    for stage in ("dense", "search", "finetune"):
        assert f"\n{stage}" in "\n" + errors
    assert "\x1b" not in errors


@pytest.mark.parametrize(
    "command_name", ["train", "plan", "report", "verify", "eval", "pack", "unpack", "export", "bench", "compare", "sweep", "watch"]
)
def test_help_has_an_example(command_name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(command_name, "--help") == 0
    assert f"example:\n  smartprune {command_name}" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--help") == 0
    text = capsys.readouterr().out
    assert all(add.__name__.removeprefix("add_") in text for add in COMMANDS)
    assert "Exit codes: 0 success, 1 failed or stopped, 2 wrong arguments" in text


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from smartprune.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert "usage: smartprune train" in process.stdout


def test_without_arguments_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli() == 2
    listed = capsys.readouterr().err
    assert "usage: smartprune" in listed
    assert all(f"\n    {add.__name__.removeprefix('add_')}" in listed for add in COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--version") == 0
    assert capsys.readouterr().out == f"smartprune {smartprune.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--sparsity", "93"],
            "sparsity=93.0 is outside [0, 1): it is the share to remove; write sparsity=0.93",
        ),
        (["train", "--sparsity", "many"], "argument --sparsity: invalid float value: 'many'"),
        (["train", "--sparsity", "0.5", "--macs", "0.5"], "sparsity=0.5 and macs=0.5: set exactly one of"),
        (["train", "--block", "0x4"], "block"),
        (["train", "--method", "snip"], "unknown method 'snip'; choose one of: smart"),
        (["train", "mnist"], "unknown task 'mnist'; choose one of: digits"),
        (["train", "--model", "vgg"], "model='vgg' is unknown to the task digits; its networks are: resnet8, resnet18"),
        (["train", "--set", "strat=1"], "unknown setting 'strat' for smart; its settings are: start, end"),
        (["train", "--set", "start"], "'start' is not a setting; write NAME=VALUE"),
        (["train", "--set", "start=hot"], "smart: start='hot' must be float"),
        (["train", "--set", "schedule=sudden"], "schedule='sudden' is not known; it can be:"),
        (["train", "--task-set", "depth=3"], "unknown setting 'depth' for digits; its settings are: width, shift"),
        (["train", "digits", "--data", "nowhere"], "digits includes its data and reads no folder; remove --data"),
        (["plan", "digits", "--data", "nowhere"], "digits includes its data and reads no folder; remove --data nowhere"),
        (["train", "--floor", "0.9"], "floor=0.9 needs"),
        (["train", "--dense", "nowhere.safetensors"], "nowhere.safetensors cannot be read"),
        (["train", "--config", "nowhere.json"], "nowhere.json cannot be read as a configuration"),
        (["train", "--skip", "head.*"], "'head.*' matches no layer"),
        (["train", "--spars", "0.5"], "unrecognized arguments: --spars"),
        (["train", "--resume", "--out", "runs/a", "--sparsity", "0.75"], "there sparsity is 0.5, not 0.75"),
        (["plan", "nothing"], "unknown model 'nothing'; choose one of: resnet8, resnet18"),
        (["plan", "resnet81"], "unknown model 'resnet81'; did you mean resnet8?; choose one of: resnet8, resnet18"),
        (["plan", "."], ". is a path, not the name of a model; choose one of: resnet8, resnet18"),
        (["plan", "nowhere:build"], "nowhere:build: cannot be imported"),
        (["plan", "builtins:len"], "builtins:len() failed with TypeError"),
        (["plan", "resnet18", "--macs", "0.5"], "--macs needs the shape of one sample"),
        (["plan", "resnet18", "--input", "3x"], "--input 3x cannot be read"),
        (["plan", "resnet18", "--input", "5x32x32"], "to have 3 channels, but got 5 channels instead"),
        (["plan", "resnet18", "--sparsity", "1"], "sparsity=1.0 is outside [0, 1)"),
        (["report", "runs/a", "--block", "4"], "must have at least two sizes"),
        (["report", "runs/a", "--map", "conv9"], "there is no layer 'conv9'"),
        (["verify", "runs/a", "--block", "4y2"], "block='4y2' cannot be read"),
        (["plan", "resnet18", "--sparsty=0.9"], "unrecognized arguments: --sparsty=0.9; did you mean --sparsity?"),
        (["prun"], "did you mean prune?"),
        (["dance"], "invalid choice: 'dance'"),
    ],
)
def test_wrong_arguments_exit_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err
    *error, hint = captured.err.splitlines()
    assert ": error: " in error[0]
    assert "usage:" not in captured.err
    assert hint.endswith(" --help lists all options")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", *SMALL_FLAGS, "--out", "runs/a"], "runs/a already holds a run; continue it with"),
        (["train", "--resume", "--out", "runs/none"], "runs/none holds no run to resume; start one without --resume"),
        (["report", "nowhere.safetensors"], "nowhere.safetensors: no such file"),
        (["verify", "runs"], "runs: a run folder holds model.safetensors"),
    ],
)
def test_failures_exit_with_1_and_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("smartprune: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_unwritable_paths_are_wrong_arguments(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "file").write_bytes(b"")
    before = sorted(work.rglob("*"))
    run_file = "runs/a/config.json"
    for arguments, message in (
        (["train", *SMALL_FLAGS, "--out", "file"], "is a file; give a folder"),
        (["train", *SMALL_FLAGS, "--out", "file/inner"], "is a file"),
        (["sweep", "--out", "file"], "is a file; give a folder"),
        (["compare", "runs/a", "--csv", "no/such.csv"], "--csv no/such.csv: cannot be written (the folder no does not exist)"),
        (["compare", "runs/a", "--html", run_file], f"--html {run_file} is the config.json of the run itself"),
        (["compare", "runs/a", "--csv", "x.html", "--html", "x.html"], "--csv and --html are both x.html"),
        (["compare", "runs/a", "--record", "file", "--note", "n"], "is a file; give a folder"),
        (["report", "runs/a", "--html", run_file], f"--html {run_file} is the config.json of the run itself"),
        (["pack", "runs/a", "--out", "runs/a/dense.safetensors"], "is the dense.safetensors of the run itself"),
        (["eval", "runs/a/model.packed.safetensors"], "smartprune unpack runs/a/model.packed.safetensors --out"),
    ):
        capsys.readouterr()
        assert run_cli(*arguments) == 2, arguments
        assert message in capsys.readouterr().err, arguments
    assert sorted(work.rglob("*")) == before


FAILS = """
import sys
import smartprune.cli
from smartprune.cli.common import add_command
def add_fails(subparsers):
    def run(args):
        print("a result")
        raise OSError({error})
    add_command(subparsers, "fails", "fail", "").set_defaults(run=run)
smartprune.cli.COMMANDS = (add_fails,)
sys.exit(smartprune.cli.main(["fails"]))
"""


def test_output_before_a_file_error_is_printed() -> None:
    script = FAILS.format(error="2, 'No such file', 'x'")
    env = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    process = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (1, "a result\n")
    assert process.stderr == "smartprune: x cannot be written or read (No such file); fix that and try again\n"


def test_os_errors_of_libraries_are_not_reported_as_output_errors() -> None:
    script = FAILS.format(error="'cannot write mode F as PNG'")
    process = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert process.returncode == 1
    assert process.stdout == "a result\n"
    assert process.stderr.endswith("OSError: cannot write mode F as PNG\n")


@pytest.mark.parametrize("command", ["train", "plan resnet8", "verify a.pt"])
def test_a_python_without_torch_gets_one_line(command: str) -> None:
    script = f"import sys; sys.modules['torch'] = None; from smartprune.cli import main; sys.exit(main({command.split()}))"
    process = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert process.returncode == 1
    last = process.stderr.splitlines()[-1]
    assert last == f"smartprune: PyTorch is not installed for {sys.executable}; run: {sys.executable} -m pip install torch"
    assert "Traceback" not in process.stderr


def test_train_prints_a_line_before_it_loads_torch(tmp_path: Path) -> None:
    """Checked by making torch fail to load: the line is there already."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')\n")
    env = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(smartprune.__file__).parents[1]}"}
    process = subprocess.run([sys.executable, "-m", "smartprune", "train"], env=env, capture_output=True, text=True, check=False)
    assert process.stderr.splitlines() == ["smartprune train: loading PyTorch", "torch was loaded"]


def test_on_a_terminal_every_command_prints_a_line_before_it_loads_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was loaded')\n")
    env = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(smartprune.__file__).parents[1]}"}
    terminal, other_end = pty.openpty()
    words = [sys.executable, "-m", "smartprune", "plan", "resnet8"]
    subprocess.run(words, env=env, stderr=other_end, stdout=subprocess.DEVNULL, check=False)
    os.close(other_end)
    assert os.read(terminal, 1000).decode().splitlines() == ["smartprune plan: loading PyTorch", "torch was loaded"]
    os.close(terminal)
    piped = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert piped.stderr.splitlines() == ["torch was loaded"]


WARNS = """
import sys, warnings
import smartprune.cli
from smartprune.cli.common import add_command
def add_warns(subparsers):
    add_command(subparsers, "warns", "warn", "").set_defaults(run=lambda args: warnings.warn("one line") or 0)
smartprune.cli.COMMANDS = (add_warns,)
code = smartprune.cli.main(["warns"])
warnings.warn("as usual")
sys.exit(code)
"""


def test_warnings_of_commands_are_one_line() -> None:
    process = subprocess.run([sys.executable, "-c", WARNS], env=environment(), capture_output=True, text=True, check=False)
    assert process.returncode == 0
    first, second = process.stderr.splitlines()[:2]
    assert first == "smartprune: warning: one line"
    assert second.endswith("UserWarning: as usual")


def help_of(command_name: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run_cli(command_name, "--help") == 0
    return " ".join(capsys.readouterr().out.split())


def test_help_of_train_groups_the_flags_and_shows_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("train", capsys)
    positions = [text.index(f" {heading}: --") for heading in ("budget", "layers", "schedule", "data", "devices", "output")]
    assert positions == sorted(positions)
    assert text.index(" common: -h, --help") < positions[0]
    for heading in settings.FIRST_OF_GROUP.values():
        assert f" {heading}: -" in text
    assert "--method NAME pruning method (default: smart)" in text
    assert "--lr X learning rate of the dense stage (default: by task)" in text


@pytest.mark.parametrize("add", COMMANDS, ids=lambda add: add.__name__.removeprefix("add_"))
def test_help_states_every_default_and_has_no_group_of_leftovers(
    add: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    subparsers = Parser(prog="smartprune").add_subparsers()
    add(subparsers)
    (parser,) = subparsers.choices.values()
    for action in parser._actions:
        if action.option_strings and action.default not in (None, False, [], argparse.SUPPRESS):
            assert "(default: " in str(action.help), action.option_strings
    text = parser.format_help()
    assert "\noptions:" not in text
    assert "\ncommon:\n  -h, --help" in text
    if "--json" in text:
        assert "--json" in text.partition("\noutput:")[2]
    if "--data " in text:
        assert "--data " in text.partition("\ndata:")[2].partition("\n\n")[0]


def test_settings_of_a_task_are_printed_as_a_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_cli("train", "cifar10", "--sparsity", "0.97", "--data", tmp_path, "--settings") == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["model"], values["block"], values["sparsity"]) == ("resnet18", "16x8", 0.97)
    assert configure(values).sparsity == 0.97


def test_the_command_line_starts_with_few_imports() -> None:
    """The time to start follows from the modules that are loaded: no package of others, and not many of our own."""
    code = "import sys; before = set(sys.modules); import smartprune.cli; print(*(set(sys.modules) - before))"
    loaded = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    ).stdout.split()
    assert {name.partition(".")[0] for name in loaded} - set(sys.stdlib_module_names) == {"smartprune"}
    assert len(loaded) < 150
