"""The comparison: any policies at any budgets on the held-out pairs, every finished measurement kept.

    policies x budgets -> knobs solved on a sample of the inputs -> accuracy and FLOPs on all of them
                       -> clock against full compute, side by side -> cache
    points -> compare.json, compare.md, pictures, tables

What is in the cache is not measured again: an interrupted comparison goes on where it stopped, and another one uses the
points that both have. Times are measured again on another device, or with another number of threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rlcompute.backbones import load_configured, resolve_path
from rlcompute.backbones.base import Backbone
from rlcompute.backbones.fingerprint import checkpoint_hash
from rlcompute.compare import report
from rlcompute.compare.budget import KnobSolver, OutOfReach, Solution
from rlcompute.compare.cache import Cache, Entry
from rlcompute.compare.contenders import Builder, adapter_of, expand
from rlcompute.compare.points import FULL, Missed, Point, Speed, from_entry, to_entry
from rlcompute.compare.strength_study import StrengthStudy
from rlcompute.compare.suite import ROUNDS, SOLVER_INPUTS, STUDY_PAIRS, UNPRUNED, Suite
from rlcompute.config import Config
from rlcompute.cost_table import device_name
from rlcompute.errors import ConfigError, DataError
from rlcompute.kernels import registry
from rlcompute.policies.rules import PolicySpec, parse
from rlcompute.policy_calibration import PolicyCalibrator


def run(config: Config, out: Path) -> dict[str, Any]:
    """Compares ``compare.policies`` at ``compare.budgets``; prints tables and writes files into ``out``.

    Full compute is always among them, as the reference.

    Returns:
        What ``compare.json`` holds (:mod:`rlcompute.compare.report`).

    Raises:
        ConfigError: a policy cannot be read or does not fit the backbone, or a budget is outside [0, 1].
        CheckpointError: backbone, gates or a checkpoint cannot be loaded, or do not belong together.
        DataError: ``data.test`` cannot be used or has no pairs, or a cache entry is damaged.
    """
    settings = config.compare
    comparison = Comparison(config)
    policies = [FULL, *(text for text in settings.policies if text != FULL)]
    found, missed = comparison.collect(policies, settings.budgets)
    return report.publish(config, comparison.backbone_name, found, missed, comparison.strength, out)


def points(config: Config, specs: Sequence[str], budgets: Sequence[float]) -> list[Point]:
    """Measures policies, or takes them from the cache.

    Args:
        config: backbone, data, sample, clock and cache.
        specs: policies as they are written in ``compare.policies``.
        budgets: for those with a free knob; none leaves these out.

    Returns:
        In the order of ``specs``, then of ``budgets``, a pattern's members in the order of their paths; without those
        that do not reach a budget.

    Raises:
        See :func:`run`.
    """
    return Comparison(config).collect(specs, budgets)[0]


@dataclass(frozen=True)
class _Task:
    """One point: the text as configured, the policy, and the budget of its free knob."""

    text: str
    spec: PolicySpec
    budget: float | None

    @property
    def name(self) -> str:
        return self.spec.text if self.budget is None else f"{self.spec.text} at {100 * self.budget:g} %"


class Comparison:
    """Measures points for one configuration; what that needs is loaded when it is needed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._cache = Cache(config.compare.cache)
        self._solvers: dict[str, KnobSolver] = {}
        self._measured = 0

    def collect(self, texts: Sequence[str], budgets: Sequence[float]) -> tuple[list[Point], list[Missed]]:
        """The points of policies at budgets, and those that do not reach one; errors as of :func:`run`."""
        found: list[Point] = []
        missed: list[Missed] = []
        console, start = Console(stderr=True), time.monotonic()
        tasks = _tasks(texts, budgets)
        for number, task in enumerate(tasks, start=1):
            before = self._measured
            result = self._result(task)
            if isinstance(result, Point):
                found.append(result)
            else:
                missed.append(result)
            if self._measured > before or number == len(tasks):
                pace_s = (time.monotonic() - start) / max(1, self._measured)
                console.print(
                    f"compared {number}/{len(tasks)} | {task.name}: {result.words} | {pace_s:.0f} s a new point",
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
        return found, missed

    @cached_property
    def backbone_name(self) -> str:
        """Path and hash of the unpruned backbone."""
        return f"{self._config.backbone.path} ({self._backbone_hash[:16]})"

    @cached_property
    def full(self) -> Point:
        """Full compute of the unpruned backbone."""
        return self._fixed(parse(FULL))

    @cached_property
    def strength(self) -> StrengthStudy | None:
        """Write strength against attention, from the cache or measured now; None where there is nothing to compare."""
        key = {"kind": "strength", "pairs": STUDY_PAIRS, **self.setting}
        entry = self._cache.load(key)
        if entry is None:
            found = self.suite.study()
            entry = Entry({"study": None if found is None else found.values}, {})
            self._cache.store(key, entry)
        values = entry.values["study"]
        return None if values is None else StrengthStudy.from_values(values)

    def _result(self, task: _Task) -> Point | Missed:
        if task.budget is None:
            point = self.full if task.spec.text == FULL else self._fixed(task.spec)
            return replace(point, spec=task.text, method=self.builder.method(task.spec))
        solved = self._solved(task.spec, task.budget)
        if isinstance(solved, OutOfReach):
            return Missed(task.text, task.budget, solved.least, solved.most)
        point = self._fixed(task.spec.with_free(solved.knob))
        return replace(
            point,
            spec=task.text,
            budget=task.budget,
            knob=solved.knob,
            method=self.builder.method(task.spec),
        )

    def _fixed(self, spec: PolicySpec) -> Point:
        """A policy without a free knob, from the cache or measured now."""
        key = self._key("point", spec)
        clock_key = self._key("clock", spec) | self._clock_setting
        entry, times = self._cache.load(key), self._cache.load(clock_key)
        self._measured += entry is None or times is None
        if times is None:
            times = Entry(asdict(self.suite.speed(self.builder.build(spec), _source(spec))), {})
            self._cache.store(clock_key, times)
        speed = Speed(**times.values)
        if entry is None:
            full = None if spec.text == FULL else self.full
            point = self.suite.point(written(spec), self.builder.build(spec), _source(spec), speed, full)
            entry = to_entry(point)
            self._cache.store(key, entry)
        return from_entry(entry, speed)

    def _solved(self, spec: PolicySpec, budget: float) -> Solution | OutOfReach:
        """A policy with its knob set, from the cache or solved now."""
        key = self._key("knob", spec) | {"budget": budget, "solver_inputs": SOLVER_INPUTS}
        entry = self._cache.load(key)
        if entry is None:
            solver = self._solvers.setdefault(spec.text, KnobSolver(spec, self._saving))
            entry = Entry(asdict(solver.solve(budget)), {})
            self._cache.store(key, entry)
        return Solution(**entry.values) if "knob" in entry.values else OutOfReach(**entry.values)

    def _saving(self, spec: PolicySpec) -> float:
        return self.suite.saving(self.builder.build(spec), _source(spec))

    def _key(self, kind: str, spec: PolicySpec) -> dict[str, Any]:
        """Everything that a measurement depends on."""
        return {
            "kind": kind,
            "policy": written(spec),
            "depends_on": self.builder.fingerprint(spec),
            **self.setting,
        }

    @cached_property
    def setting(self) -> dict[str, Any]:
        """What all measurements of this configuration depend on."""
        config = self._config
        device, dtype, forced = config.backbone.device, config.backbone.dtype, config.kernels.forced
        return {
            "backbone": self._backbone_hash,
            "data": _file_hash(Path(config.data.test)),
            "max_tokens": config.data.max_tokens,
            "on_bad_row": config.data.on_bad_row,
            "evaluation": config.evaluation.model_dump(exclude={"policies", "bootstrap_samples"}),
            "device": device,
            "dtype": dtype,
            "kernels": {
                operation: registry.choose(operation, device, getattr(torch, dtype), forced.get(operation))
                for operation in registry.PROVIDERS
            },
        }

    @cached_property
    def _clock_setting(self) -> dict[str, Any]:
        """What times depend on besides."""
        device = device_name(torch.device(self._config.backbone.device))
        return {"rounds": ROUNDS, "device_name": device, "threads": torch.get_num_threads()}

    @cached_property
    def _backbone_hash(self) -> str:
        return checkpoint_hash(resolve_path(self._config.backbone.path))

    @cached_property
    def backbone(self) -> Backbone:
        """The unpruned backbone."""
        return load_configured(self._config)

    @cached_property
    def builder(self) -> Builder:
        """What makes policies of texts."""
        calibrator = PolicyCalibrator(self._config, self.backbone)
        return Builder(
            self._config, self.backbone, lambda: calibrator.calibration, calibrator.modes_thresholds
        )

    @cached_property
    def suite(self) -> Suite:
        """The held-out inputs."""
        return Suite(self._config, self.backbone)


def _tasks(texts: Sequence[str], budgets: Sequence[float]) -> list[_Task]:
    """What to measure; everything is read before anything is measured."""
    for budget in budgets:
        if not 0.0 <= budget <= 1.0:
            raise ConfigError(f"compare.budgets: {budget} is outside [0, 1]; give shares, 0.45 for 45 %")
    tasks = []
    for text in dict.fromkeys(texts):
        for spec in expand(text):
            wanted = [None] if spec.free is None else list(dict.fromkeys(budgets))
            tasks += [_Task(text, spec, budget) for budget in wanted]
    return tasks


def written(spec: PolicySpec) -> str:
    """A policy's text with everything said, defaults as well."""
    return "+".join(map(str, spec.rules))


def _source(spec: PolicySpec) -> str:
    """Name of the embedded inputs that a policy reads; pruning experts leaves vision tower and tokens as they are."""
    adapter = adapter_of(spec)
    if adapter is not None:
        return str(adapter)
    return next((str(rule) for rule in spec.rules if rule.name == "checkpoint"), UNPRUNED)


def _file_hash(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"data.test: {path} is not a file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
