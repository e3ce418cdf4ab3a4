"""Attention in a graph: how products of two activations treat channels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from .compact_graph import Graph, Known, known, line_of, where_of
from .compact_labels import STAYS
from .compact_rules import add_live, arguments, read, unknown


def contract(graph: Graph, node: fx.Node, a: Known, b: Known, mean: bool) -> Any:
    """A product of two activations, over the last axis of ``a`` and the last but one of ``b``.

    ``mean`` says that the last axis of ``a`` sums to one, so that a constant in ``b`` stays constant.
    """
    rank, meta, where = max(len(a.shape), len(b.shape)), node.meta["val"], where_of(node)
    if len(a.shape) != len(b.shape):
        return unknown(graph, node)
    rows, columns, inner = a.label.shape[-2] > 1, b.label.shape[-1] > 1, max(a.label.shape[-1], b.label.shape[-2]) > 1
    if rows + columns + inner > 1:
        return unknown(graph, node)
    heads = [axis for axis in range(rank - 2) if max(a.label.shape[axis], b.label.shape[axis]) > 1]
    constant = torch.zeros((1,) * rank, dtype=torch.bool)
    value = torch.zeros((1,) * rank, dtype=meta.dtype)
    if inner or not (rows or columns):
        graph.labels.unite(a.label, b.label.transpose(-1, -2), f"{where} multiplies two tensors") if inner else None
        label = torch.full((1,) * rank, STAYS)
        if heads:
            extents = [max(a.label.shape[i], b.label.shape[i]) if i in heads else 1 for i in range(rank)]
            label = graph.labels.fresh(torch.Size(extents).numel()).view(extents)
        graph.reshapes.setdefault(line_of(node), []).extend([a] if inner else [])
    else:
        label = a.label if rows else b.label
        constant, value = (b.constant, b.value) if columns and mean else (_zero(a if rows else b), value)
        label = label.expand(torch.broadcast_shapes(label.shape, *((*x.label.shape[:-2], 1, 1) for x in (a, b))))
    out = known(meta.shape, label, constant, value)
    for axis in heads:
        graph.alike.append([(a, axis), (b, axis), (out, axis)])
    pair = (a, replace(b, **{part: getattr(b, part).transpose(-1, -2) for part in ("label", "constant", "value", "live")}))

    def back() -> None:
        if inner:
            needed = out.live.any(-1, keepdim=True).any(-2, keepdim=True)
            _use_pair(pair, needed)
        else:
            used = out.live & ~out.constant
            add_live(a, used.any(-1, keepdim=True) if columns else used)
            add_live(b, used.any(-2, keepdim=True) if rows else used)

    graph.backward.append(back)
    if inner:
        graph.products.append(lambda: _needed_by_pair(pair, out.live.any(-1, keepdim=True).any(-2, keepdim=True)))
    return out


def _zero(value: Known) -> Tensor:
    return value.constant & value.value.eq(0)


def _use_pair(pair: tuple[Known, Known], needed: Tensor) -> None:
    """Marks the channels of two tensors that are multiplied with each other, except where the other one is zero."""
    for value, other in (pair, pair[::-1]):
        used = needed & ~_zero(other)
        for axis, size in enumerate(value.live.shape):
            if size == 1 and used.shape[axis] > 1:
                used = used.any(axis, keepdim=True)
        value.live |= used.expand(torch.broadcast_shapes(used.shape, value.live.shape))


def _needed_by_pair(pair: tuple[Known, Known], needed: Tensor) -> Tensor:
    """The labels of channels whose product is not zero."""
    label, used = torch.broadcast_tensors(pair[0].label, needed & ~_zero(pair[0]) & ~_zero(pair[1]))
    labels: Tensor = label.masked_select(used)
    return labels


def attention(graph: Graph, node: fx.Node) -> Any:
    """Scaled products of queries and keys, and their softmax times values."""
    args = arguments(node)
    query, key, value = (read(graph, args[name]) for name in ("query", "key", "value"))
    mask = read(graph, args["attn_mask"]) if isinstance(args["attn_mask"], fx.Node) else None
    ranks = {len(x.shape) for x in (query, key, value)}
    lengths = any(x.label.shape[-2] > 1 for x in (query, key, value))
    if len(ranks) > 1 or lengths or args.get("enable_gqa"):
        return unknown(graph, node)
    rank = len(query.shape)
    if mask is not None:
        add_mask(graph, mask, query, f"{where_of(node)} adds a mask to them")
    graph.labels.unite(query.label, key.label, f"{where_of(node)} multiplies two tensors")
    if args.get("scale") is None and max(query.label.shape[-1], key.label.shape[-1]) > 1:  # the scale is that of the width
        for x in (query, key):
            x.keep_positions(rank - 1, torch.ones(x.shape[-1], dtype=torch.bool))
    graph.reshapes.setdefault(line_of(node), []).append(query)
    constant = value.constant  # a mean of equal values
    if mask is not None and node.meta["val"].dtype != args["attn_mask"].meta["val"].dtype:  # a row without any True gives zeros
        constant = constant & (value.value == 0)
    out = known(node.meta["val"].shape, value.label, constant, value.value)
    for axis in range(rank - 2):
        if max(x.label.shape[axis] for x in (query, key, value)) > 1:
            graph.alike.append([(x, axis) for x in (query, key, value, out)])

    def needed() -> Tensor:
        return (out.live & ~out.constant).any(-1, keepdim=True)

    def back() -> None:
        add_live(value, out.live & ~out.constant)
        _use_pair((query, key), needed())
        if mask is not None:
            mask.live.fill_(True)

    graph.backward.append(back)
    graph.products.append(lambda: _needed_by_pair((query, key), needed()))
    return out


def add_mask(graph: Graph, mask: Known, query: Known, reason: str) -> None:
    """A mask that differs from head to head keeps all heads."""
    graph.fix(mask, reason)
    for axis in range(-len(mask.shape), -2):
        if mask.shape[axis] > 1 and query.label.shape[axis] > 1:
            query.keep_positions(axis % len(query.shape), torch.ones(query.shape[axis], dtype=torch.bool))
