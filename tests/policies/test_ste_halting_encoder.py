"""Halting gates through the encoder: packed inference against one token at a time, and against the training forward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.pack import TEXT, EmbeddedInput, Pack
from rlcompute.policies.gates import Droppable, calibrate
from rlcompute.policies.ste_gates import StraightThroughGates
from rlcompute.policies.ste_halting import BetaHalting
from rlcompute.policies.ste_halting_base import TokenHalting
from rlcompute.soft_encoder import encode_soft
from tests.inputs import every_modality
from tests.policies.halting_inputs import (
    IS_ATTENTION,
    KINDS,
    LAYER_TYPES,
    N,
    OneToken,
    Token,
    drawn,
    make,
)
from tests.policies.ste_inputs import (
    context,
)
from tests.tiny import write_tiny_checkpoint


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
