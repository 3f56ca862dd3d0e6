"""How often Python's garbage collector searches for unused cycles.

The dispatcher leaves none behind, and with a thousand devices it holds tens of thousands of
objects that are all in use. By default the collector searches once per 700 new objects, and its
searches took 5 of the 44 microseconds of a task. It still searches, for what libraries leave behind
(an exception with its traceback, a call that ended), but more rarely.
"""

import gc
from typing import Final

_NEW_OBJECTS: Final = 20_000


def collect_rarely() -> None:
    """For the whole process."""
    _, *older = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *older)
