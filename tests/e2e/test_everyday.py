"""Everyday programs give the same outcome in a view as in the ordinary folder at the same place."""

import shutil
import textwrap
import zipfile
from pathlib import Path

import pytest

from tests.e2e.driver import Box, Done
from tests.e2e.listing import Entry, listing, timed_listing

# Fixed dates give the same hash for the same commit, wherever it is made.
GIT = """
export GIT_AUTHOR_DATE='2024-01-02T03:04:05Z' GIT_COMMITTER_DATE='2024-01-02T03:04:05Z'
git config pack.threads 1

echo new > src/new.py; echo more >> README.md; rm src/util.py
git status --short; git add -A; git commit -q -m change; git log --format='%H %an %ae %s'

git checkout -q -b topic; echo topic > topic.txt; git add topic.txt; git commit -q -m topic
git checkout -q main; git branch --list; git merge -q --no-ff -m merged topic; git tag -a v1 -m v1
git branch -q -d topic; git log --graph --format=%H

echo dirty >> README.md; echo untracked > left.txt; git stash -q -u; git status --short
echo other > other.txt; git stash pop -q; git stash list; git status --short

for n in 1 2 3; do echo $n > n; git add n; git commit -q -m $n; done
git -c gc.auto=0 gc -q --prune=now; git fsck --strict; git count-objects; git log --format=%H
"""

# Each in a folder of its own with a copy of src, so that one run holds them all.
FILES = {
    "sed and editors": r"""
sed -i 's/main/second/' src/main.py
printf 'saved\n' > src/.util.py.swp; mv src/.util.py.swp src/util.py     # write and rename
cp -p src/main.py src/main.py~; printf 'new text\n' > src/main.py        # backup and overwrite
printf 'x' | dd of=src/util.py bs=1 seek=2 conv=notrunc status=none
chmod 600 src/util.py; : > empty; mkdir -p deep/er/est; ln -s ../src/main.py src/link; truncate -s 10 big
""",
    "rm and cp and mv": """
mkdir -p keep/a; echo x > keep/a/x; ln -s a keep/l; chmod 750 keep/a; touch -d @1000000000 keep/a/x
cp -a src copy; cp -a keep keep2; rm -rf src; mkdir src; echo again > src/only.py
ln copy/main.py copy/hard; stat -c '%h %s' copy/main.py; find . -print | sort
mv keep2 moved; rm -rf keep
""",
    "tar": """
mkdir pack; for n in 1 2 3; do echo $n > pack/$n; done; chmod +x pack/1; ln -s 1 pack/link
tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf pack.tar pack src
rm -rf pack src; tar --no-same-owner -xf pack.tar; tar -tf pack.tar; sha256sum < pack.tar
""",
    "sqlite": """
python3 - <<'PY'
import sqlite3
db = sqlite3.connect("data.db", isolation_level=None)
assert db.execute("pragma journal_mode=wal").fetchone() == ("wal",)
db.execute("create table t (n integer primary key, v text)")
other = sqlite3.connect("data.db", isolation_level=None)
for n in range(50):
    db.execute("insert into t values (?, ?)", (n, "v" * n))
    assert other.execute("select count(*) from t").fetchone() == (n + 1,)
db.execute("begin immediate")
try:
    other.execute("pragma busy_timeout=0")
    other.execute("begin immediate")
    print("two writers at once")
except sqlite3.OperationalError as exc:
    print(exc)
db.execute("commit"); other.close(); db.execute("pragma wal_checkpoint(truncate)")
print(db.execute("pragma integrity_check").fetchone(), sorted(__import__("os").listdir(".")))
db.close()
PY
""",
    "the folder itself": """
rm -rf ../base/src ../base/gone; echo x > ../base/src; mkdir ../base/gone; chmod 711 ../base
mv ../base/one ../base/two; ln -sfn elsewhere ../base/link
""",
}


def all_files() -> str:
    made = []
    for name, script in FILES.items():
        made.append(f"mkdir '{name}'; cp -r src '{name}'; (cd '{name}'\n{script})")
    return "\n".join(made)


def make_twin(box: Box) -> Path:
    """The project set aside, and an ordinary copy of it in its place."""
    aside = box.project.with_name("aside")
    box.project.rename(aside)
    shutil.copytree(aside, box.project, symlinks=True)
    return aside


def natively(box: Box, script: str) -> tuple[Done, dict[str, Entry]]:
    """What the script does to an ordinary copy at the very same place, which then goes."""
    aside = make_twin(box)
    done = box.native("sh", "-euc", script)
    outcome = listing(box.project)
    shutil.rmtree(box.project)
    aside.rename(box.project)
    # What it left in its home; inside, the home is a private one.
    for entry in box.home.iterdir():
        if entry.name != "work":
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    return done, outcome


def steady(outcome: dict[str, Entry]) -> dict[str, Entry]:
    """`outcome` with only kind and mode of what differs from run to run of the same program.

    .git/index holds ctimes and inode numbers; its entries are compared by git status in the scripts.
    Byte code has reference flags that depend on what the compiling process did before.
    """
    return {
        name: (entry[0], entry[1], "") if name == ".git/index" or name.endswith(".pyc") else entry
        for name, entry in outcome.items()
    }


