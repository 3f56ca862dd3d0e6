"""What a container runtime keeps of images, made once and then given to every node.

To import images costs a node half a minute of processor time: each layer is read, hashed and
unpacked. So a containerd of its own imports them into a store in the cache, and a node starts with
hard links to that store's files: nothing writes to a layer or to a blob once it is there. The
runtime's databases, which it does write to, are copied.
"""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from shoal_cluster.images import Image
from shoal_cluster.places import cache, locked
from shoal_cluster.processes import Process


def fill(root: Path, images: Sequence[Image], home: Path) -> None:
    """Make `root`, the root folder of a containerd that does not run yet, with these images.

    `home` is the folder of the cluster: with it ends what a crash may leave running here.
    """
    stores = cache() / "stores"
    with locked(cache() / "stores.lock"):
        store = stores / _name(images)
        if not store.exists():
            shutil.rmtree(stores, ignore_errors=True)
            unfinished = store.with_suffix(".part")
            _make(unfinished, images, home)
            unfinished.rename(store)
        _link(store, root)


def import_image(socket: Path, image: Image) -> None:
    """Import an image into a containerd that runs. Raises `OSError`."""
    ctr(socket, "--namespace=k8s.io", "image", "import", str(image.archive))


def ctr(socket: Path, *arguments: str) -> None:
    """Run ctr against the containerd that listens on `socket`. Raises `OSError`."""
    command = ("ctr", f"--address={socket}", *arguments)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


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


def _make(root: Path, images: Sequence[Image], home: Path) -> None:
    root.mkdir(parents=True)
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
            for image in images:
                import_image(socket, image)
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
