"""Gates on disk: ``gates.safetensors`` and ``gate_config.json``, nothing pickled."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rlcompute.errors import CheckpointError
from rlcompute.policies.gates import GateHeads

FORMAT_VERSION = 1
TENSORS = "gates.safetensors"
CONFIG = "gate_config.json"


@dataclass(frozen=True)
class SavedGates:
    """Gates as loaded.

    Attributes:
        heads: float32 heads on the CPU.
        backbone: ``{"path", "family", "hash"}`` of the backbone that they belong to.
        extra: whatever else was saved with them (JSON).
    """

    heads: GateHeads
    backbone: dict[str, str]
    extra: dict[str, Any]


def save_gates(folder: Path, heads: GateHeads, backbone: dict[str, str], extra: dict[str, Any]) -> None:
    """Write heads and their description into ``folder``, which must exist.

    Args:
        folder: where to.
        heads: what to save, as float32.
        backbone: ``{"path", "family", "hash"}``.
        extra: more to keep in ``gate_config.json``, JSON values.
    """
    tensors = {
        "weight": heads.weight_N3F.float().contiguous(),
        "mean": heads.mean_Nd.float().contiguous(),
        "scale": heads.scale_N.float().contiguous(),
    }
    save_file(tensors, folder / TENSORS)
    config = {
        "format_version": FORMAT_VERSION,
        "kind": "route_skip_drop",
        "droppable": heads.droppable,
        "backbone": backbone,
        **extra,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_gates(folder: str | Path) -> SavedGates:
    """Read gates written by :func:`save_gates`.

    Raises:
        CheckpointError: a file is missing or damaged, or the format is not known.
    """
    folder = Path(folder)
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"{folder}: no {name}; give a folder written by `rlcompute train` or `export`"
            )
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        heads = GateHeads(tensors["weight"], tensors["mean"], tensors["scale"], config.pop("droppable"))
        backbone, version, kind = config.pop("backbone"), config.pop("format_version"), config.pop("kind")
        hash_known = isinstance(backbone["hash"], str) and isinstance(backbone["path"], str)
    except (json.JSONDecodeError, SafetensorError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{folder}: damaged gate files ({error!r}); export the gates again") from error
    if version != FORMAT_VERSION or kind != "route_skip_drop" or not hash_known:
        raise CheckpointError(
            f"{folder / CONFIG}: format {version!r} of kind {kind!r} is not known to this version, which reads "
            f"format {FORMAT_VERSION} of kind 'route_skip_drop'"
        )
    n, _, f = heads.weight_N3F.shape
    if heads.mean_Nd.shape != (n, f - 1) or heads.scale_N.shape != (n,):
        raise CheckpointError(f"{folder / TENSORS}: the tensors' shapes do not fit each other; export again")
    return SavedGates(heads, backbone, config)


def check_backbone(
    saved: SavedGates, folder: str | Path, backbone_hash: str, backbone_path: str | Path
) -> None:
    """Refuse gates that were trained on another backbone.

    Raises:
        CheckpointError: the hashes differ.
    """
    if saved.backbone["hash"] != backbone_hash:
        raise CheckpointError(
            f"{folder}: these gates belong to backbone {saved.backbone['path']} with hash "
            f"{saved.backbone['hash'][:16]}…, but {backbone_path} has hash {backbone_hash[:16]}…; "
            "use the backbone that they were trained on, or train gates for this one"
        )
