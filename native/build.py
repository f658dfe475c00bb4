"""Compiles native/*.c into deltabox/_native/ for the wheel and for editable installs.

Run by the package's own build (`pip install .`) and by hand: `python native/build.py`.
Must not import anything of deltabox: it runs before the package exists.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "deltabox" / "_native"
# Static: the programs run inside other roots, where the host's libc may not be; and they start faster.
CFLAGS = ["-std=gnu11", "-O2", "-static", "-D_GNU_SOURCE", "-D_FILE_OFFSET_BITS=64"]
WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wshadow",
    "-Wconversion",
    "-Wmissing-prototypes",
    "-Wformat=2",
]


def compile_all() -> list[Path]:
    """Compile each stale program; returns all of them. A compiler's error ends the build."""
    OUT.mkdir(exist_ok=True)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    built = []
    for source in sorted(HERE.glob("*.c")):
        target = OUT / f"deltabox-{source.stem}"
        inputs = [source, *HERE.glob("*.h"), Path(__file__)]
        if not target.exists() or target.stat().st_mtime < max(i.stat().st_mtime for i in inputs):
            fresh = target.with_suffix(".new")
            subprocess.run(
                [*compiler, *CFLAGS, *WARNINGS, "-o", str(fresh), str(source)], check=True
            )
            fresh.replace(target)
        built.append(target)
    return built


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:
    pass
else:

    class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """Marks the wheel as built for this platform and puts the programs into it."""

        PLUGIN_NAME = "custom"

        # No @override: typing has it from 3.12 only, and a build needs nothing but hatchling.
        def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # type: ignore[explicit-override]
            compile_all()
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


if __name__ == "__main__":
    for program in compile_all():
        sys.stdout.write(f"{program}\n")
