"""Fragments are opened in a child process before the agent opens them, and prepared for speed.

ONNX Runtime computes fastest with weights in the layouts of this processor: packed matrices,
blocked convolutions, operators fused, constants folded. At load it makes those in anonymous memory,
a second copy of the weights. The child makes them once and saves them, so that the agent maps them:
the speed of a default load, no copy.

The order of events for a fragment that is not prepared yet:

1. The child optimises, packs and saves it, if memory and disk suffice; then it opens the result.
2. If the child is ended by a signal, or lacks memory, a second child opens the fragment as the
   agent would without preparation. If that one crashes too, or takes too long, the load fails
   (`CrashedAtLoad`): the model would have ended the agent. The process remembers it, and does not
   try again.
3. If the child fails in any other way, the agent opens the fragment unprepared.

Memory: a child has the bytes that the ledger granted for the load, which nothing else uses yet, and
what it borrows from the ledger while it runs. One child runs at a time.

Not covered: a small fragment (`WORTH_PREPARING_BYTES`), which is opened at once; where not even a
trial fits in memory (`PROCESS_BYTES` and a little), the fragment is opened without one; a model
that crashes in a run, not at load; and a fragment whose prepared form exists was tried when that
was made.
"""

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from shoal_agent.cache.disk import FragmentCache
from shoal_agent.cache.folders import PREPARED_FOLDER
from shoal_agent.memory.residency import short
from shoal_agent.runtime import prepare_child
from shoal_agent.runtime.described import read_blocks
from shoal_agent.runtime.failures import RuntimeFailed
from shoal_agent.runtime.forms import IN_BLOCKS, WHOLE, Form, blocks_form, whole_form
from shoal_agent.runtime.mapped_pages import READ_AHEAD_BYTES
from shoal_agent.runtime.prepared import (
    Prepared,
    PreparedDamaged,
    PreparedModel,
    Stamps,
    folder_of,
    key,
    read_prepared,
    stamps_of,
)
from shoal_agent.runtime.trial_marks import MarkedTrial, TrialMarks
from shoal_agent.telemetry.logs import log
from shoal_agent.telemetry.pressure import is_ended_with_its_children
from shoal_protocol.disk_shares import MORE_DISK
from shoal_protocol.durable_files import sync_folder
from shoal_protocol.interpreter import module_command
from shoal_protocol.preparing import WORTH_PREPARING_BYTES
from shoal_protocol.threads import in_thread
from shoal_protocol.units import format_apart, format_bytes

_GRAPH_WORTH: Final = 32
"""What a byte of the graph counts beside one of weights: large ones end the runtime, if any do."""
_KNOWN: Final = 1024
_MARK: Final = "preparation.json"
"""Of a child that may end this process as well, which must not do the same again at once."""
_REPORT_BYTES: Final = 16 << 10
_CRASHES: Final = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
)
_ALLOCATOR: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "131072",
    "MALLOC_TRIM_THRESHOLD_": "131072",
}
"""Freed memory goes back at once: the peak for ResNet-152 is 236 MiB instead of 371."""


Known = TypeVar("Known")
Fact = TypeVar("Fact")


class CrashedAtLoad(RuntimeFailed):
    """The fragment would have ended this process."""


class _End(Enum):
    """How a child ended."""

    DONE = auto()
    FAILED = auto()
    UNSAVED = auto()
    NO_MEMORY = auto()
    CRASHED = auto()
    LATE = auto()
    KILLED = auto()


@dataclass(frozen=True, slots=True)
class _Outcome:
    end: _End
    text: str


