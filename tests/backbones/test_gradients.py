"""Every piece of a layer differentiates with respect to hidden states and masses, in every kind of layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone, BackboneLayer
from rlcompute.errors import BackendError
from rlcompute.pack import TEXT, Alive, EmbeddedInput, Pack
from tests.kernels.packs import assert_close, random
from tests.tiny import write_tiny_checkpoint

LENGTHS = (3, 1, 5)
KEEP_T = torch.tensor([True, False, True, True, False, True, True, False, True])


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    types = ("linear_attention", "full_attention")
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), types), dtype="float64")


@pytest.fixture(params=[0, 1], ids=["gated_delta", "attention"])
def layer(backbone: Backbone, request: pytest.FixtureRequest) -> BackboneLayer:
    return backbone.layers[request.param]


@pytest.fixture
def packed(backbone: Backbone) -> tuple[Tensor, Pack]:
    inputs = [
        EmbeddedInput(
            random(n, backbone.hidden_size, seed=n, dtype=torch.float64),
            torch.arange(n).expand(3, n),
            torch.full((n,), TEXT, dtype=torch.int8),
            0.0,
        )
        for n in LENGTHS
    ]
    h_Td, pack = backbone.pack(inputs)
    return h_Td.requires_grad_(), pack


def with_alive(pack: Pack, mass_T: Tensor) -> Pack:
    return replace(pack, alive=Alive(mass_T, KEEP_T))


def survivors(pack: Pack) -> Pack:
    kept_S = torch.tensor([int(part.sum()) for part in KEEP_T.split(LENGTHS)])
    return pack.take(KEEP_T.nonzero().squeeze(1), torch.cat([kept_S.new_zeros(1), kept_S.cumsum(0)]))


def test_mixers_of_a_packed_forward(layer: BackboneLayer, packed: tuple[Tensor, Pack]) -> None:
    h_Td, pack = packed
    assert torch.autograd.gradcheck(lambda h: layer.mix(h, pack), [h_Td], fast_mode=True)
    assert torch.autograd.gradcheck(lambda h: layer.mix_emb(h, pack), [h_Td], fast_mode=True)


def test_mixers_with_dropped_tokens(layer: BackboneLayer, packed: tuple[Tensor, Pack]) -> None:
    h_Td, pack = packed
    mass_T = KEEP_T.double().requires_grad_()
    for mix in (layer.mix, layer.mix_emb):
        assert torch.autograd.gradcheck(lambda h, m, mix=mix: mix(h, with_alive(pack, m)), [h_Td, mass_T])


def test_survivors_are_mixed_as_if_the_others_were_not_there(
    layer: BackboneLayer, packed: tuple[Tensor, Pack]
) -> None:
    h_Td, pack = packed
    masked = with_alive(pack, KEEP_T.double())
    expected = layer.mix(h_Td[KEEP_T], survivors(pack))
    assert_close(layer.mix(h_Td, masked)[KEEP_T], expected)
    assert_close(layer.mix_emb(h_Td, masked), expected[survivors(pack).emb_index_S])


def test_mixture_of_experts(backbone: Backbone, layer: BackboneLayer, packed: tuple[Tensor, Pack]) -> None:
    h_Td, _ = packed
    kernels, experts = backbone.kernels, layer.experts
    selected = layer.route(layer.moe_input(h_Td.detach()))
    keep_Tk = torch.arange(backbone.top_k) < torch.arange(len(h_Td))[:, None] % (backbone.top_k + 1)
    plan = kernels.routing_plan(selected.expert_ids_Tk, keep_Tk, backbone.num_experts)
    weights_Tk = selected.weights_Tk.requires_grad_()

    def routed(h_Td: Tensor, weights_Tk: Tensor) -> Tensor:
        x_Td = layer.moe_input(h_Td)
        out: Tensor = kernels.experts(x_Td, plan, weights_Tk, experts.gate_up_E2Fd, experts.down_EdF)
        return out

    assert torch.autograd.gradcheck(routed, [h_Td, weights_Tk])
    assert torch.autograd.gradcheck(lambda h: layer.shared(layer.moe_input(h)), [h_Td], fast_mode=True)
    assert torch.autograd.gradcheck(
        lambda h: layer.route(layer.moe_input(h)).weights_Tk, [h_Td], fast_mode=True
    )


def test_the_pack_of_last_tokens_knows_no_dropped_ones(packed: tuple[Tensor, Pack]) -> None:
    masked = with_alive(packed[1], KEEP_T.double())
    assert masked.emb_only().alive is None
    taken = masked.take(torch.tensor([1, 2]), torch.tensor([0, 2])).alive
    assert taken is not None
    assert taken.mass_T.tolist() == [0.0, 1.0] and taken.is_alive_T.tolist() == [False, True]


def test_attention_maps_are_refused_where_dropped_tokens_travel_on(
    backbone: Backbone, packed: tuple[Tensor, Pack]
) -> None:
    h_Td, pack = packed
    with pytest.raises(BackendError, match="attention map"):
        backbone.layers[1].received_attention(h_Td, with_alive(pack, KEEP_T.double()), from_emb=True)
