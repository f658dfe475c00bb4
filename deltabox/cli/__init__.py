"""The command line: argv → one call → exit status. The only place that prints.

args.py      flags and verbs          main.py     dispatch, errors → one sentence and a status
run.py       `run`: start, relay, card            terminal.py  raw mode, pty and pipe relays
review.py    `diff review commit abort undo`      card.py      the approval card and its choices
report.py    `sessions log gc`             text.py      review results as lines for a person
demo.py      `demo`: a scripted agent on a sample project, each promise checked aloud
"""
