"""The training forward against the packed one for the same hard decisions, and its gradients against differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Bypass, Decision, Signals
from rlcompute.encoder import encode
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput, Pack
from rlcompute.policies.draws import uniform
from rlcompute.soft_decision import Carry, SoftBypass, SoftDecision
from rlcompute.soft_encoder import SoftEncoded, encode_soft
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint

ATTENTION_LAST = ("linear_attention", "full_attention", "linear_attention", "full_attention")
DELTA_LAST = ("full_attention", "linear_attention", "linear_attention")


@pytest.fixture(scope="module", params=[ATTENTION_LAST, DELTA_LAST], ids=["attention_last", "delta_last"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), request.param))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


@dataclass
class Drawn:
    """Random decisions of four kinds, by (segment, layer, token): the same for both forwards."""

    drop: float = 0.0
    skip: float = 0.0
    slots: float = 0.0
    bypass_share: float = 0.0
    renormalize: bool = False
    reads_router: bool = False
    flops: float = 7.0

    gate_flops_per_token = 0.0

    def _draw(self, kind: int, layer: int, pack: Pack) -> Tensor:
        return uniform(1000 * kind + pack.segment_ids_T, layer, pack.token_index_T)

    def stays(self, layer: int, pack: Pack) -> Tensor:
        return (self._draw(1, layer, pack) >= self.drop) | pack.is_emb_T()

    def runs(self, layer: int, pack: Pack, signals: Signals) -> Tensor:
        """[T,k]"""
        k = 3
        keep = torch.stack([self._draw(10 + j, layer, pack) >= self.slots for j in range(k)], dim=1)
        return keep & (self._draw(2, layer, pack) >= self.skip)[:, None]

    def bypasses(self, layer: int, pack: Pack) -> Tensor:
        emb = pack.emb_index_S
        return uniform(7 + pack.segment_ids_T[emb], layer, torch.zeros_like(emb)) < self.bypass_share

    # Packed.
    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        signals.charge(self.flops)
        if self.reads_router:
            assert len(signals.weights_Tk) == len(x_Td)
        drop_T = ~self.stays(layer, pack)
        return Decision(drop_T, self.runs(layer, pack, signals), renormalize=self.renormalize)

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass | None:
        return Bypass(self.bypasses(layer, pack), 5.0) if self.bypass_share else None


@dataclass
class Soft:
    """The same decisions as masses, to which ``nudge`` is added."""

    drawn: Drawn
    nudge: Callable[[Tensor, int, Pack], Tensor] = lambda mass, layer, pack: mass
    dtype: torch.dtype = torch.float32

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack, tokens: Carry) -> SoftDecision:
        signals.charge(self.drawn.flops)
        if self.drawn.reads_router:
            assert len(signals.weights_Tk) == len(x_Td)
        stay_T = self.nudge(self.drawn.stays(layer, pack).to(self.dtype), layer, pack)
        stay_T = torch.where(pack.is_emb_T(), torch.ones_like(stay_T), stay_T)
        seen = tokens.get("layers", torch.zeros_like(stay_T))
        assert bool((seen == layer).all())
        return SoftDecision(
            stay=stay_T,
            experts=self.drawn.runs(layer, pack, signals).to(self.dtype),
            renormalize=self.drawn.renormalize,
            terms={"alive": pack.alive.mass_T.sum()[None]},
            tokens={"layers": seen + 1},
        )

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack, segments: Carry) -> SoftBypass | None:
        if not self.drawn.bypass_share:
            return None
        return SoftBypass((~self.drawn.bypasses(layer, pack)).to(self.dtype), 5.0)


CASES = {
    "nothing": Drawn(),
    "drop": Drawn(drop=0.3),
    "skip": Drawn(skip=0.4),
    "slots": Drawn(slots=0.5),
    "renormalised": Drawn(slots=0.7, renormalize=True, reads_router=True),
    "bypass": Drawn(bypass_share=0.5),
    "all": Drawn(drop=0.2, skip=0.3, slots=0.4, bypass_share=0.4, renormalize=True),
    "everything dropped": Drawn(drop=1.0),
    "everything bypassed": Drawn(bypass_share=1.1),
}


@pytest.mark.parametrize("name", CASES)
def test_hard_masses_give_the_packed_forward(
    backbone: Backbone, embedded: list[EmbeddedInput], name: str
) -> None:
    drawn, inputs = CASES[name], backbone.pack(embedded)
    packed = encode(backbone, *inputs, drawn)
    soft = encode_soft(backbone, *inputs, Soft(drawn))
    cosine_S = (packed.embeddings_Sd * soft.embeddings_Sd).sum(-1)
    assert float(cosine_S.min()) >= 0.99999
    for field in (
        "entered_NS",
        "decided_NS",
        "survived_NS",
        "routed_NS",
        "rows_NS",
        "bypassed_NS",
        "signal_flops_NS",
    ):
        torch.testing.assert_close(
            getattr(soft.trace, field),
            getattr(packed.trace, field).double(),
            msg=lambda text, field=field: f"{field}: {text}",
        )
    flops = FlopModel(backbone)
    torch.testing.assert_close(flops.executed(soft.trace), flops.executed(packed.trace))
    assert soft.terms["alive"].shape == (backbone.num_layers, 1)
    assert int(soft.actions_NM3.sum()) == int(
        (packed.trace.decided_NS + packed.trace.bypassed_NS)[:-1].sum()
    ) + len(embedded)


def test_dropped_tokens_reach_nothing(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    """What a dropped token holds must not matter to any embedding."""
    drawn = Drawn(drop=0.5)
    hidden_Td, pack = backbone.pack(embedded)
    before = encode_soft(backbone, hidden_Td, pack, Soft(drawn)).embeddings_Sd
    # Decided after layer 0, so layer 0 must still see them: disturb what enters layer 1 instead.
    gone_T = ~drawn.stays(0, pack)
    original, calls = backbone.layers[1].mix, []

    def disturbed(h_Td: Tensor, inner: Pack) -> Tensor:
        calls.append(len(h_Td))
        noise_Td = torch.randn(h_Td.shape, generator=torch.Generator().manual_seed(0))
        return original(torch.where(gone_T[:, None], noise_Td, h_Td), inner)

    try:
        backbone.layers[1].mix = disturbed  # type: ignore[method-assign]
        after = encode_soft(backbone, hidden_Td, pack, Soft(drawn)).embeddings_Sd
    finally:
        backbone.layers[1].mix = original  # type: ignore[method-assign]
    assert calls == [len(hidden_Td)]
    torch.testing.assert_close(before, after)


def test_recomputation_changes_nothing(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    drawn, gradients, values = CASES["all"], [], []
    for recompute in (False, True):
        shift_N = torch.zeros(backbone.num_layers, requires_grad=True)
        policy = Soft(drawn, lambda mass, layer, pack, shift_N=shift_N: mass + shift_N[layer])
        encoded = encode_soft(backbone, *backbone.pack(embedded), policy, recompute=recompute)
        _loss(encoded).backward()
        gradients.append(shift_N.grad)
        values.append(encoded.embeddings_Sd)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(gradients[0], gradients[1])


def _loss(encoded: SoftEncoded) -> Tensor:
    """Something that depends on embeddings, counts and terms."""
    weights = torch.linspace(-1, 1, encoded.embeddings_Sd.numel(), dtype=encoded.embeddings_Sd.dtype)
    counts = encoded.trace.rows_NS.sum() + 0.1 * encoded.trace.entered_NS.square().sum()
    return (
        (encoded.embeddings_Sd.flatten() * weights).sum()
        + 1e-3 * counts
        + 0.01 * encoded.terms["alive"].sum()
    )


@pytest.mark.parametrize("name", ["drop", "all"])
def test_gradients_of_masses_equal_differences(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """In float64, around masses that are exactly 0 and 1: what a dropped token would do has a gradient too."""
    backbone = load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny64")), dtype="float64")
    inputs = backbone.pack(backbone.embed_inputs(every_modality(backbone.preprocessor)[:4]))
    drawn, tokens = CASES[name], len(inputs[0])

    def loss(shift_NT: Tensor) -> Tensor:
        def nudge(mass_T: Tensor, layer: int, pack: Pack) -> Tensor:
            start_S = inputs[1].cu_seqlens[:-1]
            return mass_T + shift_NT[layer, start_S[pack.segment_ids_T] + pack.token_index_T]

        return _loss(encode_soft(backbone, *inputs, Soft(drawn, nudge, torch.float64)))

    shift_NT = torch.zeros(backbone.num_layers, tokens, dtype=torch.float64, requires_grad=True)
    loss(shift_NT).backward()
    assert shift_NT.grad is not None
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        direction = torch.randn(shift_NT.shape, generator=generator, dtype=torch.float64)
        step = 1e-6 * direction
        # Recorded like the gradient: without, kernels may take masses below 0 for 0.
        steps = [(sign * step).requires_grad_() for sign in (1.0, -1.0)]
        difference = (loss(steps[0]) - loss(steps[1])).detach() / 2e-6
        torch.testing.assert_close((shift_NT.grad * direction).sum(), difference, rtol=1e-5, atol=1e-7)
