#!/bin/sh
# Debian packages for the whole test suite, as root. npm is asked for only where none is there: a
# machine with Node from elsewhere has its own, and Debian's would collide with it.
set -eu
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
    bubblewrap ca-certificates gcc git libc6-dev make procps python3-dev python3-venv ripgrep strace tmux util-linux
command -v npm >/dev/null || apt-get install -y -qq --no-install-recommends nodejs npm
