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
#include <errno.h>
#include <fcntl.h>
#include <linux/mount.h>
#include <linux/openat2.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MAX_FIELDS_BYTES (4 << 20) /* 500 layers with 4 KiB paths are 2 MiB */
#define MAX_LOWERS 500             /* the kernel's OVL_MAX_STACK */
#define MAX_ENTRIES 256
#define DETACH 2 /* MNT_DETACH, which linux/mount.h lacks */
#define LINKLESS (RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
#define SAFE (MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV)

static void close_fd(int *fd) { if (*fd >= 0) close(*fd); *fd = -1; }
static void free_text(char **text) { free(*text); }
static void close_file(FILE **file) { if (*file) fclose(*file); }
#define AUTO_FD __attribute__((cleanup(close_fd))) int
#define AUTO_TEXT __attribute__((cleanup(free_text))) char *
#define AUTO_FILE __attribute__((cleanup(close_file))) FILE *

struct failure { const char *step; int code; char path[4096], sentence[512]; };

/* One overlay to make: where its directories are, as descriptors. */
struct stack { int upper, work, count; int lowers[MAX_LOWERS + 1]; };

enum kind { TMP, HOME, BIND, COW, PROJECT, BELOW };

/* One mount of the view. `source` stays open (O_PATH, in this namespace) so that a restack can clone
 * it again; `under` is what the host has at `dest`, by which host paths stay reachable once covered. */
struct entry {
    enum kind kind;
    const char *from, *dest, *upper, *work;
    bool readonly, is_dir;
    int source, under, tree, point;
};

struct layers { const char *upper, *work, *lowers[MAX_LOWERS]; int count; };

struct view {
    const char *project;
    unsigned long long tmp_bytes;
    uid_t uid;
    gid_t gid;
    bool legacy, covered, made;
    int root, base, point, generation, count;
    struct entry entries[MAX_ENTRIES];
};

/* ---- failures ---------------------------------------------------------------------------------- */

/* Keeps errno as the reason. A NULL sentence stands for the system's own words. */
static int fail(struct failure *why, const char *step, const char *path, const char *sentence) {
    why->code = errno;
    why->step = step;
    snprintf(why->path, sizeof why->path, "%s", path ? path : "");
    snprintf(why->sentence, sizeof why->sentence, "%s", sentence ? sentence : strerror(why->code));
    return -1;
}

static int refuse(struct failure *why, const char *step, const char *path, int code, const char *sentence) {
    errno = code;
    return fail(why, step, path, sentence);
}

/* ---- system calls that C libraries have late or not at all ------------------------------------- */

static int sys_openat2(int dir, const char *path, uint64_t flags, uint64_t resolve) {
    struct open_how how = {.flags = flags | O_CLOEXEC, .resolve = resolve};
    long fd;
    do fd = syscall(SYS_openat2, dir, path, &how, sizeof how);
    while (fd < 0 && (errno == EAGAIN || errno == EINTR));
    return (int)fd;
}

static int set_string(int fs, const char *key, const char *value) {
    return (int)syscall(SYS_fsconfig, fs, FSCONFIG_SET_STRING, key, value, 0);
}

static int clone_tree(int fd, bool recursive) {
    unsigned flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH | (recursive ? AT_RECURSIVE : 0u);
    return (int)syscall(SYS_open_tree, fd, "", flags);
}

static int set_attributes(int tree, uint64_t attributes) {
    struct mount_attr attr = {.attr_set = attributes};
    return (int)syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | AT_RECURSIVE, &attr, sizeof attr);
}

static int attach(int tree, int point) {
    return (int)syscall(SYS_move_mount, tree, "", point, "", MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH);
}

/* By descriptor, so that no name an agent could have moved is looked up. */
static int detach(int root) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", root);
    return (int)syscall(SYS_umount2, path, DETACH);
}

/* ---- paths ------------------------------------------------------------------------------------- */

static bool is_below(const char *path, const char *ancestor) {
    size_t n = strlen(ancestor);
    return strncmp(path, ancestor, n) == 0 && path[n] == '/';
}

static int depth(const char *path) {
    int n = 0;
    for (; *path; path++) n += *path == '/';
    return n;
}

