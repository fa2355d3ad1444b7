"""How a policy is written down: ``beta_prune:layer=4,keep=0.5+uniform_topk:k=2``.

A policy is one rule, or several joined with ``+``: what prunes tokens, what skips experts, gates, or which checkpoint
runs. Parameters stand as ``key=value``. One value of the whole policy may be ``*``: the free knob, which is solved so
that the policy meets a budget. This module only reads and writes the text; :mod:`rlcompute.compare.contenders` builds
the policies, and knows the backbone.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from rlcompute.errors import ConfigError

Value = float | int | str
FREE = "*"


@dataclass(frozen=True)
class Parameter:
    """One parameter of a rule.

    Attributes:
        kind: type of its value.
        default: value if it is not given; None: it must be given, unless ``optional``.
        optional: may be left out without a default.
        low, high: bounds, both included.
        choices: allowed strings, if not any.
        saves_more: the end of its range at which the most compute is saved, if it may be the free knob.
    """

    kind: type[int] | type[float] | type[str]
    default: Value | None = None
    optional: bool = False
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()
    saves_more: Literal["low", "high"] | None = None


def _share(saves_more: Literal["low", "high"]) -> Parameter:
    return Parameter(float, low=0.0, high=1.0, saves_more=saves_more)


_LAYER = Parameter(int, low=0)
_K = Parameter(int, low=1)
_PATH = Parameter(str)
_SHIFT = Parameter(float, optional=True, low=-20.0, high=20.0, saves_more="high")
"""Added to the logits of gates for whatever saves compute. At the lower end gates that GRPO trained on the demo run
everything, at the upper one they save four fifths."""
_OTSU = {
    "min_variation": Parameter(float, default=0.1, low=0.0, high=10.0),
    "cap": Parameter(float, default=0.7, low=0.0, high=1.0, saves_more="high"),
}
SALIENCIES = ("frequency", "probability", "man", "msan", "reap")
"""What an expert can be judged by, :func:`rlcompute.policies.expert_pruning.saliency_NE`."""

RULES: dict[str, dict[str, Parameter]] = {
    "full": {},
    "gates": {"path": _PATH, "shift": _SHIFT},
    "checkpoint": {"path": _PATH},
    "prune_experts": {
        "saliency": Parameter(str, default="reap", choices=SALIENCIES),
        "experts": Parameter(int, low=1),
    },
    "beta_prune": {
        "layer": _LAYER,
        "keep": _share("low"),
        "average": Parameter(str, default="all", choices=("all", "last")),
    },
    "random_prune": {"layer": _LAYER, "keep": _share("low")},
    "attention_prune": {
        "layer": _LAYER,
        "keep": _share("low"),
        "source": Parameter(str, default="all", choices=("all", "emb")),
    },
    "skip_layers": {"first": _LAYER, "last": Parameter(int, optional=True, low=0)},
    "beta_skip": {"share": _share("high")},
    "otsu_beta": _OTSU,
    "otsu_logit": _OTSU,
    "uniform_topk": {"k": _K},
    "random_topk": {"k": _K},
    "threshold": {"tau": _share("high")},
    "modes": {"skip": _share("high")},
}
"""Every rule by name, with its parameters."""

LEARNED = ("gates",)
"""Rules that were trained."""
BACKBONES = ("checkpoint", "prune_experts")
"""Rules that say which weights run, not what is left out of them."""


@dataclass(frozen=True)
class Rule:
    """One rule with its parameters; a free one has the value :data:`FREE`."""

    name: str
    values: Mapping[str, Value]

    def __str__(self) -> str:
        values = ",".join(f"{key}={_written(value)}" for key, value in self.values.items())
        return f"{self.name}:{values}" if values else self.name


@dataclass(frozen=True)
class Knob:
    """The free parameter of a policy: rule, key, range, and the end of the range that saves the most compute."""

    rule: str
    key: str
    low: float
    high: float
    saves_more: Literal["low", "high"]


@dataclass(frozen=True)
class PolicySpec:
    """A policy as it was written.

    Attributes:
        text: what was written, without spaces.
        rules: its rules, in order, defaults filled in.
    """

    text: str
    rules: tuple[Rule, ...]

    @property
    def free(self) -> Knob | None:
        """The free knob, if there is one."""
        for rule in self.rules:
            for key, value in rule.values.items():
                if value == FREE:
                    parameter = RULES[rule.name][key]
                    assert parameter.saves_more is not None
                    return Knob(rule.name, key, parameter.low, parameter.high, parameter.saves_more)
        return None

    @property
    def learned(self) -> bool:
        """Whether a part of it was trained."""
        return any(rule.name in LEARNED for rule in self.rules)

    def with_free(self, value: float) -> PolicySpec:
        """The policy with its free knob set."""
        rules = tuple(
            replace(rule, values={key: value if x == FREE else x for key, x in rule.values.items()})
            for rule in self.rules
        )
        return PolicySpec("+".join(map(str, rules)), rules)


def parse(text: str) -> PolicySpec:
    """Read one policy.

    Raises:
        ConfigError: an unknown rule or parameter, a missing, repeated or impossible value, more than one free knob.
    """
    bare = "".join(text.split())
    rules = tuple(_rule(part, text) for part in bare.split("+"))
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        raise ConfigError(f"policy {text!r}: the same rule stands in it twice")
    if "full" in names and len(names) > 1:
        raise ConfigError(f"policy {text!r}: full compute cannot be combined with a rule; leave `full` out")
    if len(names) - len(set(names) - set(BACKBONES)) > 1:
        raise ConfigError(f"policy {text!r}: give either checkpoint or prune_experts")
    free = [key for rule in rules for key, value in rule.values.items() if value == FREE]
    if len(free) > 1:
        raise ConfigError(f"policy {text!r}: {' and '.join(free)} are both {FREE}; only one knob can be free")
    return PolicySpec(bare, rules)


def _rule(part: str, text: str) -> Rule:
    name, colon, rest = part.partition(":")
    if name not in RULES:
        raise ConfigError(f"policy {text!r}: no rule {name!r}{_meant(name, RULES)}")
    parameters = RULES[name]
    values: dict[str, Value] = {}
    for assignment in rest.split(",") if colon else ():
        key, equals, value = assignment.partition("=")
        if not (key and equals and value):
            raise ConfigError(f"policy {text!r}: {assignment!r} is not of the form key=value")
        if key not in parameters:
            raise ConfigError(f"policy {text!r}: {name} has no parameter {key!r}{_meant(key, parameters)}")
        if key in values:
            raise ConfigError(f"policy {text!r}: {key} is given twice")
        values[key] = _value(value, parameters[key], f"policy {text!r}: {name} {key}={value}")
    missing = [
        key
        for key, parameter in parameters.items()
        if parameter.default is None and not parameter.optional and key not in values
    ]
    if missing:
        raise ConfigError(f"policy {text!r}: {name} needs {' and '.join(missing)}")
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    complete = {key: values.get(key, default) for key, default in defaults.items()}
    return Rule(name, {key: value for key, value in complete.items() if value is not None})


def _value(text: str, parameter: Parameter, where: str) -> Value:
    if text == FREE and parameter.saves_more is None:
        raise ConfigError(f"{where} cannot be free: give a value")
    if text == FREE or parameter.kind is str:
        if parameter.choices and text not in parameter.choices:
            raise ConfigError(f"{where} is none of {', '.join(parameter.choices)}")
        return text
    try:
        number = parameter.kind(text)
    except ValueError:
        kind = "a whole number" if parameter.kind is int else "a number"
        raise ConfigError(f"{where} is not {kind}") from None
    assert not isinstance(number, str)
    if not parameter.low <= number <= parameter.high:  # NaN is outside too
        bounds = (
            f"{parameter.low:g} to {parameter.high:g}"
            if math.isfinite(parameter.high)
            else f"{parameter.low:g} or more"
        )
        raise ConfigError(f"{where} is outside {bounds}")
    return number


def _written(value: Value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f": did you mean {close[0]!r}?" if close else f"; there are {', '.join(known) or 'none'}"
