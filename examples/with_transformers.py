"""Pruning in the Trainer of transformers. Run: python examples/with_transformers.py"""

from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import smartprune as sp
from smartprune.integrations.transformers import PruneCallback


def make_data(samples: int = 128) -> list[dict[str, torch.Tensor]]:
    """Sequences of eight tokens. The label is whether the first token is in the upper half of the vocabulary."""
    tokens = torch.randint(0, 32, (samples, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": (row[0] >= 16).long()} for row in tokens]


def main(folder: Path = Path("runs/with_transformers"), epochs: float = 5) -> tuple[torch.nn.Module, sp.Receipt]:
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
    )
    args = TrainingArguments(
        str(folder), num_train_epochs=epochs, learning_rate=1e-3, report_to=[], use_cpu=True, save_strategy="no"
    )
    prune = PruneCallback(block=(8, 8), sparsity=0.7)
    trainer = Trainer(model, args, train_dataset=make_data(), callbacks=[prune])
    trainer.train()
    trainer.save_model()  # a plain model with zero blocks: BertForSequenceClassification.from_pretrained(folder)
    return model, prune.receipt


if __name__ == "__main__":
    print(main()[1])
