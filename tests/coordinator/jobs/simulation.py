"""The real jobs' machine in one process, under a seed, with effects that are simulated.

A scenario draws what clients ask and what goes wrong from its seed: submissions of the same work
and of another, other terms and newer plans by two operators, cancellations, removals, errors
inside, crashes. Every effect is answered later, in any order; some fail. A crash loses everything
but the disk. After a while the trouble stops. Then everything must end in a bounded number of
steps.

What is checked at every step: see `simulated_checks`.

    PYTHONPATH=tests python tests/coordinator/jobs/simulation.py 0 1000

runs these seeds, and prints what fails.
"""

import sys

from coordinator.jobs.simulated_checks import Wrong
from coordinator.jobs.simulated_world import World

TROUBLED_STEPS = 120
BOUND_STEPS = 2000
"""In which everything must have ended once the trouble has stopped."""


def simulate(seed: int, crash_after: int | None = None) -> World:
    """Run one scenario to its end; `Wrong` says what was wrong, with the transcript."""
    world = World(seed, crash_after)
    try:
        for _ in range(TROUBLED_STEPS):
            world.take_a_step()
        world.calm = True
        for _ in range(BOUND_STEPS):
            world.take_a_step()
            if world.at_rest:
                break
        else:
            raise world.wrong("not everything has ended")
        world.check_rest()
    except Wrong:
        raise
    except Exception as error:
        raise world.wrong(repr(error)) from error
    return world


def main() -> None:
    """Run a range of seeds."""
    first, last = int(sys.argv[1]), int(sys.argv[2])
    failed = []
    for seed in range(first, last):
        try:
            simulate(seed)
        except Wrong as wrong:
            failed.append(seed)
            print(wrong if len(failed) == 1 else str(wrong).split("\n", maxsplit=1)[0])
    print(f"{last - first} seeds, {len(failed)} failed: {failed}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
