"""`rlcompute export`: from a training checkpoint to a folder of gates that loads by itself.

The folder holds `gates.safetensors`, `gate_config.json`, which names the backbone and its hash, and `README.md`, a
model card with the figures that `evaluate` measured for these very gates, if it has.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from rlcompute.backbones import resolve_path
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.backbones.lora import FOLDER, adapter_folder
from rlcompute.charge import describe_cost
from rlcompute.config import Config
from rlcompute.errors import CheckpointError, ConfigError
from rlcompute.policies.checkpoint import TENSORS, SavedGates, check_backbone, load_gates, save_gates
from rlcompute.policies.gates import GateHeads
from rlcompute.runlog import RunFolder

CARD = "README.md"
ADAPTER_LINE = (
    f"- Low-rank adapter of the backbone: `{FOLDER}/`, merged into its weights when the gates are loaded "
    "(`pip install 'rlcompute[lora]'`)."
)


def latest_checkpoint(run_folder: Path, *, logged: int | None = None) -> Path:
    """The newest complete checkpoint of a run.

    Args:
        run_folder: of the run.
        logged: number of iterations in its `metrics.jsonl`: checkpoints of later ones do not count. None counts all.

    Raises:
        CheckpointError: There is none.
    """
    complete = sorted(path.parent for path in RunFolder(run_folder).checkpoints.glob("step_*/COMPLETE"))
    if logged is not None:
        # Without any, the newest: whoever continues it says what is missing.
        complete = [path for path in complete if int(path.name.removeprefix("step_")) <= logged] or complete
    if not complete:
        raise CheckpointError(f"no complete checkpoint in {RunFolder(run_folder).checkpoints}: train first")
    return complete[-1]


def checkpoint_at(run_folder: Path, step: int) -> Path:
    """The checkpoint written after iteration `step`.

    Raises:
        CheckpointError: It does not exist or was not written completely; the message lists those that were.
    """
    checkpoints = RunFolder(run_folder).checkpoints
    path = checkpoints / f"step_{step:06d}"
    if not (path / "COMPLETE").is_file():
        steps = [
            int(done.parent.name.removeprefix("step_"))
            for done in sorted(checkpoints.glob("step_*/COMPLETE"))
        ]
        raise CheckpointError(f"no complete checkpoint {path}; complete ones are at {steps or 'no step'}")
    return path


def export_gates(config: Config, *, step: int | None = None, out: Path | None = None) -> Path:
    """Exports one checkpoint of a run.

    Args:
        config: Configuration of the run.
        step: Checkpoint to take; the newest by default.
        out: Folder to write, replaced if it holds an export already; `export/` in the run folder by default.

    Returns:
        The folder written.

    Raises:
        CheckpointError: The checkpoint is missing or damaged, or was trained on another backbone than the configured.
        ConfigError: `out` exists and is something else than an export.
    """
    run_folder = config.run.folder
    checkpoint = latest_checkpoint(run_folder) if step is None else checkpoint_at(run_folder, step)
    saved = load_gates(checkpoint)
    backbone = resolve_path(config.backbone.path)
    if backbone.is_dir():  # it may be left on the cluster that trained the gates
        check_backbone(saved, checkpoint, checkpoint_hash(backbone), backbone)
    out = RunFolder(run_folder).export if out is None else out
    if out.exists() and any(out.iterdir()) and not (out / "gate_config.json").is_file():
        raise ConfigError(f"--out {out} exists and is not an export: choose another folder")
    temporary = out.with_name(out.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_gates(temporary, saved.gates, saved.backbone, saved.extra)
    adapter = adapter_folder(checkpoint)
    if adapter is not None:
        shutil.copytree(adapter, temporary / adapter.name)
    card = model_card(config, saved, checkpoint, _measured(run_folder, checkpoint))
    (temporary / CARD).write_text(card, encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    temporary.rename(out)
    return out


def _measured(run_folder: Path, checkpoint: Path) -> dict[str, Any] | None:
    """The run's evaluation if it measured the gates of `checkpoint`."""
    path = RunFolder(run_folder).evaluation / "evaluation.json"
    if not path.is_file():
        return None
    evaluation: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if evaluation["gates"] is None:
        return None
    measured, exported = Path(evaluation["gates"]) / TENSORS, checkpoint / TENSORS
    same = measured.is_file() and measured.read_bytes() == exported.read_bytes()
    return evaluation if same else None


