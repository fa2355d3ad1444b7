"""Halting gates against a version that follows one token at a time, on made-up layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.errors import CheckpointError, ConfigError
from rlcompute.pack import TEXT, Pack
from rlcompute.policies.draws import uniform
from rlcompute.policies.gates import Droppable
from rlcompute.policies.ste_halting import AvitHalting, BetaHalting, CumulativeHalting
from rlcompute.policies.ste_halting_base import Prior, TokenHalting
from tests.policies.halting_inputs import (
    IS_ATTENTION,
    KINDS,
    RATE,
    N,
    Shows,
    drawn,
    make,
    one_by_one,
    prior,
    shows,
)
from tests.policies.ste_inputs import (
    D,
    assert_gradients_match,
    random_pack,
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), droppable=st.sampled_from(["visual", "all"]))
def test_masses_and_terms_are_those_of_tokens_one_by_one(kind: str, seed: int, droppable: Droppable) -> None:
    seen, gate = shows(seed), drawn(kind, seed, droppable=droppable).double()
    masses, terms = seen.soft(gate)
    tokens = one_by_one(gate, seen)
    expected = torch.ones_like(masses)
    for row, token in tokens.items():
        assert len(token.q) == N and math.isclose(sum(token.q), 1.0, rel_tol=1e-9)
        expected[token.halted_in :, row] = 0.0
    torch.testing.assert_close(masses, expected, rtol=0, atol=0)

    q_TN = torch.tensor([token.q for token in tokens.values()], dtype=torch.float64)
    assert terms["tokens"].tolist() == [len(tokens)] * N
    layers = torch.arange(1, N + 1)
    torch.testing.assert_close(terms["steps"].sum(), (q_TN * layers).sum())
    torch.testing.assert_close(terms["steps"], q_TN.flip(1).cumsum(1).flip(1).sum(0))
    kl = sum(q * math.log(q / prior(n)) for row in q_TN.tolist() for n, q in enumerate(row, 1) if q > 0)
    torch.testing.assert_close(float(terms["kl"].detach().sum()), kl, rtol=1e-6, atol=1e-6)


def test_the_made_up_gates_halt_somewhere_and_not_everywhere() -> None:
    """So that the comparisons here compare something."""
    for kind in KINDS:
        halted = [
            token.halted_in
            for seed in range(20)
            for token in one_by_one(drawn(kind, seed), shows(seed)).values()
        ]
        assert len(set(halted)) >= N - 2 and N - 1 in halted, (kind, set(halted))


def survival(gate: TokenHalting, seen: Shows, noise_NT: Tensor) -> Tensor:
    """A of the docstrings, [N-1,T], from the gate's parameters."""
    temperature, rows = 1.7, []
    lefts = torch.ones_like(noise_NT[0])
    for layer in range(N - 1):
        if isinstance(gate, BetaHalting):
            read = [seen.beta_NTV[j].mean(1) for j in range(layer + 1) if not IS_ATTENTION[j]]
            if read:
                z = (torch.stack(read).mean(0) - gate.mean_M[layer]) / gate.scale_M[layer]
                slope = torch.log1p(gate.slope_M[layer].exp())
                lefts = lefts * torch.sigmoid(
                    (slope * (z - gate.center_M[layer]) - noise_NT[layer]) / temperature
                )
            rows.append(lefts)
            continue
        assert isinstance(gate, AvitHalting | CumulativeHalting)
        x_nTd = (seen.x_NTd - gate.mean_Nd[:, None]) / gate.scale_N[:, None, None]
        logits = torch.einsum("ntd,nd->nt", x_nTd[: layer + 1], gate.weight_Md[: layer + 1])
        bias_n1 = gate.bias_M[: layer + 1, None]
        if isinstance(gate, AvitHalting):
            rows.append(1 - torch.sigmoid(gate.gamma * logits + bias_n1).sum(0))
        else:
            z = torch.log1p((logits + bias_n1).exp()).sum(0) - gate.c
            rows.append(1 / (1 + ((z + noise_NT[0]) / temperature).exp()))
    return torch.stack(rows)


