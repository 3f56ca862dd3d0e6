"""Traces of items for OpenTelemetry, where `--otlp` asks for them.

    item JOB/3          from when its first task was ready to its stored result or its failure
      +-- task 0        from its instruction to its answer; where it ran, how long it waited
      +-- task 1            and computed, as attributes

The coordinator knows all of this from its own instructions and their answers, so agents have no
part in it. What the collector does not take in time is lost, and counted: tracing never holds an
item up.
"""

import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from shoal_coordinator.dispatch import events as ev
from shoal_coordinator.dispatch import instructions as ins
from shoal_protocol.units import Nanoseconds, seconds

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from shoal_coordinator.server.otlp import SpanExport

_OPEN_ITEMS: Final = 100_000
"""Beyond these a new item has no trace."""


class TracesUnavailable(Exception):
    """The packages that `--otlp` needs are not installed."""

    def __init__(self) -> None:
        install = f"{sys.executable} -m pip install 'shoal[otlp]'"
        super().__init__(f"--otlp needs OpenTelemetry: {install}")


class Traces:
    """No traces: every method does nothing."""

    def given(self, order: ins.Execute) -> None:
        """A task is given to a device."""

    def answered(self, order: ins.Execute, event: ev.Event) -> None:
        """Its device has answered, or will not any more."""

    def entered(self, order: ins.Travel) -> None:
        """An item travels."""

    def travelled(self, orders: Iterable[ins.Travel], event: ev.Event) -> None:
        """They have come through all stages, or failed."""

    def stored(self, job: str, items: Iterable[int]) -> None:
        """The results of items are stored."""

    def failed(self, order: ins.FailItem) -> None:
        """An item has failed for good."""

    def job_ended(self, job: str) -> None:
        """None of its items is processed any more."""

    def flush(self) -> tuple[int, int]:
        """Export what has ended. How many spans the collector has taken, and how many are lost."""
        return 0, 0

    def close(self) -> None:
        """The same, for good."""


class OtlpTraces(Traces):
    """Exports spans to a collector."""

    def __init__(self, export: "SpanExport") -> None:
        from opentelemetry import trace  # noqa: PLC0415 - optional
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - optional
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - optional

        self._trace = trace
        self._export = export
        provider = TracerProvider(resource=Resource.create({"service.name": "shoal-coordinator"}))
        provider.add_span_processor(export)
        self._tracer = provider.get_tracer("shoal")
        self._items: dict[str, dict[int, Span]] = {}
        self._tasks: dict[int, Span] = {}

    def given(self, order: ins.Execute) -> None:
        if (item := self._item(order.job, order.item, order.waited)) is None:
            return
        self._tasks[order.instruction] = self._tracer.start_span(
            f"task {order.stage}",
            self._trace.set_span_in_context(item),
            attributes={
                "shoal.stage": order.stage,
                "shoal.device": order.device,
                "shoal.tier": order.tier.name.lower(),
                "shoal.attempt": order.attempt,
                "shoal.wait_seconds": seconds(order.waited),
            },
        )

    def answered(self, order: ins.Execute, event: ev.Event) -> None:
        if (task := self._tasks.pop(order.instruction, None)) is None:
            return
        match event:
            case ev.TaskFinished():
                task.set_attribute("shoal.compute_seconds", seconds(event.compute))
            case ev.InstructionFailed():
                self._fail(task, event.failure)
        task.end()

    def entered(self, order: ins.Travel) -> None:
        self._item(order.job, order.item)

    def travelled(self, orders: Iterable[ins.Travel], event: ev.Event) -> None:
        if not isinstance(event, ev.ItemsTravelled):
            return  # its tasks show what is wrong
        for order in orders:
            if (item := self._item(order.job, order.item)) is not None:
                self._trace_stages(item, order.devices, event.compute)

    def _trace_stages(
        self, item: "Span", devices: Iterable[str], compute: Iterable[Nanoseconds]
    ) -> None:
        for stage, (device, took) in enumerate(zip(devices, compute, strict=True)):
            self._tracer.start_span(
                f"task {stage}",
                self._trace.set_span_in_context(item),
                attributes={
                    "shoal.stage": stage,
                    "shoal.device": device,
                    "shoal.compute_seconds": seconds(took),
                },
            ).end()

    def stored(self, job: str, items: Iterable[int]) -> None:
        for item in items:
            if (span := self._items.get(job, {}).pop(item, None)) is not None:
                span.end()

    def failed(self, order: ins.FailItem) -> None:
        if (span := self._items.get(order.job, {}).pop(order.item, None)) is not None:
            self._fail(span, order.failure)
            span.end()

    def job_ended(self, job: str) -> None:
        for span in self._items.pop(job, {}).values():
            span.end()

    def flush(self) -> tuple[int, int]:
        self._export.flush()
        return self._export.numbers

    def close(self) -> None:
        self._export.shutdown()

    def _item(self, job: str, item: int, waited: int = 0) -> "Span | None":
        items = self._items.setdefault(job, {})
        if item not in items:
            if len(items) >= _OPEN_ITEMS:
                return None
            items[item] = self._tracer.start_span(
                f"item {job}/{item}",
                attributes={"shoal.job": job, "shoal.item": item},
                start_time=time.time_ns() - waited,
            )
        return items[item]

    def _fail(self, span: "Span", failure: ev.Failure) -> None:
        span.set_attribute("shoal.failure", failure.kind.value)
        span.set_status(self._trace.StatusCode.ERROR, failure.message)


def open_traces(url: str | None, count: Callable[[int, bool], None]) -> Traces:
    """Export to a collector at `http://HOST:PORT`; None: nowhere. `count` is called for spans that
    ended, with whether the collector took them. Raises `TracesUnavailable`."""
    if url is None:
        return Traces()
    try:
        from shoal_coordinator.server.otlp import SpanExport  # noqa: PLC0415 - optional, and heavy
    except ImportError as error:
        raise TracesUnavailable from error
    return OtlpTraces(SpanExport(url, count))
