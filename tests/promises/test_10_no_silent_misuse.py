"""Promise 10: misuse raises immediately, and the message says what to do."""

import pytest
import torch
from torch import nn

import smartprune as sp
from helpers.training_cases import ALL_LAYERS, Case, three_layers
from smartprune.methods.method import Method


def test_scores_missing_from_the_optimizer_raise(small: Case) -> None:
    optimizer = small.optimizer()
    pruner = small.attach()
    with pytest.raises(sp.SmartpruneError, match=r"add_param_group\(pruner\.param_group\(\)\)"):
        small.train(pruner, optimizer, 3)


def test_scores_missing_from_a_fused_optimizer_raise() -> None:
    """Fused optimizers do not increase version counters."""
    case = Case("plain_cnn")
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1, fused=True)
    pruner = case.attach()
    with pytest.raises(sp.SmartpruneError, match="not the scores"):
        case.train(pruner, optimizer, 2)


def test_skipped_optimizer_steps_are_allowed() -> None:
    """A gradient scaler skips steps, and then neither weights nor scores change."""
    case = Case("plain_cnn")
    pruner = case.attach(steps=6)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 2)
    case.loss().backward()
    optimizer.zero_grad()
    pruner.step()
    case.train(pruner, optimizer, 2)
    assert pruner.count == 5


def test_floor_above_the_budget_raises() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"floor=0\.5 needs \d+ blocks, the budget keeps \d+"):
        Case("plain_cnn").attach(floor=0.5, sparsity=0.9)


def test_step_and_bake_after_bake_raise() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=1)
    case.train(pruner, case.optimizer(), 1)
    sp.bake(case.model)
    with pytest.raises(sp.SmartpruneError, match="baked"):
        pruner.step()
    with pytest.raises(sp.SmartpruneError, match="no pruner"):
        sp.bake(case.model)


def test_bake_before_the_end_of_the_search_raises() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=7)
    case.train(pruner, case.optimizer(), 2)
    with pytest.raises(sp.SmartpruneError, match=r"step 2 of 7.*pruner\.freeze\(\)"):
        sp.bake(case.model)
    with pytest.raises(sp.SmartpruneError, match="no block is removed yet"):
        pruner.receipt()


def test_nan_in_the_loss_raises() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=7)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1)
    case.x[0, 0, 0, 0] = float("nan")
    with pytest.raises(sp.SmartpruneError, match="NaN"):
        case.train(pruner, optimizer, 2)


@pytest.mark.parametrize("method", [sp.Gradual(), sp.Magnitude(), sp.Acdc(cycles=2), sp.Pdp()], ids=lambda method: str(method.name))
def test_nan_in_the_weights_names_the_layer(method: Method) -> None:
    """These methods have no trained scores, so the error is about weights."""
    case = Case("plain_cnn")
    pruner = case.attach(method, steps=7)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 1)
    with torch.no_grad():
        pruner.blocks.weights[1][0, 0] = float("nan")
    with pytest.raises(sp.SmartpruneError, match=r"weights of \S+ \(\d+ of \d+ layers\) contain NaN.*at step \d.*learning rate"):
        case.train(pruner, optimizer, 6)


@pytest.mark.parametrize("at_step", [True, False])
def test_nan_in_the_weights_of_a_frozen_model_raises(at_step: bool) -> None:
    """NaN times zero is NaN, so removed blocks are not zero; the error must name NaN and not the mask."""
    case = Case("plain_cnn")
    pruner = case.attach(steps=1)
    optimizer = case.optimizer()
    case.train(pruner, optimizer, 2)
    case.x[0, 0, 0, 0] = float("nan")
    case.loss().backward()
    optimizer.step()
    with pytest.raises(sp.SmartpruneError, match=r"pruner\.\w+\(\): the weights of \S+ \(2 of 2 layers\) contain NaN or infinity"):
        pruner.step() if at_step else sp.bake(case.model)


def test_nan_in_the_scores_raises() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(steps=7)
    with torch.no_grad():
        pruner.parameters()[0][3] = float("nan")
    with pytest.raises(sp.SmartpruneError, match="NaN"):
        case.model(case.x)


