"""The baselines compute what ours computes, and the policies remove what they say."""

from __future__ import annotations

import pytest
import torch

from rlcompute.benchmark.bench import Bench
from rlcompute.benchmark.inputs import mixed_lengths
from rlcompute.benchmark.masked import encode_masked
from rlcompute.benchmark.stock import EXPERTS, batches, stock_experts, stock_forward
from rlcompute.benchmark.variants import (
    KeepShare,
    MeanExperts,
    check_agreement,
    segment_keys,
    swapped_kernels,
)
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.errors import BackendError
from rlcompute.policies.baselines import RandomActions
from tests.inputs import relative_error


@pytest.mark.parametrize("batch", ["uniform", "mixed"])
@pytest.mark.parametrize("keep", [1.0, 0.5, 0.0])
def test_masked_execution_equals_packed(bench: Bench, batch: str, keep: float) -> None:
    hidden, pack = bench.backbone.pack(getattr(bench, batch))
    policy = KeepShare(segment_keys(pack.num_segments, 0, hidden.device), layer=0, keep=keep)
    packed = encode(bench.backbone, hidden, pack, policy)
    masked = encode_masked(bench.backbone, hidden, pack, policy)
    assert relative_error(masked, packed.embeddings_Sd) < 1e-5
    if keep == 0.0:
        assert (packed.trace.survived_NS == 1).all()


def test_masked_execution_equals_packed_when_tokens_leave_in_every_layer(bench: Bench) -> None:
    hidden, pack = bench.backbone.pack(bench.mixed)
    keys = segment_keys(pack.num_segments, 1, hidden.device)
    policy = RandomActions(keys, skip=0.3, drop=0.2, droppable="all", num_layers=bench.backbone.num_layers)
    packed = encode(bench.backbone, hidden, pack, policy).embeddings_Sd
    full = encode(bench.backbone, hidden, pack, Full()).embeddings_Sd
    assert relative_error(encode_masked(bench.backbone, hidden, pack, policy), packed) < 1e-5
    assert relative_error(full, packed) > 1e-2  # else the comparison says nothing


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("mean", [8.0, 2.35, 0.5])
def test_experts_functions_of_transformers_equal_ours(bench: Bench, name: str, mean: float) -> None:
    hidden, pack = bench.backbone.pack(bench.mixed)
    policy = MeanExperts(segment_keys(pack.num_segments, 0, hidden.device), mean=mean, top_k=8)
    ours = encode(bench.backbone, hidden, pack, policy)
    with swapped_kernels(bench.backbone, **stock_experts(bench.backbone, name)):
        stock = encode(bench.backbone, hidden, pack, policy)
    assert relative_error(stock.embeddings_Sd, ours.embeddings_Sd) < 1e-5
    assert torch.equal(stock.trace.expert_rows_NE, ours.trace.expert_rows_NE)
    routed = ours.trace.rows_NS.sum() / ours.trace.decided_NS.sum()
    assert abs(float(routed) - mean) < 0.2


@pytest.mark.parametrize("batch", ["uniform", "mixed"])
@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_the_stock_forward_equals_ours_however_it_is_batched(bench: Bench, batch: str, experts: str) -> None:
    inputs = getattr(bench, batch)
    ours = encode(bench.backbone, *bench.backbone.pack(inputs), Full()).embeddings_Sd
    for groups in batches([x.length for x in inputs]).values():
        assert relative_error(stock_forward(bench.backbone, inputs, groups, experts), ours) < 1e-5


def test_every_way_to_batch_covers_every_input_once() -> None:
    ways = batches([5, 90, 40, 100, 5])
    assert ways["buckets to 1.3×"] == [[3, 1], [2], [0, 4]]
    assert ways["buckets to 3×"] == [[3, 1, 2], [0, 4]]
    assert list(ways) == ["one batch", "one by one", "buckets to 1.3×", "buckets to 3×"]  # 2× is 1.3× again
    for groups in ways.values():
        assert sorted(s for group in groups for s in group) == [0, 1, 2, 3, 4]
    assert list(batches([7, 7])) == ["one batch", "one by one"]


def test_kernels_come_back_after_a_swap_even_if_it_fails(bench: Bench) -> None:
    own = bench.backbone.kernels
    with pytest.raises(ZeroDivisionError), swapped_kernels(bench.backbone, experts=lambda *x: 1 // 0):
        encode(bench.backbone, *bench.backbone.pack(bench.uniform), Full())
    assert bench.backbone.kernels is own


def test_results_that_differ_are_not_compared() -> None:
    rows = torch.nn.functional.normalize(torch.randn(2, 8), dim=-1)
    assert check_agreement("same", rows, rows, torch.float32) == 0.0
    with pytest.raises(BackendError, match="masked"):
        check_agreement("masked", rows, -rows, torch.float32)
    with pytest.raises(BackendError):
        check_agreement("masked", rows * float("nan"), rows, torch.float32)


def test_mixed_lengths_span_the_range() -> None:
    lengths = mixed_lengths(20, 16, 512, seed=0)
    assert min(lengths) == 16 and max(lengths) == 512 and len(lengths) == 20
    assert lengths == mixed_lengths(20, 16, 512, seed=0) != mixed_lengths(20, 16, 512, seed=1)
