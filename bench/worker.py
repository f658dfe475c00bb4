"""Does file work on request and says how long each took. Runs alone, inside a workspace or outside.

One JSON object a line: {"argv": […]} runs a program with its output thrown away, {"read": DIR}
reads every file below, {"create": DIR, "count": N} makes N files in a new directory. The answer is
{"ms": …}. Timed here, so that neither the sandbox's start nor the pipes count. Standard library
only: it is handed to a bare `python3 -c`.
"""

import json
import os
import sys
import time


def run(argv: list[str]) -> None:
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    pid = os.posix_spawnp(argv[0], argv, os.environ, file_actions=quiet)
    status = os.wait4(pid, 0)[1]
    if status:
        raise SystemExit(f"{argv} ended with status {status:#x}")


def read(top: str) -> None:
    for directory, names, files in os.walk(top):
        if ".git" in names:
            names.remove(".git")
        for name in files:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            while os.read(fd, 1 << 17):
                pass
            os.close(fd)


def create(folder: str, count: int) -> None:
    os.mkdir(folder)
    for number in range(count):
        path = os.path.join(folder, f"file{number}.txt")
        with open(path, "wb") as file:
            file.write(b"made by the benchmark\n" * 10)


def main() -> None:
    print(json.dumps({"ms": 0.0}), flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        start = time.perf_counter_ns()
        if "argv" in task:
            run(task["argv"])
        elif "read" in task:
            read(task["read"])
        else:
            create(task["create"], task["count"])
        print(json.dumps({"ms": (time.perf_counter_ns() - start) / 1e6}), flush=True)


main()
