"""Bulk transfer: tensors over one stream in both directions, the same code on both ends.

`transport` says what a link needs of a stream, and adapts gRPC's streams to it; `local` is the
stream between processes of one host. `link` is the loop: it sends transfers and acknowledges those
that come; `sources` has their frames. `receiving` puts frames into buffers that were granted. The
modules beside this package define frames (`frames`), choose codecs (`codecs`) and make tensors of
frames (`assembly`). The two processes decide who may send what.
"""
