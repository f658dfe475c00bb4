"""`python -m deltabox` and the `deltabox` command."""

import os
import sys


def main() -> int:
    _open_streams()
    from deltabox.cli.main import main as run

    return run(sys.argv[1:])


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
    sys.exit(main())
