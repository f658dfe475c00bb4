"""Transports of the protocol. Wire structs stop here: methods translate to session/ calls.

socket.py          a session owner's 0600 socket: other terminals' verbs arrive here
review_methods.py  review.* and session.status → the workspace
"""
