"""Accuracy, compute and time of policies on held-out pairs, in one table and one file.

    pairs -> inputs -> pass 1: full, gates (shared vision features)
                       pass 2: random, at the executed FLOPs that pass 1 found for gates, and uniform_topk,
                               with the k whose FLOPs come nearest to them
                    -> ranks in galleries, FLOPs as shares of full compute, bootstrap intervals
    a few pairs     -> clock: all policies in turn on the same batches
                    -> table, evaluation.json, evaluation.png

Every figure covers both sides of the pairs: queries are ranked against targets, and compute and time are
those of embedding all queries and all targets.

Gates that were trained with an adapter run on the backbone with that adapter, and so does their random control, which
differs from them in its decisions alone. Full compute, the reference, and uniform_topk, which needs no training, stay
on the backbone as it is.

Shape legend: P pairs, d embedding size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlcompute import evaluation_report
from rlcompute.backbones import load_configured
from rlcompute.backbones.base import Backbone
from rlcompute.backbones.lora import adapter_folder
from rlcompute.config import Config
from rlcompute.data.schema import Pair
from rlcompute.decision import Full
from rlcompute.errors import ConfigError
from rlcompute.evaluation_report import Outcome
from rlcompute.held_out import items_of, ranks_by_modality, read_sample, suite_name, timing_items
from rlcompute.passes import (
    Contender,
    InputBatches,
    InputFacts,
    Measured,
    clock,
    measure,
    random_like,
    uniform_like,
)
from rlcompute.plots import accuracy_against_compute, write_png
from rlcompute.policies.checkpoint import SavedGates, check_backbone, load_gates

logger = logging.getLogger(__name__)

RESULT_FILE = "evaluation.json"
PICTURE_FILE = "evaluation.png"
ADAPTED = ("gates", "random")
"""Policies that run on the adapted backbone if the gates were trained with an adapter."""
RANDOM_TOLERANCE = 0.01
"""How far the random control's executed FLOPs may be from the gates', as a share of them."""


def run(config: Config, gates: Path | None, out: Path) -> dict[str, Any]:
    """Evaluates the configured policies on ``data.test``; prints two tables and writes the files into
    ``out``.

    Full compute is always measured, as the reference, whether or not it is among ``evaluation.policies``.

    Args:
        config: the run's configuration.
        gates: folder of gates for the policy ``gates``; None if that policy is not asked for.
        out: folder for ``evaluation.json`` and ``evaluation.png``; made if it is missing.

    Returns:
        What ``evaluation.json`` holds.

    Raises:
        ConfigError: the policy ``gates`` without a folder of gates, or ``random`` without ``gates``; or gates with an
            adapter, and peft is not installed.
        CheckpointError: backbone or gates cannot be loaded, or do not belong together.
        DataError: the file cannot be used, or has no pairs.
    """
    settings = config.evaluation
    saved = _load_gates(config, gates)
    pairs = read_sample(config)
    backbone = load_configured(config)
    if saved is not None and gates is not None:
        check_backbone(saved, gates, backbone.hash, backbone.path)
    adapter = None if saved is None or gates is None else adapter_folder(gates)
    others = {} if adapter is None else dict.fromkeys(ADAPTED, load_configured(config, adapter=adapter))
    contenders, facts, measured = _measure_all(config, backbone, others, pairs, saved)
    outcome = Outcome(
        gates=None if saved is None else str(gates),
        suite=suite_name(config, {name: len(group) for name, group in pairs.items()}),
        backbone=f"{config.backbone.path} ({backbone.family}, {backbone.hash[:16]})",
        pairs=pairs,
        facts=facts,
        measured=measured,
        ranks={
            name: ranks_by_modality(result.embeddings_Sd, pairs, settings.gallery)
            for name, result in measured.items()
        },
        parameters={contender.name: contender.parameters for contender in contenders},
        rates=clock(backbone, timing_items(config, pairs), contenders, settings.batch_size, others),
        bootstrap_samples=settings.bootstrap_samples,
        seed=config.run.seed,
    )
    policies = list(settings.policies)
    content = evaluation_report.report(outcome, policies)
    picture = accuracy_against_compute(evaluation_report.accuracy_points(outcome, policies), outcome.suite)
    out.mkdir(parents=True, exist_ok=True)
    write_png(out / PICTURE_FILE, picture)
    evaluation_report.write_json(out / RESULT_FILE, content)
    evaluation_report.print_wide(evaluation_report.tables(content))
    return content


def _load_gates(config: Config, gates: Path | None) -> SavedGates | None:
    policies = config.evaluation.policies
    if "random" in policies and "gates" not in policies:
        raise ConfigError(
            "evaluation.policies has random without gates, whose executed FLOPs random is to spend: add gates"
        )
    if "gates" not in policies:
        return None
    if gates is None:
        raise ConfigError(
            "evaluation.policies has gates, but there are none: train first, or pass --gates FOLDER"
        )
    return load_gates(gates)


def _measure_all(
    config: Config,
    backbone: Backbone,
    others: Mapping[str, Backbone],
    pairs: dict[str, list[Pair]],
    saved: SavedGates | None,
) -> tuple[list[Contender], InputFacts, dict[str, Measured]]:
    """Both passes of the module's plan; ``others`` are the backbones of policies that do not run on ``backbone``."""
    settings = config.evaluation
    contenders = [Contender("full", lambda names: Full())]
    if saved is not None:
        policy = saved.gates.to(device=backbone.device).policy()
        contenders.append(Contender("gates", lambda names: policy))
    items = items_of([pair for group in pairs.values() for pair in group])
    batches = {x: InputBatches(x, items, settings.batch_size) for x in {backbone, *others.values()}}

    def placed(policies: Sequence[Contender]) -> list[tuple[Backbone, Contender]]:
        return [(others.get(policy.name, backbone), policy) for policy in policies]

    facts, measured = _measure(batches, placed(contenders), "evaluating")
    controls = []
    if saved is not None and "random" in settings.policies:
        controls.append(
            random_like(backbone, facts, measured["gates"], saved.gates.droppable, config.run.seed)
        )
    if "uniform_topk" in settings.policies:
        controls.append(uniform_like(backbone, facts, measured.get("gates")))
    if controls:
        measured |= _measure(batches, placed(controls), "evaluating controls")[1]
    if "random" in measured:
        ratio = float(measured["random"].executed_S.sum() / measured["gates"].executed_S.sum())
        if abs(ratio - 1.0) > RANDOM_TOLERANCE:
            logger.warning(
                "random executes %.1f %% of the gates' FLOPs: the sample is too small", 100.0 * ratio
            )
    contenders += controls
    return contenders, facts, measured


def _measure(
    batches: Mapping[Backbone, InputBatches],
    runs: Sequence[tuple[Backbone, Contender]],
    label: str,
) -> tuple[InputFacts, dict[str, Measured]]:
    """Policies on their backbones; those that share one share its embedded inputs."""
    measured: dict[str, Measured] = {}
    for backbone in dict.fromkeys(backbone for backbone, _ in runs):
        chosen = [contender for own, contender in runs if own is backbone]
        facts, found = measure(backbone, batches[backbone], chosen, label)
        measured |= found
    return facts, measured
