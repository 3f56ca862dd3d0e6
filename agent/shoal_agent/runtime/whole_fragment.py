"""A fragment that runs as one session."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import onnxruntime

from shoal_agent.runtime.failures import Stopper, failure_of
from shoal_agent.runtime.inputs import input_spec
from shoal_agent.runtime.mapped_pages import PageRange
from shoal_agent.runtime.process_memory import clean_pages
from shoal_protocol.tensors import Array


class WholeFragment:
    """One session. It maps its weights, and they stay in memory once they have been read."""

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        weights: Sequence[Path],
        weight_bytes: int,
        *,
        prepared: bool,
    ) -> None:
        """`weights` are the files that are mapped; packed copies in them do not count as weights.

        Raises `RuntimeFailed`.
        """
        self.prepared = prepared
        self._session = session
        self._weights = [each.resolve() for each in weights]
        self.weight_bytes = weight_bytes
        self.inputs = tuple(input_spec(value) for value in session.get_inputs())
        self.outputs = tuple(value.name for value in session.get_outputs())

    def run(self, feed: Mapping[str, Array], stopper: Stopper) -> list[Array]:
        """One item, as views into the arena; raises `RuntimeFailed` and its kinds."""
        try:
            return list(self._session.run(self.outputs, feed, stopper.options))
        except Exception as error:  # the runtime's exceptions have no common base but this
            raise failure_of(error, stopped=stopper.stopped) from error

    def weight_pages(self) -> list[PageRange]:
        """Where its weights are mapped."""
        return clean_pages(self._weights)
