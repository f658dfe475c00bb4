"""deltabox-enter: a program starts where the view stands, with the descriptors it was given and no more."""

import os
from pathlib import Path

import pytest

from deltabox.engines.overlay import OverlayEngine
from deltabox.errors import Failed
from deltabox.process import native_program, run_trusted
from tests.places import Place, run_in, sh, write

pytestmark = pytest.mark.overlay


async def test_program_sees_the_view_at_the_project_path(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        write(view, "a", b"in the view")
        path = place.project / "a"
        assert run_in(view, "/bin/cat", str(path)) == "in the view"
        assert path.read_text() == "base a"


async def test_environment_is_empty(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        assert run_in(view, "/usr/bin/env") == ""


async def test_given_descriptors_stay_and_its_own_close(place: Place) -> None:
    async with OverlayEngine().mount(place.spec()) as view:
        reader, writer = os.pipe()
        with open(reader, "rb", buffering=0), open(writer, "wb", buffering=0):
            open_fds = run_in(view, "/bin/ls", "/proc/self/fd", fds=(reader,)).split()
        assert sorted(map(int, open_fds)) == sorted({0, 1, 2, reader, _lowest_free(reader)})


def _lowest_free(taken: int) -> int:
    """The descriptor that ls itself opens for the listing."""
    return next(fd for fd in range(3, 1024) if fd != taken)


async def test_program_keeps_the_owners_ids_and_gains_nothing(place: Place) -> None:
    owner = (12345, 12346) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    async with OverlayEngine().mount(place.spec(owner=owner)) as view:
        assert sh(view, "id -u; id -g").split() == [str(part) for part in owner]
        if os.geteuid() == 0:
            assert sh(view, "id -G") == str(owner[1])
        assert "CapEff:\t0000000000000000" in run_in(view, "/bin/cat", "/proc/self/status")


async def test_absent_program_gives_125_and_a_sentence(place: Place, tmp_path: Path) -> None:
    script = tmp_path / "no-program"
    script.write_bytes(b"\x7fELF but not really")
    script.chmod(0o755)
    async with OverlayEngine().mount(place.spec()) as view:
        with pytest.raises(
            Failed, match=r"ended with 125: deltabox-enter: .*no-program: Exec format"
        ):
            run_in(view, str(script))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "usage"),
        (["-", "x", "0", "0", "0", "p"], "mount namespace: not a number"),
        (["-", "900", "0", "0", "0", "p"], "mount namespace: not an open descriptor"),
        (["-", "0", "-1", "0", "0", "p"], "uid: not a number"),
        (["-", "0", "4294967295", "0", "0", "p"], "uid: not a number"),
        (["-", "0", "0", "0", "0", "p"], "mount namespace: Invalid argument"),
    ],
)
def test_wrong_arguments_give_125_and_a_sentence(argv: list[str], words: str) -> None:
    command = [str(native_program("enter")), *argv]
    with pytest.raises(Failed, match=f"ended with 125: deltabox-enter: {words}"):
        run_trusted([os.fsencode(part) for part in command])
