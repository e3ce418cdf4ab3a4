"""Promise 2: every layer with a weight is tiled correctly, or skipped with a stated reason."""

import torch
from torch import nn

import smartprune as sp
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
