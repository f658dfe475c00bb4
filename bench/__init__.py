"""bench: what deltabox costs beside a plain directory, measured on this machine in one run.

  measure.py       rows, targets, interleaved rounds, medians
  projects.py      real files of this machine as git projects; a private home and state
  worker.py        runs inside a workspace or outside, times file work where it happens
  processes.py     session start, exec, the command line, memory, the holder
  trees.py         file work in the overlay view against the plain directory
  reviews.py       many changed paths: list, commit, discard, undo
  __main__.py      arguments and the table

`python -m bench --quick` takes about a minute, all of it about five, most of that for making and
removing 100,000 files. Never part of the tests.
"""
