"""Early exit against a version that follows one input at a time, on made-up layers and through the encoder."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Bypass, Full
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.draws import uniform
from rlcompute.policies.ste_early_exit import EarlyExit
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.soft_decision import Carry
from rlcompute.soft_encoder import encode_soft
from tests.inputs import every_modality
from tests.policies.ste_inputs import LENGTHS, NUM_LAYERS, D, assert_gradients_match, context, random_layer
from tests.tiny import write_tiny_checkpoint

RATE = 0.25
TEMPERATURE = 1.7
PACK = random_layer(0).pack


def drawn(seed: int, num_layers: int = NUM_LAYERS, d: int = D) -> EarlyExit:
    """Random weights under which inputs exit before all layers, and some never."""
    generator = torch.Generator().manual_seed(seed)
    gate = EarlyExit(num_layers, d, rate=RATE)
    with torch.no_grad():
        gate.weight_Md.copy_(torch.randn(gate.weight_Md.shape, generator=generator) / math.sqrt(d))
        gate.bias_M.copy_(0.5 * torch.randn(gate.bias_M.shape, generator=generator) - 0.5)
    return gate


def rows(seed: int) -> Tensor:
    """``<emb>`` rows that enter each layer, float64 [N,S,d]."""
    return torch.stack([random_layer(100 * seed + i, torch.float64).emb_Sd for i in range(NUM_LAYERS)])


def soft(gate: EarlyExit, emb_NSd: Tensor, keys_S: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Masses [N,S], and terms by name [N]."""
    carry: Carry = {}
    masses, terms = [], []
    for layer, emb_Sd in enumerate(emb_NSd):
        made = gate.soft_bypass(layer, emb_Sd, PACK, carry, context(keys_S=keys_S, temperature=TEMPERATURE))
        carry = made.segments
        masses.append(made.run_S)
        terms.append(made.terms)
    return torch.stack(masses), {name: torch.cat([t[name] for t in terms]) for name in terms[0]}


def logits(gate: EarlyExit, emb_NSd: Tensor) -> Tensor:
    """Of exiting before layers 1.., [N-1,S]."""
    unit_NSd = emb_NSd / emb_NSd.square().mean(2, keepdim=True).sqrt()
    return (unit_NSd[1:] * gate.weight_Md[:, None]).sum(2) + gate.bias_M[:, None]


def layers_run(logits_NS: Tensor) -> list[int]:
    """How many layers each input runs."""
    exits = [[j for j, logit in enumerate(column, 1) if logit > 0] for column in logits_NS.T.tolist()]
    return [layers[0] if layers else NUM_LAYERS for layers in exits]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_masses_and_terms_are_those_of_inputs_one_by_one(seed: int) -> None:
    gate, emb_NSd = drawn(seed).double(), rows(seed)
    masses, terms = soft(gate, emb_NSd)
    logits_NS = logits(gate, emb_NSd).detach()
    for segment, count in enumerate(layers_run(logits_NS)):
        assert masses[:, segment].tolist() == [1.0] * count + [0.0] * (NUM_LAYERS - count)

    steps = kl = 0.0
    total = sum(RATE * (1 - RATE) ** n for n in range(NUM_LAYERS))
    for column in logits_NS.T.tolist():
        q, left = [], 1.0  # of running 1, 2, .. N layers
        for logit in column:
            exit_ = 1 / (1 + math.exp(-logit))
            q.append(left * exit_)
            left *= 1 - exit_
        q.append(left)
        assert math.isclose(sum(q), 1.0)
        steps += sum(n * share for n, share in enumerate(q, 1))
        kl += sum(share * math.log(share / (RATE * (1 - RATE) ** n / total)) for n, share in enumerate(q))
    torch.testing.assert_close(terms["steps"].sum().item(), steps)
    torch.testing.assert_close(terms["kl"].sum().item(), kl, rtol=1e-6, atol=1e-6)
    assert terms["tokens"].tolist() == [len(LENGTHS)] * NUM_LAYERS


@pytest.mark.parametrize("noisy", [False, True], ids=["greedy", "noise"])
def test_gradients_are_those_of_the_relaxed_survival(noisy: bool) -> None:
    gate, emb_NSd = drawn(1).double(), rows(1)
    keys_S = torch.arange(len(LENGTHS)) * 31 if noisy else None
    noise_NS = torch.zeros(NUM_LAYERS - 1, len(LENGTHS), dtype=torch.float64)
    if keys_S is not None:
        for layer in range(1, NUM_LAYERS):
            noise_NS[layer - 1] = torch.logit(uniform(keys_S, layer, torch.tensor(LENGTHS) - 1))
    count_S = torch.tensor(layers_run((logits(gate, emb_NSd) + noise_NS).detach()))
    assert int(count_S.min()) < NUM_LAYERS
    weight_NS = torch.randn(NUM_LAYERS - 1, len(LENGTHS), generator=torch.Generator().manual_seed(1)).double()
    # An input that has exited keeps the survival of the layer before which it did.
    last_NS = torch.minimum(torch.arange(NUM_LAYERS - 1)[:, None], count_S - 1)

    def surrogate() -> Tensor:
        survival_NS = torch.sigmoid(-(logits(gate, emb_NSd) + noise_NS) / TEMPERATURE).cumprod(0)
        return (weight_NS * survival_NS.gather(0, last_NS)).sum()

    assert_gradients_match(gate, lambda: (weight_NS * soft(gate, emb_NSd, keys_S)[0][1:]).sum(), surrogate)


