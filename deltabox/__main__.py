"""`python -m deltabox` and the `deltabox` command."""

import sys


def main() -> int:
    from deltabox.cli.main import main as run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