class Preparation:
    """Prepares fragments, one at a time. `request_move` borrows bytes of the ledger, where it has
    them; `end_move` gives them back."""

    def __init__(
        self,
        cache: FragmentCache,
        request_move: Callable[[int], bool],
        end_move: Callable[[int], None],
        *,
        worth_bytes: int = WORTH_PREPARING_BYTES,
    ) -> None:
        """`worth_bytes`: of what is smaller nothing is prepared or tried."""
        self._cache = cache
        self._worth_bytes = worth_bytes
        self._request_move = request_move
        self._end_move = end_move
        self._turn = asyncio.Lock()
        self._verified: dict[Path, Stamps] = {}
        self._crashed: dict[str, str] = {}
        self._tried: dict[Path, int] = {}
        self._marks: TrialMarks | None = None
        if is_ended_with_its_children():
            self._marks = TrialMarks(cache.folder.with_name(_MARK))
        for digest in cache.cached():
            # What an agent before has left of another runtime has the room of what is made now.
            with suppress(OSError):  # mostly there is none
                if _remove_others(cache.path(digest) / PREPARED_FOLDER):
                    cache.count_prepared(digest)

    async def prepare(self, digest: str, fragment: Path, granted_bytes: int) -> Prepared:
        """What there is of a fragment, with the form in it that runs in what is granted, if that
        could be prepared.

        Raises `CrashedAtLoad`, `FragmentDamaged`, `OSError`.
        """
        if (reason := self._crashed.get(digest)) is not None:
            raise CrashedAtLoad(reason)
        blocks = await asyncio.to_thread(read_blocks, fragment)
        whole = await asyncio.to_thread(whole_form, fragment)
        forms = [whole]
        if blocks is not None:
            forms.append(await asyncio.to_thread(blocks_form, fragment, blocks))
        in_blocks = blocks is not None and granted_bytes < blocks.resident_bytes
        needed = forms[-1 if in_blocks else 0]
        prepared = await self._find(digest, fragment, forms)
        if (
            needed.of(prepared) is None
            and self._is_worth_it(needed)
            and await self._made(digest, fragment, needed, granted_bytes)
        ):
            prepared = await self._find(digest, fragment, forms)
        return prepared

    def _is_worth_it(self, form: Form) -> bool:
        return form.stored_bytes + _GRAPH_WORTH * form.model_bytes >= self._worth_bytes

    async def _made(self, digest: str, fragment: Path, form: Form, granted_bytes: int) -> bool:
        """Prepare it, or at least try it, with as much memory as can be had."""
        folder = folder_of(fragment, form.name)
        async with self._turn:
            for need in await asyncio.to_thread(form.needs):
                if need <= self._tried.get(folder, 0):
                    return False
                limit = max(need, granted_bytes)
                mark = MarkedTrial(f"{digest} {form.name}", False, limit, 0)
                if self._marks is not None and self._marks.ended_its_process(mark):
                    log.info("%s is not prepared: that has ended an agent here", short(digest))
                    return False
                borrowed = limit - granted_bytes
                if borrowed and not self._request_move(borrowed):
                    continue
                try:
                    with nullcontext() if self._marks is None else self._marks.running(mark):
                        return await self._carry_out(digest, folder, form, need, limit)
                except asyncio.CancelledError:
                    self._tried.pop(folder, None)  # not to its end
                    raise
                finally:
                    self._end_move(borrowed)
        log.info(
            "%s is opened untried: a trial needs %s, granted are %s",
            short(digest),
            format_bytes(form.trial_bytes),
            format_bytes(granted_bytes),
        )
        return False

    async def _carry_out(
        self, digest: str, folder: Path, form: Form, need_bytes: int, limit_bytes: int
    ) -> bool:
        """Prepare it within so many bytes, or at least try whether it can be opened. Where it is
        not prepared it is not tried again, unless more is there for it than it needed now."""
        disk_bytes, before = await asyncio.to_thread(form.disk_bytes), self._tried.get(folder, 0)
        saves, room = form.saved and limit_bytes >= form.least_saving_bytes, 0
        if saves:
            room = await in_thread(self._cache.make_room_to_prepare, disk_bytes)
        if room < disk_bytes:
            need_bytes = form.trial_bytes
            if need_bytes <= before:
                return False
        _remember(self._tried, folder, need_bytes)
        if saves and room < disk_bytes:
            log.info(
                "%s is not prepared: it needs %s on disk, have %s in the cache and in half of what "
                "the disk has free; %s",
                short(digest),
                *format_apart(disk_bytes, room),
                MORE_DISK,
            )
        elif saves:
            end = await self._save(digest, folder, form, limit_bytes, disk_bytes)
            if end is _End.DONE or end is _End.FAILED:
                return end is _End.DONE  # else the agent will have an error or none, and survive
            if end is _End.UNSAVED and before:
                return False
        await self._try(digest, form, limit_bytes, disk_bytes)
        return False

    async def _try(self, digest: str, form: Form, limit_bytes: int, disk_bytes: int) -> None:
        """See whether it can be opened. Raises `CrashedAtLoad`."""
        outcome = await self._run_child(form, limit_bytes, disk_bytes, None)
        if outcome.end in (_End.CRASHED, _End.LATE):
            _remember(self._crashed, digest, outcome.text)
            raise CrashedAtLoad(outcome.text)
        if outcome.end is not _End.DONE:
            log.info("%s was not tried to the end: %s", short(digest), outcome.text)

    async def _save(
        self, digest: str, folder: Path, form: Form, limit_bytes: int, disk_bytes: int
    ) -> _End:
        """Prepare it, and note what the next load is to do about it."""
        log.info(
            "%s is prepared for this device, which may take %s on disk",
            short(digest),
            format_bytes(disk_bytes),
        )
        outcome = await self._saved(digest, folder, form, limit_bytes, disk_bytes)
        if outcome.end is _End.DONE:
            del self._tried[folder]
            return outcome.end
        log.info("%s is not prepared: %s", short(digest), outcome.text)
        if outcome.end is _End.UNSAVED:  # the next time the disk may take it
            _remember(self._tried, folder, form.trial_bytes)
        return outcome.end

    async def _saved(
        self, digest: str, folder: Path, form: Form, limit_bytes: int, disk_bytes: int
    ) -> _Outcome:
        part = folder.with_suffix(".part")
        try:
            await asyncio.to_thread(_make_empty, part)
            outcome = await self._run_child(form, limit_bytes, disk_bytes, part)
            if outcome.end is _End.DONE:
                await in_thread(self._admit, digest, part, folder)
            return outcome
        except OSError as error:
            return _Outcome(_End.UNSAVED, str(error))
        finally:
            await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)

    def _admit(self, digest: str, part: Path, folder: Path) -> None:
        _admit(part, folder)
        self._cache.count_prepared(digest)

    async def _find(self, digest: str, fragment: Path, forms: Sequence[Form]) -> Prepared:
        """What is on disk and right; it is verified in huge pages where there is room for them."""
        huge = self._request_move(READ_AHEAD_BYTES)
        find = partial(self._find_form, digest, fragment, huge_pages=huge)
        try:
            found = {form.name: await asyncio.to_thread(find, form) for form in forms}
        finally:
            if huge:
                self._end_move(READ_AHEAD_BYTES)
        whole = found[WHOLE]
        return Prepared(
            whole=None if whole is None else whole[0],
            blocks=found.get(IN_BLOCKS),
        )

    def _find_form(
        self, digest: str, fragment: Path, form: Form, *, huge_pages: bool
    ) -> tuple[PreparedModel, ...] | None:
        """One form; if it is wrong, it is removed."""
        folder = folder_of(fragment, form.name)
        try:
            verified = self._verified.get(folder)
            count = len(form.weights)
            models = read_prepared(folder, form.name, count, verified, huge_pages=huge_pages)
            _remember(self._verified, folder, stamps_of(models))
        except FileNotFoundError:
            if not folder.exists():
                return None
            log.warning("the prepared form of %s is not whole", short(digest))
        except (PreparedDamaged, OSError) as error:
            log.warning("the prepared form of %s is made anew: %s", short(digest), error)
        else:
            return models
        shutil.rmtree(folder, ignore_errors=True)
        self._cache.count_prepared(digest)
        return None

    async def _run_child(
        self, form: Form, limit_bytes: int, disk_bytes: int, part: Path | None
    ) -> _Outcome:
        order = prepare_child.Order(
            parent=os.getpid(),
            file=str(form.file),
            ranges=form.ranges,
            dequantises=form.dequantises,
            part=None if part is None else str(part),
            results=form.results,
            key=key(form.name),
            limit_bytes=limit_bytes,
            disk_bytes=disk_bytes,
        )
        process = await asyncio.create_subprocess_exec(
            *module_command(prepare_child.__name__, "-OO"),
            order.as_argument(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_environment(),
        )
        try:
            async with asyncio.timeout(form.seconds):
                assert process.stdout is not None
                report = await process.stdout.read(_REPORT_BYTES)
                status = await process.wait()
        except TimeoutError:
            text = f"ONNX Runtime did not open this fragment within {form.seconds:.0f} s"
            return _Outcome(_End.LATE, text)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return _outcome(status, report)


def _remember(known: dict[Known, Fact], key: Known, fact: Fact) -> None:
    """Of so many fragments that nothing grows with those that an agent has ever had; what was
    forgotten is found out again."""
    if len(known) >= _KNOWN:
        known.clear()
    known[key] = fact


def _outcome(status: int, report: bytes) -> _Outcome:
    if status == 0:
        return _Outcome(_End.DONE, "")
    if status == prepare_child.NO_MEMORY:
        return _Outcome(_End.NO_MEMORY, "it needs more memory than there is for it")
    if status >= 0:
        end = _End.UNSAVED if status == prepare_child.UNSAVED else _End.FAILED
        return _Outcome(end, report.decode(errors="replace").strip() or f"exit {status}")
    try:
        number = signal.Signals(-status)
    except ValueError:  # a real-time signal
        return _Outcome(_End.KILLED, f"its process was ended by signal {-status}")
    text = (
        f"ONNX Runtime ended with {number.name} when it loaded this fragment, "
        "in a process of its own"
    )
    return _Outcome(_End.CRASHED if number in _CRASHES else _End.KILLED, text)


def _make_empty(part: Path) -> None:
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True, mode=0o700)


def _admit(part: Path, folder: Path) -> None:
    """Give a whole form its final name, durably; forms of other runtimes or processors go."""
    _remove_others(folder.parent, part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)
    sync_folder(folder.parent)
    sync_folder(folder.parent.parent)


def _remove_others(forms: Path, part: Path | None = None) -> bool:
    """Have forms of other runtimes or processors go; whether there were any. Raises `OSError`."""
    kept = {forms / key(WHOLE), forms / key(IN_BLOCKS), part}
    others = [each for each in forms.iterdir() if each not in kept]
    for each in others:
        shutil.rmtree(each, ignore_errors=True)
    return bool(others)


def _environment() -> dict[str, str]:
    """Only what Python needs to find its modules, and what keeps memory small."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**kept, **_ALLOCATOR, "PYTHONPATH": path}
