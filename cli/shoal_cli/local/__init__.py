"""Local mode: a coordinator and its agents as processes of one machine, and who watches them.

Here belong: the run's workspace, the cgroups, the supervisor, the preparation of jobs (check,
profile, cut, plan), the watch over a running coordinator, the verification against the whole model,
and the report. Not here: what a terminal shows (`commands`), and anything that a cluster would do
otherwise: the coordinator and the agents are the very programs that a cluster starts.
"""

import os

# Of ONNX Runtime, which the verification imports: as in the agent (`shoal_agent`).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
