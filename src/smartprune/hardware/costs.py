"""A budget in costs of your own: a table with a cost for every layer or for every block, such as energy or DMA transfers."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from .. import text
from ..core.budget import ResolvedBudget, as_share
from ..core.hard import as_fraction
from ..core.layers import Layer, plain_name
from ..errors import SmartpruneError
from ..fields import is_valid_name
from ..files import as_path, parse_json, read_limited

Per = Literal["block", "layer"]  # what a single number of the table stands for: the cost of a block, or of a layer

MAX_BYTES = 1 << 28  # of a file
MAX_TOTAL = 2**53  # of all costs together, in units of the resolution
MAX_COST = 1e300
COLUMNS = (["layer", "cost"], ["layer", "block", "cost"])  # of a CSV file
KEYS = ("name", "unit", "per", "costs")  # of a JSON file


@dataclass(frozen=True, eq=False)
class CostTable:
    """Costs by the name of a layer or of its weight: a number, or one for each block. Receipts name the table."""

    costs: Mapping[str, Any] = field(repr=False)
    name: str = "costs"
    unit: str = "units"
    per: Per = "block"
    resolution: Fraction | None = None  # the size of one integer unit; None: as fine as needed

    def __post_init__(self) -> None:
        for key, value in (("name", self.name), ("unit", self.unit)):
            if not isinstance(value, str) or not value or not is_valid_name(value, 40):
                raise SmartpruneError(f"costs: {key}={value!r} must be a text of 1 to 40 printable characters, such as 'energy'")
        if self.per not in get_args(Per):
            raise SmartpruneError(f"costs: per={self.per!r}; it is 'block' (a number is the cost of each block) or 'layer'")
        if not isinstance(self.costs, Mapping) or not self.costs or not all(isinstance(key, str) for key in self.costs):
            raise SmartpruneError(
                "costs: the table must be a dictionary from names of layers to a number or an array of numbers, or a .json or "
                ".csv file"
            )

    def integers(self, layers: Sequence[Layer]) -> tuple[Tensor, Fraction]:
        """The cost of every block in units of the resolution, int64 [n], and the resolution."""
        known = {plain_name(name): (name, value) for name, value in self.costs.items()}
        entries, missing = [], []
        for layer in layers:
            names = [layer.name, layer.weight, *(name for name, _ in layer.sites)]
            entry = next((known[plain_name(name)] for name in names if plain_name(name) in known), None)
            if entry is None:
                missing.append(layer.name)
            else:
                entries.append((layer, *entry))
        if missing:
            raise SmartpruneError(
                f"costs: the table {self.name!r} has no entry for {len(missing)} of {len(layers)} layers to prune: "
                f"{text.some_names(missing)}; add them, or leave these layers out with skip="
            )
        exact = [cost for layer, name, value in entries for cost in self._of_layer(layer, name, value)]
        resolution = _finest(exact) if self.resolution is None else self.resolution
        rounded = {cost: round(cost / resolution) for cost in set(exact)}
        counts = [rounded[cost] for cost in exact]
        if sum(counts) > MAX_TOTAL:
            raise SmartpruneError(
                f"costs: all blocks cost {float(sum(exact)):.3g} {self.unit}, more than 2**53 units of {float(resolution):g}; "
                "give a larger resolution="
            )
        if not any(counts):
            raise SmartpruneError(f"costs: every block costs 0 {self.unit} in the table {self.name!r}; there is nothing to remove")
        return torch.tensor(counts, dtype=torch.int64, device="cpu"), resolution

    def _of_layer(self, layer: Layer, name: str, value: Any) -> list[Fraction]:
        """The cost of every block of one layer."""
        where = f"costs: {text.escape(name)}"
        if not isinstance(value, (Tensor, np.ndarray, list, tuple)):
            cost = _number(value, where)
            if self.per == "block":
                return [cost] * layer.n
            sizes = layer.grid.sizes().tolist()
            return [cost * Fraction(size, layer.params) for size in sizes]
        try:
            array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        except ValueError:
            array = np.empty(0, object)
        if array.dtype.kind not in "iuf" or array.shape not in (layer.grid.shape, (layer.n,)):
            raise SmartpruneError(
                f"{where} is an array of {text.format_shape(array.shape)} {array.dtype}; give numbers in the shape of the grid, "
                f"{text.format_shape(layer.grid.shape)}, or one for each of its {layer.n} blocks"
            )
        return [_number(item, where) for item in array.reshape(-1).tolist()]


def _number(value: Any, where: str) -> Fraction:
    number = isinstance(value, (int, float, Fraction, np.integer, np.floating)) and not isinstance(value, bool)
    if isinstance(value, np.floating):
        value = float(str(value))  # the shortest decimal, so that 0.1 in float32 is a tenth as well
    if not number or not 0 <= value <= MAX_COST:
        raise SmartpruneError(f"{where} costs {str(value)[:40]!r}; a cost must be a number from 0 to {MAX_COST:g}")
    return as_fraction(value)


def _finest(costs: Sequence[Fraction]) -> Fraction:
    """One unit for all costs: the largest power of ten that makes them integers, or the finest that the total allows."""
    total, different = sum(costs) or Fraction(1), set(costs)
    digits = 0
    while 10 ** (digits + 1) * total <= MAX_TOTAL // 2 and any((cost * 10**digits).denominator > 1 for cost in different):
        digits += 1
    unit = Fraction(1, 10**digits)
    while total / unit > MAX_TOTAL // 2:
        unit *= 10
    return unit


@dataclass(frozen=True)
class CostBudget:
    """Made by :func:`costs`."""

    share: Fraction
    table: CostTable = field(repr=False)
    kind: ClassVar[str] = "costs"
    unit: str = field(default="units", init=False)
    label: str = field(default="costs", init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.table, CostTable):
            raise SmartpruneError("costs: there is no table; give one, or on the command line --cost-table FILE")
        object.__setattr__(self, "unit", self.table.unit)
        object.__setattr__(self, "label", self.table.name)

    @staticmethod
    def read_table(path: str | os.PathLike[str]) -> CostTable:
        """The table of a file."""
        return read_table(path)

    def resolve(self, model: nn.Module, layers: Sequence[Layer]) -> ResolvedBudget:
        cost, resolution = self.table.integers(layers)
        description = {
            "name": self.table.name,
            "unit": self.table.unit,
            "resolution": str(resolution),
            "sha256": digest(layers, cost),
        }
        return replace(ResolvedBudget.from_share(cost, self.share), table=description)


def digest(layers: Sequence[Layer], cost: Tensor) -> str:
    """SHA-256 of the cost of every block: for each layer a line such as ``4x8x3x3 "conv1.weight"``, then its costs as 64-bit
    little-endian integers, row-major over the grid."""
    out = hashlib.sha256()
    for layer in layers:
        out.update(f"{text.format_shape(layer.grid.shape)} {json.dumps(plain_name(layer.weight))}\n".encode())
        out.update(cost[layer.start : layer.stop].numpy().astype("<i8").tobytes())
    return out.hexdigest()


def costs(
    share: float,
    table: Mapping[str, Any] | str | os.PathLike[str],
    *,
    name: str | None = None,
    unit: str | None = None,
    per: Per | None = None,
    resolution: float | None = None,
) -> CostBudget:
    """A budget in costs of your own: removes at least this share of the total cost, and less than one block more.

    Costs are counted in integers. By default, the unit is the largest power of ten in which all costs are integers; if they would
    exceed 2**53 in all, they are rounded to the finest power of ten that does not. The receipt holds the name of the table, the
    unit, and a digest of the integers.

    Args:
        share: The share of the cost to remove, in [0, 1).
        table: A cost for each layer to prune, by the name of the layer or of its weight: a number, or an array with one number for
            each block, in the shape of the grid or flat. Or a file: ``.json`` with ``{"name": ..., "unit": ..., "costs": {...}}``,
            or ``.csv`` with the columns ``layer,cost`` or ``layer,block,cost``. Layers that are not pruned may be in the table.
        name: What is counted, such as ``"energy"``. Defaults to the name in the file, or ``"costs"``.
        unit: Its unit, such as ``"pJ"``. Defaults to the unit in the file, or ``"units"``.
        per: What a single number stands for: ``"block"`` (the default), the cost of each block; ``"layer"``, the cost of the whole
            layer, which is divided among its blocks by their weights.
        resolution: Costs are rounded to multiples of this number.

    Returns:
        A budget for :func:`plan` and :func:`attach`.

    Raises:
        SmartpruneError: The share is not in [0, 1), or the table cannot be read. A table that does not fit the layers raises when
            the budget is used.

    Examples:
        >>> import smartprune as sp
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4))
        >>> budget = sp.costs(0.5, {"0": 1, "1": 2.5}, name="energy", unit="pJ")
        >>> sp.plan(model, block=(4, 4), budget=budget).bound  # in units of 0.1 pJ
        (70, 140)
    """
    read = CostTable(table) if isinstance(table, Mapping) else read_table(table)
    if resolution is not None:
        valid = isinstance(resolution, (int, float, Fraction)) and not isinstance(resolution, bool)
        if not valid or not math.isfinite(resolution) or resolution <= 0:
            raise SmartpruneError(f"costs: resolution={resolution!r} must be a number above 0, in the unit of the table")
    given = {"name": name, "unit": unit, "per": per, "resolution": None if resolution is None else as_fraction(resolution)}
    read = replace(read, **{key: value for key, value in given.items() if value is not None})  # type: ignore[arg-type]
    return CostBudget(as_share(share, "costs"), read)


def read_table(path: str | os.PathLike[str]) -> CostTable:
    """The table of a ``.json`` or ``.csv`` file. Files are not trusted."""
    source = as_path(path, "costs: table")
    where = str(source)
    if source.suffix.lower() not in (".json", ".csv"):
        raise SmartpruneError(f"{where}: unknown type of table {source.suffix!r}; give a .json or a .csv file")
    data = read_limited(source, MAX_BYTES)
    if source.suffix.lower() == ".csv":
        return CostTable(_read_csv(data, where))
    values = parse_json(data, where)
    if not isinstance(values, dict) or "costs" not in values or not set(values) <= set(KEYS):
        raise SmartpruneError(
            f"{where}: must be a JSON object with the costs by layer under 'costs', and optionally {', '.join(KEYS[:-1])}"
        )
    try:
        return CostTable(values["costs"], **{key: values[key] for key in KEYS[:-1] if key in values})
    except SmartpruneError as error:
        raise SmartpruneError(f"{where}: {error}") from None


def _read_csv(data: bytes, where: str) -> dict[str, Any]:
    """Costs by layer. Costs of single blocks are a list in the order of the blocks."""
    try:
        rows = list(csv.reader(io.StringIO(data.decode("utf-8-sig")), strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        raise SmartpruneError(f"{where}: not readable as CSV ({error})") from None
    header = [column.strip() for column in rows[0]] if rows else []
    if header not in COLUMNS:
        raise SmartpruneError(f"{where}: the columns are {','.join(header)[:80]!r}; they must be layer,cost or layer,block,cost")
    out: dict[str, Any] = {}
    by_block = len(header) == 3
    for number, row in enumerate(rows[1:], 2):
        if not row:
            continue
        shown = f"{where}: line {number} is {','.join(row)[:80]!r}"
        try:
            layer, *block, cost = (cell.strip() for cell in row)
            value, index = float(cost), int(block[0]) if by_block else None
            if len(row) != len(header):
                raise ValueError
        except (ValueError, IndexError):
            raise SmartpruneError(f"{shown}; it must be {','.join(header)}") from None
        if by_block and index != len(values := out.setdefault(layer, [])):
            raise SmartpruneError(f"{shown}; the next block of {layer} is {len(values)}")
        if by_block:
            values.append(value)
        elif layer in out:
            raise SmartpruneError(f"{shown}; every layer must have one line")
        else:
            out[layer] = value
    return out
