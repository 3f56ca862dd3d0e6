"""What a device may send: tensors of tasks that it was given, as the partition document declares
them.

A device of the pool is trusted with its own tasks, not with those of others. It sends the results
of a task, and activations along the routes of a task, only while it has not answered the
instruction; so the instructions that a session has not answered are all that has to be known.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from shoal_coordinator.dispatch import instructions as ins
from shoal_protocol.frames import MalformedFrame, TransferError
from shoal_protocol.partition import TensorSpec
from shoal_protocol.units import Bytes, format_bytes
from shoal_protocol.v1.tensors_pb2 import (
    STRING,
    Acknowledgement,
    Activation,
    DataType,
    Layout,
    TensorHeader,
)

DYNAMIC_TENSOR_BYTES: Final = 1 << 27
"""The most that one tensor of a result may have, decoded, where its declared shape does not fix its
size: a dynamic axis, an unknown rank, or text."""
_NUMPY_NAMES: Final = {"float": "float32", "double": "float64"}
"""Of types that ONNX calls otherwise than who made the arrays."""


def check_result_given(given: Iterable[object], activation: Activation) -> None:
    """Raise `TransferError` unless one of these instructions has the result of `activation`."""
    wanted = _task_of(activation)
    if not any(isinstance(order, ins.Execute) and _task(order) == wanted for order in given):
        key = activation.key
        raise _not_given(f"item {key.item} of {key.job[:80]} was not given to this device")


def check_route_given(given: Iterable[object], activation: Activation) -> None:
    """Raise `TransferError` unless one of these instructions sends `activation` to its device."""
    key, wanted = activation.key, _task_of(activation)
    route = (key.consumer, activation.device)
    for order in given:
        match order:
            case ins.Execute() if _task(order) == wanted and route in order.routes:
                return
            case ins.Forward(job=job, epoch=epoch, item=item, producer=producer) if (
                job,
                epoch,
                item,
                producer,
            ) == wanted and (order.consumer, order.target) == route:
                return
            case _:
                pass
    raise _not_given(
        f"item {key.item} of {key.job[:80]} is not this device's to send to {activation.device}"
    )


def check_tensors(
    activation: Activation | Layout,
    names: Iterable[str],
    specs: Mapping[str, TensorSpec],
    *,
    most_bytes: int = DYNAMIC_TENSOR_BYTES,
) -> None:
    """Raise `MalformedFrame` unless an activation holds exactly the tensors of these names, each of
    its declared type and shape. `most_bytes` bounds each whose shape does not fix its size."""
    wanted = sorted(names)
    found = sorted(tensor.name for tensor in activation.tensors)
    if found != wanted:
        given = f"tensors {', '.join(found)[:200]}" if found else "no tensors"
        raise MalformedFrame(f"{given} where {', '.join(wanted)} belong")
    for tensor in activation.tensors:
        _check_tensor(tensor, specs[tensor.name], most_bytes)


def _check_tensor(tensor: TensorHeader, spec: TensorSpec, most_bytes: int) -> None:
    dtype = DataType.Name(tensor.dtype).lower()
    # The runtime has no type of its own for bfloat16: devices send its bits.
    known = spec.dtype != "undefined"
    if known and dtype != spec.dtype and (dtype, spec.dtype) != ("uint16", "bfloat16"):
        given, wanted = (_NUMPY_NAMES.get(name, name) for name in (dtype, spec.dtype))
        raise MalformedFrame(f"tensor {spec.name}: type {given} is not {wanted}")
    if spec.shape is not None:
        matches = len(tensor.shape) == len(spec.shape) and all(
            declared == size
            for declared, size in zip(spec.shape, tensor.shape, strict=True)
            if isinstance(declared, int)
        )
        if not matches:
            declared = ",".join("?" if axis is None else str(axis) for axis in spec.shape)
            sizes = ",".join(map(str, tensor.shape))
            raise MalformedFrame(f"tensor {spec.name}: shape [{sizes}] does not fit [{declared}]")
    fixed = spec.shape is not None and all(isinstance(axis, int) for axis in spec.shape)
    if (not fixed or tensor.dtype == STRING) and tensor.decoded_bytes > most_bytes:
        have = format_bytes(Bytes(most_bytes))
        raise MalformedFrame(
            f"tensor {spec.name}: {format_bytes(Bytes(tensor.decoded_bytes))} where its declared "
            f"shape is dynamic; at most {have} are taken then"
        )


def _task(order: ins.Execute) -> tuple[str, int, int, int]:
    return order.job, order.epoch, order.item, order.stage


def _task_of(activation: Activation) -> tuple[str, int, int, int]:
    key = activation.key
    return key.job, key.epoch, key.item, key.producer


def _not_given(reason: str) -> TransferError:
    return TransferError(reason, outcome=Acknowledgement.STALE)
