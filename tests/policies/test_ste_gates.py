"""Sets of gates: training decides what inference decides, and a set survives being saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.decision import Decision
from rlcompute.errors import CheckpointError
from rlcompute.policies.checkpoint import load_gates, save_gates
from rlcompute.policies.ste_expert_skip import ExpertSkip
from rlcompute.policies.ste_gate import SteGate
from rlcompute.policies.ste_gates import Observed, StraightThroughGates
from rlcompute.soft_decision import Carry, SoftBypass, SoftDecision
from tests.policies.ste_inputs import (
    MAKE,
    NUM_LAYERS,
    PRUNE_LAYER,
    TOP_K,
    Layer,
    context,
    random_layer,
    randomised,
    saturated,
)

SETS = [(kind,) for kind in MAKE] + [tuple(MAKE)]
IDS = ["+".join(kinds) for kinds in SETS]


def gates_of(kinds: tuple[str, ...], seed: int = 0) -> StraightThroughGates:
    return StraightThroughGates([randomised(MAKE[kind](), seed + i) for i, kind in enumerate(kinds)])


def slots(keep: Tensor | None, tokens: int) -> Tensor:
    """Which slots a decision runs, bool [T,k]."""
    if keep is None:
        return torch.ones(tokens, TOP_K, dtype=torch.bool)
    return keep[:, None].expand(-1, TOP_K) if keep.ndim == 1 else keep


def drops(decision: Decision, tokens: int) -> Tensor:
    return torch.zeros(tokens, dtype=torch.bool) if decision.drop_T is None else decision.drop_T


@pytest.mark.parametrize("kinds", SETS, ids=IDS)
def test_masses_are_what_inference_decides(kinds: tuple[str, ...]) -> None:
    decided = set()
    for seed in range(4):
        gates = StraightThroughGates([saturated(gate) for gate in gates_of(kinds, seed).gates.values()])
        soft, hard = gates.soft_policy(context(temperature=0.7)), gates.policy()
        for layer in range(NUM_LAYERS):
            seen = random_layer(seed * NUM_LAYERS + layer)
            soft_signals, hard_signals, tokens = seen.signals, seen.signals, len(seen.x_Td)
            masses = soft.decide(layer, seen.x_Td, soft_signals, seen.pack, {})
            decision = hard.decide(layer, seen.x_Td, hard_signals, seen.pack)
            assert soft_signals.charged == hard_signals.charged
            assert masses.renormalize == decision.renormalize

            stay_T = torch.ones(tokens) if masses.stay is None else masses.stay
            torch.testing.assert_close(stay_T.detach(), (~drops(decision, tokens)).float(), rtol=0, atol=1e-6)
            experts = torch.ones(tokens) if masses.experts is None else masses.experts
            experts_Tk = experts[:, None].expand(-1, TOP_K) if experts.ndim == 1 else experts
            expected_Tk = slots(decision.keep, tokens).float()
            torch.testing.assert_close(experts_Tk.detach(), expected_Tk, rtol=0, atol=1e-6)

            bypass = hard.bypass(layer, seen.emb_Sd, seen.pack)
            passed = soft.bypass(layer, seen.emb_Sd, seen.pack, {})
            assert (bypass is None) == (passed is None)
            skip_S = torch.zeros(seen.pack.num_segments, dtype=torch.bool)
            if bypass is not None and passed is not None:
                skip_S = bypass.skip_S
                assert bypass.flops_per_segment == passed.flops_per_segment
                torch.testing.assert_close(passed.run_S.detach(), (~skip_S).float(), rtol=0, atol=1e-6)
            decided |= {("drop", bool(x)) for x in drops(decision, tokens)}
            decided |= {("keep", bool(x)) for x in expected_Tk.flatten()} | {
                ("pass", bool(x)) for x in skip_S
            }
    both = {"token_pruner": "drop", "expert_skip": "keep", "layer_skip": "pass", "null_experts": "keep"}
    assert {(both[kind], value) for kind in kinds for value in (True, False)} <= decided


def test_the_masses_of_several_gates_multiply() -> None:
    seen, together = random_layer(3), gates_of(tuple(MAKE), 5)
    soft = together.soft_policy(context())
    merged = soft.decide(PRUNE_LAYER, seen.x_Td, seen.signals, seen.pack, {})
    single = {
        gate.kind: gate.soft(PRUNE_LAYER, seen.x_Td, seen.signals, seen.pack, {}, context())
        for gate in together.gates.values()
    }
    torch.testing.assert_close(merged.stay, single["token_pruner"].stay)
    expected_Tk = single["expert_skip"].experts[:, None] * single["null_experts"].experts
    torch.testing.assert_close(merged.experts, expected_Tk)
    assert merged.renormalize
    assert set(merged.terms) == {
        *(f"token_pruner/{name}" for name in ("kept", "tokens")),
        *(f"expert_skip/{name}" for name in ("skipped", "tokens")),
        *(f"null_experts/{name}" for name in ("real", "counts", "probs", "tokens")),
    }
    passed = soft.bypass(PRUNE_LAYER, seen.emb_Sd, seen.pack, {})
    assert passed is not None and set(passed.terms) == {"layer_skip/skipped", "layer_skip/inputs"}


class _Counter(SteGate):
    """Runs layers and keeps experts with half a mass each, and counts layers in what it hands on."""

    def soft(self, layer, x_Td, signals, pack, tokens, context):  # type: ignore[no-untyped-def]
        half_T = torch.full((len(x_Td),), 0.5)
        return SoftDecision(experts=half_T, tokens={"seen": tokens.get("seen", 0.0 * half_T) + 1.0})

    def soft_bypass(self, layer, emb_Sd, pack, segments, context):  # type: ignore[no-untyped-def]
        half_S = torch.full((pack.num_segments,), 0.5)
        carry = {"seen": segments.get("seen", 0.0 * half_S) + 1.0}
        return SoftBypass(half_S, 3.0, {"n": half_S.sum()[None]}, carry)


class _First(_Counter):
    kind = "first"


class _Second(_Counter):
    kind = "second"


def test_gates_find_again_what_they_handed_on_and_no_others() -> None:
    seen = random_layer(0)
    soft = StraightThroughGates([_First(), MAKE["null_experts"](), _Second()]).soft_policy(context())
    tokens: Carry = {}
    segments: Carry = {}
    for layer in range(3):
        passed = soft.bypass(layer, seen.emb_Sd, seen.pack, segments)
        made = soft.decide(layer, seen.x_Td, seen.signals, seen.pack, tokens)
        assert passed is not None
        segments, tokens = passed.segments, made.tokens
        assert set(segments) == set(tokens) == {"first/seen", "second/seen"}
        for carried in (*segments.values(), *tokens.values()):
            assert bool((carried == layer + 1).all())
        assert bool((passed.run_S == 0.25).all()) and passed.flops_per_segment == 6.0
        assert set(passed.terms) == {"first/n", "second/n"}
        assert made.experts is not None and float(made.experts.detach().max()) == 0.25
        assert made.renormalize, "one gate that asks for it is enough"


def test_without_training_gates_are_near_full_compute() -> None:
    gates = StraightThroughGates([MAKE[kind]() for kind in ("token_pruner", "expert_skip", "layer_skip")])
    policy = gates.policy()
    for layer in range(NUM_LAYERS):
        seen = random_layer(layer)
        decision = policy.decide(layer, seen.x_Td, seen.signals, seen.pack)
        assert not drops(decision, len(seen.x_Td)).any() and slots(decision.keep, len(seen.x_Td)).all()
        bypass = policy.bypass(layer, seen.emb_Sd, seen.pack)
        assert bypass is None or not bypass.skip_S.any()


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    rate=st.floats(0.0, 1.0),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=60)
def test_a_settled_threshold_meets_the_rate_within_one(lengths: list[int], rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(n, generator=generator) for n in lengths]
    gate = ExpertSkip(NUM_LAYERS, 2)
    gate.settle(logits, rate)
    above = sum(int((x - gate.threshold > 0).sum()) for x in logits)
    assert abs(above - rate * sum(lengths)) <= 1.0


def _rates(gates: StraightThroughGates, layers: list[Layer]) -> dict[str, float]:
    """Share of decisions above the threshold, by kind, from what the policy decides."""
    policy, done = gates.policy(), {"token_pruner": [], "expert_skip": [], "layer_skip": []}
    done["null_experts"] = []
    for layer, seen in enumerate(layers):
        decision = policy.decide(layer, seen.x_Td, seen.signals, seen.pack)
        if decision.drop_T is not None:
            visual_T = (seen.pack.modality_T != 0) & ~seen.pack.is_emb_T()
            done["token_pruner"].append(~decision.drop_T[visual_T])
        if decision.keep is not None:
            kind = "expert_skip" if decision.keep.ndim == 1 else "null_experts"
            done[kind].append((~decision.keep if kind == "expert_skip" else decision.keep).flatten())
        bypass = policy.bypass(layer, seen.emb_Sd, seen.pack)
        if bypass is not None:
            done["layer_skip"].append(bypass.skip_S)
    return {kind: float(torch.cat(x).float().mean()) for kind, x in done.items() if x}


@pytest.mark.parametrize("kind", MAKE)
def test_a_settled_gate_decides_at_the_wanted_rate(kind: str) -> None:
    layers = [random_layer(seed) for seed in range(NUM_LAYERS)]
    gates = gates_of((kind,), 11)
    observed = Observed()
    policy = gates.policy(observed)
    for layer, seen in enumerate(layers):
        policy.bypass(layer, seen.emb_Sd, seen.pack)
        policy.decide(layer, seen.x_Td, seen.signals, seen.pack)
    wanted = 0.4
    gates.settle(observed.logits, {kind: wanted})
    decisions = sum(len(x) for x in observed.logits[kind])
    assert _rates(gates, layers)[kind] == pytest.approx(wanted, abs=1.0 / decisions)


def test_gates_without_a_wanted_rate_keep_their_threshold() -> None:
    gates = gates_of(("expert_skip", "layer_skip"))
    before = float(gates.gates["layer_skip"].threshold)
    gates.settle({"expert_skip": [torch.arange(10.0)]}, {"expert_skip": 0.3})
    assert float(gates.gates["expert_skip"].threshold) == pytest.approx(6.5)
    assert float(gates.gates["layer_skip"].threshold) == before


@pytest.mark.parametrize("kind", MAKE)
def test_a_shift_saves_more_and_leaves_the_original(kind: str) -> None:
    layers = [random_layer(seed) for seed in range(NUM_LAYERS)]
    gates = gates_of((kind,), 3)
    saves = 1.0 if kind in ("expert_skip", "layer_skip") else -1.0
    before = _rates(gates, layers)[kind]
    rates = [_rates(gates.shifted(amount), layers)[kind] for amount in (-30.0, 0.0, 0.5, 30.0)]
    ordered = [saves * rate for rate in rates]
    assert ordered == sorted(ordered) and ordered[0] < ordered[1] < ordered[3]
    assert {rates[0], rates[3]} == {0.0, 1.0}
    assert rates[1] == before == _rates(gates, layers)[kind]


def test_a_set_survives_being_saved(tmp_path: Path) -> None:
    gates = gates_of(tuple(MAKE), 2)
    save_gates(tmp_path, gates, {"path": "p", "family": "f", "hash": "h"}, {})
    loaded = load_gates(tmp_path).gates
    assert isinstance(loaded, StraightThroughGates)
    assert list(loaded.gates) == list(MAKE) and loaded.describe() == gates.describe()
    for name, tensor in gates.tensors().items():
        torch.testing.assert_close(loaded.tensors()[name], tensor, rtol=0, atol=0)
    layers = [random_layer(seed) for seed in range(NUM_LAYERS)]
    assert _rates(loaded, layers) == _rates(gates, layers)
    assert loaded.droppable == "visual" and len(loaded.summary()) == len(MAKE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda description, tensors: description.update(teleporter={}), "teleporter"),
        (lambda description, tensors: description["expert_skip"].pop("num_layers"), "expert_skip"),
        (lambda description, tensors: description["expert_skip"].update(hidden_size=3), "weight_nd"),
        (lambda description, tensors: description["token_pruner"].update(layer=99), "token_pruner"),
        (lambda description, tensors: tensors.pop("token_pruner.threshold"), "token_pruner.threshold"),
        (lambda description, tensors: tensors.update(more=torch.zeros(1)), "more"),
    ],
)
def test_what_does_not_fit_is_refused(change, message) -> None:  # type: ignore[no-untyped-def]
    gates = gates_of(("token_pruner", "expert_skip"))
    description, tensors = gates.describe(), gates.tensors()
    change(description, tensors)
    with pytest.raises(CheckpointError, match=message):
        StraightThroughGates.create(description, tensors)