def model_card(config: Config, saved: SavedGates, checkpoint: Path, evaluation: dict[str, Any] | None) -> str:
    """The README of an export in Markdown; `evaluation` is the content of `evaluation.json` or None."""
    lines = [
        f"# Gates of run {config.run.name}",
        "",
        f"Gates for a frozen mixture-of-experts embedder, trained with rlcompute ({saved.method}).",
        "",
        f"- Backbone: `{saved.backbone['path']}` ({saved.backbone['family']}), hash `{saved.backbone['hash']}`.",
        "  Another backbone is refused.",
        *(f"- {line}" for line in saved.gates.summary()),
        *([] if adapter_folder(checkpoint) is None else [ADAPTER_LINE]),
        f"- Checkpoint: `{checkpoint.name}`; {_aim(config, saved)}, seed {config.run.seed}.",
        "",
        "```python",
        "from rlcompute.embedder import AdaptiveEmbedder",
        "",
        'embedder = AdaptiveEmbedder.from_pretrained("path/to/this/folder")',
        'embeddings = embedder.encode(texts=["a red bicycle"])  # float32 [N, d], unit norm',
        "```",
        "",
        "## Measured",
        "",
    ]
    if evaluation is None:
        lines.append("Not measured: run `rlcompute evaluate` on this checkpoint, then export again.")
    else:
        lines += _measured_lines(evaluation)
    return "\n".join(lines) + "\n"


def _aim(config: Config, saved: SavedGates) -> str:
    """What the gates were trained to save, in words."""
    if isinstance(saved.gates, GateHeads):
        return (
            f"target saving {config.reward.target_flops_saved:.0%} of the language model's "
            f"{describe_cost(config.compute)}, recall floor {config.reward.recall_floor:.0%} of the teacher's"
        )
    ste = config.ste
    if ste.combination == "shared":
        return f"target saving {ste.flops_saved:.0%} of the language model's FLOPs for all gates together"
    targets = {
        "token_pruner": f"{ste.prune_keep:.0%} of the visual tokens kept",
        "expert_skip": None
        if ste.skip_target is None or len(ste.actions) == 1
        else f"experts skipped for {ste.skip_target:.0%} of tokens",
        "layer_skip": f"{ste.layer_target:.0%} of the layers from {ste.layer_first} on skipped",
    }
    told = [text for action in ste.actions if (text := targets.get(action)) is not None]
    return "targets: " + ", ".join(told) if told else "no target rate"


def _measured_lines(evaluation: dict[str, Any]) -> list[str]:
    names = list(dict.fromkeys(name for row in evaluation["policies"] for name in row["modalities"]))
    lines = [
        f"Held-out pairs of {evaluation['suite']}; greedy execution. Accuracy in points of 100; savings as shares of",
        "the full forward, vision tower included (LM: of the language model alone); speed-up against full compute,",
        "measured interleaved in the same run.",
        "",
        "| policy | mean R@1 | against full (95 % interval) | "
        + " | ".join(f"{name} R@1" for name in names)
        + " | FLOPs saved | LM FLOPs saved | speed-up |",
        "|---" * (6 + len(names)) + "|",
    ]
    return lines + [_measured_row(row, names) for row in evaluation["policies"]]


def _measured_row(row: dict[str, Any], modalities: list[str]) -> str:
    low, high = row["delta_vs_full"]["ci95"]
    cells = [
        row["name"],
        f"{row['mean_recall_at_1']:.1f}",
        f"{row['delta_vs_full']['mean']:+.2f} ({low:+.2f} … {high:+.2f})",
        *(f"{row['modalities'][name]['recall_at_1']:.1f}" for name in modalities),
        f"{row['flops']['executed_saved']:.1%}",
        f"{row['flops']['lm_executed_saved']:.1%}",
        f"{row['speedup']:.2f}x",
    ]
    return f"| {' | '.join(cells)} |"
