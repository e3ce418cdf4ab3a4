"""The table of instruction sets: all supported rows compute the right numbers, and a new set is one row."""

from __future__ import annotations

import platform

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.pruned_models import assert_equal_to_rounding, randomly_pruned
from smartprune.runtime.cpu import build, instruction_sets
from smartprune.runtime.cpu.instruction_sets import INSTRUCTION_SETS, InstructionSet


def names() -> list[str]:
    try:
        return list(build.supported_sets())
    except sp.SmartpruneError:  # no compiler
        return []


@torch.no_grad()
def check_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_ISA", name)
    model = randomly_pruned(
        nn.Sequential(nn.Conv2d(20, 40, 3, padding=1), nn.SiLU(), nn.Conv2d(40, 24, 3, 2), nn.ReLU()), 0.5, (8, 4)
    )
    fast = sp.accelerate(model, threads=1)
    assert f" {name}," in repr(fast)
    for batch, width in ((1, 21), (3, 8)):
        x = torch.randn(batch, 20, 9, width)
        assert_equal_to_rounding(fast(x), model(x))


def test_float16_uses_the_best_set_that_multiplies_it() -> None:
    rows = {row.name: row for row in INSTRUCTION_SETS}
    for names, float16, others in (
        (["portable", "neon", "neon_fp16", "neon_dot", "neon_i8mm"], "neon_fp16", "neon_i8mm"),
        (["portable", "neon"], "neon", "neon"),
        (["portable", "avx2", "avx512"], "avx512", "avx512"),
    ):
        supported = {name: rows[name] for name in names}
        assert build.best_set(supported, "float16") == float16
        assert build.best_set(supported, "float32") == build.best_set(supported, "int8") == others


@pytest.mark.parametrize("name", names())
def test_every_supported_set_agrees_with_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_results(name, monkeypatch)


def test_a_new_set_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = InstructionSet("tiny", platform.machine(), ("-O1",), "1", lanes=(8,), pixels=1)
    impossible = InstructionSet("impossible", platform.machine(), (), "0", lanes=(8,), pixels=6)
    elsewhere = InstructionSet("elsewhere", "another-machine", (), "no C expression", lanes=(8,), pixels=6)
    rows = (*INSTRUCTION_SETS, row, impossible, elsewhere)
    for module in (instruction_sets, build):
        monkeypatch.setattr(module, "INSTRUCTION_SETS", rows)
    build.supported_sets.cache_clear()
    try:
        assert next(reversed(build.supported_sets())) == "tiny"
        check_results("tiny", monkeypatch)
    finally:
        build.supported_sets.cache_clear()


def test_unknown_or_unsupported_set_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SMARTPRUNE_ISA", "sse9")
    with pytest.raises(sp.SmartpruneError, match=r"'sse9' is not one of portable, avx2"):
        sp.accelerate(nn.Conv2d(3, 3, 1))
    monkeypatch.setenv("SMARTPRUNE_ISA", "avx2")
    monkeypatch.setattr(build, "supported_sets", lambda: {"portable": INSTRUCTION_SETS[0]})
    with pytest.raises(sp.SmartpruneError, match="not supported by this machine, which has portable;"):
        sp.accelerate(nn.Conv2d(3, 3, 1))
