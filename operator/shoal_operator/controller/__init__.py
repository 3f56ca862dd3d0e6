"""The operator on a cluster: what is seen becomes snapshots, what was decided is carried out.

Here: the API server (login, requests, watches through kopf, the Lease), the cache and the queue,
calls of coordinators, metrics and probes. Not here: any decision about an object
(`shoal_operator.reconcile`), what the coordinator does.

    watches -> cache -> queue -> snapshots -> reconcile -> actions
                          ^                                   |
                   coordinators <------------------------------
"""
