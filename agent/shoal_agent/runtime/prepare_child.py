"""The child process that opens a fragment before the agent does: `python -m` this, for one order.

What a model can do to ONNX Runtime while it is optimised, packed and opened happens here: ending
the process with a signal, taking all memory, taking for ever. The agent learns it from how this
process ends. It imports little, reads one order from its arguments, and writes one line of JSON.

Its own memory is bounded twice. A thread ends the process when its anonymous memory exceeds the
limit. `RLIMIT_DATA` bounds what could be allocated between two polls: it counts private writable
mappings, and ONNX Runtime maps weights so, hence their size comes on top. Should memory run out all
the same, the kernel ends this process first, not the agent.
"""

import gc
import json
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shoal_agent.runtime.process_memory import trim
from shoal_protocol.manifest import MODEL, WEIGHTS, weight_files
from shoal_protocol.parents import end_with_parent

if TYPE_CHECKING:
    from shoal_agent.runtime.recipes import Recipe

NO_MEMORY: Final = 3
"""The exit status of a process that reached its limit."""
FAILED: Final = 4
"""That of one that wrote why it could not do it."""
UNSAVED: Final = 5
"""That of one that wrote why the disk did not take what was prepared."""
MANIFEST: Final = "prepared.json"
_POLL_SECONDS: Final = 0.005
_LEAST_EXTERNAL_BYTES: Final = 1024
_ERROR_CHARACTERS: Final = 400
_FIELDS: Final = re.compile(r"^(VmHWM|VmRSS|VmData|RssAnon):\s+(\d+) kB", re.MULTILINE)
_OUT_OF_MEMORY: Final = ("bad_alloc", "Failed to allocate memory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to open: the models at these offsets of `file`, or the whole file where there are none.
    Their weights are beside it. Those that have quantised weights to be dequantised say so.

    With `part`, they are optimised, and saved in that folder, which exists and is empty: model `i`
    as `i/model.onnx` and `i/weights.bin`. Without, they are opened as the agent would. `results`
    are the names of what the fragment gives.
    """

    parent: int
    file: str
    ranges: Sequence[Sequence[int]]
    dequantises: Sequence[bool]
    part: str | None
    results: Sequence[str]
    key: str
    limit_bytes: int
    disk_bytes: int

    def as_argument(self) -> str:
        return json.dumps(asdict(self))


def main(argument: str) -> int:
    """Carry an order out; the exit status."""
    order = Order(**json.loads(argument))
    end_with_parent(signal.SIGKILL, order.parent)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (order.disk_bytes, order.disk_bytes))
    weights_bytes = sum(map(_size, weight_files(Path(order.file).parent)))
    threading.Thread(target=_watch, args=(order.limit_bytes,), daemon=True).start()
    try:
        import onnxruntime  # noqa: PLC0415 - under the limit

        gc.freeze()  # `_free` need not look through what was imported
        _limit_data(order.limit_bytes + 2 * weights_bytes)
        onnxruntime.set_default_logger_severity(4)
        report = _prepare(order) if order.part is not None else _try(order)
    except MemoryError:
        return NO_MEMORY
    except Exception as error:  # the runtime's exceptions have no common base but this
        text = str(error)
        if any(sign in text for sign in _OUT_OF_MEMORY):
            return NO_MEMORY
        report = {"error": text[:_ERROR_CHARACTERS]}
        status = UNSAVED if isinstance(error, OSError) and order.part is not None else FAILED
    else:
        status = 0
    print(json.dumps(report), flush=True)
    return status


# ---- opening -------------------------------------------------------------------------------------


def _try(order: Order) -> dict[str, Any]:
    """Open the models as the agent does without preparation."""
    from shoal_agent.runtime.recipes import AS_IT_IS, DEQUANTISING  # noqa: PLC0415 - as above

    for model, dequantises in zip(_models(order), order.dequantises, strict=True):
        _open(model, DEQUANTISING if dequantises else AS_IT_IS, Path(order.file).parent)
        _free()
    return {}


def _prepare(order: Order) -> dict[str, Any]:
    """Save the models optimised, with a manifest that says what opening each takes."""
    assert order.part is not None
    part = Path(order.part)
    folders = [part / str(index) for index in range(max(1, len(order.ranges)))]
    rows = _save(order, folders)
    models = [
        _opened(folder, model) | {"files": _files(folder), "reads_rows": reads_rows}
        for folder, model, reads_rows in zip(folders, _models(order), rows, strict=True)
    ]
    body = json.dumps({"version": 1, "key": order.key, "models": models}, sort_keys=True)
    manifest = part / MANIFEST
    manifest.write_text(f"{sha256(body.encode()).hexdigest()}\n{body}", encoding="utf-8")
    for path in (manifest, *folders, part):
        _sync(path)
    return {}


def _save(order: Order, folders: Sequence[Path]) -> list[bool]:
    """Save each model in its folder; whether they have tables of which items read rows."""
    from shoal_agent.runtime import held_weights, layouts  # noqa: PLC0415 - under the limit
    from shoal_agent.runtime.external_data import align  # noqa: PLC0415 - as above
    from shoal_agent.runtime.onnx_subset import reads_rows  # noqa: PLC0415 - as above
    from shoal_agent.runtime.recipes import SAVING  # noqa: PLC0415 - as above
    from shoal_protocol.onnx_subset_pb2 import Model  # noqa: PLC0415 - as above

    saved, marked, tables = [], [], []
    contents = zip(folders, _models(order), order.dequantises, strict=True)
    for folder, content, dequantises in contents:
        model = Model.FromString(content)
        tables.append(reads_rows(model.graph))
        marked.append(layouts.mark(model))
        folder.mkdir(mode=0o700)
        held = held_weights.hold(model) if dequantises else frozenset[str]()
        _open(model.SerializeToString(), SAVING, Path(order.file).parent, saved=folder)
        _free()
        (folder / WEIGHTS).touch()  # a model without weights has none
        model = Model.FromString((folder / MODEL).read_bytes())
        align(folder, model, rows=tables[-1])
        layouts.unmark(model)
        held_weights.release(model, held)
        saved.append(model)
    layouts.join(saved, marked, order.results)
    for folder, model in zip(folders, saved, strict=True):
        (folder / MODEL).write_bytes(model.SerializeToString())
    return tables


def _models(order: Order) -> Iterator[bytes]:
    if not order.ranges:
        yield Path(order.file).read_bytes()
    with open(order.file, "rb") as file:
        for offset, size in order.ranges:
            yield os.pread(file.fileno(), size, offset)


def _open(
    model: str | bytes, recipe: "Recipe", weights: Path | None = None, saved: Path | None = None
) -> Any:
    """A session; `weights` is the folder of external data where `model` is no path, and `saved`
    the folder in which to save what is optimised and packed."""
    import onnxruntime  # noqa: PLC0415 - as above

    options = recipe.options(threads=1)
    options.enable_cpu_mem_arena = False
    if isinstance(model, bytes):
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(weights))
    if saved is not None:
        external = "session.optimized_model_external_initializers"
        options.optimized_model_filepath = str(saved / MODEL)
        options.add_session_config_entry(f"{external}_file_name", WEIGHTS)
        options.add_session_config_entry(
            f"{external}_min_size_in_bytes", str(_LEAST_EXTERNAL_BYTES)
        )
        options.add_session_config_entry(
            "session.save_external_prepacked_constant_initializers", "1"
        )
    return onnxruntime.InferenceSession(
        model,
        options,
        providers=["CPUExecutionProvider"],
        disabled_optimizers=list(recipe.disabled),
    )


def _free() -> None:
    gc.collect()
    trim()


def _measured(folder: Path, recipe: "Recipe") -> dict[str, int]:
    """What opening a prepared model takes at most, and what of that remains, anonymous or mapped.
    A crash here is one of the prepared form, not of the model."""
    with suppress(OSError):  # a hardened container: the mark of the saving counts then
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _memory()
    session = _open(str(folder / MODEL), recipe)
    trim()
    after = _memory()
    mapped = _mapped_bytes(folder / WEIGHTS)
    del session
    _free()
    return {
        "opening_bytes": max(0, after["VmHWM"] - before["VmRSS"]),
        "anonymous_bytes": max(0, after["RssAnon"] - before["RssAnon"]),
        "mapped_bytes": mapped,
    }


def _mapped_bytes(path: Path) -> int:
    name = str(path.resolve())  # as the kernel knows it
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        ranges = [line.split()[0].split("-") for line in maps if line.rstrip().endswith(name)]
    return sum(int(end, 16) - int(start, 16) for start, end in ranges)


def _opened(folder: Path, model: bytes) -> dict[str, dict[str, int]]:
    """`prepared.Opened` of both ways to open it."""
    from shoal_agent.runtime.external_data import mapped_bytes  # noqa: PLC0415 - as above
    from shoal_agent.runtime.recipes import PREPARED, PREPARED_UNPACKED  # noqa: PLC0415 - as above

    packed, unpacked = (_measured(folder, recipe) for recipe in (PREPARED, PREPARED_UNPACKED))
    # Packed forms are mapped here, too, but never read.
    unpacked["mapped_bytes"] = mapped_bytes((folder / MODEL).read_bytes())
    before = mapped_bytes(model)
    for each in (packed, unpacked):
        each["growth_bytes"] = each.pop("mapped_bytes") + each["anonymous_bytes"] - before
    return {"packed": packed, "unpacked": unpacked}


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
        time.sleep(_POLL_SECONDS)
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
