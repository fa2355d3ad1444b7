"""Static expert pruning: the experts that a sample needs least leave for good (spec §5).

Each layer keeps the E' experts with the largest saliency. A token still runs its k best of what is left, so memory
shrinks and FLOPs stay, but for the router's.

Shape legend: G groups of inputs, N layers, E experts, E' = K kept experts, k selected experts per token.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcompute.backbones.base import Backbone, BackboneLayer
from rlcompute.backbones.qwen3_5_moe import Qwen35MoeBackbone, Qwen35MoeLayer
from rlcompute.errors import BackendError, ConfigError
from rlcompute.policies.expert_statistics import ExpertStatistics
from rlcompute.policies.rules import SALIENCIES

RECORD = "expert_pruning.json"
"""File of a pruned checkpoint that says what it came from and which experts were kept."""

_OUTPUT_SUMS = {"man": "norm_GNE", "msan": "square_GNE", "reap": "weighted_GNE"}
_WEIGHTS = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")
# What a checkpoint folder holds of its tokenizer and image processor.
_PREPROCESSING = ("*token*.json", "*preprocessor_config.json", "vocab.*", "merges.txt", "chat_template.*")


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of a checkpoint's weights in the dtype that they are stored in.

    Attributes:
        all: of all weights.
        experts: of the routed experts and their routers among them.
    """

    all: int
    experts: int


def saliency_NE(statistics: ExpertStatistics, name: str) -> Tensor:
    """Saliency φ of every expert, float64 [N,E], every group of inputs weighing the same.

    With sums over the tokens of a group g, T_g its tokens and C_gj those routed to expert j: ``frequency`` is the mean
    over g of C_gj / T_g, and ``probability`` that of the router's probability of j. The others are means over the
    tokens routed to j, of ``‖o‖`` (``man``), ``‖o‖²`` (``msan``) or ``α‖o‖`` (``reap``), where a token of group g
    counts 1 / T_g: ``φ_j = Σ_g S_gj/T_g / Σ_g C_gj/T_g``. An expert that no token was routed to has 0 there.

    Args:
        statistics: of a calibration sample.
        name: one of :data:`SALIENCIES`.

    Raises:
        ConfigError: there is no such saliency.
    """
    check_saliency(name)
    # A group without tokens has nothing to add.
    share_GN1 = statistics.tokens_GN.double().clamp_min(1.0).reciprocal()[..., None]
    routed_NE = (statistics.visits_GNE * share_GN1).sum(dim=0)
    if name == "frequency":
        return routed_NE / len(statistics.modalities)
    if name == "probability":
        return (statistics.mass_GNE * share_GN1).mean(dim=0)
    sums_NE = (getattr(statistics, _OUTPUT_SUMS[name]) * share_GN1).sum(dim=0)
    return torch.where(routed_NE > 0, sums_NE / routed_NE, 0.0)


def kept_experts(statistics: ExpertStatistics, name: str, experts: int, *, top_k: int) -> Tensor:
    """The experts with the largest saliency in each layer, ascending: int64 [N,E']. Ties go to the lower number.

    Args:
        statistics: of a calibration sample.
        name: one of :data:`SALIENCIES`.
        experts: E'.
        top_k: experts that a token runs.

    Raises:
        ConfigError: there is no such saliency, or E' is below ``top_k`` or above E.
    """
    check_experts(experts, top_k=top_k, num_experts=statistics.visits_GNE.shape[2])
    order_NE = saliency_NE(statistics, name).sort(dim=1, descending=True, stable=True).indices
    return order_NE[:, :experts].sort(dim=1).values


def check_saliency(name: str) -> None:
    """Refuse a saliency that does not exist.

    Raises:
        ConfigError: ``name`` is not one of :data:`SALIENCIES`.
    """
    if name not in SALIENCIES:
        raise ConfigError(f"saliency {name!r} does not exist: give one of {', '.join(SALIENCIES)}")


def check_experts(experts: int, *, top_k: int, num_experts: int) -> None:
    """Refuse a number of experts that the router cannot work with.

    Raises:
        ConfigError: ``experts`` is below ``top_k`` or above ``num_experts``.
    """
    if not top_k <= experts <= num_experts:
        raise ConfigError(
            f"cannot keep {experts} experts a layer: the backbone has {num_experts} and every token runs {top_k}; "
            f"give {top_k} to {num_experts}"
        )


def pruned_backbone(backbone: Backbone, kept_NE: Tensor) -> Backbone:
    """The backbone with the kept experts alone, in memory; all other weights are shared with it.

    Args:
        backbone: stays as it is. Where nothing is pruned, it is returned itself.
        kept_NE: int64 [N,E'], ascending in each layer.

    Raises:
        BackendError: the family is not known here.
        ConfigError: E' is below k or above E.
        ValueError: ``kept_NE`` has another number of layers, or experts that are not there, twice, or not ascending.
    """
    full = _checked(backbone, kept_NE)
    return full if kept_NE.shape[1] == full.num_experts else _PrunedBackbone(full, kept_NE)


