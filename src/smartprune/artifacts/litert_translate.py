"""Translates a model into a LiteRT graph, operation by operation, from the graph that ``torch.export`` records."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from .. import text
from ..errors import SmartpruneError
from . import litert_composed, litert_layers, litert_ops
from .decompose import decompose
from .litert_graph import NHWC, Handle, Net, Value, plain_order, unsupported
from .onnx_inputs import Arguments, Batch

RULES = {**litert_layers.RULES, **litert_ops.RULES, **litert_composed.RULES}


def translate(model: nn.Module, arguments: Arguments, batch: Batch, channels_last: bool) -> Net:
    """The graph of a model for inputs of the sizes of ``batch``."""
    program = _record(model, arguments, batch)
    signature = program.graph_signature
    stored: dict[str, Any] = {**program.state_dict, **program.constants}
    net = Net()
    values: dict[str, Any] = {}
    sources = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    names = iter(batch)
    for node in program.graph.nodes:
        net.node = node.name
        if node.op == "placeholder" and node.name in sources:
            values[node.name] = stored[sources[node.name]]
            net.names.setdefault(id(values[node.name]), sources[node.name])
        elif node.op == "placeholder":
            if isinstance(node.meta.get("val"), Tensor):
                values[node.name] = _input(net, next(names), tuple(node.meta["val"].shape), node, channels_last)
            else:
                values[node.name] = node.meta.get("val")
        elif node.op == "call_function":
            values[node.name] = _translate_node(net, node, values)
        elif node.op == "output":
            _outputs(net, signature, values, channels_last)
    return net


def _record(model: nn.Module, arguments: Arguments, batch: Batch) -> Any:
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # the fused operation of a whole layer has no counterpart
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = torch.export.export(model, arguments.positional(batch), arguments.keywords(batch), strict=False)
            return decompose(exported)
    except Exception as error:  # the code of the model and torch.export raise many types of errors
        line = (str(error).strip().splitlines() or [""])[0]
        raise SmartpruneError(
            f"export_litert: torch.export cannot record the model ({type(error).__name__}: {text.escape(line[:200])}); "
            "remove control flow that depends on values of the input"
        ) from error
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _input(net: Net, name: str, shape: tuple[int, ...], node: fx.Node, channels_last: bool) -> Handle:
    order = NHWC if channels_last and len(shape) == 4 else plain_order(len(shape))
    dtype = node.meta["val"].dtype
    if dtype != torch.float32:
        raise SmartpruneError(
            f"export_litert: the input {name} has dtype {str(dtype).removeprefix('torch.')}; it must be "
            "float32: give model.float() and a float32 example"
        )
    value = Value(name, tuple(shape[axis] for axis in order))
    net.inputs.append(value)
    return Handle(value, order, alone=False)


def _translate_node(net: Net, node: fx.Node, values: Mapping[str, Any]) -> Any:
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n.name])
    args, kwargs = arguments
    target: Any = node.target
    if getattr(target, "__name__", "") == "getitem":
        out = _result(node, *args)
    elif not any(isinstance(x, Handle) for x in torch.utils._pytree.tree_leaves((args, kwargs))):
        with torch.no_grad():  # nothing in it depends on an input
            return target(*args, **kwargs)
    else:
        rule = RULES.get(_operation_name(target)) or RULES.get(_operation_name(target).partition(".")[0])
        if rule is None:
            raise _unsupported(node)
        try:
            out = rule(net, *args, **kwargs)
        except (TypeError, AttributeError, ValueError) as error:  # a rule does not have a variant of the operation
            raise SmartpruneError(
                f"export_litert: {_where(node)}: this form of {_operation_name(target)} cannot be exported to LiteRT ({error}); "
                "replace it with a simpler one"
            ) from error
    return _limited(out, alone=len(node.users) == 1)


def _result(node: fx.Node, results: Sequence[Any], place: int) -> Any:
    """One result of an operation with several, which a rule may not have, such as the places of the largest numbers."""
    if place < len(results):
        return results[place]
    source = node.args[0]
    assert isinstance(source, fx.Node)
    name = _operation_name(source.target)
    raise unsupported(_where(source), f"result {place} of {name}", "use its first result alone")


def _limited(out: Any, alone: bool) -> Any:
    """The result of a node. If several nodes read it, none of them may change how it is computed."""
    if isinstance(out, Handle):
        return Handle(out.value, out.order, out.alone and alone)
    return out


def _operation_name(target: Any) -> str:
    """``add`` for aten.add.Tensor, and ``conv2d.padding`` for aten.conv2d.padding: rules may name an overload."""
    return str(target).removeprefix("aten.").removesuffix(".default")


def _where(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    module = str(next(reversed(stack.values()))[0]) if stack else ""
    return f"module {module!r}" if module else node.name


def _unsupported(node: fx.Node) -> SmartpruneError:
    known = sorted({rule.partition(".")[0] for rule in RULES if not rule.startswith("_")})
    return SmartpruneError(
        f"export_litert: {_where(node)} computes {node.target}, which cannot be exported to LiteRT; the operations are: "
        f"{', '.join(known)}; replace it, or export the part of the model before it"
    )


def _outputs(net: Net, signature: Any, values: Mapping[str, Any], channels_last: bool) -> None:
    taken = {value.name for value in net.inputs}
    for i, name in enumerate(signature.user_outputs):
        x = values.get(name) if isinstance(name, str) else None
        if not isinstance(x, Handle):
            raise SmartpruneError(
                "export_litert: an output of the model does not depend on its inputs; return only tensors that are computed from "
                "them"
            )
        net.node = "output"
        order = NHWC if channels_last and len(x.order) == 4 else plain_order(len(x.order))
        value = net.permute(x, order)
        if value in net.outputs or value in net.inputs:  # LiteRT has no output that is an input, or is there twice
            shape = net.constant(np.array(value.shape, np.int32))
            value = net.add("RESHAPE", [value, shape], value.shape, "ReshapeOptions", newShape=list(value.shape))
        value.name = "output" if i == 0 else f"output{i + 1}"
        while value.name in taken:
            value.name += "_"
        taken.add(value.name)
        net.outputs.append(value)
