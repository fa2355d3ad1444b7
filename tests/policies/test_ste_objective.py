"""The objective of straight-through gates against sums by hand, loops, and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlcompute.config_ste import SteConfig
from rlcompute.policies.ste_objective import (
    Objective,
    distillation,
    info_nce,
    load_balance,
    objective,
    shared_budget,
)

PAIRS, DIM, REAL, NULLS, TOP_K, LAYERS = 4, 6, 3, 2, 2, 3
LATE = 0.7
"""Share of a run at which every budget has its full weight and the load balance its later one."""
Terms = Mapping[str, Tensor]


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def unit(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, DIM, generator=generator, dtype=torch.float64), dim=1)


def make_settings(*actions: str, **values: object) -> SteConfig:
    return SteConfig.model_validate({"actions": actions, **values})


def every_term() -> dict[str, Tensor]:
    """Sums that give: keep 0.6, skip 0.2, layer skip 0.5, 1.5 of 2 slots real, 2.5 layers."""
    return {
        "token_pruner/kept": column(6.0),
        "token_pruner/tokens": column(10.0),
        "expert_skip/skipped": column(1.0, 2.0, 3.0),
        "expert_skip/tokens": column(12.0, 10.0, 8.0),
        "layer_skip/skipped": column(3.0, 5.0),
        "layer_skip/inputs": column(8.0, 8.0),
        "null_experts/counts": torch.tensor([[3.0, 2.0, 1.0, 1.0]], dtype=torch.float64),
        "null_experts/probs": torch.tensor([[1.6, 1.0, 0.4, 0.8, 0.2]], dtype=torch.float64),
        "null_experts/tokens": column(4.0),
        "null_experts/real": column(6.0),
        "halt_avit/steps": column(4.0, 4.0, 2.0),
        "halt_avit/kl": column(0.5, 0.5, 0.2),
        "halt_avit/tokens": column(4.0, 4.0, 4.0),
    }


def evaluate(
    settings: SteConfig, share: float = LATE, executed: float = 0.8, terms: Terms | None = None
) -> Objective:
    embeddings, teacher = unit(2 * PAIRS, 0), unit(2 * PAIRS, 1)
    same = torch.eye(PAIRS, dtype=torch.bool)
    executed_over_full = torch.tensor(executed, dtype=torch.float64)
    sums = every_term() if terms is None else terms
    return objective(settings, share, embeddings, teacher, same, sums, executed_over_full, REAL, TOP_K)


def loop_info_nce(query: Tensor, target: Tensor, ids: list[int], scale: float) -> float:
    """Each pair by itself: its own item against it and all items of other ids, in both directions."""
    total = 0.0
    for own, other in ((query, target), (target, query)):
        for i in range(len(ids)):
            rivals = [j for j in range(len(ids)) if ids[j] != ids[i]]
            scores = [scale * float(own[i] @ other[j]) for j in [i, *rivals]]
            total -= scores[0] - math.log(sum(math.exp(x) for x in scores))
    return total / (2 * len(ids))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(0, 1000))
def test_info_nce_equals_a_loop_over_pairs(ids: list[int], seed: int) -> None:
    query, target = unit(len(ids), seed), unit(len(ids), seed + 1)
    same = torch.tensor([[a == b for b in ids] for a in ids])
    expected = loop_info_nce(query, target, ids, 7.0)
    assert float(info_nce(query, target, same, 7.0)) == pytest.approx(expected, abs=1e-10)


def test_info_nce_without_duplicates_is_cross_entropy_both_ways() -> None:
    query, target = unit(PAIRS, 3), unit(PAIRS, 4)
    logits, own = 50.0 * query @ target.T, torch.arange(PAIRS)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    torch.testing.assert_close(
        info_nce(query, target, torch.eye(PAIRS, dtype=torch.bool), 50.0), expected, rtol=1e-12, atol=0
    )


def test_a_batch_of_duplicates_has_no_contrast_and_a_finite_gradient() -> None:
    query = unit(PAIRS, 3).requires_grad_()
    loss = info_nce(query, unit(PAIRS, 4), torch.ones(PAIRS, PAIRS, dtype=torch.bool), 50.0)
    loss.backward()
    assert loss.item() == 0.0
    assert query.grad is not None
    assert bool((query.grad == 0.0).all())


def test_distillation_is_one_minus_the_mean_cosine() -> None:
    teacher = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    embeddings = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-1.0, 0.0]], dtype=torch.float64)
    assert float(distillation(embeddings, teacher)) == pytest.approx((0.0 + 0.2 + 2.0) / 3)


ALONE = [
    ("token_pruner", {"token_pruner": 0.5 * (0.6 - 0.3)}, {"keep": 0.6}, (1 - 0.6) / (1 - 0.3)),
    ("expert_skip", {"expert_skip": 0.02 * (1 - 0.2)}, {"skip": 0.2}, None),
    ("layer_skip", {"layer_skip": 1.0 * (0.5 - 0.2)}, {"skip": 0.5}, 0.5 / 0.2),
    (
        "null_experts",
        # 5 * (3/8*1.6/4 + 2/8*1.0/4 + 1/8*0.4/4 + 1/8*(0.8+0.2)/4)
        {"null_experts": 1e-4 * 5 * 0.25625},
        {"real": 1.5, "balance": 5 * 0.25625},
        (1 - 1.5 / 2) / (2 / 5),
    ),
    ("halt_avit", {"ponder": 0.01 * 2.5, "prior": 0.01 * 0.3}, {"layers": 2.5, "kl": 0.3}, None),
]


@pytest.mark.parametrize(("kind", "budgets", "rates", "progress"), ALONE, ids=[case[0] for case in ALONE])
def test_budget_of_one_action_by_hand(
    kind: str, budgets: dict[str, float], rates: dict[str, float], progress: float | None
) -> None:
    found = evaluate(make_settings(kind))
    parts = {name: float(part) for name, part in found.parts.items()}
    assert float(found.loss) == pytest.approx(sum(parts.values()))
    del parts["contrastive"], parts["distill"]
    assert parts == pytest.approx(budgets)
    assert found.rates == pytest.approx({f"{kind}/{name}": rate for name, rate in rates.items()})
    assert found.progress == pytest.approx({} if progress is None else {kind: progress})


def test_expert_skip_alone_goes_as_far_as_training_allows() -> None:
    alone = evaluate(make_settings("expert_skip", skip_target=0.6))
    assert float(alone.parts["expert_skip"]) == pytest.approx(0.02 * (1 - 0.2))
    assert alone.progress == {}


def test_several_actions_have_squared_budgets() -> None:
    combined = make_settings("token_pruner", "expert_skip", "layer_skip", "null_experts", skip_target=0.6)
    found = evaluate(combined)
    assert {
        name: float(part) for name, part in found.parts.items() if name in combined.actions
    } == pytest.approx(
        {
            "token_pruner": 0.5 * 0.3**2,
            "expert_skip": 1.0 * 0.4**2,
            "layer_skip": 1.0 * 0.3**2,
            "null_experts": 1e-4 * 5 * 0.25625,
        }
    )
    assert found.progress == pytest.approx(
        {"token_pruner": 0.4 / 0.7, "expert_skip": 0.2 / 0.6, "layer_skip": 2.5, "null_experts": 0.625}
    )


def test_a_shared_budget_replaces_those_of_the_actions() -> None:
    shared = make_settings("token_pruner", "null_experts", combination="shared", flops_weight=3.0)
    found = evaluate(shared, executed=0.8)
    assert set(found.parts) == {"contrastive", "distill", "flops"}
    assert float(found.parts["flops"]) == pytest.approx(3.0 * (0.8 - 0.55))
    assert float(evaluate(shared, executed=0.5).parts["flops"]) == 0.0
    assert float(evaluate(shared, share=0.1).parts["flops"]) == 0.0
    assert found.rates["token_pruner/keep"] == pytest.approx(0.6)
    assert float(shared_budget(torch.tensor(0.55), 0.45)) == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("combined", [False, True])
def test_budgets_follow_their_schedules(combined: bool) -> None:
    def budget(kind: str, share: float) -> float:
        actions = (kind, "layer_skip" if kind != "layer_skip" else "token_pruner") if combined else (kind,)
        return float(evaluate(make_settings(*actions, skip_target=0.6), share).parts[kind])

    for kind in ("token_pruner", "expert_skip"):
        full = budget(kind, 0.2001)
        assert full > 0.0
        assert budget(kind, 0.14) == 0.0
        assert budget(kind, 0.175) == pytest.approx(full / 2)
    assert budget("layer_skip", 0.0) == budget("layer_skip", 1.0) > 0.0
    assert budget("null_experts", 0.49) == pytest.approx(200 * budget("null_experts", 0.5))


def test_weights_scale_what_they_name() -> None:
    plain = evaluate(make_settings("token_pruner"))
    weighted = evaluate(
        make_settings("token_pruner", contrastive_weight=2.0, distill_weight=3.0, prune_weight=2.0)
    )
    halting = evaluate(make_settings("halt_avit", ponder_weight=0.5, prior_weight=2.0))
    assert float(halting.parts["ponder"]) == pytest.approx(0.5 * 2.5)
    assert float(halting.parts["prior"]) == pytest.approx(2.0 * 0.3)
    for name, factor in {"contrastive": 2.0, "distill": 3.0, "token_pruner": 4.0}.items():
        assert float(weighted.parts[name]) == pytest.approx(factor * float(plain.parts[name]))


@pytest.mark.parametrize("actions", [("token_pruner",), ("token_pruner", "layer_skip")])
def test_a_batch_without_visual_tokens_pays_nothing_for_them(actions: tuple[str, ...]) -> None:
    terms = every_term() | {"token_pruner/kept": column(0.0), "token_pruner/tokens": column(0.0)}
    found = evaluate(make_settings(*actions), terms=terms)
    assert float(found.parts["token_pruner"]) == 0.0
    assert math.isnan(found.rates["token_pruner/keep"])
    assert "token_pruner" not in found.progress
    assert math.isfinite(float(found.loss))


def test_sums_of_two_halves_give_the_loss_of_the_whole() -> None:
    settings = make_settings("token_pruner", "expert_skip", "layer_skip", "null_experts", skip_target=0.6)
    whole = evaluate(settings)
    generator = torch.Generator().manual_seed(2)
    shares = {name: torch.rand(x.shape, generator=generator).double() for name, x in every_term().items()}
    halves = [
        {name: sums * shares[name] for name, sums in every_term().items()},
        {name: sums * (1 - shares[name]) for name, sums in every_term().items()},
    ]
    added = evaluate(settings, terms={name: sum(half[name] for half in halves) for name in halves[0]})  # type: ignore[misc]
    torch.testing.assert_close(added.loss, whole.loss, rtol=1e-12, atol=0)
    assert added.rates == pytest.approx(whole.rates)


def test_the_loss_has_the_dtype_of_its_inputs() -> None:
    settings = make_settings("token_pruner", "expert_skip", "layer_skip", "null_experts", skip_target=0.6)
    teacher, same = unit(2 * PAIRS, 1).float(), torch.eye(PAIRS, dtype=torch.bool)
    terms = {name: sums.float() for name, sums in every_term().items()}
    embeddings = unit(2 * PAIRS, 0).float()
    found = objective(settings, LATE, embeddings, teacher, same, terms, torch.tensor(0.8), REAL, TOP_K)
    assert found.loss.dtype == torch.float32
    assert float(found.loss) == pytest.approx(float(evaluate(settings).loss), rel=1e-5)


def balance(counts: Tensor, probs: Tensor, tokens: float) -> float:
    layers = len(counts)
    return float(load_balance(counts, probs, column(*[tokens] * layers), REAL, TOP_K))


def test_load_balance_is_one_at_a_uniform_load() -> None:
    each = 40.0 * TOP_K / (REAL + NULLS)
    counts = torch.full((LAYERS, REAL + 1), each, dtype=torch.float64)
    probs = torch.full((LAYERS, REAL + NULLS), 40.0 / (REAL + NULLS), dtype=torch.float64)
    assert balance(counts, probs, 40.0) == pytest.approx(1.0)


@given(st.lists(st.floats(-3.0, 3.0), min_size=REAL + 1, max_size=REAL + 1))
def test_no_load_that_follows_the_probabilities_is_below_the_uniform_one(logits: list[float]) -> None:
    spread = torch.tensor([*logits, *[logits[-1]] * (NULLS - 1)], dtype=torch.float64).softmax(0)
    counts = TOP_K * torch.cat([spread[:REAL], spread[REAL:].mean()[None]])[None]
    assert balance(counts, spread[None], 1.0) >= 1.0 - 1e-12


def test_null_experts_are_not_told_apart() -> None:
    counts = torch.tensor([[2.0, 2.0, 2.0, 1.0]], dtype=torch.float64)
    probs = torch.tensor([[1.0, 0.5, 0.5, 1.5, 0.5]], dtype=torch.float64, requires_grad=True)
    loss = load_balance(counts, probs, column(4.0), REAL, TOP_K)
    # f = 1/4, 1/4, 1/4, then 1/8 for each null; P = 1/4, 1/8, 1/8, 3/8, 1/8.
    assert loss.item() == pytest.approx(5 * (0.25 * 0.5 + 0.125 * 0.5))
    (gradient,) = torch.autograd.grad(loss, probs)
    assert float(gradient[0, REAL]) == float(gradient[0, REAL + 1])
    swapped = load_balance(counts, probs[:, [0, 1, 2, 4, 3]], column(4.0), REAL, TOP_K)
    assert swapped.item() == pytest.approx(loss.item())


def check_gradient(function: Callable[..., Tensor], *inputs: Tensor) -> None:
    leaves = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(function, leaves)
    assert all(bool((g != 0).any()) for g in torch.autograd.grad(function(*leaves), leaves))


def test_gradients_of_embedding_losses_equal_finite_differences() -> None:
    same = torch.tensor([[i == j or (i, j) in ((0, 2), (2, 0)) for j in range(PAIRS)] for i in range(PAIRS)])
    check_gradient(lambda q, t: info_nce(q, t, same, 3.0), unit(PAIRS, 5), unit(PAIRS, 6))
    teacher = unit(PAIRS, 7)
    check_gradient(lambda e: distillation(e, teacher), unit(PAIRS, 5))


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (make_settings("token_pruner"), ["kept", "tokens"]),
        (make_settings("expert_skip"), ["skipped", "tokens"]),
        (make_settings("layer_skip"), ["skipped", "inputs"]),
        (make_settings("null_experts"), ["counts", "probs", "tokens"]),
        (make_settings("halt_avit"), ["steps", "kl"]),
    ],
    ids=lambda value: value.actions[0] if isinstance(value, SteConfig) else "",
)
def test_gradients_of_budgets_equal_finite_differences(settings: SteConfig, names: list[str]) -> None:
    (kind,) = settings.actions
    keys = [f"{kind}/{name}" for name in names]

    def loss(*sums: Tensor) -> Tensor:
        return evaluate(settings, 0.4, terms=every_term() | dict(zip(keys, sums, strict=True))).loss

    check_gradient(loss, *[every_term()[key] for key in keys])


def test_gradients_of_combined_budgets_equal_finite_differences() -> None:
    several = make_settings("token_pruner", "expert_skip", "layer_skip", skip_target=0.6)
    keys = ["token_pruner/kept", "expert_skip/skipped", "layer_skip/skipped"]

    def loss(*sums: Tensor) -> Tensor:
        return evaluate(several, terms=every_term() | dict(zip(keys, sums, strict=True))).loss

    check_gradient(loss, *[every_term()[key] for key in keys])
    check_gradient(lambda x: shared_budget(x, 0.45), torch.tensor(0.8, dtype=torch.float64))


def test_a_relaxed_optimum_meets_the_targets() -> None:
    """Descending the budgets alone leads every rate to its target: signs are right."""
    combined = make_settings("token_pruner", "expert_skip", "layer_skip", skip_target=0.6, prune_weight=1.0)
    logits = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.1)
    found = None
    for _ in range(150):
        keep, skip, layers = logits.sigmoid()
        found = evaluate(
            combined,
            terms={
                "token_pruner/kept": keep[None, None] * 10,
                "token_pruner/tokens": column(10.0),
                "expert_skip/skipped": skip[None, None] * 30,
                "expert_skip/tokens": column(30.0),
                "layer_skip/skipped": layers[None, None] * 8,
                "layer_skip/inputs": column(8.0),
            },
        )
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
    assert found is not None
    assert found.progress == pytest.approx(dict.fromkeys(combined.actions, 1.0), abs=0.02)
