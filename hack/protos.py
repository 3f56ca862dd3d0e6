"""Generates the Python code of protos/; with --check, says whether what is there is current.

.venv/bin/python hack/protos.py [--check]
"""

import re
import sys
import tempfile
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "protos"
PLUGIN = Path(sys.executable).with_name("protoc-gen-mypy_grpc")
_SERVICE = re.compile(r"^service ", re.MULTILINE)
# gRPC's stubs parse every message; `shoal_protocol.services` does without them, for raw bytes.
_BY_HAND = ("session.proto",)
# For each service a class for calls without a channel, of which the type stubs know nothing.
_EXPERIMENTAL = re.compile(
    r"\n\n # This class is part of an EXPERIMENTAL API.*?(?=\n\n\nclass |\n\Z)", re.DOTALL
)


def main() -> None:
    if "--check" not in sys.argv[1:]:
        generate(SOURCES)
        return
    if stale := outdated():
        raise SystemExit(f"not current: {', '.join(stale)}; run `make protos`")


def outdated() -> list[str]:
    """Generated files that differ from what the .proto files give, or that no .proto file gives."""
    with tempfile.TemporaryDirectory(prefix="shoal-protos-") as folder:
        generate(Path(folder))
        fresh = generated(Path(folder))
    present = generated(SOURCES)
    names = sorted(fresh.keys() | present.keys())
    return [name for name in names if fresh.get(name) != present.get(name)]


def generate(target: Path) -> None:
    """Write the modules and stubs of every .proto file below `target`."""
    sources = sorted(SOURCES.rglob("*.proto"))
    services = [path for path in sources if _SERVICE.search(path.read_text())]
    stubs = [path for path in services if path.name not in _BY_HAND]
    _compile(sources, ("python", "pyi"), target)
    _compile(stubs, ("grpc_python", "mypy_grpc"), target)
    for path in target.rglob("*_pb2_grpc.py"):
        path.write_text(_EXPERIMENTAL.sub("", path.read_text()))


def _compile(sources: Iterable[Path], kinds: Iterable[str], target: Path) -> None:
    known = files("grpc_tools") / "_proto"
    status: int = protoc.main(
        [
            "protoc",
            f"--proto_path={SOURCES}",
            f"--proto_path={known}",
            f"--plugin=protoc-gen-mypy_grpc={PLUGIN}",
            *(f"--{kind}_out={target}" for kind in kinds),
            *(str(path.relative_to(SOURCES)) for path in sources),
        ]
    )
    if status:
        raise SystemExit(f"protoc failed with status {status}")


def generated(folder: Path) -> dict[str, bytes]:
    """The generated files below a folder by their path in it."""
    found = [*folder.rglob("*_pb2*.py"), *folder.rglob("*_pb2*.pyi")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


if __name__ == "__main__":
    main()