/* The host's directory or file at `path`, also when this view covers it by now: the walk then starts
 * below the outermost mount that hides it. */
static int open_host(const struct view *view, const char *path) {
    const struct entry *hider = NULL;
    for (int i = 0; view->covered && i < view->count; i++) {
        const struct entry *e = &view->entries[i];
        if (is_below(path, e->dest) && (!hider || depth(e->dest) < depth(hider->dest))) hider = e;
    }
    if (!hider) return sys_openat2(AT_FDCWD, path, O_PATH, LINKLESS);
    return sys_openat2(hider->under, path + strlen(hider->dest) + 1, O_PATH, LINKLESS | RESOLVE_BENEATH);
}

static int open_source(const struct view *view, const char *path, bool *is_dir, struct failure *why) {
    struct stat st;
    int fd = open_host(view, path);
    if (fd < 0) {
        const char *words = errno == ELOOP ? "a part of the path is a symbolic link" : NULL;
        return fail(why, "open", path, words);
    }
    if (fstat(fd, &st) < 0) { close(fd); return fail(why, "open", path, NULL); }
    *is_dir = S_ISDIR(st.st_mode);
    return fd;
}

static int open_dir(const struct view *view, const char *path, struct failure *why) {
    bool is_dir;
    int fd = open_source(view, path, &is_dir, why);
    if (fd >= 0 && !is_dir) { close(fd); return refuse(why, "open", path, ENOTDIR, "it is not a directory"); }
    return fd;
}

/* ---- overlays ---------------------------------------------------------------------------------- */

/* The last words of the kernel about a mount being made; empty when it said nothing. */
static void kernel_words(int fs, char *out, size_t size) {
    int saved = errno;
    char line[256];
    ssize_t n;
    out[0] = 0;
    while ((n = read(fs, line, sizeof line - 1)) > 0) {
        line[n] = 0;
        for (char *c = line; *c; c++) if (*c < ' ' || *c > '~') *c = '?';
        snprintf(out, size, "%s", n > 2 ? line + 2 : line);
    }
    errno = saved;
}

/* Layers are named by descriptor, so a name swapped after it was opened, or one with `:` `,` or a
 * backslash, means nothing to the kernel's option parser. */
static int add_layer(int fs, const char *key, int fd) {
    char path[32];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    return set_string(fs, key, path);
}

static int configure_overlay(int fs, const struct stack *stack) {
    if (set_string(fs, "source", "deltabox") < 0) return -1;
    if (syscall(SYS_fsconfig, fs, FSCONFIG_SET_FLAG, "userxattr", NULL, 0) < 0) return -1;
    /* userxattr itself switches redirect_dir and metacopy off. An index would tie the upper to one
     * base inode and mark it with file handles; nothing here needs either. */
    if (set_string(fs, "index", "off") < 0 || set_string(fs, "xino", "auto") < 0) return -1;
    for (int i = 0; i < stack->count; i++)
        if (add_layer(fs, "lowerdir+", stack->lowers[i]) < 0) return -1;
    if (add_layer(fs, "upperdir", stack->upper) < 0 || add_layer(fs, "workdir", stack->work) < 0) return -1;
    return (int)syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0);
}

/* mount(2) takes one page of options. Names relative to /proc/self/fd need no escaping and are three
 * or four bytes each, so that all the layers the kernel can stack fit. mount(2) cannot make a detached
 * mount: it is made on /tmp for a moment, in this namespace only, and cloned off. */
static int legacy_overlay(const struct stack *stack, uint64_t attributes) {
    char options[4096];
    int n = snprintf(options, sizeof options, "userxattr,index=off,xino=auto,upperdir=%d,workdir=%d,lowerdir=",
                     stack->upper, stack->work);
    for (int i = 0; i < stack->count; i++) {
        n += snprintf(options + n, sizeof options - (size_t)n, "%s%d", i ? ":" : "", stack->lowers[i]);
        if (n >= (int)sizeof options - 1) { errno = E2BIG; return -1; }
    }
    if (chdir("/proc/self/fd") < 0) return -1;
    long made = syscall(SYS_mount, "deltabox", "/tmp", "overlay", MS_NOSUID | MS_NODEV, options);
    int code = errno;
    if (chdir("/") < 0) abort(); /* the root directory is always there */
    errno = code;
    if (made < 0) return -1;
    AUTO_FD mounted = sys_openat2(AT_FDCWD, "/tmp", O_PATH, LINKLESS);
    int tree = mounted < 0 ? -1 : clone_tree(mounted, false);
    if (tree >= 0 && set_attributes(tree, attributes) < 0) close_fd(&tree);
    code = errno;
    if (mounted >= 0) detach(mounted);
    errno = code;
    return tree;
}

