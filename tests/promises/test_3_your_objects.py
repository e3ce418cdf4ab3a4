"""Promise 3: parameters keep identity, order and names; earlier optimizers keep working; baked models keep their keys."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import Case
from smartprune.methods.method import Method
from smartprune.pruning.masked import MaskedModules


def names_and_ids(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(p)) for name, p in model.named_parameters()]


def attributes(module: nn.Module) -> dict[str, object]:
    return {"class": type(module), **{name: copy.copy(value) for name, value in vars(module).items()}}


def test_parameters_keep_identity_order_and_names(case: Case) -> None:
    before, keys = names_and_ids(case.model), list(case.model.state_dict())
    classes = {name: type(module) for name, module in case.model.named_modules()}
    pruner = case.attach(steps=2)
    during = names_and_ids(case.model)
    assert during[: len(before)] == before  # the scores come last
    assert len(during) == len(before) + 1
    case.train(pruner, case.optimizer(), 3)
    assert names_and_ids(case.model)[: len(before)] == before
    sp.bake(case.model)
    assert names_and_ids(case.model) == before
    assert list(case.model.state_dict()) == keys
    assert {name: type(module) for name, module in case.model.named_modules()} == classes
    for module in case.model.modules():
        assert not [name for name in module.__dict__ if "smartprune" in name]
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._state_dict_pre_hooks
        assert not module._load_state_dict_post_hooks


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_an_optimizer_made_before_attach_trains_weights_and_scores(small: Case, kind: str) -> None:
    optimizer = small.optimizer(kind=kind)
    weights = {name: p.detach().clone() for name, p in small.model.named_parameters()}
    pruner = small.attach()
    optimizer.add_param_group(pruner.param_group())
    scores = pruner.scores.clone()
    small.train(pruner, optimizer, 2)
    assert not torch.equal(scores, pruner.scores)
    for name, p in small.model.named_parameters():
        if name in weights and p.grad is None:
            assert not torch.equal(p, weights[name]), name


def test_param_group_accepts_optimizer_options() -> None:
    pruner = Case("plain_cnn").attach()
    group = pruner.param_group(lr=0.5, momentum=0.0)
    assert group["lr"] == 0.5
    assert group["momentum"] == 0.0
    assert group["weight_decay"] == 0.0
    assert [p.shape for p in group["params"]] == [(pruner.plan.n,)]


def test_layer_subclasses_with_their_own_forward_see_masked_weights() -> None:
    class Normalized(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._conv_forward(x, nn.functional.normalize(self.weight.flatten(1)).view_as(self.weight), self.bias)

    model = nn.Sequential(Normalized(8, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 4))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=1)
    raw = pruner.blocks.weights[0].detach()
    masked = raw * pruner.plan.layers[0].grid.expand(pruner.mask)
    x = torch.randn(1, 8, 8, 8)
    expected = nn.functional.conv2d(x, masked / masked.flatten(1).norm(dim=1)[:, None, None, None], model[0].bias)
    assert torch.allclose(model[0](x), expected, atol=1e-6)
    assert isinstance(model[0], Normalized)


@pytest.mark.parametrize("fused", [False, True])
def test_submodules_called_without_the_root_are_masked(fused: bool) -> None:
    """A training loop that never calls the forward of the root gives the same result."""

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, fused=fused)

    case = Case("plain_cnn")
    pruner = case.attach(steps=3)
    optimizer = optimizer_of(case.model)
    for _ in range(4):
        features = case.model[:9](case.x)
        nn.functional.cross_entropy(case.model[9:](features), case.y).backward()
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    whole = Case("plain_cnn")
    other = whole.attach(steps=3)
    whole.train(other, optimizer_of(whole.model), 4)
    assert torch.equal(pruner.mask, other.mask)
    for a, b in zip(pruner.blocks.weights, other.blocks.weights, strict=True):
        assert torch.equal(a, b)


def test_the_pruner_moves_with_the_model_to_another_device() -> None:
    """The meta device stands in for a GPU."""
    case = Case("plain_cnn")
    pruner = case.attach(steps=3)
    case.train(pruner, case.optimizer(), 1)
    case.model.to("meta")
    pruner.search.to_device()
    tensors = [value for value in pruner.search.values().values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in (*tensors, pruner.search.telemetry.side)} == {"meta"}


def test_the_pruner_moves_in_inference_mode() -> None:
    """The search continues afterwards, so no moved tensor may be an inference tensor."""
    case = Case("plain_cnn")
    pruner = case.attach(sp.Smart(gain=True), steps=3, budget=sp.params(0.5))
    case.train(pruner, case.optimizer(), 1)
    case.model.to("meta")
    with torch.inference_mode():
        pruner.search.to_device()
        costs = [pruner.blocks.cost, pruner.blocks.soft_cost]
    tensors = [value for value in (*pruner.search.values().values(), *costs) if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert not any(tensor.is_inference() for tensor in tensors)


def test_attach_works_in_inference_mode() -> None:
    case = Case("plain_cnn")
    plain = copy.deepcopy(case.model)
    with torch.inference_mode():
        pruner = case.attach(sp.Smart(gain=True), steps=3, budget=sp.params(0.5))
        pruner.apply_to(plain)
    case.train(pruner, case.optimizer(), 2)
    pruner.apply_to(plain)
    case.train(pruner, case.optimizer(), 1)
    assert sp.bake(case.model).met


def test_attach_accepts_an_example_made_in_inference_mode() -> None:
    """The first layer works in place. PyTorch allows writes to an inference tensor in inference mode only."""
    model = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8), nn.Linear(8, 8))
    with torch.inference_mode():
        example = torch.ones(1, 8)
        for inputs in (example, (example,), {"input": example}):
            assert sp.plan(model, (4, 4), budget=sp.macs(0.5, example=inputs)).macs == 64
        sp.attach(model, sp.Smart(), block=(4, 4), budget=sp.macs(0.5, example=example), steps=1)
    model(torch.ones(1, 8)).sum().backward()


def test_load_state_dict_works_in_inference_mode() -> None:
    """The loaded state is in calibration, whose buffers collect gradients of later backward passes."""
    case = Case("plain_cnn")
    pruner = case.attach(sp.Awg(stages=2, cap="off"), steps=20)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1)
    state = pruner.state_dict()
    case.train(pruner, optimizer, 3)
    assert pruner.search.calibration is None
    with torch.inference_mode():
        pruner.load_state_dict(state)
    assert pruner.search.calibration is not None
    case.train(pruner, optimizer, 19)
    assert sp.bake(case.model).met


def test_a_baked_model_can_be_pruned_further() -> None:
    """Blocks that the first search removed stay removed, and the new count is exact."""
    case = Case("plain_cnn")
    first = case.attach(steps=2)
    case.train(first, case.optimizer(), 3)
    sp.bake(case.model)
    second = case.attach(steps=2, sparsity=0.9)
    case.train(second, case.optimizer(), 3)
    receipt = sp.bake(case.model)
    assert receipt.met
    assert receipt.blocks.kept < int(first.mask.sum())


@pytest.mark.parametrize("at", ["scalars", "_find_edges", "register_forward_hook"])
@pytest.mark.parametrize("method", [sp.Smart(), sp.Awg(cap="off")])
def test_an_interrupted_attach_leaves_the_model_as_it_was(method: Method, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scores stay among the parameters, and no weight stays frozen."""
    case = Case("plain_cnn")
    case.train(case.attach(steps=2), case.optimizer(), 2)
    sp.bake(case.model)
    names = [name for name, _ in case.model.named_parameters()]
    modules = [attributes(module) for module in case.model.modules()]
    weight = case.model[3].weight
    zeros = weight == 0

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr({"scalars": type(method), "_find_edges": MaskedModules}.get(at, nn.Module), at, interrupt)
        with pytest.raises(KeyboardInterrupt):
            case.attach(method, steps=32)
    assert [name for name, _ in case.model.named_parameters()] == names
    assert [attributes(module) for module in case.model.modules()] == modules
    optimizer = case.optimizer()
    before = weight.clone()
    case.loss().backward()
    optimizer.step()
    assert not torch.equal(weight, before)
    assert torch.equal(weight == 0, zeros)  # the first bake still holds its zeros


