"""Receipts: their counts, files, and the checks of what they read."""

import copy
import json
import os
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import zoo
from helpers.pruned_models import pruned_weights, random_mask
from smartprune.artifacts.receipt import Receipt
from smartprune.core.budget import Budget, macs, params
from smartprune.errors import SmartpruneError
from smartprune.files import parse_json, read_limited, write_atomic
from smartprune.pruning.plan import plan
from smartprune.pruning.receipt import make_receipt


def make_example(name: str = "plain_cnn", budget: Budget | None = None, floor: float | None = 0.02) -> Receipt:
    model, x = zoo.SMALL[name]()
    pruning_plan = plan(model, (4, 4), None if budget else 0.75, budget, floor=floor, include="*", example=x)
    mask = random_mask(pruning_plan, pruning_plan.keep or 5)
    return make_receipt(
        pruning_plan, pruned_weights(pruning_plan, model, mask), mask, "smart", {"tau": 0.1, "ramp": (0, 1), "cool": "geometric"}
    )


def test_an_unmet_budget_is_printed() -> None:
    model, _ = zoo.plain_cnn()
    pruning_plan = plan(model, (4, 4), 0.5)
    mask = random_mask(pruning_plan, 99)
    receipt = make_receipt(pruning_plan, pruned_weights(pruning_plan, model, mask), mask, "magnitude")
    assert not receipt.met
    assert "kept     99 blocks, budget NOT met" in str(receipt)
    assert Receipt.from_json(receipt.to_json()) == receipt


def test_receipts_of_every_budget_are_met_and_restored() -> None:
    for budget in (params(0.6), macs(0.6, zoo.plain_cnn()[1]), macs(0.2, zoo.plain_cnn()[1], of="model")):
        receipt = make_example(budget=budget, floor=None)
        assert receipt.requested is not None
        assert receipt.requested.kind == budget.kind
        assert receipt.requested.used <= receipt.requested.limit
        assert receipt.met
        assert "at most" in str(receipt)
        assert Receipt.from_json(receipt.to_json()) == receipt
    model, _ = zoo.plain_cnn()
    pruning_plan = plan(model, (4, 4))
    receipt = make_receipt(pruning_plan, dict(model.named_parameters()), torch.ones(pruning_plan.n), "none")
    assert receipt.requested is None
    assert receipt.macs is None
    assert receipt.met
    assert receipt.sparsity == 0
    assert Receipt.from_json(receipt.to_json()) == receipt


@pytest.mark.parametrize("name", sorted(zoo.SMALL))
def test_a_saved_receipt_is_restored(name: str, tmp_path: Path) -> None:
    receipt = make_example(name)
    path = tmp_path / "receipt.json"
    receipt.save(path)
    receipt.save(path)
    assert Receipt.load(path) == receipt
    assert os.listdir(tmp_path) == ["receipt.json"]
    data = json.loads(path.read_text())
    assert data["asked"]["share"] == "3/4"
    assert data["asked"]["value"] == 0.75
    assert data["floor"] == {"share": "1/50", "value": 0.02}
    assert data["settings"] == {"tau": 0.1, "ramp": [0, 1], "cool": "geometric"}
    assert receipt.floor == Fraction(1, 50)
    assert max(map(len, str(receipt).splitlines())) <= 80


