"""The wire: newline-delimited JSON-RPC 2.0, one object a line. No I/O in here.

jsonrpc.py   bytes ↔ frames ↔ envelopes, limits, error objects
client.py    one blocking call over a socket, for the command line
"""
