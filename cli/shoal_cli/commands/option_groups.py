"""Options that belong together, declared once as the fields of a dataclass.

@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    coordinator: Annotated[str | None, typer.Option(...)] = None
    work: Annotated[Path | None, typer.Option(...)] = None

def why(job: Job, *, target: Target) -> None: ...     # shoal why JOB --coordinator ... --work ...
"""

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command as typer takes it: in the place of each group, the options of the group."""
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        group = parameter.annotation
        if dataclasses.is_dataclass(group) and isinstance(group, type):
            groups[parameter.name] = group
            options += inspect.signature(group).parameters.values()
        else:
            options.append(parameter)

    @wraps(command)
    def called(**given: Any) -> None:
        values = {
            name: group(**{each.name: given.pop(each.name) for each in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        command(**given, **values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    signature = inspect.Signature([each.replace(kind=keyword) for each in options])
    called.__signature__ = signature  # type: ignore[attr-defined] # what typer reads
    return called


def given(group: Any) -> list[str]:
    """The options of a group that are not as they are by default: `--task-seconds`."""
    return [
        f"--{field.name.replace('_', '-')}"
        for field in dataclasses.fields(group)
        if getattr(group, field.name) != field.default
    ]
