"""What the reward charges for a pass: FLOPs, FLOPs in whole tiles, or seconds of a measured table (``compute.cost``).

Shape legend: N layers, S segments, E experts.
"""

from __future__ import annotations

from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.config import ComputeConfig, Config
from rlcompute.cost_table import load_cost_table, measured_on
from rlcompute.flops import CostModel, FlopModel
from rlcompute.trace import Trace


def check_cost_table(config: Config, backbone_hash: str) -> None:
    """Refuse a table that is missing or another's, before anything is started.

    The name of the device is left to the workers, who see it.

    Raises:
        ConfigError: see :func:`load_cost_table` and :meth:`CostTable.check`.
    """
    path = config.compute.cost_table
    if config.compute.cost == "measured" and path is not None:
        load_cost_table(path).check(
            path, backbone=backbone_hash, device=config.backbone.device, dtype=config.backbone.dtype
        )


def describe_cost(compute: ComputeConfig) -> str:
    """The currency in words."""
    if compute.cost == "tiles":
        return f"executed FLOPs, experts in whole tiles of {compute.tile_rows} rows"
    if compute.cost == "measured":
        return f"seconds by {compute.cost_table}"
    return "executed FLOPs"


class Charge:
    """Charges passes through one backbone in the currency of the configuration."""

    def __init__(self, compute: ComputeConfig, backbone: Backbone) -> None:
        """Args:
        compute: the configuration's section.
        backbone: what runs.

        Raises:
            ConfigError: the cost table is missing, damaged, or was measured for something else.
        """
        self._model: CostModel = FlopModel(backbone)
        self._gate_token: float | None = None
        self._tile = compute.tile_rows if compute.cost == "tiles" else None
        if compute.cost == "measured":
            assert compute.cost_table is not None  # the configuration checks it
            table = load_cost_table(compute.cost_table)
            table.check(compute.cost_table, **measured_on(backbone))
            self._model = CostModel(table.layers, backbone.top_k, segment=table.segment)
            self._gate_token = table.gate_token

    @property
    def by_expert(self) -> bool:
        """Whether full compute can only be charged knowing its rows by expert."""
        return self._tile is not None

    def executed(self, trace: Trace, gate_flops_per_token: float) -> Tensor:
        """Cost of a gated pass, float64 [S]; with tiles, of this pass's own packing."""
        gate = gate_flops_per_token if self._gate_token is None else self._gate_token
        return self._model.executed(trace, gate, tile=self._tile)

    def full(self, lengths_S: Tensor, expert_rows_NE: Tensor | None = None) -> Tensor:
        """Cost of full compute, float64 [S].

        Args:
            lengths_S: tokens of each segment.
            expert_rows_NE: int64, rows by expert of the whole pack under full compute, where :attr:`by_expert`.
        """
        return self._model.executed(self._model.full_trace(lengths_S, expert_rows_NE), tile=self._tile)
