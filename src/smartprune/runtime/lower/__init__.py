"""From a traced network to steps that the runtime has kernels for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from .context import Context, Handler, constants_of, maps_of_three_axes
from .handlers import FUNCTIONS, METHODS, MODULES
from .moves import move
from .steps import Shape, Step


def lower(traced: fx.GraphModule, shapes: Mapping[fx.Node, Shape], everything: bool = False) -> dict[fx.Node, Step]:
    """A step for every node that has one. ``shapes`` holds the shapes of all float32 tensors.

    ``everything`` includes operations that torch computes as fast, because they only move numbers.
    """
    modules = dict(traced.named_modules())
    context = Context(modules, shapes, set(), maps_of_three_axes(traced.graph, modules, shapes), constants_of(traced, shapes))
    steps: dict[fx.Node, Step] = {}
    for node in traced.graph.nodes:
        if node not in shapes:
            continue
        step = _step_of(context, node)
        if step is None and everything:
            step = move(context, node)
        if step is None or any(source not in shapes for source in step.inputs):
            continue
        if node.op == "call_module":
            step.layer = str(node.target)
        if step.rows:
            context.rows.add(node)
        steps[node] = step
    maps = {source for step in steps.values() if not step.rows and step.kind != "gather" for source in step.inputs}
    maps |= {node for node, step in steps.items() if not step.rows}
    # A value has one layout: a step cannot read as rows what other steps read or write as a map.
    return {node: step for node, step in steps.items() if not maps.intersection(step.rows_values[1:])}


def _step_of(context: Context, node: fx.Node) -> Step | None:
    handler: Handler | None = None
    args: tuple[Any, ...] = node.args
    kwargs = dict(node.kwargs)
    if node.op == "call_module":
        module = context.modules[str(node.target)]
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        if set(kwargs) == {"input"} and not args:
            args = (kwargs.pop("input"),)
        if kwargs:
            return None
        handler, args = MODULES.get(type(module)), (module, *args)
    elif node.op == "call_function":
        handler = FUNCTIONS.get(node.target)
    elif node.op == "call_method":
        handler = METHODS.get(str(node.target))
    if handler is None:
        return None
    try:
        return handler(context, node, *args, **kwargs)
    except (TypeError, ValueError, KeyError, IndexError):  # unexpected arguments: torch runs the node
        return None
