"""Promise 4: copies, saved models, EMA, compile, autocast, accumulation, checkpointing, tied weights and folding work."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import smartprune as sp
from helpers.training_cases import Case, removed_elements
from smartprune.pruning.multiply import BlockMultiplier
from smartprune.pruning.weights import LiveWeights


@pytest.mark.parametrize("stage", ["search", "frozen"])
def test_a_deepcopy_is_masked_and_independent(case: Case, stage: str) -> None:
    pruner = case.attach(steps=2)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1 if stage == "search" else 3)
    case.loss()  # the masked weights of this forward pass exist when the copy is made
    case.model.eval()
    twin = copy.deepcopy(case.model)
    expected = case.model(case.x).detach()
    assert torch.equal(twin(case.x), expected)
    case.model.train()
    case.train(pruner, optimizer, 2)
    sp.bake(case.model)
    assert torch.equal(twin(case.x), expected)
    theirs = sp.find_pruner(twin)
    assert theirs is not None
    assert theirs is not pruner
    if theirs.phase == "search":
        theirs.freeze(force=True)
    sp.bake(twin)
    assert int(theirs.mask.sum()) == theirs.plan.keep


def test_torch_save_of_a_whole_model_keeps_the_mask(case: Case) -> None:
    pruner = case.attach(steps=2)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1)
    case.loss()
    buffer = io.BytesIO()
    torch.save(case.model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    case.model.eval()
    loaded.eval()
    assert torch.equal(loaded(case.x), case.model(case.x))
    sp.find_pruner(loaded).freeze(force=True)
    sp.bake(loaded)
    assert list(loaded.state_dict()) == list(Case(case.name).model.state_dict())


def test_ema_over_all_float_tensors_has_the_mask_after_apply_to(small: Case) -> None:
    pruner = small.attach(steps=3)
    optimizer = small.optimizer()
    ema = copy.deepcopy(small.model)
    for _ in range(6):
        small.train(pruner, optimizer, 1)
        theirs = ema.state_dict()
        for name, value in small.model.state_dict().items():
            if theirs[name].is_floating_point():
                theirs[name].mul_(0.9).add_(value.detach(), alpha=0.1)
    pruner.apply_to(ema)
    ema.eval()
    with torch.no_grad():
        ema(small.x)
    copy_pruner = sp.find_pruner(ema)
    assert torch.equal(copy_pruner.mask, pruner.mask)
    kept = 0
    for weight, gone in zip(copy_pruner.blocks.weights, removed_elements(pruner), strict=True):
        assert torch.count_nonzero(weight[gone]) == 0
        kept += int(torch.count_nonzero(weight[~gone]))
    assert kept > 0
    sp.bake(ema)


def test_apply_to_masks_a_copy_after_bake() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=2)
    ema = copy.deepcopy(case.model)
    case.train(pruner, case.optimizer(), 2)
    sp.bake(case.model)
    with pytest.raises(sp.SmartpruneError, match=r"pruner\.apply_to\(copy\)"):
        sp.bake(ema)
    pruner.apply_to(ema)
    assert str(sp.bake(ema)) == str(pruner.receipt())


def test_an_averaged_model_made_before_attach_can_be_masked() -> None:
    """The scores come last in parameters(), so AveragedModel pairs the weights correctly."""
    case = Case("plain_cnn")
    ema = AveragedModel(case.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    pruner = case.attach(steps=2)
    optimizer = case.optimizer()
    for _ in range(4):
        case.train(pruner, optimizer, 1)
        ema.update_parameters(case.model)
    pruner.apply_to(ema.module)
    for layer, gone in zip(pruner.plan.layers, removed_elements(pruner), strict=True):
        weight = ema.module.get_parameter(layer.weight)
        assert torch.count_nonzero(weight[gone]) == 0
        assert torch.count_nonzero(weight[~gone]) > 0


def test_apply_to_masks_a_dense_copy_during_the_search() -> None:
    case = Case("plain_cnn")
    plain = copy.deepcopy(case.model)
    pruner = case.attach(steps=9)
    case.train(pruner, case.optimizer(), 3)
    pruner.apply_to(plain)
    plain.load_state_dict(case.model.state_dict())
    case.model.eval()
    plain.eval()
    assert torch.equal(plain(case.x), case.model(case.x))


def test_accumulated_gradients_equal_those_of_the_whole_batch(small: Case) -> None:
    """With both forward passes first, and with alternating forward and backward passes."""
    pruner = small.attach()
    small.model.eval()  # batch norm's batch statistics would differ between halves
    x, y = small.x, small.y

    def grads() -> list[torch.Tensor]:
        out = [p.grad.clone() for p in small.model.parameters()]
        small.model.zero_grad()
        return out

    def half(part: slice) -> torch.Tensor:
        return nn.functional.cross_entropy(small.model(x[part]), y[part], reduction="sum")

    nn.functional.cross_entropy(small.model(x), y, reduction="sum").backward()
    whole = grads()
    middle = x.shape[0] // 2
    half(slice(0, middle)).backward()
    half(slice(middle, None)).backward()
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-3) for a, b in zip(whole, grads(), strict=True))
    first, second = half(slice(0, middle)), half(slice(middle, None))
    first.backward()
    second.backward()
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-3) for a, b in zip(whole, grads(), strict=True))
    assert pruner.phase == "search"


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_gives_equal_gradients(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Sequential, on: bool) -> None:
            super().__init__()
            self.parts = nn.ModuleList([inner[:3], inner[3:6], inner[6:8], inner[8:]])
            self.on = on

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=reentrant) if self.on else part(x)
            return x

    results = []
    for on in (False, True):
        case = Case("plain_cnn")
        case.model = Checkpointed(case.model, on)
        case.x.requires_grad_()  # reentrant checkpointing needs an input that requires grad
        pruner = case.attach()
        case.loss().backward()
        results.append([pruner.parameters()[0].grad, *(w.grad for w in pruner.blocks.weights)])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("method", [sp.Pdp(tau=1e-2), sp.Smart(gain=True), sp.Smart(), sp.Pas()], ids=lambda m: str(m))
def test_checkpointed_submodules_give_equal_gradients(method: object) -> None:
    """The mask is computed by the first submodule that runs, and not again by recomputation."""
    grads = []
    for on in (False, True):
        case = Case("plain_cnn")
        pruner = case.attach(method)
        out = checkpoint_sequential(case.model, 3, case.x, use_reentrant=False) if on else case.model(case.x)
        nn.functional.cross_entropy(out, case.y).backward()
        grads.append([p.grad for p in (*pruner.parameters(), *pruner.blocks.weights)])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-6)


class Stacked(nn.Module):
    """Each part uses reentrant checkpointing, which runs a separate backward pass per part."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed, self.parts = checkpointed, nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=True) if self.checkpointed else part(x)
        return x

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean() if self.checkpointed else self.parts[2](self.parts[1](self.parts[0](x))).square().mean()


