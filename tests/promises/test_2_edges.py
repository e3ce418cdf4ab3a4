"""Promise 2: every layer with a weight is tiled correctly, or skipped with a stated reason."""

from pathlib import Path

import torch
from torch import Tensor, nn

import smartprune as sp
from helpers import reference
from helpers.training_cases import Case


def test_masked_forward_equals_manually_masked_weights(case: Case) -> None:
    pruner = case.attach()
    case.model.eval()
    raw = {layer.weight: weight.detach().clone() for layer, weight in zip(pruner.plan.layers, pruner.blocks.weights, strict=True)}
    with torch.no_grad():
        masked = case.model(case.x)
    mask = pruner.mask
    plain = Case(case.name).model.eval()
    plain.load_state_dict({k: v for k, v in case.model.state_dict().items() if "smartprune" not in k})
    with torch.no_grad():
        for layer in pruner.plan.layers:
            weight = plain.get_parameter(layer.weight)
            for index in range(layer.n):  # one block at a time, as expand() places it
                if layer.n > 400 and index % 97:
                    continue
                one = torch.zeros(layer.n)
                one[index] = 1
                where = layer.grid.expand(one).bool()
                assert torch.equal(weight[where], raw[layer.weight][where])
            weight.mul_(layer.grid.expand(mask[layer.start : layer.stop]))
    assert torch.allclose(plain(case.x), masked, atol=1e-6, rtol=1e-5)


def test_gradients_equal_autograd_through_an_expanded_mask(small: Case) -> None:
    pruner = small.attach()
    small.loss().backward()
    scores = pruner.parameters()[0]
    actual = [scores.grad.clone(), *(w.grad.clone() for w in pruner.blocks.weights)]
    other = Case(small.name)
    leaf = scores.detach().clone().requires_grad_()
    mask = sp.soft_topk(leaf, pruner.plan.limit, pruner.tau)
    named = dict(other.model.named_parameters(remove_duplicate=False))
    replaced = {}
    for layer in pruner.plan.layers:
        product = named[layer.weight] * layer.grid.expand(mask[layer.start : layer.stop])
        for module, attribute in layer.sites:
            replaced[f"{module}.{attribute}"] = product
    out = torch.func.functional_call(other.model, replaced, (small.x,), tie_weights=False)
    nn.functional.cross_entropy(out, small.y).backward()
    expected = [leaf.grad, *(named[layer.weight].grad for layer in pruner.plan.layers)]
    for a, b in zip(actual, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_every_weight_is_pruned_or_has_a_reason(case: Case) -> None:
    plan = sp.plan(case.model, case.block, case.sparsity)
    named = {name for name, p in case.model.named_parameters() if p.dim() > 1}
    listed = {layer.weight for layer in plan.layers} | {s.name for s in plan.skipped} | {s.name + ".weight" for s in plan.skipped}
    assert named <= listed
    assert all(s.reason for s in plan.skipped)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.gru, self.head = nn.Linear(6, 10), nn.LSTMCell(10, 9), nn.GRUCell(9, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = None, x.new_zeros(len(x), 6)
        for row in x.unbind(1):
            first = self.lstm(self.embed(row), first)
            second = self.gru(first[0], second)
        return self.head(second)  # type: ignore[no-any-return]


def test_recurrent_cells_are_masked_baked_and_packed_like_layers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 5, 6)
    uses = sp.plan(model, (4, 4), example=x).uses
    assert uses == {"embed": (5,), "lstm.weight_ih": (5,), "lstm.weight_hh": (5,), "gru.weight_ih": (5,), "gru.weight_hh": (5,)}
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.7, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(x).square().mean().backward()
        assert all(weight.grad is not None for weight in pruner.blocks.weights)
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        masked = model(x)
        plain = Recurrent().eval()
        plain.load_state_dict({k: v for k, v in model.state_dict().items() if "smartprune" not in k})
        for layer in pruner.plan.layers:
            index = reference.block_index(layer.grid.weight_shape, (4, 4), layer.grid.axes[0].parts)
            factors = reference.expand(pruner.mask[layer.start : layer.stop].tolist(), index)
            weight = plain.get_parameter(layer.weight)
            weight.mul_(torch.tensor(factors).reshape(weight.shape))
        assert torch.equal(plain(x), masked)
    receipt = sp.bake(model)
    sp.pack(model, tmp_path / "packed", receipt=receipt)
    fresh = Recurrent().eval()
    sp.unpack(tmp_path / "packed", fresh)
    with torch.no_grad():
        assert torch.equal(fresh(x), masked)
    assert sp.verify(tmp_path / "packed").mask_hash == receipt.mask_hash


def test_channels_last_gives_equal_results_and_keeps_the_layout() -> None:
    a, b = Case("plain_cnn"), Case("plain_cnn")
    b.model.to(memory_format=torch.channels_last)
    pa, pb = a.attach(), b.attach()
    a.train(pa, a.optimizer(), 4)
    b.train(pb, b.optimizer(), 4)
    assert torch.equal(pa.mask, pb.mask)
    for x, y in zip(pa.blocks.weights, pb.blocks.weights, strict=True):
        assert torch.allclose(x, y, atol=1e-5)
    assert b.model[3].weight.is_contiguous(memory_format=torch.channels_last)
