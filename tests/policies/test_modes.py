"""MoDES: the rule, its scales, and the search against trying everything."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.errors import ConfigError
from rlcompute.pack import TEXT, EmbeddedInput, Pack
from rlcompute.policies.modes import Modes, cosine_loss, layer_losses, layer_scales
from rlcompute.policies.modes_search import (
    REFINEMENTS,
    TOLERANCE,
    ModesSearch,
    Outcome,
    Thresholds,
    frontier_search,
    refine,
    threshold_grid,
)
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


@pytest.fixture(scope="module")
def scales_NM(backbone: Backbone, embedded: list[EmbeddedInput]) -> Tensor:
    return layer_scales(layer_losses(backbone, embedded))


@pytest.fixture(scope="module")
def search(backbone: Backbone, embedded: list[EmbeddedInput], scales_NM: Tensor) -> ModesSearch:
    return ModesSearch(backbone, scales_NM, [embedded[:4], embedded[4:]], 4, {})


class Watched:
    """A policy whose decisions are remembered with what they were made from."""

    gate_flops_per_token = 0.0

    def __init__(self, policy: Modes) -> None:
        self._policy = policy
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        decision = self._policy.decide(layer, x_Td, signals, pack)
        assert decision.drop_T is None and decision.keep is not None and not decision.renormalize
        self.seen.append((signals.weights_Tk, pack.modality_T, decision.keep))
        return decision


def test_slots_are_kept_where_a_loop_over_tokens_keeps_them(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    torch.manual_seed(0)
    scales_NM, tau_M = torch.rand(backbone.num_layers, 2, dtype=torch.float64), [0.15, 0.2]
    policy = Watched(Modes(scales_NM, tau_M))
    trace = encode(backbone, *backbone.pack(embedded), policy).trace
    counts = set()
    for layer, (weights_Tk, modality_T, keep_Tk) in enumerate(policy.seen):
        for weights_k, modality, keep_k in zip(weights_Tk, modality_T, keep_Tk, strict=True):
            kind = 0 if int(modality) == TEXT else 1
            for weight, keep in zip(weights_k.tolist(), keep_k.tolist(), strict=True):
                assert keep == (float(scales_NM[layer, kind]) * weight >= tau_M[kind])
            counts.add(int(keep_k.sum()))
        assert int(trace.rows_NS[layer].sum()) == int(keep_Tk.sum())
    assert counts == {0, 1, 2, 3}  # from no expert to all of them
    assert torch.equal(trace.survived_NS, trace.decided_NS)  # the shared expert stays


def test_thresholds_of_zero_are_full_compute(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    packed = backbone.pack(embedded)
    policy = Modes(torch.zeros(backbone.num_layers, 2), [0.0, 0.0])
    full = encode(backbone, *packed, Full()).embeddings_Sd
    assert torch.equal(encode(backbone, *packed, policy).embeddings_Sd, full)


class WithoutOneLayer:
    """Leaves the experts of one layer out for text or visual tokens, token by token."""

    gate_flops_per_token = 0.0

    def __init__(self, layer: int, visual: bool) -> None:
        self._layer, self._visual = layer, visual

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        keep = [
            [layer != self._layer or (modality != TEXT) != self._visual] * signals.weights_Tk.shape[1]
            for modality in pack.modality_T.tolist()
        ]
        return Decision(keep=torch.tensor(keep))


def test_scales_equal_a_loop_over_layers_kinds_and_inputs(
    backbone: Backbone, embedded: list[EmbeddedInput], scales_NM: Tensor
) -> None:
    losses: list[list[float]] = []
    for layer in range(backbone.num_layers):
        row = []
        for visual in (False, True):
            total = 0.0
            for x in embedded:
                packed = backbone.pack([x])
                full = encode(backbone, *packed, Full()).embeddings_Sd[0].double()
                left = encode(backbone, *packed, WithoutOneLayer(layer, visual)).embeddings_Sd[0].double()
                total += 1.0 - float(left @ full / left.norm() / full.norm())
            row.append(total)
        losses.append(row)
    sums = [sum(row[kind] for row in losses) for kind in (0, 1)]
    for layer, row in enumerate(losses):
        for kind in (0, 1):
            assert float(scales_NM[layer, kind]) == pytest.approx(row[kind] / sums[kind], rel=1e-2, abs=1e-6)
    assert scales_NM.sum(0).tolist() == pytest.approx([1.0, 1.0])
    assert float(scales_NM[-1, 1]) == 0.0  # the last layer has no visual token


def test_a_kind_without_tokens_gets_even_scales(backbone: Backbone, embedded: list[EmbeddedInput]) -> None:
    scales_NM = layer_scales(layer_losses(backbone, [embedded[0], embedded[5]]))
    assert scales_NM[:, 1].tolist() == [0.25] * 4
    assert len(set(scales_NM[:, 0].tolist())) == 4


def test_small_losses_keep_their_digits() -> None:
    angle = 1e-6
    a = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    b = torch.tensor([[np.cos(angle), np.sin(angle)]], dtype=torch.float64)
    assert float(cosine_loss(a, b)) == pytest.approx(angle**2 / 2, rel=1e-6)


def brute_force(search: ModesSearch, target: float) -> float:
    outcomes = (search.evaluate((float(a), float(b))) for a, b in itertools.product(*search.grids))
    return min(outcome.loss for outcome in outcomes if outcome.skip >= target)


@pytest.mark.parametrize("target", [0.0, 0.2, 0.45, 0.7, 1.0])
def test_the_search_on_the_executed_pass_equals_brute_force(
    backbone: Backbone,
    embedded: list[EmbeddedInput],
    scales_NM: Tensor,
    search: ModesSearch,
    target: float,
) -> None:
    smallest = brute_force(search, target)
    fresh = ModesSearch(backbone, scales_NM, [embedded[:4], embedded[4:]], 4, {})
    found = frontier_search(fresh.evaluate, *fresh.grids, target, {})
    assert found[0] in fresh.grids[0] and found[1] in fresh.grids[1]
    outcome = fresh.evaluate(found)
    assert outcome.loss == smallest and outcome.skip >= target
    assert len(fresh.known) <= 10  # of 16


@pytest.mark.parametrize("target", [0.0, 0.3, 0.55, 1.0])
def test_thresholds_meet_the_target_on_the_executed_pass(
    backbone: Backbone, embedded: list[EmbeddedInput], scales_NM: Tensor, search: ModesSearch, target: float
) -> None:
    tau = search.thresholds(target)
    assert search.evaluate(tau).loss <= brute_force(search, target)
    trace = encode(backbone, *backbone.pack(embedded), Modes(scales_NM, tau)).trace
    skip = 1.0 - int(trace.rows_NS.sum()) / (backbone.top_k * int(trace.decided_NS.sum()))
    assert target <= skip == pytest.approx(search.evaluate(tau).skip)
    # A coarse grid of 4 is left to reach the target; one of its cells is a third of the rows.
    assert skip <= target + 0.05


def test_a_second_target_uses_what_the_first_has_executed(
    backbone: Backbone, embedded: list[EmbeddedInput], scales_NM: Tensor
) -> None:
    batches = [embedded]
    first = ModesSearch(backbone, scales_NM, batches, 6, {})
    first.thresholds(0.4)
    alone = ModesSearch(backbone, scales_NM, batches, 6, {})
    alone.thresholds(0.45)
    again = ModesSearch(backbone, scales_NM, batches, 6, first.known)
    again.thresholds(0.45)
    assert len(again.known) - len(first.known) < len(alone.known)
    before = len(again.known)
    again.thresholds(0.4)
    assert len(again.known) == before


def test_a_sample_of_text_needs_no_visual_threshold(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    texts = [embedded[0], embedded[5]]
    search = ModesSearch(backbone, layer_scales(layer_losses(backbone, texts)), [texts], 5, {})
    tau = search.thresholds(0.5)
    assert tau[1] == 0.0 and search.evaluate(tau).skip >= 0.5


@pytest.mark.parametrize("target", [-0.1, 1.5, float("nan")])
def test_a_target_that_is_no_share_is_refused(search: ModesSearch, target: float) -> None:
    with pytest.raises(ConfigError, match="is not a share of the routed rows"):
        search.thresholds(target)


def increments(size: int) -> st.SearchStrategy[list[float]]:
    # Zeros: plateaus, which real passes have where no score lies between two thresholds.
    return st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=size, max_size=size)


@st.composite
def monotone_tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = draw(st.integers(1, 7)), draw(st.integers(1, 7))
    tables = [
        np.array(draw(increments(rows * columns))).reshape(rows, columns).cumsum(0).cumsum(1)
        for _ in range(2)
    ]
    return tables[0] / max(1.0, float(tables[0][-1, -1])), tables[1]


@settings(deadline=None)
@given(tables=monotone_tables(), shares=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_the_search_equals_brute_force_on_monotone_functions(
    tables: tuple[np.ndarray, np.ndarray], shares: list[float]
) -> None:
    skip_IJ, loss_IJ = tables
    text, visual = (np.arange(float(size)) for size in skip_IJ.shape)
    known: dict[Thresholds, Outcome] = {}

    def evaluate(at: Thresholds) -> Outcome:
        assert at not in known  # nothing is executed twice
        i, j = map(int, at)
        known[at] = Outcome(float(skip_IJ[i, j]), float(loss_IJ[i, j]))
        return known[at]

    for share in shares:
        target = share * float(skip_IJ[-1, -1])
        i, j = map(int, frontier_search(evaluate, text, visual, target, known))
        assert skip_IJ[i, j] >= target
        assert loss_IJ[i, j] == loss_IJ[skip_IJ >= target].min()


@pytest.mark.parametrize("bend", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("target", [0.3, 0.31, 0.45, 0.6, 0.7])
def test_refinement_ends_just_above_the_target(target: float, bend: float) -> None:
    calls = []

    def evaluate(at: Thresholds) -> Outcome:
        calls.append(at)
        place = at[0] / 2.0
        assert at[1] == pytest.approx(1.0 + place)
        return Outcome(0.3 + 0.4 * place**bend, place)

    found = refine(evaluate, (0.0, 1.0), (2.0, 2.0), target)
    assert target <= evaluate(found).skip <= target + 0.01
    assert len(set(calls)) <= 2 + REFINEMENTS


def test_refinement_of_a_straight_line_takes_one_point() -> None:
    def evaluate(at: Thresholds) -> Outcome:
        return Outcome(at[0], at[0])

    assert 0.5 <= refine(evaluate, (0.4, 0.0), (0.7, 0.0), 0.5)[0] <= 0.5 + TOLERANCE


def test_a_grid_skips_even_shares_from_nothing_to_everything() -> None:
    scores = np.random.default_rng(0).exponential(size=(100, 10))
    grid = threshold_grid(scores, 11, 1e3)
    skipped = [(scores < tau).mean() for tau in grid]
    assert skipped == pytest.approx(np.linspace(0, 1, 11), abs=2e-3)
    assert threshold_grid(np.full(9, 0.5), 6, 1.0).tolist() == [0.0, 0.5, 1.0]
    assert threshold_grid(np.zeros(0), 6, 1.0).tolist() == [0.0]
