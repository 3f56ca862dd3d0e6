"""The kinds that users write and `kubectl` shows, one module each, as declarations only.

Not here: what a field may hold in general (`api.shapes`), parsing (`api.schema`), decisions.
"""

from dataclasses import dataclass
from typing import Final

from shoal_api.kinds.device import Device
from shoal_api.kinds.device_pool import DevicePool
from shoal_api.kinds.inference_job import InferenceJob
from shoal_api.kinds.model import Model
from shoal_api.kinds.partition import Partition
from shoal_api.kinds.placement import Placement

AnyKind = Model | DevicePool | Device | Partition | Placement | InferenceJob


@dataclass(frozen=True, slots=True, kw_only=True)
class KindNames:
    """What `kubectl` calls a kind; `written` by users, or by the operator only."""

    cls: type[AnyKind]
    plural: str
    short: str
    written: bool = True

    @property
    def singular(self) -> str:
        return self.cls.__name__.lower()


KINDS: Final = {
    names.cls.__name__: names
    for names in (
        KindNames(cls=Model, plural="models", short="mdl"),
        KindNames(cls=DevicePool, plural="devicepools", short="dpool"),
        KindNames(cls=Partition, plural="partitions", short="part"),
        KindNames(cls=Placement, plural="placements", short="plc"),
        KindNames(cls=InferenceJob, plural="inferencejobs", short="ij"),
        KindNames(cls=Device, plural="devices", short="dev", written=False),
    )
}

__all__ = [
    "KINDS",
    "AnyKind",
    "Device",
    "DevicePool",
    "InferenceJob",
    "KindNames",
    "Model",
    "Partition",
    "Placement",
]
