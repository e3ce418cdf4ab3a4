"""C export: the file computes what the model and the accelerated model compute, and says what it needs."""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import smartprune as sp
from helpers.exported_c import SANITIZE, STRICT, Written, needs_compiler, relative_errors
from helpers.operations import Mixed
from helpers.pruned_models import assert_equal_to_rounding, model_and_receipt, randomly_pruned
from smartprune.models import MODELS
from smartprune.runtime.c_source.check import FLAGS
from smartprune.runtime.cpu import build

X = torch.randn(1, 3, 20, 21, generator=torch.Generator().manual_seed(1))


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return randomly_pruned(Mixed(), 0.5, (8, 4))


def best_set() -> str:
    return next(reversed(build.supported_sets()))


@needs_compiler
@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize("name", ["mixed", "resnet18", "mobilenetv2"])
def test_results_are_those_of_the_accelerated_model_bit_for_bit(name: str, dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixed() if name == "mixed" else randomly_pruned(MODELS[name](), 0.9)
    x = X if name == "mixed" else torch.randn(1, 3, 32, 32)
    fast = sp.accelerate(model, example=x, dtype=dtype, threads=1, backend="native" if dtype == "float32" else "auto")
    (output,) = Written(model, [x], tmp_path, best_set(), dtype == "int8", dtype == "float16").run()
    assert torch.equal(output, fast(x))


@needs_compiler
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-5), ("float16", 2e-3), ("int8", 0.03)])
def test_the_portable_file_is_strict_c_without_undefined_behaviour(dtype: str, error: float, tmp_path: Path) -> None:
    written = Written(mixed(), [X], tmp_path, "portable", dtype == "int8", dtype == "float16")
    outputs = written.run("gcc", (*STRICT, "-Wno-psabi", "-O1", *SANITIZE))
    assert max(relative_errors(outputs, written.expected)) < error


@needs_compiler
def test_words_of_four_pixels_stay_within_the_memory(tmp_path: Path) -> None:
    """The last window of a depthwise convolution is read in words, which extend beyond the map."""
    torch.manual_seed(0)
    layer, x = nn.Conv2d(16, 16, 7, padding=3, groups=16).eval(), torch.randn(1, 16, 5, 7)
    written = Written(layer, [x], tmp_path, best_set(), int8=True)
    outputs = written.run("gcc", ("-O1", *SANITIZE))
    assert max(relative_errors(outputs, written.expected)) < 0.03


@needs_compiler
def test_the_sanitizer_sees_the_memory_of_the_network(tmp_path: Path) -> None:
    """The test above can fail: a network whose memory is too small does not run."""
    written = Written(mixed(), [X], tmp_path, "portable")
    size = f"static char arena[{written.network.memory}]"
    assert size in written.source
    (tmp_path / "net.c").write_text(written.source.replace(size, f"static char arena[{written.network.memory // 2}]"))
    with pytest.raises(AssertionError, match="AddressSanitizer: global-buffer-overflow"):
        written.run("gcc", (*STRICT, "-Wno-psabi", "-O1", *SANITIZE))


@needs_compiler
def test_the_object_needs_only_functions_of_mathematics_and_memory(tmp_path: Path) -> None:
    """No heap, no threads and no files; nothing but its function is visible, so two networks can be linked together."""
    Written(mixed(), [X], tmp_path, "portable", int8=True)
    command = ["gcc", *FLAGS, *STRICT, "-c", "net.c", "-o", "net.o"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    symbols = subprocess.run(["nm", "net.o"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r" U (\w+)", symbols)) <= {"memcpy", "memset", "erff", "_GLOBAL_OFFSET_TABLE_", "__stack_chk_fail"}
    assert re.findall(r" [A-TV-Z] (\w+)", symbols) == ["net_run"]


def load(path: Path, folder: Path) -> ctypes.CDLL:
    library = folder / "exported.so"
    subprocess.run(["gcc", *FLAGS, "-fPIC", "-shared", str(path), "-o", str(library), "-lm"], check=True)
    return ctypes.CDLL(str(library))


@needs_compiler
def test_export_c(tmp_path: Path) -> None:
    model, receipt = model_and_receipt("plain_cnn")
    model.eval()
    x = torch.randn(2, 3, 8, 8)
    exported = sp.export_c(model, tmp_path / "net.c", x, receipt=receipt)
    assert exported.compared == exported.target == "portable"
    assert exported.difference <= 1e-5 * exported.scale
    assert exported.size == len((tmp_path / "net.c").read_text())
    assert receipt.mask_hash in (tmp_path / "net.c").read_text()
    header = (tmp_path / "net.h").read_text()
    assert f"{exported.function};" in header
    assert f"#define NET_INPUT_SIZE {x.numel()} " in header
    assert exported.to_json()["memory"] == exported.memory
    assert "compile with: cc -O2" in str(exported)
    output = torch.empty(*model(x).shape)
    function = load(tmp_path / "net.c", tmp_path).net_run
    assert function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(output.data_ptr())) == 0
    assert_equal_to_rounding(output, model(x))
    assert function(None, ctypes.c_void_p(output.data_ptr())) == -1


