"""The steps of pruning without training: survey, sensitivities, costs of removal, mask, refit, corrections."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..plan import Plan
from ..recalibrate import norms_with_statistics
from .allocate import choose
from .batches import first_sample, size_of
from .correct import error, outputs_of, recalibrated, tuned
from .lockstep import MOST_THREADS, Lockstep, held_bytes, twin
from .matrix import Tiles, as_matrices, as_weight
from .moments import Moment, Rows, Survey, collect_rows, layer_inputs, sensitivities, survey
from .order import removal_costs
from .refit import refit
from .store import Store
from .uses import Use

HELD_OUT = 8  # one batch in so many, and at least one of several, decides which corrections are kept
FEWEST_TUNED = 8  # samples of each step of the tuning, if there are so many

Pairs = Callable[[int], Iterator[list[Rows]]]  # layer -> for each batch, its inputs in the dense and in the pruned network
Progress = Callable[[str, int, int], None]  # the name of the step, how much of it is done, and of how much


@dataclass(frozen=True)
class Settings:
    """What determines the result, besides model, data and plan."""

    damping: float = 0.01
    refit_damping: float = 0.01
    rounds: int = 16
    stages: int = 1
    seed: int = 0
    memory: int = 2**32  # bytes for moments and inverses
    tuning_steps: int = 64  # of the scales and offsets at the end; 0 for none
    tuning_rate: float = 0.01
    tuning_passes: float = 4  # how often the tuning sees each sample, if batches can be divided


class Job:
    """One model and its calibration data. ``model`` shares its parameters and stays as it is; ``work`` is pruned."""

    def __init__(
        self, model: nn.Module, plan: Plan, batches: Sequence[Any], settings: Settings, progress: Progress, store: Store
    ) -> None:
        self.model, self.plan, self.settings, self.progress, self.store = (
            twin(model, buffers=False),
            plan,
            settings,
            progress,
            store,
        )
        self.batches = list(batches)
        self.layers = plan.layers
        self.samples = sum(map(size_of, self.batches))
        self.tiles = [Tiles.of(layer) for layer in self.layers]
        self.survey: Survey = survey(self.model, self.layers, batches)
        self.work = copy.deepcopy(self.model)
        self.stage = 1

    def run(self) -> Tensor:
        """Prunes the copy. Returns the hard mask, bool [n]."""
        mask = torch.ones(self.plan.n, dtype=torch.bool, device="cpu")
        stages = self.settings.stages
        for self.stage in range(1, stages + 1):
            mask = self.choose(self.costs(~mask), Fraction(self.stage, stages))
            self.refit(mask)
        self.correct()
        return mask

    def facts(self) -> dict[str, object]:
        """Settings for the receipt."""
        return {"samples": self.samples, "seed": self.settings.seed}

    # -- the mask ---------------------------------------------------------------------------------------------------------

    def costs(self, removed: Tensor) -> Tensor:
        """What removing each block costs, float64 [n] on the CPU; 0 for those that are removed already."""
        rows = self.store.get(f"sensitivities-{self.stage}", self._sensitivities)
        out = torch.zeros(self.plan.n, dtype=torch.float64, device="cpu")
        done = 0
        for group in self._groups():
            missing = [index for index in group if not self.store.has(self._key("costs", index))]
            moments = self._moments(self.work, missing) if missing else {}
            for index in group:
                layer = self.layers[index]
                gone = removed[layer.start : layer.stop]
                compute = partial(self._layer_costs, index, moments, rows[str(index)], gone)
                out[layer.start : layer.stop] = self.store.get(self._key("costs", index), compute)["costs"]
                done += 1
                self._report("order", done, len(self.layers))
        out[removed] = 0
        return out

    def _sensitivities(self) -> dict[str, Tensor]:
        done = 0

        def step() -> None:
            nonlocal done
            done += 1
            self._report("sensitivities", done, len(self.batches))

        rows = sensitivities(self.work, self.layers, self.batches, self.settings.seed, step)
        return {str(index): row for index, row in enumerate(rows)}

    def _layer_costs(self, index: int, moments: dict[int, Moment], rows: Tensor, removed: Tensor) -> dict[str, Tensor]:
        weight, moment = self._matrices(self.work, index), moments.pop(index)
        moment.require_finite(self.layers[index])
        costs = removal_costs(
            weight,
            moment.mean(self._has_offset(index)),
            rows.to(weight.device),
            self.tiles[index],
            self.settings.damping,
            self.settings.memory,
            self.settings.rounds,
            removed,
        )
        return {"costs": costs.cpu()}

    def choose(self, costs: Tensor, part: Fraction) -> Tensor:
        """The hard mask that removes this part of what the budget removes, bool [n]."""
        return choose(self.plan, costs, part)

    def _key(self, step: str, index: int) -> str:
        return f"{step}-{self.stage}-{index}"

    def _report(self, step: str, done: int, total: int) -> None:
        """Progress of a step that is repeated in every stage."""
        self.progress(step, (self.stage - 1) * total + done, self.settings.stages * total)

    # -- refit ------------------------------------------------------------------------------------------------------------

    def refit(self, mask: Tensor) -> None:
        """Masks the weights of the copy, and refits them in the order in which the layers run."""
        with torch.no_grad():
            for index, layer in enumerate(self.layers):
                weight = self._weight(self.work, index)
                kept = layer.grid.expand(mask[layer.start : layer.stop].to(weight.device))
                weight.copy_(torch.where(kept, weight, 0.0))
        with self._pairs() as pairs:
            for done, index in enumerate(self.survey.order):
                layer = self.layers[index]
                self._refit_layer(index, mask[layer.start : layer.stop], pairs)
                self._report("refit", done + 1, len(self.layers))

    def _refit_layer(self, index: int, keep: Tensor, pairs: Pairs) -> None:
        layer = self.layers[index]
        refitted = self.store.get(self._key("refit", index), partial(self._refitted, index, keep, pairs))
        stored = self._weight(self.work, index)
        stored.copy_(as_weight(refitted["weight"], layer.grid.weight_shape, layer.transposed))
        if "offset" in refitted:
            self._set_offset(index, refitted["offset"].to(stored.device))

    def _refitted(self, index: int, keep: Tensor, pairs: Pairs) -> dict[str, Tensor]:
        """The new weight of a layer, and what is added to its outputs."""
        dense = self._matrices(self.model, index).float()
        moment = self._paired_moment(index, dense, pairs)
        moment.require_finite(self.layers[index])
        offset = self._has_offset(index)
        weight = refit(dense, moment.mean(offset), moment.mean_cross(offset), keep, self.tiles[index], self.settings.refit_damping)
        if not offset:
            return {"weight": weight}
        x, y = moment.means()
        return {"weight": weight, "offset": (y - (weight.double() @ x[..., None])[..., 0]).reshape(-1)}

    def _paired_moment(self, index: int, dense: Tensor, pairs: Pairs) -> Moment:
        """The moments of the inputs in the pruned network, with the outputs of the dense network as targets."""
        total = self._empty_moment(index, with_outputs=True)
        for before, after in pairs(index):
            matching = [(use.parts, rows.shape) for use, rows in before] == [(use.parts, rows.shape) for use, rows in after]
            for (_, x), (use, z) in zip(before if matching else after, after, strict=True):
                total.add(use.parts, z, x.float() @ dense[use.parts].mT)
        return total

    @contextmanager
    def _pairs(self) -> Iterator[Pairs]:
        """Reads a layer's inputs in the dense and in the pruned network, in the order of the layers."""
        if self._fits_in_lockstep():
            with Lockstep((self.model, self.work), self.layers, self.survey.order, self.batches, self._shares()) as lockstep:
                yield lockstep.rows
        else:
            yield self._separate_pairs

    def _fits_in_lockstep(self) -> bool:
        """Whether one pass can refit all layers: each is used once, and the activations of all batches fit into memory."""
        if 2 * len(self.batches) > MOST_THREADS:
            return False
        if any(self.survey.uses[index] != len(self._expected_uses(index)) for index in range(len(self.layers))):
            return False
        if any(isinstance(self.model.get_submodule(layer.sites[0][0]), nn.RNNCellBase) for layer in self.layers):
            return False
        sample = first_sample(self.batches[0])
        held = held_bytes(self.model, self.layers, sample) / max(1, size_of(sample))
        return 2 * held * self.samples <= self.settings.memory

    def _shares(self) -> list[float]:
        return [size_of(batch) / self.samples for batch in self.batches]

    def _separate_pairs(self, index: int) -> Iterator[list[Rows]]:
        uses = self.survey.uses[index]
        for number, (batch, share) in enumerate(zip(self.batches, self._shares(), strict=True)):
            pair: list[Rows] = []
            for model in (self.model, self.work):
                rows: Rows = []
                collect_rows(model, self.layers, batch, number, share / max(1, uses), {index}, partial(_append, rows), uses)
                pair.append(rows)
            yield pair

    # -- corrections ------------------------------------------------------------------------------------------------------

    def correct(self) -> None:
        """Tries new batch-norm statistics and tuned scales, and keeps what is closest to the dense network on the last batches,
        which scales are not tuned on."""
        targets = [outputs_of(self.model, batch) for batch in self.batches]
        if not targets[0]:  # no output to compare
            return
        count = len(self.batches)
        split = count - max(1, count // HELD_OUT) if count > 1 else count
        held_out, goal = self.batches[split:] or self.batches, targets[split:] or targets
        candidates = [self.work]
        if norms_with_statistics(self.work):
            candidates.append(recalibrated(self.work, self.batches))
        errors = [error(model, held_out, goal) for model in candidates]
        lowest = min(errors)
        self.work = candidates[errors.index(lowest)]
        steps = self.settings.tuning_steps
        if not steps or not 0 < lowest < math.inf:
            return
        rate = self.settings.tuning_rate * min(1.0, math.sqrt(lowest))  # errors are quadratic in what is to be changed
        tune = tuned(
            self.work,
            self.batches[:split],
            targets[:split],
            steps,
            rate,
            lambda n: self.progress("tune", n, steps),
            max(FEWEST_TUNED, math.ceil(self.settings.tuning_passes * self.samples / steps)),
        )
        if error(tune, held_out, goal) < lowest:
            self.work = tune

    # -- helpers ----------------------------------------------------------------------------------------------------------

    def _groups(self) -> list[list[int]]:
        """The layers in the order in which they run, in groups whose moments fit into memory together."""
        groups: list[list[int]] = []
        used = 0
        for index in self.survey.order:
            size = (
                8 * layer_inputs(self.layers[index]) ** 2 * (1 if self.survey.shared[index] else self.tiles[index].index.shape[0])
            )
            if not groups or used + size > self.settings.memory:
                groups.append([])
                used = 0
            groups[-1].append(index)
            used += size
        return groups

    def _moments(self, model: nn.Module, wanted: Sequence[int]) -> dict[int, Moment]:
        totals = {index: self._empty_moment(index) for index in wanted}
        uses = sum(self.survey.uses[index] for index in wanted)
        for number, batch in enumerate(self.batches):
            share = size_of(batch) / self.samples

            def add(use: Use, rows: Tensor) -> None:
                totals[use.layer].add(use.parts, rows)

            collect_rows(model, self.layers, batch, number, share, set(wanted), add, uses)
        return totals

    def _empty_moment(self, index: int, with_outputs: bool = False) -> Moment:
        layer = self.layers[index]
        parts, inputs = layer.grid.axes[0].parts, layer_inputs(layer)
        outputs = layer.params // inputs // parts if with_outputs else 0
        return Moment.zeros(parts, self.survey.shared[index], inputs, self._weight(self.model, index).device, outputs)

    def _weight(self, model: nn.Module, index: int) -> Tensor:
        name, attribute = self.layers[index].sites[0]
        weight = model.get_submodule(name)._parameters[attribute]
        assert weight is not None
        return weight.detach()

    def _matrices(self, model: nn.Module, index: int) -> Tensor:
        layer = self.layers[index]
        return as_matrices(self._weight(model, index), layer.grid.axes[0].parts, layer.transposed)

    def _bias(self, model: nn.Module, index: int) -> Tensor | None:
        """The bias of a layer, or the part of a bias that belongs to it."""
        layer = self.layers[index]
        if len(layer.sites) > 1 or self.survey.uses[index] != len(self._expected_uses(index)):
            return None
        name, attribute = layer.sites[0]
        module = model.get_submodule(name)
        if isinstance(module, nn.MultiheadAttention):
            bias = module.in_proj_bias
            if bias is None or attribute == "in_proj_weight":
                return bias
            start = "qkv".index(attribute[0]) * module.embed_dim
            return bias[start : start + module.embed_dim]
        if isinstance(module, nn.RNNCellBase):
            return module._parameters.get(f"bias_{attribute.removeprefix('weight_')}")
        return module._parameters.get("bias")

    def _expected_uses(self, index: int) -> range:
        """One use, or one for query, key and value each."""
        return range(self.layers[index].grid.axes[0].parts if self.layers[index].sites[0][1] == "in_proj_weight" else 1)

    def _has_offset(self, index: int) -> bool:
        """Whether something adds a constant to each output of a layer, which a refit can change."""
        return index in self.survey.norms or self._bias(self.model, index) is not None

    def _set_offset(self, index: int, offset: Tensor) -> None:
        """Adds a constant to the outputs of a layer in the copy, in addition to what the model adds."""
        bias, dense = self._bias(self.work, index), self._bias(self.model, index)
        if bias is not None and dense is not None:
            bias.copy_(dense + offset.to(dense))
            return
        before: Any = self.survey.norms[index]
        names = {id(module): name for name, module in self.model.named_modules()}
        norm: Any = self.work.get_submodule(names[id(before)])
        norm.running_mean.copy_(before.running_mean - offset.to(before.running_mean))


def _append(collected: Rows, use: Use, rows: Tensor) -> None:
    collected.append((use, rows))
