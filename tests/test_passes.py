"""Measuring policies: against encoding one input at a time, and the random control at matched FLOPs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlcompute import passes
from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.data.schema import Side
from rlcompute.decision import Bypass, Decision, Full, Policy, Signals
from rlcompute.encoder import encode
from rlcompute.flops import FlopModel
from rlcompute.pack import Pack
from rlcompute.passes import (
    TILE,
    Contender,
    InputBatches,
    Item,
    Measured,
    clock,
    measure,
    random_like,
    uniform_like,
)
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.draws import as_keys, rollout_key
from rlcompute.policies.expert_rules import UniformTopK
from rlcompute.policies.gates import Droppable
from tests.pairs import png
from tests.tiny import write_tiny_checkpoint

FULL = Contender("full", lambda names: Full())


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


def make_items(count: int, seed: int = 0) -> list[Item]:
    rng = np.random.default_rng(seed)
    sides = []
    for row in range(count):
        text = "words " * int(rng.integers(1, 9))
        sides.append(Side(text=text) if row % 3 else Side(text=text, images=(png(rng, 48, 64),)))
    return [Item(f"input {row}", side) for row, side in enumerate(sides)]


def random_contender(skip: float, drop: float, droppable: Droppable, layers: int) -> Contender:
    def make(names: list[str]) -> RandomActions:
        keys = as_keys([rollout_key(9, 0, name, "reference", 0) for name in names])
        return RandomActions(keys, skip=skip, drop=drop, droppable=droppable, num_layers=layers)

    return Contender("reference", make)


def test_packs_and_batches_do_not_change_what_is_measured(backbone: Backbone) -> None:
    items = make_items(7)
    contenders = [
        FULL,
        random_contender(0.3, 0.1, "all", backbone.num_layers),
        Contender("uniform_topk", lambda names: UniformTopK(1, backbone.top_k)),
    ]
    facts, measured = measure(backbone, InputBatches(backbone, items, 3), contenders, label="test")
    flops = FlopModel(backbone)
    for row, item in enumerate(items):
        embedded = backbone.embed_inputs([backbone.preprocessor(item.side)])
        assert int(facts.lengths_S[row]) == embedded[0].length
        assert float(facts.vision_flops_S[row]) == embedded[0].vision_flops
        assert (int(facts.visual_S[row]) > 0) == (row % 3 == 0)
        for contender in contenders:
            alone = encode(backbone, *backbone.pack(embedded), contender.make([item.name]))
            result = measured[contender.name]
            np.testing.assert_allclose(
                result.embeddings_Sd[row], alone.embeddings_Sd[0].numpy(), atol=2e-5, rtol=0
            )
            assert result.executed_S[row] == float(flops.executed(alone.trace))
            assert result.logical_S[row] == float(flops.logical(alone.trace))
    np.testing.assert_array_equal(measured["full"].executed_S, flops.full(facts.lengths_S).numpy())


def test_hardware_flops_are_those_of_the_packs(backbone: Backbone) -> None:
    items = make_items(5)
    _, measured = measure(backbone, InputBatches(backbone, items, 3), [FULL], label="test")
    flops = FlopModel(backbone)
    expected = 0.0
    for batch in (items[:3], items[3:]):
        inputs = backbone.embed_inputs([backbone.preprocessor(item.side) for item in batch])
        trace = encode(backbone, *backbone.pack(inputs), Full()).trace
        expected += flops.hardware(trace, 0.0, TILE)
    assert measured["full"].hardware_flops == pytest.approx(expected, rel=1e-12)
    assert expected > measured["full"].executed_S.sum()


@pytest.mark.parametrize(
    ("skip", "drop", "droppable"),
    [(0.4, 0.0, "all"), (0.0, 0.15, "all"), (0.3, 0.1, "all"), (0.2, 0.2, "visual"), (0.9, 0.05, "all")],
)
def test_random_spends_what_the_reference_spends(
    backbone: Backbone, skip: float, drop: float, droppable: Droppable
) -> None:
    items = make_items(60)
    reference = random_contender(skip, drop, droppable, backbone.num_layers)
    facts, measured = measure(backbone, InputBatches(backbone, items, 30), [reference], label="test")
    control = random_like(backbone, facts, measured["reference"], droppable, seed=1)
    _, result = measure(backbone, InputBatches(backbone, items, 30), [control], label="test")
    ratio = result["random"].executed_S.sum() / measured["reference"].executed_S.sum()
    assert ratio == pytest.approx(1.0, abs=0.01)
    # The mix is kept as well: about as many tokens reach the last layer.
    alive = float(
        result["random"].trace.entered_NS[-1].sum() / measured["reference"].trace.entered_NS[-1].sum()
    )
    assert alive == pytest.approx(1.0, abs=0.1)


def test_random_matches_a_policy_that_is_not_random(backbone: Backbone) -> None:
    """A reference that drops everything droppable in layer 1 and never skips: savings come early, all at
    once."""
    items = make_items(60)
    facts, measured = measure(backbone, InputBatches(backbone, items, 30), [FULL], label="test")
    full = measured["full"]
    alone = full.trace.entered_NS.clone()
    alone[2:] = 1
    survived = full.trace.survived_NS.clone()
    survived[1:] = 1
    decided = torch.cat([alone[:-1], torch.ones_like(alone[-1:])])
    trace = type(full.trace)(
        *(alone, decided, survived, survived, survived * backbone.top_k),
        *(full.trace.expert_rows_NE, full.trace.signal_flops_NS, full.trace.bypassed_NS),
    )
    executed = FlopModel(backbone).executed(trace).numpy()
    reference = Measured(full.embeddings_Sd, trace, executed, executed, executed)
    control = random_like(backbone, facts, reference, "all", seed=1)
    _, result = measure(backbone, InputBatches(backbone, items, 30), [control], label="test")
    assert result["random"].executed_S.sum() / executed.sum() == pytest.approx(1.0, abs=0.02)
    assert executed.sum() < 0.8 * full.executed_S.sum()


class Bypasses:
    """A random share of inputs passes each layer unchanged, under another policy's decisions for the rest."""

    def __init__(self, share: float, policy: Policy) -> None:
        self.share, self.policy, self.gate_flops_per_token = share, policy, policy.gate_flops_per_token
        self.generator = torch.Generator().manual_seed(0)

    def bypass(self, layer: int, emb_Sd: Tensor, pack: Pack) -> Bypass:
        return Bypass(torch.rand(pack.num_segments, generator=self.generator) < self.share, 0.0)

    def decide(self, layer: int, x_Td: Tensor, signals: Signals, pack: Pack) -> Decision:
        return self.policy.decide(layer, x_Td, signals, pack)


