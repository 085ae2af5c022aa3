"""Settings from flags, environment and a YAML file, in this order of precedence, into a frozen
dataclass. Whatever is not a known setting is refused by name."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
import yaml
from pydantic import TypeAdapter, ValidationError

Config = TypeVar("Config")

_SERVICE_LINK = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?")
"""What Kubernetes sets for a Service named legato-router, in every pod of its namespace."""


class SettingsError(Exception):
    """A setting that cannot be used; the text names it, where it came from, and why."""


def load(
    config_type: type[Config],
    section: str,
    flags: Mapping[str, Any],
    *,
    file: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """The configuration of ``section`` ("worker", "router").

    ``flags`` whose value is None were not given. Environment names are LEGATO_SECTION_FIELD; lists
    there are comma-separated. The file holds one mapping per section.
    """
    hints = get_type_hints(config_type)
    names = {field.name for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for source, given in (
        (f"{file}", _from_file(file, section) if file else {}),
        ("environment", _from_environ(section, environ, hints)),
        ("flag", {name: value for name, value in flags.items() if value is not None}),
    ):
        for name, value in given.items():
            if name not in names:
                known = ", ".join(sorted(names))
                raise SettingsError(
                    f"{source}: unknown setting {name!r} of {section}; known: {known}"
                )
            try:
                if isinstance(value, bool) and hints[name] is not bool:  # YAML's yes is no 1
                    raise ValueError("must not be true or false")
                values[name] = TypeAdapter(hints[name]).validate_python(value)
            except ValueError as error:
                wrong = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
                raise SettingsError(f"{source}: {section}.{name} = {value!r}: {wrong}") from None
    try:
        return config_type(**values)
    except ValueError as error:
        raise SettingsError(f"{section}: {error}") from None


def _from_file(path: Path, section: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise SettingsError(f"{path}: {error}") from None
    if not isinstance(content, dict):
        raise SettingsError(f"{path}: must be a mapping of sections (worker, router)")
    unknown = sorted(set(content) - {"worker", "router"})
    if unknown:
        raise SettingsError(f"{path}: unknown section {unknown[0]!r}; known: router, worker")
    values = content.get(section) or {}
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: section {section!r} must be a mapping")
    return values


def _from_environ(
    section: str, environ: Mapping[str, str], hints: Mapping[str, Any]
) -> dict[str, Any]:
    prefix = f"LEGATO_{section.upper()}_"
    values: dict[str, Any] = {}
    for key, value in environ.items():
        if key.startswith(prefix) and not _SERVICE_LINK.fullmatch(key.removeprefix(prefix)):
            name = key.removeprefix(prefix).lower()
            is_list = str(hints.get(name, "")).startswith("tuple")
            values[name] = [part for part in value.split(",") if part] if is_list else value
    return values


def with_options(
    config_type: type[Any], help_texts: Mapping[str, str]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command one option per field of ``config_type``. The command takes them as one
    mapping, ``flags``; what was not given is None there, so that file and environment count."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(config_type)
        options = []
        for field in dataclasses.fields(config_type):
            base = hints[field.name]
            flag = "--" + field.name.replace("_", "-")
            default = field.default
            shown = ",".join(default) if isinstance(default, tuple) else str(default)
            text = help_texts[field.name] + (
                f" [default: {shown}]" if default not in (None, "") else ""
            )
            if base is bool:
                flag = f"{flag}/--no-{field.name.replace('_', '-')}"
            annotation: Any = list[str] | None if str(base).startswith("tuple") else base | None
            options.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=None,
                    annotation=Annotated[
                        annotation, typer.Option(flag, help=text, show_default=False)
                    ],
                )
            )
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "flags"
        ]
        names = {option.name for option in options}

        def run(**arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in names}
            command(flags=flags, **arguments)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + options
        )
        return run

    return decorate
