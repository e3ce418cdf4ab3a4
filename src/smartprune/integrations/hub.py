"""Folders for the Hugging Face Hub: a packed model, its receipt, and a model card made from both.

Only :func:`from_pretrained` with the name of a repository needs ``huggingface_hub``, which is imported then.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from .. import __version__
from ..artifacts.pack import Packed, pack, unpack
from ..artifacts.receipt import Receipt
from ..artifacts.verify import verify
from ..errors import SmartpruneError
from ..files import write_atomic
from ..run_files import PACKED, RECEIPT

CARD = "README.md"  # the name of model cards on the Hub
FILES = (PACKED, RECEIPT, CARD)
Model = TypeVar("Model", bound=nn.Module)


def save_pretrained(
    model: nn.Module,
    folder: str | os.PathLike[str],
    receipt: Receipt,
    *,
    name: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    report: object = None,
) -> Packed:
    """Writes a folder that ``huggingface_hub.upload_folder`` can upload: the packed model, its receipt and a model card.

    Args:
        model: A baked model.
        folder: The folder. It is made if it does not exist.
        receipt: The receipt that :func:`smartprune.bake` returned. It is checked against the weights.
        name: The title of the card, by default the name of the folder.
        metadata: More fields for the head of the card, such as ``{"license": "mit", "base_model": "timm/resnet18"}``.
        report: What :func:`smartprune.report` returned, or any text, for the card.

    Returns:
        What :func:`smartprune.pack` returned.

    Raises:
        SmartpruneError: The weights do not match the receipt, or the folder cannot be written.
    """
    target = Path(folder)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SmartpruneError(f"hub.save_pretrained: {target} cannot be made ({error.strerror}); give another folder") from None
    packed = pack(model, target / PACKED, receipt=receipt)
    receipt.save(target / RECEIPT)
    card = make_card(name or target.absolute().name, receipt, packed, {} if metadata is None else metadata, report)
    write_atomic(target / CARD, card.encode())
    return packed


def from_pretrained(model: Model, source: str | os.PathLike[str], *, limit: int | None = None, **download: Any) -> Model:
    """Loads the weights of a folder, or of a repository on the Hub, into a model and checks them against the receipt.

    Args:
        model: A model with the names and shapes of the saved one. Its weights are replaced.
        source: A folder that :func:`save_pretrained` wrote, or the name of a repository, such as ``"user/resnet18-pruned"``.
        limit: The most bytes that the tensors may take, as in :func:`smartprune.unpack`.
        download: Arguments of ``huggingface_hub.snapshot_download``, such as ``revision``, ``token`` or ``local_files_only``.

    Returns:
        The model, in evaluation mode.

    Raises:
        SmartpruneError: There is no such folder or repository, a file is damaged, or the weights do not match the model or the
            receipt. The weights of the model are unchanged then.
    """
    folder = Path(source) if Path(source).is_dir() else _download(str(source), download)
    missing = [name for name in (PACKED, RECEIPT) if not (folder / name).is_file()]
    if missing:
        raise SmartpruneError(f"hub.from_pretrained: {source} has no {missing[0]}; give what hub.save_pretrained wrote")
    receipt = Receipt.load(folder / RECEIPT)
    problems = verify(folder / PACKED, receipt=receipt, model=model).problems
    if problems:
        raise SmartpruneError(f"hub.from_pretrained: {source} does not match its receipt: {problems[0]}; download it again")
    unpack(folder / PACKED, model, limit=limit)
    model.eval()
    return model


def _download(name: str, options: Mapping[str, Any]) -> Path:
    try:
        from huggingface_hub import snapshot_download  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise SmartpruneError(
            f"hub.from_pretrained: {name} is no folder, and huggingface_hub cannot be imported ({error}); give a folder, or "
            "install huggingface_hub"
        ) from None
    try:
        return Path(snapshot_download(name, **{"allow_patterns": list(FILES), **options}))
    except (OSError, ValueError) as error:  # the errors of huggingface_hub are subclasses of these
        raise SmartpruneError(
            f"hub.from_pretrained: {name} is no folder, and cannot be downloaded ({str(error).splitlines()[0]}); check the name "
            "and your connection"
        ) from None


def make_card(name: str, receipt: Receipt, packed: Packed, metadata: Mapping[str, Any], report: object = None) -> str:
    """The text of a model card: fields in YAML, then Markdown."""
    fields = {"library_name": "smartprune", "tags": ["pruning", "block-sparsity", "pytorch"], **metadata}
    head = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in fields.items()]  # JSON is YAML, too
    rows = [
        ("method", receipt.method),
        ("block", str(receipt.block)),
        ("blocks kept", f"{receipt.blocks.kept:,} of {receipt.blocks.total:,}"),
        ("weights kept in pruned layers", f"{receipt.weights.kept:,} of {receipt.weights.total:,}"),
        ("budget met", "yes" if receipt.met else "no"),
        ("file", f"{packed.size:,} bytes, {100 * packed.share:.1f} % of the dense file"),
        ("mask", f"`{receipt.mask_hash}`"),
    ]
    if receipt.macs is not None:
        rows.insert(4, ("MACs kept in pruned layers", f"{receipt.macs.kept:,} of {receipt.macs.total:,}"))
    sections = [
        f"# {_one_line(name)}",
        f"The blocks of this model were pruned with smartprune {receipt.version}. Removed blocks are zero and are not stored.",
        "\n".join(["| | |", "| --- | --- |", *(f"| {label} | {value} |" for label, value in rows)]),
        "## Use",
        "```python\nfrom smartprune.integrations.hub import from_pretrained\n\n"
        "model = from_pretrained(make_model(), REPOSITORY)  # make_model: the architecture, with any weights\n```",
        f"`{RECEIPT}` lists every layer. `smartprune verify {PACKED} --receipt {RECEIPT}` checks the file.",
        f"## Receipt\n\n{_fenced(str(receipt))}",
    ]
    if report is not None:
        sections.append(f"## Report\n\n{_fenced(str(report))}")
    sections.append(f"<sub>This card was written by smartprune {__version__}.</sub>")
    return "\n".join(["---", *head, "---", ""]) + "\n" + "\n\n".join(sections) + "\n"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _fenced(text: str) -> str:
    """Text in a code block that it cannot end, whatever the names of its layers are."""
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}text\n{text}\n{fence}"
