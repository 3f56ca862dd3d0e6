"""A coordinator without Kubernetes: devices and users join it with a line that it prints.

    folders        what it keeps on disk: its authority, invitations, fragments, jobs
    invitations    tokens: made, used once, expired
    serving        its processes: the enrolment service here, the coordinator beside it
    submission     `shoal run --coordinator`: jobs cut here, run there, results brought back

The authority's key stays in the process that enrols; the coordinator, which devices and clients
talk to, has a certificate that this process renews.
"""
