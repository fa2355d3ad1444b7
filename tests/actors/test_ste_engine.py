from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcompute.actors.messages import SIDES
from rlcompute.actors.ste_engine import SteEngine, Step
from rlcompute.backbones import load_configured
from rlcompute.backbones.base import Backbone
from rlcompute.backbones.lora import attach
from rlcompute.config import Config
from rlcompute.decision import Full
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError, CollapseError
from rlcompute.flops import FlopModel
from rlcompute.policies.draws import as_keys, rollout_key
from rlcompute.policies.gates import calibrate
from rlcompute.policies.ste_build import build_gates
from rlcompute.policies.ste_gates import StepContext
from rlcompute.policies.ste_objective import objective
from rlcompute.policies.ste_schedule import temperature
from rlcompute.soft_encoder import encode_soft
from tests.actors.tiny_run import make_config, make_pairs

PAIRS = make_pairs(4)
BATCHES = [PAIRS[:4], PAIRS[4:], PAIRS[2:6], PAIRS[:2] + PAIRS[6:]]
ALL = ("token_pruner", "expert_skip", "layer_skip")


def ste_config(inputs: Path, **keys: Any) -> Config:
    settings = {
        "actions": ALL,
        "iterations": 4,
        "pairs_per_batch": 4,
        "prune_layer": 0,
        "layer_first": 1,
        "skip_target": 0.3 if len(keys.get("actions", ALL)) > 1 else None,
        "lr": 0.05,
        "warmup_share": 0.0,
        **keys,
    }
    return make_config(
        inputs, inputs, "x", run={"name": "x", "dir": str(inputs), "method": "ste"}, ste=settings
    )


def teacher(backbone: Backbone, pairs: list[Any]) -> Tensor:
    inputs = [backbone.preprocessor(getattr(pair, side)) for side in SIDES for pair in pairs]
    packed = backbone.pack(backbone.embed_inputs(inputs))
    return encode(backbone, *packed, Full()).embeddings_Sd.view(2, len(pairs), -1)


def make_engine(backbone: Backbone, config: Config, group: Any = None, adapter: Any = None) -> SteEngine:
    inputs = backbone.embed_inputs([backbone.preprocessor(pair.target) for pair in PAIRS])
    gates = build_gates(config.ste, backbone, inputs, *calibrate(backbone, inputs))
    return SteEngine(backbone, config, gates, group, adapter)


def train(engine: SteEngine, start: int = 0, stop: int = 4) -> list[Step]:
    return [engine.step(i, BATCHES[i], teacher(engine.backbone, BATCHES[i])) for i in range(start, stop)]


class Threads:
    """Two ranks as threads that wait for each other."""

    size = 2

    def __init__(self, rank: int, shared: dict[int, Tensor], barrier: threading.Barrier) -> None:
        self.rank, self._shared, self._barrier = rank, shared, barrier

    def gather(self, x: Tensor) -> list[Tensor]:
        self._shared[self.rank] = x
        self._barrier.wait(60)
        found = [self._shared[0], self._shared[1]]
        self._barrier.wait(60)
        return found

    def add(self, x: Tensor) -> Tensor:
        first, second = self.gather(x)
        return first + second


def test_two_workers_equal_one(backbone: Backbone, inputs: Path) -> None:
    config = ste_config(inputs)
    alone = make_engine(backbone, config)
    expected = train(alone)
    shared: dict[int, Tensor] = {}
    barrier = threading.Barrier(2)
    engines = [make_engine(backbone, config, Threads(rank, shared, barrier)) for rank in (0, 1)]
    found: dict[int, list[Step]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: train(engines[rank])}))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert set(found) == {0, 1}
    for one, two, other in zip(expected, found[0], found[1], strict=True):
        assert two.metrics == other.metrics
        assert two.metrics == pytest.approx(one.metrics, rel=1e-4, abs=1e-5)
        assert (one.actions_NM3 == two.actions_NM3).all()
    for name, tensor in alone.gates.tensors().items():
        torch.testing.assert_close(engines[0].gates.tensors()[name], tensor, rtol=1e-3, atol=1e-4)
        assert torch.equal(engines[0].gates.tensors()[name], engines[1].gates.tensors()[name])


