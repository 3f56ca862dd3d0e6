"""`python -m shoal_cli.local.step MODULE`: the process of a step (see `steps`)."""

import gc
import importlib
import sys

if __name__ == "__main__":
    gc.disable()  # what is imported is not looked through before all of it is there (`begin_step`)
    importlib.import_module(sys.argv[1]).main()
