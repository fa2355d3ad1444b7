"""Reads a :class:`~rlcompute.config.Config` from a YAML file and `a.b=c` overrides.

Every failure is a :class:`~rlcompute.errors.ConfigError` that names the file or the override, the dotted key, and what
would be right. Later sources win: defaults, then the file, then the overrides in their order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rlcompute.config import Config
from rlcompute.errors import ConfigError

Tree = dict[str, Any]

EXPECTED = {
    "bool_type": "true or false",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "string_type": "a string (quote it if it looks like a number)",
    "tuple_type": "a list",
}


@dataclass(frozen=True)
class Source:
    """One place where values come from: a file or one override."""

    label: str
    values: DictConfig


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Merges a YAML file and overrides into a validated configuration.

    Args:
        path: YAML file; None starts from the defaults, so that the overrides must give the required keys.
        overrides: Strings `section.key=value`, the value in YAML (`data.pairs_per_task=null`).

    Raises:
        ConfigError: The file is missing or not YAML, a key is unknown or missing, or a value is wrong.
    """
    sources = [] if path is None else [_read_file(Path(path))]
    sources += [_parse_override(text) for text in overrides]
    for source in sources:
        _check_keys(source, Config, cast(Tree, OmegaConf.to_container(source.values, resolve=False)), ())
    try:
        merged = OmegaConf.merge(*[source.values for source in sources]) if sources else OmegaConf.create({})
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{_labels(sources)}: {error}") from error
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, sources)) from error


def dump_yaml(config: Config) -> str:
    """The resolved configuration as YAML, every key spelled out; `load_config` reads it back unchanged."""
    text: str = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return text


def fields(model: type[BaseModel] = Config, prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, FieldInfo]]:
    """All leaf fields as (dotted key, field), in the order of their declaration."""
    for name, field in model.model_fields.items():
        section = _section(field)
        if section is None:
            yield ".".join((*prefix, name)), field
        else:
            yield from fields(section, (*prefix, name))


def reference() -> str:
    """The configuration reference in Markdown: one table per section with key, default and meaning."""
    lines = [
        "# Configuration reference",
        "",
        "Generated from `rlcompute/config.py` by `make docs`. Values come from the defaults, then the file given",
        "by `--config`, then `section.key=value` overrides. Paths are relative to the working directory.",
    ]
    for name, field in Config.model_fields.items():
        section = _section(field)
        if section is not None:
            lines += [
                "",
                f"## {name}",
                "",
                section.__doc__ or "",
                "",
                "| key | default | meaning |",
                "|---|---|---|",
            ]
            lines += [
                f"| `{key}` | {_default(leaf)} | {leaf.description} |"
                for key, leaf in fields(section, (name,))
            ]
    return "\n".join(lines) + "\n"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix('...' + chr(10)).strip()}`"


def _section(field: FieldInfo) -> type[BaseModel] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _read_file(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(f"no configuration file {path} (working directory {Path.cwd()}): check --config")
    try:
        values = OmegaConf.load(path)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or error
        raise ConfigError(f"{path}{line}: not valid YAML: {problem}") from error
    except (OSError, UnicodeDecodeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(values, DictConfig):
        raise ConfigError(f"{path}: expected sections such as `run:` and `data:` at the top, found a list")
    return Source(str(path), values)


def _parse_override(text: str) -> Source:
    key, separator, _ = text.partition("=")
    label = f"override `{text}`"
    if not separator or not all(part.isidentifier() for part in key.split(".")):
        raise ConfigError(f"{label}: expected `section.key=value`, for example `grpo.iterations=50`")
    try:
        return Source(label, OmegaConf.from_dotlist([text]))
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{label}: the value is not valid YAML: {error}") from error


def _check_keys(source: Source, model: type[BaseModel], values: Tree, prefix: tuple[str, ...]) -> None:
    for name, value in values.items():
        dotted = ".".join((*prefix, str(name)))
        field = model.model_fields.get(name)
        if field is None:
            raise ConfigError(
                f"{source.label}: unknown key `{dotted}`{_suggestion(dotted, str(name), model, prefix)}"
            )
        section = _section(field)
        if section is None:
            continue
        if not isinstance(value, Mapping):
            inner = ", ".join(section.model_fields)
            raise ConfigError(
                f"{source.label}: `{dotted}` is a section with the keys {inner}; it has no value itself"
            )
        _check_keys(source, section, cast(Tree, value), (*prefix, name))


def _suggestion(dotted: str, name: str, model: type[BaseModel], prefix: tuple[str, ...]) -> str:
    """Did-you-mean: the same name in another section, a near sibling, a near key, else the keys that exist here."""
    everywhere = [key for key, _ in fields()]
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == name]
    near = [".".join((*prefix, match)) for match in difflib.get_close_matches(name, model.model_fields, n=1)]
    close = elsewhere or near or difflib.get_close_matches(dotted, everywhere, n=1)
    if close:
        return f": did you mean `{close[0]}`?"
    return f": `{'.'.join(prefix) or 'the top level'}` has the keys {', '.join(model.model_fields)}"


def _explain(error: ValidationError, sources: Sequence[Source]) -> str:
    return "\n".join(_explain_one(cast(Tree, detail), sources) for detail in error.errors())


def _explain_one(detail: Tree, sources: Sequence[Source]) -> str:
    location = tuple(str(part) for part in detail["loc"])
    message, value = str(detail["msg"]), detail["input"]
    if not location:
        return f"{_labels(sources)}: {message.removeprefix('Value error, ')}"
    dotted = ".".join(location)
    description = _description(dotted)
    if detail["type"] == "missing":
        return f"{_labels(sources)}: `{dotted}` is required{description}"
    expected = EXPECTED.get(detail["type"])
    wrong = (
        f"expected {expected}"
        if expected
        else message.replace("Input should", "it must").replace("String", "it")
    )
    return f"{_origin(location, sources)}: `{dotted}` is {value!r}, but {wrong}{description}"


def _description(dotted: str) -> str:
    matches = [field.description for key, field in fields() if dotted == key or dotted.startswith(f"{key}.")]
    return f". {matches[0]}" if matches else ""


def _origin(location: Sequence[str], sources: Sequence[Source]) -> str:
    """The last source that set the value, since later sources win."""
    for source in reversed(sources):
        node: Any = OmegaConf.to_container(source.values, resolve=False)
        for part in location:
            if not isinstance(node, Mapping) or part not in node:
                break
            node = node[part]
            if not isinstance(node, Mapping):
                return source.label
    return _labels(sources)


def _labels(sources: Sequence[Source]) -> str:
    return ", ".join(source.label for source in sources) or "configuration"
