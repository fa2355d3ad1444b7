"""Accuracy, compute and time of policies on held-out pairs, in one table and one file.

    pairs -> inputs -> pass 1: full, grpo (shared vision features)
                       pass 2: random, at the executed FLOPs that pass 1 found for grpo, and uniform_topk, with
                               the k whose FLOPs come nearest to them
                    -> ranks in galleries, FLOPs as shares of full compute, bootstrap intervals
    a few pairs     -> clock: all policies in turn on the same batches
                    -> table, evaluation.json, evaluation.png

Every figure covers both sides of the pairs: queries are ranked against targets, and compute and time are
those of embedding all queries and all targets.

Shape legend: P pairs, d embedding size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group

from rlcompute import evaluation_report
from rlcompute.backbones import load_backbone
from rlcompute.backbones.base import Backbone
from rlcompute.config import Config
from rlcompute.data.schema import MODALITIES, Pair, read_pairs
from rlcompute.decision import Full
from rlcompute.errors import ConfigError, DataError
from rlcompute.evaluation_report import Outcome
from rlcompute.metrics import gallery_ranks, pairs_used
from rlcompute.passes import (
    Contender,
    InputBatches,
    InputFacts,
    Item,
    Measured,
    clock,
    measure,
    random_like,
    uniform_like,
)
from rlcompute.plots import accuracy_against_compute, write_png
from rlcompute.policies.checkpoint import SavedGates, check_backbone, load_gates
from rlcompute.policies.gates import GreedyGates

logger = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"
PICTURE_FILE = "evaluation.png"
RANDOM_TOLERANCE = 0.01
"""How far the random control's executed FLOPs may be from grpo's, as a share of them."""
_MOST_WIDTH = 200
"""Columns of the printed tables; a narrower terminal wraps their lines, which a cut-off figure would not survive."""


def run(config: Config, gates: Path | None, out: Path) -> dict[str, Any]:
    """Evaluates the configured policies on ``data.test``; prints two tables and writes the files into
    ``out``.

    Full compute is always measured, as the reference, whether or not it is among ``evaluation.policies``.

    Args:
        config: the run's configuration.
        gates: folder of gates for the policy ``grpo``; None if that policy is not asked for.
        out: folder for ``evaluation.json`` and ``evaluation.png``; made if it is missing.

    Returns:
        What ``evaluation.json`` holds.

    Raises:
        ConfigError: ``grpo`` without gates, or ``random`` without ``grpo``.
        CheckpointError: backbone or gates cannot be loaded, or do not belong together.
        DataError: the file cannot be used, or has no pairs.
    """
    settings = config.evaluation
    saved = _load_gates(config, gates)
    pairs = _sample(config)
    backbone = load_backbone(
        config.backbone.path,
        dtype=config.backbone.dtype,
        device=config.backbone.device,
        max_tokens=config.data.max_tokens,
        kernels=config.kernels.forced,
    )
    if saved is not None and gates is not None:
        check_backbone(saved, gates, backbone.hash, backbone.path)
    contenders, facts, measured = _measure_all(config, backbone, pairs, saved)
    outcome = Outcome(
        gates=None if saved is None else str(gates),
        suite=_suite_name(config, pairs),
        backbone=f"{config.backbone.path} ({backbone.family}, {backbone.hash[:16]})",
        pairs=pairs,
        facts=facts,
        measured=measured,
        ranks={name: _ranks(result, pairs, settings.gallery) for name, result in measured.items()},
        parameters={contender.name: contender.parameters for contender in contenders},
        rates=clock(backbone, _timing_items(config, pairs), contenders, settings.batch_size),
        bootstrap_samples=settings.bootstrap_samples,
        seed=config.run.seed,
    )
    policies = list(settings.policies)
    content = evaluation_report.report(outcome, policies)
    picture = accuracy_against_compute(evaluation_report.accuracy_points(outcome, policies), outcome.suite)
    out.mkdir(parents=True, exist_ok=True)
    write_png(out / PICTURE_FILE, picture)
    evaluation_report.write_json(out / RESULT_FILE, content)
    _print(evaluation_report.tables(content))
    return content


def _print(tables: Group) -> None:
    """Prints tables as wide as they need, whatever the width of the terminal or log."""
    console = Console()
    wanted = console.measure(tables, options=console.options.update(max_width=_MOST_WIDTH))
    console.width = max(console.width, wanted.maximum)
    console.print(tables)


def _load_gates(config: Config, gates: Path | None) -> SavedGates | None:
    policies = config.evaluation.policies
    if "random" in policies and "grpo" not in policies:
        raise ConfigError(
            "evaluation.policies has random without grpo, whose executed FLOPs random is to spend: add grpo"
        )
    if "grpo" not in policies:
        return None
    if gates is None:
        raise ConfigError(
            "evaluation.policies has grpo, which needs gates: train first, or pass --gates FOLDER"
        )
    return load_gates(gates)


def _sample(config: Config) -> dict[str, list[Pair]]:
    """By modality, the first ``pairs_per_modality`` pairs in the file, as far as they fill galleries."""
    settings, path = config.evaluation, config.data.test
    found = read_pairs(path, on_bad_row=config.data.on_bad_row)
    if found.skipped:
        logger.warning("%s: %d rows left out, the first: %s", path, len(found.skipped), found.skipped[0])
    groups: dict[str, list[Pair]] = {}
    for modality in MODALITIES:
        group = [pair for pair in found.pairs if pair.modality == modality][: settings.pairs_per_modality]
        used = pairs_used(len(group), settings.gallery)
        if 0 < used < settings.pairs_per_modality:
            logger.warning(
                "%s has %d %s pairs, not %d: evaluating on %d, in galleries of %d",
                *(path, len(group), modality, settings.pairs_per_modality),
                *(used, min(used, settings.gallery)),
            )
        if used:
            groups[modality] = group[:used]
    if not groups:
        raise DataError(f"{path}: no usable pairs to evaluate on")
    return groups


def _items(pairs: Sequence[Pair]) -> list[Item]:
    """All queries, then all targets."""
    queries = [Item(f"{pair.id} query", pair.query) for pair in pairs]
    return queries + [Item(f"{pair.id} target", pair.target) for pair in pairs]


def _timing_items(config: Config, pairs: dict[str, list[Pair]]) -> list[Item]:
    """Both sides of ``timing_pairs`` pairs, the same number of each modality."""
    share = max(1, config.evaluation.timing_pairs // len(pairs))
    return _items([pair for group in pairs.values() for pair in group[:share]])


def _measure_all(
    config: Config, backbone: Backbone, pairs: dict[str, list[Pair]], saved: SavedGates | None
) -> tuple[list[Contender], InputFacts, dict[str, Measured]]:
    """Both passes of the module's plan."""
    settings = config.evaluation
    contenders = [Contender("full", lambda names: Full())]
    if saved is not None:
        greedy = GreedyGates(saved.heads.to(device=backbone.device))
        contenders.append(Contender("grpo", lambda names: greedy))
    items = _items([pair for group in pairs.values() for pair in group])
    batches = InputBatches(backbone, items, settings.batch_size)
    facts, measured = measure(backbone, batches, contenders, "evaluating")
    controls = []
    if saved is not None and "random" in settings.policies:
        controls.append(
            random_like(backbone, facts, measured["grpo"], saved.heads.droppable, config.run.seed)
        )
    if "uniform_topk" in settings.policies:
        controls.append(uniform_like(backbone, facts, measured.get("grpo")))
    if controls:
        measured |= measure(backbone, batches, controls, "evaluating controls")[1]
    if "random" in measured:
        ratio = float(measured["random"].executed_S.sum() / measured["grpo"].executed_S.sum())
        if abs(ratio - 1.0) > RANDOM_TOLERANCE:
            logger.warning("random executes %.1f %% of grpo's FLOPs: the sample is too small", 100.0 * ratio)
    contenders += controls
    return contenders, facts, measured


def _ranks(result: Measured, pairs: dict[str, list[Pair]], gallery: int) -> dict[str, npt.NDArray[np.int64]]:
    """Rank of each query's target, by modality."""
    query_Pd, target_Pd = np.split(result.embeddings_Sd, 2)
    ranks, start = {}, 0
    for modality, group in pairs.items():
        rows = slice(start, start + len(group))
        target_ids = [pair.target_id for pair in group]
        ranks[modality] = gallery_ranks(query_Pd[rows], target_Pd[rows], target_ids, gallery)
        start += len(group)
    return ranks


def _suite_name(config: Config, pairs: dict[str, list[Pair]]) -> str:
    counts = ", ".join(f"{len(group)} {name}" for name, group in pairs.items())
    return f"{Path(config.data.test).name}: {counts} pairs in galleries of {config.evaluation.gallery}"
