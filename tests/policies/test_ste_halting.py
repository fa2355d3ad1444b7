"""Halting gates against a version that follows one token at a time, on made-up layers and through the encoder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError, ConfigError
from rlcompute.pack import TEXT, EmbeddedInput, Pack
from rlcompute.policies.draws import uniform
from rlcompute.policies.gates import Droppable, calibrate
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_halting import AvitHalting, BetaHalting, CumulativeHalting
from rlcompute.policies.ste_halting_base import Prior, TokenHalting
from rlcompute.soft_decision import Carry
from rlcompute.soft_encoder import encode_soft
from tests.inputs import every_modality
from tests.policies.ste_inputs import (
    D,
    FakeSignals,
    assert_gradients_match,
    context,
    random_layer,
    random_pack,
)
from tests.tiny import write_tiny_checkpoint

DELTA, ATTENTION = "linear_attention", "full_attention"
LAYER_TYPES = (ATTENTION, DELTA, DELTA, ATTENTION, DELTA, DELTA)
IS_ATTENTION = [kind == ATTENTION for kind in LAYER_TYPES]
N = len(LAYER_TYPES)
RATE = 0.3
KINDS = ("halt_avit", "halt_cumulative", "halt_beta")
Token = tuple[int, int]
"""Segment, and place in the original input."""


def make(kind: str, d: int = D, droppable: Droppable = "visual", start: float = 0.1) -> TokenHalting:
    if kind == "halt_beta":
        return BetaHalting(IS_ATTENTION, rate=RATE, start=start, droppable=droppable)
    made = AvitHalting if kind == "halt_avit" else CumulativeHalting
    return made(N, d, rate=RATE, start=start, droppable=droppable)


def drawn(kind: str, seed: int, d: int = D, droppable: Droppable = "visual") -> TokenHalting:
    """Random weights under which some tokens halt in every layer, and some never."""
    generator = torch.Generator().manual_seed(seed)
    gate = make(kind, d, droppable)
    shift = {"halt_avit": -1.0, "halt_cumulative": 0.4, "halt_beta": -0.7}[kind]
    with torch.no_grad():
        for name, parameter in gate.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * (0.6 / math.sqrt(d) if name == "weight_Md" else 0.4))
            if name in ("bias_M", "center_M"):
                parameter.add_(shift)
        if isinstance(gate, BetaHalting):
            gate.mean_M.fill_(0.5)
            gate.scale_M.fill_(0.12)
        elif isinstance(gate, AvitHalting | CumulativeHalting):
            gate.mean_Nd.copy_(torch.rand(gate.mean_Nd.shape, generator=generator) + 0.5)
            gate.scale_N.copy_(torch.rand(N, generator=generator) + 1.5)
    return gate


class Shown(FakeSignals):
    """Signals whose write strengths are made up."""

    def __init__(self, beta_TV: Tensor) -> None:
        super().__init__(torch.zeros(len(beta_TV), 4))
        self._beta_TV = beta_TV

    @property
    def write_strength_TV(self) -> Tensor:
        return self._beta_TV


@dataclass
class Shows:
    """What all layers show a gate when every token is still there, float64."""

    pack: Pack
    x_NTd: Tensor
    beta_NTV: Tensor

    def soft(self, gate: TokenHalting, keys_S: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Masses after each layer but the last [N-1,T], and terms by name [N]."""
        carry: Carry = {}
        masses, terms = [torch.ones_like(self.x_NTd[0, :, 0])], []
        told = context(keys_S=keys_S, temperature=1.7)
        for layer in range(N):
            pack, rows = (
                (self.pack, slice(None)) if layer < N - 1 else (self.pack.emb_only(), self.pack.emb_index_S)
            )
            signals = Shown(self.beta_NTV[layer][rows])
            carry = {name: value[rows] for name, value in carry.items()}
            made = gate.soft(layer, self.x_NTd[layer][rows], signals, pack, carry, told)
            carry = made.tokens
            terms.append(made.terms)
            if made.stay is not None:
                masses.append(masses[-1] * made.stay)
        return torch.stack(masses[1:]), {name: torch.cat([t[name] for t in terms]) for name in terms[0]}


def shows(seed: int) -> Shows:
    layers = [random_layer(100 * seed + layer, torch.float64) for layer in range(N)]
    generator = torch.Generator().manual_seed(seed)
    beta = torch.rand(N, len(layers[0].x_Td), 3, generator=generator, dtype=torch.float64)
    return Shows(layers[0].pack, torch.stack([layer.x_Td for layer in layers]), beta)


