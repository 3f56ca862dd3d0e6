"""`python -m shoal_agent`: the agent as a process (`shoal agent` starts it too)."""

from shoal_agent.shell.command import main

if __name__ == "__main__":
    raise SystemExit(main())
