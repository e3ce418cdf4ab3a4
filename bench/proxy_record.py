"""Turns the output of bench/proxy.py into records, and draws accuracy against the length of the search.

python bench/proxy_record.py

Reads records/proxy-h200/cells-*.jsonl and writes the records. Run records/tables.py afterwards.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from proxy_cells import make_method

from smartprune.experiments.compare.labels import format_setting
from smartprune.experiments.compare.record import save_record

RECORDS = Path(__file__).resolve().parent.parent / "records"
MODELS = {"half": "resnet18, half width", "quarter": "resnet18, quarter width", "mobilenetv2": "mobilenetv2"}
DENSE_EPOCHS = {("half", 45000): 200, ("mobilenetv2", 45000): 60, ("quarter", 10000): 120, ("quarter", 45000): 100}
METRICS = {"validation": "accuracy, held out", "test": "accuracy, test", "loss": "training loss"}
BAND = "smart(start=0.1, end=0.01, unit=band, init=balanced, reach=2, ramp=cubic, gain=True)"
CURVES = {  # by method: the name in the figure and the colour
    "gradual": ("Gradual()", "#d1495b"),
    "gradual(norm=balanced)": ("Gradual(norm=balanced)", "#edae49"),
    "smart": ("Smart()", "#00798c"),
    "smart(ramp=cubic, gain=True)": ("Smart(ramp, gain)", "#8d96a3"),
    BAND: ("Smart(band)", "#30638e"),
}
Cell = dict[str, Any]


def read(folder: Path) -> list[Cell]:
    lines = [line for path in sorted(folder.glob("cells-*.jsonl")) for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def name_of(cell: Cell) -> str:
    """The method with the settings that are not its defaults. A prototype that became a setting is named by the setting."""
    name, settings = cell["method"], dict(cell["settings"])
    balance = settings.pop("balance", None)
    if balance is not None:
        name = name.removesuffix(" blend")
        field = "init" if name == "smart" else "norm"
        settings[field] = "balanced" if balance == 0.25 else f"balanced {format_setting(balance)}"
    defaults = {**dataclasses.asdict(make_method(name, {})), "leak": None}
    changed = [f"{key}={format_setting(value)}" for key, value in settings.items() if defaults.get(key) != value]
    kind = "" if name in ("smart", "gradual") and balance in (None, 0.25) else " (prototype)"
    return name + (f"({', '.join(changed)})" if changed else "") + kind


def rows_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    groups: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in cells:
        key = (cell["network"], cell["pictures"], tuple(cell["epochs"]), name_of(cell))
        groups.setdefault(key, []).append(cell)
    rows = []
    for (network, pictures, (search, finetune), method), same in sorted(groups.items(), key=lambda group: group[0][:3]):
        same = sorted(same, key=lambda cell: cell["seed"])
        common = {
            "model": MODELS[network],
            "data": f"cifar10, {pictures:,} images",
            "block": "16x8",
            "sparsity": same[0]["sparsity"],
            "protocol": f"{DENSE_EPOCHS[network, pictures]} dense + {search} search + {finetune} fine-tuning epochs",
            "method": method,
            "form": {"method": same[0]["method"], **same[0]["settings"]},
            "run_seeds": [cell["seed"] for cell in same],
        }
        undecided = {"undecided": [cell["undecided"] for cell in same], "blocks": same[0]["blocks"]}
        for key, metric in METRICS.items():
            values = [cell[key] for cell in same]
            spread = statistics.stdev(values) if len(values) > 1 else None
            row = common | {"metric": metric, "values": values, "mean": statistics.fmean(values), "std": spread, "n": len(values)}
            row |= {} if key == "loss" else {"unit": "share"}
            rows.append(row | (undecided if key == "validation" else {}))
    return rows


# -- the figure ---------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP = 360, 300, 60, 40


def panel(x0: float, title: str, xs: Sequence[tuple[float, str]], ys: Sequence[tuple[float, str]], labels: tuple[str, str]) -> str:
    """A frame with a title, tick labels at positions from 0 to 1, and axis labels."""
    out = [f'<rect x="{x0}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>']
    out.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP - 14}" text-anchor="middle" font-weight="bold">{title}</text>')
    for at, text in xs:
        out.append(f'<text x="{x0 + at * WIDTH:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{text}</text>')
    for at, text in ys:
        y = TOP + HEIGHT * (1 - at)
        out.append(f'<line x1="{x0}" x2="{x0 + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eee"/>')
        out.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    out.append(f'<text x="{x0 + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{labels[0]}</text>')
    middle = TOP + HEIGHT / 2
    out.append(
        f'<text x="{x0 - 40}" y="{middle}" text-anchor="middle" transform="rotate(-90 {x0 - 40} {middle})">{labels[1]}</text>'
    )
    return "\n".join(out)


def curve(points: Sequence[tuple[float, float]], colour: str, place: Callable[[float, float], tuple[float, float]]) -> str:
    at = " ".join("{:.1f},{:.1f}".format(*place(*point)) for point in points)
    return f'<polyline points="{at}" fill="none" stroke="{colour}" stroke-width="2"/>'


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: accuracy by search length, with a dot per seed and a line through the medians. Right: undecided blocks."""
    rows = [row for row in rows if row["data"].startswith("cifar10, 10,000") and row["metric"] == METRICS["validation"]]
    search = {id(row): int(row["protocol"].split(" + ")[1].split()[0]) for row in rows}
    low, high = 0.4, 0.8
    second = LEFT + WIDTH + 90
    out = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="920" height="460" font-family="sans-serif" font-size="12">',
        '<rect width="920" height="460" fill="white"/>',
        panel(
            LEFT,
            "Accuracy, held out",
            [(i / 5, str(2**i)) for i in range(6)],
            [((v - 40) / 40, f"{v} %") for v in range(40, 81, 10)],
            ("epochs of search (78 steps each), then 8 of fine-tuning", ""),
        ),
        panel(
            second,
            "Undecided blocks, 16 epochs of search",
            [(v / 4, f"{25 * v} %") for v in range(5)],
            [(v / 4, f"{25 * v} %") for v in range(5)],
            ("share of the search", ""),
        ),
    ]

    def left(length: float, value: float) -> tuple[float, float]:
        share = (max(low, value) - low) / (high - low)
        return LEFT + WIDTH * math.log2(length) / 5, TOP + HEIGHT * (1 - share)

    def right(done: float, share: float) -> tuple[float, float]:
        return second + WIDTH * done, TOP + HEIGHT * (1 - share)

    for number, (method, (name, colour)) in enumerate(CURVES.items()):
        points = sorted((search[id(row)], row) for row in rows if row["method"] == method)
        out += [
            '<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}" fill-opacity="0.5"/>'.format(*left(length, value), colour)
            for length, row in points
            for value in row["values"]
        ]
        out.append(curve([(length, statistics.median(row["values"])) for length, row in points], colour, left))
        for row in (row for length, row in points if length == 16 and method.startswith("smart")):
            shares = [statistics.fmean(values) / row["blocks"] for values in zip(*row["undecided"], strict=True)]
            out.append(curve([((i + 1) / len(shares), share) for i, share in enumerate(shares)], colour, right))
        x = LEFT + 170 * number
        out.append(f'<line x1="{x}" x2="{x + 24}" y1="418" y2="418" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<text x="{x}" y="440">{name}</text>')
    path.write_text("\n".join([*out, "</svg>", ""]))


