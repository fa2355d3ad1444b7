from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rlcompute.actors.engine import InputCache, RolloutEngine
from rlcompute.actors.messages import GradientRequest, MicroBatch
from rlcompute.actors.scoring import Scorer
from rlcompute.backbones.base import Backbone
from rlcompute.decision import DROP, ROUTE, SKIP, Full
from rlcompute.encoder import encode
from rlcompute.envs.reward import TeacherBank
from rlcompute.errors import ConfigError
from rlcompute.flops import FlopModel
from rlcompute.pack import EmbeddedInput
from rlcompute.policies.gates import GateHeads, init_heads
from tests.actors.tiny_run import make_config, make_pairs
from tests.test_charge import write_table

PAIRS = make_pairs(3)
BATCH = MicroBatch(iteration=2, index=1, pairs=tuple(PAIRS[:2]))


def heads(skip: float = 0.3, drop: float = 0.2) -> GateHeads:
    return init_heads(
        torch.zeros(4, 32), torch.ones(4), skip=skip, drop=drop, late_skip_bias=0.0, droppable="all"
    )


def test_samples_are_the_same_whatever_ran_before(backbone: Backbone, inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path, "x")
    fresh, used = RolloutEngine(backbone, config), RolloutEngine(backbone, config, cache_bytes=1)
    used.full_embeddings(PAIRS)
    used.sample(MicroBatch(1, 0, tuple(PAIRS[1:4])), heads())
    first, second = fresh.sample(BATCH, heads()), used.sample(BATCH, heads())
    for name in vars(replace(first, seconds=0.0)):
        if name != "seconds":
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    request = GradientRequest(2, 1, np.random.default_rng(0).normal(size=(2, 2, 3)), ship_decisions=False)
    np.testing.assert_array_equal(fresh.gradient(request), used.gradient(request))


def test_near_full_compute_the_rollouts_are_the_teacher(engine: RolloutEngine) -> None:
    result = engine.sample(BATCH, heads(skip=1e-12, drop=1e-12))
    teacher = engine.full_embeddings(BATCH.pairs)
    assert result.embeddings_2BGd.shape == (2, 2, 3, 32)
    np.testing.assert_allclose(result.embeddings_2BGd, np.repeat(teacher[:, :, None], 3, axis=2), atol=2e-6)
    assert (result.actions_NM3[:, :, (SKIP, DROP)] == 0).all()
    # Only the gates' own cost is left above full compute.
    assert (result.executed_2BG > result.full_2B[..., None]).all()


def test_segments_are_ordered_by_side_pair_and_rollout(backbone: Backbone, engine: RolloutEngine) -> None:
    result = engine.sample(BATCH, heads())
    lengths = [
        len(backbone.preprocessor(side).input_ids)
        for name in ("query", "target")
        for side in (getattr(pair, name) for pair in BATCH.pairs)
    ]
    expected = FlopModel(backbone).full(torch.tensor(lengths)).view(2, 2)
    np.testing.assert_array_equal(result.full_2B, expected)
    assert result.entered_N[0] == 3 * sum(lengths)
    assert (result.vision_2B[0] == 0).all()
    assert (result.vision_2B[1] > 0).all()


def test_gradient_of_a_micro_batch_that_was_not_sampled_here_is_missing(engine: RolloutEngine) -> None:
    advantages = np.ones((2, 2, 3))
    engine.sample(BATCH, heads())
    assert engine.gradient(GradientRequest(2, 1, advantages, ship_decisions=False)) is not None
    assert engine.gradient(GradientRequest(2, 0, advantages, ship_decisions=False)) is None
    engine.sample(MicroBatch(3, 0, BATCH.pairs), heads())
    assert engine.gradient(GradientRequest(2, 1, advantages, ship_decisions=False)) is None


