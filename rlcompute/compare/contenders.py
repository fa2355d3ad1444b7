"""From a policy as it is written to what runs: backbone and policy, built once a comparison."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlcompute.backbones import load_configured, lora, resolve_path
from rlcompute.backbones.base import Backbone
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.config import Config
from rlcompute.decision import Full, Policy
from rlcompute.errors import ConfigError
from rlcompute.passes import Contender
from rlcompute.policies.calibration import PolicyCalibration
from rlcompute.policies.checkpoint import CONFIG, TENSORS, check_backbone, load_gates
from rlcompute.policies.combined import Combined
from rlcompute.policies.draws import as_keys, rollout_key
from rlcompute.policies.expert_pruning import kept_experts, pruned_backbone
from rlcompute.policies.expert_rules import (
    BetaSkip,
    OtsuSkip,
    RandomTopK,
    ScoreThreshold,
    SkipLayers,
    UniformTopK,
)
from rlcompute.policies.modes import Modes
from rlcompute.policies.rules import BACKBONES, LEARNED, PolicySpec, Rule, Value, parse
from rlcompute.policies.token_rules import AttentionPruning, BetaPruning, RandomPruning

CALIBRATED = ("modes",)
"""Rules that rest on a calibration of the unpruned backbone without adapters."""

Make = Callable[[Sequence[str]], Policy]


@dataclass(frozen=True)
class Prepared:
    """A policy that is ready to run on a backbone."""

    backbone: Backbone
    contender: Contender


def expand(text: str) -> list[PolicySpec]:
    """The policies that one entry of ``compare.policies`` means: a pattern in the path of gates stands for several.

    Raises:
        ConfigError: the entry cannot be read, or no folder matches the pattern.
    """
    spec = parse(text)
    for place, rule in enumerate(spec.rules):
        pattern = str(rule.values.get("path", ""))
        if rule.name == "gates" and glob.has_magic(pattern):
            found = sorted(path for path in glob.glob(pattern) if Path(path).is_dir())
            if not found:
                raise ConfigError(f"compare.policies: {text!r}: no folder matches {pattern!r}")
            members = [replace(rule, values={**rule.values, "path": path}) for path in found]
            rules = [(*spec.rules[:place], member, *spec.rules[place + 1 :]) for member in members]
            return [PolicySpec("+".join(map(str, member)), member) for member in rules]
    return [spec]


def adapter_of(spec: PolicySpec) -> Path | None:
    """The adapter that the policy's gates were trained with, if any.

    Raises:
        ConfigError: another rule of the policy belongs to the backbone without it.
    """
    folders = (str(rule.values["path"]) for rule in spec.rules if rule.name in LEARNED)
    adapter = next((found for folder in folders if (found := lora.adapter_folder(folder))), None)
    odd = [rule.name for rule in spec.rules if rule.name in (*BACKBONES, *CALIBRATED)]
    if adapter is not None and odd:
        raise ConfigError(
            f"policy {spec.text!r}: the gates were trained with the adapter {adapter}, but {odd[0]} belongs to the "
            "backbone without it: leave one of the two out"
        )
    return adapter


class Builder:
    """Builds policies for one configuration.

    Gates that were trained with an adapter run on the backbone with that adapter, alone or with other rules. Full
    compute, the reference of all policies, and rules without such gates stay on the backbone as it is.
    """

    def __init__(
        self,
        config: Config,
        backbone: Backbone,
        calibration: Callable[[], PolicyCalibration],
        modes_thresholds: Callable[[float], Sequence[float]],
    ) -> None:
        """Args:
        config: of the comparison.
        backbone: the one that is not pruned.
        calibration: makes or loads what MoDES and expert pruning were calibrated on; called at most once.
        modes_thresholds: thresholds of MoDES for text and visual tokens at a share of skipped rows.
        """
        self._config, self._backbone = config, backbone
        self._make_calibration, self._modes_thresholds = calibration, modes_thresholds
        self._backbones: dict[str, Backbone] = {}

    @cached_property
    def calibration(self) -> PolicyCalibration:
        """What MoDES and expert pruning were calibrated on."""
        return self._make_calibration()

    def build(self, spec: PolicySpec) -> Prepared:
        """The policy, whose knob must be set, and its backbone.

        Raises:
            CheckpointError: gates or a checkpoint cannot be loaded, or the gates belong to another backbone.
            ConfigError: a rule does not fit the backbone.
        """
        assert spec.free is None
        backbone = self._backbone_of(spec)
        makers = [self._maker(rule, backbone) for rule in spec.rules if rule.name not in BACKBONES]
        parameters = {
            f"{rule.name}.{key}": float(value)
            for rule in spec.rules
            for key, value in rule.values.items()
            if not isinstance(value, str)
        }

        def make(names: Sequence[str]) -> Policy:
            policies = [maker(names) for maker in makers]
            return Full() if not policies else policies[0] if len(policies) == 1 else Combined(policies)

        return Prepared(backbone, Contender(spec.text, make, parameters))

    def fingerprint(self, spec: PolicySpec) -> dict[str, Any]:
        """What a measurement of the policy depends on besides its text and the unpruned backbone."""
        found: dict[str, Any] = {}
        adapter = adapter_of(spec)
        if adapter is not None:
            found["adapter"] = [_digest(adapter / name) for name in (lora.CONFIG, lora.TENSORS)]
        for rule in spec.rules:
            if rule.name == "gates":
                folder = Path(str(rule.values["path"]))
                load_gates(folder)  # says what is wrong with the files
                found["gates"] = [_digest(folder / name) for name in (CONFIG, TENSORS)]
            elif rule.name == "checkpoint":
                found["checkpoint"] = checkpoint_hash(resolve_path(str(rule.values["path"])))
            elif rule.name in ("prune_experts", "modes"):
                settings, data = self._config.calibration, self._config.data
                found["calibration"] = [
                    self._config.run.seed,
                    settings.pairs_per_modality,
                    *(_digest(Path(data.train)), data.pairs_per_task, data.max_tokens, data.on_bad_row),
                    *([settings.modes_grid] if rule.name == "modes" else []),
                ]
            elif rule.name in ("random_prune", "random_topk"):
                found["seed"] = self._config.run.seed
        return found

    def method(self, spec: PolicySpec) -> str | None:
        """What trained the gates of a policy, in words; None if it has none."""
        folders = (str(rule.values["path"]) for rule in spec.rules if rule.name in LEARNED)
        return next((load_gates(folder).method for folder in folders), None)

    def _backbone_of(self, spec: PolicySpec) -> Backbone:
        adapter = adapter_of(spec)
        if adapter is not None:
            key = str(adapter)
            if key not in self._backbones:
                self._backbones[key] = load_configured(self._config, adapter=adapter)
            return self._backbones[key]
        for rule in spec.rules:
            if rule.name in BACKBONES:
                key = str(rule)
                if key not in self._backbones:
                    self._backbones[key] = self._load(rule)
                return self._backbones[key]
        return self._backbone

    def _load(self, rule: Rule) -> Backbone:
        values = rule.values
        if rule.name == "prune_experts":
            kept_NE = kept_experts(
                self.calibration.statistics,
                str(values["saliency"]),
                _whole(values["experts"]),
                top_k=self._backbone.top_k,
            )
            return pruned_backbone(self._backbone, kept_NE)
        return load_configured(self._config, str(values["path"]))

    def _maker(self, rule: Rule, backbone: Backbone) -> Make:
        """What makes the policy of one rule for a pack of inputs with the given names."""
        if rule.name in ("random_prune", "random_topk"):
            return self._random_maker(rule, backbone)
        policy = self._policy(rule, backbone)
        return lambda names: policy

    def _random_maker(self, rule: Rule, backbone: Backbone) -> Make:
        values, seed = rule.values, self._config.run.seed

        def make(names: Sequence[str]) -> Policy:
            keys_S = as_keys([rollout_key(seed, 0, name, rule.name, 0) for name in names], backbone.device)
            if rule.name == "random_topk":
                return RandomTopK(keys_S, k=_whole(values["k"]), top_k=backbone.top_k)
            return RandomPruning(
                keys_S,
                layer=_whole(values["layer"]),
                keep=_number(values["keep"]),
                num_layers=backbone.num_layers,
            )

        make([])  # a value that does not fit the backbone is found here, not in the middle of a pass
        return make

    def _policy(self, rule: Rule, backbone: Backbone) -> Policy:
        def whole(key: str, default: int | None = None) -> int:
            return _whole(rule.values[key] if default is None else rule.values.get(key, default))

        def number(key: str) -> float:
            return _number(rule.values[key])

        match rule.name:
            case "full":
                return Full()
            case "gates":
                folder = str(rule.values["path"])
                saved = load_gates(folder)
                check_backbone(saved, folder, backbone.hash, backbone.path)
                gates = saved.gates.to(device=backbone.device)
                return (gates.shifted(number("shift")) if "shift" in rule.values else gates).policy()
            case "beta_prune":
                average: Any = rule.values["average"]
                return BetaPruning(backbone, layer=whole("layer"), keep=number("keep"), average=average)
            case "attention_prune":
                source: Any = rule.values["source"]
                return AttentionPruning(backbone, layer=whole("layer"), keep=number("keep"), source=source)
            case "skip_layers":
                return SkipLayers(backbone, first=whole("first"), last=whole("last", backbone.num_layers - 1))
            case "beta_skip":
                return BetaSkip(backbone, share=number("share"))
            case "otsu_beta" | "otsu_logit":
                return OtsuSkip(
                    backbone,
                    score="beta" if rule.name == "otsu_beta" else "logit",
                    min_variation=number("min_variation"),
                    cap=number("cap"),
                )
            case "uniform_topk":
                return UniformTopK(whole("k"), backbone.top_k)
            case "threshold":
                return ScoreThreshold(tau=number("tau"))
            case "modes":
                return Modes(self.calibration.scales_NM, self._modes_thresholds(number("skip")))
        raise AssertionError(rule.name)


def _whole(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _number(value: Value) -> float:
    assert not isinstance(value, str)
    return float(value)


def _digest(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
