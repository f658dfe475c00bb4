"""deltabox: run an agent on a copy-on-write view of a project, review what it did, commit or abort.

General layout. Imports go one way, downwards in this list (import-linter checks it):

  cli/         argv → one call → exit status; the only place that prints
  client.py    Python's API: a trio client of the protocol, and `open`
  server/      stdio and socket transports of the protocol
  session/     coordinator, workspace, turn: who owns what, in which order
  protocol/    messages, frames
  review/      diff, digest, commit, abort, undo: pure plans, dumb executors; never needs a mount
  engines/     how the view is made; delta.py is the on-disk format
  isolation/   policy → argv → process
  store.py     SQLite: sessions, turns, journal, reviews, commits
  process.py   the only starter of processes
  config.py    the only reader of env, home and TOML
  paths.py     the only escape check
  errors.py    each deliberate error with its codes

Trio runs session/, server/, engines/ and process.py; review/, store.py and paths.py are synchronous.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deltabox.client import Client, Session, coordinator, open  # noqa: A004 - deltabox.open

__all__ = ["Client", "Session", "coordinator", "open"]


def __getattr__(name: str) -> Any:
    """Python's API, imported when it is used: the command line does not pay for it."""
    if name in __all__:
        from deltabox import client

        return getattr(client, name)
    raise AttributeError(f"module 'deltabox' has no attribute {name!r}")
