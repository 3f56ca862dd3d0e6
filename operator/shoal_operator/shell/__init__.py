"""What touches the world: the coordinator's server, the fragment store, inputs and results, local
mode.

Here belong sockets, files, processes and clocks. What can be decided without them is decided in
`planning`, `dispatch` and `api`, which know nothing of this folder.
"""
