"""Run a model on a pool of devices, from Python.

    import shoal

    with shoal.pool(devices=3, budget="64Mi") as pool:
        model = pool.load("model.onnx")
        y = model.run({"x": x})["y"]
        for result in model.map(items):
            ...

`pool` is for ordinary code, `async_pool` for code that runs in an event loop. A pool starts its
coordinator and agents once, and they stay until it is closed, so that a call costs milliseconds.

asynchronous   the implementation: `AsyncPool`, `AsyncModel`
synchronous    the same for ordinary code: `Pool`, `Model`
running        what a pool is made of, wherever its devices are
processes      a pool's processes on this machine, from start to stop
remote         the devices of a coordinator, as a pool
loading        a model's file: cut and planned
items          the items of a model, over one call to the coordinator
errors         everything that is raised
"""

from shoal.asynchronous import AsyncModel, AsyncPool, async_pool
from shoal.errors import ItemFailed, ModelFailed, PoolClosed, PoolFailed, ShoalError
from shoal.synchronous import Model, Pool, pool

__all__ = [
    "AsyncModel",
    "AsyncPool",
    "ItemFailed",
    "Model",
    "ModelFailed",
    "Pool",
    "PoolClosed",
    "PoolFailed",
    "ShoalError",
    "async_pool",
    "pool",
]
