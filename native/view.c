/*
 * deltabox-view: holds the mounts of one view for as long as its owner lives; it decides, copies
 * and confines nothing.
 *
 * Started with a SOCK_SEQPACKET socket as descriptor 0, which is also its life-line: `stop` or end of
 * file ends it, and with it its namespaces and every mount in them. A kill does the same.
 *
 * Wire format. A request is one packet holding a word, with one memfd as SCM_RIGHTS for its fields:
 *   mount    once, first     restack  any time later     stop  (no memfd)
 * Fields are NUL-terminated strings, each a word followed by a fixed number of arguments:
 *   project PATH             the base, and where the view stands (mount only)
 *   home SOURCE DEST         the private home (mount only)
 *   tmp BYTES                size of the private /tmp (mount only)
 *   owner UID GID            who owns mount points made in /tmp and home (mount only)
 *   graft ro|rw SOURCE DEST  a bind (mount only)
 *   cow SOURCE DEST UPPER WORK  an overlay of a directory (mount only)
 *   legacy                   use mount(2), as on kernels before 6.8 (mount only)
 *   upper PATH, work PATH, lower PATH ... (top first)
 * All paths are absolute, without `.`, `..` and links. Replies are one packet:
 *   ready NAME...            with one descriptor for each NAME: user (absent for root), mount, project
 *   error STEP PATH ERRNO SENTENCE
 * After an error to `mount` it exits; after an error to `restack` the old stack stands.
 */
#include "view_make.h"
#include "view_wire.h"

/* ---- mount points ------------------------------------------------------------------------------ */

/* What stands at `name` in `parent`, never through a link; with `make` an absent one is made. */
static int point_at(const struct view *view, int parent, const char *name, bool is_dir, bool make, const char *path,
                    struct failure *why) {
    AUTO_FD fd = sys_openat2(parent, name, O_PATH | O_NOFOLLOW, LINKLESS | RESOLVE_BENEATH);
    if (fd < 0 && errno == ENOENT && make) {
        int made = is_dir ? mkdirat(parent, name, 0755) : mknodat(parent, name, S_IFREG | 0644, 0);
        if (made < 0) return fail(why, "mount point", path, NULL);
        if (geteuid() == 0 && fchownat(parent, name, view->uid, view->gid, AT_SYMLINK_NOFOLLOW) < 0)
            return fail(why, "mount point", path, NULL);
        fd = sys_openat2(parent, name, O_PATH | O_NOFOLLOW, LINKLESS | RESOLVE_BENEATH);
    }
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0) return fail(why, "mount point", path, NULL);
    if (S_ISLNK(st.st_mode)) return refuse(why, "mount point", path, ELOOP, "a symbolic link stands there");
    if (is_dir && !S_ISDIR(st.st_mode))
        return refuse(why, "mount point", path, ENOTDIR, "something else stands where a directory is needed");
    if (!is_dir && !S_ISREG(st.st_mode))
        return refuse(why, "mount point", path, EISDIR, "something else stands where a file is needed");
    int found = fd;
    fd = -1;
    return found;
}

/* Walks `path` (relative, or absolute below `from` = the root) one component at a time. Components
 * are made only past the first `keep` bytes: -1 for never. */
static int walk_point(const struct view *view, int from, const char *path, bool is_dir, long keep, const char *shown,
                      struct failure *why) {
    char name[256];
    int at = fcntl(from, F_DUPFD_CLOEXEC, 3);
    for (const char *p = path; at >= 0 && *p;) {
        while (*p == '/') p++;
        size_t n = strcspn(p, "/");
        if (n == 0) break;
        bool dotted = n <= 2 && p[0] == '.' && (n == 1 || p[1] == '.');
        if (n >= sizeof name || dotted) { close(at); return refuse(why, "mount point", shown, EINVAL, "the path is not plain"); }
        memcpy(name, p, n);
        name[n] = 0;
        p += n;
        char part[4096]; /* the failing component's own path, not the whole destination's */
        snprintf(part, sizeof part, "%.*s", (int)(strlen(shown) - strlen(p)), shown);
        int next = point_at(view, at, name, *p || is_dir, keep >= 0 && p - path > keep, part, why);
        close(at);
        at = next;
        if (at < 0) return -1;
    }
    return at >= 0 ? at : fail(why, "mount point", shown, NULL);
}

/* Where `e` is to be mounted. Missing directories are made only inside the private /tmp or home:
 * inside the project they would show as the agent's change, inside a graft they would be real. */
static int find_point(const struct view *view, const struct entry *e, struct failure *why) {
    const struct entry *around = NULL;
    for (const struct entry *o = view->entries; o < e; o++)
        if (is_below(e->dest, o->dest) && (!around || depth(o->dest) >= depth(around->dest))) around = o;
    long keep = around && (around->kind == TMP || around->kind == HOME) ? (long)strlen(around->dest) : -1;
    return walk_point(view, view->root, e->dest, e->is_dir, keep, e->dest, why);
}

