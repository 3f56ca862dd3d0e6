"""Which namespaces an operator has seen, and what it says of those that it cannot read."""

from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

from kubeconfigs import kubeconfig
from shoal_operator.controller.api import Api
from shoal_operator.controller.cache import Cache
from shoal_operator.controller.login import log_in
from shoal_operator.controller.namespaces import Namespaces
from shoal_operator.controller.telemetry import Telemetry
from shoal_operator.controller.watches import Watches


class Opened:
    """Counts how often a namespace was opened that was closed."""

    def __init__(self) -> None:
        self.times = 0

    def __call__(self) -> None:
        self.times += 1


def test_one_that_was_never_listed_as_a_whole_is_not_seen() -> None:
    namespaces = Namespaces(("a", "b"), Opened())
    namespaces.open("a")
    namespaces.close("b", "forbidden")
    assert [namespaces.is_seen(each) for each in ("a", "b")] == [True, False]


def test_one_that_was_seen_stays_as_it_was_when_it_cannot_be_read_any_more() -> None:
    namespaces = Namespaces(("a",), Opened())
    namespaces.open("a")
    namespaces.close("a", "forbidden")
    assert namespaces.is_seen("a")
    assert namespaces.closed == ("a",)


def test_where_all_namespaces_are_listed_together_each_is_seen() -> None:
    namespaces = Namespaces((), Opened())
    assert namespaces.scopes == ("",)
    assert not namespaces.is_seen("any")
    namespaces.open("")
    assert namespaces.is_seen("any")


def test_what_is_closed_is_named_until_it_is_open_and_then_all_is_looked_at_again() -> None:
    opened = Opened()
    namespaces = Namespaces(("a", "b", "c"), opened)
    assert namespaces.problem() is None
    namespaces.close("b", "forbidden (403)")
    namespaces.close("c", "forbidden (403)")
    problem = namespaces.problem()
    assert problem is not None
    assert problem.startswith("namespace b (and 1 more) cannot be read: forbidden (403); ")
    assert opened.times == 0
    namespaces.open("b")
    namespaces.open("c")
    assert (namespaces.problem(), opened.times) == (None, 2)


async def test_one_whose_watches_are_refused_is_named_as_one_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    """It was deleted, and the operator's Role with it: kopf does not list it for minutes."""

    async def answer(request: web.Request) -> web.Response:
        if "/namespaces/gone/" in request.path:
            return web.json_response({"reason": "Forbidden", "message": "no"}, status=403)
        return web.json_response({"items": []})

    app, now, namespaces = web.Application(), [0.0], Namespaces(("gone", "here"), Opened())
    app.router.add_route("*", "/{path:.*}", answer)
    (tmp_path / "token").write_text("t")
    async with TestServer(app) as http:
        login = await log_in(kubeconfig(tmp_path, server=str(http.make_url("")), tokenFile="token"))
        telemetry = Telemetry(lambda: now[0])
        api = Api(login, telemetry, namespace="shoal-system")
        watches = Watches(api, Cache(lambda *_: None), telemetry, namespaces, watch_seconds=45)
        for name in namespaces.names:
            telemetry.expect_watch("Job", name)
        await watches.list_unread()
        assert namespaces.problem() is None, "they are young"
        now[0] = 91.0
        await watches.list_unread()
        await api.close()
    problem = namespaces.problem()
    assert problem is not None
    assert problem.startswith("namespace gone cannot be read: ")
