"""Sessions with devices, the dispatcher's driver, the effects of the jobs' machine, the services.

    Connect ---> sessions ---+                         +---> messenger -> sessions (messages down)
    Exchange --> exchange ---+--> driver --> dispatch -+---> deliveries (inputs down)
                                    |  ^               +---> runs (results to disk)
                     job has ended  v  |  dispatch, amend, withdraw
    SubmitJob -> service ---------> jobs --> shoal_coordinator.jobs --> lives --> runs, ledger
    Infer -----> service ---------> item_streams --> stream_runs (results in memory)

Here belongs what moves bytes and waits. What runs where and when is decided in `dispatch`, which
only the `driver` calls; the life of jobs in `shoal_coordinator.jobs`, which only `jobs` calls.
`wire` converts between their values and the protocol's messages.
"""

from shoal_coordinator.server.routes import Relay
from shoal_coordinator.server.server import (
    Coordinator,
    CoordinatorSettings,
    run_coordinator,
    serving,
)

__all__ = ["Coordinator", "CoordinatorSettings", "Relay", "run_coordinator", "serving"]
