"""The store: all or nothing, from every earlier schema, with refusals in words."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltabox import store as module
from deltabox.errors import Ambiguous, Failed, NotFound, Refused
from deltabox.store import (
    MIGRATIONS,
    CommitId,
    Session,
    SessionId,
    Store,
    Touch,
    TrashRow,
    new_id,
)
from tests.places import run_python

S1 = SessionId("s1111111")
FOREIGN = Path(os.fsdecode(b"/home/\xff/pro\njekt"))


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "deltabox.db"


@pytest.fixture
def store(database: Path) -> Iterator[Store]:
    with Store.open(database) as opened:
        opened.add_session(a_session(S1))
        yield opened


def a_session(
    name: str, *, project: Path = FOREIGN, created_ns: int = 1, state: str = "idle"
) -> Session:
    return Session(
        id=SessionId(name),
        project=project,
        engine="overlay",
        isolation="bubblewrap",
        network="off",
        state=state,
        generation=0,
        created_ns=created_ns,
        updated_ns=created_ns,
        since_ns=1,
        pid=None,
        pid_start=None,
        socket=None,
        settings="{}",
        stack="[]",
    )


def a_touch(
    path: bytes, *, ino: int = 1, drifted: bool = False, common: str | None = None
) -> Touch:
    return Touch(path, "file", ino, 2, 3, 4, 0o644, drifted, common)


@contextmanager
def read_only_disk(store: Store) -> Iterator[None]:
    """The next page that a transaction needs is refused as on a full disk."""
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")
    try:
        yield
    finally:
        store._db.execute("PRAGMA max_page_count=1073741823")


def schema(database: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(database) as raw:
        found = raw.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
    raw.close()
    return found


# migrations


def test_every_earlier_schema_becomes_the_newest_and_keeps_its_rows(tmp_path: Path) -> None:
    new = tmp_path / "new"
    Store.open(new).close()
    for version in range(len(MIGRATIONS)):
        old = tmp_path / f"from-{version}"
        raw = sqlite3.connect(old)
        for script in MIGRATIONS[:version]:
            raw.executescript(script)
        raw.execute(f"PRAGMA user_version={version}")
        if version:
            raw.execute(
                "INSERT INTO sessions (id, project, engine, isolation, network, state, created_ns,"
                " updated_ns, since_ns) VALUES ('s1111111', x'2f70', 'overlay', 'none', 'off',"
                " 'idle', 1, 1, 1)"
            )
        raw.commit()
        raw.close()
        with Store.open(old) as store:
            assert [s.id for s in store.sessions()] == ["s1111111"] * bool(version)
            assert store.trash() == []
        assert schema(old) == schema(new)


def test_each_migration_is_read_to_its_last_statement() -> None:
    # A last statement without its semicolon would be dropped without a word.
    for script in MIGRATIONS:
        statements = list(module._statements(script))
        rest = script.replace("".join(statements), "")
        assert "".join(statements) in script
        assert all(not line.strip() or line.strip().startswith("--") for line in rest.splitlines())


def test_a_migration_that_fails_leaves_the_database_as_it_was(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(database) as store:
        store.add_session(a_session(S1))
    before = schema(database)
    broken = "CREATE TABLE more (x);\nALTER TABLE nowhere ADD COLUMN y;\n"
    monkeypatch.setattr(module, "MIGRATIONS", (*MIGRATIONS, "CREATE TABLE one (x);\n", broken))
    with pytest.raises(Failed):
        Store.open(database)
    assert schema(database) == before
    monkeypatch.undo()
    with Store.open(database) as store:
        assert store.session(S1).id == S1


def test_a_newer_deltaboxs_database_is_refused_and_not_touched(database: Path) -> None:
    Store.open(database).close()
    with sqlite3.connect(database) as raw:
        raw.execute(f"PRAGMA user_version={len(MIGRATIONS) + 1}")
    raw.close()
    before = database.read_bytes()
    with pytest.raises(Failed, match="newer deltabox"):
        Store.open(database)
    assert database.read_bytes() == before


def test_first_starts_at_one_moment_all_succeed(tmp_path: Path) -> None:
    database = tmp_path / "db"
    gate = threading.Barrier(6)
    failed: list[Exception] = []

    def start() -> None:
        gate.wait()
        try:
            with Store.open(database) as store:
                store.note("started")
        except Exception as exc:  # noqa: BLE001 - the test tells it
            failed.append(exc)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    with Store.open(database) as store:
        assert len(store.journal()) == 6


# refusals


def test_a_file_that_is_no_database_is_told_and_kept(database: Path) -> None:
    database.write_bytes(b"This is no database." * 100)
    with pytest.raises(Failed, match="move it away"):
        Store.open(database)
    assert database.read_bytes() == b"This is no database." * 100


def test_a_cut_database_is_told(database: Path) -> None:
    with Store.open(database) as store:
        for _ in range(500):
            store.note("x" * 200)
    for suffix in ("-wal", "-shm"):
        Path(f"{database}{suffix}").unlink(missing_ok=True)
    whole = database.read_bytes()
    database.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Failed, match="state database refuses"), Store.open(database) as store:
        store.journal()


def test_a_folder_in_its_place_is_told(database: Path) -> None:
    database.mkdir()
    with pytest.raises(Failed, match="state database refuses"):
        Store.open(database)


def test_a_database_that_another_keeps_locked_is_told(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BUSY_S", 0.05)
    raw = sqlite3.connect(database, isolation_level=None)
    raw.execute("BEGIN IMMEDIATE")
    raw.execute("CREATE TABLE other (x)")
    try:
        with pytest.raises(Failed, match="another deltabox holds it"):
            Store.open(database)
    finally:
        raw.execute("ROLLBACK")
        raw.close()
    Store.open(database).close()


def test_a_full_disk_is_told_and_takes_nothing_back(store: Store) -> None:
    store.note("before")
    with read_only_disk(store), pytest.raises(Failed, match="free some space"):
        store.note("x" * 100_000)
    assert [event["kind"] for event in store.journal()] == ["before"]
    store.note("after")
    assert [event["kind"] for event in store.journal()] == ["before", "after"]


def test_the_state_on_a_network_file_system_is_refused(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = module._filesystem(database.parent)
    assert kind != "unknown"
    monkeypatch.setattr(module, "_NETWORK_FS", {kind})  # that this one were one
    with pytest.raises(Refused, match="DELTABOX_STATE_DIR"):
        Store.open(database)
    assert not database.exists()


def test_the_file_system_is_found_behind_each_mount() -> None:
    assert module._filesystem(Path("/proc")) == "proc"
    assert module._filesystem(Path("/sys")) == "sysfs"


def test_no_descriptor_is_left_after_a_refusal(database: Path) -> None:
    database.write_bytes(b"no database" * 100)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(Failed):
            Store.open(database)
    assert len(os.listdir("/proc/self/fd")) == before


# transactions


class Stopped(Exception):
    """Raised in the middle of a transaction."""


def test_a_transaction_that_fails_leaves_nothing(store: Store) -> None:
    def half() -> None:
        with store.transaction():
            store.note("half")
            store.update_session(S1, state="running")
            raise Stopped

    with pytest.raises(Stopped):
        half()
    assert store.journal() == []
    assert store.session(S1).state == "idle"


def test_an_inner_transaction_goes_with_the_outer_one(store: Store) -> None:
    def half() -> None:
        with store.transaction():
            with store.transaction():
                store.note("inner")
            raise Stopped

    with pytest.raises(Stopped):
        half()
    assert store.journal() == []


def test_a_commit_that_fails_is_undone_and_does_not_swallow_what_comes_next(
    database: Path,
) -> None:
    # Deferred constraints are checked by COMMIT itself: the one way to make it fail at will.
    with Store.open(database) as store:
        store._db.execute("PRAGMA foreign_keys=ON")
        store._db.execute(
            "CREATE TABLE later (s TEXT REFERENCES sessions (id) DEFERRABLE INITIALLY DEFERRED)"
        )

        def fails() -> None:
            with store.transaction():
                store.note("lost")
                store._db.execute("INSERT INTO later VALUES ('nobody')")

        with pytest.raises(sqlite3.IntegrityError):
            fails()
        assert not store._db.in_transaction
        with store.transaction():
            store.note("kept")
    with Store.open(database) as store:
        assert [event["kind"] for event in store.journal()] == ["kept"]


def test_a_killed_process_leaves_none_of_its_transaction(database: Path) -> None:
    Store.open(database).close()
    with suppress(Failed):  # how a killed process looks from here
        run_python(
            "import os\nfrom pathlib import Path\nfrom deltabox.store import Store\n"
            "store = Store.open(Path(sys.argv[1]))\nstore.note('whole')\n"
            "with store.transaction():\n    store.note('half')\n    os.kill(os.getpid(), 9)\n",
            database,
        )
    with Store.open(database) as store:
        assert [event["kind"] for event in store.journal()] == ["whole"]


def test_rows_that_belong_together_are_all_there_or_none(store: Store) -> None:
    def touches() -> Iterator[Touch]:
        yield a_touch(b"a")
        yield a_touch(b"b")
        raise Stopped

    with pytest.raises(Stopped):
        store.add_touches(S1, touches())
    assert store.touches(S1) == {}

    def paths() -> Iterator[bytes]:
        yield b"a"
        raise Stopped

    with pytest.raises(Stopped):
        store.add_authors(S1, 1, paths())
    assert store.authors(S1) == {}
    store.add_touches(S1, [a_touch(b"a")])
    with pytest.raises(Stopped):
        store.drop_touches(S1, paths())
    assert set(store.touches(S1)) == {b"a"}


def test_two_openers_at_once_open_one_review(store: Store, database: Path) -> None:
    gate = threading.Barrier(4)
    found = []

    def ask() -> None:
        with Store.open(database) as own:
            gate.wait()
            found.append(own.open_review(S1).id)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert store.review_of(S1) is not None


def test_strict_durability_lasts_as_long_as_it_is_asked_for(store: Store) -> None:
    def level() -> int:
        found: int = store._db.execute("PRAGMA synchronous").fetchone()[0]
        return found

    assert level() == 1
    with store.durable(strict=True):
        assert level() == 2
    assert level() == 1
    with store.durable(strict=False):
        assert level() == 1


# what is kept comes back


def test_paths_and_names_of_any_bytes_come_back_as_they_were(
    database: Path, tmp_path: Path
) -> None:
    odd = os.fsdecode(b"/state/\xff\n/s.sock")
    with Store.open(database) as store:
        store.add_session(a_session(S1))
        store.update_session(S1, socket=odd)
        turn = store.begin_turn(
            S1, ["ls", os.fsdecode(b"\xff"), "a\nb", "é"], "workspace-write", "off"
        )
        store.add_touches(S1, [a_touch(b"\xff\n", drifted=True)])
        store.add_authors(S1, turn, [b"\xff\n"])
        store.add_trash(TrashRow("t1", S1, FOREIGN, 5, odd, 2, 3))
        store.note("kind", session=S1, project=FOREIGN, sentence=os.fsdecode(b"\xff"))
    with Store.open(database) as store:
        session = store.session(S1)
        assert (session.project, session.socket) == (FOREIGN, odd)
        assert store.sessions(FOREIGN) == [session]
        assert store.turns(S1)[0].argv == ("ls", os.fsdecode(b"\xff"), "a\nb", "é")
        assert store.touches(S1) == {b"\xff\n": a_touch(b"\xff\n", drifted=True)}
        assert store.authors(S1) == {b"\xff\n": [str(turn)]}
        assert [(row.project, row.folder) for row in store.trash()] == [(FOREIGN, odd)]
        (event,) = store.journal(FOREIGN)
        assert (event["kind"], event["sentence"]) == ("kind", os.fsdecode(b"\xff"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with Store.open(tmp_path_factory.mktemp("shared") / "db") as opened:
        yield opened


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.integers(0, 9)), max_size=12))
def test_only_the_first_touch_of_a_path_counts(
    shared: Store, touched: list[tuple[bytes, int]]
) -> None:
    session = SessionId(new_id("s"))
    shared.add_session(a_session(session))
    expected: dict[bytes, int] = {}
    with shared.transaction():
        for path, ino in touched:
            shared.add_touches(session, [a_touch(path, ino=ino)])
            expected.setdefault(path, ino)
    assert {p: t.ino for p, t in shared.touches(session).items()} == expected
    gone = {path for path, ino in touched if ino % 2}
    shared.drop_touches(session, (path for path in gone))
    assert set(shared.touches(session)) == set(expected) - gone
    shared.add_touches(session, [a_touch(path, ino=77) for path in gone])
    assert all(shared.touches(session)[path].ino == 77 for path in gone)  # a first touch again


def test_sessions_come_oldest_first_and_closed_ones_only_when_asked(store: Store) -> None:
    other = Path("/other")
    store.add_session(a_session("s3", project=other, created_ns=3))
    store.add_session(a_session("s2", created_ns=0, state="closed"))
    assert [s.id for s in store.sessions()] == [S1, "s3"]
    assert [s.id for s in store.sessions(closed=True)] == ["s2", S1, "s3"]
    assert [s.id for s in store.sessions(other)] == ["s3"]


def test_a_beginning_names_one_session_or_says_which(store: Store) -> None:
    store.add_session(a_session("s1112222"))
    store.add_session(a_session("s111"))
    assert store.session("s11111").id == S1
    assert store.session("s111").id == "s111"  # the whole id before beginnings
    with pytest.raises(Ambiguous, match="s1111111") as found:
        store.session("s11")
    assert "s1112222" in found.value.sentence
    for unknown in ("s1", "x", "", "s11111111", "%", "s_111"):
        with pytest.raises(NotFound, match="deltabox sessions"):
            store.session(unknown)


def a_commit(store: Store, name: str, project: Path = FOREIGN) -> CommitId:
    commit = CommitId(name)
    store.plan_commit(
        commit, session=S1, review=None, project=project, kind="commit", plan=b"plan", digest="d"
    )
    return commit


def test_a_commit_is_planned_before_it_is_done_and_found_until_then(store: Store) -> None:
    first, second = a_commit(store, "c1111111"), a_commit(store, "c2222222")
    assert [c.id for c in store.unfinished()] == [first, second]
    store.set_progress(first, b"half")
    assert store.commit(first).progress == b"half"
    store.finish_commit(first, "done", record=b"undo", summary="three files")
    store.finish_commit(second, "reversed")
    assert store.unfinished() == []
    done = store.commit("c11")
    assert (done.state, done.record, done.summary, done.progress) == (
        "done", b"undo", "three files", None,
    )  # fmt: skip
    assert [c.id for c in store.commits(FOREIGN)] == [second, first]  # newest first
    assert [c.id for c in store.commits(FOREIGN, state="done")] == [first]
    store.finish_commit(first, "undone")
    assert (store.commit(first).record, store.commit(first).summary) == (b"undo", "three files")


def test_commits_are_named_by_their_beginnings_too(store: Store) -> None:
    a_commit(store, "c1110000")
    a_commit(store, "c1112222")
    assert store.commit("c11122").id == "c1112222"
    with pytest.raises(Ambiguous, match="c1110000"):
        store.commit("c111")
    with pytest.raises(NotFound, match="deltabox log"):
        store.commit("c9")


def test_a_plan_made_anew_forgets_the_old_ones_progress(store: Store) -> None:
    commit = a_commit(store, "c1111111")
    store.set_progress(commit, b"half")
    a_commit(store, "c1111111")
    assert store.commit(commit).progress is None
    assert len(store.all_commits()) == 1


def test_a_review_is_open_until_it_is_closed_and_then_another_begins(store: Store) -> None:
    first = store.open_review(S1)
    assert store.open_review(S1) == first
    store.set_shown(first.id, "digest")
    found = store.review_of(S1)
    assert found is not None
    assert found.shown == "digest"
    store.close_review(first.id, "committed")
    assert store.review_of(S1) is None
    assert store.open_review(S1).id != first.id


def test_the_journal_tells_what_came_after_and_of_which_project(store: Store) -> None:
    for number in range(3):
        store.note("tick", project=FOREIGN if number else None, n=number)
    events = store.journal()
    assert [e["n"] for e in events] == [0, 1, 2]
    assert [e["n"] for e in store.journal(after=events[0]["seq"])] == [1, 2]
    assert [e["n"] for e in store.journal(FOREIGN)] == [1, 2]


def test_a_turn_without_an_end_has_no_outcome(store: Store) -> None:
    turn = store.begin_turn(S1, ["sleep"], "workspace-write", "off")
    begun = store.turns(S1)[0]
    assert (begun.ended_ns, begun.code, begun.signal, begun.shared) == (None, None, None, False)
    store.end_turn(turn, code=None, signal=9, shared=True)
    ended = store.turns(S1)[0]
    assert (ended.code, ended.signal, ended.shared) == (None, 9, True)
    assert ended.ended_ns is not None


def test_the_database_belongs_to_one_thread(store: Store) -> None:
    failed = []

    def use() -> None:
        try:
            store.journal()
        except sqlite3.ProgrammingError:
            failed.append(True)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert failed == [True]


def test_ids_are_a_letter_and_eight_hex_digits() -> None:
    found = {new_id("s") for _ in range(1000)}
    assert len(found) == 1000
    assert all(len(i) == 9 and i[0] == "s" and int(i[1:], 16) >= 0 for i in found)
