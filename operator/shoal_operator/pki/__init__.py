"""Certificates: the authority of a pool, and the service that enrols devices."""
