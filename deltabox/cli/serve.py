"""`serve` and `exec`: a coordinator for a host on stdio; one command in a session."""

import argparse
import sys

from deltabox import config


def serve(args: argparse.Namespace) -> int:
    """Until end of file on standard input. Its stdout is the protocol's alone."""
    if args.schema:
        from deltabox.server import schema

        sys.stdout.write(schema.as_json())
        return 0
    from deltabox.server import stdio

    stdio.run(config.places(), stop_grace_ms=args.stop_grace_ms)
    return 0
