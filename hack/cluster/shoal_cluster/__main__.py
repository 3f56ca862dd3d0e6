"""A cluster for a person: `make cluster-build`, `cluster`, `cluster-images`, `cluster-down`.

python -m shoal_cluster build [PROGRAM...]    build programs; by default all that tests need
python -m shoal_cluster up                    three nodes and a kubeconfig, kept until `down`
python -m shoal_cluster image NAME            build ./Dockerfile and put the image on its nodes
python -m shoal_cluster down                  remove it, and whatever a crash has left
"""

import argparse
import sys
import time
from pathlib import Path

from shoal_cluster import images, machine, places
from shoal_cluster.build import (
    CONTROL_PLANE_PROGRAMS,
    NODE_PROGRAMS,
    PROGRAMS,
    TEST_PROGRAMS,
    build,
)
from shoal_cluster.cluster import Cluster, require_machine
from shoal_cluster.machine import MachineLacks
from shoal_cluster.node import NodeShape, import_image
from shoal_cluster.programs import find, find_all, unbuilt
from shoal_cluster.removal import take_down

KUBECONFIG = Path("out/cluster/kubeconfig")
MIB = 2**20
SHAPES = (
    NodeShape("large", 1024 * MIB),
    NodeShape("medium", 512 * MIB),
    NodeShape("small", 256 * MIB),
)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="shoal_cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    builds = commands.add_parser("build", help="build programs")
    builds.add_argument("programs", nargs="*", choices=[[], *PROGRAMS], metavar="PROGRAM")
    commands.add_parser("up", help="make a cluster and keep it")
    image = commands.add_parser("image", help="build ./Dockerfile and put it on its nodes")
    image.add_argument("name", metavar="NAME", help="what manifests call it: docker.io/a/b:1")
    image.add_argument("--target", default="", metavar="STAGE", help="the stage to stop at")
    commands.add_parser("down", help="remove it")
    asked = parser.parse_args()
    try:
        match asked.command:
            case "build":
                build(asked.programs or [], _say)
                if not asked.programs:
                    prepare()
                    prepare_tests()
            case "up":
                up()
            case "image":
                bring(asked.name, asked.target)
            case "down":
                down()
    except MachineLacks as lacking:
        sys.exit(str(lacking))


def prepare_tests() -> None:
    """Build and install what tests start beside a cluster; what cannot be had they skip."""
    build(unbuilt(TEST_PROGRAMS), _say)
    try:
        installed = machine.install(machine.TEST_PROGRAMS)
    except MachineLacks as lacking:
        _say(f"tests that need it are skipped: {lacking}")
        return
    if installed:
        _say(f"installed {' '.join(installed)}")


def prepare() -> None:
    """Build what a cluster needs; install and make what nodes need, where it can."""
    build(unbuilt(CONTROL_PLANE_PROGRAMS), _say)
    find_all(("kubectl", "helm"))
    lacks = machine.lacks_for_nodes()
    if lacks:
        _say(f"without nodes, because these need: {'; '.join(lacks)}")
        return
    installed = machine.install({**machine.NODE_PROGRAMS, **machine.IMAGE_PROGRAMS})
    if installed:
        _say(f"installed {' '.join(installed)}")
    build(unbuilt(NODE_PROGRAMS), _say)
    started = time.monotonic()
    images.pause_image()
    images.base_image()
    if (seconds := time.monotonic() - started) > 5:
        _say(f"base image: made in {seconds:.0f} s")


def up() -> None:
    """Make the cluster that `down` removes."""
    if standing := places.kept():
        for home in standing:
            home.release()
        sys.exit("a cluster exists already: `make cluster-down` removes it")
    lacks = machine.lacks_for_nodes()
    if lacks:
        raise MachineLacks("A cluster with nodes", lacks)
    prepare()
    require_machine()
    started = time.monotonic()
    cluster = Cluster()
    try:
        cluster.start()
        cluster.add_nodes(SHAPES)
        cluster.provide_volumes()
        cluster.keep(KUBECONFIG)
    except BaseException:
        cluster.stop()
        raise
    _say(f"cluster: {len(SHAPES)} nodes, ready in {time.monotonic() - started:.0f} s")
    clients = find("helm").parent
    print(f"\n  export KUBECONFIG={KUBECONFIG.resolve()}\n  export PATH=$PATH:{clients}")
    print("  kubectl get nodes")


def bring(name: str, target: str) -> None:
    """Build an image and put it on every node of the kept cluster."""
    standing = places.kept()
    for home in standing:
        home.release()
    if not standing:
        sys.exit("no cluster exists: `make cluster` makes one")
    started = time.monotonic()
    image = images.build_image(name, dockerfile=Path("Dockerfile"), context=Path(), target=target)
    nodes = [node for home in standing for node in (home.folder / "nodes").iterdir()]
    for node in nodes:
        import_image(node, image)
    _say(f"{name}: on {len(nodes)} nodes, {time.monotonic() - started:.0f} s")


def down() -> None:
    """Remove the kept cluster, and the clusters whose maker has died."""
    standing = places.kept()
    for home in standing:
        take_down(home)
    left = places.take_down_abandoned(take_down)
    KUBECONFIG.unlink(missing_ok=True)
    _say(f"clusters removed: {len(standing)}, left by a crash: {left}")


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
