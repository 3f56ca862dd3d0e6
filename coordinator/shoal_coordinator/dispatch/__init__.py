"""The streaming scheduler as a state machine: events in, instructions out. Pure.

Here belong: which task runs where and when, what is loaded, evicted, prefetched and forwarded, what
a loss undoes. Not here: bytes, sockets, clocks. `events` and `instructions` are its whole border.
"""
