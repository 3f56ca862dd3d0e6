"""Drift detection: whether an object still has what was applied to it.

A new operator knows from the annotation which manifest was applied, but not whether somebody has
edited the object since. Everything that the manifest says must be in the object; what else is there
are defaults, and what others have added. Where this is too strict, an object is applied once more,
which changes nothing.
"""

import json
from collections.abc import Mapping

from shoal_api.kinds import KINDS
from shoal_api.schema import parse
from shoal_operator.controller.cache import Own, State
from shoal_operator.controller.foreign import WorkloadState
from shoal_operator.reconcile.decision import Manifest


def matches(manifest: Manifest, state: State) -> bool:
    """Whether a watched object's spec is still as in its manifest."""
    match state:
        case WorkloadState(spec=spec):
            return includes(json.loads(spec), manifest.get("spec"))
        case Own(value=value) if value is not None:
            wanted = parse(KINDS[state.identity.kind].cls, manifest)
            return not isinstance(wanted, tuple) and wanted.spec == value.spec
        case _:
            return False


def includes(there: object, wanted: object) -> bool:
    """Whether JSON includes all that is wanted. The API server leaves out what is empty, 0 or
    false.
    """
    match wanted:
        case Mapping():
            table: Mapping[object, object] = there if isinstance(there, Mapping) else {}
            return all(includes(table.get(name), value) for name, value in wanted.items())
        case list():
            items = there if isinstance(there, list) else []
            same = len(items) == len(wanted)
            return same and all(
                includes(item, each) for item, each in zip(items, wanted, strict=True)
            )
        case _:
            return there == wanted or (there is None and not wanted)
