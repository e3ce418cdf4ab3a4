"""The YOLOv5 loss: values and gradients against a slow loop, and no synchronization with the device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from smartprune.models.yolov5m import ANCHORS, STRIDES
from smartprune.tasks import yolo_loss as module
from smartprune.tasks.boxes import iou, to_corners
from smartprune.tasks.yolo_loss import assign, ciou, yolo_distance, yolo_loss

SIZE = 64
anchors = torch.tensor(ANCHORS, dtype=torch.float64)


def raw_maps(batch: int, classes: int, seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [
        torch.randn(batch, 3, SIZE // stride, SIZE // stride, 5 + classes, generator=rng, dtype=torch.float64) for stride in STRIDES
    ]


def some_targets(batch: int, classes: int, seed: int = 0, count: int = 6) -> Tensor:
    """Random boxes, some of them unused, two in one cell, and one on the corner of the image."""
    rng = torch.Generator().manual_seed(seed)
    out = torch.zeros(batch, count, 5, dtype=torch.float64)
    out[..., 0] = torch.randint(-1, classes, (batch, count), generator=rng)
    out[..., 1:3] = SIZE * torch.rand(batch, count, 2, generator=rng, dtype=torch.float64)
    out[..., 3:] = 3 + 60 * torch.rand(batch, count, 2, generator=rng, dtype=torch.float64) ** 2
    out[0, 0] = torch.tensor([0, 20.5, 20.5, 14, 15])
    out[0, 1] = torch.tensor([classes - 1, 20.4, 20.9, 16, 12])
    out[0, 2] = torch.tensor([0, SIZE, 0, 10, 10])  # its center is a corner of the image
    return out


def slow_pairs(shape: tuple[int, int], target: list[float], sides: list[list[float]], stride: float) -> list[tuple[int, int, int]]:
    """(anchor, row, column) of every cell that an object is assigned to: its own, and neighbors within half a cell."""
    label, cx, cy, w, h = target
    if label < 0:
        return []
    rows, columns = shape
    x, y = cx / stride, cy / stride
    cells = [(int(y), int(x))]
    if x % 1 < 0.5 and x > 1:
        cells.append((int(y), int(x - 0.5)))
    if y % 1 < 0.5 and y > 1:
        cells.append((int(y - 0.5), int(x)))
    if (columns - x) % 1 < 0.5 and columns - x > 1:
        cells.append((int(y), int(x + 0.5)))
    if (rows - y) % 1 < 0.5 and rows - y > 1:
        cells.append((int(y + 0.5), int(x)))
    fitting = [a for a, (aw, ah) in enumerate(sides) if max(w / aw, aw / w, h / ah, ah / h) < 4]
    return [(a, min(row, rows - 1), min(column, columns - 1)) for a in fitting for row, column in cells]


def slow_loss(maps: list[Tensor], targets: Tensor, fixed: list[Any] | None = None) -> tuple[Tensor, list[Any]]:
    """Loops over objects, anchors and cells. ``fixed`` holds the values without gradient from another point."""
    total, notes = torch.zeros((), dtype=torch.float64), []
    for level, raw in enumerate(maps):
        rows, columns, classes, stride = raw.shape[2], raw.shape[3], raw.shape[4] - 5, SIZE / raw.shape[3]
        boxes, labels, weights = [], [], []
        wanted = torch.zeros(raw.shape[:4], dtype=torch.float64)
        for picture in range(len(raw)):
            for target in targets[picture].tolist():
                for a, row, column in slow_pairs((rows, columns), target, anchors[level].tolist(), stride):
                    out = raw[picture, a, row, column]
                    s = out[:4].sigmoid()
                    px, py = (2 * s[0] - 0.5 + column) * stride, (2 * s[1] - 0.5 + row) * stride
                    pw, ph = (2 * s[2]) ** 2 * anchors[level, a, 0], (2 * s[3]) ** 2 * anchors[level, a, 1]
                    _, cx, cy, w, h = target
                    wide = torch.minimum(px + pw / 2, torch.tensor(cx + w / 2)) - torch.maximum(
                        px - pw / 2, torch.tensor(cx - w / 2)
                    )
                    high = torch.minimum(py + ph / 2, torch.tensor(cy + h / 2)) - torch.maximum(
                        py - ph / 2, torch.tensor(cy - h / 2)
                    )
                    both = wide.clamp(min=0) * high.clamp(min=0)
                    share = both / (pw * ph + w * h - both)
                    around = [
                        torch.maximum(p + q / 2, torch.tensor(c + d / 2)) - torch.minimum(p - q / 2, torch.tensor(c - d / 2))
                        for p, q, c, d in ((px, pw, cx, w), (py, ph, cy, h))
                    ]
                    apart = ((px - cx) ** 2 + (py - cy) ** 2) / (around[0] ** 2 + around[1] ** 2)
                    shape = (4 / math.pi**2) * (math.atan(w / h) - torch.atan(pw / ph)) ** 2
                    weight = (shape / (1 - share + shape)).detach() if fixed is None else fixed[level][0][len(weights)]
                    weights.append(weight)
                    value = share - apart - weight * shape
                    boxes.append(1 - value)
                    wanted[picture, a, row, column] = max(float(wanted[picture, a, row, column]), float(value.detach()), 0.0)
                    one_hot = F.one_hot(torch.tensor(int(target[0])), classes).double()
                    labels.append(F.binary_cross_entropy_with_logits(out[5:], one_hot))
        wanted = wanted if fixed is None else fixed[level][1]
        notes.append((weights, wanted))
        balance = (4.0, 1.0, 0.4)[level]
        total = total + balance * (SIZE / 640) ** 2 * F.binary_cross_entropy_with_logits(raw[..., 4], wanted)
        if boxes:
            total = total + 0.05 * sum(boxes, torch.zeros(())) / len(boxes)
            if classes > 1:
                total = total + 0.5 * classes / 80 * sum(labels, torch.zeros(())) / len(labels)
    return 64 * total, notes


@pytest.mark.parametrize(("classes", "seed"), [(1, 0), (4, 1), (20, 2)])
def test_loss_and_gradients_match_a_slow_loop(classes: int, seed: int) -> None:
    fast = [raw.requires_grad_() for raw in raw_maps(3, classes, seed)]
    slow = [raw.requires_grad_() for raw in raw_maps(3, classes, seed)]
    targets = some_targets(3, classes, seed)
    value, (wanted, _) = yolo_loss(fast, targets, anchors, SIZE), slow_loss(slow, targets)
    assert float(value.detach()) == pytest.approx(float(wanted.detach()), rel=1e-6)
    value.backward()  # type: ignore[no-untyped-call]
    wanted.backward()  # type: ignore[no-untyped-call]
    for a, b in zip(fast, slow, strict=True):
        assert a.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-8)
        assert float(a.grad[..., :4].abs().sum()) > 0


def test_gradients_match_finite_differences() -> None:
    maps, targets = [raw.requires_grad_() for raw in raw_maps(2, 3, 5)], some_targets(2, 3, 5)
    yolo_loss(maps, targets, anchors, SIZE).backward()  # type: ignore[no-untyped-call]
    _, fixed = slow_loss(maps, targets)
    for raw in maps:
        assert raw.grad is not None
        for place in raw.grad.abs().flatten().topk(4).indices.tolist():
            with torch.no_grad():
                values = []
                for step in (1e-5, -2e-5):
                    raw.view(-1)[place] += step
                    values.append(float(slow_loss(maps, targets, fixed)[0]))
                raw.view(-1)[place] += 1e-5
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(raw.grad.flatten()[place]), rel=1e-4)


def test_images_without_assigned_objects_train_only_objectness() -> None:
    maps = [raw.requires_grad_() for raw in raw_maps(2, 3)]
    nothing = torch.full((2, 4, 5), -1.0, dtype=torch.float64)
    nothing[0, 0] = torch.tensor([1, 30, 30, 2000, 2000])
    value = yolo_loss(maps, nothing, anchors, SIZE)
    assert float(value.detach()) == pytest.approx(float(slow_loss(maps, nothing)[0].detach()), rel=1e-9)
    value.backward()  # type: ignore[no-untyped-call]
    for raw in maps:
        assert raw.grad is not None
        assert bool(raw.grad.isfinite().all())
        assert float(raw.grad[..., :4].abs().sum() + raw.grad[..., 5:].abs().sum()) == 0
        assert float(raw.grad[..., 4].min()) > 0  # lowers the objectness everywhere


def test_training_lowers_the_loss_and_padding_does_not_count() -> None:
    targets = some_targets(2, 3, 1)
    maps = [raw.requires_grad_() for raw in raw_maps(2, 3)]
    optimizer = torch.optim.Adam(maps, 0.2)
    first = float(yolo_loss(maps, targets, anchors, SIZE).detach())
    for _ in range(150):
        optimizer.zero_grad()
        loss = yolo_loss(maps, targets, anchors, SIZE)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert float(loss.detach()) < 0.25 * first
    padded = torch.cat([targets, torch.full((2, 30, 5), -1.0, dtype=torch.float64)], 1)
    with torch.no_grad():
        torch.testing.assert_close(yolo_loss(maps, padded, anchors, SIZE), yolo_loss(maps, targets, anchors, SIZE))
    cell, _, _, counts = assign(maps[0].shape, targets, anchors[0], 8)
    assert int(cell.max()) < 3 * 8 * 8
    assert int(cell.min()) >= 0
    assert bool(counts.any())


def test_ciou_is_below_iou_and_scale_invariant() -> None:
    draw = torch.rand(200, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.2
    a, b = draw.unbind(1)
    plain, value = iou(to_corners(a), to_corners(b)), ciou(a, b)
    assert bool((value <= plain + 1e-9).all())
    torch.testing.assert_close(ciou(a, a), torch.ones(200, dtype=torch.float64), rtol=0, atol=1e-5)
    torch.testing.assert_close(ciou(a, b), ciou(3 * a, 3 * b), rtol=0, atol=1e-5)  # independent of the unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_of_half_precision_maps_is_float32(dtype: torch.dtype) -> None:
    maps, targets = raw_maps(2, 3), some_targets(2, 3)
    wanted = float(yolo_loss(maps, targets, anchors, SIZE))
    value = yolo_loss([raw.to(dtype) for raw in maps], targets.float(), anchors.float(), SIZE)
    assert value.dtype == torch.float32
    assert float(value) == pytest.approx(wanted, rel=1e-5 if dtype == torch.float32 else 0.02)


def test_loss_does_not_synchronize_with_the_device() -> None:
    """Fake tensors raise when the host reads a value or a shape depends on the data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    module._constants.cache_clear()
    try:
        with FakeTensorMode():
            maps = [torch.randn(2, 3, SIZE // s, SIZE // s, 8, requires_grad=True) for s in STRIDES]
            targets, boxes = torch.rand(2, 5, 5), torch.rand(3, 3, 2)
            yolo_loss(maps, targets, boxes, SIZE).backward()  # type: ignore[no-untyped-call]
            assert all(raw.grad is not None and raw.grad.shape == raw.shape for raw in maps)
            with pytest.raises(Exception, match="_local_scalar_dense"):
                bool(targets.any())
    finally:
        module._constants.cache_clear()


@pytest.mark.gpu
def test_loss_can_be_captured_in_a_cuda_graph() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    maps = [raw.float().cuda().requires_grad_() for raw in raw_maps(3, 4)]
    targets, boxes = some_targets(3, 4).float().cuda(), anchors.float().cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            yolo_loss(maps, targets, boxes, SIZE).backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    for raw in maps:
        raw.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        value = yolo_loss(maps, targets, boxes, SIZE)
        value.backward()  # type: ignore[no-untyped-call]
    targets.copy_(some_targets(3, 4, seed=9))
    graph.replay()
    wanted, _ = slow_loss([raw.detach().double().cpu() for raw in maps], some_targets(3, 4, seed=9))
    assert float(value.detach()) == pytest.approx(float(wanted), rel=1e-4)


def slow_distance(maps: list[Tensor], targets: list[Tensor], temperature: float) -> float:
    """Loops over cells, with the logarithms of the definition."""

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    def apart(x: float, y: float) -> float:
        p, q = sigmoid(y / temperature), sigmoid(x / temperature)
        return temperature**2 * (p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q)))

    total = 0.0
    for raw, teacher, balance in zip(maps, targets, (4.0, 1.0, 0.4), strict=True):
        cells = list(zip(raw.flatten(0, 3).tolist(), teacher.flatten(0, 3).tolist(), strict=True))
        sure = [sigmoid(b[4]) for _, b in cells]
        boxes = sum(
            w * sum((sigmoid(x) - sigmoid(y)) ** 2 for x, y in zip(a[:4], b[:4], strict=True))
            for w, (a, b) in zip(sure, cells, strict=True)
        )
        classes = sum(
            w * sum(apart(x, y) for x, y in zip(a[5:], b[5:], strict=True)) for w, (a, b) in zip(sure, cells, strict=True)
        )
        objects = sum(apart(a[4], b[4]) for a, b in cells) / len(cells)
        total += 0.05 * boxes / sum(sure) + (SIZE / 640) ** 2 * balance * objects
        if raw.shape[-1] > 6:
            total += 0.5 / 80 * classes / sum(sure)
    return 64 * total


