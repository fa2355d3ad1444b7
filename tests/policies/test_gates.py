"""Sampling, greedy execution and calibration of the gate heads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.decision import DROP, SKIP, Decision, Full, Signals
from rlcompute.encoder import encode
from rlcompute.errors import CheckpointError
from rlcompute.flops import FlopModel
from rlcompute.pack import TEXT, EmbeddedInput, Pack
from rlcompute.policies.baselines import RandomActions
from rlcompute.policies.checkpoint import check_backbone, load_gates, save_gates
from rlcompute.policies.draws import as_keys, rollout_key, uniform
from rlcompute.policies.expert_rules import UniformTopK
from rlcompute.policies.gates import GateHeads, GreedyGates, SampledGates, calibrate, init_heads
from tests.inputs import every_modality
from tests.tiny import write_tiny_checkpoint


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return load_backbone(write_tiny_checkpoint(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def embedded(backbone: Backbone) -> list[EmbeddedInput]:
    return backbone.embed_inputs(every_modality(backbone.preprocessor))


@pytest.fixture(scope="module")
def heads(backbone: Backbone, embedded: list[EmbeddedInput]) -> GateHeads:
    mean, scale = calibrate(backbone, embedded)
    return init_heads(mean, scale, skip=0.3, drop=0.2, late_skip_bias=0.0, droppable="all")


class Recorder:
    """Wraps a policy and keeps what it saw and decided."""

    def __init__(self, policy: SampledGates | GreedyGates | RandomActions | Full) -> None:
        self.policy, self.gate_flops_per_token = policy, 0.0
        self.inputs: list[torch.Tensor] = []
        self.decisions: list[tuple[Decision, Pack]] = []

    def decide(self, layer: int, x_Td: torch.Tensor, signals: Signals, pack: Pack) -> Decision:
        decision = self.policy.decide(layer, x_Td, signals, pack)
        self.inputs.append(x_Td)
        self.decisions.append((decision, pack))
        return decision


def keys(n: int, iteration: int = 0) -> torch.Tensor:
    return as_keys([rollout_key(7, iteration, str(i), "query", 0) for i in range(n)])


def test_draws_are_uniform_and_independent_of_order() -> None:
    key = as_keys([rollout_key(0, 0, "a", "query", g) for g in range(500)])
    index = torch.arange(200)
    draws = uniform(key.repeat_interleave(200), 3, index.repeat(500))
    assert float(draws.min()) >= 0 and float(draws.max()) < 1
    share = torch.histc(draws, 20, 0, 1) / len(draws)
    assert float((share - 0.05).abs().max()) < 0.004
    table = draws.view(500, 200)
    for a, b in ((table[:-1], table[1:]), (table[:, :-1], table[:, 1:])):
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(correlation)) < 0.02
    assert torch.equal(uniform(key[5:6], 3, index[9:10]), table[5, 9:10])
    other_layer = uniform(key.repeat_interleave(200), 4, index.repeat(500))
    assert abs(float(torch.corrcoef(torch.stack([draws, other_layer]))[0, 1])) < 0.02
    names = {
        rollout_key(s, i, p, side, g)
        for s in (0, 1)
        for i in (0, 1)
        for p in "ab"
        for side in ("query", "target")
        for g in (0, 1)
    }
    assert len(names) == 32


def test_sampling_follows_the_probabilities(
    backbone: Backbone, embedded: list[EmbeddedInput], heads: GateHeads
) -> None:
    policy = SampledGates(heads, keys(300))
    encode(backbone, *backbone.pack([embedded[1]] * 300), policy)
    first = policy.action_counts_NM3[0].sum(0)
    share = first / first.sum()
    # <emb> (one token in a few) may not be dropped, so its drop mass goes to the other two.
    stay = 300 / float(first.sum())
    assert float(share[DROP]) == pytest.approx(0.2 * (1 - stay), abs=0.02)
    assert float(share[SKIP]) == pytest.approx(0.3 * (1 - stay) + 0.3 / 0.8 * stay, abs=0.02)


def test_rollouts_do_not_depend_on_batchmates(
    backbone: Backbone, embedded: list[EmbeddedInput], heads: GateHeads
) -> None:
    all_keys = keys(len(embedded))
    together = SampledGates(heads, all_keys)
    out = encode(backbone, *backbone.pack(embedded), together).embeddings_Sd
    for i, x in enumerate(embedded):
        alone = SampledGates(heads, all_keys[i : i + 1])
        single = encode(backbone, *backbone.pack([x]), alone).embeddings_Sd
        assert torch.allclose(out[i : i + 1], single, atol=5e-5)
        assert torch.equal(alone.decisions_S, together.decisions_S[i : i + 1])
        assert torch.allclose(alone.statistic_SN3F[0], together.statistic_SN3F[i], atol=1e-3)


def test_text_stays_when_only_visual_tokens_may_go(
    backbone: Backbone, embedded: list[EmbeddedInput], heads: GateHeads
) -> None:
    visual = GateHeads(heads.weight_N3F, heads.mean_Nd, heads.scale_N, "visual")
    for policy in (
        SampledGates(visual, keys(len(embedded))),
        RandomActions(
            keys(len(embedded)), skip=0.1, drop=0.5, droppable="visual", num_layers=backbone.num_layers
        ),
    ):
        recorder = Recorder(policy)
        encode(backbone, *backbone.pack(embedded), recorder)
        dropped = 0
        for decision, pack in recorder.decisions:
            assert decision.drop_T is not None
            assert not bool((decision.drop_T & (pack.modality_T == TEXT)).any())
            dropped += int(decision.drop_T.sum())
        assert dropped > 0


def test_greedy_takes_the_most_probable_action(
    backbone: Backbone, embedded: list[EmbeddedInput], heads: GateHeads
) -> None:
    noise = torch.randn(heads.weight_N3F.shape, generator=torch.Generator().manual_seed(0))
    heads = replace(heads, weight_N3F=heads.weight_N3F + 0.3 * noise)
    recorder = Recorder(GreedyGates(heads))
    encode(backbone, *backbone.pack(embedded), recorder)
    for layer, (x_Td, (decision, pack)) in enumerate(zip(recorder.inputs, recorder.decisions, strict=True)):
        logits = heads.mask_drop(layer, heads.features(layer, x_Td) @ heads.weight_N3F[layer].t(), pack)
        best = logits.argmax(1)
        assert decision.drop_T is not None and decision.keep is not None
        assert torch.equal(decision.drop_T, best == DROP)
        assert torch.equal(decision.keep, best == 0)


def test_calibration_is_mean_and_one_deviation_a_layer(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    recorder = Recorder(Full())
    encode(backbone, *backbone.pack(embedded), recorder)
    mean, scale = calibrate(backbone, embedded, batch_size=2)
    for layer, x_Td in enumerate(recorder.inputs):
        assert torch.allclose(mean[layer], x_Td.mean(0), atol=1e-5)
        expected = (x_Td - x_Td.mean(0)).square().mean().sqrt()
        assert float(scale[layer]) == pytest.approx(float(expected), rel=1e-4)


def test_uniform_top_k_runs_k_experts_and_charges_them(
    backbone: Backbone, embedded: list[EmbeddedInput]
) -> None:
    trace = encode(backbone, *backbone.pack(embedded), UniformTopK(1, backbone.top_k)).trace
    assert torch.equal(trace.rows_NS, trace.routed_NS)
    flops = FlopModel(backbone)
    full = flops.full(torch.tensor([x.length for x in embedded]))
    per_row = torch.tensor([layer.cost.expert_row for layer in backbone.layers], dtype=torch.float64)
    expected = full - (per_row[:, None] * (trace.decided_NS * backbone.top_k - trace.rows_NS)).sum(0)
    assert torch.allclose(flops.executed(trace), expected)
    with pytest.raises(ValueError, match=r"1\.\.3"):
        UniformTopK(4, backbone.top_k)


def test_gates_survive_the_disk_and_refuse_another_backbone(tmp_path: Path, heads: GateHeads) -> None:
    save_gates(tmp_path, heads, {"path": "b", "family": "qwen3_5_moe", "hash": "1" * 64}, {"note": 1})
    saved = load_gates(tmp_path)
    assert torch.equal(saved.gates.weight_N3F, heads.weight_N3F)
    assert saved.gates.droppable == "all" and saved.extra == {"note": 1}
    check_backbone(saved, tmp_path, "1" * 64, "b")
    with pytest.raises(CheckpointError, match="hash 2222"):
        check_backbone(saved, tmp_path, "2" * 64, "c")
    (tmp_path / "gates.safetensors").write_bytes(b"junk")
    with pytest.raises(CheckpointError, match="damaged"):
        load_gates(tmp_path)
    (tmp_path / "gates.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no gates\.safetensors"):
        load_gates(tmp_path)
