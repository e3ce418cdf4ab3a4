"""Removes chosen channels from the parameters of a model, and adds what they contributed to the layers that read them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.kinds import TRANSPOSED, is_conv1d
from .compact_choose import BIAS, MEAN, NEW, Choice, mean_of
from .compact_graph import Graph


def apply(graph: Graph, choice: Choice, model: nn.Module) -> None:
    """Changes a copy of the model of the graph."""
    tensors = dict(graph.tensors)
    added = _add_constants(graph, choice, tensors)
    groups: dict[str, int] = {}
    resized: dict[str, Tensor] = {}
    for name, axes in graph.weights.items():
        resized[name] = _smaller_weight(graph, choice, name, axes, tensors[name], groups)
    for name, form in graph.forms.items():
        tensor = tensors[name]
        for axis, slab in choice.slabs.get(id(form), {}).items():
            tensor = tensor.index_select(axis, (~slab).nonzero().flatten()) if tensor.dim() > 1 else tensor
        if tensor.dim() > 1:
            resized[name] = tensor
    _store(graph, model, resized, added, choice)
    for name, module in model.named_modules():
        _state_sizes(module, groups.get(f"{name}.weight" if name else "weight"))
        if name in graph.widths and isinstance(module, nn.modules.batchnorm._NormBase):
            module.num_features = int((~choice.of(graph.widths[name])).sum())


def _add_constants(graph: Graph, choice: Choice, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Changes tensors for the constants that are removed. Returns new biases, by the name of the weight."""
    new: dict[str, Tensor] = {}
    shifted = set[str]()  # biases of layers that the model runs several times
    done: dict[str, set[int]] = {}  # their merged channels: one call may merge others than the next
    for index, reader in enumerate(graph.readers):
        gone = choice.of(reader.label) & reader.constant
        weight = graph.tensors[reader.weight]
        before = done.setdefault(reader.weight, set())
        merged = {k: v for k, v in choice.merged.get(index, {}).items() if bool(gone[k]) and k not in before}
        if merged:
            before.update(merged)
            changed = tensors[reader.weight].clone()
            for channel, carrier in merged.items():
                factor = reader.value[channel] / reader.value[carrier]
                reader.kernels(changed, carrier).add_(reader.kernels(weight, channel) * factor)
            tensors[reader.weight] = changed
        target = choice.targets[index]
        value = torch.where(gone, reader.value, torch.zeros_like(reader.value))
        if target is None or not bool(value.any()):
            continue
        shift = reader.response(weight, value).to(weight.dtype)
        if target == BIAS and reader.bias is not None:
            tensors[reader.bias] = tensors[reader.bias] + shift * (reader.bias not in shifted)
            shifted.add(reader.bias)
        elif target == MEAN:
            mean = mean_of(graph, reader)
            tensors[mean] = tensors[mean] - shift
        elif target == NEW:
            outputs = graph.weights[reader.weight][reader.out_axis]
            new[reader.weight] = shift[~choice.of(outputs)]
    return new


def _smaller_weight(
    graph: Graph, choice: Choice, name: str, axes: dict[int, Tensor], tensor: Tensor, groups: dict[str, int]
) -> Tensor:
    if name in graph.groups and tensor.dim() > 1:
        count, label = graph.groups[name]
        gone = choice.of(label).view(count, -1)
        groups[name] = int((~gone).any(1).sum())
        if gone.shape[1] > 1:
            columns = (~gone).repeat_interleave(tensor.shape[0] // count, 0)
            rows = ~choice.of(axes[0])
            kept = [row[mask] for row, mask in zip(tensor[rows], columns[rows], strict=True)]
            return torch.stack(kept)
    for axis, labels in axes.items():
        tensor = tensor.index_select(axis, (~choice.of(labels)).nonzero().flatten())
    return tensor


def _store(graph: Graph, model: nn.Module, resized: dict[str, Tensor], added: dict[str, Tensor], choice: Choice) -> None:
    new: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for stored in (module._parameters, module._buffers):
            for attribute, old in list(stored.items()):
                name = graph.aliases.get(f"{prefix}.{attribute}" if prefix else attribute)
                if old is None or name not in resized:
                    continue
                if name not in new:
                    data = resized[name].to(old.dtype).contiguous().clone()
                    new[name] = nn.Parameter(data, old.requires_grad) if isinstance(old, nn.Parameter) else data
                stored[attribute] = new[name]
    for name, bias in added.items():
        owner = model.get_submodule(name.rpartition(".")[0])
        weight = owner._parameters["weight"]
        assert weight is not None
        owner._parameters["bias"] = nn.Parameter(bias.to(weight.dtype), weight.requires_grad)


def _state_sizes(module: nn.Module, groups: int | None) -> None:
    """Corrects the sizes that a module stores next to its parameters."""
    for attribute, size in _sizes(module, groups).items():
        setattr(module, attribute, size)


def _sizes(module: nn.Module, groups: int | None) -> dict[str, int]:
    weight = module._parameters.get("weight")
    if isinstance(module, nn.modules.batchnorm._NormBase):
        vector = weight if weight is not None else module._buffers.get("running_mean")
        return {} if vector is None else {"num_features": len(vector)}
    if weight is None:
        return {}
    first, second = weight.shape[0], weight.shape[-1] if weight.dim() == 1 else weight.shape[1]
    if isinstance(module, nn.Linear):
        return {"out_features": first, "in_features": second}
    if isinstance(module, nn.modules.conv._ConvNd):
        count = module.groups if groups is None else groups
        channels = (first, second * count) if isinstance(module, TRANSPOSED) else (second * count, first)
        return {"groups": count, "in_channels": channels[0], "out_channels": channels[1]}
    if is_conv1d(module):
        return {"nx": first, "nf": second}
    if isinstance(module, nn.Embedding):
        return {"embedding_dim": second}
    return {"num_parameters": first} if isinstance(module, nn.PReLU) else {}
