"""The streaming scheduler as a state machine: events in, instructions out. Pure.

Here belong: which task runs where and when, what is loaded, evicted, prefetched and forwarded, what
a loss undoes. Not here: bytes, sockets, clocks. `events` and `instructions` are its whole border,
`machine.step` its one function, `views` what others may read.

Each module imports from the lines below its own only (import-linter checks that). The numbers are
those of a step's phases, which run in their order unless the worklist sends one back (see
`machine`):

    views                                    what the server may read of the state
    machine                                  the phases of a step
    tasks, devices                1, 5       what an event changes: answers, losses
    residency                     7          fragment to device
    decisions                                the tables that residency decides by
    fragments, crashes            1          Load, Unload, Prefetch; what takes devices down
    jobs                          1, 2, 4    jobs and items: submit, admit, complete, end
    assignment, ranking           3, 6       task to device; scores of devices
    itineraries                              an item of a light job through all its stages
    larger_items, full_devices               items that devices refuse, by themselves or together
    services                                 homes and demand; devices left alone for a while
    servers                                  devices of one service in the order of their rank
    readiness                                the graph of one item; outputs held and released
    state                                    everything known, and the worklist of a step
    device                                   memory, disk, work and health of one device
    instructions
    events, histogram, timings, limits, item_sets, crowding
"""
