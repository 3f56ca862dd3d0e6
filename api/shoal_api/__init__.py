"""The kinds of `shoal.dev` as frozen values: declaration, parsing, schema, reference. Pure.

Here belong: what a Model, Partition, DevicePool, Device, Placement and InferenceJob say, how their
fields are checked, and the CustomResourceDefinitions and the reference made from that. Not here:
reading files, and any decision.
"""
