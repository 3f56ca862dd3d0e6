"""From the command line to a running agent. Imports little until the arguments have been read."""

import asyncio
import errno
import gc
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from shoal_agent.allowed_threads import TooFewThreads, check_threads
from shoal_agent.cache.owning import CacheInUse, owned
from shoal_agent.installation import install
from shoal_agent.runtime import huge_pages
from shoal_agent.runtime.process_memory import tune_allocator
from shoal_agent.settings import Settings, parse
from shoal_protocol.channels import AddressRefused
from shoal_protocol.open_files import allow_open_files
from shoal_protocol.parents import end_with_parent, told_parent
from shoal_protocol.visible import visible

_UNUSABLE: Final = (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EROFS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run until drained; the exit status: 0 drained, 1 failed, 2 for unusable options."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["install"]:
        return install(given[1:])
    settings = parse(given)
    if settings.exit_with_parent:
        end_with_parent(signal.SIGKILL, told_parent())
    allow_open_files()  # each activation on the disk is a mapped file; the kernel maps as many
    huge_pages.refuse_unasked()
    tune_allocator(settings.budget)
    # numpy's linear algebra is not used: no threads for it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        check_threads(settings.threads)
        with owned(settings.cache):
            asyncio.run(_run(settings))
    except (AddressRefused, CacheInUse, TooFewThreads, OSError) as error:
        print(visible(f"shoal agent: {error}"), file=sys.stderr)
        return 2 if _is_of_options(error) else 1
    return 0


def _is_of_options(error: Exception) -> bool:
    """Whether the same options would give the same error, until somebody changes something."""
    is_refused = isinstance(error, (AddressRefused, TooFewThreads))
    return is_refused or getattr(error, "errno", None) in _UNUSABLE


async def _run(settings: Settings) -> None:
    gc.disable()  # what is imported is not looked through before all of it is there (`settle`)
    from shoal_agent.agent import Agent  # noqa: PLC0415 - after the allocator was tuned
    from shoal_agent.telemetry.logs import set_up  # noqa: PLC0415

    gc.enable()
    set_up(settings.name, settings.log_level, settings.log_format)
    agent = Agent(settings)
    await agent.run()