class OneToken:
    """A gate for a single token, in plain numbers, from what the layers show one after another."""

    def __init__(self, gate: TokenHalting) -> None:
        self.values = {name: value.detach().double().tolist() for name, value in gate.state_dict().items()}
        self.gate, self.layer, self.score, self.strengths = gate, -1, 0.0, list[float]()
        self.q, self.left, self.halted_in = list[float](), 1.0, N - 1

    def _linear(self, x: Sequence[float]) -> float:
        at = self.values
        mean, scale = at["mean_Nd"][self.layer], at["scale_N"][self.layer]
        return sum(w * (v - m) / scale for w, v, m in zip(at["weight_Md"][self.layer], x, mean, strict=True))

    def see(self, x: Sequence[float], beta: Sequence[float]) -> bool:
        """The next layer; whether the token leaves in it."""
        self.layer += 1
        l, at = self.layer, self.values  # noqa: E741
        before, over = self.left, False
        if isinstance(self.gate, AvitHalting):
            h = 1 / (1 + math.exp(-(self.gate.gamma * self._linear(x) + at["bias_M"][l])))
            self.score += h
            over = self.score > 1 - self.gate.eps
            if self.halted_in == N - 1:
                self.left = 0.0 if over else self.left - h
        elif isinstance(self.gate, CumulativeHalting):
            self.score += math.log(1 + math.exp(self._linear(x) + at["bias_M"][l]))
            dropped = 1 / (1 + math.exp(-(self.score - self.gate.c)))
            over, self.left = dropped > 0.5, 1 - dropped
        else:
            if not IS_ATTENTION[l]:
                self.strengths.append(sum(beta) / len(beta))
            if self.strengths:
                z = (sum(self.strengths) / len(self.strengths) - at["mean_M"][l]) / at["scale_M"][l]
                p = 1 / (1 + math.exp(math.log(1 + math.exp(at["slope_M"][l])) * (z - at["center_M"][l])))
                over, self.left = p > 0.5, self.left * (1 - p)
        self.q.append(before - self.left)
        if l == N - 2:
            self.q.append(self.left)
        if over and self.halted_in == N - 1:
            self.halted_in = l
            return True
        return False


def one_by_one(gate: TokenHalting, seen: Shows) -> dict[int, OneToken]:
    """Every token that may halt, by its row, after all layers."""
    followed = {}
    is_emb_T = seen.pack.is_emb_T()
    for row in range(len(is_emb_T)):
        if is_emb_T[row] or (gate.droppable == "visual" and seen.pack.modality_T[row] == TEXT):
            continue
        followed[row] = OneToken(gate)
        for layer in range(N - 1):
            followed[row].see(seen.x_NTd[layer, row].tolist(), seen.beta_NTV[layer, row].tolist())
    return followed


def prior(n: int) -> float:
    """Truncated geometric distribution of the number of layers."""
    return RATE * (1 - RATE) ** (n - 1) / sum(RATE * (1 - RATE) ** (m - 1) for m in range(1, N + 1))


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
    torch.testing.assert_close(terms["halted"], q_TN.sum(0))
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


@pytest.mark.parametrize("name", ["steps", "kl", "halted"])
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
    share_N = (terms["halted"] / terms["tokens"]).detach()
    torch.testing.assert_close(1 - left_N, share_N[:-1].cumsum(0), rtol=0, atol=0.02)
    assert float(share_N[:-1].max()) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_gate_starts_near_full_compute(kind: str) -> None:
    seen, gate = shows(0), make(kind, start=0.2).double()
    if kind == "halt_beta":
        # Of mean strength in every layer.
        seen.beta_NTV.zero_()
    masses, terms = seen.soft(gate)
    assert bool((masses == 1).all())
    torch.testing.assert_close(terms["halted"][:-1].sum(), 0.2 * terms["tokens"][0], rtol=1e-5, atol=0)


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


# Through the encoder.


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), LAYER_TYPES))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


def fitted(
    kind: str, backbone: Backbone, embedded: list[EmbeddedInput], droppable: Droppable
) -> TokenHalting:
    """A random gate that is standardised for the backbone."""
    gate = drawn(kind, 7, backbone.hidden_size, droppable)
    if isinstance(gate, BetaHalting):
        gate.calibrate(backbone, embedded)
    else:
        mean_Nd, scale_N = calibrate(backbone, embedded)
        gate.get_buffer("mean_Nd").copy_(mean_Nd)
        gate.get_buffer("scale_N").copy_(scale_N)
    return gate


