"""`python -m deltabox` and the `deltabox` command: one process for one verb, started and ended fast."""

import gc
import os
import sys
from typing import NoReturn


def main() -> NoReturn:
    """Never returns: what Python does at its end, freeing module after module, takes 30 ms.

    Whatever has to be closed has been by then, in contexts; no exit hook is counted on.
    """
    _open_streams()
    # Imports make tens of thousands of objects that all stay; cli.main turns it on after them.
    gc.disable()
    from deltabox.cli.main import main as run

    status = run(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)


def _open_streams() -> None:
    """What the caller closed becomes /dev/null: a file opened later must not take the number of a
    standard stream, and what is printed there must not end in a traceback."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != fd:
                os.dup2(opened, fd)
                os.close(opened)
            os.set_inheritable(fd, True)
            setattr(sys, name, open(fd, "r" if fd == 0 else "w"))  # noqa: SIM115 - for the process's life


if __name__ == "__main__":
    main()
