"""Enrolment on a cluster: what the token of a pod is good for."""
