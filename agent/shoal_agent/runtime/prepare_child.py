"""The child process that opens a fragment before the agent does: `python -m` this, for one order.

What a model can do to ONNX Runtime while it is optimised, packed and opened happens here: ending
the process with a signal, taking all memory, taking for ever. The agent learns it from how this
process ends. It imports little, reads one order from its arguments, and writes one line of JSON.

Its own memory is bounded twice. A thread ends the process when its anonymous memory exceeds the
limit. `RLIMIT_DATA` bounds what could be allocated between two looks: it counts private writable
mappings, and ONNX Runtime maps weights so, hence their size comes on top. Should memory run out all
the same, the kernel ends this process first, not the agent.
"""

import gc
import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from shoal_agent.runtime.process_memory import exit_with_parent, trim
from shoal_protocol.manifest import MODEL, WEIGHTS

NO_MEMORY: Final = 3
"""The exit status of a process that reached its limit."""
FAILED: Final = 4
"""That of one that wrote why it could not do it."""
MANIFEST: Final = "prepared.json"
_LOOK_SECONDS: Final = 0.005
_LEAST_EXTERNAL_BYTES: Final = "1024"
_ERROR_CHARACTERS: Final = 400
_FIELDS: Final = re.compile(r"^(VmHWM|VmRSS|VmData|RssAnon):\s+(\d+) kB", re.MULTILINE)
_OUT_OF_MEMORY: Final = ("bad_alloc", "Failed to allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to open: the models at these offsets of `file`, or the whole file where there are none.
    Their weights are beside it.

    With `part`, they are optimised, and saved in that folder, which exists and is empty: model `i`
    as `i/model.onnx` and `i/weights.bin`. Without, they are opened as the agent would.
    """

    parent: int
    file: str
    ranges: Sequence[Sequence[int]]
    part: str | None
    key: str
    limit_bytes: int
    disk_bytes: int
    copying_optimizers: Sequence[str]

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


def main(argument: str) -> int:
    """Carry an order out; the exit status."""
    order = Order(**json.loads(argument))
    exit_with_parent(order.parent)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (order.disk_bytes, order.disk_bytes))
    weights_bytes = _size(Path(order.file).with_name(WEIGHTS))
    threading.Thread(target=_watch, args=(order.limit_bytes,), daemon=True).start()
    try:
        import onnxruntime  # noqa: PLC0415 - under the limit

        _limit_data(order.limit_bytes + 2 * weights_bytes)
        onnxruntime.set_default_logger_severity(4)
        report = _prepare(order) if order.part is not None else _try(order)
    except MemoryError:
        return NO_MEMORY
    except Exception as error:  # the runtime's exceptions have no common base but this
        text = str(error)
        if any(sign in text for sign in _OUT_OF_MEMORY):
            return NO_MEMORY
        report, status = {"error": text[:_ERROR_CHARACTERS]}, FAILED
    else:
        status = 0
    print(json.dumps(report), flush=True)
    return status


# ---- opening -------------------------------------------------------------------------------------


def _try(order: Order) -> dict[str, Any]:
    """Open the models as the agent does without preparation."""
    for model in _models(order):
        _session(model, Path(order.file).parent, _unprepared(), order.copying_optimizers)
        gc.collect()
        trim()
    return {}


def _prepare(order: Order) -> dict[str, Any]:
    """Save the models optimised, with a manifest that says what opening each takes."""
    from shoal_agent.runtime.external_data import align  # noqa: PLC0415 - the agent imports this module

    assert order.part is not None
    part = Path(order.part)
    models = []
    for index, model in enumerate(_models(order)):
        folder = part / str(index)
        folder.mkdir(mode=0o700)
        _session(model, Path(order.file).parent, _saving(folder), ())
        gc.collect()
        trim()
        (folder / WEIGHTS).touch()  # a model without weights has none
        align(folder)
        # In a run of its own: a crash here is one of the prepared form, not of the model.
        models.append(_measured(folder) | {"files": _files(folder)})
    body = json.dumps({"version": 1, "key": order.key, "models": models}, sort_keys=True)
    manifest = part / MANIFEST
    manifest.write_text(f"{sha256(body.encode()).hexdigest()}\n{body}", encoding="utf-8")
    for path in (manifest, *(part / str(i) for i in range(len(models))), part):
        _sync(path)
    return {}


def _models(order: Order) -> list[str | bytes]:
    if not order.ranges:
        return [order.file]
    with open(order.file, "rb") as file:
        return [os.pread(file.fileno(), size, offset) for offset, size in order.ranges]


def _session(model: str | bytes, weights: Path, options: Any, disabled: Sequence[str]) -> Any:
    import onnxruntime  # noqa: PLC0415 - as above

    if isinstance(model, bytes):
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(weights))
    return onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], disabled_optimizers=list(disabled)
    )


def _options(level: str, entries: Mapping[str, str]) -> Any:
    import onnxruntime  # noqa: PLC0415 - as above

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    return options


def _unprepared() -> Any:
    return _options("ORT_ENABLE_EXTENDED", {"session.disable_prepacking": "1"})


def _saving(folder: Path) -> Any:
    external = "session.optimized_model_external_initializers"
    options = _options(
        "ORT_ENABLE_ALL",
        {
            f"{external}_file_name": WEIGHTS,
            f"{external}_min_size_in_bytes": _LEAST_EXTERNAL_BYTES,
            "session.save_external_prepacked_constant_initializers": "1",
        },
    )
    options.optimized_model_filepath = str(folder / MODEL)
    return options


def _measured(folder: Path) -> dict[str, int]:
    """What opening a prepared model takes at most, and what of it remains in anonymous memory."""
    with suppress(OSError):  # a hardened container: the mark of the saving counts then
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _memory()
    session = _session(str(folder / MODEL), folder, _options("ORT_DISABLE_ALL", {}), ())
    trim()
    after = _memory()
    del session
    gc.collect()
    trim()
    return {
        "opening_bytes": max(0, after["VmHWM"] - before["VmRSS"]),
        "anonymous_bytes": max(0, after["RssAnon"] - before["RssAnon"]),
    }


def _files(folder: Path) -> dict[str, dict[str, str | int]]:
    """Digests and sizes; the bytes are durable."""
    files: dict[str, dict[str, str | int]] = {}
    for name in (MODEL, WEIGHTS):
        path = folder / name
        with path.open("rb") as file:
            digest = sha256()
            while data := file.read(1 << 20):
                digest.update(data)
        files[name] = {"sha256": digest.hexdigest(), "bytes": _size(path)}
        _sync(path)
    return files


# ---- limits --------------------------------------------------------------------------------------


def _watch(limit_bytes: int) -> None:
    while _memory()["RssAnon"] <= limit_bytes:
        time.sleep(_LOOK_SECONDS)
    os._exit(NO_MEMORY)


def _limit_data(more_bytes: int) -> None:
    limit = _memory()["VmData"] + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _memory() -> dict[str, int]:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return {name: int(kib) << 10 for name, kib in _FIELDS.findall(status)}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    os._exit(status)  # nothing is left to be freed in order
