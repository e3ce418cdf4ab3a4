"""How far apart two outputs of a network are, for distillation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

Distance = Callable[[Any, Any, float], Tensor]  # of outputs: the student's, the teacher's, at a temperature


def soft_distance(out: Any, wanted: Any, temperature: float) -> Tensor:
    """``T^2 KL(softmax(wanted / T), softmax(out / T))``, averaged over samples and pixels (Hinton et al. 2015).

    Classes are the second axis. Of a model with several heads, the first is compared.
    """
    out, wanted = (logits[0] if isinstance(logits, (tuple, list)) else logits for logits in (out, wanted))
    student, teacher = (F.log_softmax(logits.float() / temperature, 1) for logits in (out, wanted))
    each = F.kl_div(student, teacher, reduction="none", log_target=True).sum(1)
    return temperature**2 * each.mean()
