"""Converting a network for a GPU: its layers become dense or sparse ones, whichever is faster when the model is built."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...errors import SmartpruneError
from ..lower import lower
from ..lower.fuse import fuse
from ..lower.one_dimension import maps_of_three_axes
from ..lower.steps import Shape, Step
from ..module import Options, clone_tensors, inference_copy
from ..trace.inplace import UnsafeInPlace
from ..trace.inputs import as_float32
from ..trace.tracer import Recorder, iter_tensors, trace
from .layers import TILES, Dense, Layer, Sparse, Tile

DENSE_SHARE = 0.5  # layers that keep more than this share of their blocks stay dense
TOLERANCE = {torch.float32: 2e-2, torch.bfloat16: 8e-2, torch.float16: 3e-2}  # as a share of the largest number of a result
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def on_gpu(model: nn.Module, inputs: Sequence[tuple[Any, ...]], options: Options, device: str = "cuda") -> nn.Module:
    """The model for a GPU: a graph module whose convolutions and linear layers are :class:`Dense` or :class:`Sparse`."""
    _check_settings(inputs, options, device)
    dtype, copied = DTYPES[options.dtype], inference_copy(model).to(device)
    values = [as_float32(v).to(device) if isinstance(v, Tensor) else v for v in inputs[0]]
    try:
        traced, _ = trace(copied)
    except Exception as error:  # model code may raise anything when it gets a symbol instead of a tensor
        raise SmartpruneError(
            f"accelerate: torch.fx cannot trace the model, and a GPU needs that ({type(error).__name__}: {error}); use device='cpu'"
        ) from error
    with torch.no_grad():
        recorder = Recorder(traced)
        expected = recorder.run(*clone_tensors(values))
        try:
            required_copies = recorder.aliases.required_copies(traced.graph)
        except UnsafeInPlace as error:
            raise SmartpruneError(f"accelerate: {error}, which is not supported on a GPU; use device='cpu'") from error
        out = convert(traced.cpu(), recorder.shapes, dtype, device, required_copies)
        _check_result(out(*values), expected, dtype, options.dtype)
    return out


def _check_settings(inputs: Sequence[tuple[Any, ...]], options: Options, device: str) -> None:
    if options.dtype not in DTYPES:
        raise SmartpruneError(f"accelerate: dtype={options.dtype!r} on a GPU; it is one of {', '.join(DTYPES)}")
    if not inputs:
        raise SmartpruneError("accelerate: a GPU needs example=, an input of typical size, to time the layers")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise SmartpruneError(f"accelerate: device={device!r}, but torch finds no CUDA device here; use device='cpu'")
        if importlib.util.find_spec("triton") is None:
            raise SmartpruneError(
                f"accelerate: device={device!r} needs Triton; install a build of torch for CUDA, which includes it"
            )


def _check_result(result: Any, expected: Any, dtype: torch.dtype, name: str) -> None:
    for output, reference in zip(iter_tensors(result), iter_tensors(expected), strict=True):
        if reference.is_floating_point() and reference.numel():
            error, scale = float((output.float() - reference).abs().max()), float(reference.abs().max())
            if not error <= TOLERANCE[dtype] * max(scale, 1e-6):
                raise SmartpruneError(
                    f"accelerate: the result differs from the model's own by up to {error:g}, and the model's largest number is "
                    f"{scale:g}; if its numbers do not fit {name}, use float32"
                )


def convert(
    traced: fx.GraphModule,
    shapes: Mapping[fx.Node, Shape],
    dtype: torch.dtype,
    device: str,
    required_copies: Mapping[fx.Node, set[fx.Node]],
) -> fx.GraphModule:
    """The network with one module for every layer and what follows it; everything else stays. ``required_copies`` holds the
    arguments that must be cloned before a node changes them in place."""
    layers, needed = _layers_of(traced, shapes)
    graph, root = fx.Graph(), nn.Module()
    new: dict[fx.Node, fx.Node] = {}
    for node in traced.graph.nodes:
        if node.op != "placeholder" and node not in needed:
            continue
        if node in layers:
            name = f"layer{len(list(root.children()))}"
            root.add_module(name, choose_layer(layers[node], shapes, dtype, device))
            new[node] = graph.call_module(name, tuple(new[source] for source in layers[node].inputs))
            continue
        sources = new | {source: graph.call_method("clone", (new[source],)) for source in required_copies.get(node, ())}
        new[node] = graph.node_copy(node, sources.__getitem__)
        if node.op == "placeholder" and node in shapes:
            memory_format = torch.channels_last if len(shapes[node]) == 4 else torch.preserve_format
            new[node] = graph.call_method("to", (new[node], dtype), {"memory_format": memory_format})
        elif node.op in ("call_module", "get_attr") and not _has_attribute(root, str(node.target)):
            _copy_attribute(root, str(node.target), traced, dtype, device)
    out = fx.GraphModule(root, graph)
    return out.eval().requires_grad_(False)


def _layers_of(traced: fx.GraphModule, shapes: Mapping[fx.Node, Shape]) -> tuple[dict[fx.Node, Step], set[fx.Node]]:
    """The steps that become layers, and the nodes that are still needed besides what they absorb."""
    modules = dict(traced.named_modules())
    steps, sequences = lower(traced, shapes), maps_of_three_axes(traced.graph, modules, shapes)
    for node in traced.graph.nodes:
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        squeezes = node.target == "squeeze" and len(node.args) == 1  # with one image it removes the batch axis too
        if node in steps and (
            squeezes
            or sequences.intersection((node, *steps[node].inputs))
            or (isinstance(module, nn.Conv2d) and _is_unsupported(module, steps[node]))
        ):
            del steps[node]
    kept = {node for node in steps if any(user not in steps for user in node.users)}
    layers = {step.node: step for step in fuse(list(steps.values()), kept) if step.kind in ("conv", "depthwise")}
    result = next(node for node in traced.graph.nodes if node.op == "output")
    needed, waiting = {result}, [result]
    while waiting:
        node = waiting.pop()
        sources = layers[node].inputs if node in layers else node.all_input_nodes
        waiting += [source for source in sources if source not in needed]
        needed.update(sources)
    return layers, needed


def _is_unsupported(module: nn.Conv2d, step: Step) -> bool:
    """Grouped convolutions, and padding that differs between sides, stay as they are."""
    is_odd = any(d * (k - 1) % 2 for d, k in zip(module.dilation, module.kernel_size, strict=True))
    return (module.groups > 1 and step.kind == "conv") or (module.padding == "same" and is_odd)


def _has_attribute(module: nn.Module, path: str) -> bool:
    for part in path.split("."):
        if not hasattr(module, part):
            return False
        module = getattr(module, part)
    return True


def _copy_attribute(root: nn.Module, path: str, traced: nn.Module, dtype: torch.dtype, device: str) -> None:
    """Copies a module or a tensor that the new graph needs."""
    *owners, last = path.split(".")
    source: Any = traced
    for owner in owners:
        source = getattr(source, owner)
        if not hasattr(root, owner):
            root.add_module(owner, nn.Module())
        root = getattr(root, owner)
    value = getattr(source, last).to(device)
    if isinstance(value, nn.Module):
        root.add_module(last, value.to(dtype))
    else:
        root.register_buffer(last, value.to(dtype) if value.is_floating_point() else value)


def choose_layer(step: Step, shapes: Mapping[fx.Node, Shape], dtype: torch.dtype, device: str) -> Layer:
    """The faster one of the dense and the sparse layer, timed with inputs of the example's size; the latter with its best tile."""
    shape = shapes[step.node]
    dense = Dense(step, shape, dtype).to(device)
    if not Sparse.fits(step):
        return dense
    sparse = Sparse(step, shape, dtype).to(device)
    if device == "cpu":  # interpreted, in tests
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
        time = seconds_per_call(sparse, inputs)
        if time < least:
            best, least = tile, time
    sparse.tile = best
    sparse.tables = {key: table for key, table in sparse.tables.items() if key[1] == best}
    return sparse if least < seconds_per_call(dense, inputs) else dense


def _random(shape: Shape, dtype: torch.dtype, device: str) -> Tensor:
    out = torch.randn(shape, dtype=dtype, device=device)
    return out.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else out


def seconds_per_call(layer: nn.Module, inputs: Sequence[Tensor], calls: int = 10, repeats: int = 3) -> float:
    """The least time of a call on the GPU, in a CUDA graph, so that the time of Python does not count."""
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
