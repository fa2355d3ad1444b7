"""`rlcompute prune-experts`: from a checkpoint to a smaller one that keeps the experts a sample needs most.

Shape legend: N layers, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from rlcompute.backbones import load_configured
from rlcompute.config import Config
from rlcompute.policies.expert_pruning import (
    check_experts,
    check_folder,
    check_saliency,
    kept_experts,
    save_pruned,
)
from rlcompute.policies.expert_statistics import ExpertStatistics
from rlcompute.policy_calibration import PolicyCalibrator

MIB = 2**20


def prune(config: Config, saliency: str, experts: int, out: Path) -> list[tuple[str, str]]:
    """Write the checkpoint of the configured backbone with ``experts`` routed experts a layer.

    Args:
        config: names the backbone, the training pairs and the calibration sample of them.
        saliency: one of :data:`rlcompute.policies.expert_pruning.SALIENCIES`.
        experts: E', at least as many as a token runs.
        out: folder of the new checkpoint, missing or empty.

    Returns:
        What to print: sizes before and after, and how often the sample visited each layer's experts.

    Raises:
        CheckpointError: the backbone cannot be used, or a stored calibration of it is damaged.
        ConfigError: no such saliency, a number of experts that does not fit, or ``out`` holds something.
        DataError: the training pairs cannot be used.
        StageTimeoutError, WorkerError: workers of the calibration were silent for too long, or one failed.
    """
    check_folder(out)
    check_saliency(saliency)
    backbone = load_configured(config)
    check_experts(experts, top_k=backbone.top_k, num_experts=backbone.num_experts)
    calibrator = PolicyCalibrator(config, backbone)
    calibration = calibrator.calibration
    statistics = calibration.statistics
    kept_NE = kept_experts(statistics, saliency, experts, top_k=backbone.top_k)
    record = {"saliency": saliency, "calibration": calibration.sample}
    before, after = save_pruned(backbone, kept_NE, out, record)
    return [
        ("checkpoint", f"{out}: {experts} of {backbone.num_experts} routed experts a layer, by {saliency}"),
        ("weights", _change(before.all, after.all)),
        ("routed experts and routers", _change(before.experts, after.experts)),
        ("calibration", str(calibrator.folder)),
        *sample_rows(statistics, kept_NE),
    ]


def sample_rows(statistics: ExpertStatistics, kept_NE: Tensor) -> Iterator[tuple[str, str]]:
    """What the sample can tell of the experts: its tokens, and visits by layer over all modalities.

    An expert that was hardly visited was judged on hardly anything, so the least and the median number of visits are
    told, and how many experts had none, among all and among the kept.

    Args:
        statistics: of the sample.
        kept_NE: int64, experts that stay in each layer.
    """
    tokens = zip(statistics.modalities, statistics.tokens_GN[:, 0].tolist(), strict=True)
    yield "sample", ", ".join(f"{count:,} tokens of {name} pairs" for name, count in tokens)
    visits_NE = statistics.visits_GNE.sum(dim=0)
    tokens_N = statistics.tokens_GN.sum(dim=0).tolist()
    last = len(visits_NE) - 1
    for layer, (visits_E, kept_E) in enumerate(zip(visits_NE, kept_NE, strict=True)):
        rows = "<emb> tokens only" if layer == last else "tokens"
        never, kept_never = (int((visits == 0).sum()) for visits in (visits_E, visits_E[kept_E]))
        yield (
            f"layer {layer}",
            f"{tokens_N[layer]:,} {rows}; visits of an expert: least {int(visits_E.min()):,}, "
            f"median {float(visits_E.double().quantile(0.5)):,g}; never visited: {never} of {len(visits_E)}, "
            f"of them kept: {kept_never}",
        )


def _change(before: int, after: int) -> str:
    return (
        f"{before:,} bytes ({before / MIB:,.1f} MiB) before, {after:,} bytes ({after / MIB:,.1f} MiB) after, "
        f"{after / before:.1%} of it"
    )
