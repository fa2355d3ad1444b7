"""Null experts against a joint top-k over real and null logits, taken literally."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlcompute.backbones import load_backbone
from rlcompute.decision import Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.pack import Pack
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_null_experts import FLOOR_SHARE, NullExperts, router_floor
from tests.inputs import every_modality
from tests.policies.ste_inputs import (
    NUM_EXPERTS,
    NUM_LAYERS,
    TOP_K,
    D,
    Layer,
    assert_gradients_match,
    context,
    random_layer,
    randomised,
)
from tests.tiny import write_tiny_checkpoint

LAYER = 2
COUNTS = [1, TOP_K - 1, TOP_K, NUM_EXPERTS, NUM_EXPERTS + 4]
"""Null experts: fewer than slots, as many, as many as real ones, more."""


def nulls(count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> NullExperts:
    return randomised(NullExperts(count, NUM_LAYERS, D), seed, dtype)  # type: ignore[return-value]


def null_logits(gate: NullExperts, seen: Layer) -> torch.Tensor:
    return (gate.weight_NZd[LAYER] @ seen.x_Td.T).T + gate.bias_NZ[LAYER] + gate.threshold


def joint_winners(gate: NullExperts, seen: Layer) -> list[set[int]]:
    """Of every token the candidates that the joint top-k picks; numbers from E on are nulls."""
    joint = torch.cat([seen.logits_TE, null_logits(gate, seen)], dim=1)
    return [set(row) for row in joint.sort(dim=1, descending=True).indices[:, :TOP_K].tolist()]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("seed", range(3))
def test_what_runs_is_what_the_joint_top_k_picks(count: int, seed: int) -> None:
    seen, gate = random_layer(seed), nulls(count, seed)
    winners = joint_winners(gate, seen)
    decision = gate.hard(LAYER, seen.x_Td, seen.signals, seen.pack)
    assert decision is not None and decision.keep is not None and decision.renormalize
    for ids, keep, won in zip(seen.signals.expert_ids_Tk, decision.keep, winners, strict=True):
        assert set(ids[keep].tolist()) == {expert for expert in won if expert < NUM_EXPERTS}
        assert torch.equal(keep, keep.sort(descending=True).values), "not a prefix"
    if count >= TOP_K:
        real = [sum(expert < NUM_EXPERTS for expert in won) for won in winners]
        assert min(real) < TOP_K and max(real) > 0


@pytest.mark.parametrize("count", COUNTS)
def test_terms_count_the_joint_top_k_over_living_tokens(count: int) -> None:
    seen, gate = random_layer(7), nulls(count, 1)
    dead_T = torch.arange(len(seen.x_Td)) % 4 == 1
    made = gate.soft(LAYER, seen.x_Td, seen.signals, seen.with_dead(dead_T), {}, context())
    assert made is not None and made.renormalize
    winners = [won for won, dead in zip(joint_winners(gate, seen), dead_T, strict=True) if not dead]
    expected = [float(sum(expert in won for won in winners)) for expert in range(NUM_EXPERTS)]
    won_by_nulls = sum(expert >= NUM_EXPERTS for won in winners for expert in won)
    torch.testing.assert_close(made.terms["counts"], torch.tensor([*expected, won_by_nulls / count]))
    assert not made.terms["counts"].requires_grad
    torch.testing.assert_close(made.terms["real"].detach(), torch.tensor([sum(expected)]))
    assert float(made.terms["tokens"]) == len(winners)
    joint = torch.cat([seen.logits_TE, null_logits(gate, seen)], dim=1).softmax(dim=1)
    torch.testing.assert_close(made.terms["probs"], joint[~dead_T].sum(dim=0))


@pytest.mark.parametrize("count", COUNTS)
def test_gradients_are_those_of_the_relaxation(count: int) -> None:
    seen, gate = random_layer(4, torch.float64), nulls(count, 6, torch.float64)
    temperature = 0.9
    generator = torch.Generator().manual_seed(0)
    weights_Tk = torch.randn(len(seen.x_Td), TOP_K, generator=generator, dtype=torch.float64)
    weights_C = torch.randn(NUM_EXPERTS + count, generator=generator, dtype=torch.float64)

    def value() -> torch.Tensor:
        made = gate.soft(LAYER, seen.x_Td, seen.signals, seen.pack, {}, context(temperature=temperature))
        assert made is not None and made.experts is not None
        terms = made.terms
        return (made.experts * weights_Tk).sum() + 0.3 * terms["real"][0] + terms["probs"] @ weights_C

    def surrogate() -> torch.Tensor:
        null_TZ = null_logits(gate, seen)
        sorted_TZ = null_TZ.sort(dim=1, descending=True).values
        total = torch.zeros((), dtype=torch.float64)
        for j in range(TOP_K):
            real_T = seen.logits_TE.sort(dim=1, descending=True).values[:, j]
            rank = TOP_K - j
            mass_T = torch.ones_like(real_T)
            if rank <= count:
                mass_T = 1 / (1 + ((sorted_TZ[:, rank - 1] - real_T) / temperature).exp())
            total = total + (mass_T * (weights_Tk[:, j] + 0.3)).sum()
        joint = torch.cat([seen.logits_TE, null_TZ], dim=1).softmax(dim=1)
        return total + (joint @ weights_C).sum()

    assert_gradients_match(gate, value, surrogate)


def test_a_slot_for_which_no_null_competes_has_no_bad_gradient() -> None:
    seen, gate = random_layer(0), nulls(1)
    made = gate.soft(LAYER, seen.x_Td, seen.signals, seen.pack, {}, context())
    assert made is not None and made.experts is not None
    assert bool((made.experts[:, : TOP_K - 1] == 1).all())
    made.experts.sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in gate.parameters() if p.grad is not None)


def test_nulls_are_charged() -> None:
    seen, gate = random_layer(0), nulls(4)
    signals = seen.signals
    gate.hard(LAYER, seen.x_Td, signals, seen.pack)
    assert signals.charged == 2 * D * 4


class _Lowest:
    """Full compute that notes the router's logit of the last slot, by sorting all of them."""

    gate_flops_per_token = 0.0

    def __init__(self) -> None:
        self.layers: dict[int, torch.Tensor] = {}

    def decide(self, layer: int, x_Td: torch.Tensor, signals: Signals, pack: Pack) -> Decision:
        k = signals.expert_ids_Tk.shape[1]
        self.layers[layer] = signals.router_logits_TE.sort(dim=1, descending=True).values[:, k - 1]
        return Full().decide(layer, x_Td, signals, pack)


def test_at_the_start_few_tokens_lose_an_expert(tmp_path: Path) -> None:
    backbone = load_backbone(write_tiny_checkpoint(tmp_path))
    embedded = backbone.embed_inputs(every_modality(backbone.preprocessor))
    floor_N = router_floor(backbone, embedded, batch_size=2)
    lowest = _Lowest()
    encode(backbone, *backbone.pack(embedded), lowest)
    for layer, logit_T in lowest.layers.items():
        # Batches of another size are rounded otherwise.
        lost = int((logit_T <= floor_N[layer] + 1e-6).sum())
        assert 1 <= lost <= FLOOR_SHARE * len(logit_T) + 1
    gate = NullExperts(backbone.num_experts, backbone.num_layers, backbone.hidden_size)
    gate.start_at(floor_N)
    trace = encode(backbone, *backbone.pack(embedded), StraightThroughGates([gate]).policy()).trace
    full = encode(backbone, *backbone.pack(embedded), Full()).trace
    assert 0.9 < float(trace.rows_NS[0].sum() / full.rows_NS[0].sum()) < 1.0
