"""Modules that libraries import and do not use are executed by the first who does."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent.conftest import SOURCES, StartAgent
from agent.scripted_coordinator import ScriptedCoordinator

_START = """
import sys
from shoal_agent.unused_modules import NotExecuted, execute_when_used
execute_when_used()
import asyncio, shutil
def waiting():
    return {name for name, each in sys.modules.items() if type(each) is NotExecuted}
"""


def python(code: str, *, start: str = _START) -> str:
    """What a fresh interpreter prints."""
    path = ":".join(str(SOURCES / each) for each in ("agent", "protos"))
    ended = subprocess.run(
        [sys.executable, "-c", start + code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": path},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_what_libraries_import_and_do_not_use_is_not_executed() -> None:
    code = "print(*sorted(waiting())); import ssl, bz2; print(*sorted(waiting()))"
    first, again = python(code).splitlines()
    assert first == again == "asyncio.sslproto bz2 lzma ssl"


@pytest.mark.parametrize(
    "use",
    [
        "import ssl; assert ssl.create_default_context().check_hostname",
        "from ssl import SSLContext; assert SSLContext.wrap_socket",
        "import bz2; assert bz2.decompress(bz2.compress(b'one')) == b'one'",
        "import asyncio; assert asyncio.sslproto.SSLProtocol.__mro__; import ssl",
        "import pickle; assert pickle.loads(pickle.dumps([1])) == [1]",
    ],
)
def test_who_uses_one_has_it_as_ever(use: str) -> None:
    name = use.split()[1].rstrip(";")
    code = f"{use}\nimport {name} as used\n"
    if name == "asyncio":
        code = f"{use}\nused = asyncio.sslproto\n"
    code += "print(type(used).__name__, type(used.__loader__).__name__, used.__name__ in waiting())"
    assert python(code) == "module SourceFileLoader False"


def test_a_name_that_a_module_lacks_is_missing_from_it() -> None:
    code = "import lzma\nprint(hasattr(lzma, 'nothing'), hasattr(lzma, 'nothing'), lzma.FORMAT_XZ)"
    assert python(code) == "False False 1"


def test_a_module_that_asks_for_itself_while_it_is_executed_has_what_there_is_of_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "bz2.py").write_text(
        "import sys\nearly = hasattr(sys.modules[__name__], 'late')\nlate = 1\n"
    )
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport bz2\nprint(bz2.late, bz2.early)"
    start = _START.replace("import asyncio, shutil\n", "")
    assert python(code, start=start) == "1 False"


def test_a_module_that_cannot_be_executed_says_so_each_time(tmp_path: Path) -> None:
    (tmp_path / "bz2.py").write_text("raise ImportError('no bz2 here')\n")
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport bz2\n"
    code += "for _ in range(2):\n try: bz2.open\n except ImportError as error: print(error)"
    start = _START.replace("import asyncio, shutil\n", "")
    assert python(code, start=start).splitlines() == ["no bz2 here"] * 2


def test_threads_that_use_one_at_the_same_time_all_have_it(tmp_path: Path) -> None:
    (tmp_path / "bz2.py").write_text("import time\ntime.sleep(0.2)\nlate = 1\n")
    code = f"sys.path.insert(0, {str(tmp_path)!r})\nimport bz2\n"
    code += "from concurrent.futures import ThreadPoolExecutor\n"
    code += "with ThreadPoolExecutor(4) as pool: print(sum(pool.map(lambda _: bz2.late, range(4))))"
    start = _START.replace("import asyncio, shutil\n", "")
    assert python(code, start=start) == "4"


async def test_an_agent_at_rest_has_executed_none(
    coordinator: ScriptedCoordinator, start_agent: StartAgent
) -> None:
    agent = await start_agent()
    await coordinator.device()
    mapped = Path(f"/proc/{agent.process.pid}/maps").read_text()
    # Those in C that they bring.
    assert not [each for each in ("_ssl", "_bz2", "_lzma", "_pickle") if f"/{each}." in mapped]
