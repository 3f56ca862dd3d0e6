"""Numbers that bound what the dispatcher does."""

from dataclasses import dataclass

from shoal_protocol.units import Nanoseconds, nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Numbers that a caller may set; the defaults suit devices on one network.

    `queue_depth`: tasks given to a device and not ended; the second one's inputs travel while the
    first computes, a third would only wait. Only where a task is shorter than the `turnaround`
    from its answer to the next instruction, up to `queue_extra` more are given, to fill that time
    (and to travel many in one message), as far as what they take is small beside the budget. Where
    tasks may run at once, the next batch waits while one runs, within the same bound.
    An activation is sent ahead to a device with one task more than that at most, given or
    reserved. `silence` without a sign of life is followed by a probe, `probe_patience` after that
    the device is lost (Asteroid, section 3.4, heartbeat). `homes_grace`: how long others wait for
    a home that has not joined, `joining`: how long a job does that has no room elsewhere (agents
    redial every five seconds). `settle`: how long a fragment must lie idle before another takes its
    place without need; `patience`: how long a stage that no device serves waits for a better moment
    to evict; `turn`: how long a fragment is served, at least,
    while one of equal priority waits for the device. `load_tries` and `kills` bound what a
    fragment, and an item, may cost, `load_losses` how many devices in a row may be lost while they
    load one fragment (see `crashes`); `overdue` is when a device that lives but does not answer an
    instruction counts as lost: for one that fetches a fragment, from when it last
    reported received bytes. A task is given ahead of its inputs only where what makes them takes
    no longer than `ahead`; an item travels only where none of its stages takes longer on the
    fastest device, and is given up after `travel`. Items wait no longer than `planning` for routes.
    """

    queue_depth: int = 2
    queue_extra: int = 32
    turnaround: Nanoseconds = nanoseconds(0.008)
    silence: Nanoseconds = nanoseconds(6)
    probe_patience: Nanoseconds = nanoseconds(3)
    ranking_interval: Nanoseconds = nanoseconds(1)
    settle: Nanoseconds = nanoseconds(1)
    patience: Nanoseconds = nanoseconds(1)
    turn: Nanoseconds = nanoseconds(2)
    homes_grace: Nanoseconds = nanoseconds(5)
    joining: Nanoseconds = nanoseconds(30)
    retry_delay: Nanoseconds = nanoseconds(0.5)
    retry_delay_most: Nanoseconds = nanoseconds(30)
    load_tries: int = 6
    kills: int = 3
    load_losses: int = 4
    overdue: Nanoseconds = nanoseconds(600)
    ahead: Nanoseconds = nanoseconds(0.1)
    planning: Nanoseconds = nanoseconds(1)
    travel: Nanoseconds = nanoseconds(60)
    ended_jobs: int = 64

    def delay(self, tries: int) -> Nanoseconds:
        """Before the next try, after so many that were delayed: each time twice as long."""
        return min(Nanoseconds(self.retry_delay << min(tries, 16)), self.retry_delay_most)
