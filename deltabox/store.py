"""The state database: sessions, turns, touched paths, reviews, commits, journal. SQLite in WAL mode.

The one place with SQL. Rows come back as small structs; what a plan, a review or an undo record
looks like inside is their makers' business and is kept here as JSON bytes. Synchronous: each call
is one short transaction (0.1 ms without fsync).

Every statement that belongs together goes through `transaction()`. Times are integers of
nanoseconds since the epoch; paths are bytes.
"""

import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NewType

from deltabox.errors import Ambiguous, Failed, NotFound, Refused

SessionId = NewType("SessionId", str)
CommitId = NewType("CommitId", str)

# Each entry brings the schema from version i to i+1; entries are never edited once released.
MIGRATIONS: tuple[str, ...] = (
    """
    -- One agent on one workspace. state: idle | running | closed. since_ns: a base path whose ctime
    -- is later had been changed by the user when the agent first touched it (drift).
    -- pid, pid_start: the owner, meaningful while running; the fcntl lock on the session's
    -- directory decides, these only name it. settings: the session's Config as JSON.
    -- stack: frozen layers below `upper`, top first, as a JSON list of folder names.
    CREATE TABLE sessions (
        id TEXT PRIMARY KEY, project BLOB NOT NULL, engine TEXT NOT NULL, isolation TEXT NOT NULL,
        network TEXT NOT NULL, state TEXT NOT NULL, generation INTEGER NOT NULL DEFAULT 0,
        created_ns INTEGER NOT NULL, updated_ns INTEGER NOT NULL, since_ns INTEGER NOT NULL,
        pid INTEGER, pid_start INTEGER, socket TEXT, settings TEXT NOT NULL DEFAULT '{}',
        stack TEXT NOT NULL DEFAULT '[]'
    );
    CREATE INDEX sessions_project ON sessions (project, state);

    -- One command that ran in a session. code or signal, neither while it runs or when the owner died.
    CREATE TABLE turns (
        id INTEGER PRIMARY KEY AUTOINCREMENT, session TEXT NOT NULL REFERENCES sessions (id),
        argv TEXT NOT NULL, profile TEXT NOT NULL, network TEXT NOT NULL,
        started_ns INTEGER NOT NULL, ended_ns INTEGER, code INTEGER, signal INTEGER,
        shared INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX turns_session ON turns (session);

    -- The base's fingerprint when the agent first touched a path. type is file, dir, symlink,
    -- special, or '-' where nothing stood; mode holds permission bits only.
    -- drifted: the base had already moved by then. common: where the then content is kept
    -- ('git:<blob>', 'copy:<name>') or NULL.
    CREATE TABLE touches (
        session TEXT NOT NULL REFERENCES sessions (id), path BLOB NOT NULL,
        type TEXT NOT NULL, ino INTEGER NOT NULL, size INTEGER NOT NULL,
        mtime_ns INTEGER NOT NULL, ctime_ns INTEGER NOT NULL, mode INTEGER NOT NULL,
        drifted INTEGER NOT NULL, common TEXT,
        PRIMARY KEY (session, path)
    ) WITHOUT ROWID;

    -- Which turns changed which path ("by").
    CREATE TABLE authors (
        session TEXT NOT NULL, path BLOB NOT NULL, turn INTEGER NOT NULL,
        PRIMARY KEY (session, path, turn)
    ) WITHOUT ROWID;

    -- The set of pending changes since it opened. state: open | committed | aborted.
    -- shown: the digest last shown to a person, what a commit without a digest is held against.
    CREATE TABLE reviews (
        id TEXT PRIMARY KEY, session TEXT NOT NULL REFERENCES sessions (id), state TEXT NOT NULL,
        opened_ns INTEGER NOT NULL, closed_ns INTEGER, shown TEXT
    );
    CREATE INDEX reviews_session ON reviews (session, state);

    -- Writes to a project. state: planned → done | reversed; done → undone; any → expired when its
    -- undo copies are gone. progress: how far the plan is, while it is planned. record: what undo
    -- needs. kind: commit | undo.
    CREATE TABLE commits (
        id TEXT PRIMARY KEY, seq INTEGER NOT NULL, session TEXT, review TEXT, project BLOB NOT NULL,
        kind TEXT NOT NULL, undoes TEXT, at_ns INTEGER NOT NULL, state TEXT NOT NULL,
        digest TEXT, plan BLOB NOT NULL, progress BLOB, record BLOB, summary TEXT NOT NULL DEFAULT ''
    );
    CREATE INDEX commits_project ON commits (project, seq);

    -- What commits made under a live view left in the base, so that it does not count as the user's.
    CREATE TABLE ours (
        session TEXT NOT NULL, path BLOB NOT NULL, fingerprint BLOB NOT NULL,
        PRIMARY KEY (session, path)
    ) WITHOUT ROWID;

    -- What happened, in order, for `deltabox log` and event streams.
    CREATE TABLE journal (
        seq INTEGER PRIMARY KEY AUTOINCREMENT, at_ns INTEGER NOT NULL, session TEXT, project BLOB,
        kind TEXT NOT NULL, data TEXT NOT NULL
    );
    CREATE INDEX journal_session ON journal (session);

    -- States of a session's files to go back to. stack: the layers that show it, top first.
    -- mode: frozen (the top layer was set aside), cloned (copied beside live processes).
    -- generation: those of an earlier one are history, since a commit or abort decided on them.
    CREATE TABLE checkpoints (
        id TEXT PRIMARY KEY, session TEXT NOT NULL REFERENCES sessions (id), at_ns INTEGER NOT NULL,
        label TEXT NOT NULL, mode TEXT NOT NULL, generation INTEGER NOT NULL, turn INTEGER,
        stack TEXT NOT NULL
    );
    CREATE INDEX checkpoints_session ON checkpoints (session, at_ns);

    -- Rejected and aborted deltas. size in bytes, for `deltabox gc`.
    CREATE TABLE trash (
        id TEXT PRIMARY KEY, session TEXT, project BLOB NOT NULL, at_ns INTEGER NOT NULL,
        folder TEXT NOT NULL, paths INTEGER NOT NULL, bytes INTEGER NOT NULL
    );
    """,
    """
    -- state: begun (an abort under way; whoever finds it finishes it) | kept | taken:<session> (on its
    -- way back into a session). chosen: the paths it holds, JSON list of base64; NULL for everything.
    -- touches: the first touches of what it holds, for a review to come.
    ALTER TABLE trash ADD COLUMN state TEXT NOT NULL DEFAULT 'kept';
    ALTER TABLE trash ADD COLUMN chosen TEXT;
    ALTER TABLE trash ADD COLUMN touches TEXT NOT NULL DEFAULT '[]';
    -- Layers that nothing needs any more and that may be removed, as a JSON list of folder names. A
    -- layer that neither this nor anything else names is never removed: a power cut lost its row.
    ALTER TABLE sessions ADD COLUMN doomed TEXT NOT NULL DEFAULT '[]';
    """,
)

