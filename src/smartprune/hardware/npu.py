"""NPU: a MAC array that skips zero blocks, described by a few numbers.

This is a model of an accelerator, not a vendor's part. It is checked against two public simulators (``records/npu-check``);
``docs/npu.md`` lists what it leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn

from ..artifacts.source import Model
from ..core.block import Block
from ..errors import SmartpruneError
from ..files import parse_json, read_limited

if TYPE_CHECKING:
    from .estimate import Estimate

MAX_BYTES = 1 << 16
Dataflow = Literal["output_stationary", "weight_stationary"]


MOST = {"buffer_bytes": 1 << 50}  # how large an integer may be; others up to 2**20


@dataclass(frozen=True)
class NPU:
    """A model of an accelerator: an array of multiply-accumulate units that skips zero blocks. ``print`` shows it.

    In every cycle a lane multiplies ``columns`` inputs with ``rows`` x ``columns`` weights for ``rows`` outputs.

    Args:
        rows: Output channels of a lane.
        columns: Input channels of a lane.
        lanes: Arrays side by side. Each takes whole rows of output blocks.
        dataflow: ``"output_stationary"`` or ``"weight_stationary"`` (a systolic array).
        clock_mhz: The clock, which converts cycles to time.
        weight_bandwidth: Bytes of weights per cycle. With ``math.inf``, weights are never a bottleneck.
        activation_bandwidth: Bytes of activations per cycle, on a separate port.
        buffer_bytes: The size of the on-chip buffer for the input of a layer.
        weight_bits: The width of a stored weight.
        activation_bits: The width of a stored activation.
        index_bytes: Bytes that are moved with every kept block of a layer that skips blocks.

    Raises:
        SmartpruneError: A value is out of range.

    Examples:
        >>> import smartprune as sp
        >>> npu = sp.NPU(rows=16, columns=8)
        >>> npu.macs_per_cycle
        128
    """

    rows: int = 16  # output channels of a lane
    columns: int = 8  # input channels of a lane
    lanes: int = 1  # arrays side by side; each takes whole rows of output blocks
    dataflow: Dataflow = "output_stationary"
    clock_mhz: float = 1000.0
    weight_bandwidth: float = 16.0  # bytes per cycle
    activation_bandwidth: float = 16.0  # bytes per cycle
    buffer_bytes: int = 1 << 20  # on chip, for the input of a layer
    weight_bits: int = 8
    activation_bits: int = 8
    index_bytes: int = 2  # stored with every block of a layer that skips any

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "dataflow":
                if value not in get_args(Dataflow):
                    raise SmartpruneError(f"NPU: dataflow={value!r}; it is one of: {', '.join(get_args(Dataflow))}")
            elif field.type == "int":
                least, most = 0 if field.name == "index_bytes" else 1, MOST.get(field.name, 1 << 20)
                if type(value) is not int or not least <= value <= most:
                    raise SmartpruneError(f"NPU: {field.name}={value!r} must be an integer, {least} or more, and at most {most}")
            else:
                valid = isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-6 <= value <= 1e12
                if not valid and not (value == math.inf and field.name != "clock_mhz"):
                    hint = "" if field.name == "clock_mhz" else ", in bytes per cycle (math.inf: never waited for)"
                    raise SmartpruneError(f"NPU: {field.name}={value!r} must be a number above 0{hint}, from 1e-6 to 1e12")

    @staticmethod
    def small() -> NPU:
        """The size of a microcontroller's accelerator: 64 MACs at 200 MHz with narrow memory. It is not a real product.

        Returns:
            The machine.
        """
        return NPU(rows=8, columns=8, clock_mhz=200, weight_bandwidth=4, activation_bandwidth=4, buffer_bytes=256 << 10)

    @staticmethod
    def edge() -> NPU:
        """The size of a camera's accelerator: 128 MACs at 1 GHz, 16 GB/s for weights and for activations. It is not a real product.

        Returns:
            The machine.
        """
        return NPU()

    @staticmethod
    def server() -> NPU:
        """The size of a data-centre accelerator: four systolic arrays of 32x32 at 1 GHz. It is not a real product.

        Returns:
            The machine.
        """
        return NPU(
            rows=32,
            columns=32,
            lanes=4,
            dataflow="weight_stationary",
            weight_bandwidth=256,
            activation_bandwidth=256,
            buffer_bytes=8 << 20,
        )

    @property
    def macs_per_cycle(self) -> int:
        """Multiply-accumulates per cycle of all lanes."""
        return self.rows * self.columns * self.lanes

    @property
    def fold(self) -> int:
        """Cycles to load a tile of weights and to fill and drain the array. Only a weight-stationary array has them."""
        return 2 * self.columns + self.rows - 2 if self.dataflow == "weight_stationary" else 0

    @property
    def tail(self) -> int:
        """Cycles after the last multiplication of a layer, until its last outputs are written."""
        return 1 if self.dataflow == "output_stationary" else 0

    @cached_property
    def weight_bits_per_cycle(self) -> Fraction | None:
        """Bits of weights per cycle; None if weights are never a bottleneck."""
        return _bits(self.weight_bandwidth)

    @cached_property
    def activation_bits_per_cycle(self) -> Fraction | None:
        """Bits of activations per cycle; None if activations are never a bottleneck."""
        return _bits(self.activation_bandwidth)

    def ms(self, cycles: int) -> float:
        """Cycles as milliseconds.

        Args:
            cycles: A number of cycles.

        Returns:
            The time at ``clock_mhz``.
        """
        return cycles / (self.clock_mhz * 1e3)

    def to_json(self) -> dict[str, object]:
        """The settings as plain data.

        Returns:
            A dictionary; an infinite bandwidth is None.
        """
        return {key: None if value == math.inf else value for key, value in asdict(self).items()}

    @staticmethod
    def from_json(data: object, where: str) -> NPU:
        """Reads plain data that is not trusted.

        Args:
            data: What :meth:`to_json` returned, or some of its entries.
            where: The name of the source, for messages.

        Returns:
            The machine.

        Raises:
            SmartpruneError: An entry is unknown or out of range.
        """
        known = [field.name for field in fields(NPU)]
        if not isinstance(data, dict) or not set(data) <= set(known):
            problem = f"has {sorted(set(data) - set(known))[0]!r}" if isinstance(data, dict) else f"is a {type(data).__name__}"
            raise SmartpruneError(f"{where}: {problem}; it must be a JSON object with some of: {', '.join(known)}")
        try:
            return NPU(**{key: math.inf if value is None else value for key, value in data.items()})  # type: ignore[arg-type]
        except SmartpruneError as error:
            raise SmartpruneError(f"{where}: {error}") from None

    def __str__(self) -> str:
        lanes = f"{self.lanes} lanes of " if self.lanes > 1 else ""
        return (
            f"{lanes}{self.rows}x{self.columns} MACs, {self.dataflow.replace('_', ' ')}, {self.clock_mhz:g} MHz, "
            f"{self.weight_bandwidth:g}+{self.activation_bandwidth:g} B/cycle"
        )

    def estimate(
        self,
        model: nn.Module,
        example: Any,
        block: Block | str | Sequence[int | None] | None = None,
        weights: Model | None = None,
    ) -> Estimate:
        """Estimates the cycles of every layer for one sample, dense and with its zero blocks skipped.

        Args:
            model: A plain or baked model.
            example: One input of the model: a tensor, or a tuple or dictionary of arguments.
            block: What the NPU skips. Defaults to the block of the receipt of the weights, or else to the shape of the array.
            weights: A file, a run folder or a state dict whose weights replace the weights of the model.

        Returns:
            The estimate. ``print`` shows a row per layer.

        Raises:
            SmartpruneError: The model cannot be run on the example, or the weights do not fit it.

        Examples:
            >>> import smartprune as sp
            >>> import torch
            >>> model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 16))
            >>> with torch.no_grad():
            ...     _ = model[0].weight[:16].zero_()
            >>> npu = sp.NPU(weight_bandwidth=math.inf, activation_bandwidth=math.inf)
            >>> estimate = npu.estimate(model, torch.zeros(1, 32))
            >>> [(layer.dense.latency, layer.pruned.latency) for layer in estimate.layers]
            [(9, 5), (5, 5)]
        """
        from .estimate import estimate

        return estimate(self, model, example, block, weights)


# One line per preset: its name on the command line, and the machine.
PRESETS = {"small": NPU.small(), "edge": NPU.edge(), "server": NPU.server()}


def read_npu(name: str) -> NPU:
    """A preset by its name, or the NPU of a ``.json`` file with its settings (a bandwidth of null is never waited for).

    >>> read_npu("edge") == NPU.edge()
    True
    """
    if name in PRESETS:
        return PRESETS[name]
    if not name.endswith(".json"):
        raise SmartpruneError(f"npu {name!r} is not known; there are: {', '.join(PRESETS)}; or give a .json file of its settings")
    return NPU.from_json(parse_json(read_limited(name, MAX_BYTES), name), name)


def _bits(bandwidth: float) -> Fraction | None:
    return None if math.isinf(bandwidth) else 8 * Fraction(str(bandwidth))
