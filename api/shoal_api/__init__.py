"""The kinds of `shoal.dev` as frozen values: declaration, parsing, schema. Pure.

Here belong: what a Model, Partition, DevicePool, Device, Placement and InferenceJob say, and how
their fields are checked. Not here: reading files, any decision, and what is written from the
declarations once: the CustomResourceDefinitions and the reference (`hack/kinds`).
"""