@pytest.mark.parametrize(
    "method", [sp.Pdp(tau=1e-2), sp.Smart(gain=True), sp.Smart(), sp.Pas(), sp.Gradual()], ids=lambda m: str(m)
)
def test_several_backward_passes_give_the_gradients_of_one(method: object) -> None:
    """Several passes from checkpointed parts, against a loss that bypasses the forward of the model."""
    grads = []
    for checkpointed in (True, False):
        torch.manual_seed(0)
        model = Stacked(checkpointed)
        pruner = sp.attach(model, method, block=(4, 4), sparsity=0.5, include="*", steps=9)  # type: ignore[arg-type]
        x = torch.randn(8, 12)
        for batch in x.chunk(2):
            model.loss(batch.clone().requires_grad_()).backward()
        grads.append([parameter.grad for parameter in (*model.parts.parameters(), *pruner.parameters())])
    for a, b in zip(*grads, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-7), method


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_works_under_autocast(small: Case, dtype: torch.dtype) -> None:
    pruner = small.attach(steps=3)
    optimizer = small.optimizer()
    for _ in range(4):
        with torch.autocast("cpu", dtype=dtype):
            loss = small.loss()
        loss.backward()
        assert pruner.parameters()[0].dtype == torch.float32
        optimizer.step()
        pruner.step()
        optimizer.zero_grad()
    assert int(pruner.mask.sum()) == pruner.plan.keep
    sp.bake(small.model)


def test_bfloat16_models_are_pruned_exactly() -> None:
    case = Case("plain_cnn")
    case.model.to(torch.bfloat16)
    case.x = case.x.to(torch.bfloat16)
    pruner = case.attach(steps=3)
    case.train(pruner, case.optimizer(), 4)
    assert case.model[3].weight.dtype == torch.bfloat16
    assert int(pruner.mask.sum()) == pruner.plan.keep
    sp.bake(case.model)


QUIET = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads .grad


