"""The arena of this process, for the largest budget so far, and what works with it."""

from shoal_agent.runtime.arena import WorkingRegion, register_arena
from shoal_agent.runtime.ballast import Ballast
from shoal_agent.runtime.process_memory import MemoryMeter
from shoal_agent.runtime.recipes import AS_IT_IS
from shoal_agent.runtime.rehearsal_model import tiny_model
from shoal_agent.runtime.sessions import open_session, options_of
from shoal_agent.runtime.widening import Widening
from shoal_agent.telemetry.logs import log
from shoal_protocol.units import format_bytes


class WorkingArena:
    """Sessions that are opened from now on have their activations in it."""

    def __init__(
        self, meter: MemoryMeter, limit_bytes: int, threads: int, widening: Widening
    ) -> None:
        """`limit_bytes` is the budget that it is for; `widening` is what is opened beside runs.
        Raises what ONNX Runtime does where it makes no second arena."""
        self._meter, self._threads, self._widening = meter, threads, widening
        self.limit_bytes, self.size_bytes = limit_bytes, register_arena(limit_bytes)
        tiny = open_session(tiny_model(), options_of(AS_IT_IS, threads))
        ballast = self.ballast = Ballast(tiny, meter, limit_bytes, self.size_bytes)
        self.region = WorkingRegion(
            limit_bytes, ballast.empty_arena, lambda: ballast.holds or widening.under_way
        )

    def spreads(self, peak_bytes: int) -> bool:
        """Whether a run that takes so much in all may work in several large regions."""
        first_bytes = self.region.size_bytes
        return self.size_bytes > 2 * first_bytes and peak_bytes > first_bytes

    def enlarged(self, limit_bytes: int) -> "WorkingArena":
        """One for a larger budget in the place of this, while no other session is open: a session
        stays with the arena that it was opened with. This one where there can be no other."""
        try:
            return WorkingArena(self._meter, limit_bytes, self._threads, self._widening)
        except Exception as error:  # the runtime's exceptions have no common base
            log.warning("the budget stays at %s: %s", format_bytes(self.limit_bytes), error)
            return self