def save_pruned(
    backbone: Backbone, kept_NE: Tensor, folder: Path, record: Mapping[str, Any]
) -> tuple[WeightBytes, WeightBytes]:
    """Write a transformers checkpoint with the kept experts alone, which loads like any other.

    The weights come from the backbone's folder in the dtype that they are stored in, whatever the backbone computes
    in; of a checkpoint with more than the embedder's weights (a language model's head) only those are written.
    The folder appears when it is complete.

    Args:
        backbone: as loaded from its folder.
        kept_NE: int64 [N,E'], ascending in each layer.
        folder: where to; missing or empty.
        record: more to write to :data:`RECORD`, JSON values.

    Returns:
        Size of the weights before and after.

    Raises:
        BackendError: the family is not known here.
        ConfigError: E' is below k or above E, or the folder holds something.
        ValueError: ``kept_NE`` does not fit the backbone, or the backbone was pruned in memory.
    """
    full = _checked(backbone, kept_NE)
    if isinstance(full, _PrunedBackbone):
        raise ValueError(f"{full.path} holds more experts than this backbone, which was pruned in memory")
    check_folder(folder)
    model = type(full.model).from_pretrained(
        full.path, dtype="auto", local_files_only=True, use_safetensors=True
    )
    pruned = _pruned_model(model, kept_NE)
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    pruned.save_pretrained(temporary)
    for path in {path for pattern in _PREPROCESSING for path in full.path.glob(pattern)}:
        shutil.copyfile(path, temporary / path.name)
    source = {"path": str(full.path), "hash": full.hash, "num_experts": full.num_experts}
    content = {**record, "pruned_from": source, "kept_experts": kept_NE.tolist()}
    (temporary / RECORD).write_text(json.dumps(content) + "\n", encoding="utf-8")
    temporary.replace(folder)
    return _weight_bytes(model), _weight_bytes(pruned)


def check_folder(folder: Path) -> None:
    """Refuse to write a checkpoint over something.

    Raises:
        ConfigError: ``folder`` is a file, or a folder that is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists and is not an empty folder: choose another one for the checkpoint"
        )


class _PrunedBackbone(Qwen35MoeBackbone):
    """A backbone whose routers and experts are those of a smaller model, and everything else another's."""

    def __init__(self, full: Qwen35MoeBackbone, kept_NE: Tensor) -> None:
        vars(self).update(vars(full))
        self.model = _pruned_model(full.model, kept_NE)
        self.num_experts = kept_NE.shape[1]
        self.hash = hashlib.sha256(f"{full.hash} keeping {kept_NE.tolist()}".encode()).hexdigest()
        modules = self.model.language_model.layers
        self.layers: list[BackboneLayer] = [
            _pruned_layer(layer, module, self.num_experts)
            for layer, module in zip(full.layers, modules, strict=True)
        ]


def _pruned_layer(layer: BackboneLayer, module: Any, experts: int) -> BackboneLayer:
    """The layer with the norms, router and experts of another module; the mixer, which is the same, stays."""
    assert isinstance(layer, Qwen35MoeLayer)
    pruned = copy.copy(layer)
    pruned.module = module
    share = experts / len(layer.experts.down_EdF)
    pruned.cost = replace(layer.cost, router_token=layer.cost.router_token * share)
    return pruned


def _checked(backbone: Backbone, kept_NE: Tensor) -> Qwen35MoeBackbone:
    if not isinstance(backbone, Qwen35MoeBackbone):
        raise BackendError(f"expert pruning does not know the family {backbone.family!r}")
    if kept_NE.ndim != 2 or len(kept_NE) != backbone.num_layers:
        raise ValueError(f"kept experts of shape {list(kept_NE.shape)} for {backbone.num_layers} layers")
    check_experts(kept_NE.shape[1], top_k=backbone.top_k, num_experts=backbone.num_experts)
    inside = bool((kept_NE >= 0).all()) and bool((kept_NE < backbone.num_experts).all())
    if not inside or not bool((kept_NE.diff(dim=1) > 0).all()):
        raise ValueError(f"kept experts must ascend in each layer, between 0 and {backbone.num_experts - 1}")
    return backbone


def _pruned_model(model: Any, kept_NE: Tensor) -> Any:
    """A model of transformers' own class with fewer experts, sharing all other weights."""
    config = copy.deepcopy(model.config)
    config.text_config.num_experts = kept_NE.shape[1]
    state = model.state_dict()
    for layer, kept_E in enumerate(kept_NE.to(model.device)):
        for name in _WEIGHTS:
            key = f"language_model.layers.{layer}.mlp.{name}"
            state[key] = state[key][kept_E]
    with torch.device("meta"):
        pruned = type(model)(config)
    pruned.load_state_dict(state, assign=True)
    # Rotary frequencies are not in the state.
    for name, buffer in model.named_buffers():
        owner, _, attribute = name.rpartition(".")
        setattr(pruned.get_submodule(owner), attribute, buffer)
    return pruned.eval().requires_grad_(False)


def _weight_bytes(model: Any) -> WeightBytes:
    sizes = {name: weight.numel() * weight.element_size() for name, weight in model.named_parameters()}
    ends = tuple(f".mlp.{name}" for name in _WEIGHTS)
    return WeightBytes(sum(sizes.values()), sum(size for name, size in sizes.items() if name.endswith(ends)))
