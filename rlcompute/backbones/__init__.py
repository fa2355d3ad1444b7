"""Transformers families behind one layer contract; see :class:`rlcompute.backbones.base.Backbone`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from rlcompute.backbones.base import Backbone
from rlcompute.config import DEMO_BACKBONE, Config
from rlcompute.demo import CHECKPOINT
from rlcompute.errors import CheckpointError, ConfigError
from rlcompute.kernels import registry
from rlcompute.preprocess import DEFAULT_MAX_TOKENS, Preprocessor

FAMILIES = ("qwen3_5_moe",)


def resolve_path(path: str | Path) -> Path:
    """The checkpoint folder that ``path`` means; :data:`DEMO_BACKBONE` is the embedded one."""
    return CHECKPOINT if str(path) == DEMO_BACKBONE else Path(path)


def checkpoint_family(path: str | Path) -> str:
    """The ``model_type`` of a checkpoint folder, checked to be one that the platform can run.

    Raises:
        CheckpointError: no such folder, no readable config.json, or a family that is not supported.
    """
    folder = resolve_path(path)
    if not folder.is_dir():
        raise CheckpointError(
            f"backbone.path: {folder} is not a folder. Give the local folder of a transformers checkpoint "
            "(model hub names are not resolved: download it first)."
        )
    config_file = folder / "config.json"
    try:
        family = json.loads(config_file.read_text(encoding="utf-8"))["model_type"]
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: no config.json, so this is not a transformers checkpoint") from None
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{config_file}: not a transformers configuration ({error!r})") from error
    if family not in FAMILIES:
        raise CheckpointError(
            f"{config_file}: model_type {family!r} is not supported; supported families: {', '.join(FAMILIES)}"
        )
    return str(family)


def load_backbone(
    path: str | Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    max_tokens: int = DEFAULT_MAX_TOKENS,
    kernels: Mapping[str, str] | None = None,
    adapter: str | Path | None = None,
) -> Backbone:
    """Load a frozen backbone from a local transformers checkpoint folder.

    Args:
        path: the folder, or :data:`DEMO_BACKBONE`; nothing is downloaded.
        dtype: a torch floating dtype by name.
        device: a torch device.
        max_tokens: longest text, in tokens.
        kernels: backends to force, by operation (:data:`rlcompute.kernels.registry.PROVIDERS`).
        adapter: folder of a low-rank adapter to merge into the weights (:mod:`rlcompute.backbones.lora`); the
            backbone's hash stays that of the checkpoint.

    Raises:
        BackendError: a forced backend is not there or cannot run on this device in this dtype.
        CheckpointError: see :func:`checkpoint_family`; also weights that are missing or do not fit the family, or an
            adapter that does not fit the weights.
        ConfigError: the device is not there, or peft is not, which adapters need.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {device!r} was asked for, but torch finds no GPU here: use cpu, or see `rlcompute doctor`"
        )
    family = checkpoint_family(path)
    assert family == "qwen3_5_moe"
    chosen = registry.resolve(device, getattr(torch, dtype), kernels)
    from transformers import Qwen3_5MoeModel

    from rlcompute.backbones.lora import merge
    from rlcompute.backbones.qwen3_5_moe import Qwen35MoeBackbone

    folder = resolve_path(path)
    try:
        model, info = Qwen3_5MoeModel.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            attn_implementation="sdpa",
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{folder}: transformers could not load the weights: {error}") from error
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise CheckpointError(f"{folder}: {len(names)} weights are missing, the first is {names[0]!r}")
    preprocessor = Preprocessor.from_pretrained(folder, max_tokens=max_tokens)
    model = model.to(device)
    if adapter is not None:
        model = merge(model, Path(adapter))
    return Qwen35MoeBackbone(model, folder, preprocessor, chosen)


def load_configured(
    config: Config, path: str | Path | None = None, *, adapter: str | Path | None = None
) -> Backbone:
    """The backbone that a configuration names, or the one at ``path`` with the same settings.

    ``adapter`` is as in :func:`load_backbone`.

    Raises:
        As :func:`load_backbone`.
    """
    return load_backbone(
        config.backbone.path if path is None else path,
        dtype=config.backbone.dtype,
        device=config.backbone.device,
        max_tokens=config.data.max_tokens,
        kernels=config.kernels.forced,
        adapter=adapter,
    )
