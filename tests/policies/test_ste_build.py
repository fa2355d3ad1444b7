"""New gates for a backbone: near full compute, and the same embedding in training as after it."""

from __future__ import annotations

import pytest
import torch

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.config_ste import Action, SteConfig
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.gates import calibrate
from rlcompute.policies.ste_build import build_gates
from rlcompute.policies.ste_gates import Observed, StraightThroughGates
from rlcompute.soft_encoder import encode_soft
from tests.inputs import every_modality
from tests.policies.ste_inputs import context, saturated
from tests.tiny import write_tiny_checkpoint

TRAINED: tuple[Action, ...] = ("token_pruner", "expert_skip", "layer_skip", "null_experts")
HALTING: tuple[Action, ...] = ("halt_avit", "halt_cumulative", "halt_beta", "early_exit")
SETS: list[tuple[Action, ...]] = [*((kind,) for kind in TRAINED), TRAINED]
RATES = {"token_pruner": 0.4, "expert_skip": 0.3, "layer_skip": 0.3, "null_experts": 0.6}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


def build(backbone: Backbone, embedded: list[EmbeddedInput], *actions: Action) -> StraightThroughGates:
    settings = SteConfig(actions=actions, prune_layer=1, layer_first=1)
    return build_gates(settings, backbone, embedded, *calibrate(backbone, embedded))


@pytest.mark.parametrize("kind", [*TRAINED, *HALTING])
def test_new_gates_are_near_full_compute(
    backbone: Backbone, embedded: list[EmbeddedInput], kind: Action
) -> None:
    gates = build(backbone, embedded, kind)
    pack = backbone.pack(embedded)
    trace, full = encode(backbone, *pack, gates.policy()).trace, encode(backbone, *pack, Full()).trace
    assert float(trace.rows_NS.sum() / full.rows_NS.sum()) > 0.9
    again = StraightThroughGates.create(gates.describe(), gates.tensors())
    assert again.tensors().keys() == gates.tensors().keys() and again.describe() == gates.describe()


def test_inputs_are_standardised(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    gates = build(backbone, embedded, "token_pruner", "expert_skip")
    mean_Nd, scale_N = calibrate(backbone, embedded)
    tensors = gates.tensors()
    torch.testing.assert_close(tensors["token_pruner.heads.mean_nd"], mean_Nd[1:2])
    torch.testing.assert_close(tensors["token_pruner.heads.scale_n"], scale_N[1:2])
    torch.testing.assert_close(tensors["expert_skip.heads.mean_nd"], mean_Nd)
    torch.testing.assert_close(tensors["expert_skip.heads.scale_n"], scale_N)


def test_as_many_nulls_as_asked_for(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    assert build(backbone, embedded, "null_experts").describe()["null_experts"]["count"] == 8
    settings = SteConfig(actions=("null_experts",), null_experts=3)
    gates = build_gates(settings, backbone, embedded, *calibrate(backbone, embedded))
    assert gates.describe()["null_experts"]["count"] == 3


def test_a_layer_that_the_backbone_lacks_is_refused(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    settings = SteConfig(actions=("token_pruner",), prune_layer=backbone.num_layers - 1)
    with pytest.raises(ConfigError, match="prune_layer"):
        build_gates(settings, backbone, embedded, *calibrate(backbone, embedded))


def deciding(backbone: Backbone, embedded: list[EmbeddedInput], *actions: Action) -> StraightThroughGates:
    """Gates with random weights and thresholds at which they decide both ways."""
    gates = build(backbone, embedded, *actions)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in gates.named_parameters():
        if "weight" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    for _ in range(2):
        observed = Observed()
        encode(backbone, *backbone.pack(embedded), gates.policy(observed))
        gates.settle(observed.logits, {kind: RATES[kind] for kind in actions})
    return gates


@pytest.mark.parametrize("kinds", SETS, ids=lambda kinds: "+".join(kinds))
def test_training_and_inference_agree(
    backbone: Backbone, embedded: list[EmbeddedInput], kinds: tuple[Action, ...]
) -> None:
    gates = deciding(backbone, embedded, *kinds)
    for gate in gates.gates.values():
        saturated(gate)
    pack = backbone.pack(embedded)
    hard = encode(backbone, *pack, gates.policy())
    with torch.no_grad():
        soft = encode_soft(backbone, *pack, gates.soft_policy(context(temperature=0.8)))
    torch.testing.assert_close(soft.embeddings_Sd, hard.embeddings_Sd, rtol=0, atol=1e-4)
    flops = FlopModel(backbone)
    executed, full = flops.executed(hard.trace), flops.full(hard.trace.entered_NS[0])
    torch.testing.assert_close(flops.executed(soft.trace), executed, rtol=1e-5, atol=0.0)
    assert float(executed.sum() / full.sum()) < 0.97
