"""Pruning inside other trainers. A trainer is imported only when its integration is."""

INTEGRATIONS = {
    "lightning": "smartprune.integrations.lightning:PruneCallback",
    "transformers": "smartprune.integrations.transformers:PruneCallback",
    "ultralytics": "smartprune.integrations.ultralytics:prune_trainer",
}
