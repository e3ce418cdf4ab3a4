"""Weight names that try to inject markup into an HTML page."""

from __future__ import annotations

import torch

HOSTILE = {
    "</script><script>window.hit=1</script>.weight": torch.ones(8, 8),
    '"><img src=x onerror="window.hit=1">.weight': torch.ones(8, 8, 3, 3),
    "\u202egnp.\u2066exe\x1b[2J\u2028'`${x}.weight": torch.zeros(16, 8),
    "<!--<script>&amp;&lt;.weight": torch.ones(8, 16),
    "</script src=x\n.weight": torch.ones(8, 8),
}
