"""The runtime on a GPU: Triton layers that skip absent blocks, in place of those convolutions and linear layers where
that is faster than the dense ones; measured layer by layer when the model is built."""

from __future__ import annotations

import importlib.util
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ... import text
from ...errors import SmartpruneError
from ..trace.inplace import Unproved
from ..trace.inputs import as_float32
from ..lower.steps import NOTHING, Activation, Shape, Step, fuse, lower
from ..module import Options, copied, copies
from ..trace.tracer import Watch, tensors, trace

DEEP = 8  # input channels of a block as the kernel sees it: 16 bytes of half-precision activations
WIDE = 16  # output channels of a row: the least that a matrix unit takes
MOST_PLACES = 63  # kernel positions that a mask of 64 bits can tell apart, and one more for none
DENSE_SHARE = 0.5  # where more blocks than this are kept the sparse kernel is not tried
CLOSE = {torch.float32: 2e-2, torch.bfloat16: 8e-2, torch.float16: 3e-2}  # of the largest number of a result
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADDITION = {"none": 0, "before": 1, "after": 2}
AFTERWARDS: dict[str, Callable[[Tensor], Tensor]] = {  # activations that the kernel leaves to torch
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "gelu": F.gelu,
}


@dataclass(frozen=True)
class Tile:
    """How a program is cut: output pixels, blocks per matrix product, warps, and rows of output blocks one after the
    other, which read the same pixels from the L1 cache."""

    pixels: int
    step: int
    warps: int
    rows: int


TILES = (*(Tile(64, 4, 2, rows) for rows in (1, 2, 4, 8)), Tile(128, 4, 4, 8))  # what won on an H200, here or there


