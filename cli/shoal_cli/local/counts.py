"""How many items a plan is made for, where that matters."""

from shoal_cli.local.cut_orders import CutOrder
from shoal_coordinator.storage.inputs import InputsRefused, scan_inputs
from shoal_protocol.partition import TensorSpec


def count_items(order: CutOrder, inputs: tuple[TensorSpec, ...]) -> int | None:
    """What somebody said, else those in the folder of inputs, by its headers. None: nobody knows,
    since there is no folder yet or more come into it; also where its inputs are refused, of which
    the job says why, and where the objective does not ask."""
    if order.sample is None or not are_counted(order):
        return order.items
    try:
        return len(scan_inputs(order.sample, inputs))
    except InputsRefused:
        return None


def are_counted(order: CutOrder) -> bool:
    """Whether a plan depends on how many items there are in the folder of inputs."""
    is_open = order.items is None and not order.follows
    return is_open and order.sample is not None and order.goal.cold
