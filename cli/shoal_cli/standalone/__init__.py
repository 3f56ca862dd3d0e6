"""A coordinator without Kubernetes: devices and users join it with a line that it prints.

    folders         what it keeps on disk: its authority, invitations, fragments, jobs
    invitations     tokens: made, used once, expired
    serving         its processes: the enrolment service here, the coordinator beside it
    submission      `shoal run --coordinator`: jobs cut here, run there, results brought back
    sent_jobs       what a job is called there, and where its files are
    watching        jobs there, watched for as long as they take
    remote_devices  its devices, as manifests and plans see them
    remote_pools    a coordinator as a pool of a program (`shoal.pool(coordinator=...)`)

The authority's key stays in the process that enrols; the coordinator, which devices and clients
talk to, has a certificate that this process renews.
"""
