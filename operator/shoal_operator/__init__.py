"""The operator: reads the objects of a cluster, decides, writes children and status.

reconcile/     what is to be done about each object                                 PURE
controller/    the API server: informers, work queue, snapshots, actions, the Lease
pki/           what the token of a pod is good for
"""

__version__ = "0.1.0"
