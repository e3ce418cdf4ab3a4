"""The command line: verbs, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import smartprune
from helpers.training_jobs import SMALL_FLAGS, assert_same_run, command, environment, run_cli, run_in_subprocess
from smartprune import NPU
from smartprune.cli import COMMANDS
from smartprune.experiments.compare.identity import protocol
from smartprune.training.page import run_cycles


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which one run was made, by a process of its own."""
    folder = tmp_path_factory.mktemp("work")
    done = run_in_subprocess("train", *SMALL_FLAGS, "--out", "runs/a", folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "stdout.txt").write_text(done.stdout)
    (folder / "stderr.txt").write_text(done.stderr)
    return folder


@pytest.fixture(autouse=True)
def _inside(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)


def test_results_on_stdout_progress_on_stderr(work: Path) -> None:
    output, errors = (work / "stdout.txt").read_text(), (work / "stderr.txt").read_text()
    for word in ("kept/blocks", "remove 50% of the blocks", "kept     ", "dense    accuracy", "pruned   accuracy"):
        assert word in output
    assert "folder   runs/a" in output
    assert "loss" not in output
    for stage in ("dense", "search", "finetune"):
        assert f"\n{stage}" in "\n" + errors
    assert "\x1b" not in errors


@pytest.mark.parametrize(
    "verb", ["train", "plan", "report", "verify", "eval", "pack", "unpack", "export", "bench", "compare", "sweep", "watch"]
)
def test_help_has_an_example(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(verb, "--help") == 0
    assert f"example:\n  smartprune {verb}" in capsys.readouterr().out


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--help") == 0
    text = capsys.readouterr().out
    assert all(add.__name__.removeprefix("add_") in text for add in COMMANDS)
    assert "Exit codes: 0 success, 1 failed or stopped, 2 wrong arguments" in text


def test_default_folder_is_numbered(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [*SMALL_FLAGS, "--dense", "runs/a/dense.safetensors", "--search-epochs", "1"]
    assert run_cli("train", *short) == 0
    assert run_cli("train", *short) == 0
    assert (work / "runs/digits-smart-4x2-0.5-s0/result.json").exists()
    assert (work / "runs/digits-smart-4x2-0.5-s0-2/result.json").exists()
    capsys.readouterr()
    assert run_cli("train", *short, "--resume") == 0
    captured = capsys.readouterr()
    assert "the run in runs/digits-smart-4x2-0.5-s0-2 is already finished" in captured.err
    assert "folder   runs/digits-smart-4x2-0.5-s0-2" in captured.out


def test_config_repeats_the_run(work: Path) -> None:
    assert run_cli("train", "--config", "runs/a/config.json", "--out", "runs/again") == 0
    assert_same_run(work / "runs/a", work / "runs/again")


def test_flags_win_over_config_and_settings_follow_the_method(work: Path) -> None:
    flags = [
        "--method",
        "magnitude",
        "--sparsity",
        "0.75",
        "--search-epochs",
        "1",
        "--dense",
        "runs/a/dense.safetensors",
    ]
    assert run_cli("train", "--config", "runs/a/config.json", *flags, "--out", "runs/m") == 0
    config = json.loads((work / "runs/m/config.json").read_text())
    assert (config["method"], config["sparsity"], config["block"]) == ("magnitude", 0.75, "4x2")
    assert Path(config["dense"]).is_absolute()
    assert run_cli("train", "--config", "runs/a/config.json", *flags[4:], "--macs", "0.5", "--out", "runs/n") == 0
    config = json.loads((work / "runs/n/config.json").read_text())
    assert (config["sparsity"], config["macs"]) == (None, 0.5)


def test_a_file_of_an_npu_is_found_from_another_folder(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "own.json").write_text(json.dumps(NPU.small().to_json()))
    short = [
        *SMALL_FLAGS[: SMALL_FLAGS.index("--sparsity")],
        "--dense",
        "runs/a/dense.safetensors",
        "--search-epochs",
        "1",
        "--onnx",
        "off",
    ]
    assert run_cli("train", *short, "--cycles", "0.3", "--npu", "own.json", "--out", "runs/npu") == 0
    config = json.loads((work / "runs/npu/config.json").read_text())
    assert Path(config["npu"]) == work / "own.json"
    assert protocol(config) == protocol({**config, "npu": "own.json"})  # a comparison has its name alone
    monkeypatch.chdir(work / "runs")
    assert run_cycles("npu") is not None


def test_set_fills_the_method(work: Path) -> None:
    short = [*SMALL_FLAGS, "--dense", "runs/a/dense.safetensors", "--search-epochs", "1", "--out", "runs/set"]
    assert run_cli("train", *short, "--set", "start=2", "--set", "ramp=cubic", "--set", "clip=none") == 0
    settings = json.loads((work / "runs/set/config.json").read_text())["settings"]
    assert (settings["start"], settings["ramp"], settings["clip"]) == (2, "cubic", None)


def test_the_same_command_resumes_where_the_machine_decided(capsys: pytest.CaptureFixture[str]) -> None:
    """What was left to the machine, by auto or by 0 threads, is decided in config.json."""
    words = ["train", *SMALL_FLAGS, "--device", "auto", "--threads", "0", "--resume", "--out", "runs/a"]
    assert run_cli(*words) == 0
    assert "is already finished" in capsys.readouterr().err
    assert run_cli(*words, "--threads", "77") == 2


def test_json_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("train", "--resume", "--out", "runs/a", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verified"] is True
    assert data["receipt"]["achieved"]["met"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["train", "--sparsity", "93"],
            "sparsity=93.0 is outside [0, 1): it is the share to remove; write sparsity=0.93",
        ),
        (["train", "--sparsity", "many"], "argument --sparsity: invalid float value: 'many'"),
        (["train", "--sparsity", "0.5", "--macs", "0.5"], "set exactly one of them"),
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
        (["plan", "nowhere:build"], "nowhere:build: cannot be imported"),
        (["plan", "builtins:len"], "builtins:len() failed with TypeError"),
        (["plan", "resnet18", "--macs", "0.5"], "--macs needs the shape of one sample"),
        (["plan", "resnet18", "--input", "3x"], "--input 3x cannot be read"),
        (["plan", "resnet18", "--input", "5x32x32"], "to have 3 channels, but got 5 channels instead"),
        (["plan", "resnet18", "--sparsity", "1"], "sparsity=1.0 is outside [0, 1)"),
        (["report", "runs/a", "--block", "4"], "must have at least two sizes"),
        (["report", "runs/a", "--map", "conv9"], "there is no layer 'conv9'"),
        (["verify", "runs/a", "--block", "4y2"], "block='4y2' cannot be read"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", *SMALL_FLAGS, "--out", "runs/a"], "runs/a already holds a run; continue it with"),
        (["train", "--resume", "--out", "runs/none"], "runs/none holds no run to resume; start one without --resume"),
        (["report", "nowhere.safetensors"], "nowhere.safetensors: no such file"),
        (["verify", "runs"], "runs: a run folder holds model.safetensors"),
    ],
)
def test_failures_exit_1_with_just_the_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(*arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("smartprune: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "resnet18", "--block", "16x8", "--sparsity", "0.95", "--input", "3x32x32") == 0
    assert "87,168 in 19 layers" in capsys.readouterr().out
    assert run_cli("plan", "digits", "--sparsity", "0.9", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["block"], data["feasible"]) == ("8x4x1x1", True)
    assert data["macs"] is not None


def test_plan_of_your_own_model(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "ownnet.py").write_text(
        "from torch import nn\n"
        "def build():\n    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))\n"
        "def wrong():\n    return 3\n"
    )
    assert run_cli("plan", "ownnet:build", "--params", "0.5") == 0
    assert "8 in 1 layer" in capsys.readouterr().out
    assert run_cli("plan", "ownnet:wrong") == 2
    assert "ownnet:wrong() returned a int; it must return a torch.nn.Module" in capsys.readouterr().err


def test_plan_that_cannot_be_met_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("plan", "digits", "--sparsity", "0.95", "--floor", "0.5") == 1
    assert "problem  floor=0.5 needs" in capsys.readouterr().out


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("report", "runs/a") == 0
    assert "blocks of 4x2" in capsys.readouterr().out
    assert run_cli("report", "runs/a/model.safetensors", "--block", "4x2", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    receipt = json.loads(Path("runs/a/receipt.json").read_text())
    assert data["blocks"]["removed"] == receipt["achieved"]["blocks"]["removed"]
    assert run_cli("report", "runs/a", "--map", "stages.0.0.conv1") == 0
    assert "stages.0.0.conv1:" in capsys.readouterr().out
    for more in (["--json"], ["--npu", "edge"]):
        assert run_cli("report", "runs/a", "--map", "stages.0.0.conv1", *more) == 2
        assert f"remove {more[0]}" in capsys.readouterr().err


def test_verify(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("verify", "runs/a") == 0
    assert "ok: matches the receipt" in capsys.readouterr().out
    assert run_cli("verify", "runs/a/model.safetensors", "--receipt", "runs/a/receipt.json", "--json") == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    assert run_cli("verify", "runs/a", "--block", "8x4") == 1
    capsys.readouterr()
    tensors = load_file(work / "runs/a/model.safetensors")
    tensors["stages.2.0.conv2.weight"] += 1e-30
    save_file(tensors, work / "changed.safetensors")
    assert run_cli("verify", "changed.safetensors", "--receipt", "runs/a/receipt.json") == 1
    assert "NOT ok" in capsys.readouterr().out


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from smartprune.cli import main\n"
        "try: main(['train', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: smartprune train" in done.stdout


def test_a_closed_pipe_is_quiet(work: Path) -> None:
    process = subprocess.Popen(
        command("plan", "resnet8"),
        cwd=work,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(60) == 1
    process.stderr.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize("arguments", [("plan", "resnet8"), ("report", "runs/a", "--json")])
def test_output_to_a_full_disk_is_one_message(arguments: tuple[str, ...], work: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(command(*arguments), cwd=work, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("smartprune: ")
    assert "cannot be written or read (No space left on device)" in done.stderr
    assert done.stderr.count("\n") == 1


FAILS = """
import sys
import smartprune.cli
def verb(verbs):
    def run(args):
        print("a result")
        raise OSError({error})
    verbs.add_parser("fails").set_defaults(run=run)
smartprune.cli.COMMANDS = (verb,)
sys.exit(smartprune.cli.main(["fails"]))
"""


def test_what_was_printed_before_a_file_failed_is_not_lost() -> None:
    script = FAILS.format(error="2, 'No such file', 'x'")
    env = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "a result\n")
    assert done.stderr == "smartprune: x cannot be written or read (No such file); fix that and try again\n"


def test_an_error_of_a_library_is_not_said_to_be_one_of_the_output() -> None:
    script = FAILS.format(error="'cannot write mode F as PNG'")
    done = subprocess.run([sys.executable, "-c", script], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == "a result\n"
    assert done.stderr.endswith("OSError: cannot write mode F as PNG\n")


def test_paths_that_cannot_be_written_are_bad_arguments(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (work / "file").write_bytes(b"")
    before = sorted(work.rglob("*"))
    run_file = "runs/a/config.json"
    for words, message in (
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
        assert run_cli(*words) == 2, words
        assert message in capsys.readouterr().err, words
    assert sorted(work.rglob("*")) == before


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("--version") == 0
    assert capsys.readouterr().out == f"smartprune {smartprune.__version__}\n"
