"""The coordinator's files: inputs and results of jobs, its volume, the jobs submitted to it.

Here belong formats on disk and their durability. Not here: sockets (`server`), and what runs where
(`dispatch`).
"""
