"""The distance between two outputs of a network, for distillation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

Distance = Callable[[Any, Any, float], Tensor]  # (output of the student, output of the teacher, temperature)


def soft_distance(output: Any, target: Any, temperature: float) -> Tensor:
    """``T^2 KL(softmax(target / T), softmax(output / T))``, averaged over samples and pixels (Hinton et al. 2015).

    Classes are the second axis. For models with several heads, only the first head counts.
    """
    output, target = (logits[0] if isinstance(logits, (tuple, list)) else logits for logits in (output, target))
    student, teacher = (F.log_softmax(logits.float() / temperature, 1) for logits in (output, target))
    divergence = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
    return temperature**2 * divergence.mean()
