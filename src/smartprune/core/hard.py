"""Hard selection: exactly the k best blocks, or the best blocks that a cost limit allows. Also the checks shared with soft_topk."""

import math
import numbers
from collections.abc import Callable
from fractions import Fraction
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor

from ..errors import SmartpruneError
from .device import require_float64
from .memory import check_memory

TAU_RANGE = (1e-30, 1e30)
ERRORS = {  # by bit of the error code that a device kernel returns
    1: "scores hold NaN or infinity; scores must be finite: lower their learning rate or clip their gradient",
    2: f"tau is outside [{TAU_RANGE[0]:g}, {TAU_RANGE[1]:g}] or NaN; give a positive temperature",
    4: "k is outside [0, sum(cost)] or NaN; give the number (or the cost) to keep",
    8: "cost holds a negative number, NaN or infinity; costs must be finite and >= 0: correct the cost of those blocks",
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def describe_tensor(value: Tensor) -> str:
    """Dtype, shape and device as text, such as ``float32 [3] on cpu``."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device}"


def check_vectors(where: str, scores: Tensor, cost: Tensor | None) -> None:
    """Raises unless scores are one floating-point vector, and cost is None or a real vector of the same shape and device."""
    for name, value in (("scores", scores), ("cost", cost)):
        if not isinstance(value, Tensor) and (name == "scores" or value is not None):
            raise SmartpruneError(f"{where}: {name} is a {type(value).__name__}; give a tensor, torch.as_tensor({name})")
    if scores.dim() != 1 or scores.dtype not in DTYPES or scores.numel() == 0:
        raise SmartpruneError(
            f"{where}: scores are {describe_tensor(scores)}; they must be one non-empty vector of float64, float32, bfloat16 or "
            "float16: flatten the scores of all layers into it"
        )
    if cost is not None and (cost.shape != scores.shape or cost.device != scores.device or cost.is_complex()):
        raise SmartpruneError(
            f"{where}: cost is {describe_tensor(cost)}; it must be real, {list(scores.shape)} and on {scores.device}, "
            "one cost per score"
        )
    if not torch.compiler.is_compiling():
        for value in (scores, cost):
            if value is not None:
                check_memory(value, where)


def as_fraction(value: Any) -> Fraction:
    """The short fraction that a number stands for: 0.97 is 97/100, not the nearest binary number, and 1 / 3 is a third.

    >>> as_fraction(0.97), as_fraction(1 / 3)
    (Fraction(97, 100), Fraction(1, 3))
    """
    exact = value if isinstance(value, Fraction) else Fraction(str(value))
    near = exact.limit_denominator(10**9)
    return near if float(near) == float(value) else exact


def hard_topk(
    scores: Tensor,
    k: float,
    cost: Tensor | None = None,
    floor: float | Tensor | None = None,
    layer: Tensor | None = None,
) -> Tensor:
    """The hard mask of the highest scores: exactly k blocks, or with costs, blocks that cost at most k.

    Equal scores go to the lower index. With costs, the total never exceeds k, and every block that is left out costs more than
    what remains of k. Integer costs, and costs with a short binary fraction, are added exactly; others are added in float64.

    Args:
        scores: A vector [N] of floating-point numbers.
        k: The number of blocks to keep, or what they may cost.
        cost: The cost of each block, [N], at least 0.
        floor: Blocks that each layer keeps before the ranking becomes global: a share in [0, 1], rounded up per layer in exact
            arithmetic, or an integer tensor [layers] of counts. Needs ``layer``.
        layer: The layer of each block, [N].

    Returns:
        A bool tensor [N].

    Raises:
        SmartpruneError: Scores or costs are not finite or of the wrong shape, or k or the floor cannot be met.

    Examples:
        >>> import smartprune as sp
        >>> scores = torch.tensor([5.0, 4.0, 3.0, 3.0])
        >>> sp.hard_topk(scores, 3)
        tensor([ True,  True,  True, False])
        >>> sp.hard_topk(scores, 2, layer=torch.tensor([0, 0, 1, 1]), floor=0.5)
        tensor([ True, False,  True, False])
        >>> sp.hard_topk(scores, 6, cost=torch.tensor([4, 3, 2, 1]))
        tensor([ True, False,  True, False])
    """
    check_vectors("hard_topk", scores, cost)
    scores, n = scores.detach(), scores.numel()
    if not bool(torch.isfinite(scores).all()):
        raise SmartpruneError(f"hard_topk: {ERRORS[1]}")
    limit = k.item() if isinstance(k, Tensor) and k.numel() == 1 else k
    if isinstance(limit, bool) or not isinstance(limit, numbers.Real) or math.isnan(limit):
        raise SmartpruneError(f"hard_topk: k={k!r} is not a number; give the number (or the cost) of blocks to keep")
    forced = floor_blocks(scores, floor, layer)
    if cost is not None:
        return _within_cost(scores, limit, cost, forced, floor, layer)
    if not math.isfinite(limit) or limit != int(limit) or not 0 <= limit <= n:
        raise SmartpruneError(f"hard_topk: k={limit!r} is not an integer in [0, {n}]; give the number to keep")
    least = int(forced.sum())
    if least > limit:
        raise SmartpruneError(
            f"hard_topk: floor={_show_floor(floor)} keeps {least} blocks but k={limit!r}; lower floor or keep at least {least}"
        )
    return forced | _best(scores.masked_fill(forced, -math.inf), int(limit) - least)


def _within_cost(
    scores: Tensor, limit: float, cost: Tensor, forced: Tensor, floor: float | Tensor | None, layer: Tensor | None
) -> Tensor:
    """The forced blocks, and then the best blocks that fit into the rest of the limit."""
    if not bool(torch.isfinite(cost).all()) or float(cost.min()) < 0:
        raise SmartpruneError(f"hard_topk: {ERRORS[8]}")
    if limit < 0:
        raise SmartpruneError(f"hard_topk: k={limit!r} is negative; give the cost that may be spent")
    price, room, unit = _exact(cost, limit)
    spent = price[forced].sum().item()
    if spent > room and layer is not None:
        forced = _cheaper(forced, scores, price, room, layer.to(scores.device))
        spent = price[forced].sum().item()
    if spent > room:
        raise SmartpruneError(
            f"hard_topk: floor={_show_floor(floor)} costs {spent / unit:g} but k={limit!r}; "
            f"lower floor or spend at least {spent / unit:g}"
        )
    room -= spent
    order = scores.masked_fill(forced, math.inf).sort(descending=True, stable=True).indices[int(forced.sum()) :]
    mask = forced.clone()
    # A block that does not fit now never fits later; every round drops at least one distinct cost.
    while True:
        order = order[price[order] <= room]
        if order.numel() == 0:
            return mask
        running = _running_sum(price[order])
        taken = int((running <= room).sum())
        mask[order[:taken]] = True
        room -= running[taken - 1].item()
        order = order[taken:]


def _running_sum(prices: Tensor) -> Tensor:
    """The cumulative sum. A GPU adds floats in a different order every time, and raises in deterministic mode: use the CPU."""
    if prices.is_floating_point():
        return prices.cpu().cumsum(0).to(prices.device)
    return prices.cumsum(0)


def _best(scores: Tensor, k: int) -> Tensor:
    """The k highest scores, the first of equal ones."""
    if k == 0:
        return torch.zeros_like(scores, dtype=torch.bool)
    last = scores.topk(k).values[-1]
    mask = scores > last
    tied = (scores == last).nonzero().squeeze(1)
    mask[tied[: k - int(mask.sum())]] = True
    return mask


def best_prefix(cost: Callable[[Tensor], int], limit: int, rank: Tensor, forced: Tensor) -> Tensor | None:
    """The blocks ``forced`` and the highest ranked others, as many as a cost allows that grows with every block, bool [N].

    Equal ranks go to the lower index. None if the forced blocks alone cost more than the limit.
    """
    order = rank.masked_fill(forced, torch.inf).sort(descending=True, stable=True).indices

    def first(count: int) -> Tensor:
        mask = torch.zeros_like(forced)
        mask[order[:count]] = True
        return mask

    fits, exceeds = int(forced.sum()), rank.numel() + 1
    if cost(forced) > limit:
        return None
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        if middle <= rank.numel() and cost(first(middle)) <= limit:
            fits = middle
        else:
            exceeds = middle
    return first(fits)


def floor_blocks(scores: Tensor, floor: float | Tensor | None, layer: Tensor | None) -> Tensor:
    """The blocks that a floor keeps: the best of every layer, bool [N]."""
    forced = torch.zeros_like(scores, dtype=torch.bool)
    if floor is None:
        return forced
    if not isinstance(layer, Tensor) or layer.shape != scores.shape or layer.is_floating_point() or int(layer.min()) < 0:
        kind = "missing" if layer is None else describe_tensor(layer) if isinstance(layer, Tensor) else f"a {type(layer).__name__}"
        raise SmartpruneError(
            f"hard_topk: floor={_show_floor(floor)} but layer is {kind}; floor needs layer, {list(scores.shape)} integers "
            ">= 0 that give the layer of each block"
        )
    layer = layer.to(scores.device, torch.long)
    sizes = torch.bincount(layer)
    least = _floor_counts(floor, sizes)
    order = scores.sort(descending=True, stable=True).indices
    order = order[layer[order].sort(stable=True).indices]
    first = sizes.cumsum(0) - sizes
    sorted_layer = layer[order]
    rank = torch.arange(order.numel(), device=scores.device) - first[sorted_layer]
    forced[order] = rank < least[sorted_layer]
    return forced


def _floor_counts(floor: float | Tensor, sizes: Tensor) -> Tensor:
    """The fewest blocks that a floor keeps in each layer, int64 [number of layers]."""
    if not isinstance(floor, Tensor):
        if isinstance(floor, bool) or not isinstance(floor, numbers.Real) or not 0 <= floor <= 1:
            raise SmartpruneError(f"hard_topk: floor={floor!r} is outside [0, 1]; give a share such as 0.02")
        share = as_fraction(floor)  # 0.02 * 150 is more than 3 in binary
        return torch.tensor([math.ceil(share * size) for size in sizes.tolist()], dtype=torch.long, device=sizes.device)
    if floor.is_floating_point() or floor.dim() != 1 or floor.numel() < sizes.numel() or bool((floor < 0).any()):
        raise SmartpruneError(
            f"hard_topk: floor is {describe_tensor(floor)}; it must be one count >= 0 for each of the {sizes.numel()} layers"
        )
    least = floor.to(sizes.device, torch.long)[: sizes.numel()]
    if bool((least > sizes).any()):
        worst = int((least - sizes).argmax())
        raise SmartpruneError(
            f"hard_topk: floor asks for {int(least[worst])} blocks of layer {worst}, which has "
            f"{int(sizes[worst])}; lower it to at most that"
        )
    return least


# A heap per price of (key, -index): for kept blocks the key is the score, for the others it is the negative score. So the top of a
# heap is the block to drop, or the block to add.
_Heaps = dict[float, list[tuple[float, int]]]


def _cheaper(forced: Tensor, scores: Tensor, price: Tensor, room: float, layer: Tensor) -> Tensor:
    """Exchanges forced blocks for cheaper ones of the same layer until all fit into ``room``, or no exchange is left.

    Every exchange is the one that loses the least score for the cost that it saves.
    """
    out, spent = forced.clone(), price[forced].sum().item()
    values, prices, kept = scores.double().tolist(), price.tolist(), forced.tolist()
    heaps: dict[int, tuple[_Heaps, _Heaps]] = {index: ({}, {}) for index in layer[forced].unique().tolist()}  # (dropped, kept)
    for i, index in enumerate(layer.tolist()):
        if index in heaps:
            heaps[index][kept[i]].setdefault(prices[i], []).append((values[i] if kept[i] else -values[i], -i))
    for sides in heaps.values():
        for side in sides:
            for heap in side.values():
                heapify(heap)
    exchanges = [exchange for index in heaps if (exchange := _best_exchange(index, *heaps[index])) is not None]
    heapify(exchanges)
    while spent > room and exchanges:
        _, old, new, index = heappop(exchanges)
        outside, inside = heaps[index]
        heappop(inside[prices[old]])
        heappop(outside[prices[new]])
        heappush(inside.setdefault(prices[new], []), (values[new], -new))
        heappush(outside.setdefault(prices[old], []), (-values[old], -old))
        out[old], out[new] = False, True
        spent += prices[new] - prices[old]
        if (exchange := _best_exchange(index, outside, inside)) is not None:
            heappush(exchanges, exchange)
    return out


def _best_exchange(layer: int, outside: _Heaps, inside: _Heaps) -> tuple[float, int, int, int] | None:
    """The best exchange in one layer: (score lost per cost saved, block to drop, block to add, layer)."""
    pairs = ((d, c) for d, kept in inside.items() if kept for c, dropped in outside.items() if dropped and c < d)
    tops = ((inside[d][0], outside[c][0], d - c) for d, c in pairs)
    return min((((a[0] + b[0]) / saved, -a[1], -b[1], layer) for a, b, saved in tops), default=None)


def _show_floor(floor: float | Tensor | None) -> str:
    return str(floor.tolist()) if isinstance(floor, Tensor) else repr(floor)


def _exact(cost: Tensor, limit: float) -> tuple[Tensor, float, float]:
    """Costs and limit as integers in a common unit of 2^-bits if there is one, so that sums are exact; and 2^bits."""
    require_float64(cost.device, "hard_topk", "move scores and costs to the CPU, or to a CUDA device")
    if float(cost.double().sum()) >= 2.0**62 and not cost.is_floating_point():
        raise SmartpruneError(
            f"hard_topk: the costs add up to {float(cost.double().sum()):.3g}, more than 2**62; use a larger unit"
        )
    if not cost.is_floating_point():
        price, top = cost.long(), int(cost.sum())
        return price, min(math.floor(limit) if math.isfinite(limit) else top, top), 1.0
    wide = cost.double()
    # a limit that equals the sum of all costs, added in their own precision, allows all of them
    slack = min(torch.finfo(cost.dtype).eps, 2.0**-23) * (2 + cost.numel().bit_length())
    limit = math.inf if limit >= float(wide.sum()) * (1 - slack) else limit
    for bits in (0, 8, 16, 24, 32):
        scaled = wide * 2.0**bits
        if float(scaled.sum()) >= 2.0**62:
            break
        if bool((scaled == scaled.round()).all()):
            price = scaled.long()
            top = int(price.sum())
            return price, min(math.floor(Fraction(limit) * 2**bits) if math.isfinite(limit) else top, top), 2.0**bits
    return wide, limit, 1.0
