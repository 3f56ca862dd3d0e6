"""The agent: runs fragments on one device under a memory budget, and moves activations in and out.

    command, agent     the process: options, start, session after session, shutdown
    installation       the systemd unit that starts it at boot
    session/           one session: the control stream, the tasks given over it, their outputs
    calibration/       what the device can do, measured before it joins
    runtime/           fragments in ONNX Runtime; what they and this process take
    transport/         bulk streams: activations in and out, and what peers are offered
    cache/             fragments on disk; fetching them
    enrolment/         the device's certificate
    telemetry/         metrics, machine readings, logs
    memory/, execution/     the budget's ledger and the queue of tasks                  PURE

Light on purpose: it imports neither `onnx` nor `kubernetes` nor `kopf`.
"""

import os

# Since 1.29 ONNX Runtime reports to its maker, from ten seconds after its import on, unless this is
# set before that. A device tells nobody what it runs, and needs the megabyte for something else.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Otherwise gRPC writes to the log at each handshake that fails; the agent says why, once.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

__version__ = "0.1.0"
