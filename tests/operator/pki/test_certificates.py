"""The Secrets of a pool on a real API server: whose they are, and what becomes of them."""

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cluster_fixtures import or_skip
from shoal_cluster import ControlPlane
from shoal_operator.controller.api import Api
from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.children import Children, NameTaken
from shoal_operator.controller.event_router import EventRouter
from shoal_operator.controller.foreign import Identity
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.reconcile.decision import CertificateWanted
from shoal_protocol.pki.authority import Authority, CertificateRefused, is_issued_by

pytestmark = [pytest.mark.real, pytest.mark.cluster]

CA, TLS, HOME = "shelf-ca", "shelf-tls", "shoal-ca"
AUTHORITY = CertificateWanted(secret=CA, authority=None, common_name=CA)
OWN = CertificateWanted(secret=HOME, authority=None, common_name=HOME)
LEAF = CertificateWanted(secret=TLS, authority=CA, common_name="shelf-coordinator")


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """One of its own, which does not know the kinds: else their owners are looked for."""
    with or_skip(ControlPlane) as made:
        yield made


@dataclass(frozen=True, slots=True)
class Place:
    """A namespace of the test's own."""

    plane: ControlPlane
    api: Api
    namespace: str

    def certificates(self) -> Certificates:
        """Those of an operator that has just started."""
        clock = asyncio.get_running_loop().time
        children = Children(self.api, EventRouter().cache, clock, lambda _: None)
        return Certificates(self.api, children, clock, cert_manager=False)

    def pool(self) -> Identity:
        """A pool of the same name as ever, made anew."""
        return Identity(
            kind="DevicePool",
            namespace=self.namespace,
            name="shelf",
            uid=str(uuid.uuid4()),
            version=1,
        )

    def secret(self, wanted: CertificateWanted) -> Any:
        return self.plane.access.get("secret", wanted.secret, f"--namespace={self.namespace}")

    def put(self, wanted: CertificateWanted, authority: Authority, **annotations: str) -> None:
        """What somebody else has made."""
        content = {"tls.crt": authority.certificate, "tls.key": authority.key}
        content["ca.crt"] = authority.certificate
        self.plane.access.apply(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": wanted.secret, "annotations": annotations},
                "type": "kubernetes.io/tls",
                "data": {name: base64.b64encode(text).decode() for name, text in content.items()},
            },
            namespace=self.namespace,
        )


@pytest.fixture
async def place(plane: ControlPlane) -> AsyncIterator[Place]:
    name = f"test-{uuid.uuid4().hex[:8]}"
    plane.kubectl("create", "namespace", name)
    telemetry = Telemetry(asyncio.get_running_loop().time)
    api = Api(await log_in(plane.kubeconfig), telemetry, namespace=name)
    yield Place(plane, api, name)
    await api.close()


def owner(secret: Any) -> str:
    (only,) = secret["metadata"].get("ownerReferences", [{"uid": ""}])
    return str(only["uid"])


async def test_a_pool_that_is_made_again_keeps_the_secrets_of_the_old_one(place: Place) -> None:
    old, new = place.pool(), place.pool()
    certificates = place.certificates()
    for wanted in (AUTHORITY, LEAF):
        assert await certificates.want(wanted, old)
        assert not await certificates.want(wanted, old)
    before = [place.secret(wanted) for wanted in (AUTHORITY, LEAF)]
    for wanted in (AUTHORITY, LEAF):
        assert await certificates.want(wanted, new)
        assert not await certificates.want(wanted, new)
    after = [place.secret(wanted) for wanted in (AUTHORITY, LEAF)]
    assert [owner(each) for each in after] == [new.uid, new.uid]
    assert [each["data"] for each in after] == [each["data"] for each in before]


async def test_an_authority_that_is_gone_is_made_anew_with_what_it_had_signed(
    place: Place,
) -> None:
    pool = place.pool()
    for wanted in (AUTHORITY, LEAF):
        await place.certificates().want(wanted, pool)
    first = place.secret(AUTHORITY)["data"]
    place.plane.kubectl("delete", "secret", AUTHORITY.secret, f"--namespace={place.namespace}")
    for wanted in (AUTHORITY, LEAF):
        assert await place.certificates().want(wanted, pool)
    authority, leaf = place.secret(AUTHORITY)["data"], place.secret(LEAF)["data"]
    assert authority["tls.crt"] != first["tls.crt"]
    assert leaf["ca.crt"] == authority["tls.crt"]
    assert is_issued_by(*(base64.b64decode(each["tls.crt"]) for each in (leaf, authority)))


async def test_what_cert_manager_left_is_taken_over(place: Place) -> None:
    pool, made = place.pool(), Authority.make("shelf-ca", datetime.now(UTC))
    for wanted in (AUTHORITY, LEAF):
        place.put(wanted, made, **{"cert-manager.io/certificate-name": wanted.secret})
    for wanted in (AUTHORITY, LEAF):
        assert await place.certificates().want(wanted, pool)
        assert not await place.certificates().want(wanted, pool)
        assert owner(place.secret(wanted)) == pool.uid
    leaf = base64.b64decode(place.secret(LEAF)["data"]["tls.crt"])
    assert leaf != made.certificate
    assert is_issued_by(leaf, made.certificate)


async def test_what_somebody_else_made_is_used_or_left_alone(place: Place) -> None:
    pool, made = place.pool(), Authority.make("shelf-ca", datetime.now(UTC))
    place.put(AUTHORITY, made)
    place.put(LEAF, made)
    assert not await place.certificates().want(AUTHORITY, pool)
    with pytest.raises(NameTaken):
        await place.certificates().want(LEAF, pool)
    assert [owner(place.secret(each)) for each in (AUTHORITY, LEAF)] == ["", ""]


async def test_an_own_authority_that_cannot_sign_is_told_and_one_that_is_gone_is_made(
    place: Place,
) -> None:
    """Such as one that somebody has brought along."""
    then, made = datetime.now(UTC) - timedelta(days=2), Authority.make("mine", datetime.now(UTC))
    expired = Authority.make("mine", then, timedelta(days=1))
    other = replace(made, _key=expired._key)
    for wrong, why in ((expired, "the authority has expired"), (other, "not that of its cert")):
        place.put(OWN, wrong)
        with pytest.raises(CertificateRefused, match=f"{why}.*delete Secret .*/shoal-ca to have"):
            await place.certificates().own_authority(OWN.secret)
    place.plane.kubectl("delete", "secret", OWN.secret, f"--namespace={place.namespace}")
    first = await place.certificates().own_authority(OWN.secret)
    second = await place.certificates().own_authority(OWN.secret)
    assert first is not None
    assert second is not None
    assert first.certificate == second.certificate
