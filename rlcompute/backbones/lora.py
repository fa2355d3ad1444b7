"""Low-rank adapters of a backbone, by peft (optional): attached for training, merged into the weights for inference.

While an adapter is attached, the backbone's layers run through peft's modules and gradients reach the adapter; a
backbone loaded with a merged adapter is a plain one with other weights and costs what it cost before. Only factors and
settings are written, in peft's own format, so that peft can load them too.

Shape legend: E experts, o outputs, i inputs, r rank.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rlcompute.backbones.base import Backbone
from rlcompute.errors import CheckpointError, ConfigError
from rlcompute.kernels import registry

Target = Literal["attention", "experts", "vision"]

FOLDER = "lora"
"""Subfolder of an adapter beside the gates that were trained with it."""
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_NAME = "default"
# What peft puts before the names of the adapted model's modules in its files.
_PREFIX = "base_model.model."
# Ends of module and parameter names in transformers' Qwen3.5-MoE. Routers, norms, embeddings, the shared expert and
# the gates of Gated DeltaNet stay as they are.
_MODULES: dict[Target, tuple[str, ...]] = {
    "attention": (
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "out_proj")),
    ),
    "experts": (),
    "vision": (
        "attn.qkv",
        "attn.proj",
        "mlp.linear_fc1",
        "mlp.linear_fc2",
        "merger.linear_fc1",
        "merger.linear_fc2",
    ),
}
_PARAMETERS: dict[Target, tuple[str, ...]] = {
    "attention": (),
    "experts": ("experts.gate_up_proj", "experts.down_proj"),
    "vision": (),
}
# Expert kernels that give their weights gradients.
_TRAINABLE_EXPERTS = ("grouped_mm", registry.REFERENCE)


@dataclass(frozen=True)
class Adapter:
    """A trainable adapter that is attached to a backbone.

    Attributes:
        targets: what it adapts.
    """

    targets: tuple[Target, ...]
    _model: Any
    _config: Any

    @property
    def adapts_vision(self) -> bool:
        """Whether embedded inputs depend on it: they cannot be kept from one update to the next then."""
        return "vision" in self.targets

    def parameters(self) -> list[nn.Parameter]:
        """The factors of all adapted weights, float32 at least; no other weight of the backbone is trainable."""
        return list(_factors(self._model).values())

    def tensors(self) -> dict[str, Tensor]:
        """Copies of the factors by name, on the CPU: all that was learned."""
        return {name: factor.detach().to("cpu", copy=True) for name, factor in _factors(self._model).items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over factors as :meth:`tensors` gave them, in place.

        Raises:
            CheckpointError: a factor is missing, unknown, or of another shape; nothing is changed then.
        """
        _fill(_factors(self._model), tensors, "adapter")

    def save(self, folder: Path) -> None:
        """Write ``adapter_config.json`` and ``adapter_model.safetensors`` into a folder, made if it is missing."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {_PREFIX + name: tensor for name, tensor in self.tensors().items()},
            folder / TENSORS,
            metadata={"format": "pt"},
        )
        settings = {
            # Sets have no order of their own: the same adapter is the same file.
            key: sorted(value) if isinstance(value, set) else value
            for key, value in self._config.to_dict().items()
        }
        (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def attach(backbone: Backbone, *, rank: int, alpha: int, targets: Sequence[Target], seed: int) -> Adapter:
    """Put a trainable adapter on a backbone, in place: ``W + alpha/rank · B A`` for every adapted weight ``W``.

    B begins at zero, so nothing changes until it is trained. Adapted experts are multiplied out anew at each use, one
    layer at a time; where their kernel gives weights no gradients, another one takes over.

    Args:
        backbone: frozen; its forwards record gradients into the adapter from now on.
        rank: r of every factor.
        alpha: numerator of the scale.
        targets: ``attention`` (projections of both token mixers), ``experts`` (routed ones), ``vision`` (tower and
            merger).
        seed: of A; with the same seed every process begins with the same adapter.

    Raises:
        ConfigError: peft is not installed, or the backbone has an adapter already.
    """
    peft = _peft()
    if backbone.adapted:
        raise ConfigError("the backbone has an adapter already: load it again to train another one")
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=[name for target in targets for name in _MODULES[target]],
        target_parameters=[name for target in targets for name in _PARAMETERS[target]],
    )
    with torch.random.fork_rng(devices=[]):  # peft makes factors on the CPU
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, backbone.model, _NAME)
    _widen(backbone.model)
    if "experts" in targets:
        backbone.kernels = replace(backbone.kernels, experts=_trainable_experts(backbone))
    backbone.adapted = True
    return Adapter(tuple(targets), backbone.model, config)


def merge(model: Any, folder: Path) -> Any:
    """Add the adapter in a folder to the weights of a transformers model, which stays a plain model.

    Args:
        model: of the family; its weights change in place.
        folder: as :meth:`Adapter.save` or peft writes it.

    Returns:
        The model.

    Raises:
        CheckpointError: files are missing or damaged, or the adapter was made for another model.
        ConfigError: peft is not installed.
    """
    peft = _peft()
    settings, tensors = folder / CONFIG, read(folder)
    try:
        kind = json.loads(settings.read_text(encoding="utf-8"))["peft_type"]
        if kind != "LORA":
            raise ValueError(f"peft_type is {kind}")
        config = peft.LoraConfig.from_pretrained(str(folder))
        tuner = peft.LoraModel(model, config, _NAME)
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{settings}: not a LoRA adapter of this backbone: {error}") from error
    _widen(model)
    _fill(_factors(model), tensors, str(folder / TENSORS))
    try:
        return tuner.merge_and_unload(safe_merge=True)
    except ValueError as error:
        raise CheckpointError(f"{folder / TENSORS}: cannot be merged: {error}") from error


def read(folder: Path) -> dict[str, Tensor]:
    """Factors of a saved adapter, for :meth:`Adapter.load`.

    Raises:
        CheckpointError: files are missing or damaged.
    """
    for name in (CONFIG, TENSORS):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder}: no {name}, so this is not an adapter")
    try:
        tensors = load_file(folder / TENSORS)
    except SafetensorError as error:
        raise CheckpointError(f"{folder / TENSORS}: damaged: {error}") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def adapter_folder(gates_folder: str | Path) -> Path | None:
    """The adapter that gates were trained with, beside them; None if the backbone was frozen."""
    folder = Path(gates_folder) / FOLDER
    return folder if folder.is_dir() else None


def adapted_parameter(module: Any, name: str) -> Tensor:
    """A parameter as an attached adapter makes it, with gradients into the adapter; itself where there is none.

    Args:
        module: holds stacked expert weights [E,o,i], or is what peft wrapped around such a module.
        name: of the parameter.
    """
    wrapper = None
    while hasattr(
        module, "parameter_name"
    ):  # peft.tuners.lora.ParamWrapper: one around another, each for a parameter
        wrapper = module if module.parameter_name == name else wrapper
        module = module.base_layer
    weight_Eoi: Tensor = getattr(module, name)
    if wrapper is None:
        return weight_Eoi
    left_Eor, right_Eri, scale = wrapper.get_delta_factors(_NAME)
    return torch.baddbmm(weight_Eoi, left_Eor, right_Eri, alpha=scale)


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f"adapters (ste.lora_rank above 0, or a folder {FOLDER}/ beside gates) need peft, which cannot be imported "
            f"({error}): pip install 'rlcompute[lora]'"
        ) from error


def _trainable_experts(backbone: Backbone) -> registry.Kernel:
    """The backbone's own kernel if it gives expert weights gradients, else the most preferred one that does."""
    known = registry.backends("experts")
    reasons = registry.refusals("experts", backbone.device, backbone.dtype)
    usable = [
        backend.implementation
        for name, reason in reasons.items()
        if name in _TRAINABLE_EXPERTS and reason is None and (backend := known[name]) is not None
    ]
    own = backbone.kernels.experts
    return own if own in usable else usable[0]


def _factors(model: Any) -> dict[str, nn.Parameter]:
    """Trainable factors by their names in peft's files."""
    return {
        name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if f".{_NAME}." in name
    }


def _widen(model: Any) -> None:
    """Keep factors in float32 at least: peft makes them in the dtype of the weights, too coarse for small updates."""
    for factor in _factors(model).values():
        factor.data = factor.data.to(torch.promote_types(factor.dtype, torch.float32))


def _fill(factors: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor], where: str) -> None:
    odd = sorted(factors.keys() ^ tensors.keys())
    if odd:
        problem = "is missing" if odd[0] in factors else "is not known"
        raise CheckpointError(
            f"{where}: {len(odd)} factors do not fit the backbone and the targets, the first, {odd[0]}, {problem}; "
            "give the adapter that was trained on this backbone"
        )
    for name, factor in factors.items():
        if factor.shape != tensors[name].shape:
            raise CheckpointError(
                f"{where}: factor {name} has shape {list(tensors[name].shape)} where the backbone needs "
                f"{list(factor.shape)}; give the adapter that was trained on this backbone"
            )
    with torch.no_grad():
        for name, factor in factors.items():
            factor.copy_(tensors[name])