@QUIET
@pytest.mark.parametrize("stage", ["search", "frozen"])
def test_compiled_models_train_like_eager_ones(stage: str) -> None:
    torch._dynamo.reset()
    case, plain = Case("plain_cnn"), Case("plain_cnn")
    for c, wrap in ((case, lambda m: torch.compile(m, backend="aot_eager")), (plain, lambda m: m)):
        pruner = c.attach(steps=3)
        optimizer = c.optimizer()
        model = wrap(c.model)
        c.train(pruner, optimizer, 2 if stage == "search" else 5, model)
        c.result = model(c.x).detach()
        c.pruner = pruner
    assert torch.allclose(case.result, plain.result, atol=1e-5)
    assert torch.allclose(case.pruner.scores, plain.pruner.scores, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 12


@QUIET
def test_compiled_models_are_not_recompiled_every_step() -> None:
    torch._dynamo.reset()
    case = Case("plain_cnn")
    pruner = case.attach(steps=50)
    model = torch.compile(case.model, backend="eager")
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 4, model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    case.train(pruner, optimizer, 12, model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@QUIET
@pytest.mark.parametrize("steps", [2, 50])  # frozen, searching
def test_masking_is_not_compiled(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """BlockMultiplier launches kernels by address, which torch.compile cannot trace."""
    torch._dynamo.reset()
    case, seen = Case("plain_cnn"), []
    for name in ("multiply", "mask_gradients"):
        plain = getattr(BlockMultiplier, name)

        def spy(self: BlockMultiplier, *args: object, plain: object = plain) -> object:
            seen.append(torch.compiler.is_compiling())
            return plain(self, *args)  # type: ignore[operator]

        monkeypatch.setattr(BlockMultiplier, name, spy)
    pruner = case.attach(steps=steps)
    case.train(pruner, case.optimizer(), 5, torch.compile(case.model, backend="eager"))
    assert len(seen) >= 5
    assert not any(seen)


def test_tied_weights_are_pruned_as_one_layer() -> None:
    case = Case("tied")
    pruner = case.attach(steps=2)
    tied = [layer for layer in pruner.plan.layers if len(layer.sites) == 2]
    assert len(tied) == 1
    case.train(pruner, case.optimizer(), 3)
    sp.bake(case.model)
    assert case.model.a.weight is case.model.b.weight


def test_folding_batch_norm_after_bake_keeps_the_zeros() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=2)
    case.train(pruner, case.optimizer(), 3)
    gone = removed_elements(pruner)[0]
    sp.bake(case.model)
    case.model.eval()
    folded = nn.utils.fusion.fuse_conv_bn_eval(case.model[3], case.model[4])
    assert torch.count_nonzero(folded.weight[gone]) == 0
    x = torch.randn(2, 16, 8, 8)
    assert torch.allclose(folded(x), case.model[4](case.model[3](x)), atol=1e-5)


def test_functional_call_sees_masked_weights() -> None:
    case = Case("plain_cnn")
    case.attach()
    case.model.eval()
    params = dict(case.model.named_parameters())
    out = torch.func.functional_call(case.model, params, (case.x,))
    assert torch.equal(out, case.model(case.x))


def test_an_evaluation_survives_the_end_of_another_evaluation_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other thread drops the masked weights in the middle of a forward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 4))
    pruner = sp.attach(model, sp.Smart(), block=(4, 4), sparsity=0.5, include="*", steps=4)
    x = torch.randn(3, 12)
    is_valid = LiveWeights.is_valid

    def spied(self: LiveWeights, *args: object) -> bool:
        result = is_valid(self, *args)  # type: ignore[arg-type]
        pruner.live.after_forward(model, (), None)
        return result

    with torch.no_grad():
        expected = model(x)
        monkeypatch.setattr(LiveWeights, "is_valid", spied)
        assert torch.equal(model(x), expected)


def test_the_example_of_a_budget_is_not_stored_in_the_model() -> None:
    """Copying a model with an example that has a grad_fn would fail."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 10))
    example = nn.functional.pad(torch.randn(64, 30, requires_grad=True), (0, 2))
    pruner = sp.attach(model, sp.Smart(), block=(8, 4), budget=sp.macs(0.5, example=example), steps=4)
    assert pruner.plan.budget is not None
    assert pruner.plan.budget.example is None
    averaged = AveragedModel(model)
    assert torch.equal(averaged(example), model(example))


def test_averaged_models_made_before_attach_or_after_bake_get_the_same_mask() -> None:
    case = Case("plain_cnn")
    averaged = AveragedModel(case.model)
    pruner = case.attach(steps=2)
    pruner.apply_to(averaged)
    case.train(pruner, case.optimizer(), 2)
    pruner.apply_to(averaged)
    receipt, theirs = sp.bake(case.model), sp.bake(averaged)
    assert theirs.mask_hash == receipt.mask_hash
    late = AveragedModel(Case("plain_cnn").model)
    pruner.apply_to(late)  # after bake
    assert sp.verify(late.module, receipt=receipt).ok