BUSY_S = (
    10.0  # how long to wait for another process's transaction; the longest takes a tenth of it
)

# File systems over which SQLite's locks and shared memory are not to be trusted.
_NETWORK_FS = {"nfs", "nfs4", "cifs", "smb3", "9p", "afs", "ceph", "fuse.sshfs", "lustre"}


@dataclass(frozen=True, slots=True)
class Session:
    id: SessionId
    project: Path
    engine: str
    isolation: str
    network: str
    state: str
    generation: int
    created_ns: int
    updated_ns: int
    since_ns: int
    pid: int | None
    pid_start: int | None
    socket: str | None
    settings: str
    stack: str
    doomed: str = "[]"


@dataclass(frozen=True, slots=True)
class Turn:
    id: int
    session: SessionId
    argv: tuple[str, ...]
    profile: str
    network: str
    started_ns: int
    ended_ns: int | None
    code: int | None
    signal: int | None
    shared: bool  # a background process lived beside it, so `changed` may hold its work too


@dataclass(frozen=True, slots=True)
class Touch:
    path: bytes
    type: str
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int
    mode: int
    drifted: bool
    common: str | None


@dataclass(frozen=True, slots=True)
class ReviewRow:
    id: str
    session: SessionId
    state: str
    opened_ns: int
    closed_ns: int | None
    shown: str | None


