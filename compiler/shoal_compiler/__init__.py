"""An ONNX file becomes a profile; profile and cuts become fragments in the store.

Needs onnx, runs nothing. Here belong: the checks on untrusted files (`wire`, `safety`), a
graph's normal form and order, shapes, costs, and the writing of fragments. Not here: where to cut
(`shoal_planner.cuts`), what a segment takes and costs (`shoal_planner.segments`), and ONNX Runtime.

    file -> wire -> safety -> graph -> order, shapes, costs -> profile
                              graph + profile + cuts -> cutting -> fragments -> store
"""
