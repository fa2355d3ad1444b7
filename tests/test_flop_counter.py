"""Analytic FLOPs against counted ones, and the formulas that torch lacks against plain products."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Full, Policy
from rlcompute.demo import CHECKPOINT
from rlcompute.encoder import encode
from rlcompute.flop_counter import ATEN_FORMULAS, count_flops
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.expert_rules import UniformTopK
from rlcompute.policies.gates import GreedyGates, init_heads
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint

TOLERANCE = 1e-6


@pytest.fixture(scope="module", params=["tiny", "demo"])
def backbone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    if request.param == "demo":
        return load_backbone(CHECKPOINT)
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    """Inputs of 2 to more than a hundred tokens."""
    inputs = every_modality(backbone.preprocessor)
    return backbone.embed_inputs([*inputs, backbone.preprocessor.assemble(text="a longer text " * 12)])


def full(backbone: Backbone, segments: int) -> Policy:
    return Full()


def random_actions(backbone: Backbone, segments: int) -> Policy:
    return RandomActions(
        torch.arange(segments), skip=0.3, drop=0.15, droppable="all", num_layers=backbone.num_layers
    )


def uniform(backbone: Backbone, segments: int) -> Policy:
    return UniformTopK(1, backbone.top_k)


def greedy_gates(backbone: Backbone, segments: int) -> Policy:
    heads = init_heads(
        torch.zeros(backbone.num_layers, backbone.hidden_size),
        torch.ones(backbone.num_layers),
        skip=0.3,
        drop=0.3,
        late_skip_bias=0.0,
        droppable="all",
    )
    torch.manual_seed(0)
    heads.weight_N3F.add_(0.5 * torch.randn_like(heads.weight_N3F))
    return GreedyGates(heads)


@pytest.mark.parametrize("make", [full, random_actions, uniform, greedy_gates])
def test_counted_and_analytic_flops_agree(
    backbone: Backbone, embedded: list[EmbeddedInput], make: Callable[[Backbone, int], Policy]
) -> None:
    hidden_Td, pack = backbone.pack(embedded)
    policy, flops = make(backbone, len(embedded)), FlopModel(backbone)
    traces = []
    count = count_flops(lambda: traces.append(encode(backbone, hidden_Td, pack, policy).trace), backbone)
    analytic = float(flops.executed(traces[0], policy.gate_flops_per_token).sum())
    assert count.total == pytest.approx(analytic, rel=TOLERANCE)
    everything = float(flops.full(pack.lengths_S).sum())
    assert analytic == everything if make is full else analytic < 0.9 * everything
    assert all(count.parts[op] > 0 for op in ("attention", "gated_delta", "causal_conv", "experts", "torch"))


def test_experts_are_counted_as_the_products_that_ran(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    """The torch backend is products and little else: torch's own counter sees the same FLOPs in it."""
    policy = random_actions(backbone, len(embedded))
    count = count_flops(lambda: encode(backbone, *backbone.pack(embedded), policy), backbone)
    assert count.inside["experts"] == pytest.approx(count.parts["experts"], rel=TOLERANCE)
    # The chunked delta rule executes other products than the recurrence that is charged.
    assert count.inside["gated_delta"] > 0


def test_counting_leaves_the_backbone_as_it_was(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    kernels = backbone.kernels
    before = encode(backbone, *backbone.pack(embedded), Full()).embeddings_Sd
    counted = []
    count_flops(lambda: counted.append(encode(backbone, *backbone.pack(embedded), Full())), backbone)
    assert backbone.kernels is kernels
    assert torch.equal(counted[0].embeddings_Sd, before)
    with pytest.raises(ZeroDivisionError):
        count_flops(lambda: 1 // 0, backbone)
    assert backbone.kernels is kernels


def test_the_vision_tower_costs_what_it_says(backbone: Backbone) -> None:
    inputs = [x for x in every_modality(backbone.preprocessor) if x.patches is not None]
    count = count_flops(lambda: backbone.embed_inputs(inputs), backbone)
    analytic = sum(x.vision_flops for x in backbone.embed_inputs(inputs))
    assert count.total == pytest.approx(analytic, rel=TOLERANCE)


def counted(function: Callable[[], object]) -> int:
    with FlopCounterMode(display=False, custom_mapping=ATEN_FORMULAS) as mode:
        function()
    return int(mode.get_total_flops())


def test_attention_on_a_cpu_is_counted() -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    assert counted(lambda: F.scaled_dot_product_attention(q, k, k)) == 2 * 3 * 4 * 5 * 7 * 8


def test_grouped_products_are_counted_by_executed_rows() -> None:
    offs = torch.tensor([2, 2, 5], dtype=torch.int32)
    a, b = torch.randn(9, 8, dtype=torch.bfloat16), torch.randn(3, 8, 16, dtype=torch.bfloat16)
    assert counted(lambda: F.grouped_mm(a, b, offs=offs)) == 2 * 5 * 8 * 16
    x, y = torch.randn(16, 24, dtype=torch.bfloat16), torch.randn(24, 8, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16], dtype=torch.int32)
    assert counted(lambda: F.grouped_mm(x, y, offs=ends)) == 2 * 16 * 16 * 8


def test_triangular_solves_are_counted() -> None:
    a, b = torch.eye(4).expand(3, 4, 4), torch.randn(3, 4, 2)
    assert counted(lambda: torch.linalg.solve_triangular(a, b, upper=False)) == 3 * 4 * 4 * 2


def test_a_formula_that_someone_registered_is_no_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import flop_counter

    operator = next(iter(ATEN_FORMULAS))
    monkeypatch.setitem(flop_counter.flop_registry, operator, lambda *args, **kwargs: 1)
    q = torch.randn(1, 1, 4, 8)
    assert counted(lambda: F.scaled_dot_product_attention(q, q, q)) == 4 * 4 * 4 * 8
