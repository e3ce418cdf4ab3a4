"""Sources: the stored weights of a model, from memory or from a file. Files are not trusted."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .. import text
from ..core.block import Block, Grid, Layout
from ..core.layers import Skipped, candidates, every_layer, plain_name, unwrapped
from ..core.memory import check_memory
from ..core.occupancy import nonzero
from ..errors import SmartpruneError
from ..files import as_path, check_readable, read_start
from ..run_files import MODEL, RECEIPT
from .axes import bias_says_inputs_first, inputs_first, inputs_first_in, swap_axes
from .counts import Row
from .litert_read import LitertFile, read_litert
from .onnx_read import OnnxFile, read_onnx
from .packfile import MAX_AXES, is_packed
from .packfile_read import read_packed
from .quantized import hides_layers, packed_weights
from .receipt import Receipt
from .safetensors_file import MASK, check_header
from .tensors import is_learned, named_tensors, storage_key, stored_parameters, stored_tensors
from .torch_file import NotPlainError, read_torch_file

Model = nn.Module | Mapping[str, Tensor] | str | os.PathLike[str]

NESTED = ("model", "state_dict", "model_state_dict")


@dataclass(frozen=True)
class Cut:
    """One stored weight and the grid that cuts it."""

    name: str
    weight: str  # the key of the tensor
    kind: str
    grid: Grid
    transposed: bool
    tensor: Tensor = field(repr=False)
    assumed: bool = False  # the order of the axes and the groups are not known, and matter for this block


@dataclass(frozen=True)
class Source:
    """Stored tensors by name, and what is known about them."""

    where: str
    tensors: Mapping[str, Tensor] = field(repr=False)
    model: nn.Module | None = field(default=None, repr=False)
    receipt: Receipt | None = field(default=None, repr=False)
    layouts: Mapping[str, Layout] = field(default_factory=dict, repr=False)  # by weight, if the file has them
    block: Block | None = None  # if the file has one
    complete: bool = False  # whether ``layouts`` lists every weight of a layer
    absent: tuple[str, ...] = ()  # weights that the file says it leaves out, because no node of its graph uses them
    rounded: bool = False  # whether values were scaled or rounded, so that a kept block may have become zero

    def get(self, name: str) -> Tensor | None:
        """A tensor by name, also if a wrapper has added a prefix to all names."""
        if name in self.tensors:
            return self.tensors[name]
        return self.unwrapped.get(plain_name(name))

    @cached_property
    def unwrapped(self) -> dict[str, Tensor]:
        """The tensors without the prefixes of wrappers."""
        return {plain_name(name): tensor for name, tensor in self.tensors.items()}

    @property
    def params(self) -> int:
        """The number of learned values: parameters, or in a file everything except running statistics."""
        return sum(tensor.numel() for tensor in self._learned().values())

    @property
    def zeros(self) -> int:
        """How many of the learned values are zero."""
        return sum(tensor.numel() - int(nonzero(tensor).sum()) for tensor in self._learned().values())

    def _learned(self) -> dict[str, Tensor]:
        learned, seen = {}, set()
        names = None if self.model is None else {name for name, _ in stored_parameters(self.model)}
        for name, tensor in self.tensors.items():
            key = storage_key(tensor)
            if tensor.layout is not torch.strided or key in seen:
                continue
            if is_learned(name, tensor) if names is None else name in names:
                seen.add(key)
                learned[name] = tensor
        return learned

    def cuts(self, block: Block) -> tuple[tuple[Cut, ...], tuple[Skipped, ...]]:
        """Every weight that can be cut into blocks, and those that cannot, with the reason.

        A model and a packed file define the order of the axes. Other files do not: weights that the receipt lists are cut as it
        says; any other weight is cut like that of a plain convolution or linear layer, and marked as ``assumed``.
        """
        if self.model is not None:
            if next(candidates(self.model), None) is None:
                return (), ()
            layers, skipped = every_layer(self.model, block)
            return tuple(Cut(x.name, x.weight, x.kind, x.grid, x.transposed, self.tensors[x.weight]) for x in layers), skipped
        known: dict[str, Row | Layout] = {plain_name(name): layout for name, layout in self.layouts.items()}
        if self.receipt is not None:
            known |= {plain_name(row.weight): row for row in self.receipt.layers}
        learned = self._learned()
        columns = {key for key in learned if bias_says_inputs_first(key, learned)}
        cuts: list[Cut] = []
        skipped_tensors = [
            Skipped(key.removesuffix(".weight"), "sparse", tuple(tensor.shape), f"{tensor.layout} weights are not dense")
            for key, tensor in self.tensors.items()
            if tensor.layout is not torch.strided
        ]
        for key, tensor in learned.items():
            if tensor.dim() < 2:
                continue
            name, shape = key.removesuffix(".weight"), tuple(tensor.shape)
            layout = known.get(plain_name(key))
            if layout is None and self.complete:
                skipped_tensors.append(Skipped(name, "tensor", shape, "not the weight of a convolution or linear layer"))
                continue
            unknown = layout is None or layout.shape != shape
            if layout is None or unknown:
                layout = Layout(name, "matrix" if tensor.dim() == 2 else "kernel", shape, transposed=key in columns)
            try:
                if tensor.numel() == 0 or tensor.dim() > MAX_AXES:
                    raise SmartpruneError("no weights" if tensor.dim() <= MAX_AXES else f"more than {MAX_AXES} axes")
                # any other matrix belongs to a linear layer, unless the model has layers such as Conv1D
                square = bool(columns) and len(set(shape)) == 1
                ambiguous = tensor.dim() > 2 or square or key.endswith("in_proj_weight")
                assumed = unknown and ambiguous and block != Block(1, 1)
                cuts.append(Cut(layout.name, key, layout.kind, layout.cut(block), layout.transposed, tensor, assumed))
            except SmartpruneError as error:
                skipped_tensors.append(Skipped(layout.name, layout.kind, shape, str(error)))
        return tuple(cuts), tuple(skipped_tensors)


def read_source(model: Model, network: nn.Module | None = None) -> Source:
    """The stored weights of a model, a state dict, a file or a run folder. Only plain tensors are unpickled.

    ``network`` is the model of the weights; it defines which layers are transposed or grouped.
    """
    source = _stored_weights(model)
    check_not_masked(source.tensors, source.where)
    return source if network is None else _with_network(source, network)


def stored_and_network(stored: Model | None, model: Model | None, where: str) -> tuple[Model, nn.Module | None]:
    """The weights to read, and their network. If only the network is given, its own weights are read."""
    if stored is None and model is None:
        raise SmartpruneError(f"{where}: give a torch.nn.Module, a state dict, or the path of a file or of a run folder")
    if stored is None or model is None:
        return (model if stored is None else stored), None  # type: ignore[return-value]
    if not isinstance(model, nn.Module):
        raise SmartpruneError(f"{where}: model= is a {type(model).__name__}; give the torch.nn.Module that the weights belong to")
    return stored, model


def _stored_weights(model: Model) -> Source:
    if isinstance(model, nn.Module):
        stored = dict(stored_tensors(model)) | packed_weights(model)
        return Source(type(model).__name__, stored, None if hides_layers(model) else model)
    if isinstance(model, Mapping):
        return Source("the state dict", named_tensors(model, "the state dict"))
    if not isinstance(model, (str, os.PathLike)):
        raise SmartpruneError(
            f"model is a {type(model).__name__}; give a torch.nn.Module, a state dict, or the path of a file or of a run folder"
        )
    path = as_path(model, "model")
    if path.is_dir():
        if not (path / MODEL).is_file():
            raise SmartpruneError(f"{path}: a run folder holds {MODEL}, and this folder does not; give a file")
        receipt = path / RECEIPT
        if receipt.is_symlink() and not receipt.exists():
            raise SmartpruneError(f"{receipt}: is a link to {os.readlink(receipt)}, which does not exist; repair or remove it")
        source = replace(_read(path / MODEL), where=str(path))
        return replace(source, receipt=Receipt.load(receipt)) if receipt.exists() else source
    return _read(path)


def files_of(model: Model) -> dict[str, Path]:
    """The files that are read for a path, by what they hold; empty for a model in memory."""
    if not isinstance(model, (str, os.PathLike)):
        return {}
    path = Path(model)
    return {"the model": path / MODEL, "the receipt": path / RECEIPT} if path.is_dir() else {"the model": path}


def copy_of(model: nn.Module, where: str) -> nn.Module:
    """An independent copy on the CPU, in eval mode and without gradients. Wrappers for compilation and data parallelism are
    removed."""
    model = unwrapped(model)
    try:
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if is_lazy(x) or x.is_meta:
                problem = "has no shape yet (a lazy layer); run one forward pass first"
                problem = problem if is_lazy(x) else "is on the meta device and has no values; load the model first"
                raise SmartpruneError(f"{where}: the model cannot be copied, because {name} {problem}")
            check_memory(x, where)
        attributes = (value for module in model.modules() for value in vars(module).values())
        # deepcopy cannot copy tensors that are not leaves
        copies = {id(x): x.detach().clone() for x in attributes if isinstance(x, Tensor) and not x.is_leaf}
        with torch.no_grad():  # scripted parts copy their weights by an operation that autograd records
            copied = copy.deepcopy(model, copies)
        return copied.cpu().eval().requires_grad_(False)
    except SmartpruneError:
        raise
    except Exception as error:  # scripted and exported models, and modules that forbid copies
        raise SmartpruneError(
            f"{where}: the model cannot be copied ({type(error).__name__}: {text.first_line(error)}); give an ordinary "
            "torch.nn.Module that holds its weights"
        ) from error


def check_not_masked(names: Iterable[str], where: str) -> None:
    """Raises for masks of torch.nn.utils.prune, which store a weight in two parts."""
    known = dict.fromkeys(names)
    for name in known:
        stem = name.removesuffix("_orig")
        if stem != name and f"{stem}_mask" in known and stem not in known:
            attribute = stem.rpartition(".")[2]
            raise SmartpruneError(
                f"{where}: {stem} is masked by torch.nn.utils.prune, which stores it as {attribute}_orig and {attribute}_mask; "
                f"make it permanent first, in every such layer: torch.nn.utils.prune.remove(module, {attribute!r})"
            )


def _with_network(source: Source, network: nn.Module) -> Source:
    """The source with the axes that its network defines."""
    check_not_masked((name for name, _ in stored_tensors(network)), type(network).__name__)
    source = swap_axes(source, inputs_first_in(network))
    parameters = list(network.named_parameters(remove_duplicate=False))
    stored = {id(weight): tensor for name, weight in parameters if (tensor := source.get(name)) is not None}
    tensors = {name: tensor for name, _ in network.named_buffers() if (tensor := source.get(name)) is not None}
    for name, weight in parameters:
        if isinstance(weight, nn.UninitializedParameter):
            raise SmartpruneError(f"model: {name} has no shape yet (a lazy layer); run one forward pass first")
        tensor = stored.get(id(weight))  # a tied weight may be stored under one of its names only
        if tensor is None and weight.dim() < 2:  # for example a normalization that was folded
            continue
        if tensor is None or tensor.shape != weight.shape:
            shape = "missing" if tensor is None else text.format_shape(tensor.shape)
            raise SmartpruneError(
                f"{source.where} does not belong to the model: {name} is {text.format_shape(weight.shape)} in the model and "
                f"{shape} here; give the model of these weights"
            )
        tensors[name] = tensor
    for name, tensor in source.unwrapped.items():
        if name not in tensors and tensor.dim() > 1 and is_learned(name, tensor) and not source.rounded:  # a graph has constants
            raise SmartpruneError(
                f"{source.where} does not belong to the model: {name} ({text.format_shape(tensor.shape)}) is not in the model; "
                "give the model of these weights"
            )
        stem = name.rpartition("#")[0]
        if (
            name in source.layouts
            and name not in tensors
            and stem in tensors
            and not torch.equal(tensor.float(), tensors[stem].float())
        ):
            raise SmartpruneError(
                f"{source.where} does not belong to the model: its branches hold several weights called {stem}; "
                "read it without the model"
            )
    return replace(source, tensors=tensors, model=network, layouts={})


def _read(path: Path) -> Source:
    if not path.is_file():
        raise SmartpruneError(f"{path}: no such file")
    reader = READERS.get(path.suffix.lower())
    if reader is None and _looks_like_safetensors(path):  # a packed file may have any name
        reader = _read_safetensors
    if reader is None:
        raise SmartpruneError(f"{path}: unknown file type {path.suffix!r}; the types are: {', '.join(READERS)}")
    return reader(path)


def _looks_like_safetensors(path: Path) -> bool:
    return read_start(path, 9)[8:] == b"{"


def _read_safetensors(path: Path) -> Source:
    check_readable(path)
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            packed = is_packed(metadata)
            tensors = {} if packed else {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except Exception as error:
        raise SmartpruneError(f"{path}: not a readable safetensors file ({text.first_line(error)})") from None
    if MASK in metadata:
        raise SmartpruneError(f"{path}: is a mask file and holds no weights; read it with smartprune.load_mask(path)")
    if packed:
        packed_file = read_packed(path)
        tensors = named_tensors(packed_file.dense(), str(path))
        return Source(
            str(path), tensors, receipt=packed_file.receipt, layouts=packed_file.layouts, block=packed_file.block, complete=True
        )
    check_header(path)
    return Source(str(path), named_tensors(tensors, str(path)))


def _read_graph(path: Path, read: Callable[[Path], OnnxFile | LitertFile]) -> Source:
    file = read(path)
    tensors, receipt = named_tensors(file.tensors(), str(path)), file.receipt
    source = Source(str(path), tensors, None, receipt, file.layouts(), file.block, complete=True, absent=file.absent, rounded=True)
    return source if receipt is None else swap_axes(source, inputs_first(receipt.layers))


def _read_checkpoint(path: Path) -> Source:
    return Source(str(path), named_tensors(_load_checkpoint(path), str(path)))


def _load_checkpoint(path: Path) -> Mapping[str, object]:
    try:
        data = read_torch_file(path)
    except NotPlainError as error:
        raise SmartpruneError(f"{error}; code in files is never run. Save model.state_dict() instead of the model") from None
    except OSError as error:
        raise SmartpruneError(f"{path}: cannot be read ({error.strerror or error})") from None
    for key in NESTED:
        data = data[key] if isinstance(data, Mapping) and isinstance(data.get(key), Mapping) else data
    if not isinstance(data, Mapping):
        raise SmartpruneError(f"{path}: holds a {type(data).__name__}; save model.state_dict(), a dictionary of tensors")
    return data


# One line per type of file: its suffix, and the function that reads it.
READERS: dict[str, Callable[[Path], Source]] = {
    ".safetensors": _read_safetensors,
    ".pt": _read_checkpoint,
    ".pth": _read_checkpoint,
    ".ckpt": _read_checkpoint,
    ".bin": _read_checkpoint,
    ".onnx": partial(_read_graph, read=read_onnx),
    ".tflite": partial(_read_graph, read=read_litert),
}