/* A detached overlay. `name` is what the failure names. */
static int make_overlay(const struct view *view, const struct stack *stack, const char *name, struct failure *why) {
    char words[256] = "";
    struct statvfs vfs;
    uint64_t attributes = SAFE;
    /* What the administrator mounted without execution stays so in the view. */
    if (fstatvfs(stack->lowers[stack->count - 1], &vfs) == 0 && (vfs.f_flag & ST_NOEXEC)) attributes |= MOUNT_ATTR_NOEXEC;
    bool legacy = view->legacy;
    int tree = -1;
    if (!legacy) {
        AUTO_FD fs = (int)syscall(SYS_fsopen, "overlay", FSOPEN_CLOEXEC);
        if (fs >= 0 && configure_overlay(fs, stack) == 0)
            tree = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, attributes);
        if (tree >= 0) return tree;
        if (fs >= 0) kernel_words(fs, words, sizeof words);
        legacy = errno == ENOSYS || strstr(words, "Unknown parameter");
    }
    if (legacy) tree = legacy_overlay(stack, attributes);
    return tree >= 0 ? tree : fail(why, "overlay", name, words[0] ? words : NULL);
}

/* Overlay empties its work directory when mounted, under a still mounted older stack too. The two
 * names take turns, so that a restack that fails leaves the old stack able to copy up. */
static int work_dir(int parent, int generation) {
    const char *name = generation % 2 ? "odd" : "even";
    if (mkdirat(parent, name, 0700) < 0 && errno != EEXIST) return -1;
    return sys_openat2(parent, name, O_PATH | O_DIRECTORY, LINKLESS | RESOLVE_BENEATH);
}

static void close_stack(struct stack *stack) {
    close_fd(&stack->upper);
    close_fd(&stack->work);
    while (stack->count > 0) close_fd(&stack->lowers[--stack->count]);
}

static int open_upper(struct view *view, struct stack *stack, const char *upper, const char *work, struct failure *why) {
    if ((stack->upper = open_dir(view, upper, why)) < 0) return -1;
    AUTO_FD parent = open_dir(view, work, why);
    if (parent < 0) return -1;
    stack->work = work_dir(parent, view->generation);
    return stack->work < 0 ? fail(why, "work directory", work, NULL) : 0;
}

/* The project's overlay from its layers, with the base last. */
static int stack_project(struct view *view, const struct layers *layers, struct failure *why) {
    __attribute__((cleanup(close_stack))) struct stack stack = {.upper = -1, .work = -1};
    view->generation++;
    if (!layers->upper || !layers->work) return refuse(why, "spec", view->project, EINVAL, "upper or work is missing");
    if (layers->count + 1 > MAX_LOWERS)
        return refuse(why, "overlay", view->project, E2BIG, "more layers than the 500 that the kernel stacks");
    if (open_upper(view, &stack, layers->upper, layers->work, why) < 0) return -1;
    for (int i = 0; i < layers->count; i++) {
        if ((stack.lowers[i] = open_dir(view, layers->lowers[i], why)) < 0) return -1;
        stack.count = i + 1;
    }
    if ((stack.lowers[layers->count] = fcntl(view->base, F_DUPFD_CLOEXEC, 3)) < 0) return fail(why, "open", view->project, NULL);
    stack.count = layers->count + 1;
    return make_overlay(view, &stack, view->project, why);
}

/* ---- making each mount, detached --------------------------------------------------------------- */

static int make_tmp(const struct view *view, struct failure *why) {
    char size[32];
    snprintf(size, sizeof size, "%llu", view->tmp_bytes);
    AUTO_FD fs = (int)syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC);
    int tree = -1;
    if (fs >= 0 && set_string(fs, "source", "deltabox") == 0 && set_string(fs, "size", size) == 0 &&
        set_string(fs, "mode", "1777") == 0 && syscall(SYS_fsconfig, fs, FSCONFIG_CMD_CREATE, NULL, NULL, 0) == 0)
        tree = (int)syscall(SYS_fsmount, fs, FSMOUNT_CLOEXEC, SAFE);
    return tree >= 0 ? tree : fail(why, "tmpfs", "/tmp", NULL);
}

