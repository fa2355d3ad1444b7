"""New straight-through gates for a backbone, from the configuration (spec §4)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rlcompute.backbones.base import Backbone
from rlcompute.config_ste import Action, SteConfig
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.ste_early_exit import EarlyExit
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gates import SteGate, StraightThroughGates
from rlcompute.policies.ste_halting import AvitHalting, BetaHalting, CumulativeHalting
from rlcompute.policies.ste_layer_skip import LayerSkip
from rlcompute.policies.ste_null_experts import NullExperts, router_floor
from rlcompute.policies.ste_pruner import TokenPruner


def build_gates(
    settings: SteConfig, backbone: Backbone, inputs: Sequence[EmbeddedInput], mean_Nd: Tensor, scale_N: Tensor
) -> StraightThroughGates:
    """Gates near full compute, in the order of ``settings.actions``.

    Args:
        settings: which gates, and where.
        backbone: what they are for.
        inputs: a sample, for what some kinds measure under full compute.
        mean_Nd, scale_N: of the experts' inputs (:func:`rlcompute.policies.gates.calibrate`).

    Raises:
        ConfigError: the settings name a layer that the backbone does not have.
    """
    return StraightThroughGates(
        [_build(action, settings, backbone, inputs, mean_Nd, scale_N) for action in settings.actions]
    )


def _build(
    action: Action,
    settings: SteConfig,
    backbone: Backbone,
    inputs: Sequence[EmbeddedInput],
    mean_Nd: Tensor,
    scale_N: Tensor,
) -> SteGate:
    num_layers, d, rate = backbone.num_layers, backbone.hidden_size, settings.prior_rate
    match action:
        case "token_pruner":
            pruner = TokenPruner(settings.prune_layer, num_layers, d)
            pruner.heads.standardise(mean_Nd[pruner.layer, None], scale_N[pruner.layer, None])
            return pruner
        case "expert_skip":
            skip = ExpertSkip(num_layers, d)
            skip.heads.standardise(mean_Nd, scale_N)
            return skip
        case "layer_skip":
            return LayerSkip(settings.layer_first, num_layers, d)
        case "null_experts":
            nulls = NullExperts(settings.null_experts or backbone.num_experts, num_layers, d)
            nulls.start_at(router_floor(backbone, inputs))
            return nulls
        case "halt_avit" | "halt_cumulative":
            halting = (AvitHalting if action == "halt_avit" else CumulativeHalting)(num_layers, d, rate=rate)
            halting.mean_Nd.copy_(mean_Nd)
            halting.scale_N.copy_(scale_N)
            return halting
        case "halt_beta":
            beta = BetaHalting([layer.is_attention for layer in backbone.layers], rate=rate)
            beta.calibrate(backbone, inputs)
            return beta
        case "early_exit":
            return EarlyExit(num_layers, d, rate=rate)
