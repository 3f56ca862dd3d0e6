"""The streaming scheduler as a state machine: events in, instructions out. Pure.

Here belong: which task runs where and when, what is loaded, evicted, prefetched and forwarded, what
a loss undoes. Not here: bytes, sockets, clocks. `events` and `instructions` are its whole border,
`machine.step` its one function, `views` what others may read.

Each module imports from the lines below its own only (import-linter checks that), and a step calls
in the order of the numbers, once each unless the worklist sends it back (see `machine`):

    machine                                  the phases of a step
    1 tasks, devices                         what an event changes: answers, losses
    4 residency                              fragment to device
      decisions                              the tables that residency decides by
    1 fragments        crashes               Load, Unload, Prefetch; what takes devices down
    2 jobs                                   jobs and items: submit, admit, complete, end
    3 assignment       ranking               task to device; scores of devices
    services                                 homes and demand; devices left alone for a while
    servers                                  devices of one service in the order of their rank
    readiness                                the graph of one item; outputs held and released
    state                                    everything known, and the worklist of a step
    device                                   memory, disk, work and health of one device
    events, instructions, histogram
"""