def without_objects(outcome: dict[str, Entry]) -> dict[str, Entry]:
    """A commit never deletes objects, so that the user's git loses nothing: the project may have more."""
    return {name: e for name, e in outcome.items() if not name.startswith(".git/objects")}


def check_same_outcome(box: Box, script: str) -> None:
    """Run natively and in a view; then hold untouched, view, commit and undo against each other."""
    plain, expected = natively(box, script)
    plain.ok()
    before, before_timed = listing(box.project), timed_listing(box.project)
    assert expected != before, "the script changes nothing, so it can show nothing"

    done = box.keep(f"{script}\necho STATUS; git status --porcelain").ok()
    out, _, status = done.out.partition("STATUS\n")
    assert out == plain.out
    assert timed_listing(box.project) == before_timed

    view = box.view()
    assert steady(view) == steady(expected)
    box.deltabox("commit").ok()
    after = listing(box.project)
    # The agent's index goes in only where it says something else than the project's.
    assert steady(without_objects(after)) == steady(without_objects(view))
    assert after.items() >= {n: e for n, e in view.items() if n.startswith(".git/objects")}.items()
    assert box.git("status", "--porcelain") == status
    box.deltabox("undo").ok()
    assert listing(box.project) == before


def test_files_are_the_same_in_view_and_folder(box: Box) -> None:
    for name in ("src/a", "src/b", "gone/c", "one"):
        box.write(f"base/{name}", name)
    (box.project / "base/link").symlink_to("one")
    check_same_outcome(box, all_files())


def test_git_is_the_same_in_view_and_folder(box: Box) -> None:
    check_same_outcome(box, GIT)


def test_users_git_is_right_after_an_agents_commit_and_gc(box: Box) -> None:
    box.keep(GIT).ok()
    box.deltabox("commit").ok()
    assert box.git("status", "--porcelain").split() == [
        "M",
        "README.md",
        "??",
        "left.txt",
        "??",
        "other.txt",
    ]
    assert box.git("log", "-3", "--format=%s").split() == ["3", "2", "1"]
    box.native("git", "fsck", "--strict", "--no-dangling").ok()


def test_identity_of_the_user_signs_the_agents_commits(box: Box) -> None:
    box.git("config", "--unset", "user.name")
    box.git("config", "--unset", "user.email")
    (box.home / ".gitconfig").write_text("[user]\nname = Ann Other\nemail = ann@example.invalid\n")
    done = box.keep("git commit -q --allow-empty -m x; git log -1 --format='%an <%ae>'").ok()
    assert done.out == "Ann Other <ann@example.invalid>\n"


def test_abort_leaves_every_time_and_inode_as_before(box: Box) -> None:
    before = timed_listing(box.project)
    box.keep(GIT).ok()
    box.keep("rm -rf src README.md .git/hooks; mkdir README.md; echo x > README.md/x").ok()
    assert box.changes()
    box.deltabox("abort").ok()
    assert timed_listing(box.project) == before
    assert box.deltabox("diff").status == 2


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc) here")
def test_c_build_is_the_same_and_runs_after_commit(box: Box) -> None:
    box.write("main.c", '#include "lib.h"\nint main(void) { return answer() - 42; }\n')
    box.write("lib.h", "int answer(void);\n")
    box.write("lib.c", '#include "lib.h"\nint answer(void) { return 42; }\n')
    build = (
        "mkdir -p o; for f in main lib; do cc -g -c -o o/$f.o $f.c; done; cc -o app o/*.o; ./app"
    )
    check_same_outcome(box, build)
    box.keep(build).ok()
    box.deltabox("commit").ok()
    box.native(box.project / "app").ok()


def make_wheel(folder: Path) -> Path:
    """A wheel made by hand: one module, one script."""
    wheel = folder / "tiny-1.0-py3-none-any.whl"
    info = "tiny-1.0.dist-info"
    files = {
        "tiny.py": "def main():\n    print('tiny works')\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ntiny = tiny:main\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return wheel


@pytest.mark.slow  # pip unpacks itself
def test_script_that_pip_installed_works_inside_and_after_commit(box: Box) -> None:
    make_wheel(box.project)
    script = """
    python3 -m venv env
    env/bin/pip install -q --disable-pip-version-check --no-index ./tiny-1.0-py3-none-any.whl
    head -n 1 env/bin/tiny; env/bin/tiny
    """
    expected = f"#!{box.project}/env/bin/python3\ntiny works\n"
    assert box.keep(textwrap.dedent(script)).ok().out == expected
    box.deltabox("commit").ok()
    assert box.native(box.project / "env/bin/tiny").ok().out == "tiny works\n"


@pytest.mark.skipif(shutil.which("npm") is None, reason="no npm here")
def test_npm_install_of_a_local_package_is_the_same(box: Box) -> None:
    box.write("package.json", '{"name": "app", "version": "1.0.0"}\n')
    box.write(
        "lib/package.json", '{"name": "lib", "version": "1.0.0", "bin": {"lib": "cli.js"}}\n'
    )
    box.write("lib/cli.js", "#!/usr/bin/env node\nconsole.log('lib works')\n", mode=0o755)
    script = """
    npm install --offline --no-audit --no-fund --no-update-notifier --loglevel=error ./lib >/dev/null
    node_modules/.bin/lib
    """
    check_same_outcome(box, script)
