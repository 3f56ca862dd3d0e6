"""Traces of items, as an OpenTelemetry collector receives them."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import TracerProvider

from coordinator.scripted import connected, put_model
from coordinator.world import World
from shoal_coordinator.server import CoordinatorSettings, deliveries, otlp, serving
from shoal_protocol.channels import open_channel
from shoal_protocol.v1 import coordinator_pb2 as api
from shoal_protocol.v1.coordinator_pb2_grpc import CoordinatorStub


@dataclass
class Collector:
    """Spans that were received, and where."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    status: int = 200

    def named(self, start: str) -> list[Span]:
        return [span for span in self.spans if span.name.startswith(start)]


@pytest.fixture
def collector() -> Iterator[Collector]:
    received = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    received.spans += scope.spans
            self.send_response(received.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        received.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield received
        server.shutdown()


@pytest.fixture
async def world(tmp_path: Path, collector: Collector) -> AsyncIterator[World]:
    """A coordinator that exports; when it stops, everything was exported."""
    target = f"unix:{tmp_path}/s"
    settings = CoordinatorSettings(
        listen=target, store=tmp_path / "store", state=tmp_path / "state", otlp=collector.url
    )
    document = put_model(tmp_path / "store")
    async with serving(settings) as coordinator, open_channel(target) as channel:
        yield World(coordinator, target, document, CoordinatorStub(channel), channel, tmp_path)


def attributes(span: Span) -> dict[str, object]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "")
        for each in span.attributes
    }


async def exported(world: World) -> tuple[int, int]:
    """Spans that the collector took, and those that are lost."""
    spans = await world.stub.ExportTraces(api.ExportTracesRequest(), timeout=60)
    return spans.delivered, spans.lost


async def test_an_item_is_a_trace_of_its_tasks(world: World, collector: Collector) -> None:
    world.inputs(2)
    async with connected(world.device("pi-4")):
        await world.submit()
        await world.ended()
    spans = await exported(world)
    assert spans == (len(collector.spans), 0)
    items, tasks = collector.named("item"), collector.named("task")
    assert sorted(span.name for span in items) == ["item job/0", "item job/1"]
    assert len(tasks) == len(items) * len(world.document.fragments)
    for item in items:
        own = [span for span in tasks if span.trace_id == item.trace_id]
        assert sorted(span.name for span in own) == ["task 0", "task 1", "task 2"]
        for span in own:
            assert span.parent_span_id == item.span_id
            assert item.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= item.end_time_unix_nano
            found = attributes(span)
            assert found["shoal.device"] == "pi-4"
            assert found["shoal.attempt"] == 1
            assert {"shoal.compute_seconds", "shoal.wait_seconds", "shoal.tier"} <= found.keys()


async def test_an_item_that_fails_says_why(world: World, collector: Collector) -> None:
    world.inputs(1)
    np.savez(world.folder / "in" / "odd.npz", x=np.zeros((2, 2, 3, 7)))
    async with connected(world.device("pi-4")):
        await world.submit()
        await world.ended()
    await exported(world)
    (failed,) = [span for span in collector.named("item") if span.status.code]
    assert failed.name == "item job/1"
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert "has rank 4" in failed.status.message
    assert attributes(failed)["shoal.failure"] == "InvalidInput"


async def test_a_task_ends_with_the_device_that_had_it(world: World, collector: Collector) -> None:
    world.inputs(1)
    async with connected(world.device("lost", gate=asyncio.Semaphore(0))):
        await world.submit()
        await world.until(lambda status: any(stage.running for stage in status.stages))
    async with connected(world.device("pi-4")):
        await world.ended()
    await exported(world)
    (item,) = collector.named("item")
    tries = sorted(collector.named("task 0"), key=lambda span: span.start_time_unix_nano)
    assert [attributes(span)["shoal.device"] for span in tries] == ["lost", "pi-4"]
    assert {span.parent_span_id for span in tries} == {item.span_id}
    assert [span.status.code for span in tries] == [Status.STATUS_CODE_ERROR, 0]
    assert attributes(tries[0])["shoal.failure"] == "Unreachable"
    assert tries[0].status.message, "why the device was lost"


async def test_a_task_ends_whose_inputs_did_not_reach_its_device(
    world: World, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deliveries, "LINK_SECONDS", 0.0)
    world.inputs(1, size=100_000)
    async with connected(world.device("pi-4")):
        while (session := world.coordinator.sessions.by_device.get("pi-4")) is None:
            await asyncio.sleep(0.01)  # the device has its welcome first
        await session.linked.wait()
        session.linked.clear()
        await world.submit()
        await world.until(lambda status: status.failed > 0 or status.retries > 0)
        monkeypatch.undo()
        session.linked.set()
        await world.ended()
    await exported(world)
    failed = [span for span in collector.named("task 0") if span.status.code]
    assert failed
    assert {attributes(span)["shoal.failure"] for span in failed} == {"MissingActivation"}


async def test_items_of_a_job_that_is_cancelled_end(world: World, collector: Collector) -> None:
    world.inputs(2)
    async with connected(world.device("pi-4", gate=asyncio.Semaphore(0))):
        await world.submit()
        await world.until(lambda status: any(stage.running for stage in status.stages))
        world.coordinator.jobs.cancel("job", "enough")
        await world.ended()
    await exported(world)
    assert collector.named("item")


async def test_spans_that_the_collector_does_not_take_are_counted(
    world: World, collector: Collector
) -> None:
    collector.status = 400  # which is for good: it is not tried again
    world.inputs(2)
    async with connected(world.device("pi-4")):
        await world.submit()
        await world.ended()
    assert await exported(world) == (0, 2 * (1 + len(world.document.fragments)))


async def test_a_collector_that_takes_spans_again_gets_those_that_came_since(
    world: World, collector: Collector
) -> None:
    collector.status = 400
    world.inputs(2)
    spans = 2 * (1 + len(world.document.fragments))
    async with connected(world.device("pi-4")):
        await world.submit(name="first")
        await world.ended("first")
        assert await exported(world) == (0, spans)
        collector.status = 200
        await world.submit(name="second", outputs_uri=str(world.folder / "again"))
        await world.ended("second")
    assert await exported(world) == (spans, spans)


def test_spans_whose_export_fails_in_another_way_are_lost_too(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("of a library")

    monkeypatch.setattr(OTLPSpanExporter, "export", fail)
    export = otlp.SpanExport(collector.url, lambda number, taken: None)
    provider = TracerProvider()
    provider.add_span_processor(export)
    for _ in range(3):
        provider.get_tracer("shoal").start_span("item").end()
    export.flush()
    assert export.numbers == (0, 3)
    export.shutdown()
