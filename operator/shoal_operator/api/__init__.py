"""The kinds and the documents that pass between the parts, as frozen values. Pure.

Here belong: what a Model, Partition, DevicePool, Placement and InferenceJob say, how their fields
are checked, and the values (`Profile`, `PartitionDocument`) that cutting, planning and dispatch
hand to one another. Not here: reading files, and any decision.
"""