static int make_bind(const struct entry *e, struct failure *why) {
    int tree = clone_tree(e->source, true);
    if (tree < 0) return fail(why, "bind", e->from, NULL);
    if (set_attributes(tree, SAFE | (e->readonly ? MOUNT_ATTR_RDONLY : 0u)) == 0) return tree;
    fail(why, "bind", e->from, NULL);
    close(tree);
    return -1;
}

static int make_cow(struct view *view, const struct entry *e, struct failure *why) {
    __attribute__((cleanup(close_stack))) struct stack stack = {.upper = -1, .work = -1};
    if (!e->is_dir) return refuse(why, "graft", e->from, ENOTDIR, "copy-on-write needs a directory");
    if (open_upper(view, &stack, e->upper, e->work, why) < 0) return -1;
    if ((stack.lowers[0] = fcntl(e->source, F_DUPFD_CLOEXEC, 3)) < 0) return fail(why, "open", e->from, NULL);
    stack.count = 1;
    return make_overlay(view, &stack, e->from, why);
}

static int make_tree(struct view *view, struct entry *e, const struct layers *layers, struct failure *why) {
    switch (e->kind) {
    case TMP: e->tree = make_tmp(view, why); break;
    case COW: e->tree = make_cow(view, e, why); break;
    case PROJECT: e->tree = stack_project(view, layers, why); break;
    case HOME: case BIND: case BELOW: e->tree = make_bind(e, why); break;
    }
    return e->tree < 0 ? -1 : 0;
}

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

