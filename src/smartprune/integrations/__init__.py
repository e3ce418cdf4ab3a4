"""Callbacks that prune inside other people's trainers. Nothing here imports a trainer before it is asked for."""

INTEGRATIONS = {
    "lightning": "smartprune.integrations.lightning:PruneCallback",
    "transformers": "smartprune.integrations.transformers:PruneCallback",
}
