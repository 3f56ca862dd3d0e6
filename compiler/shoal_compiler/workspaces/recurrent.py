"""Recurrent layers: what they multiply of all steps is made before the first one.

Both directions have their own at the same time. The backward one has its inputs and what it gives
turned around, too.
"""

from collections.abc import Mapping
from typing import Final

from shoal_compiler.shaped import Shaped
from shoal_compiler.workspaces.workspace import Rule, Workspace, floats

_GATES: Final = {"LSTM": 4, "DynamicQuantizeLSTM": 4, "GRU": 3, "RNN": 1}
_STATES: Final = 8
"""Of a step, what a direction has of its states and biases for all items, in all cells."""


def _recurrent(shaped: Shaped) -> Workspace:
    steps, batch, width = shaped.input(0)
    directions, hidden = shaped.input(1)[0], min(shaped.input(2)[1:])
    gates, rows = _GATES[shaped.node.op_type], steps * batch
    made = [rows * gates * hidden] * directions
    states = [_STATES * batch * hidden] * directions
    turned = [] if shaped.text("direction") in ("", "forward") else [width, hidden]
    if gates == 1 and not shaped.gives(0):  # what is not asked for is made all the same
        turned.append(directions * hidden)
    return floats(*made, *states, *(rows * each for each in turned))


def _quantised(shaped: Shaped) -> Workspace:
    """What goes in is quantised, by each direction."""
    steps, batch, width = shaped.input(0)
    given = _recurrent(shaped)
    rounded = [max(steps * width, min(shaped.input(2)[1:])) * batch] * shaped.input(1)[0]
    return Workspace((*given.arena, *rounded))


RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    "DynamicQuantizeLSTM": _quantised,
}