def test_a_failed_save_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "receipt.json"
    write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(SmartpruneError, match=r"receipt.json: cannot be written \(No space left on device\)"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["receipt.json"]
    with pytest.raises(SmartpruneError, match="cannot be written"):
        write_atomic(tmp_path / "no" / "such", b"")


def test_unreadable_files_raise(tmp_path: Path) -> None:
    path = tmp_path / "receipt.json"
    with pytest.raises(SmartpruneError, match=r"receipt.json: cannot be read \(No such file"):
        Receipt.load(path)
    with pytest.raises(SmartpruneError, match="cannot be read"):
        Receipt.load(tmp_path)
    path.write_bytes(b"x" * 11)
    with pytest.raises(SmartpruneError, match="larger than 10 bytes"):
        read_limited(path, 10)
    deep = b"[" * 100_000
    for data in (
        b"",
        b"{",
        b"\xff\xfe\x00",
        b'{"a": 1, "a": 2}',
        b"[NaN]",
        b"[Infinity]",
        b'"\xff"',
        deep,
        b"9" * 5000,
    ):
        path.write_bytes(data)
        with pytest.raises(SmartpruneError, match=r"receipt.json"):
            Receipt.load(path)
    assert parse_json(b'{"a": [1, null]}', "x") == {"a": [1, None]}


Change = Callable[[dict[str, Any]], object]
WRONG_DATA: list[tuple[Change, str]] = [
    (lambda d: d.update(format=2), "format is 2; it must be 1; a newer smartprune may read it"),
    (lambda d: d.update(format=True), "format"),
    (lambda d: d.pop("format"), "format is missing"),
    (lambda d: d.update(extra=1), "unknown key 'extra'"),
    (lambda d: d.update(not_pruned=3), "not_pruned is 3; it must be a list"),
    (lambda d: d.update(not_pruned=[3]), r"not_pruned\[0\] is 3; it must be a dictionary"),
    (lambda d: d.update(not_pruned=[{"name": "fc"}]), r"not_pruned\[0\]: reason is missing"),
    (lambda d: d.update(not_pruned=[{"name": "\x1b", "reason": ""}]), r"not_pruned\[0\]: name .* printable"),
    (lambda d: d.update(not_pruned=[{"name": "a", "reason": "b", "c": 1}]), r"not_pruned\[0\]: unknown key 'c'"),
    (lambda d: d.update(block="16xx8"), "cannot be read"),
    (lambda d: d.update(block="4x5x1x1"), "does not|follows from shape and block"),
    (lambda d: d.update(block=4), "block is 4"),
    (lambda d: d.update(method=None), "method is None; it must be a string"),
    (lambda d: d.update(method="\x1b[2J"), "printable"),
    (lambda d: d.update(settings=[1]), "settings must be a dictionary"),
    (lambda d: d.update(settings={"x": float("inf")}), "settings.x is inf; it must be plain data"),
    (lambda d: d.update(mask_hash="md5:0"), "mask_hash is 'md5:0'; it must be 'sha256:' and 64"),
    (lambda d: d.update(mask_hash="sha256:" + "0" * 64), "mask_hash is not the hash of the maps"),
    (lambda d: d.update(floor={"share": "2/1", "value": 2.0}), r"floor: share is '2/1'; it must be an exact share"),
    (lambda d: d.update(floor={"share": "1/0", "value": 0.0}), "floor: share"),
    (lambda d: d.update(floor={"share": "1/50", "value": 0.5}), "floor does not agree"),
    (lambda d: d["asked"].update(limit=3), "limit is 3; it must be"),
    (lambda d: d["asked"].update(total=3), "asked does not add up"),
    (lambda d: d["asked"].update(value=0.5), "value is 0.5; it must be 0.75"),
    (lambda d: d["asked"].update(kind="BLOCKS"), "kind is 'BLOCKS'"),
    (lambda d: d["asked"].update(of="half"), "of is 'half'"),
    (lambda d: d["achieved"].update(used=1), "does not add up"),
    (lambda d: d["achieved"].update(met=1), "achieved does not agree"),
    (lambda d: d["achieved"].update(met=False), "achieved does not agree"),
    (lambda d: d["achieved"].update(kept_but_zero=5), "achieved does not agree"),
    (lambda d: d["achieved"]["blocks"].update(kept=1), "achieved does not agree"),
    (lambda d: d["achieved"]["model_weights"].update(removed=1), "removed is 1; it must be an integer from"),
    (
        lambda d: d["achieved"].update(model_weights={"total": 1, "kept": 1, "removed": 0}),
        "model_weights does not agree",
    ),
    (lambda d: d.update(achieved=[]), "achieved is a list of 0; it must be a dictionary"),
    (lambda d: d.update(layers=[]), "at least one layer"),
    (lambda d: d.update(layers={}), "layers is a dict of 0; it must be a list"),
    (lambda d: d["layers"].append(d["layers"][0]), "no weight twice"),
    (lambda d: d["layers"].append(3), r"layers\[4\] is 3; it must be a dictionary"),
    (lambda d: d["layers"][1].update(shape=[10**9, 10**9, 10**9]), r"layers\[1\]: shape"),
    (lambda d: d["layers"][1].update(shape=[20]), r"layers\[1\]: shape"),
    (lambda d: d["layers"][1].update(shape=[20, 0, 3, 3]), r"layers\[1\]: shape"),
    (lambda d: d["layers"][1].update(shape=[10**6, 10**6]), r"layers\[1\]: grid"),
    (lambda d: d["layers"][1].update(shape=[10**6] * 2, grid=[250_000] * 2), r"layers\[1\]: "),
    (lambda d: d["layers"][1].update(parts=3), "cannot be divided into 3 groups"),
    (lambda d: d["layers"][1].update(parts=0), "parts is 0"),
    (lambda d: d["layers"][1].update(transposed=0), "transposed is 0; it must be true or false"),
    (lambda d: d["layers"][1].update(map="AA=="), "map cannot be read: it has 1 bytes, and 180 blocks take 23"),
    (lambda d: d["layers"][1].update(map="A" * 10**6), "map is 'AAA"),
    (lambda d: d["layers"][1]["blocks"].update(kept=-1), "kept is -1"),
    (lambda d: d["layers"][1]["blocks"].update(occupied=999), "does not add up"),
    (lambda d: d["layers"][1]["blocks"].update(occupied=1.0), "occupied is 1.0"),
    (lambda d: d["layers"][1]["weights"].update(kept=1), "weights does not add up"),
    (lambda d: d["layers"][1].update(macs=None), "achieved does not agree"),
    (lambda d: d["layers"][1].update(name="x" * 2000), "at most 1000 printable characters"),
]


@pytest.mark.parametrize(("change", "message"), WRONG_DATA)
def test_wrong_data_is_named(change: Change, message: str) -> None:
    data = json.loads(json.dumps(make_example().to_json()))
    change(data)
    with pytest.raises(SmartpruneError, match=message):
        Receipt.from_json(data)


def test_data_other_than_dictionaries_raises() -> None:
    for data in (None, 3, "receipt", [], True):
        with pytest.raises(SmartpruneError, match="it must be a dictionary"):
            Receipt.from_json(data)


def mutate(data: Any, rng: random.Random) -> None:
    """Replaces, removes or repeats one value at a random place in nested plain data."""
    values = [None, True, -1, 0, 1, 2**70, 0.5, 1e308, "", "x", "9" * 50, [], {}, [[]], {"a": 1}]
    while True:
        keys = list(data) if isinstance(data, dict) else list(range(len(data)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(data[key], (dict, list)) and data[key] and rng.random() < 0.8:
            data = data[key]
            continue
        kind = rng.random()
        if kind < 0.7:
            data[key] = rng.choice(values)
        elif kind < 0.85:
            del data[key]
        elif isinstance(data, list):
            data.append(copy.deepcopy(data[key]))
        else:
            data[rng.choice(["kept", "total", "x"])] = data[key]
        return


def test_fuzzed_data_is_read_unchanged_or_refused() -> None:
    rng = random.Random(0)
    good = json.loads(json.dumps(make_example().to_json()))
    refused = 0
    for _ in range(600):
        data = copy.deepcopy(good)
        for _ in range(rng.choice((1, 1, 2))):
            mutate(data, rng)
        try:
            receipt = Receipt.from_json(data)
        except SmartpruneError:
            refused += 1
        else:
            assert json.dumps(receipt.to_json(), sort_keys=True) == json.dumps(data, sort_keys=True)
            str(receipt)
    assert refused > 450


def test_fuzzed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    rng = random.Random(0)
    path = tmp_path / "receipt.json"
    make_example().save(path)
    good = path.read_bytes()
    for _ in range(200):
        data = bytearray(good)
        for _ in range(rng.choice((1, 2, 5))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.3:
            del data[rng.randrange(len(data)) :]
        path.write_bytes(data)
        try:
            text = str(Receipt.load(path))
        except SmartpruneError as error:
            text = str(error)
        assert text
