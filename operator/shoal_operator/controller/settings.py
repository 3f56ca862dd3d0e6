"""The operator's settings from the file that the chart writes."""

from collections.abc import Mapping
from pathlib import Path

import yaml

from shoal_operator.reconcile.settings import Images, OperatorSettings, Place
from shoal_protocol.units import Bytes, parse_quantity


class SettingsRefused(ValueError):
    """A settings file that cannot be used: which file, which field, why."""

    def __init__(self, file: Path, where: str, problem: str) -> None:
        super().__init__(f"{file}: {where}: {problem}" if where else f"{file}: {problem}")
        self.file = file
        self.where = where
        self.problem = problem


def read_settings(file: Path) -> OperatorSettings:
    """Read a settings file. Raises `SettingsRefused`, naming the field."""
    try:
        document: object = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsRefused(file, "", str(error)) from error
    top = _Reader(file, "", document)
    settings = OperatorSettings(
        images=_images(top.reader("images")),
        enrolment=top.text("enrolment"),
        namespace=top.text("namespace"),
        operator_labels=top.reader("operatorLabels").texts(),
        agent_floor=top.size("agentFloor"),
        coordinator_memory=top.size("coordinatorMemory"),
        worker_memory=top.size("workerMemory"),
        worker_disk=top.size("workerDisk"),
        coordinator_place=_place(top.reader("coordinatorPlace")),
        worker_place=_place(top.reader("workerPlace")),
        cert_manager=top.flag("certManager"),
        pod_monitors=top.flag("podMonitors"),
        monitor_labels=top.reader("monitorLabels").texts(),
        monitor_interval=top.text("monitorInterval", empty=True),
        network_policies=top.flag("networkPolicies"),
        metrics_from=top.tables("metricsFrom"),
        offline=top.flag("offline"),
        other_groups=top.words("otherGroups"),
    )
    top.refuse_unknown()
    return settings


def _images(reader: "_Reader") -> Images:
    images = Images(
        coordinator=reader.text("coordinator"),
        worker=reader.text("worker"),
        agent=reader.text("agent"),
        pull_policy=reader.text("pullPolicy"),
        pull_secrets=reader.words("pullSecrets"),
    )
    reader.refuse_unknown()
    return images


def _place(reader: "_Reader") -> Place:
    place = Place(
        node_selector=reader.reader("nodeSelector").texts(),
        tolerations=reader.tables("tolerations"),
        affinity=reader.reader("affinity").table(),
    )
    reader.refuse_unknown()
    return place


class _Reader:
    """A mapping of the file; every complaint names file and field."""

    def __init__(self, file: Path, where: str, value: object) -> None:
        if not isinstance(value, Mapping):
            raise SettingsRefused(file, where, "is no mapping")
        self._file = file
        self._where = where
        self._value = value
        self._known: set[str] = set()

    def text(self, name: str, *, empty: bool = False) -> str:
        value = self._field(name)
        if not isinstance(value, str) or not (value or empty):
            raise self._refused(name, f"{value!r} is no text")
        return value

    def flag(self, name: str) -> bool:
        value = self._field(name)
        if not isinstance(value, bool):
            raise self._refused(name, f"{value!r} is neither true nor false")
        return value

    def size(self, name: str) -> Bytes:
        value = self._field(name)
        try:
            return Bytes(int(parse_quantity(str(value))))
        except ValueError as error:
            raise self._refused(name, f"{value!r} is no quantity such as 64Mi") from error

    def words(self, name: str) -> tuple[str, ...]:
        value = self._field(name)
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise self._refused(name, f"{value!r} is no list of texts")
        return tuple(value)

    def texts(self) -> Mapping[str, str]:
        if not all(isinstance(each, str) for pair in self._value.items() for each in pair):
            raise SettingsRefused(self._file, self._where, "is no mapping of texts")
        return dict(self._value)

    def table(self) -> Mapping[str, object]:
        return {str(name): value for name, value in self._value.items()}

    def tables(self, name: str) -> tuple[Mapping[str, object], ...]:
        value = self._field(name)
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self._refused(name, f"{value!r} is no list of mappings")
        return tuple(value)

    def reader(self, name: str) -> "_Reader":
        where = f"{self._where}.{name}" if self._where else name
        return _Reader(self._file, where, self._field(name))

    def refuse_unknown(self) -> None:
        """A field that nobody has asked for is a mistake of spelling."""
        for name in self._value:
            if name not in self._known:
                raise self._refused(str(name), "there is no such field")

    def _field(self, name: str) -> object:
        self._known.add(name)
        if name not in self._value:
            raise self._refused(name, "is missing")
        return self._value[name]

    def _refused(self, name: str, problem: str) -> SettingsRefused:
        where = f"{self._where}.{name}" if self._where else name
        return SettingsRefused(self._file, where, problem)