@pytest.mark.parametrize("name", ["steps", "kl"])
def test_terms_have_their_own_gradients(name: str) -> None:
    gate, emb_NSd = drawn(2).double(), rows(2)
    weight_N = torch.linspace(1.0, 2.0, NUM_LAYERS, dtype=torch.float64)

    def value() -> Tensor:
        return (weight_N * soft(gate, emb_NSd)[1][name]).sum()

    assert_gradients_match(gate, value, value)


def test_a_new_gate_starts_near_full_compute() -> None:
    masses, terms = soft(EarlyExit(NUM_LAYERS, D, rate=RATE, start=0.2).double(), rows(0))
    assert bool((masses == 1).all())
    assert terms["steps"][-1].item() == pytest.approx(0.8 * len(LENGTHS))
    with pytest.raises(ConfigError):
        EarlyExit(NUM_LAYERS, D, rate=RATE, start=0.7)
    with pytest.raises(ConfigError):
        EarlyExit(1, D, rate=RATE)


# Through the encoder.


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


class Watched(Full):
    """Full compute that notes the ``<emb>`` rows entering each layer."""

    def __init__(self) -> None:
        self.emb_NSd: list[Tensor] = []

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        self.emb_NSd.append(emb_Sd.clone())
        return None


def exits_spread_out(backbone: Backbone, emb_NSd: Tensor) -> EarlyExit:
    """A gate under which the first input exits before layer 1, the second before layer 2, .. the others never."""
    gate = EarlyExit(backbone.num_layers, backbone.hidden_size, rate=RATE)
    unit_NSd = emb_NSd / emb_NSd.square().mean(2, keepdim=True).sqrt()
    with torch.no_grad():
        for layer in range(1, backbone.num_layers):
            wanted_S = -torch.ones(emb_NSd.shape[1])
            wanted_S[layer - 1] = 1.0
            gate.weight_Md[layer - 1] = torch.linalg.lstsq(unit_NSd[layer], wanted_S[:, None]).solution[:, 0]
        gate.bias_M.zero_()
    return gate


def test_an_input_that_exits_is_embedded_as_it_is(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    hidden_Td, pack = backbone.pack(embedded)
    watched = Watched()
    encode(backbone, hidden_Td, pack, watched)
    emb_NSd, num_layers = torch.stack(watched.emb_NSd), backbone.num_layers
    gates = StraightThroughGates([exits_spread_out(backbone, emb_NSd)])
    policy = gates.policy()
    for _ in range(2):  # a second pass begins anew
        hard = encode(backbone, hidden_Td, pack, policy)
    exits = num_layers - 1
    for segment in range(exits):
        expected_d = F.normalize(backbone.final_norm(emb_NSd[segment + 1, segment, None]), dim=-1)[0]
        torch.testing.assert_close(hard.embeddings_Sd[segment], expected_d, rtol=0, atol=1e-5)
    full = encode(backbone, hidden_Td, pack, Full())
    torch.testing.assert_close(hard.embeddings_Sd[exits:], full.embeddings_Sd[exits:], rtol=0, atol=1e-5)
    layer_N1 = torch.arange(num_layers)[:, None]
    passed_NS = (layer_N1 > torch.arange(pack.num_segments)) & (torch.arange(pack.num_segments) < exits)
    torch.testing.assert_close(hard.trace.bypassed_NS, passed_NS * pack.lengths_S)
    charged_NS = 2.0 * backbone.hidden_size * (layer_N1 > 0).expand_as(passed_NS).double()
    torch.testing.assert_close(hard.trace.signal_flops_NS, charged_NS)

    trained = encode_soft(backbone, hidden_Td, pack, gates.soft_policy(context()))
    torch.testing.assert_close(trained.embeddings_Sd.detach(), hard.embeddings_Sd, rtol=0, atol=1e-5)
    for name in ("entered_NS", "survived_NS", "bypassed_NS", "signal_flops_NS"):
        torch.testing.assert_close(getattr(trained.trace, name).detach(), getattr(hard.trace, name).double())
    trained.embeddings_Sd[:, 0].sum().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in gates.parameters())


def test_described_gates_come_back() -> None:
    gate = drawn(4)
    again = EarlyExit.create(gate.describe())
    again.load_state_dict(gate.state_dict(), strict=True)
    assert again.describe() == gate.describe()
    emb_NSd = rows(4)
    assert torch.equal(soft(gate.double(), emb_NSd)[0], soft(again.double(), emb_NSd)[0])
