"""The options of `open`, a JSON object, as arguments of `Engine.open` and fields of `SchedulerConfig`.

Knows no option by name: what these two take in Python is what C programs can give.
"""

import dataclasses
import inspect
import json
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from engines.runtime.engine import Engine
from engines.runtime.scheduler import SchedulerConfig
from plugins.errors import KilnError


def engine_arguments_from_json(text: str) -> dict[str, Any]:
    """Keyword arguments for `Engine.open`. Raises KilnError for an unknown option or a value of another type."""
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise KilnError(f'options is not JSON ({error}); expected an object such as {{"max_running": 8}}') from error
    if not isinstance(options, dict):
        raise KilnError(f'options is {text!r:.80}; expected a JSON object such as {{"max_running": 8}}')
    engine, scheduler = _engine_options(), _scheduler_options()
    for name, value in options.items():
        type_ = (engine | scheduler).get(name)
        if type_ is None:
            raise KilnError(f"options has {name!r}; expected some of {', '.join(sorted(engine | scheduler))}")
        _check(name, value, type_)
    arguments = {name: value for name, value in options.items() if name in engine}
    if shares := {name: value for name, value in options.items() if name in scheduler}:
        arguments["config"] = SchedulerConfig(**shares)
    return arguments


def _engine_options() -> dict[str, Any]:
    hints = get_type_hints(Engine.open)
    parameters = inspect.signature(Engine.open).parameters.values()
    return {p.name: hints[p.name] for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "config"}


def _scheduler_options() -> dict[str, Any]:
    hints = get_type_hints(SchedulerConfig)
    return {field.name: hints[field.name] for field in dataclasses.fields(SchedulerConfig)}


def _check(name: str, value: object, type_: Any) -> None:
    try:
        TypeAdapter(type_).validate_python(value, strict=True)
    except ValidationError as error:
        raise KilnError(f"the option {name} is {value!r:.80}; {error.errors()[0]['msg']}") from error
