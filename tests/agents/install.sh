#!/bin/sh
# install.sh DIR: the two real command-line agents that the tests drive, from the npm registry (about
# 15 s, 660 MB; no model is ever called). Does nothing where they stand already.
set -eu
dir=${1:?usage: install.sh DIR}
mkdir -p "$dir"
for agent in claude:@anthropic-ai/claude-code@2.1.197 codex:@openai/codex@0.171.0; do
    name=${agent%%:*} package=${agent#*:}
    [ ! -x "$dir/$name/node_modules/.bin/$name" ] || continue
    npm install --silent --no-fund --no-audit --no-save --prefix "$dir/$name" "$package"
done
