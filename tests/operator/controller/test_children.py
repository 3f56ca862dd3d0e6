"""Which object that is there counts as a child, and which is another's."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from kubeconfigs import kubeconfig
from reconcile.values import NAMESPACE, SETTINGS, make
from shoal_api.kinds import Model
from shoal_operator.controller.api import Api
from shoal_operator.controller.cache import Cache, reduce
from shoal_operator.controller.children import Children, StillThere
from shoal_operator.controller.foreign import Identity
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.reconcile.decision import Manifest
from shoal_operator.reconcile.manifests import owner_reference
from shoal_operator.reconcile.workers import inspect_worker, worker_job


def model(uid: str) -> Model:
    return make(Model, "m", {"source": {"uri": "pvc://models/m.onnx"}}, uid=uid)


def identity(kind: str, uid: str) -> Identity:
    return Identity(kind=kind, namespace=NAMESPACE, name="m", uid=uid, version=1)


def owned(job: Manifest, by: Model) -> Manifest:
    """The Job with its owner, as it is in the cluster."""
    metadata = job["metadata"]
    assert isinstance(metadata, dict)
    references = [owner_reference(by, controller=True)]
    there = {"uid": f"job-of-{by.metadata.uid}", "resourceVersion": "1"}
    return {**job, "metadata": {**metadata, "ownerReferences": references, **there}}


JOB = worker_job(model("new"), inspect_worker(model("new")), SETTINGS)


@pytest_asyncio.fixture
async def cache() -> Cache:
    return Cache(lambda *_: None)


@pytest_asyncio.fixture
async def children(cache: Cache, tmp_path: Path) -> AsyncIterator[Children]:
    """Of what the cache knows; nobody answers requests."""
    (tmp_path / "token").write_text("t")
    login = await log_in(kubeconfig(tmp_path, server="https://127.0.0.1:1", tokenFile="token"))
    api = Api(login, Telemetry(lambda: 0.0), namespace="shoal-system")
    yield Children(api, cache, lambda: 0.0, lambda _: None)
    await api.close()


async def test_the_worker_of_an_object_that_is_gone_is_not_that_of_one_of_the_same_name(
    cache: Cache, children: Children
) -> None:
    cache.put(reduce(owned(JOB, by=model("old"))))
    with pytest.raises(StillThere, match="the one before is still being removed"):
        await children.apply(JOB, identity("Model", "new"))
    cache.put(reduce(owned(JOB, by=model("new"))))
    assert not await children.apply(JOB, identity("Model", "new"))


async def test_a_worker_that_is_made_for_another_object_is_compared_with_that_one(
    cache: Cache, children: Children
) -> None:
    """As a job has a Partition's fragments delivered."""
    job = owned(JOB, by=model("new"))
    cache.put(reduce(job))
    assert not await children.apply(job, identity("InferenceJob", "else"))
