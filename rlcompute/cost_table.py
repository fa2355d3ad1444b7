"""A measured cost table: seconds in the shape of :class:`~rlcompute.backbones.base.LayerCost`.

The arithmetic of :class:`~rlcompute.flops.CostModel` thus prices a trace in seconds as it does in FLOPs.
:mod:`rlcompute.calibration` measures a table, :mod:`rlcompute.charge` uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rlcompute.backbones.base import Backbone, LayerCost
from rlcompute.environment import processor_name
from rlcompute.errors import ConfigError


@dataclass(frozen=True)
class CostTable:
    """Seconds of the parts of a forward, and where they were measured.

    Attributes:
        backbone: hash of the backbone.
        device: ``cpu`` or ``cuda``.
        device_name: the processor or GPU, as the system calls it.
        dtype: of weights and activations, by torch's name.
        torch, threads, kernels: version, CPU threads and backend of each kernel operation; for the record.
        layers: seconds of each layer's parts.
        gate_token: seconds of one decision: gate head and removal of dropped tokens.
        segment: fixed seconds of a segment, which no decision saves.
    """

    backbone: str
    device: str
    device_name: str
    dtype: str
    torch: str
    threads: int
    kernels: dict[str, str]
    layers: tuple[LayerCost, ...]
    gate_token: float
    segment: float

    def save(self, path: Path) -> None:
        """Write the table as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def check(self, path: str | Path, **facts: str) -> None:
        """Refuse a table that was measured elsewhere.

        Args:
            path: where the table lies, for the message.
            facts: what ``backbone``, ``device``, ``device_name`` and ``dtype`` are here; those not given pass.

        Raises:
            ConfigError: one of them differs.
        """
        for name, here in facts.items():
            there = getattr(self, name)
            if there != here:
                raise ConfigError(
                    f"{path} was measured for {name} {there}, but this run has {here}: calibrate again with "
                    "`rlcompute calibrate costs`"
                )


def load_cost_table(path: str | Path) -> CostTable:
    """Read a table that ``rlcompute calibrate costs`` wrote.

    Raises:
        ConfigError: no such file, or not such a table.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        layers = tuple(LayerCost(**layer) for layer in values.pop("layers"))
        return CostTable(layers=layers, **values)
    except OSError as error:
        raise ConfigError(
            f"compute.cost_table: {path} cannot be read ({error.strerror}): make it with "
            f"`rlcompute calibrate costs --config <this configuration> --out {path}`"
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"compute.cost_table: {path} is not a table that `rlcompute calibrate costs` wrote ({error})"
        ) from error


def device_name(device: torch.device) -> str:
    """The processor or GPU, as the system calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return processor_name()


def measured_on(backbone: Backbone) -> Mapping[str, str]:
    """What ties a table to a backbone and its device, by field of :class:`CostTable`."""
    return {
        "backbone": backbone.hash,
        "device": backbone.device.type,
        "device_name": device_name(backbone.device),
        "dtype": str(backbone.dtype).removeprefix("torch."),
    }
