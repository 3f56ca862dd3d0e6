"""How many items a plan is made for, where that matters."""

from shoal_cli.local.cut_orders import CutOrder
from shoal_coordinator.storage.inputs import InputsRefused, scan_inputs
from shoal_protocol.partition import TensorSpec


def count_items(order: CutOrder, inputs: tuple[TensorSpec, ...]) -> int | None:
    """What somebody said, else those in the folder of inputs, by its headers. None: nobody knows,
    since there is no folder yet or more come into it; also where its inputs are refused, of which
    the job says why, and where the objective does not ask."""
    if order.items is not None or order.sample is None or order.follows or not order.goal.cold:
        return order.items
    try:
        return len(scan_inputs(order.sample, inputs))
    except InputsRefused:
        return None