@pytest.mark.parametrize("combination", ["simultaneous", "shared"])
def test_the_gradient_is_that_of_one_graph(backbone: Backbone, inputs: Path, combination: str) -> None:
    """Cut at the gathered embeddings and sums, or computed in one piece: the same numbers."""
    config = ste_config(inputs, combination=combination, skip_target=None if combination == "shared" else 0.3)
    engine, oracle = make_engine(backbone, config), make_engine(backbone, config)
    pairs, settings = BATCHES[0], config.ste
    engine.step(2, pairs, teacher(backbone, pairs))
    keys = [rollout_key(config.run.seed, 2, pair.id, side, 0) for side in SIDES for pair in pairs]
    context = StepContext(temperature(settings, 0.5), as_keys(keys))
    embedded = backbone.embed_inputs(
        [backbone.preprocessor(getattr(pair, side)) for side in SIDES for pair in pairs]
    )
    encoded = encode_soft(backbone, *backbone.pack(embedded), oracle.gates.soft_policy(context))
    flops = FlopModel(backbone)
    cost = flops.executed(encoded.trace).sum() / flops.full(torch.tensor([x.length for x in embedded])).sum()
    objective(
        settings,
        0.5,
        encoded.embeddings_Sd,
        teacher(backbone, pairs).flatten(0, 1),
        torch.eye(4, dtype=torch.bool),
        {name: sums.double() for name, sums in encoded.terms.items()},
        cost,
        backbone.num_experts,
        backbone.top_k,
    ).loss.backward()
    torch.nn.utils.clip_grad_norm_(list(oracle.gates.parameters()), 1.0)
    for (name, found), expected in zip(
        engine.gates.named_parameters(), oracle.gates.parameters(), strict=True
    ):
        assert found.grad is not None
        wanted = torch.zeros_like(found) if expected.grad is None else expected.grad
        torch.testing.assert_close(
            found.grad, wanted, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("combination", ["simultaneous", "sequential"])
def test_resumed_training_is_the_same(backbone: Backbone, inputs: Path, combination: str) -> None:
    config = ste_config(inputs, combination=combination)
    straight, first, second = (make_engine(backbone, config) for _ in range(3))
    expected = train(straight)
    train(first, stop=2)
    second.gates.gates.load_state_dict(first.gates.tensors())
    second.optimizer.load(first.optimizer.tensors())
    second.load_state(first.state())
    assert [step.metrics for step in train(second, start=2)] == [step.metrics for step in expected[2:]]
    for name, tensor in straight.gates.tensors().items():
        assert torch.equal(tensor, second.gates.tensors()[name])


def test_state_that_does_not_fit_is_refused(backbone: Backbone, inputs: Path) -> None:
    engine = make_engine(backbone, ste_config(inputs))
    train(engine, stop=1)
    tensors = engine.optimizer.tensors()
    fresh = make_engine(backbone, ste_config(inputs))
    name = next(iter(tensors))
    with pytest.raises(CheckpointError, match="missing"):
        fresh.optimizer.load({key: x for key, x in tensors.items() if key != name})
    with pytest.raises(CheckpointError, match="belongs to nothing"):
        fresh.optimizer.load(tensors | {"x.step": torch.zeros(())})
    with pytest.raises(CheckpointError, match="keys"):
        fresh.load_state({"stages": {}})


def test_only_the_action_whose_turn_it_is_changes(backbone: Backbone, inputs: Path) -> None:
    engine = make_engine(backbone, ste_config(inputs, combination="alternating"))
    for iteration, kind in enumerate(ALL):
        before = engine.gates.tensors()
        train(engine, iteration, iteration + 1)
        changed = {
            name.split(".")[0]
            for name, x in engine.gates.tensors().items()
            if not torch.equal(x, before[name])
        }
        assert changed == {kind}


def test_settled_gates_decide_as_often_as_asked(backbone: Backbone, inputs: Path) -> None:
    config = ste_config(inputs, actions=("token_pruner",), prune_keep=0.5)
    engine = make_engine(backbone, config)
    train(engine)
    rates = engine.settle(PAIRS)
    embedded = backbone.embed_inputs([backbone.preprocessor(getattr(p, s)) for p in PAIRS for s in SIDES])
    trace = encode(backbone, *backbone.pack(embedded), engine.gates.policy()).trace
    visual = sum(int((x.modality_L != 0).sum()) for x in embedded)
    dropped = int((trace.decided_NS[0] - trace.survived_NS[0]).sum())
    assert abs((visual - dropped) - 0.5 * visual) <= 1
    assert rates["token_pruner"] == pytest.approx((visual - dropped) / visual)


def test_nothing_to_decide_is_nothing_to_settle(backbone: Backbone, inputs: Path) -> None:
    engine = make_engine(backbone, ste_config(inputs))
    train(engine, stop=1)
    texts = [replace(pair, id=f"text {pair.id}", target=pair.query) for pair in PAIRS]
    before = engine.gates.thresholds()["token_pruner"].clone()
    assert set(engine.settle(texts)) == {"expert_skip", "layer_skip"}
    assert torch.equal(engine.gates.thresholds()["token_pruner"], before)


def test_an_action_that_never_decided_has_no_rate_to_settle(backbone: Backbone, inputs: Path) -> None:
    engine = make_engine(backbone, ste_config(inputs, combination="shared", skip_target=None))
    assert engine.settle(PAIRS) == {}


def test_adapters_are_trained_with_the_gates(inputs: Path) -> None:
    config = ste_config(inputs, actions=("expert_skip",), distill_weight=0.0)
    backbone = load_configured(config)
    wanted = [teacher(backbone, batch) for batch in BATCHES]
    adapter = attach(backbone, rank=2, alpha=4.0, targets=("attention", "experts"), seed=0)
    engine = make_engine(backbone, config, adapter=adapter)
    before = adapter.tensors()
    engine.step(0, BATCHES[0], wanted[0])
    moved = [float((adapter.tensors()[name] - x).abs().max()) for name, x in before.items()]
    assert max(moved) == pytest.approx(
        config.ste.lr / 40, rel=0.05
    )  # AdamW's first step is the learning rate
    assert any(name.startswith("adapter.") for name in engine.optimizer.tensors())


def test_a_gradient_that_is_not_a_number_stops_the_run(backbone: Backbone, inputs: Path) -> None:
    engine = make_engine(backbone, ste_config(inputs))
    before = engine.gates.tensors()
    with pytest.raises(CollapseError, match="iteration 1: the gradient"):
        engine.step(0, BATCHES[0], torch.full_like(teacher(backbone, BATCHES[0]), torch.nan))
    for name, tensor in engine.gates.tensors().items():
        assert torch.equal(tensor, before[name])
