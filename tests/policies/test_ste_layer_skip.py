"""The layer-skip gate in training: one decision an input, from a layer on."""

from __future__ import annotations

import pytest
import torch

from rlcompute.errors import ConfigError
from rlcompute.policies.draws import as_keys, rollout_key, uniform
from rlcompute.policies.ste_layer_skip import LayerSkip
from tests.policies.ste_inputs import (
    LENGTHS,
    NUM_LAYERS,
    D,
    Layer,
    assert_gradients_match,
    context,
    random_layer,
    randomised,
)

FIRST = 1


def skip(seed: int = 0, dtype: torch.dtype = torch.float32) -> LayerSkip:
    return randomised(LayerSkip(FIRST, NUM_LAYERS, D), seed, dtype)  # type: ignore[return-value]


def keys(iteration: int = 0) -> torch.Tensor:
    return as_keys([rollout_key(1, iteration, str(i), "query", 0) for i in range(len(LENGTHS))])


def logits(gate: LayerSkip, layer: int, emb_Sd: torch.Tensor) -> torch.Tensor:
    unit_Sd = emb_Sd / (emb_Sd**2).mean(dim=1, keepdim=True) ** 0.5
    return unit_Sd @ gate.heads.weight_nd[layer - FIRST] + gate.heads.bias_n[layer - FIRST] - gate.threshold


def without_standardisation(gate: LayerSkip) -> LayerSkip:
    gate.heads.mean_nd.zero_()
    gate.heads.scale_n.fill_(1.0)
    return gate


def test_early_layers_are_never_skipped() -> None:
    seen, gate = random_layer(0), skip()
    assert gate.soft_bypass(FIRST - 1, seen.emb_Sd, seen.pack, {}, context()) is None
    assert gate.hard_bypass(FIRST - 1, seen.emb_Sd, seen.pack) is None
    last = gate.hard_bypass(NUM_LAYERS - 1, seen.emb_Sd, seen.pack)
    assert last is not None and last.flops_per_segment == 2 * D


def test_the_size_of_the_hidden_state_does_not_matter() -> None:
    seen, gate = random_layer(0), without_standardisation(skip(1))
    for layer in range(FIRST, NUM_LAYERS):
        made = gate.hard_bypass(layer, seen.emb_Sd, seen.pack)
        larger = gate.hard_bypass(layer, 37.0 * seen.emb_Sd, seen.pack)
        assert made is not None and larger is not None
        assert torch.equal(made.skip_S, larger.skip_S)
        assert torch.equal(made.skip_S, logits(gate, layer, seen.emb_Sd) > 0)


def test_a_hidden_state_of_zeros_has_a_logit() -> None:
    seen, gate = random_layer(0), without_standardisation(skip())
    made = gate.soft_bypass(FIRST, torch.zeros_like(seen.emb_Sd), seen.pack, {}, context())
    assert made is not None and bool(made.run_S.isfinite().all())


def test_terms_count_inputs() -> None:
    seen, gate = random_layer(3), skip(3)
    made = gate.soft_bypass(2, seen.emb_Sd, seen.pack, {}, context(keys_S=keys()))
    assert made is not None
    torch.testing.assert_close(made.terms["skipped"][0], (1 - made.run_S).sum())
    assert float(made.terms["inputs"]) == len(LENGTHS)


def test_noise_depends_on_its_keys_and_the_layer() -> None:
    gate = LayerSkip(FIRST, NUM_LAYERS, D)
    gate.heads.bias_n.data.zero_()
    seen = random_layer(0)

    def runs(iteration: int) -> list[torch.Tensor]:
        made = [
            gate.soft_bypass(layer, seen.emb_Sd, seen.pack, {}, context(keys_S=keys(iteration)))
            for layer in range(FIRST, NUM_LAYERS)
        ]
        return [x.run_S.detach().round() for x in made if x is not None]

    several = [torch.stack(runs(iteration)) for iteration in range(300)]
    assert torch.equal(several[0], torch.stack(runs(0)))
    share = torch.stack(several).mean(dim=0)
    assert float((share - 0.5).abs().max()) < 4 * (0.25 / 300) ** 0.5
    layers = torch.stack(several)
    assert not torch.equal(layers[:, 0], layers[:, 1])


@pytest.mark.parametrize("noisy", [False, True])
def test_gradients_are_those_of_the_relaxation(noisy: bool) -> None:
    layers: list[Layer] = [random_layer(seed, torch.float64) for seed in range(NUM_LAYERS)]
    gate = without_standardisation(skip(2, torch.float64))
    keys_S, temperature = (keys() if noisy else None), 1.3
    weights_S = torch.linspace(-1.0, 2.0, len(LENGTHS), dtype=torch.float64)

    def value() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer in range(FIRST, NUM_LAYERS):
            seen = layers[layer]
            made = gate.soft_bypass(
                layer, seen.emb_Sd, seen.pack, {}, context(keys_S=keys_S, temperature=temperature)
            )
            assert made is not None
            total = total + (made.run_S * weights_S).sum() + 4.0 * made.terms["skipped"][0]
        return total

    def surrogate() -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for layer in range(FIRST, NUM_LAYERS):
            seen = layers[layer]
            logits_S = logits(gate, layer, seen.emb_Sd)
            if keys_S is not None:
                index_S = seen.pack.token_index_T[seen.pack.emb_index_S]
                u_S = uniform(keys_S, layer, index_S)
                logits_S = logits_S + u_S.log() - (1 - u_S).log()
            skip_S = 1 / (1 + (-logits_S / temperature).exp())
            total = total + ((1 - skip_S) * weights_S + 4.0 * skip_S).sum()
        return total

    assert_gradients_match(gate, value, surrogate)


@pytest.mark.parametrize("first", [-1, NUM_LAYERS])
def test_a_layer_that_does_not_exist_is_refused(first: int) -> None:
    with pytest.raises(ConfigError, match="layer_first"):
        LayerSkip(first, NUM_LAYERS, D)