@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "noise"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_relaxed_survival(kind: str, noisy: bool) -> None:
    seen, gate = shows(3), drawn(kind, 3).double()
    keys_S = torch.arange(seen.pack.num_segments) * 31 if noisy else None
    masses, _ = seen.soft(gate, keys_S)
    mass_NT = masses.detach()
    assert 0 < int((mass_NT[-1] == 0).sum()) < mass_NT.shape[1]
    noise_NT = torch.zeros_like(mass_NT)
    if noisy and kind != "halt_avit":
        for layer in range(N - 1):
            noise_NT[layer] = logistic(31, N if kind == "halt_cumulative" else layer, seen.pack)
    may_T = (seen.pack.modality_T != TEXT) & ~seen.pack.is_emb_T()
    weight_NT = (
        torch.randn(masses.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * may_T
    )
    # A token that has halted keeps the survival of the layer in which it did.
    last_NT = torch.minimum(torch.arange(N - 1)[:, None], mass_NT.sum(0).long()).clamp_max(N - 2)
    assert_gradients_match(
        gate,
        lambda: (weight_NT * seen.soft(gate, keys_S)[0]).sum(),
        lambda: (weight_NT * survival(gate, seen, noise_NT).gather(0, last_NT)).sum(),
    )


def logistic(factor: int, layer: int, pack: Pack) -> Tensor:
    u = uniform(pack.segment_ids_T * factor, layer, pack.token_index_T)
    return torch.log(u) - torch.log1p(-u)


@pytest.mark.parametrize("name", ["steps", "kl"])
@pytest.mark.parametrize("kind", KINDS)
def test_terms_have_their_own_gradients(kind: str, name: str) -> None:
    seen, gate = shows(5), drawn(kind, 5).double()
    weight_N = torch.linspace(1.0, 2.0, N, dtype=torch.float64)

    def value() -> Tensor:
        return (weight_N * seen.soft(gate)[1][name]).sum()

    assert_gradients_match(gate, value, value)


@pytest.mark.parametrize("kind", ["halt_cumulative", "halt_beta"])
def test_with_noise_tokens_halt_as_often_as_the_terms_say(kind: str) -> None:
    pack = random_pack(torch.Generator().manual_seed(0), (6000,))
    same = shows(2)
    seen = Shows(pack, same.x_NTd[:, :1].expand(-1, 6000, -1), same.beta_NTV[:, :1].expand(-1, 6000, -1))
    gate = drawn(kind, 2, droppable="all").double()
    masses, terms = seen.soft(gate, torch.tensor([77]))
    left_N = masses.detach()[:, :-1].mean(1)
    there_N = (terms["steps"] / terms["tokens"]).detach()
    torch.testing.assert_close(left_N, there_N[1:], rtol=0, atol=0.02)
    assert float(there_N.diff().min()) < -0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_gate_starts_near_full_compute(kind: str) -> None:
    seen, gate = shows(0), make(kind, start=0.2).double()
    if kind == "halt_beta":
        # Of mean strength in every layer.
        seen.beta_NTV.zero_()
    masses, terms = seen.soft(gate)
    assert bool((masses == 1).all())
    torch.testing.assert_close(terms["steps"][-1], 0.8 * terms["tokens"][0], rtol=1e-5, atol=0)


def test_beta_halts_weak_tokens_first_whatever_is_learned() -> None:
    seen = shows(1)
    seen.beta_NTV.copy_(
        torch.linspace(0.01, 0.99, seen.x_NTd.shape[1])[None, :, None].expand_as(seen.beta_NTV)
    )
    for seed in range(5):
        gate = drawn("halt_beta", seed, droppable="all").double()
        gate.get_parameter("slope_M").data.mul_(20)
        gate.get_buffer("mean_M").fill_(0.5)
        left_T = seen.soft(gate)[0][-1][~seen.pack.is_emb_T()]
        assert bool((left_T.diff() >= 0).all())


def test_prior_is_a_distribution_and_its_divergence_safe_at_zero() -> None:
    told = Prior(RATE, N)
    assert math.isclose(sum(math.exp(told.log(layer)) for layer in range(N)), 1.0)
    for layer in range(N):
        assert math.isclose(math.exp(told.log(layer)), prior(layer + 1))
    q = torch.tensor([0.0, 1e-45, 1.0], requires_grad=True)
    values = told.divergence(q, 2)
    values.sum().backward()
    assert q.grad is not None and bool(q.grad.isfinite().all())
    assert values[0].item() == 0.0 and math.isclose(values[2].item(), -math.log(prior(3)), rel_tol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_described_gates_come_back(kind: str) -> None:
    gate = drawn(kind, 4, droppable="all")
    again = type(gate).create(gate.describe())
    again.load_state_dict(gate.state_dict(), strict=True)
    assert again.describe() == gate.describe()
    seen = shows(4)
    assert torch.equal(seen.soft(gate.double())[0], seen.soft(again.double())[0])
    with pytest.raises(CheckpointError):
        type(gate).create({**gate.describe(), "rate": 2.0})


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: AvitHalting(N, D, rate=1.0),
        lambda: AvitHalting(1, D, rate=RATE),
        lambda: AvitHalting(N, D, rate=RATE, eps=0.0),
        lambda: CumulativeHalting(N, D, rate=RATE, start=0.5),
        lambda: CumulativeHalting(N, D, rate=RATE, start=0.1, c=2.0),
        lambda: BetaHalting([True, True, False], rate=RATE),
    ],
)
def test_impossible_gates_are_refused(wrong: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError):
        wrong()
