"""`shoal version`."""

import platform
from importlib import metadata

import typer


def version() -> None:
    """Print the versions of shoal, of its protocol, and of what it stands on."""
    from shoal_protocol import PROTOCOL

    rows = [("shoal", _version("shoal")), ("protocol", str(PROTOCOL))]
    rows.append(("python", platform.python_version()))
    for package in ("onnxruntime", "onnx", "grpcio", "protobuf", "numpy"):
        rows.append((package, _version(package)))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
