"""What only the real Trainer of transformers can show: its models, its best checkpoints, optimizers of one's own."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import smartprune as sp
from helpers import trainers

transformers = pytest.importorskip("transformers", reason="transformers is not installed; a small trainer stands in for it")
pytest.importorskip("accelerate", reason="its Trainer needs accelerate")
from smartprune.integrations.transformers import PruneCallback  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
SETTINGS: dict[str, Any] = {"block": (4, 4), "sparsity": 0.75, "include": "*", "steps": 10}
RANK = """
import sys
from pathlib import Path
import torch
from helpers import trainers
from smartprune.integrations.transformers import PruneCallback

real = trainers.RealTransformers(Path(sys.argv[1]))
ends = []
for resume in (None, str(real.path(3))):
    module, callback = real.module(), PruneCallback(block=(4, 4), sparsity=0.75, include="*", steps=5)
    trainer = real.trainer(module, [callback], ddp_backend="gloo")
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel)
    ends.append((callback.receipt, module.state_dict()))
assert ends[0][0] == ends[1][0]
assert all(torch.equal(value, ends[1][1][name]) for name, value in ends[0][1].items())
print("mask", ends[0][0].mask_hash, flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def test_from_pretrained_loads_pruned_checkpoints(tmp_path: Path) -> None:
    """from_pretrained loads checkpoints after the search, and the final model, as pruned models."""
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    data = [{"input_ids": torch.randint(0, 32, (8,)), "labels": torch.tensor(i % 3)} for i in range(24)]
    callback = PruneCallback(**SETTINGS)
    given = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "save_steps": 1, "per_device_train_batch_size": 4}
    args = transformers.TrainingArguments(str(tmp_path), num_train_epochs=3, **given)
    trainer = transformers.Trainer(model, args, train_dataset=data, callbacks=[callback])
    trainer.train()
    trainer.save_model(str(tmp_path / "end"))
    for folder in ("end", "checkpoint-14"):
        loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / folder)
        for row in callback.receipt.layers:
            assert torch.equal(loaded.state_dict()[row.weight] == 0, model.state_dict()[row.weight] == 0)
    assert loaded.state_dict().keys() == model.state_dict().keys()
    resumed = transformers.BertForSequenceClassification(config)
    again = PruneCallback(**SETTINGS)
    transformers.Trainer(resumed, args, train_dataset=data, callbacks=[again]).train(str(tmp_path / "checkpoint-5"))
    assert again.receipt == callback.receipt
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in resumed.state_dict().items())


@pytest.mark.parametrize("metric", ["smallest", "largest"])
def test_load_best_model_at_end(tmp_path: Path, metric: str) -> None:
    """A checkpoint after the search is loaded with its own weights. One saved during the search raises."""
    steps = iter(range(100))
    best = {"load_best_model_at_end": True, "metric_for_best_model": "place", "greater_is_better": metric == "largest"}
    real = trainers.RealTransformers(tmp_path)
    callback = PruneCallback(**SETTINGS)
    trainer = real.trainer(real.module(), [callback], eval_strategy="steps", eval_steps=4, save_steps=4, **best)
    trainer.compute_metrics = lambda _: {"place": next(steps)}
    if metric == "largest":
        trainer.train()
        assert callback.receipt.met
    else:
        with pytest.raises(sp.SmartpruneError, match="saved at step 4 of the 10 of the search"):
            trainer.train()


def test_an_optimizer_of_the_user(tmp_path: Path) -> None:
    real = trainers.RealTransformers(tmp_path)
    for scheduled in (False, True):
        module, callback = real.module(), PruneCallback(**SETTINGS)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10) if scheduled else None
        given = {"args": real.trainer(module, []).args, "train_dataset": trainers.data(), "optimizers": (optimizer, scheduler)}
        if scheduled:
            with pytest.raises(sp.SmartpruneError, match="a scheduler counts the parameter groups"):
                transformers.Trainer(module, callbacks=[callback], **given)
        else:
            transformers.Trainer(module, callbacks=[callback], **given).train()
            assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
            assert callback.receipt.met


def test_a_callback_added_too_late_raises(tmp_path: Path) -> None:
    real = trainers.RealTransformers(tmp_path)
    trainer = real.trainer(real.module(), [])
    trainer.add_callback(PruneCallback(**SETTINGS))
    with pytest.raises(sp.SmartpruneError, match="not by add_callback"):
        trainer.train()


def test_metrics_are_in_the_history(tmp_path: Path) -> None:
    real = trainers.RealTransformers(tmp_path)
    trainer = real.trainer(real.module(), [PruneCallback(**SETTINGS)])
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert [row["smartprune/progress"] for row in rows[:2]] == [0.1, 0.2]
    assert rows[-1]["smartprune/tau"] == rows[-1]["smartprune/undecided"] == 0


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Both ranks have the same mask, and resuming is bit-exact."""
    (tmp_path / "rank.py").write_text(RANK)
    tests, source = Path(trainers.__file__).parents[1], Path(sp.__file__).parents[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "rank.py", "run"]
    environment = {**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{source}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    masks = re.findall(r"mask (sha256:[0-9a-f]{64})", done.stdout)  # two processes may print into one line
    assert len(masks) == 2
    assert len(set(masks)) == 1