static struct entry *add_entry(struct view *view, enum kind kind, const char *from, const char *dest) {
    if (view->count == MAX_ENTRIES) return NULL;
    struct entry *e = &view->entries[view->count++];
    *e = (struct entry){.kind = kind, .from = from, .dest = dest, .source = -1, .under = -1, .tree = -1, .point = -1};
    e->is_dir = true;
    return e;
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

static struct entry *project_entry(struct view *view) {
    struct entry *e = view->entries;
    while (e->kind != PROJECT) e++;
    return e;
}

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

/* ---- requests and replies ---------------------------------------------------------------------- */

struct fields { const char *at, *end; };

static const char *next(struct fields *in) {
    if (in->at >= in->end) return NULL;
    const char *field = in->at;
    in->at += strlen(field) + 1;
    return field;
}

static bool is_plain(const char *path) { return path && path[0] == '/' && strlen(path) < 4096; }

static int parse_layer(struct layers *layers, const char *word, struct fields *in) {
    const char *path = next(in);
    if (!is_plain(path)) return -1;
    if (strcmp(word, "upper") == 0) layers->upper = path;
    else if (strcmp(word, "work") == 0) layers->work = path;
    else if (strcmp(word, "lower") != 0) return -1;
    else if (layers->count < MAX_LOWERS) layers->lowers[layers->count++] = path;
    return 0;
}

static int parse_entry(struct view *view, const char *word, struct fields *in) {
    bool bind = strcmp(word, "graft") == 0, cow = strcmp(word, "cow") == 0;
    const char *access = bind ? next(in) : "rw";
    const char *from = next(in), *dest = next(in);
    if (!access || !is_plain(from) || !is_plain(dest)) return -1;
    struct entry *e = add_entry(view, bind ? BIND : cow ? COW : HOME, from, dest);
    if (!e) return -1;
    e->readonly = strcmp(access, "ro") == 0;
    if (cow) {
        e->upper = next(in);
        e->work = next(in);
        if (!is_plain(e->upper) || !is_plain(e->work)) return -1;
    }
    return 0;
}

static int parse_number(struct fields *in, unsigned long long *out) {
    char *end;
    const char *text = next(in);
    if (!text || !*text) return -1;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return *end || errno ? -1 : 0;
}

static int parse_mount(struct view *view, struct layers *layers, struct fields in) {
    unsigned long long uid, gid;
    for (const char *word; (word = next(&in));) {
        int bad = 0;
        if (strcmp(word, "project") == 0) bad = is_plain(view->project = next(&in)) ? 0 : -1;
        else if (strcmp(word, "tmp") == 0) bad = parse_number(&in, &view->tmp_bytes);
        else if (strcmp(word, "legacy") == 0) view->legacy = true;
        else if (strcmp(word, "owner") == 0) {
            bad = parse_number(&in, &uid) < 0 || parse_number(&in, &gid) < 0;
            if (!bad) { view->uid = (uid_t)uid; view->gid = (gid_t)gid; }
        }
        else if (strcmp(word, "home") == 0 || strcmp(word, "graft") == 0 || strcmp(word, "cow") == 0) bad = parse_entry(view, word, &in);
        else bad = parse_layer(layers, word, &in);
        if (bad) return -1;
    }
    return 0;
}

static int parse_restack(struct layers *layers, struct fields in) {
    for (const char *word; (word = next(&in));)
        if (parse_layer(layers, word, &in) < 0) return -1;
    return 0;
}

/* A request's word and its memfd, or -1 at the end of the life-line. */
static ssize_t receive(char *word, size_t size, int *fd) {
    union { struct cmsghdr header; char bytes[CMSG_SPACE(sizeof(int))]; } control;
    struct iovec part = {word, size - 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    do n = recvmsg(0, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n <= 0) return -1;
    word[n] = 0;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *fd = -1;
    if (header && header->cmsg_type == SCM_RIGHTS) memcpy(fd, CMSG_DATA(header), sizeof *fd);
    return n;
}

/* The fields of a request; NULL when they are too long or not NUL-terminated. */
static char *read_fields(int fd, struct fields *out) {
    struct stat st;
    if (fd < 0 || fstat(fd, &st) < 0 || st.st_size <= 0 || st.st_size > MAX_FIELDS_BYTES) return NULL;
    size_t size = (size_t)st.st_size, got = 0;
    char *text = malloc(size);
    for (ssize_t n = 1; text && got < size && n > 0; got += (size_t)n)
        if ((n = pread(fd, text + got, size - got, (off_t)got)) <= 0) break;
    if (!text || got < size || text[size - 1]) { free(text); return NULL; }
    *out = (struct fields){text, text + size};
    return text;
}

static void reply(char *text, size_t size, const int *fds, size_t count) {
    union { struct cmsghdr header; char bytes[CMSG_SPACE(3 * sizeof(int))]; } control = {0};
    struct iovec part = {text, size};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        message.msg_control = &control;
        message.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        *header = (struct cmsghdr){.cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS, .cmsg_len = CMSG_LEN(count * sizeof(int))};
        memcpy(CMSG_DATA(header), fds, count * sizeof(int));
    }
    if (sendmsg(0, &message, MSG_NOSIGNAL) < 0) _exit(1); /* the owner is gone */
}

static void reply_error(const struct failure *why) {
    char text[8192];
    int n = snprintf(text, sizeof text, "error%c%s%c%s%c%d%c%s", 0, why->step, 0, why->path, 0, why->code, 0, why->sentence);
    reply(text, (size_t)n + 1, NULL, 0);
}

static int reply_ready(struct view *view, bool first, struct failure *why) {
    AUTO_FD user = first && geteuid() ? open("/proc/self/ns/user", O_RDONLY | O_CLOEXEC) : -1;
    AUTO_FD mounts = first ? open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC) : -1;
    AUTO_FD project = sys_openat2(project_entry(view)->tree, ".", O_PATH | O_DIRECTORY, LINKLESS);
    if (project < 0 || (first && (mounts < 0 || (geteuid() && user < 0)))) return fail(why, "ready", view->project, NULL);
    int fds[3];
    size_t count = 0;
    char text[64] = "ready";
    size_t size = 6;
    const struct { const char *name; int fd; } all[] = {{"user", user}, {"mount", mounts}, {"project", project}};
    for (size_t i = 0; i < 3; i++) {
        if (all[i].fd < 0) continue;
        fds[count++] = all[i].fd;
        size += (size_t)snprintf(text + size, sizeof text - size, "%s", all[i].name) + 1;
    }
    reply(text, size, fds, count);
    return 0;
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
