"""What `shoal top`, `describe`, `why` and `logs` show of a coordinator.

Here belong: finding a coordinator (of this machine, at an address, of a cluster's pool), and what
its overview means. `view` and `reasons` are pure: an overview in, values and sentences out. How it
is drawn is for `shoal_cli.commands`.
"""