@dataclass(frozen=True, slots=True)
class Commit:
    id: CommitId
    seq: int
    session: SessionId | None
    review: str | None
    project: Path
    kind: str
    undoes: CommitId | None
    at_ns: int
    state: str
    digest: str | None
    plan: bytes
    progress: bytes | None
    record: bytes | None
    summary: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    id: str
    session: SessionId
    at_ns: int
    label: str
    mode: str
    generation: int
    turn: int | None
    stack: str


@dataclass(frozen=True, slots=True)
class TrashRow:
    id: str
    session: SessionId | None
    project: Path
    at_ns: int
    folder: str
    paths: int
    bytes: int
    state: str = "kept"
    chosen: str | None = None
    touches: str = "[]"


def new_id(prefix: str) -> str:
    """Eight hex digits of randomness after a letter that says what it names."""
    return f"{prefix}{os.urandom(4).hex()}"


class _Connection(sqlite3.Connection):
    """SQLite's refusals as errors for a person: a full disk, a file that is no database, a lock kept."""

    # No @override: typing_extensions would cost each start 8 ms.
    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:  # type: ignore[explicit-override]
        try:
            return super().execute(sql, parameters)
        except sqlite3.DatabaseError as exc:
            raise _told(exc) from exc

    def executemany(self, sql: str, parameters: Any) -> sqlite3.Cursor:  # type: ignore[explicit-override]
        try:
            return super().executemany(sql, parameters)
        except sqlite3.DatabaseError as exc:
            raise _told(exc) from exc