class Checked:
    """The gate's hard decisions, each compared with :class:`OneToken`; some tokens are also dropped by another."""

    gate_flops_per_token = 0.0

    def __init__(self, gate: TokenHalting) -> None:
        self.gate, self.followed, self.halted = gate, dict[Token, OneToken](), [0] * N

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        made = self.gate.hard(layer, x_Td, signals, pack)
        if layer == N - 1:
            assert made is None
            return Decision()
        drop_T = (
            torch.zeros(len(x_Td), dtype=torch.bool) if made is None or made.drop_T is None else made.drop_T
        )
        beta_TV = torch.zeros(len(x_Td), 1) if IS_ATTENTION[layer] else signals.write_strength_TV
        is_emb_T = pack.is_emb_T()
        for row, place in enumerate(
            zip(pack.segment_ids_T.tolist(), pack.token_index_T.tolist(), strict=True)
        ):
            if layer == 0:
                self.followed[place] = OneToken(self.gate)
            leaves = self.followed[place].see(x_Td[row].tolist(), beta_TV[row].tolist())
            may = not is_emb_T[row] and (self.gate.droppable == "all" or pack.modality_T[row] != TEXT)
            assert bool(drop_T[row]) == (leaves and may), (layer, place)
            self.halted[layer] += bool(drop_T[row])
        return Decision(drop_T=drop_T | (pack.token_index_T % 9 == layer) & ~is_emb_T)


@pytest.mark.parametrize("droppable", ["visual", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_scores_survive_compaction(
    backbone: Backbone, embedded: list[EmbeddedInput], kind: str, droppable: Droppable
) -> None:
    checked = Checked(fitted(kind, backbone, embedded, droppable))
    for _ in range(2):  # a second pass begins anew
        encode(backbone, *backbone.pack(embedded), checked)
    assert sum(halted > 0 for halted in checked.halted) >= 2


@pytest.mark.parametrize("droppable", ["visual", "all"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_forward_equals_the_packed_one(
    backbone: Backbone, embedded: list[EmbeddedInput], kind: str, droppable: Droppable
) -> None:
    gates = StraightThroughGates([fitted(kind, backbone, embedded, droppable)])
    hidden_Td, pack = backbone.pack(embedded)
    soft = encode_soft(backbone, hidden_Td, pack, gates.soft_policy(context()))
    hard = encode(backbone, hidden_Td, pack, gates.policy())
    torch.testing.assert_close(soft.embeddings_Sd.detach(), hard.embeddings_Sd, rtol=0, atol=1e-5)
    for name in ("entered_NS", "decided_NS", "survived_NS", "signal_flops_NS"):
        torch.testing.assert_close(getattr(soft.trace, name).detach(), getattr(hard.trace, name).double())
    charged = 0.0 if kind == "halt_beta" else 2.0 * backbone.hidden_size
    if charged:
        torch.testing.assert_close(
            hard.trace.signal_flops_NS[:-1], charged * hard.trace.decided_NS[:-1].double(), rtol=0, atol=0
        )
    assert float(soft.terms[f"{kind}/halted"].detach().sum()) == pytest.approx(
        float(soft.terms[f"{kind}/tokens"].detach()[0]), rel=1e-5
    )
    soft.embeddings_Sd[:, 0].sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in gates.parameters())


def test_write_strengths_are_standardised_over_the_tokens_that_may_halt(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    gate = make("halt_beta")
    assert isinstance(gate, BetaHalting)
    gate.calibrate(backbone, embedded, batch_size=2)
    seen: dict[int, Tensor] = {}

    class Reads(Full):
        def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
            if layer < N - 1 and not IS_ATTENTION[layer]:
                seen[layer] = signals.write_strength_TV.double().mean(1)[pack.modality_T != TEXT]
            return Decision()

    encode(backbone, *backbone.pack(embedded), Reads())
    for layer in range(1, N - 1):
        mean_T = torch.stack([beta for read, beta in seen.items() if read <= layer]).mean(0)
        torch.testing.assert_close(gate.mean_M[layer].double(), mean_T.mean(), rtol=1e-5, atol=0)
        torch.testing.assert_close(gate.scale_M[layer].double(), mean_T.std(correction=0), rtol=1e-3, atol=0)
