"""The coordinator: the data plane of one pool. It knows nothing of Kubernetes and of ONNX.

dispatch/    which task runs where and when, as a state machine                     PURE
jobs/        the life of jobs from submission to recorded end, as a state machine   PURE
storage/     inputs, results, fragments and submitted jobs on disk
server/      sessions with devices, bulk streams, the services that clients call
"""

__version__ = "0.1.0"