def _told(exc: sqlite3.DatabaseError) -> Exception:
    """Defects of ours (a broken constraint, bad SQL parameters) stay what they are."""
    if isinstance(exc, (sqlite3.IntegrityError, sqlite3.ProgrammingError)):
        return exc
    next_step = {
        sqlite3.SQLITE_BUSY: "another deltabox holds it; try again",
        sqlite3.SQLITE_FULL: "free some space there and try again",
        sqlite3.SQLITE_NOTADB: "move it away, deltabox will begin a new one",
        sqlite3.SQLITE_CORRUPT: "move it away, deltabox will begin a new one",
    }.get(getattr(exc, "sqlite_errorcode", 0) & 0xFF, "`deltabox doctor` looks at its folder")
    return Failed(f"The state database refuses ({exc}); {next_step}.")


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to WAL, once for each database. SQLite does not wait for this lock by itself, so two
    first starts at one moment would see one of them refused."""
    deadline = time.monotonic() + BUSY_S
    while connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except Failed:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.002)
        else:
            return  # also where WAL cannot be had: the older journal is as safe, only slower


def _fit(text: str | None) -> str | bytes | None:
    """A path for a TEXT column, which takes no bytes that are not UTF-8 but as a BLOB."""
    try:
        return None if text is None else text.encode().decode()
    except UnicodeEncodeError:
        return os.fsencode(text or "")


class Store:
    """The open database. Close it, or use it in `with`. One per process; not for other threads."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._db = connection

    @classmethod
    def open(cls, database: Path) -> "Store":
        """Open or create, and migrate. The folder must exist, 0700.

        Raises: Refused on a network file system, Failed when a newer deltabox wrote the database.
        """
        kind = _filesystem(database.parent)
        if kind in _NETWORK_FS:
            raise Refused(
                f"{database.parent} lies on {kind}, where SQLite cannot lock safely; "
                "set DELTABOX_STATE_DIR to a local folder."
            )
        try:
            connection = sqlite3.connect(
                database, isolation_level=None, timeout=BUSY_S, factory=_Connection
            )
        except sqlite3.DatabaseError as exc:
            raise _told(exc) from exc
        try:
            _use_wal(connection)
            # NORMAL: a power cut may lose the last transactions, never the database. A strict
            # commit asks for FULL around its plan (see `durable`).
            connection.execute("PRAGMA synchronous=NORMAL")
            store = cls(connection)
            store._migrate(database)
        except BaseException:
            connection.close()
            raise
        return store

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _migrate(self, database: Path) -> None:
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == len(MIGRATIONS):
            return
        if version > len(MIGRATIONS):
            raise Failed(
                f"{database} was written by a newer deltabox (schema {version}); "
                "update deltabox or set DELTABOX_STATE_DIR to another folder."
            )
        with self.transaction():
            # Looked at again under the lock: two first starts may race.
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            for number, script in enumerate(MIGRATIONS[version:], version + 1):
                for statement in _statements(script):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version={number}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing; nests into the outer one."""
        if self._db.in_transaction:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            # A COMMIT that failed has left it open: what came next would join it and be lost. A
            # full disk may have ended it already.
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def durable(self, *, strict: bool) -> Iterator[None]:
        """Within it each transaction is on the disk before it returns, if `strict`."""
        if strict:
            self._db.execute("PRAGMA synchronous=FULL")
        try:
            yield
        finally:
            if strict:
                self._db.execute("PRAGMA synchronous=NORMAL")

    def _many(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """One transaction for all rows: half of them is never there, and each would cost as much."""
        with self.transaction():
            self._db.executemany(sql, rows)

    # sessions

    _SESSION = (
        "SELECT id, project, engine, isolation, network, state, generation, created_ns, updated_ns,"
        " since_ns, pid, pid_start, socket, settings, stack, doomed FROM sessions"
    )

    def add_session(self, session: Session) -> None:
        self._db.execute(
            "INSERT INTO sessions (id, project, engine, isolation, network, state, generation,"
            " created_ns, updated_ns, since_ns, pid, pid_start, socket, settings, stack)"
            " VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?)",
            (
                session.id,
                os.fsencode(session.project),
                session.engine,
                session.isolation,
                session.network,
                session.state,
                session.generation,
                session.created_ns,
                session.updated_ns,
                session.since_ns,
                session.pid,
                session.pid_start,
                _fit(session.socket),
                session.settings,
                session.stack,
            ),
        )

    def update_session(self, session: SessionId, **values: Any) -> None:
        """Set columns by name; `updated_ns` is set too."""
        values["updated_ns"] = time.time_ns()
        if "socket" in values:
            values["socket"] = _fit(values["socket"])
        names = ", ".join(f"{column}=?" for column in values)
        self._db.execute(f"UPDATE sessions SET {names} WHERE id=?", (*values.values(), session))

    def session(self, session: str) -> Session:
        """By id or by an unambiguous beginning of one. Raises: NotFound, Ambiguous."""
        rows = self._sessions("WHERE id=?", (session,)) or self._sessions(
            "WHERE substr(id, 1, length(?))=? AND length(?)>=3", (session, session, session)
        )
        if len(rows) > 1:
            listed = ", ".join(row.id for row in rows)
            raise Ambiguous(
                f"{session!r} is the beginning of {listed}; give more of the one meant."
            )
        if not rows:
            raise NotFound(f"There is no session {session!r}; `deltabox sessions` lists them.")
        return rows[0]

    def sessions(self, project: Path | None = None, *, closed: bool = False) -> list[Session]:
        """Oldest first; of one project or of all."""
        terms, values = ["1"], []
        if project is not None:
            terms.append("project=?")
            values.append(os.fsencode(project))
        if not closed:
            terms.append("state!='closed'")
        return self._sessions(f"WHERE {' AND '.join(terms)} ORDER BY created_ns", values)

    def _sessions(self, where: str, values: Sequence[Any]) -> list[Session]:
        rows = self._db.execute(f"{self._SESSION} {where}", values)
        found = []
        for row in rows:
            values = list(row)
            values[1] = Path(os.fsdecode(row[1]))
            values[12] = None if row[12] is None else os.fsdecode(row[12])
            found.append(Session(*values))
        return found

    # turns and authors

    def begin_turn(
        self, session: SessionId, argv: Sequence[str], profile: str, network: str
    ) -> int:
        cursor = self._db.execute(
            "INSERT INTO turns (session, argv, profile, network, started_ns) VALUES (?,?,?,?,?)",
            (session, json.dumps(list(argv)), profile, network, time.time_ns()),
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def end_turn(
        self, turn: int, *, code: int | None, signal: int | None, shared: bool = False
    ) -> int:
        """Returns how long it took, in nanoseconds."""
        now = time.time_ns()
        self._db.execute(
            "UPDATE turns SET ended_ns=?, code=?, signal=?, shared=? WHERE id=?",
            (now, code, signal, int(shared), turn),
        )
        row = self._db.execute("SELECT started_ns FROM turns WHERE id=?", (turn,)).fetchone()
        return now - int(row[0])

    def turns(self, session: SessionId) -> list[Turn]:
        rows = self._db.execute(
            "SELECT id, session, argv, profile, network, started_ns, ended_ns, code, signal, shared"
            " FROM turns WHERE session=? ORDER BY id",
            (session,),
        )
        return [
            Turn(
                r[0], r[1], tuple(json.loads(r[2])), r[3], r[4], r[5], r[6], r[7], r[8], bool(r[9])
            )
            for r in rows
        ]

    def add_authors(self, session: SessionId, turn: int, paths: Iterable[bytes]) -> None:
        self._many(
            "INSERT OR IGNORE INTO authors VALUES (?,?,?)", ((session, p, turn) for p in paths)
        )

    def authors(self, session: SessionId) -> dict[bytes, list[str]]:
        """Path → the turns that changed it, as ids in words (`turn 3`)."""
        found: dict[bytes, list[str]] = {}
        for path, turn in self._db.execute(
            "SELECT path, turn FROM authors WHERE session=? ORDER BY path, turn", (session,)
        ):
            found.setdefault(path, []).append(str(turn))
        return found

    # touches

    def add_touches(self, session: SessionId, touches: Iterable[Touch]) -> None:
        """Keeps what stands: only the first touch of a path counts."""
        self._many(
            "INSERT OR IGNORE INTO touches VALUES (?,?,?,?,?,?,?,?,?,?)",
            (
                (
                    session,
                    t.path,
                    t.type,
                    t.ino,
                    t.size,
                    t.mtime_ns,
                    t.ctime_ns,
                    t.mode,
                    int(t.drifted),
                    t.common,
                )
                for t in touches
            ),
        )

    def renew_touches(self, session: SessionId, touches: Iterable[Touch]) -> None:
        """New fingerprints for paths that a reversed commit moved and put back; what is known of
        drift and common versions stays."""
        self._many(
            "INSERT INTO touches VALUES (?,?,?,?,?,?,?,?,?,?) ON CONFLICT (session, path) DO UPDATE"
            " SET type=excluded.type, ino=excluded.ino, size=excluded.size,"
            " mtime_ns=excluded.mtime_ns, ctime_ns=excluded.ctime_ns, mode=excluded.mode",
            (
                (session, t.path, t.type, t.ino, t.size, t.mtime_ns, t.ctime_ns, t.mode, 0, None)
                for t in touches
            ),
        )

    def set_common(self, session: SessionId, path: bytes, common: str) -> None:
        self._db.execute(
            "UPDATE touches SET common=? WHERE session=? AND path=?", (common, session, path)
        )

    def touches(self, session: SessionId) -> dict[bytes, Touch]:
        rows = self._db.execute(
            "SELECT path, type, ino, size, mtime_ns, ctime_ns, mode, drifted, common"
            " FROM touches WHERE session=?",
            (session,),
        )
        return {
            r[0]: Touch(r[0], r[1], r[2], r[3], r[4], r[5], r[6], bool(r[7]), r[8]) for r in rows
        }

    def drop_touches(self, session: SessionId, paths: Iterable[bytes] | None = None) -> None:
        """Forget first touches and authors of `paths`, or of all: they have been decided."""
        chosen = None if paths is None else [(session, path) for path in paths]
        with self.transaction():
            for table in ("touches", "authors"):
                if chosen is None:
                    self._db.execute(f"DELETE FROM {table} WHERE session=?", (session,))
                else:
                    self._many(f"DELETE FROM {table} WHERE session=? AND path=?", chosen)

    # reviews

    def open_review(self, session: SessionId) -> ReviewRow:
        """The session's open review, opened now if there is none."""
        if (found := self.review_of(session)) is not None:
            return found
        with self.transaction():  # two askers at once must not open two
            if (found := self.review_of(session)) is not None:
                return found
            row = ReviewRow(new_id("r"), session, "open", time.time_ns(), None, None)
            self._db.execute(
                "INSERT INTO reviews (id, session, state, opened_ns) VALUES (?,?,?,?)",
                (row.id, session, row.state, row.opened_ns),
            )
        return row

    def review_of(self, session: SessionId) -> ReviewRow | None:
        row = self._db.execute(
            "SELECT id, session, state, opened_ns, closed_ns, shown FROM reviews"
            " WHERE session=? AND state='open'",
            (session,),
        ).fetchone()
        return ReviewRow(*row) if row else None

    def set_shown(self, review: str, digest: str) -> None:
        self._db.execute("UPDATE reviews SET shown=? WHERE id=?", (digest, review))

    def close_review(self, review: str, state: str) -> None:
        self._db.execute(
            "UPDATE reviews SET state=?, closed_ns=? WHERE id=?", (state, time.time_ns(), review)
        )

    # commits

    _COMMIT = (
        "SELECT id, seq, session, review, project, kind, undoes, at_ns, state, digest, plan,"
        " progress, record, summary FROM commits"
    )

    def plan_commit(
        self,
        commit: CommitId,
        *,
        session: SessionId | None,
        review: str | None,
        project: Path,
        kind: str,
        plan: bytes,
        digest: str | None = None,
        undoes: CommitId | None = None,
    ) -> None:
        """Written before the first step touches the project; again when it is planned anew."""
        self._db.execute(
            "INSERT INTO commits (id, seq, session, review, project, kind, undoes, at_ns, state,"
            " digest, plan) VALUES (?, (SELECT coalesce(max(seq),0)+1 FROM commits),"
            " ?,?,?,?,?,?,'planned',?,?)"
            " ON CONFLICT (id) DO UPDATE SET plan=excluded.plan, progress=NULL",
            (
                commit,
                session,
                review,
                os.fsencode(project),
                kind,
                undoes,
                time.time_ns(),
                digest,
                plan,
            ),
        )

    def set_progress(self, commit: CommitId, progress: bytes) -> None:
        self._db.execute("UPDATE commits SET progress=? WHERE id=?", (progress, commit))

    def finish_commit(
        self, commit: CommitId, state: str, *, record: bytes | None = None, summary: str = ""
    ) -> None:
        self._db.execute(
            "UPDATE commits SET state=?, progress=NULL, record=coalesce(?, record),"
            " summary=CASE WHEN ?='' THEN summary ELSE ? END WHERE id=?",
            (state, record, summary, summary, commit),
        )

    def add_ours(self, session: SessionId, prints: Iterable[tuple[bytes, bytes]]) -> None:
        self._many(
            "INSERT OR REPLACE INTO ours VALUES (?,?,?)", ((session, p, f) for p, f in prints)
        )

    def ours(self, session: SessionId) -> dict[bytes, bytes]:
        rows = self._db.execute("SELECT path, fingerprint FROM ours WHERE session=?", (session,))
        return dict(rows.fetchall())

    def drop_ours(self, session: SessionId) -> None:
        self._db.execute("DELETE FROM ours WHERE session=?", (session,))

    def commit(self, commit: str) -> Commit:
        """By id or an unambiguous beginning. Raises: NotFound, Ambiguous."""
        rows = self._commits("WHERE id=?", (commit,)) or self._commits(
            "WHERE substr(id, 1, length(?))=? AND length(?)>=3", (commit, commit, commit)
        )
        if len(rows) > 1:
            listed = ", ".join(row.id for row in rows)
            raise Ambiguous(
                f"{commit!r} is the beginning of {listed}; give more of the one meant."
            )
        if not rows:
            raise NotFound(f"There is no commit {commit!r}; `deltabox log` lists them.")
        return rows[0]

    def commits(self, project: Path, *, state: str | None = None) -> list[Commit]:
        """Newest first."""
        if state is None:
            return self._commits("WHERE project=? ORDER BY seq DESC", (os.fsencode(project),))
        return self._commits(
            "WHERE project=? AND state=? ORDER BY seq DESC", (os.fsencode(project), state)
        )

    def unfinished(self) -> list[Commit]:
        """Plans that a process began and did not end, oldest first."""
        return self._commits("WHERE state='planned' ORDER BY seq", ())

    def all_commits(self) -> list[Commit]:
        return self._commits("ORDER BY seq", ())

    def _commits(self, where: str, values: Sequence[Any]) -> list[Commit]:
        rows = self._db.execute(f"{self._COMMIT} {where}", values)
        return [Commit(r[0], r[1], r[2], r[3], Path(os.fsdecode(r[4])), *r[5:14]) for r in rows]

    # checkpoints

    def add_checkpoint(self, row: Checkpoint) -> None:
        self._db.execute(
            "INSERT INTO checkpoints VALUES (?,?,?,?,?,?,?,?)",
            (
                row.id,
                row.session,
                row.at_ns,
                row.label,
                row.mode,
                row.generation,
                row.turn,
                row.stack,
            ),
        )

    def checkpoints(self, session: SessionId) -> list[Checkpoint]:
        """Oldest first."""
        rows = self._db.execute(
            "SELECT id, session, at_ns, label, mode, generation, turn, stack FROM checkpoints"
            " WHERE session=? ORDER BY at_ns, rowid",
            (session,),
        )
        return [Checkpoint(*row) for row in rows]

    def named_checkpoints(self, session: SessionId, named: str) -> list[Checkpoint]:
        """Those of that id or label, else those whose id begins so; oldest first."""
        for term in ("id=?2 OR label=?2", "length(?2)>=3 AND substr(id, 1, length(?2))=?2"):
            rows = self._db.execute(
                "SELECT id, session, at_ns, label, mode, generation, turn, stack FROM checkpoints"
                f" WHERE session=?1 AND ({term}) ORDER BY at_ns, rowid",
                (session, named),
            ).fetchall()
            if rows:
                return [Checkpoint(*row) for row in rows]
        return []

    def drop_checkpoints(self, session: SessionId) -> None:
        self._db.execute("DELETE FROM checkpoints WHERE session=?", (session,))

    # journal and trash

    def note(
        self,
        kind: str,
        *,
        session: SessionId | None = None,
        project: Path | None = None,
        **data: Any,
    ) -> None:
        self._db.execute(
            "INSERT INTO journal (at_ns, session, project, kind, data) VALUES (?,?,?,?,?)",
            (
                time.time_ns(),
                session,
                os.fsencode(project) if project else None,
                kind,
                json.dumps(data),
            ),
        )

    def last_event(self) -> int:
        """The journal's newest sequence number; 0 when nothing has happened yet."""
        found: int = self._db.execute("SELECT coalesce(max(seq), 0) FROM journal").fetchone()[0]
        return found

    def journal(
        self, project: Path | None = None, *, after: int = 0, limit: int = -1
    ) -> list[dict[str, Any]]:
        """Events after a sequence number, oldest first; the first `limit` of them."""
        rows = self._db.execute(
            "SELECT seq, at_ns, session, project, kind, data FROM journal"
            " WHERE seq>? AND (? IS NULL OR project=?) ORDER BY seq LIMIT ?",
            (after, *([os.fsencode(project) if project else None] * 2), limit),
        )
        return [
            {
                "seq": r[0],
                "atNs": r[1],
                "session": r[2],
                "project": os.fsdecode(r[3]) if r[3] else None,
                "kind": r[4],
                **json.loads(r[5]),
            }
            for r in rows
        ]

    def add_trash(self, row: TrashRow) -> None:
        self._db.execute(
            "INSERT INTO trash (id, session, project, at_ns, folder, paths, bytes, state, chosen,"
            " touches) VALUES (?,?,?,?,?,?,?,?,?,?)",
            (
                row.id,
                row.session,
                os.fsencode(row.project),
                row.at_ns,
                _fit(row.folder),
                row.paths,
                row.bytes,
                row.state,
                row.chosen,
                row.touches,
            ),
        )

    def trash(self, *, session: SessionId | None = None) -> list[TrashRow]:
        """Oldest first; of one session or of all."""
        return self._trash("WHERE ? IS NULL OR session=? ORDER BY at_ns", (session, session))

    def trash_row(self, named: str) -> TrashRow:
        """By id or an unambiguous beginning. Raises: NotFound, Ambiguous."""
        rows = self._trash("WHERE id=?", (named,)) or self._trash(
            "WHERE substr(id, 1, length(?))=? AND length(?)>=3", (named, named, named)
        )
        if len(rows) > 1:
            listed = ", ".join(row.id for row in rows)
            raise Ambiguous(f"{named!r} is the beginning of {listed}; give more of the one meant.")
        if not rows:
            raise NotFound(
                f"There is no {named!r} in the trash; `deltabox gc --dry-run` lists what is kept."
            )
        return rows[0]

    def _trash(self, where: str, values: Sequence[Any]) -> list[TrashRow]:
        rows = self._db.execute(
            "SELECT id, session, project, at_ns, folder, paths, bytes, state, chosen, touches"
            f" FROM trash {where}",
            values,
        )
        return [
            TrashRow(r[0], r[1], Path(os.fsdecode(r[2])), r[3], os.fsdecode(r[4]), *r[5:])
            for r in rows
        ]

    def update_trash(self, trash: str, **values: Any) -> None:
        """Set columns by name."""
        names = ", ".join(f"{column}=?" for column in values)
        self._db.execute(f"UPDATE trash SET {names} WHERE id=?", (*values.values(), trash))

    def drop_trash(self, trash: str) -> None:
        self._db.execute("DELETE FROM trash WHERE id=?", (trash,))


def _statements(script: str) -> Iterator[str]:
    """One at a time: executescript would commit the transaction it is in."""
    pending = ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            yield pending
            pending = ""


def _filesystem(folder: Path) -> str:
    """The type of the file system that holds `folder`, as /proc/self/mountinfo names it."""
    device = os.stat(folder).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        for line in mounts:
            fields = line.split()
            if fields[2] == wanted:
                return fields[fields.index("-") + 1]
    return "unknown"
