"""Of what is being deleted, or was just now, there is nothing to do, and nothing to warn of."""

import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from kubeconfigs import kubeconfig
from reconcile.rules import decide
from reconcile.test_device_pool import snapshot
from shoal_api.writing import write
from shoal_operator.controller.actions import Actions
from shoal_operator.controller.api import Api, Conflict, Rejected
from shoal_operator.controller.cache import Cache, Own, reduce
from shoal_operator.controller.certificates import Certificates
from shoal_operator.controller.children import Children
from shoal_operator.controller.coordinators import Coordinators, dial
from shoal_operator.controller.login import log_in
from shoal_operator.controller.telemetry import OperatorMetrics, Telemetry
from shoal_operator.reconcile.resources import BY_KIND

LEAVING = {"reason": "NamespaceTerminating", "message": "namespace lab is being terminated"}


OF = snapshot().pool
METADATA = {"name": OF.metadata.name, "namespace": OF.metadata.namespace, "uid": "u"}
POOL = BY_KIND["DevicePool"].manifest({**METADATA, "generation": 1}, spec=write(OF.spec))


class Server:
    """An API server that lets nothing be created, for these causes; statuses are written."""

    def __init__(self) -> None:
        self.causes: list[dict[str, str]] = [LEAVING]
        self.refused = 0
        self.has_pool = True

    async def answer(self, request: web.Request) -> web.Response:
        if request.method == "GET":
            return web.json_response({"reason": "NotFound"}, status=404)
        if request.path.endswith("/status") and not self.has_pool:
            return web.json_response({"reason": "NotFound"}, status=404)
        if request.path.endswith("/status"):
            return web.json_response(POOL | {"status": (await request.json())["status"]})
        self.refused += 1
        status = {"reason": "Forbidden", "message": "no", "details": {"causes": self.causes}}
        return web.json_response(status, status=403)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest_asyncio.fixture
async def actions(server: Server, tmp_path: Path) -> AsyncIterator[Actions]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    (tmp_path / "token").write_text("t")
    async with TestServer(app) as http:
        login = await log_in(kubeconfig(tmp_path, server=str(http.make_url("")), tokenFile="token"))
        api = Api(login, Telemetry(lambda: 0.0), namespace="shoal-system")
        cache, metrics = Cache(lambda *_: None), OperatorMetrics()
        children = Children(api, cache, lambda: 0.0, lambda _: None)
        certificates = Certificates(api, children, lambda: 0.0, cert_manager=False)
        coordinators = Coordinators(
            lambda *where: dial(certificates, *where),
            metrics,
            has_work=lambda *_: False,
            changed=lambda _: None,
        )
        yield Actions(api, cache, children, certificates, coordinators, metrics, leads=lambda: True)
        await api.close()


def pool_object() -> Own:
    """The pool as the API server has it."""
    state = reduce(POOL)
    assert isinstance(state, Own)
    assert state.value is not None
    return state


async def test_what_cannot_be_created_in_a_namespace_that_goes_is_not_a_failure(
    actions: Actions, server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    own, decision = pool_object(), decide(snapshot())
    assert decision.notes, "an Event is created as well"
    await actions.carry_out(own, decision)
    applied = actions.applied(own)
    assert applied is not None
    assert applied.refused == ()
    assert server.refused > len(decision.notes)
    assert [each for each in caplog.records if each.name.startswith("shoal_operator")] == []


async def test_what_is_forbidden_for_another_cause_is_told(
    actions: Actions, server: Server
) -> None:
    server.causes = []
    own = pool_object()
    with pytest.raises(Rejected):
        await actions.carry_out(own, decide(snapshot()))
    applied = actions.applied(own)
    assert applied is not None
    assert applied.refused


async def test_an_object_that_was_deleted_since_it_was_read_is_no_failure(
    actions: Actions, server: Server
) -> None:
    """The watch brings it in a moment; to the controller it is as if somebody had edited it."""
    server.has_pool = False
    with pytest.raises(Conflict):
        await actions.carry_out(pool_object(), decide(snapshot()))
    assert server.refused == 0, "nothing else is done for it"
