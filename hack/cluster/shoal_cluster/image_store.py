"""What a container runtime keeps of images, made once and then given to every node.

To import images costs a node half a minute of processor time: each layer is read, hashed and
unpacked. So a containerd of its own imports them into a store in the cache, and a node starts with
hard links to that store's files: nothing writes to a layer or to a blob once it is there. The
runtime's databases, which it does write to, are copied. When an image has changed, the store of
before becomes the new one, and is given only the layers that it does not have.
"""

import contextlib
import hashlib
import io
import itertools
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from shoal_cluster.images import Image
from shoal_cluster.places import cache, locked
from shoal_cluster.processes import Process

_LAYERS = "layers.json"
"""Of a store: the digests of the layers of each image in it."""
_OCI = "application/vnd.oci.image"
_IMAGES = ("--namespace=k8s.io", "image")
_KEPT = "kept.invalid"
"""Where images of the store of before have another name, until the new ones are there."""


def fill(root: Path, images: Sequence[Image], home: Path) -> None:
    """Make `root`, the root folder of a containerd that does not run yet, with these images.

    `home` is the folder of the cluster: with it ends what a crash may leave running here.
    """
    stores = cache() / "stores"
    with locked(cache() / "stores.lock"):
        store = stores / _name(images)
        if not store.exists():
            unfinished = _unfinished(stores)
            _bring_to(unfinished, images, home)
            unfinished.rename(store)
        _link(store, root)


def import_image(socket: Path, image: Image) -> None:
    """Import an image into a containerd that runs. Raises `OSError`."""
    ctr(socket, *_IMAGES, "import", str(image.archive))


def ctr(socket: Path, *arguments: str) -> str:
    """Run ctr against the containerd that listens on `socket`; returns what it printed. Raises
    `OSError`.
    """
    command = ("ctr", f"--address={socket}", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def answers(socket: Path) -> bool:
    """Whether a containerd listens on `socket`."""
    try:
        ctr(socket, "version")
    except OSError:
        return False
    return True


def _name(images: Sequence[Image]) -> str:
    """An archive bears in its name which image it holds."""
    archives = "\n".join(sorted(image.archive.name for image in images))
    return hashlib.sha256(archives.encode()).hexdigest()[:16]


def _unfinished(stores: Path) -> Path:
    """The store of before, no longer under its name; what a crash has left of one is removed."""
    stores.mkdir(exist_ok=True)
    unfinished = stores / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    for store in stores.iterdir():
        if (store / _LAYERS).exists() and not unfinished.exists():
            store.rename(unfinished)
        else:
            shutil.rmtree(store)
    unfinished.mkdir(exist_ok=True)
    return unfinished


def _bring_to(root: Path, images: Sequence[Image], home: Path) -> None:
    """Have a store hold these images, and no other ones."""
    record = root / _LAYERS
    held: dict[str, list[str]] = json.loads(record.read_bytes()) if record.exists() else {}
    layers: dict[str, list[str]] = {}
    known = set(itertools.chain.from_iterable(held.values()))
    with running(root, home) as socket:
        # What no image has any more containerd removes, when it likes: also what the image that
        # takes the place of another has in common with it, until it is unpacked.
        kept = {name: f"{_KEPT}/{number}:latest" for number, name in enumerate(held)}
        for name, other in kept.items():
            ctr(socket, *_IMAGES, "tag", name, other)
        for image in images:
            with tempfile.TemporaryDirectory(prefix="shoal-thin-", dir=root.parent) as folder:
                thin = Path(folder, "thin.tar")
                layers[image.name] = write_thin(image, known, thin)
                import_image(socket, Image(image.name, thin))
            known.update(layers[image.name])
        for name in (*(held.keys() - layers.keys()), *kept.values()):
            ctr(socket, *_IMAGES, "remove", name)
    record.write_text(json.dumps(layers))


def write_thin(image: Image, known: Collection[str], to: Path) -> list[str]:
    """Write an image as an OCI archive without the layers `known`; the digests of all its layers.

    For a containerd that has those: it asks only for what it has not unpacked.
    """
    with tarfile.open(image.archive) as archive, tarfile.open(to, "w") as thin:

        def add(name: str, content: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            thin.addfile(member, io.BytesIO(content))

        def added(kind: str, content: bytes) -> dict[str, object]:
            found = _described(kind, hashlib.sha256(content).hexdigest(), len(content))
            add(f"blobs/sha256/{str(found['digest'])[7:]}", content)
            return found

        (docker,) = json.loads(_read(archive, "manifest.json"))
        layers = []
        for file in docker["Layers"]:  # each is named by its digest, and not compressed
            member, digest = archive.getmember(file), str(file).removesuffix(".tar")
            layers.append(_described("layer.v1.tar", digest, member.size))
            if f"sha256:{digest}" not in known:
                member.name = f"blobs/sha256/{digest}"
                thin.addfile(member, archive.extractfile(member))
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{_OCI}.manifest.v1+json",
            "config": added("config.v1+json", _read(archive, docker["Config"])),
            "layers": layers,
        }
        described = added("manifest.v1+json", json.dumps(manifest).encode())
        described["annotations"] = {"io.containerd.image.name": image.name}
        add("index.json", json.dumps({"schemaVersion": 2, "manifests": [described]}).encode())
        add("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
    return [str(layer["digest"]) for layer in layers]


def _described(kind: str, digest: str, size: int) -> dict[str, object]:
    return {"mediaType": f"{_OCI}.{kind}", "digest": f"sha256:{digest}", "size": size}


def _read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None, name
    return file.read()


@contextlib.contextmanager
def running(root: Path, home: Path) -> Iterator[Path]:
    """A containerd with this root folder; its socket."""
    # A folder of its own for what ends with it; its name is short, for the socket's sake.
    with tempfile.TemporaryDirectory(prefix="shoal-store-") as name:
        folder = Path(name)
        socket, configuration = folder / "containerd.sock", folder / "containerd.toml"
        configuration.write_text(
            f"""version = 2
root = "{root}"
state = "{folder / "state"}"
disabled_plugins = ["io.containerd.grpc.v1.cri"]
[grpc]
  address = "{socket}"
"""
        )
        command = ("containerd", f"--config={configuration}")
        runtime = Process("containerd", command, folder / "containerd.log", home)
        runtime.start()
        try:
            runtime.wait_until(lambda: answers(socket), "answering")
            yield socket
        finally:
            runtime.stop()


def _link(store: Path, root: Path) -> None:
    """Hard links, where both are of one file system; else copies."""
    links = ("cp", "--archive", "--link", store, root)
    if subprocess.run(links, capture_output=True, check=False).returncode != 0:
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(("cp", "--archive", "--reflink=auto", store, root), check=True)
    for database in root.rglob("*.db"):
        shared = database.with_suffix(".shared")
        database.rename(shared)
        shutil.copy2(shared, database)
        shared.unlink()