def test_equal_advantages_of_zero_give_exactly_no_gradient(engine: RolloutEngine) -> None:
    engine.sample(BATCH, heads())
    gradient = engine.gradient(GradientRequest(2, 1, np.zeros((2, 2, 3)), ship_decisions=False))
    assert isinstance(gradient, np.ndarray)
    assert (gradient == 0).all()


def test_overlay_tells_which_layer_dropped_each_token(engine: RolloutEngine, backbone: Backbone) -> None:
    side = PAIRS[1].target
    kept = engine.overlay(side, heads())
    assert (kept.dropped_at_L == -1).all()
    weight = heads().weight_N3F.clone()
    weight[2, DROP, -1] = 9.0
    weight[2, ROUTE, -1] = 0.0
    dropped = engine.overlay(side, replace(heads(), weight_N3F=weight))
    assert (dropped.dropped_at_L[:-1] == 2).all()
    assert dropped.dropped_at_L[-1] == -1
    assert dropped.saved > kept.saved
    assert dropped.grid_thw.tolist() == backbone.preprocessor(side).grid_thw.tolist()


def test_calibration_centres_the_inputs(engine: RolloutEngine, backbone: Backbone) -> None:
    normaliser = engine.calibrate(PAIRS)
    seen: list[torch.Tensor] = []

    class Spy(Full):
        def decide(self, layer: int, x_Td: torch.Tensor, routing: object, pack: object) -> object:  # type: ignore[override]
            if layer == 1:
                seen.append(x_Td)
            return super().decide(layer, x_Td, routing, pack)  # type: ignore[arg-type]

    inputs = [backbone.preprocessor(side) for pair in PAIRS for side in (pair.query, pair.target)]
    encode(backbone, *backbone.pack(backbone.embed_inputs(inputs)), Spy())
    np.testing.assert_allclose(normaliser.mean[1], torch.cat(seen).mean(0), atol=1e-5)


def embedded(length: int) -> EmbeddedInput:
    return EmbeddedInput(
        torch.zeros(length, 4),
        torch.zeros(3, length, dtype=torch.long),
        torch.zeros(length, dtype=torch.int8),
        0.0,
    )


def test_cache_drops_the_least_recently_used_within_its_bound() -> None:
    size = embedded(10).nbytes
    cache = InputCache[EmbeddedInput](3 * size)
    for name in "abc":
        cache.put((name, "query"), embedded(10))
    assert cache.get(("a", "query")) is not None
    cache.put(("d", "query"), embedded(10))
    assert cache.get(("b", "query")) is None
    assert all(cache.get((name, "query")) is not None for name in "acd")
    assert cache.nbytes == 3 * size
    cache.put(("large", "query"), embedded(1000))
    assert cache.get(("large", "query")) is not None
    assert cache.nbytes == embedded(1000).nbytes


@pytest.mark.parametrize("side", ["query", "target"])
def test_bad_content_is_named_by_row(engine: RolloutEngine, side: str) -> None:
    broken = replace(getattr(PAIRS[0], side), images=(b"not an image",))
    with pytest.raises(Exception, match=f"{side} of row 'v00'"):
        engine.full_embeddings([replace(PAIRS[0], **{side: broken})])


def test_flops_are_charged_unless_asked_otherwise(engine: RolloutEngine) -> None:
    result = engine.sample(BATCH, heads())
    np.testing.assert_array_equal(result.charged_2BG, result.executed_2BG)
    np.testing.assert_array_equal(result.charged_full_2B, result.full_2B)