class Kept:
    """The kept blocks of one weight, [out, in, height, width], in the order of the kernel."""

    def __init__(self, weight: Tensor) -> None:
        out, channels, height, width = weight.shape
        self.shape = (out, channels, height, width)
        self.rows, self.columns = -(-out // WIDE), -(-channels // DEEP)
        padded = weight.new_zeros(self.rows * WIDE, self.columns * DEEP, height, width)
        padded[:out, :channels] = weight
        cut = padded.view(self.rows, WIDE, self.columns, DEEP, height * width).permute(0, 4, 2, 3, 1)
        mask = (cut != 0).any(-1).any(-1)  # [rows, places, columns]
        self.share = float(mask.float().mean())
        self.blocks = cut[mask]  # [kept, DEEP, WIDE]
        self.row, self.place, self.column = mask.nonzero(as_tuple=True)
        self.counts = mask.sum((1, 2)).tolist()

    def table(self, step: int, group: int) -> tuple[Tensor, ...]:
        """In steps of so many blocks: where every group of rows begins, and which row every step finishes (-1: none);
        place and column of every block, and the weights.

        Each row is padded to whole steps, at least one, with blocks of zeros that read nothing (place -1). Two more steps
        follow, which the kernel reads ahead.
        """
        begins = [0]
        for count in self.counts:
            begins.append(begins[-1] + max(1, -(-count // step)))
        total = (begins[-1] + 2) * step
        finished = torch.full((begins[-1],), -1)
        finished[torch.tensor(begins[1:]) - 1] = torch.arange(self.rows)
        rank = torch.cat([torch.arange(count) for count in self.counts])
        where = torch.tensor(begins)[self.row] * step + rank
        place, column = torch.full((total,), -1), torch.zeros(total, dtype=torch.int64)
        place[where], column[where] = self.place, self.column
        weights = self.blocks.new_zeros(total, DEEP, WIDE)
        weights[where] = self.blocks
        return torch.tensor([*begins[:-1:group], begins[-1]]), finished, place, column, weights


class Layer(nn.Module, ABC):
    """A convolution or linear layer with what follows it: an activation, and an addition before or after that."""

    weight: Tensor
    bias: Tensor

    def __init__(self, step: Step, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__()
        assert step.weight is not None and step.bias is not None  # noqa: PT018
        self.flat = len(shape) == 2
        self.rows = step.rows
        self.addition, self.activation = step.addition, step.activation
        w = step.window
        self.stride, self.padding, self.dilation = (w["sh"], w["sw"]), (w["ph"], w["pw"]), (w["dh"], w["dw"])
        self.kernel, self.channels = (w["kh"], w["kw"]), step.weight.shape[0 if step.kind == "depthwise" else 1]
        self.groups = step.weight.shape[0] if step.kind == "depthwise" else 1
        weight = torch.from_numpy(np.ascontiguousarray(step.weight))
        self.register_buffer("weight", (weight[:, None] if step.kind == "depthwise" else weight).to(dtype))
        self.register_buffer("bias", torch.from_numpy(np.ascontiguousarray(step.bias)))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        given, lead = x.shape, self._lead(x)
        x = self._map(x)
        size = self.size(x) if x.dim() == 4 and x.shape[1] == self.channels else torch.Size((0,))
        if min(size[2:], default=0) < 1 or (lead is not None and size[2:] != (1, 1)):  # or the kernel reads elsewhere
            raise SmartpruneError(
                f"accelerate: a layer of {self.channels} channels and a {text.format_shape(self.kernel)} kernel is given "
                f"{text.format_shape(given)}; batches and sides other than those of the example may be given if the model takes them"
            )
        whole = size if lead is None else torch.Size((*lead, size[1]))
        if other is None:
            return self.compute(x, None).reshape(whole)
        added = self._map(other) if lead is None else other if self._lead(other) == other.shape[:-1] else other.flatten(1)
        if added.shape != whole:  # equal in the example, but now one side has one entry where the other has more: torch spreads it
            return finished(self.compute(x, None, bare=True).reshape(whole), added, self)
        return self.compute(x, added.reshape(size)).reshape(whole)

    def size(self, x: Tensor) -> torch.Size:
        """Of the result for a map of pixels."""
        sides = zip(x.shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True)
        return torch.Size((x.shape[0], len(self.bias), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sides)))

    def _lead(self, x: Tensor) -> Sequence[int] | None:
        """All axes of the result but the last one, if that holds the channels; what gives such rows may be given a map, and
        makes one pixel of it."""
        return None if not (self.rows or self.flat) else x.shape[:1] if self.flat and x.dim() == 4 else x.shape[:-1]

    def _map(self, x: Tensor) -> Tensor:
        """As [images, channels, height, width]; a map of one pixel may come without its last two axes."""
        if self.rows or (self.flat and x.dim() != 4):
            return x.reshape(-1, x.shape[-1], 1, 1)
        return x[:, :, None, None] if x.dim() == 2 else x

    @abstractmethod
    def compute(self, x: Tensor, other: Tensor | None, bare: bool = False) -> Tensor:
        """The layer on a map of pixels, [images, channels, height, width]; ``bare`` is without what follows it."""


class Dense(Layer):
    """By torch."""

    def __init__(self, step: Step, shape: Shape, dtype: torch.dtype) -> None:
        super().__init__(step, shape, dtype)
        self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.bias = self.bias.to(dtype)

    def compute(self, x: Tensor, other: Tensor | None, bare: bool = False) -> Tensor:
        out = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return out if bare else finished(out, other, self)


class Sparse(Layer):
    """By the kernel: reads and multiplies kept blocks only. Channels-last in and out."""

    def __init__(self, step: Step, shape: Shape, dtype: torch.dtype, tile: Tile = TILES[0]) -> None:
        super().__init__(step, shape, dtype)
        self.kept = Kept(self.weight)
        self.bias = self.bias.float()
        self.tile = tile
        self.tables: dict[Any, tuple[Tensor, ...]] = {}
        self.padded = any(self.padding) or self.kept.shape[1] % DEEP != 0
        self.fused = self.activation.name in ("clamp", "silu")
        self.kind = 2 if self.activation.name == "silu" else int(not self.activation.nothing and self.fused)
        del self.weight

    @staticmethod
    def fits(step: Step) -> bool:
        assert step.weight is not None
        return step.kind == "conv" and math.prod(step.weight.shape[2:]) <= MOST_PLACES

    def compute(self, x: Tensor, other: Tensor | None, bare: bool = False) -> Tensor:
        from .kernel import conv_kernel

        tile, (out_channels, channels, kh, kw) = self.tile, self.kept.shape
        x = x.contiguous(memory_format=torch.channels_last)
        images, _, height, width = x.shape
        size = self.size(x)
        high, wide = size[2:]
        out = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        if other is not None:
            other = other.contiguous(memory_format=torch.channels_last)
        here = other if self.fused else None
        groups = -(-self.kept.rows // tile.rows)
        programs = -(-images * high * wide // tile.pixels) * groups
        if programs:
            conv_kernel[(programs,)](
                x, *self._table(width, x.device), self.bias, out if here is None else here, out,
                images, height, width, channels, high, wide, out_channels, groups,
                kh, kw, *self.stride, *self.padding, *self.dilation,
                tile.pixels, WIDE, DEEP, tile.step, self.padded, channels % DEEP != 0,
                0 if here is None else ADDITION[self.addition], 0 if bare else self.kind, self.activation.low, self.activation.high,
                "tf32" if x.dtype == torch.float32 else "ieee", max(x.numel(), out.numel()) >= 1 << 31,
                num_warps=tile.warps, num_stages=1,
            )  # fmt: skip
        return out if self.fused or bare else finished(out, other, self)

    def _table(self, width: int, device: torch.device) -> tuple[Tensor, ...]:
        key = (width, self.tile, device)
        if key not in self.tables:
            _, channels, _, kw = self.kept.shape
            begins, finished, place, column, weights = self.kept.table(self.tile.step, self.tile.rows)
            real = place.clamp(min=0)
            jump = ((real // kw) * self.dilation[0] * width + (real % kw) * self.dilation[1]) * channels + column * DEEP
            jump = torch.where(place < 0, 0, jump)
            if channels % DEEP:
                place = torch.where(place < 0, MOST_PLACES, place | ((channels - column * DEEP).clamp(max=DEEP) << 8))
            elif self.padded:
                place = torch.where(place < 0, MOST_PLACES, place)
            known = self.tables.copy().items()  # other threads may add to them
            same = next((table for other, table in known if other[1:] == key[1:]), None)
            if same is None:
                same = (weights.to(device), *(t.to(device, torch.int32) for t in (begins, finished, jump, place)))
            # inputs may have any number of widths: they share all but the distances in memory, above all the weights
            self.tables[key] = (*same[:3], jump.to(device, torch.int32), same[4])
        return self.tables[key]


def finished(out: Tensor, other: Tensor | None, layer: Layer) -> Tensor:
    """Activation and addition, by torch."""
    if layer.addition == "before" and other is not None:
        out = out + other
    out = activated(out, layer.activation)
    return out + other if layer.addition == "after" and other is not None else out


def activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == NOTHING:
        return x
    if activation.name == "clamp":
        return x.clamp_(activation.low, activation.high)
    if activation.name == "silu":
        return F.silu(x)
    if activation.name == "leaky":
        return F.leaky_relu(x, activation.slope)
    return AFTERWARDS[activation.name](x)


def on_gpu(model: nn.Module, inputs: Sequence[tuple[Any, ...]], options: Options, device: str = "cuda") -> nn.Module:
    """The model for a GPU: a graph module whose convolutions and linear layers are :class:`Dense` or :class:`Sparse`."""
    if options.dtype not in DTYPES:
        raise SmartpruneError(f"accelerate: dtype={options.dtype!r} on a GPU; it is one of {', '.join(DTYPES)}")
    if not inputs:
        raise SmartpruneError("accelerate: a GPU needs example=, an input of the size to come: layers are timed with it")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise SmartpruneError(f"accelerate: device={device!r}, but torch finds no CUDA device here; use device='cpu'")
        if importlib.util.find_spec("triton") is None:
            raise SmartpruneError(f"accelerate: device={device!r} needs Triton, which comes with torch for CUDA")
    dtype, own = DTYPES[options.dtype], copied(model).to(device)
    values = [as_float32(v).to(device) if isinstance(v, Tensor) else v for v in inputs[0]]
    try:
        traced, _ = trace(own)
    except Exception as error:  # whatever the model's own code raises when it meets a symbol instead of a tensor
        raise SmartpruneError(
            f"accelerate: the model cannot be traced by torch.fx, which a GPU needs ({type(error).__name__}: {error})"
        ) from error
    with torch.no_grad():
        watch = Watch(traced)
        expected = watch.run(*copies(values))
        try:
            copied_first = watch.aliases.settle(traced.graph)
        except Unproved as why:
            raise SmartpruneError(f"accelerate: {why}, which is not kept in order on a GPU") from why
        out = rebuilt(traced.cpu(), watch.shapes, dtype, device, copied_first)
        for ours, theirs in zip(tensors(out(*values)), tensors(expected), strict=True):
            if theirs.is_floating_point() and theirs.numel():
                apart, scale = float((ours.float() - theirs).abs().max()), float(theirs.abs().max())
                if not apart <= CLOSE[dtype] * max(scale, 1e-6):
                    raise SmartpruneError(
                        f"accelerate: the result lies up to {apart:g} from the model's own, whose largest number is {scale:g}; "
                        f"its numbers may not fit {options.dtype}: try float32"
                    )
    return out


def rebuilt(
    traced: fx.GraphModule,
    shapes: Mapping[fx.Node, Shape],
    dtype: torch.dtype,
    device: str,
    copied_first: Mapping[fx.Node, set[fx.Node]],
) -> fx.GraphModule:
    """The network again: layers with what follows them as one module each, everything else as it was. ``copied_first``: what
    a node changes in place although others read it."""
    modules = dict(traced.named_modules())
    steps = lower(traced, shapes)
    for node in traced.graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        shrinks = node.target == "squeeze" and len(node.args) == 1  # with one image it takes the batch away too
        if node in steps and (shrinks or (isinstance(module, nn.Conv2d) and _left_alone(module, steps[node]))):
            del steps[node]
    kept = {node for node in steps if any(user not in steps for user in node.users)}
    layers = {step.node: step for step in fuse(list(steps.values()), kept) if step.kind in ("conv", "depthwise")}
    result = next(node for node in traced.graph.nodes if node.op == "output")
    wanted, waiting = {result}, [result]
    while waiting:  # what a layer has taken in is not computed any more
        node = waiting.pop()
        more = layers[node].inputs if node in layers else node.all_input_nodes
        waiting += [source for source in more if source not in wanted]
        wanted.update(more)
    graph, made = fx.Graph(), nn.Module()
    new: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op != "placeholder" and node not in wanted:
            continue
        if node in layers:
            name = f"layer{len(list(made.children()))}"
            made.add_module(name, chosen(layers[node], shapes, dtype, device))
            new[node] = graph.call_module(name, tuple(new[source] for source in layers[node].inputs))
            continue
        known = new | {source: graph.call_method("clone", (new[source],)) for source in copied_first.get(node, ())}
        new[node] = graph.node_copy(node, known.__getitem__)
        if node.op == "placeholder" and node in shapes:
            form = torch.channels_last if len(shapes[node]) == 4 else torch.preserve_format
            new[node] = graph.call_method("to", (new[node], dtype), {"memory_format": form})
        elif node.op in ("call_module", "get_attr") and not _has(made, str(node.target)):
            _put(made, str(node.target), traced, dtype, device)
    out = fx.GraphModule(made, graph)
    return out.eval().requires_grad_(False)


def _left_alone(module: nn.Conv2d, step: Step) -> bool:
    """Grouped convolutions, and padding that differs from side to side."""
    odd = any(d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    return (module.groups > 1 and step.kind == "conv") or (module.padding == "same" and odd)


def _has(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


def _put(made: nn.Module, path: str, traced: nn.Module, dtype: torch.dtype, device: str) -> None:
    """Copies a module or a tensor that the graph still needs."""
    *owners, last = path.split(".")
    source: Any = traced
    for owner in owners:
        source = getattr(source, owner)
        if not hasattr(made, owner):
            made.add_module(owner, nn.Module())
        made = getattr(made, owner)
    value = getattr(source, last)
    value = value.to(device)
    if isinstance(value, nn.Module):
        made.add_module(last, value.to(dtype))
    else:
        made.register_buffer(last, value.to(dtype) if value.is_floating_point() else value)


def chosen(step: Step, shapes: Mapping[fx.Node, Shape], dtype: torch.dtype, device: str) -> Layer:
    """The faster of the dense and the sparse layer, with the best tile; measured with inputs of the example's size."""
    shape = shapes[step.node]
    dense = Dense(step, shape, dtype).to(device)
    if not Sparse.fits(step):
        return dense
    sparse = Sparse(step, shape, dtype).to(device)
    if device == "cpu":  # interpreted, for tests
        sparse.tile = Tile(16, 2, 1, 2)
        return sparse
    if sparse.kept.share > DENSE_SHARE:
        return dense
    inputs = [_random(shapes[source], dtype, device) for source in step.inputs]
    best, least = sparse.tile, math.inf
    for tile in TILES:
        if tile.rows > 1 and tile.rows > sparse.kept.rows:
            continue
        sparse.tile = tile
        taken = seconds(sparse, inputs)
        if taken < least:
            best, least = tile, taken
    sparse.tile = best
    sparse.tables = {key: table for key, table in sparse.tables.items() if key[1] == best}
    return sparse if least < seconds(dense, inputs) else dense


def _random(shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    out = torch.randn(shape, dtype=dtype, device=device)
    return out.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else out


def seconds(layer: nn.Module, inputs: Sequence[Tensor], calls: int = 10, repeats: int = 3) -> float:
    """Least seconds of a call on the GPU; launched as a graph, so that Python's share does not count."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            layer(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            layer(*inputs)
    least = math.inf
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        least = min(least, begin.elapsed_time(end) / 1e3 / calls)
    return least