# -- the records --------------------------------------------------------------------------------------------------------------

PROTOCOL = (
    "Batch 128, SGD with momentum 0.9, and a learning rate of 0.02 along one cosine over search and fine-tuning, in {precision}. "
    "5,000 training images are held out. The training set was re-encoded (JPEG, quality 95)."
)
GPU = (
    "python bench/proxy.py --data DIR --plan records/proxy-h200/plan-1.json --out DIR --mps (and plan-2, plan-3)",
    "device NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, 10 or 12 processes under MPS",
    PROTOCOL.format(precision="bf16"),
)
CPU = (
    "python bench/proxy.py --data DIR --plan PLAN.json --out DIR --device cpu",
    "device CPU (the versions were not recorded)",
    PROTOCOL.format(precision="float32"),
)
PARTS: dict[str, tuple[str, tuple[str, str, str], Callable[[Cell], bool]]] = {
    "proxy-h200": (
        "Forms of SMART and of gradual magnitude at 97 % with 8 + 12 epochs, on two proxy networks. Decisions used the held-out "
        "images and the training loss. The test split was read at the end. Seeds 10 to 12 were not used before the forms were "
        "chosen. With n from 1 to 5, most differences in accuracy are below the noise. No form is ahead of gradual magnitude by "
        "two standard errors on both networks. Not measured: a shorter ramp for Gradual(norm=balanced), and more than two seeds "
        "on MobileNetV2. A form with balanced and a number is a prototype that moves the ranking by that share of the way from "
        "magnitudes to shares of the layer.",
        GPU,
        lambda c: c["network"] != "quarter" and "device" not in c,
    ),
    "proxy-quarter-h200": (
        "The same forms on a quarter-width ResNet18 with 10,000 images and 14 + 14 epochs, where differences are large. It ranks "
        "forms differently from the larger networks. Gradual(through=True) and regrowth by gradient can empty a layer, which "
        "leaves 10 %.",
        GPU,
        lambda c: c["network"] == "quarter" and c["epochs"] in ([14, 14], [7, 9]) and "device" not in c,
    ),
    "proxy-length-h200": (
        "Accuracy against the length of the search, with 8 epochs of fine-tuning, on a quarter-width ResNet18. One of the three "
        "seeds of gradual magnitude with four epochs of search ended at chance (9.6 %). The figure is map.svg.",
        GPU,
        lambda c: c["network"] == "quarter" and c["epochs"][1] == 8,
    ),
    "proxy-control-cpu": (
        "Do the learned scores matter when the allocation and the ramp are the same? One seed of each form on a quarter-width "
        "ResNet18 with 10,000 images shows no difference in held-out accuracy and training loss. It says nothing about larger "
        "networks or short searches.",
        CPU,
        lambda c: c.get("device") == "cpu",
    ),
}


