"""Bulk transfer: tensors over one stream in both directions, the same code on both ends.

`transport` says what a link needs of a stream, and adapts gRPC's streams to it; another wire is
another transport. `link` is the loop: it sends transfers and acknowledges those that come.
`receiving` takes the frames of a stream into buffers that were granted before. What a frame is,
which codec a tensor gets, and how frames become tensors again is told by `frames`, `codecs` and
`assembly` beside this package. Who may send what is decided by the two processes.
"""