def test_a_search_that_ends_too_warm_raises_and_can_be_frozen() -> None:
    case = Case("plain_cnn")
    pruner = case.attach(sp.Smart(start=50.0, end=20.0), steps=3)
    optimizer = case.optimizer()
    with pytest.raises(sp.SmartpruneError, match="too warm"):
        case.train(pruner, optimizer, 3)
    assert pruner.phase == "search"
    case.loss()
    pruner.freeze(force=True)
    assert int(pruner.mask.sum()) == pruner.plan.keep
    sp.bake(case.model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 93}, r"sparsity=93 is outside \[0, 1\).*write sparsity=0\.93"),
        ({"sparsity": -0.1}, r"outside \[0, 1\)"),
        ({"sparsity": 1.0}, r"outside \[0, 1\)"),
        ({"sparsity": float("nan")}, r"outside \[0, 1\)"),
        ({"sparsity": None}, r"no budget given"),
        ({"sparsity": 0.5, "budget": sp.params(0.5)}, r"both given"),
        ({"steps": 0}, r"steps=0"),
        ({"steps": 2.5}, r"steps=2\.5"),
        ({"method": sp.Smart}, r"give its settings, at least Smart\(\)"),
        ({"block": (16,)}, r"at least two sizes"),
        ({"block": "16by8"}, r"cannot be read"),
        ({"include": "nothing.*"}, r"'nothing\.\*' matches no layer"),
        ({"method": sp.Smart(schedule="paper_exponential", start=5.0)}, r"start - end < 1"),
        ({"method": sp.Smart(schedule="cosine")}, r"schedule='cosine' is not known; it can be: geometric"),
        ({"method": sp.Smart(start=1e-3, end=1.0)}, r"above start"),
    ],
)
def test_invalid_arguments_raise_and_leave_the_model_unchanged(options: dict, message: str) -> None:
    case = Case("plain_cnn")
    arguments = {"method": sp.Smart(), "block": (4, 4), "sparsity": 0.5, "steps": 4, **options}
    method = arguments.pop("method")
    keys = list(case.model.state_dict())
    with pytest.raises(sp.SmartpruneError, match=message):
        sp.attach(case.model, method, **arguments)
    assert list(case.model.state_dict()) == keys
    assert sp.find_pruner(case.model) is None


