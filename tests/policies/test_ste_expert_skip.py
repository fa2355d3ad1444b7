"""The expert-skip gate in training: a fade or a decision, counted over what is alive."""

from __future__ import annotations

import torch

from rlcompute.policies.ste_expert_skip import ExpertSkip
from tests.policies.ste_inputs import (
    NUM_LAYERS,
    D,
    assert_gradients_match,
    context,
    random_layer,
    randomised,
    standard_logits,
)


def skip(seed: int = 0, dtype: torch.dtype = torch.float32) -> ExpertSkip:
    return randomised(ExpertSkip(NUM_LAYERS, D), seed, dtype)  # type: ignore[return-value]


def test_the_routed_output_fades_by_the_probability_of_skipping() -> None:
    seen, gate = random_layer(1, torch.float64), skip(1, torch.float64)
    made = gate.soft(2, seen.x_Td, seen.signals, seen.pack, {}, context(temperature=3.0))
    assert made is not None and made.experts is not None and made.stay is None
    p_T = 1 / (1 + (gate.threshold - standard_logits(gate.heads, 2, seen.x_Td)).exp())
    torch.testing.assert_close(made.experts, 1 - p_T)
    torch.testing.assert_close(made.terms["skipped"], p_T.sum()[None])
    assert float(made.terms["tokens"]) == len(p_T)


def test_the_fade_is_over_one_half_where_inference_runs_the_experts() -> None:
    seen, gate = random_layer(1), skip(1)
    made = gate.soft(0, seen.x_Td, seen.signals, seen.pack, {}, context())
    decision = gate.hard(0, seen.x_Td, seen.signals, seen.pack)
    assert made is not None and made.experts is not None and decision is not None
    assert decision.keep is not None and 0 < int(decision.keep.sum()) < len(seen.x_Td)
    assert torch.equal(made.experts >= 0.5, decision.keep)


def test_dropped_tokens_are_not_counted() -> None:
    seen, gate = random_layer(2), skip(2)
    dead_T = torch.arange(len(seen.x_Td)) % 3 == 0
    made = gate.soft(1, seen.x_Td, seen.signals, seen.with_dead(dead_T), {}, context())
    assert made is not None and made.experts is not None
    torch.testing.assert_close(made.terms["skipped"][0], (1 - made.experts)[~dead_T].sum())
    assert float(made.terms["tokens"]) == float((~dead_T).sum())


def test_gradients_are_those_of_the_fade() -> None:
    layers = [random_layer(seed, torch.float64) for seed in range(NUM_LAYERS)]
    gate = skip(4, torch.float64)

    def value() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer, seen in enumerate(layers):
            made = gate.soft(layer, seen.x_Td, seen.signals, seen.pack, {}, context())
            assert made is not None and made.experts is not None
            weights_T = torch.linspace(-1.0, 2.0, len(seen.x_Td), dtype=torch.float64)
            total = total + (made.experts * weights_T).sum() + 2.0 * made.terms["skipped"][0]
        return total

    def surrogate() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer, seen in enumerate(layers):
            logits_T = standard_logits(gate.heads, layer, seen.x_Td) - gate.threshold
            kept_T = 1 / (1 + logits_T.exp())
            weights_T = torch.linspace(-1.0, 2.0, len(seen.x_Td), dtype=torch.float64)
            total = total + (kept_T * weights_T + 2.0 * (1 - kept_T)).sum()
        return total

    assert_gradients_match(gate, value, surrogate)


def test_every_token_of_every_layer_is_charged() -> None:
    seen, gate = random_layer(0), skip()
    signals = seen.signals
    for layer in range(NUM_LAYERS):
        gate.hard(layer, seen.x_Td, signals, seen.pack)
    assert signals.charged == NUM_LAYERS * 2 * D