def split_table(page: Path, name: str) -> None:
    """Replaces a table that is too wide by three. records/tables.py fills them."""
    text = page.read_text()
    selections = [
        ("10,000 images, accuracy on held-out images:", "data=*10,000* metric='accuracy, held out'"),
        ("10,000 images, training loss of the last epoch:", "data=*10,000* metric='training loss'"),
        ("45,000 images, accuracy on held-out images:", "data=*45,000* metric='accuracy, held out'"),
    ]
    tables = [f"{title}\n\n<!-- table: {name} {rows} -->\n<!-- /table -->\n" for title, rows in selections]
    page.write_text("\n".join([text[: text.index("<!-- table")] + "![Accuracy against search length](map.svg)\n", *tables]))


def main() -> None:
    cells = read(RECORDS / "proxy-h200")
    dense = [cell for cell in cells if "dense" in cell]
    pruned = [cell for cell in cells if "validation" in cell and "dense" not in cell]
    for name, (note, (command, machine, protocol), belongs) in PARTS.items():
        rows = rows_of([cell for cell in pruned if belongs(cell)])
        precision = "none" if machine.startswith("device CPU") else "bf16"
        settings = {"optimizer": "sgd", "lr": 0.02, "momentum": 0.9, "weight_decay": 5e-4, "batch": 128, "amp": precision}
        save_record(RECORDS / name, {"rows": rows}, {"dense": dense, **settings}, f"{note} {protocol}", [command], [machine])
        if name == "proxy-length-h200":
            draw(rows, RECORDS / name / "map.svg")
            split_table(RECORDS / name / "README.md", name)


if __name__ == "__main__":
    main()