@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("classes", [1, 5])
def test_distance_matches_a_slow_loop(classes: int, temperature: float) -> None:
    maps, targets = raw_maps(2, classes), raw_maps(2, classes, seed=1)
    assert float(yolo_distance(maps, targets, temperature)) == pytest.approx(slow_distance(maps, targets, temperature), rel=1e-9)
    assert float(yolo_distance(maps, maps, temperature)) == pytest.approx(0, abs=1e-9)
    assert float(yolo_distance(maps, targets, temperature)) > 1


def test_gradients_of_the_distance_match_finite_differences() -> None:
    maps, targets = (
        [m[:, :, :2, :2].clone().requires_grad_() for m in raw_maps(1, 3)],
        [m[:, :, :2, :2] for m in raw_maps(1, 3, seed=1)],
    )
    assert torch.autograd.gradcheck(lambda *raw: yolo_distance(raw, targets, 2.0), maps)


def test_distance_ignores_boxes_and_classes_of_empty_cells() -> None:
    maps, targets = raw_maps(1, 3), raw_maps(1, 3, seed=1)
    for raw, teacher in zip(maps, targets, strict=True):
        teacher[..., 4] = -60  # the teacher sees no object
        teacher[0, 0, 0, 0, 4] = raw[..., 4] = 2.0
    before = float(yolo_distance(maps, targets, 1.0))
    for teacher in targets:
        teacher[0, 1:, ..., :4] += 1  # boxes
        teacher[0, 1:, ..., 5:] -= 1  # classes
    assert float(yolo_distance(maps, targets, 1.0)) == pytest.approx(before, rel=1e-9)
    for teacher in targets:
        teacher[0, 0, 0, 0, 5:] -= 1
    assert float(yolo_distance(maps, targets, 1.0)) != pytest.approx(before, rel=1e-6)
