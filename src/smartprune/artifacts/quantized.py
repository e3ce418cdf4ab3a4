"""Models that another package has quantized: the weights that they hold in another form, and what to do with such models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from ..core.layers import candidates
from ..core.occupancy import has_own_values

CONVERTED = ("torch.ao.nn.", "torch.nn.quantized", "torch.nn.intrinsic.quantized")


def packed_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of converted layers of torch.ao, by the names that they had before the conversion. They are not parameters."""
    out: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if type(module).__module__.startswith(CONVERTED) and isinstance(weight, Callable):  # type: ignore[arg-type]
            value = weight()
            if isinstance(value, Tensor):
                out[f"{name}.weight" if name else "weight"] = value
    return out


def hides_layers(model: nn.Module) -> bool:
    """Whether the modules of a model do not say which weights belong to layers: converted models, and graphs of torch.export, as
    PT2E makes them. Their weights are then read like the weights of a file."""
    if packed_weights(model):
        return True
    return isinstance(model, fx.GraphModule) and not any(candidate.supported for candidate in candidates(model))


def is_quantized(model: nn.Module) -> bool:
    """Whether some weight of a model is quantized, by torch.ao or as a tensor class such as those of torchao."""
    return bool(packed_weights(model)) or any(has_own_values(x) for x in (*model.parameters(), *model.buffers()))


def simulates_quantization(model: nn.Module) -> bool:
    """Whether a model is prepared for quantization-aware training or for calibration: it observes what it computes."""
    return any(
        cls.__name__ in ("FakeQuantizeBase", "ObserverBase", "UniformQuantizationObserverBase")
        for module in model.modules()
        for cls in type(module).__mro__
    )
