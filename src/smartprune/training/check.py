"""Checks before a run: what would fail after the dense stage fails before it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ..errors import SmartpruneError, explain_memory_errors
from ..fields import MAX_TEXT, is_valid_name
from ..hardware.npu import read_npu
from ..methods import capabilities
from ..text import shorten
from . import ranks
from .config import Config, make_task
from .folder import load_weights
from .outputs import check_packages
from .run import attach_pruner, data_of_stage
from .trackers import check_trackers


def check(config: Config) -> None:
    """Raises if the run would fail later, for example because the budget cannot be met."""
    if not config.out:
        raise SmartpruneError("out is empty; give a folder for the run")
    check_packages(config)
    resolve(config)
    read_npu(config.npu)
    check_trackers(config)
    with torch.random.fork_rng(devices=[]):
        task = make_task(config.task, config.task_settings)
        with explain_memory_errors(model_flags(config)):
            model = task.model(config.model)
        _check_names(model, config)
        if config.dense is not None:
            load_weights(model, Path(config.dense))
        data, *_ = (task.data(split, torch.device("cpu")) for split in ("train", "validation", "test"))
        ranks.require_divisible(data, config.batch)
        if config.augment:
            next(data_of_stage(data, config, "search").batches(config.batch, config.seed, 0))
        steps = config.search_epochs * -(-data.steps(config.batch) // config.accumulate)
        with explain_memory_errors(model_flags(config)):
            needs = capabilities(attach_pruner(model, config, task, steps).method)
    if config.parallel == "fsdp" and ranks.world_size() > 1 and needs.needs_whole_weights:
        raise SmartpruneError(f"parallel='fsdp': {config.method} needs whole weights in every step; use --parallel ddp")
    _check_distillation(config, hasattr(task, "distance"))
    if config.graph == "on" and needs.why_not_capturable is not None:
        raise SmartpruneError(f"graph='on': {config.method}: {needs.why_not_capturable}; use --graph off or auto")


def resolve(config: Config) -> Config:
    """The configuration with every ``auto`` that depends on the machine replaced."""
    cuda = torch.cuda.is_available()
    device = config.device if config.device != "auto" else "cuda" if cuda else "cpu"
    if device == "cuda" and not cuda:
        raise SmartpruneError("device='cuda', but torch finds no CUDA device; use --device cpu or auto")
    if device != "cuda" and config.graph == "on":
        raise SmartpruneError("graph='on' needs a CUDA device; use --graph off or auto")
    if ranks.world_size() > 1 and config.graph == "on":
        raise SmartpruneError(f"graph='on' needs a single process, not {ranks.world_size()}; use --graph off or auto")
    if ranks.world_size() > 1 and config.sync_bn == "on" and device != "cuda":
        raise SmartpruneError("sync_bn='on' needs GPUs: torch has no synchronized batch norm for the CPU; use --sync-bn off")
    amp = config.amp if config.amp != "auto" else "bf16" if device == "cuda" else "off"
    return replace(config, device=device, amp=amp, threads=config.threads or torch.get_num_threads())


def model_flags(config: Config) -> str:
    """The flags that choose the network, for error messages."""
    settings = "".join(f" --task-set {name}={value}" for name, value in config.task_settings.items() if value is not None)
    return f"--model {config.model}{settings}"


def _check_names(model: nn.Module, config: Config) -> None:
    """Raises on tensor names that a packed file cannot hold."""
    for name in model.state_dict():
        if not is_valid_name(name):
            raise SmartpruneError(
                f"model={config.model!r}: a packed file cannot hold the name {shorten(name, 100)!r}; rename that part of the "
                f"model, with at most {MAX_TEXT} printable characters"
            )


def _check_distillation(config: Config, task_has_distance: bool) -> None:
    if not config.distill:
        return
    if not task_has_distance:
        raise SmartpruneError(
            f"distill={config.distill:g}: the task {config.task} has no distance() between two outputs; use --distill 0"
        )
    if config.dense is None and not config.dense_epochs:
        raise SmartpruneError(
            f"distill={config.distill:g} needs a trained dense model; give --dense FILE, or --dense-epochs above 0"
        )