def test_attach_is_undone_where_a_layer_class_forbids_subclasses() -> None:
    """The error of the class is raised, and the model is unchanged."""

    class Sealed(nn.Linear):
        def __init_subclass__(cls) -> None:
            raise TypeError("Sealed allows no subclass")

    model = nn.Sequential(nn.Linear(8, 8), Sealed(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    names, modules = [name for name, _ in model.named_parameters()], [attributes(module) for module in model.modules()]
    with pytest.raises(TypeError, match="allows no subclass"):
        sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=1)
    assert [name for name, _ in model.named_parameters()] == names
    assert [attributes(module) for module in model.modules()] == modules
    sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, steps=1, skip=Sealed)
    assert model(torch.ones(1, 8)).isfinite().all()


def test_classes_of_masked_layers_are_garbage_collected() -> None:
    """Otherwise objects that a local class refers to, such as a data set, would never be freed."""
    references = []

    def prune() -> None:
        class Target: ...

        target = Target()
        references.append(weakref.ref(target))

        class LocalLinear(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                assert target is not None
                return super().forward(x)

        model = nn.Sequential(nn.Linear(8, 8), LocalLinear(8, 8), nn.Linear(8, 8))
        sp.attach(model, sp.Magnitude(), block=(4, 4), sparsity=0.5, steps=1).freeze()
        sp.bake(model)

    prune()
    gc.collect()  # the masked class
    gc.collect()  # then the class itself
    assert references[0]() is None
