"""The operator's settings from the file that the chart writes."""

from pathlib import Path

import yaml

from shoal_api.schema import Object
from shoal_api.shapes import Errors, Invalid
from shoal_operator.reconcile.settings import OperatorSettings


class SettingsRefused(ValueError):
    """A settings file that cannot be used: which file, and why, naming its fields."""

    def __init__(self, file: Path, problem: str) -> None:
        super().__init__(f"{file}: {problem}")
        self.file = file
        self.problem = problem


def read_settings(file: Path) -> OperatorSettings:
    """Read a settings file. Raises `SettingsRefused`."""
    try:
        document: object = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsRefused(file, str(error)) from error
    errors: Errors = []
    settings = Object(OperatorSettings).read(document, (), errors)
    if isinstance(settings, Invalid):
        raise SettingsRefused(file, "; ".join(map(str, errors)))
    return settings