/* ---- the host's mounts below the project ------------------------------------------------------- */

/* mountinfo writes space, tab, newline and backslash as three octal digits. */
static void unescape(char *text) {
    char *out = text;
    for (char *in = text; *in; in++) {
        if (in[0] == '\\' && in[1] >= '0' && in[1] <= '3' && in[2] && in[3]) {
            *out++ = (char)((in[1] - '0') * 64 + (in[2] - '0') * 8 + (in[3] - '0'));
            in += 3;
        } else {
            *out++ = *in;
        }
    }
    *out = 0;
}

static bool is_mount_root(int fd) {
    struct statx sx;
    return statx(fd, "", AT_EMPTY_PATH, STATX_TYPE, &sx) == 0 && (sx.stx_attributes & STATX_ATTR_MOUNT_ROOT);
}

/* Remembers a mount below the project unless one around it already covers it (binds are recursive)
 * or the host itself does not show it: hidden by a later mount, or not the user's to see. */
static int add_below(struct view *view, const char *path, struct failure *why) {
    for (int i = 0; i < view->count;) {
        struct entry *e = &view->entries[i];
        if (e->kind == BELOW && (strcmp(e->dest, path) == 0 || is_below(path, e->dest))) return 0;
        if (e->kind == BELOW && is_below(e->dest, path)) {
            close_fd(&e->source);
            *e = view->entries[--view->count];
        } else {
            i++;
        }
    }
    AUTO_FD fd = sys_openat2(AT_FDCWD, path, O_PATH | O_NOFOLLOW, LINKLESS);
    struct stat st;
    if (fd < 0 || !is_mount_root(fd) || fstat(fd, &st) < 0) return 0;
    char *copy = strdup(path);
    struct entry *e = copy ? add_entry(view, BELOW, copy, copy) : NULL;
    if (!e) { free(copy); return refuse(why, "mounts below", path, E2BIG, "too many mounts below the project"); }
    e->readonly = true;
    e->is_dir = S_ISDIR(st.st_mode);
    e->source = fd;
    fd = -1;
    return 0;
}

static int find_below(struct view *view, struct failure *why) {
    AUTO_FILE file = fopen("/proc/self/mountinfo", "re");
    AUTO_TEXT line = NULL;
    size_t size = 0;
    if (!file) return fail(why, "open", "/proc/self/mountinfo", NULL);
    while (getline(&line, &size, file) > 0) {
        char *save = NULL, *field = strtok_r(line, " ", &save);
        for (int i = 0; field && i < 4; i++) field = strtok_r(NULL, " ", &save);
        if (!field) continue;
        unescape(field);
        if (is_below(field, view->project) && add_below(view, field, why) < 0) return -1;
    }
    return 0;
}

/* ---- the first mount --------------------------------------------------------------------------- */

static int write_file(const char *path, const char *text, struct failure *why) {
    AUTO_FD fd = open(path, O_WRONLY | O_CLOEXEC);
    ssize_t n = (ssize_t)strlen(text);
    return fd >= 0 && write(fd, text, (size_t)n) == n ? 0 : fail(why, "user namespace", path, NULL);
}

