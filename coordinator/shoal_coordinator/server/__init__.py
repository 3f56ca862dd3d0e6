"""Sessions with devices, the dispatcher's driver, jobs with their inputs and results.

    Connect ---> sessions ---+                        +---> sessions (messages down)
    Exchange --> exchange ---+--> driver --> dispatch +---> deliveries (inputs down)
    SubmitJob -> service --> jobs                     +---> runs (results to disk)

Here belongs what moves bytes and waits. What runs where and when is decided in `dispatch`, which
the `driver` alone calls; `wire` is the border between its values and the protocol's messages.
"""

from shoal_coordinator.server.driver import Relay
from shoal_coordinator.server.server import (
    Coordinator,
    CoordinatorSettings,
    run_coordinator,
    serving,
)

__all__ = ["Coordinator", "CoordinatorSettings", "Relay", "run_coordinator", "serving"]
