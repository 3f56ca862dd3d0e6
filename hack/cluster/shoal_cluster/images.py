"""Container images: a base to build from, the pause image, and whatever a Dockerfile makes.

No image registry is asked: the base is made from Debian's packages and then called by the name of
the image that a Dockerfile starts from, so that an ordinary Dockerfile builds on it. Images and
their layers are kept in the cache; a build after a change of the code takes seconds, and one after
no change starts no program.
"""

import contextlib
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal_cluster import machine
from shoal_cluster.places import cache, locked
from shoal_cluster.programs import find

BASE_IMAGE = "docker.io/library/python:3.11-slim"
PAUSE_IMAGE = "localhost/pause:1"
_BASE_PACKAGES = "python3,python3-pip,python3-venv,ca-certificates"
# What the Debian packages do otherwise than the image whose name the base bears.
_LIKE_THE_ORIGINAL = (
    'rm -f "$1"/usr/lib/python3.11/EXTERNALLY-MANAGED'
    ' && ln -s /usr/bin/python3.11 "$1"/usr/local/bin/python3.11'
    ' && ln -s python3.11 "$1"/usr/local/bin/python3'
    ' && ln -s python3.11 "$1"/usr/local/bin/python'
    ' && find "$1"/usr/lib/python3.11 -name "*.pyc" -delete'
)
# What ends the name of an archive: of the image's id, or of the digest of what it is built from.
_KEY_DIGITS = 12
_LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*", "/usr/share/info/*")


@dataclass(frozen=True, slots=True)
class Image:
    """An image: the name that manifests call it by, and its archive, to be imported into nodes."""

    name: str
    archive: Path


class ImageFailed(Exception):
    """An image could not be made; the message is the end of what the builder said."""


@functools.cache  # each question to buildah takes a third of a second of a processor
def base_image() -> Image:
    """Python 3.11 on Debian, under the name that Dockerfiles start from; made once (a minute)."""
    with locked(cache() / "images.lock"):
        if not _identity(BASE_IMAGE):
            _make_base()
    return _archived(BASE_IMAGE, _identity(BASE_IMAGE)[:_KEY_DIGITS])


@functools.cache
def pause_image() -> Image:
    """What holds a pod's namespaces."""
    with locked(cache() / "images.lock"):
        if not _identity(PAUSE_IMAGE):
            _commit(PAUSE_IMAGE, find("pause"), "/pause", entrypoint='["/pause"]')
    return _archived(PAUSE_IMAGE, _identity(PAUSE_IMAGE)[:_KEY_DIGITS])


def build_image(
    name: str,
    *,
    dockerfile: Path,
    context: Path,
    target: str = "",
    arguments: Sequence[str] = (),
) -> Image:
    """Build `target` of `dockerfile` (its last stage by default) with the files of `context`.

    Args:
        name: What to call it: "registry/path:tag", without which a manifest says "docker.io/...".
        dockerfile: The Dockerfile; where it starts from Python it gets the base image.
        context: The folder that COPY copies from.
        target: The stage to stop at.
        arguments: More arguments for `buildah build`, such as `--build-arg=NAME=VALUE`.

    Raises:
        ImageFailed: with the end of what the builder said.
    """
    key = build_key(base_image(), dockerfile, context, target, arguments)
    if (archive := _archive(name, key)).exists():
        return Image(name, archive)
    # For pip in a RUN, on a machine whose certificate authorities are not only the public ones.
    authorities = Path("/etc/ssl/certs/ca-certificates.crt")
    trust = [f"--volume={authorities}:{authorities}:ro"] if authorities.exists() else []
    stage = [f"--target={target}"] if target else []
    how = ("--layers", "--pull=never", "--isolation=chroot", "--network=host", *trust, *stage)
    before = _identity(name)
    with tempfile.NamedTemporaryFile(prefix="shoal-image-") as file:
        made = (f"--file={dockerfile}", f"--tag={name}", f"--iidfile={file.name}", str(context))
        _buildah("build", *how, *arguments, *made)
        identity = Path(file.name).read_text().removeprefix("sha256:")
    if before and before != identity:
        with contextlib.suppress(ImageFailed):  # another name of it, or another build, needs it
            _buildah("rmi", before)
    return _archived(name, key)


def build_key(
    base: Image, dockerfile: Path, context: Path, target: str, arguments: Sequence[str]
) -> str:
    """The digest of all that a build takes: it makes the same from the same."""
    digest = hashlib.sha256(repr((base.archive.name, target, *arguments)).encode())
    text = dockerfile.read_text()
    digest.update(text.encode())
    for file in copied_files(text, context):
        content = file.read_bytes()
        facts = (str(file.relative_to(context)), file.stat().st_mode, len(content))
        digest.update(repr(facts).encode() + content)
    return digest.hexdigest()[:_KEY_DIGITS]


def copied_files(dockerfile: str, context: Path) -> Iterator[Path]:
    """The files of `context` that a Dockerfile copies; Python's caches never count."""
    for line in dockerfile.replace("\\\n", " ").splitlines():
        instruction, *words = line.split() or [""]
        if instruction not in ("COPY", "ADD") or any(each.startswith("--from=") for each in words):
            continue
        *sources, _ = (each for each in words if not each.startswith("--"))
        for found in (found for source in sources for found in sorted(context.glob(source))):
            for file in sorted(found.rglob("*")) if found.is_dir() else [found]:
                if file.is_file() and "__pycache__" not in file.parts:
                    yield file


def layers(image: Image) -> str:
    """Each layer's size and what made it, as `buildah` tells it (JSON)."""
    return _buildah("inspect", "--type=image", image.name)


def untagged() -> set[str]:
    """The ids of the images in the cache that have no name; builds begin with their layers."""
    return set(_buildah("images", "--quiet", "--no-trunc", "--filter=dangling=true").split())


def _make_base() -> None:
    machine.require_programs("A base image", machine.IMAGE_PROGRAMS)
    with tempfile.TemporaryDirectory(prefix="shoal-base-", dir=cache()) as folder:
        tree = Path(folder, "base.tar")
        _run(
            (
                *("mmdebstrap", "--quiet", "--variant=minbase", f"--include={_BASE_PACKAGES}"),
                *(f"--dpkgopt=path-exclude={path}" for path in _LEFT_OUT),
                f"--customize-hook={_LIKE_THE_ORIGINAL}",
                *("bookworm", str(tree)),
            )
        )
        _commit(BASE_IMAGE, tree, "/", entrypoint="[]")


def _commit(name: str, content: Path, at: str, *, entrypoint: str) -> None:
    """An image of one layer: a file, or what is in a tar archive."""
    container = _buildah("from", "scratch").strip()
    try:
        _buildah("add", container, str(content), at)
        _buildah("config", f"--entrypoint={entrypoint}", "--cmd=python3", container)
        _buildah("commit", "--quiet", container, name)
    finally:
        _buildah("rm", container)


def _archive(name: str, key: str) -> Path:
    """Where the archive of this content is, once it is written."""
    return cache() / "images" / f"{_prefix(name)}-{key}.tar"


def _prefix(name: str) -> str:
    return name.replace("/", "_").replace(":", "_")


def _archived(name: str, key: str) -> Image:
    """The image with its archive, written anew only when the image has changed: of each name there
    is one, and its content is what the image store has by that name.
    """
    archive = _archive(name, key)
    with locked(cache() / "images.lock"):
        if not archive.exists():
            archive.parent.mkdir(exist_ok=True)
            unfinished = archive.with_suffix(".part")
            unfinished.unlink(missing_ok=True)
            _buildah("push", "--quiet", name, f"docker-archive:{unfinished}:{name}")
            for old in archive.parent.glob(f"{_prefix(name)}-{'[0-9a-f]' * _KEY_DIGITS}.tar"):
                old.unlink()
            unfinished.rename(archive)
    return Image(name, archive)


def _identity(name: str) -> str:
    """The image's id; empty when there is no such image."""
    return _buildah("images", "--quiet", "--no-trunc", f"--filter=reference={name}").strip()[7:]


def _buildah(command: str, *arguments: str) -> str:
    store = cache() / "buildah"
    # In front of the subcommand: storage of our own, beside whatever else the machine builds.
    storage = (f"--root={store / 'storage'}", f"--runroot={store / 'run'}")
    return _run(("buildah", *storage, command, *arguments))


def _run(command: Sequence[str]) -> str:
    machine.require_programs("An image", machine.IMAGE_PROGRAMS)
    done = subprocess.run(
        command,
        env=os.environ | {"BUILDAH_FORMAT": "docker"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-40:])
        raise ImageFailed(f"{' '.join(command)}:\n{said}")
    return done.stdout