@pytest.mark.parametrize("method", sp.METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_attach_refuses_weights_that_are_not_finite(method: str, value: float) -> None:
    case = Case("plain_cnn")
    with torch.no_grad():
        case.model[3].weight[1, 1] = value
    with pytest.raises(sp.SmartpruneError, match=r"attach: the weights of 3 \(1 of 2 layers\) contain NaN or infinity; load"):
        case.attach(sp.METHODS[method](), steps=50)


def test_attach_refuses_weights_that_cannot_train() -> None:
    case = Case("plain_cnn")
    with pytest.raises(sp.SmartpruneError, match=r"attach: 3\.weight is on the meta device and has no values; load"):
        case.attach(model=case.model.to("meta"))
    with torch.inference_mode():
        model = Case("plain_cnn").model
    with pytest.raises(sp.SmartpruneError, match=r"attach: 3\.weight was created in inference_mode and cannot train"):
        case.attach(model=model)


@pytest.mark.parametrize("arguments", [{"seed": "x"}, {"seed": 1.5}, {"include": 5}, {"skip": 5}])
def test_arguments_of_the_wrong_type_raise(arguments: dict[str, object]) -> None:
    with pytest.raises(sp.SmartpruneError, match=r"seed=.*give an integer|5 is neither a layer name"):
        Case("plain_cnn").attach(**{"include": (), **arguments})  # type: ignore[arg-type]


def test_attaching_twice_raises() -> None:
    case = Case("plain_cnn")
    case.attach()
    with pytest.raises(sp.SmartpruneError, match="already"):
        case.attach()


def test_a_model_without_prunable_layers_raises() -> None:
    with pytest.raises(sp.SmartpruneError, match=r"nothing to prune.*include="):
        sp.attach(nn.Sequential(nn.Linear(4, 4)), sp.Smart(), sparsity=0.5, steps=1)


def test_loading_a_dense_checkpoint_after_attach_raises() -> None:
    case = Case("plain_cnn")
    dense = {name: value.clone() for name, value in case.model.state_dict().items()}
    case.attach()
    with pytest.raises(sp.SmartpruneError, match="saved before attach"):
        case.model.load_state_dict(dense)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_export_before_bake_raises() -> None:
    case = Case("plain_cnn")
    pruner = case.attach()
    case.model.eval()
    with pytest.raises(sp.SmartpruneError, match=r"still masked.*smartprune\.bake\(model\) first"):
        torch.jit.trace(case.model, case.x)
    with pytest.raises(sp.SmartpruneError, match="still masked"):
        torch.jit.script(case.model)
    with pytest.raises(Exception, match="still masked"):
        torch.export.export(case.model, (case.x,))
    pruner.freeze(force=True)
    sp.bake(case.model)
    torch.jit.script(case.model)
    torch.export.export(case.model, (case.x,))


@pytest.mark.parametrize("method", ["smrt", "Smart", None, 3])
def test_an_invalid_method_raises(method: object) -> None:
    with pytest.raises(sp.SmartpruneError, match=r"method=.* is not a method; .* or a name: smart, magnitude"):
        sp.attach(three_layers(), method, steps=3, **ALL_LAYERS)  # type: ignore[arg-type]


def test_early_freeze_ranks_by_weights_when_there_are_no_scores() -> None:
    """Ranking by block index would empty the last layers."""
    for method in (sp.Awg(stages=4, cap="off"), sp.Pas()):
        model = three_layers()
        pruner = sp.attach(model, method, steps=40, **ALL_LAYERS)  # type: ignore[arg-type]
        size = pruner.blocks.mean(torch.abs)
        pruner.freeze()
        kept = pruner.mask
        assert float(size[kept].min()) >= float(size[~kept].max())


@pytest.mark.parametrize("how", ["argument", "keyword"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.LBFGS])
def test_calibration_steps_change_no_weight(kind: type[torch.optim.Optimizer], how: str) -> None:
    """Also with a closure, which computes the gradients inside optimizer.step()."""
    model = three_layers()
    pruner = sp.attach(model, sp.Awg(stages=2, calibration=0.5, cap="off"), steps=20, **ALL_LAYERS)  # type: ignore[arg-type]
    optimizer = kind(model.parameters(), lr=0.05)  # type: ignore[call-arg]
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 12)).square().mean()
        loss.backward()
        return loss

    if how == "argument":
        optimizer.step(closure)  # type: ignore[arg-type]
    else:
        optimizer.step(closure=closure)  # type: ignore[arg-type]
    pruner.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_new_optimizer_without_the_scores_raises() -> None:
    """The scores were trained before, and would not change any more."""
    case = Case("plain_cnn")
    weights = list(case.model.parameters())
    pruner = case.attach(steps=40)
    case.train(pruner, case.optimizer(), 2)  # this optimizer is dropped
    with pytest.raises(sp.SmartpruneError, match=r"not the scores, which were trained before; .*add_param_group"):
        case.train(pruner, torch.optim.SGD(weights, lr=0.01), 1)
    pruner = pruner_of(case)
    pruner.parameters()[0].requires_grad_(False)
    with pytest.raises(sp.SmartpruneError, match="the scores do not require grad"):
        case.train(pruner, case.optimizer(), 1)


def test_optimizers_may_alternate_but_not_omit_the_scores_forever() -> None:
    case = Case("plain_cnn")
    weights = list(case.model.parameters())
    pruner = case.attach(steps=60)
    both, alone = case.optimizer(), torch.optim.SGD(weights, lr=0.01)
    for _ in range(4):
        case.train(pruner, both, 1)
        case.train(pruner, alone, 3)
    case.train(pruner, both, 1)
    case.train(pruner, alone, 9)
    with pytest.raises(sp.SmartpruneError, match="not the scores"):
        case.train(pruner, alone, 1)


def test_the_first_step_may_be_that_of_another_optimizer() -> None:
    """Optimizers that take turns: one trains the first layers, the other one the rest and the scores."""
    case = Case("plain_cnn")
    weights = list(case.model.parameters())
    pruner = case.attach(steps=8)
    alone, rest = torch.optim.SGD(weights[:2], lr=0.01), torch.optim.SGD(weights[2:], lr=0.01)
    rest.add_param_group(pruner.param_group())
    for _ in range(4):
        case.train(pruner, alone, 1)
        case.train(pruner, rest, 1)
    assert pruner.phase == "frozen"


def pruner_of(case: Case) -> sp.Pruner:
    pruner = sp.find_pruner(case.model)
    assert pruner is not None
    return pruner