/* Root stays in its user namespace, so that every owner stays mapped. */
static int enter_namespaces(struct failure *why) {
    char map[64];
    uid_t uid = geteuid();
    gid_t gid = getegid();
    if (unshare(CLONE_NEWNS | (uid ? CLONE_NEWUSER : 0)) < 0)
        return fail(why, uid ? "user namespace" : "mount namespace", "", NULL);
    if (uid) {
        if (write_file("/proc/self/setgroups", "deny", why) < 0) return -1;
        snprintf(map, sizeof map, "%u %u 1", uid, uid);
        if (write_file("/proc/self/uid_map", map, why) < 0) return -1;
        snprintf(map, sizeof map, "%u %u 1", gid, gid);
        if (write_file("/proc/self/gid_map", map, why) < 0) return -1;
    }
    /* Before any mount, or the host would receive it. */
    if (syscall(SYS_mount, NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) return fail(why, "private propagation", "/", NULL);
    return 0;
}

/* Parents before what lies inside them; equal depths keep their order. */
static void sort_entries(struct view *view) {
    for (int i = 1; i < view->count; i++) {
        struct entry e = view->entries[i];
        int j = i;
        for (; j > 0 && depth(view->entries[j - 1].dest) > depth(e.dest); j--) view->entries[j] = view->entries[j - 1];
        view->entries[j] = e;
    }
}

static int check_places(const struct view *view, struct failure *why) {
    const char *home = NULL;
    for (int i = 0; i < view->count; i++)
        if (view->entries[i].kind == HOME) home = view->entries[i].dest;
    if (!view->project || !home || !view->tmp_bytes) return refuse(why, "spec", "", EINVAL, "project, home or tmp is missing");
    if (strcmp(view->project, home) == 0 || is_below(home, view->project) || is_below("/tmp", view->project) ||
        strcmp(view->project, "/tmp") == 0 || view->project[1] == 0)
        return refuse(why, "spec", view->project, EINVAL, "the project would contain the home or /tmp");
    for (int i = 0; i < view->count; i++) {
        const struct entry *e = &view->entries[i];
        bool inside = is_below(e->dest, home) || is_below(e->dest, "/tmp") || is_below(e->dest, view->project);
        if ((e->kind == BIND || e->kind == COW) && !inside)
            return refuse(why, "graft", e->dest, EINVAL, "it lies outside the home, /tmp and the project");
        if (e->kind == COW && is_below(e->dest, view->project))
            return refuse(why, "graft", e->dest, EINVAL, "the project is copy-on-write already");
        for (int j = 0; j < i; j++)
            if (strcmp(view->entries[j].dest, e->dest) == 0 && e->kind != BELOW && view->entries[j].kind != BELOW)
                return refuse(why, "graft", e->dest, EEXIST, "two things are to stand there");
    }
    return 0;
}

/* Everything that must be looked up while the host's tree is still in full view. */
static int open_sources(struct view *view, struct failure *why) {
    if ((view->root = open("/", O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0) return fail(why, "open", "/", NULL);
    if ((view->base = open_dir(view, view->project, why)) < 0) return -1;
    for (int i = 0; i < view->count; i++) {
        struct entry *e = &view->entries[i];
        if (e->kind == PROJECT) e->source = fcntl(view->base, F_DUPFD_CLOEXEC, 3);
        else if (e->kind != TMP && e->source < 0 && (e->source = open_source(view, e->from, &e->is_dir, why)) < 0) return -1;
        if (e->kind == HOME && !e->is_dir) return refuse(why, "open", e->from, ENOTDIR, "it is not a directory");
        e->under = sys_openat2(AT_FDCWD, e->dest, O_PATH, LINKLESS); /* absent is fine: nothing is hidden then */
    }
    return 0;
}

/* In a user namespace the host's mounts come as one piece and the kernel refuses to stack on a
 * directory that has some of them below: its bare EINVAL says nothing, so say it here. */
static void explain_locked(const struct view *view, struct failure *why) {
    if (geteuid() == 0 || why->code != EINVAL || strcmp(why->step, "overlay") != 0) return;
    for (int i = 0; i < view->count; i++)
        if (view->entries[i].kind == BELOW) {
            refuse(why, "mounts below", view->entries[i].dest, EINVAL,
                   "it is mounted below the project, where the kernel lets only root make an overlay");
            return;
        }
}

static int mount_all(struct view *view, const struct layers *layers, struct failure *why) {
    for (int i = 0; i < view->count; i++)
        if (make_tree(view, &view->entries[i], layers, why) < 0) {
            explain_locked(view, why);
            return -1;
        }
    view->covered = true;
    for (int i = 0; i < view->count; i++) {
        struct entry *e = &view->entries[i];
        AUTO_FD point = find_point(view, e, why);
        if (point < 0 && e->kind == BELOW) continue; /* the agent removed it: nothing is left to show there */
        if (point < 0) return -1;
        if (attach(e->tree, point) < 0) return fail(why, "attach", e->dest, NULL);
        if (e->kind == PROJECT) {
            view->point = point;
            point = -1;
        } else {
            close_fd(&e->tree);
        }
    }
    return 0;
}

static int mount_view(struct view *view, const struct layers *layers, struct failure *why) {
    if (!add_entry(view, TMP, "tmpfs", "/tmp") || !add_entry(view, PROJECT, view->project, view->project))
        return refuse(why, "spec", "", E2BIG, "too many grafts");
    if (check_places(view, why) < 0 || enter_namespaces(why) < 0 || find_below(view, why) < 0) return -1;
    sort_entries(view);
    if (open_sources(view, why) < 0) return -1;
    return mount_all(view, layers, why);
}

/* ---- restack ----------------------------------------------------------------------------------- */

/* Prepares what stands below the project for the new tree: its mount point there and a fresh clone. */
static int prepare_inner(struct view *view, int tree, struct failure *why) {
    for (int i = 0; i < view->count; i++) {
        struct entry *e = &view->entries[i];
        if (!is_below(e->dest, view->project)) continue;
        e->point = walk_point(view, tree, e->dest + strlen(view->project) + 1, e->is_dir, -1, e->dest, why);
        if (e->point < 0 && e->kind == BELOW) continue;
        if (e->point < 0 || (e->tree = make_bind(e, why)) < 0) return -1;
    }
    return 0;
}

static int attach_project(struct view *view, int tree, struct failure *why) {
    if (attach(tree, view->point) < 0) return fail(why, "attach", view->project, NULL);
    for (int i = 0; i < view->count; i++) {
        struct entry *e = &view->entries[i];
        if (e->point >= 0 && attach(e->tree, e->point) < 0) {
            fail(why, "attach", e->dest, NULL);
            detach(tree);
            return -1;
        }
    }
    return 0;
}

static void drop_inner(struct view *view) {
    for (int i = 0; i < view->count; i++) {
        struct entry *e = &view->entries[i];
        if (e->kind != PROJECT) close_fd(&e->tree);
        close_fd(&e->point);
    }
}

/* An agent may have renamed a directory above the project in the private home: the mount moved along. */
static int check_place(const struct view *view, int tree, struct failure *why) {
    struct stat now, then;
    AUTO_FD fd = sys_openat2(AT_FDCWD, view->project, O_PATH, LINKLESS);
    if (fd < 0 || fstat(fd, &now) < 0 || fstat(tree, &then) < 0) return fail(why, "restack", view->project, NULL);
    if (now.st_dev != then.st_dev || now.st_ino != then.st_ino)
        return refuse(why, "restack", view->project, ESTALE, "the view no longer stands there; a directory above it was moved");
    return 0;
}

static int restack(struct view *view, const struct layers *layers, struct failure *why) {
    struct entry *project = project_entry(view);
    if (check_place(view, project->tree, why) < 0) return -1;
    AUTO_FD fresh = stack_project(view, layers, why);
    if (fresh < 0 || prepare_inner(view, fresh, why) < 0) { drop_inner(view); return -1; }
    AUTO_FD old = clone_tree(project->tree, true);
    if (old < 0 || detach(project->tree) < 0) { drop_inner(view); return fail(why, "restack", view->project, NULL); }
    int result = attach_project(view, fresh, why);
    drop_inner(view);
    int *standing = result == 0 ? &fresh : &old;
    if (result < 0 && attach(old, view->point) < 0) {
        fail(why, "restack", view->project, "neither the new nor the old stack could be attached");
        _exit(1); /* no view is better than a bare base in its place */
    }
    close_fd(&project->tree);
    project->tree = *standing;
    *standing = -1;
    return result;
}

/* ---- life -------------------------------------------------------------------------------------- */

/* Out of the reach of the user's terminal, with nothing open but the life-line. */
static void settle(void) {
    const int ignored[] = {SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGPIPE, SIGUSR1, SIGUSR2, SIGALRM};
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_IGN);
    setsid();
    if (chdir("/") < 0) _exit(1);
    umask(0);
    prctl(PR_SET_NAME, "deltabox-view");
    prctl(PR_SET_DUMPABLE, 1); /* the owner reaches the namespaces through /proc */
    /* An inherited descriptor would keep somebody's pipe open for the whole session. */
    syscall(SYS_close_range, 1u, ~0u, 0u);
    if (open("/dev/null", O_RDWR) != 1 || dup(1) != 2) _exit(1);
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

/* One request; false ends the holder. */
static bool serve(struct view *view) {
    static char *kept; /* the first request's text, into which the view points */
    char word[64];
    struct failure why = {0};
    struct layers layers = {0};
    struct fields in;
    AUTO_FD memfd = -1;
    if (receive(word, sizeof word, &memfd) < 0 || strcmp(word, "stop") == 0) return false;
    AUTO_TEXT text = read_fields(memfd, &in);
    bool first = strcmp(word, "mount") == 0 && !view->made;
    int result;
    if (!text || (!first && (strcmp(word, "restack") != 0 || !view->made))) result = refuse(&why, "request", word, EBADMSG, "it cannot be read");
    else if ((first ? parse_mount(view, &layers, in) : parse_restack(&layers, in)) < 0) result = refuse(&why, "request", word, EBADMSG, "a field is wrong");
    else result = first ? mount_view(view, &layers, &why) : restack(view, &layers, &why);
    if (first) { kept = text; text = NULL; view->made = result == 0; }
    if (result == 0) result = reply_ready(view, first, &why);
    if (result < 0) reply_error(&why);
    return kept && (result == 0 || !first);
}

int main(void) {
    static struct view view = {.root = -1, .base = -1, .point = -1};
    int type = 0;
    socklen_t size = sizeof type;
    if (getsockopt(0, SOL_SOCKET, SO_TYPE, &type, &size) < 0 || type != SOCK_SEQPACKET) {
        dprintf(2, "deltabox-view is started by deltabox, with a socket as descriptor 0.\n");
        return 2;
    }
    settle();
    while (serve(&view)) {}
    return 0;
}
