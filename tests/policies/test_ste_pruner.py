"""The one-shot token pruner in training: which tokens it is about, its noise, its gradients."""

from __future__ import annotations

import pytest
import torch

from rlcompute.errors import ConfigError
from rlcompute.pack import TEXT
from rlcompute.policies.draws import as_keys, rollout_key, uniform
from rlcompute.policies.ste_gate import LinearHeads, relaxed
from rlcompute.policies.ste_pruner import TokenPruner
from tests.policies.ste_inputs import (
    LENGTHS,
    NUM_LAYERS,
    PRUNE_LAYER,
    D,
    assert_gradients_match,
    context,
    random_layer,
    randomised,
    standard_logits,
)


def keys(n: int = len(LENGTHS), iteration: int = 0) -> torch.Tensor:
    return as_keys([rollout_key(1, iteration, str(i), "query", 0) for i in range(n)])


def pruner(seed: int = 0, dtype: torch.dtype = torch.float32) -> TokenPruner:
    return randomised(TokenPruner(PRUNE_LAYER, NUM_LAYERS, D), seed, dtype)  # type: ignore[return-value]


def test_text_and_emb_stay_whatever_the_logits() -> None:
    seen, gate = random_layer(0), pruner()
    # An <emb> token that is marked as an image's is still <emb>.
    seen.pack.modality_T[seen.pack.emb_index_S] = 1
    gate.threshold.fill_(1e6)
    never_T = (seen.pack.modality_T == TEXT) | seen.pack.is_emb_T()
    soft = gate.soft(PRUNE_LAYER, seen.x_Td, seen.signals, seen.pack, {}, context(keys_S=keys()))
    hard = gate.hard(PRUNE_LAYER, seen.x_Td, seen.signals, seen.pack)
    assert soft is not None and hard is not None
    torch.testing.assert_close(soft.stay.detach(), never_T.float(), rtol=0, atol=1e-6)
    assert torch.equal(hard.drop_T, ~never_T)
    assert float(soft.terms["tokens"]) == float((~never_T).sum())


@pytest.mark.parametrize("layer", [x for x in range(NUM_LAYERS) if x != PRUNE_LAYER])
def test_it_acts_and_costs_in_its_layer_alone(layer: int) -> None:
    seen, gate = random_layer(0), pruner()
    signals = seen.signals
    assert gate.soft(layer, seen.x_Td, signals, seen.pack, {}, context()) is None
    assert gate.hard(layer, seen.x_Td, signals, seen.pack) is None
    assert signals.charged == 0.0
    gate.hard(PRUNE_LAYER, seen.x_Td, signals, seen.pack)
    assert signals.charged == 2 * D


def test_logits_are_linear_in_standardised_inputs() -> None:
    seen, gate = random_layer(0, torch.float64), pruner(3, torch.float64)
    expected_T = standard_logits(gate.heads, 0, seen.x_Td)
    torch.testing.assert_close(gate.heads(0, seen.x_Td), expected_T)


def test_dropped_tokens_are_not_counted() -> None:
    seen, gate = random_layer(0), pruner(1)
    visual_T = (seen.pack.modality_T != TEXT) & ~seen.pack.is_emb_T()
    dead_T = torch.zeros_like(visual_T)
    dead_T[visual_T.nonzero()[::2, 0]] = True
    whole = gate.soft(PRUNE_LAYER, seen.x_Td, seen.signals, seen.pack, {}, context())
    rest = gate.soft(PRUNE_LAYER, seen.x_Td, seen.signals, seen.with_dead(dead_T), {}, context())
    assert whole is not None and rest is not None and whole.stay is not None
    assert float(rest.terms["tokens"]) == float((visual_T & ~dead_T).sum())
    torch.testing.assert_close(rest.terms["kept"][0], whole.stay[visual_T & ~dead_T].sum())


@pytest.mark.parametrize("noisy", [False, True])
def test_gradients_are_those_of_the_relaxation(noisy: bool) -> None:
    seen, gate = random_layer(5, torch.float64), pruner(2, torch.float64)
    keys_S, temperature = (keys() if noisy else None), 0.8
    visual_T = (seen.pack.modality_T != TEXT) & ~seen.pack.is_emb_T()
    weights_T = torch.linspace(-1.0, 2.0, len(visual_T), dtype=torch.float64)

    def value() -> torch.Tensor:
        made = gate.soft(
            PRUNE_LAYER,
            seen.x_Td,
            seen.signals,
            seen.pack,
            {},
            context(keys_S=keys_S, temperature=temperature),
        )
        assert made is not None and made.stay is not None
        return (made.stay * weights_T).sum() + 3.0 * made.terms["kept"][0]

    def surrogate() -> torch.Tensor:
        logits_T = standard_logits(gate.heads, 0, seen.x_Td) - gate.threshold
        if keys_S is not None:
            u_T = uniform(keys_S[seen.pack.segment_ids_T], PRUNE_LAYER, seen.pack.token_index_T)
            logits_T = logits_T + u_T.log() - (1 - u_T).log()
        soft_T = 1 / (1 + (-logits_T / temperature).exp())
        return (soft_T * (weights_T + 3.0))[visual_T].sum()

    assert_gradients_match(gate, value, surrogate)


def test_noise_depends_on_its_keys_alone() -> None:
    seen, gate = random_layer(0), pruner()
    gate.heads.weight_nd.data.zero_()
    gate.heads.bias_n.data.zero_()
    gate.threshold.zero_()

    def stays(iteration: int) -> torch.Tensor:
        made = gate.soft(
            PRUNE_LAYER, seen.x_Td, seen.signals, seen.pack, {}, context(keys_S=keys(iteration=iteration))
        )
        assert made is not None and made.stay is not None
        return made.stay.detach()

    assert torch.equal(stays(0), stays(0)) and not torch.equal(stays(0), stays(1))


@pytest.mark.parametrize("logit", [-1.5, 0.0, 2.0])
def test_masses_are_one_with_the_probability_of_the_logit(logit: float) -> None:
    draws, index = 40, 500
    keys_T = keys(draws).repeat_interleave(index)
    logits_T = torch.full((draws * index,), logit)
    mass_T = relaxed(logits_T, 2, keys_T, torch.arange(index).repeat(draws), 1.0)
    expected = float(torch.sigmoid(torch.tensor(logit)))
    deviation = (expected * (1 - expected) / len(mass_T)) ** 0.5
    assert abs(float(mass_T.mean()) - expected) < 4 * deviation


def test_the_temperature_leaves_values_alone() -> None:
    index = torch.arange(200)
    logits_T = torch.linspace(-2.0, 2.0, 200)
    keys_T = keys(1).expand(200)
    values = [relaxed(logits_T, 0, keys_T, index, temperature).round() for temperature in (0.5, 4.0)]
    assert torch.equal(values[0], values[1])


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS - 1])
def test_a_layer_that_cannot_prune_is_refused(layer: int) -> None:
    with pytest.raises(ConfigError, match="prune_layer"):
        TokenPruner(layer, NUM_LAYERS, D)


def test_heads_without_weights_say_their_bias() -> None:
    heads = LinearHeads(2, D, 1.25)
    assert torch.equal(heads(1, torch.randn(3, D)), torch.full((3,), 1.25))