@pytest.mark.parametrize(("share", "drop", "drops"), [(0.2, 0.0, False), (0.6, 0.0, True), (0.2, 0.1, True)])
def test_random_reaches_what_bypassed_layers_save(
    backbone: Backbone, share: float, drop: float, drops: bool
) -> None:
    """What passes a layer was not dropped; a control that cannot save as much by skipping drops as well."""
    items = make_items(60)
    inner = random_contender(0.0, drop, "all", backbone.num_layers)
    reference = Contender("reference", lambda names: Bypasses(share, inner.make(names)))
    batches = InputBatches(backbone, items, 30)
    facts, measured = measure(backbone, batches, [reference], label=None)
    control = random_like(backbone, facts, measured["reference"], "all", seed=1)
    assert (control.parameters["drop"] > 0.0) == drops
    assert control.parameters["skip"] > 0.0
    _, result = measure(backbone, batches, [control], label=None)
    ratio = result["random"].executed_S.sum() / measured["reference"].executed_S.sum()
    assert ratio == pytest.approx(1.0, abs=0.02)
    if drop:
        # The mix is kept: of the tokens at a layer a share passes it, and of the others one is dropped.
        dropping = control.parameters["drop"]
        skipping = control.parameters["skip"] / (1.0 - dropping)
        kept = np.log1p(-drop * (1.0 - share)) / np.log1p(-share)
        assert np.log1p(-dropping) / np.log1p(-skipping) == pytest.approx(kept, rel=0.1)


def test_random_of_full_compute_is_full_compute(backbone: Backbone) -> None:
    items = make_items(4)
    facts, measured = measure(backbone, InputBatches(backbone, items, 4), [FULL], label="test")
    control = random_like(backbone, facts, measured["full"], "all", seed=1)
    _, result = measure(backbone, InputBatches(backbone, items, 4), [control], label="test")
    np.testing.assert_array_equal(result["random"].executed_S, measured["full"].executed_S)


def test_uniform_control_takes_the_nearest_k(backbone: Backbone) -> None:
    items = make_items(6)
    batches = InputBatches(backbone, items, 6)
    tops = [
        Contender(str(k), lambda names, k=k: UniformTopK(k, backbone.top_k))
        for k in range(1, backbone.top_k + 1)
    ]
    facts, measured = measure(backbone, batches, [FULL, *tops], label="test")
    for name, result in measured.items():
        expected = backbone.top_k if name == "full" else int(name)
        assert uniform_like(backbone, facts, result).parameters == {"k": expected}
    less_than_one_expert = replace(measured["1"], executed_S=0.1 * measured["1"].executed_S)
    assert uniform_like(backbone, facts, less_than_one_expert).parameters == {"k": 1}
    assert uniform_like(backbone, facts, None).parameters == {"k": max(1, backbone.top_k // 2)}


def test_clock_times_every_policy_on_every_input(backbone: Backbone) -> None:
    calls: dict[str, list[str]] = {"a": [], "b": []}

    def counting(name: str) -> Contender:
        def make(names: list[str]) -> Full:
            calls[name].extend(names)
            return Full()

        return Contender(name, make)

    items = make_items(3)
    rates = clock(backbone, items, [counting("a"), counting("b")], batch_size=2)
    assert set(rates) == {"a", "b"}
    assert all(rate > 0 for rate in rates.values())
    assert sorted(calls["a"]) == sorted(calls["b"])
    assert len(calls["a"]) == 6 * len(items)


@pytest.mark.parametrize("kept_bytes", [0, 20_000, 2**30])
def test_a_second_pass_sees_the_same_inputs(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    monkeypatch.setattr(passes, "KEPT_BYTES", kept_bytes)
    embedded = []
    monkeypatch.setattr(
        backbone,
        "embed_inputs",
        lambda inputs, embed=backbone.embed_inputs: embedded.append(1) or embed(inputs),
    )
    batches = InputBatches(backbone, make_items(6), 2)
    assert len(batches) == 6
    first, second = list(batches), list(batches)
    assert [names for names, _ in first] == [names for names, _ in second]
    for (_, before), (_, after) in zip(first, second, strict=True):
        assert all(torch.equal(a.hidden_Ld, b.hidden_Ld) for a, b in zip(before, after, strict=True))
    assert len(embedded) == {0: 6, 2**30: 3}.get(kept_bytes, len(embedded))
    if kept_bytes == 20_000:
        assert 3 < len(embedded) < 6