@needs_compiler
def test_int8_is_measured_on_the_calibration(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = mixed()
    exported = sp.export_c(
        model, tmp_path / "net.c", X, int8=True, calibration=[torch.randn(4, 3, 20, 21), torch.randn(1, 3, 20, 21)]
    )
    assert exported.inputs == 5
    assert exported.int8_error is not None
    assert 0 < exported.int8_error < 0.03
    assert "int8: differ from float by" in str(exported)


@needs_compiler
def test_float16_is_compared_with_the_model(tmp_path: Path) -> None:
    """For a target that this machine lacks, with kernels that convert. Rounding is larger than that of float32."""
    target = "neon_fp16" if "neon_fp16" not in build.supported_sets() else "avx2"
    exported = sp.export_c(mixed(), tmp_path / "net.c", X, target=target, fp16=True)
    assert (exported.target, exported.compared, exported.int8_error) == (target, "portable", None)
    assert 1e-5 * exported.scale < exported.difference < 1e-2 * exported.scale
    text = (tmp_path / "net.c").read_text()
    assert text.startswith(f"/* net: a network in float16 for {target}, ")
    assert "static const uint16_t data" in text
    with pytest.raises(sp.SmartpruneError, match="the graph's outputs differ from the model's by"):
        sp.export_c(mixed(), tmp_path / "net.c", X, fp16=True, tolerance=1e-5)


@needs_compiler
def test_float16_of_large_activations(tmp_path: Path) -> None:
    """They are beyond the range of float16, and scaled."""
    model = mixed()
    exported = sp.export_c(model, tmp_path / "net.c", 1e8 * X, fp16=True)
    assert exported.scale > 1e6
    assert exported.difference < 1e-2 * exported.scale


@needs_compiler
def test_a_target_of_another_machine_is_compared_with_portable_kernels(tmp_path: Path) -> None:
    target = "neon" if "neon" not in build.supported_sets() else "avx2"
    exported = sp.export_c(mixed(), tmp_path / "net.c", X, target=target)
    assert (exported.target, exported.compared) == (target, "portable")
    assert f"this machine lacks {target}" in str(exported)
    done = subprocess.run(["gcc", "-c", "net.c"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode
    assert f"compile this file for {target}" in done.stderr


def test_without_a_compiler_the_file_is_written_and_not_compared(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    exported = sp.export_c(mixed(), tmp_path / "net.c", X)
    assert exported.compared is None
    assert "not compared with the model: there is no C compiler" in str(exported)
    assert (tmp_path / "net.c").exists()


class Sorted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sort(1)[0]


class Unchanged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


def test_errors_name_what_is_wrong(tmp_path: Path) -> None:
    model, x = nn.Conv2d(3, 4, 1), torch.randn(1, 3, 4, 4)
    good = tmp_path / "net.c"
    for arguments, settings, message in (
        ((nn.Conv2d(3, 4, 1).weight, good, x), {}, "model is a Parameter"),
        ((model, tmp_path / "net.cpp", x), {}, r"must be a C name that ends in \.c"),
        ((model, tmp_path / "my-net.c", x), {}, "must be a C name"),
        ((model, good, x), {"target": "z80"}, "target='z80' is not one of portable, avx2"),
        ((model, good, x), {"int8": True}, "int8 needs calibration="),
        ((model, good, x), {"calibration": [x]}, "calibration= is for int8=True"),
        ((model, good, x), {"int8": True, "fp16": True, "calibration": [x]}, "int8=True and fp16=True exclude each other"),
        ((model, good, x), {"fp16": True, "calibration": [x]}, "calibration= is for int8=True"),
        ((model, good, torch.inf * x), {"fp16": True}, "not finite for the example, and float16 needs finite ones"),
        ((model, good, x), {"receipt": 3}, "receipt is a int"),
        ((model, good, x.double()), {}, r"float64|Double|dtype"),
        ((Sorted(), good, x), {}, "the kernels do not have these operations: sort"),
        ((Unchanged(), good, x), {}, "returns input1, which no operation computes"),
    ):
        with pytest.raises(sp.SmartpruneError, match=message):
            sp.export_c(*arguments, **settings)
    assert not list(tmp_path.iterdir())


def test_without_a_compiler_kernels_of_a_wheel_do_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe of a wheel, or one that was compiled before, says which instruction sets there are."""
    monkeypatch.setattr(build, "supported_sets", lambda: {row.name: row for row in build.INSTRUCTION_SETS})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert sp.export_c(nn.Conv2d(3, 4, 1), tmp_path / "net.c", torch.randn(1, 3, 4, 4)).compared is None
    assert (tmp_path / "net.c").exists()


@pytest.mark.parametrize(
    ("setting", "message"), [("no-such-compiler", "CC=no-such-compiler is not a program"), ("false", "failed")]
)
def test_a_wrong_compiler_is_an_error_of_the_export(
    setting: str, message: str, tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", setting)
    with pytest.raises(sp.SmartpruneError, match=f"^export_c: .*{message}.*; no file was written$") as caught:
        sp.export_c(nn.Conv2d(3, 4, 1), tmp_path / "net.c", torch.randn(1, 3, 4, 4))
    assert "reference" not in str(caught.value)
    assert not (tmp_path / "net.c").exists()


def test_names_and_tolerances_that_cannot_work_are_errors(tmp_path: Path) -> None:
    model, x = nn.Conv2d(3, 4, 1), torch.randn(1, 3, 4, 4)
    with pytest.raises(sp.SmartpruneError, match=r"math\.h would hide <math\.h> of the system"):
        sp.export_c(model, tmp_path / "math.c", x)
    for tolerance in ("small", -1.0, float("nan"), True):
        with pytest.raises(sp.SmartpruneError, match=r"tolerance=.* is not a number from 0 on"):
            sp.export_c(model, tmp_path / "net.c", x, tolerance=tolerance)
