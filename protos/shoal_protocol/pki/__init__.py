"""Certificates: an authority, the service that enrols callers at it, and a caller's side of that.

`authority` makes and signs, `enrolment` is the service, `request` gets a certificate from it.
They need `cryptography`, which no other module of this package does: import them only in processes
that sign or enrol.
"""
