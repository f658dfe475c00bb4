"""Sessions: who owns a workspace, what happens in it and in which order.

folder.py       where a session keeps its layers, home and lock on disk
turn.py         the states of a session and of its review, as a table
touch.py        what changed in the upper layer, and what the base was then (first touch)
pending.py      the changes of a quiet session: diff, commit, abort   (synchronous, no mount)
project.py      what is done to a project as a whole: lock, undo, recovery, trash
workspace.py    a mounted session: view, watcher, commands            (trio)
coordinator.py  finds, opens and ends sessions
"""
