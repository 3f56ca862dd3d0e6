"""Spans to an OpenTelemetry collector, in a thread of the SDK's own; and how many it took.

Imported only where `--otlp` asks for it: its packages are optional and heavy.
"""

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

_PATH: Final = "/v1/traces"
_EXPORT_SECONDS: Final = 2.0
"""With all tries; the end of the process waits for the last export."""
_WAITING_SPANS: Final = 2048
"""Beyond these a span is lost."""


class SpanExport(BatchSpanProcessor):
    """Exports spans to a collector at `http://HOST:PORT`. `count` is called for each that ended:
    how many, and whether the collector took them."""

    def __init__(self, url: str, count: Callable[[int, bool], None]) -> None:
        endpoint = url.rstrip("/") + _PATH
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)
        self._collector = _Collector(exporter, count)
        self._taken = 0
        super().__init__(self._collector, max_queue_size=_WAITING_SPANS)

    @property
    def numbers(self) -> tuple[int, int]:
        """Spans that the collector took, and those that are lost."""
        return self._collector.delivered, self._collector.lost

    def on_end(self, span: ReadableSpan) -> None:
        if self._taken - self._collector.tried >= _WAITING_SPANS:
            self._collector.count(1, delivered=False)
            return
        self._taken += 1
        super().on_end(span)

    def flush(self) -> None:
        """Export what waits. A collector that does not take the first spans is given no others."""
        self._collector.give_up_soon()
        try:
            self.force_flush()
        finally:
            self._collector.gives_up = False

    def shutdown(self) -> None:
        """As `flush`, for good."""
        self._collector.give_up_soon()
        super().shutdown()  # type: ignore[no-untyped-call] # the SDK declares no type


class _Collector(SpanExporter):
    """Counts what an exporter does. Spans end in one thread, and are exported in another."""

    def __init__(self, exporter: SpanExporter, count: Callable[[int, bool], None]) -> None:
        self._exporter = exporter
        self._count = count
        self._lock = Lock()
        self._took_last = True
        self.tried = self.delivered = self.lost = 0
        self.gives_up = False

    def give_up_soon(self) -> None:
        """Try no more once spans are not taken. What became of earlier ones says nothing."""
        self._took_last = self.gives_up = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE
        try:
            if self._took_last or not self.gives_up:
                result = self._exporter.export(spans)
        finally:
            self._took_last = result is SpanExportResult.SUCCESS
            self.tried += len(spans)
            self.count(len(spans), delivered=self._took_last)
        return result

    def count(self, spans: int, *, delivered: bool) -> None:
        with self._lock:
            if delivered:
                self.delivered += spans
            else:
                self.lost += spans
        self._count(spans, delivered)

    def shutdown(self) -> None:
        self._exporter.shutdown()
