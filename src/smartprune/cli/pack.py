"""``smartprune pack`` and ``unpack``: convert a pruned model to a small file and back."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import SmartpruneError
from .common import Subparsers, add_command, argument_errors, check_outputs, files_of_run, print_result


def add_pack(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "pack",
        "write a model without its zero blocks",
        "  smartprune pack runs/mine\n"
        "  smartprune pack model.safetensors --block 16x8 --out small.packed.safetensors\n\n"
        "docs/format.md specifies the file format.",
    )
    parser.add_argument("model", help="a run folder, a .safetensors file or a torch checkpoint")
    parser.add_argument("--block", metavar="SIZE", help="block size, output x input channels (default: the receipt's)")
    parser.add_argument("--receipt", metavar="FILE", help="receipt to store in the file (default: the run folder's)")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: the model's name with .packed.safetensors)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_pack)


def run_pack(args: argparse.Namespace) -> int:
    from ..artifacts.pack import pack
    from ..artifacts.receipt import Receipt
    from ..core.block import Block

    with argument_errors(args):
        block = None if args.block is None else Block.of(args.block)
        out = Path(args.out or _default_out(Path(args.model)))
        if block is None and args.receipt is None and Path(args.model).is_file() and not _stores_block(Path(args.model)):
            raise SmartpruneError("no receipt gives the block size; add --block, such as --block 16x8")
        inputs = {"the model": args.model, "the receipt": args.receipt, **files_of_run(args.model)}
        check_outputs({"--out": out}, inputs)
    receipt = None if args.receipt is None else Receipt.load(args.receipt)
    print_result(args, pack(args.model, out, block, receipt))
    return 0


def _stores_block(path: Path) -> bool:
    from ..artifacts.packfile import is_packed_file

    return path.suffix == ".onnx" or is_packed_file(path)


def _default_out(model: Path) -> Path:
    from ..artifacts.pack import SUFFIX

    return model / f"model{SUFFIX}" if model.is_dir() else model.with_name(model.stem + SUFFIX)


def add_unpack(subparsers: Subparsers) -> None:
    parser = add_command(
        subparsers,
        "unpack",
        "convert a packed file to a plain .safetensors file",
        "  smartprune unpack small.packed.safetensors --out model.safetensors",
    )
    parser.add_argument("file", help="a packed file")
    parser.add_argument("--out", metavar="FILE", required=True, help=".safetensors file to write")
    parser.add_argument(
        "--limit", metavar="BYTES", type=int, help="maximum size of the tensors (default: 64 MiB, or 256 times the file)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run_unpack)


def run_unpack(args: argparse.Namespace) -> int:
    from ..artifacts.pack import unpack
    from ..artifacts.safetensors_file import safetensors_bytes
    from ..files import write_atomic

    out = Path(args.out)
    with argument_errors(args):
        if out.suffix != ".safetensors":
            raise SmartpruneError(f"--out {out} must end in .safetensors")
        if args.limit is not None and args.limit < 0:
            raise SmartpruneError(f"--limit {args.limit} must not be negative")
        check_outputs({"--out": out}, {"the packed file": args.file})
    state = unpack(args.file, limit=args.limit)
    data = b"".join(safetensors_bytes(state))
    write_atomic(out, data)
    sizes: dict[str, Any] = {"packed": Path(args.file).stat().st_size, "dense": len(data), "tensors": len(state)}
    if args.json:
        print(json.dumps({"path": str(out), **sizes}, indent=2))
    else:
        print(f"{sizes['tensors']} tensors, {sizes['packed']:,} bytes packed, {sizes['dense']:,} bytes dense\nfile     {out}")
    return 0
