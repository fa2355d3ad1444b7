from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlcompute.actors.dispatch import Done
from rlcompute.actors.engine import RolloutEngine
from rlcompute.actors.teacher import CHUNK_PAIRS, cache_path, teacher_bank
from rlcompute.config import Config
from rlcompute.envs.reward import TeacherBank
from tests.actors.tiny_run import make_config, make_pairs

PAIRS = sorted(make_pairs(10), key=lambda pair: pair.id)


class LocalPool:
    """Runs the workers' method here and counts its tasks."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine = engine
        self.tasks = 0

    def scatter(
        self,
        stage: str,
        method: str,
        tasks: dict[int, Any],
        *,
        progress: Callable[[Iterable[int]], None],
        **_: Any,
    ) -> dict[int, Done]:
        self.tasks += len(tasks)
        progress(tasks)
        return {number: Done(1, self.engine.full_embeddings(task)) for number, task in tasks.items()}


def bank_of(config: Config, pool: LocalPool) -> TeacherBank:
    return teacher_bank(config, PAIRS, "hash", pool)  # type: ignore[arg-type]


def test_bank_rows_are_the_pairs_and_the_second_run_reads_the_cache(
    engine: RolloutEngine, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(inputs, tmp_path, "x")
    pool = LocalPool(engine)
    bank = bank_of(config, pool)
    assert pool.tasks == -(-len(PAIRS) // CHUNK_PAIRS)
    assert f"full-compute embeddings {len(PAIRS)}/{len(PAIRS)}" in capsys.readouterr().err
    for row in (0, 7, len(PAIRS) - 1):
        alone = engine.full_embeddings([PAIRS[row]])
        np.testing.assert_allclose(bank.query_Md[row], alone[0, 0], atol=2e-6)
        np.testing.assert_allclose(bank.target_Md[row], alone[1, 0], atol=2e-6)
        assert (bank.tasks[row], bank.target_ids[row]) == (PAIRS[row].task, PAIRS[row].target_id)

    again = bank_of(config, pool)
    assert pool.tasks == -(-len(PAIRS) // CHUNK_PAIRS)
    assert torch.equal(again.query_Md, bank.query_Md)


def test_a_damaged_cache_is_computed_again(engine: RolloutEngine, inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path, "x")
    path = cache_path(config, PAIRS, "hash")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"half a file")
    assert bank_of(config, LocalPool(engine)).query_Md.shape == (len(PAIRS), 32)


def test_the_cache_is_named_by_all_that_it_depends_on(inputs: Path, tmp_path: Path) -> None:
    config = make_config(inputs, tmp_path, "x")
    text = replace(PAIRS[0], query=replace(PAIRS[0].query, text="other"))
    image = replace(PAIRS[0], target=replace(PAIRS[0].target, images=(b"other",)))
    variants = [
        cache_path(config, PAIRS, "hash"),
        cache_path(config, PAIRS, "other hash"),
        cache_path(config, PAIRS[1:], "hash"),
        cache_path(config, [text, *PAIRS[1:]], "hash"),
        cache_path(config, [image, *PAIRS[1:]], "hash"),
        cache_path(make_config(inputs, tmp_path, "x", data={"max_tokens": 7}), PAIRS, "hash"),
    ]
    assert len(set(variants)) == len(variants)
    assert cache_path(make_config(inputs, tmp_path, "renamed"), PAIRS, "hash") == variants[0]