def test_tiles_are_those_of_the_micro_batch(backbone: Backbone, inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path, "x", compute={"cost": "tiles", "tile_rows": 16})
    engine = RolloutEngine(backbone, config)
    # Near full compute a rollout is charged what full compute of the same micro-batch is, and its gates.
    result = engine.sample(BATCH, heads(skip=1e-12, drop=1e-12))
    gates = result.executed_2BG - result.full_2B[..., None]
    np.testing.assert_allclose(result.charged_2BG - gates, result.charged_full_2B[..., None].repeat(3, 2))
    sides = [getattr(pair, side) for side in ("query", "target") for pair in BATCH.pairs for _ in range(3)]
    embedded = [backbone.embed_inputs([backbone.preprocessor(side)])[0] for side in sides]
    trace = encode(backbone, *backbone.pack(embedded), Full()).trace
    hardware = FlopModel(backbone).hardware(trace, 0.0, 16)
    assert 3 * result.charged_full_2B.sum() == pytest.approx(hardware)
    assert (result.charged_full_2B > result.full_2B).all()


def test_tiles_do_not_depend_on_what_a_worker_ran_before(
    backbone: Backbone, inputs: Path, tmp_path: Path
) -> None:
    config = make_config(inputs, tmp_path, "x", compute={"cost": "tiles", "tile_rows": 16})
    fresh, used = RolloutEngine(backbone, config), RolloutEngine(backbone, config, cache_bytes=1)
    used.sample(MicroBatch(1, 0, tuple(PAIRS[1:4])), heads())
    used.sample(MicroBatch(1, 2, tuple(PAIRS[4:])), heads())
    first, second = fresh.sample(BATCH, heads()), used.sample(BATCH, heads())
    np.testing.assert_array_equal(first.charged_2BG, second.charged_2BG)
    np.testing.assert_array_equal(first.charged_full_2B, second.charged_full_2B)
    assert (first.charged_2BG > first.executed_2BG).all()


def test_another_machines_seconds_are_refused(backbone: Backbone, inputs: Path, tmp_path: Path) -> None:
    path = str(write_table(backbone, tmp_path / "table.json", device_name="another"))
    config = make_config(inputs, tmp_path, "x", compute={"cost": "measured", "cost_table": path})
    with pytest.raises(ConfigError, match="was measured for device_name another"):
        RolloutEngine(backbone, config)


@pytest.mark.parametrize("cost", ["flops", "measured"])
def test_the_reward_and_the_controller_see_what_is_charged(
    backbone: Backbone, inputs: Path, tmp_path: Path, cost: str
) -> None:
    path = str(write_table(backbone, tmp_path / "table.json", gate_token=0.0, segment=0.0))
    config = make_config(
        inputs, tmp_path, "x", compute={"cost": cost, "cost_table": path}, controller={"start_lambda": 5.0}
    )
    engine = RolloutEngine(backbone, config)
    pairs = [PAIRS[0], PAIRS[1]]
    teacher = torch.from_numpy(engine.full_embeddings(pairs))
    tasks = [pair.task for pair in pairs]
    bank = TeacherBank(teacher[0], teacher[1], tasks, [pair.target_id for pair in pairs])
    scorer = Scorer(config, bank, [pair.id for pair in pairs])
    part = engine.sample(MicroBatch(0, 0, tuple(pairs)), heads())
    scored = scorer.score(pairs, [part])
    charged = 1 - part.charged_2BG.sum() / (3 * part.charged_full_2B.sum())
    assert scored.saved == pytest.approx(charged)
    assert scored.metrics["compute/lm_saved"] == pytest.approx(
        1 - part.executed_2BG.sum() / (3 * part.full_2B.sum())
    )
    assert scorer.finish(scored)["controller/saved_average"] == pytest.approx(charged)
    if cost == "flops":
        assert "compute/charged_saved" not in scored.metrics
        return
    assert scored.metrics["compute/charged_saved"] == pytest.approx(charged)
    # This table charges routed rows alone, so the saving is the share of rows that did not run.
    assert abs(charged - scored.metrics["compute/lm_saved"]) > 0.05
    free = replace(part, charged_2BG=np.zeros_like(part.charged_2BG))
    assert (
        Scorer(config, bank, [pair.id for pair in pairs]).score(pairs, [free]).metrics["reward/mean"]
        > (scored.metrics["reward/mean"])
    )
