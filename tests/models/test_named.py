"""Networks by name: those of this package, of other libraries, and of the user."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from smartprune import SmartpruneError, cli
from smartprune.models import MODELS, build, is_external

USER_MODULE = """
import torch.nn as nn

def small(num_classes, width=16):
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, num_classes),
    )

def anything(**settings):
    return nn.Linear(settings["in_channels"], settings["num_classes"])

def broken(num_classes):
    raise KeyError("no such layer")

def number():
    return 3

ready = nn.Linear(2, 2)
constant = 7
"""


@pytest.fixture
def user_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "namednet.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "namednet", raising=False)
    return tmp_path


def test_names_with_a_library_or_a_module_are_external() -> None:
    assert isinstance(build("resnet18", num_classes=7), type(MODELS["resnet18"]()))
    names = ("resnet18", "timm/resnet50", "torchvision/vgg11", "a.b:c", "other/x")
    assert [is_external(name) for name in names] == [False, True, True, True, False]


@pytest.mark.usefixtures("user_folder")
def test_functions_get_the_settings_that_they_have_parameters_for() -> None:
    assert build("namednet:small", num_classes=5, in_channels=1)[-1].out_features == 5  # type: ignore[index, union-attr]
    layer = build("namednet:anything", num_classes=5, in_channels=3)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (3, 5)
    assert isinstance(build("namednet:ready", num_classes=5), nn.Linear)
    assert "" not in sys.path


@pytest.mark.usefixtures("user_folder")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("namednet:broken", "namednet:broken() failed with KeyError: 'no such layer'"),
        ("namednet:number", "namednet:number() returned a int; it must return a torch.nn.Module"),
        ("namednet:constant", "namednet:constant is a int; it must be a function"),
        ("namednet:absent", "namednet:absent: cannot be imported"),
        ("nowhere:net", "nowhere:net: cannot be imported"),
        ("resnet19", "unknown model 'resnet19'; choose from resnet8"),
    ],
)
def test_invalid_names_raise(name: str, message: str) -> None:
    with pytest.raises(SmartpruneError) as caught:
        build(name, num_classes=5)
    assert message in str(caught.value)


def fake_timm() -> ModuleType:
    timm = ModuleType("timm")
    timm.is_model = lambda name: name == "tiny"  # type: ignore[attr-defined]
    timm.list_models = lambda pattern: ["tiny", "tinier"]  # type: ignore[attr-defined]

    def create_model(model_name: str, num_classes: int, in_chans: int = 3) -> nn.Module:
        assert model_name == "tiny"
        return nn.Linear(in_chans, num_classes)

    timm.create_model = create_model  # type: ignore[attr-defined]
    return timm


def test_models_of_timm_get_channels_and_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", fake_timm())
    layer = build("timm/tiny", num_classes=9, in_channels=1)
    assert isinstance(layer, nn.Linear)
    assert (layer.in_features, layer.out_features) == (1, 9)
    with pytest.raises(SmartpruneError, match="model='timm/tin' is not a model of timm; similar names: tiny, tinier"):
        build("timm/tin", num_classes=9)


def test_models_of_torchvision_take_three_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    models = SimpleNamespace(
        list_models=lambda include=None: ["tiny"],
        get_model=lambda name, weights, num_classes=1000: nn.Linear(3, num_classes),
    )
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)  # type: ignore[arg-type]
    assert build("torchvision/tiny", num_classes=4, in_channels=3).out_features == 4
    with pytest.raises(SmartpruneError, match="model='torchvision/tin' is not a model of torchvision; similar names: tiny"):
        build("torchvision/tin", num_classes=4)
    with pytest.raises(SmartpruneError, match="takes 3 input channels, but the images of this task have 1"):
        build("torchvision/tiny", num_classes=4, in_channels=1)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # as if not installed
    with pytest.raises(SmartpruneError, match="model='timm/resnet18' needs timm, which cannot be imported"):
        build("timm/resnet18", num_classes=4)


def test_the_train_command_takes_a_function_of_the_user(user_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "train", "digits", "--model", "namednet:small", "--block", "8x4", "--sparsity", "0.8", "--dense-epochs", "2",
        "--search-epochs", "2", "--finetune-epochs", "1",
    ]  # fmt: skip
    assert cli.main([*arguments, "--out", str(user_folder / "run")]) == 0
    assert cli.main(["verify", str(user_folder / "run")]) == 0
    assert "namednet:small" in (user_folder / "run" / "config.json").read_text()
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main([*arguments, "--model", "resnet99", "--out", str(user_folder / "other")])
    assert caught.value.code == 2
    assert "or use timm/NAME, torchvision/NAME or MODULE:FUNCTION" in capsys.readouterr().err


def test_models_of_timm_where_installed() -> None:
    timm = pytest.importorskip("timm", exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
    assert timm.__version__
    model = build("timm/resnet10t", num_classes=6, in_channels=3)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 6)
