/*
 * What all parts of deltabox-view share: the view's shape, failures, system calls, host paths. Must not
 * mount anything.
 */
#ifndef DELTABOX_VIEW_H
#define DELTABOX_VIEW_H

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

/* ---- entries ----------------------------------------------------------------------------------- */

static struct entry *add_entry(struct view *view, enum kind kind, const char *from, const char *dest) {
    if (view->count == MAX_ENTRIES) return NULL;
    struct entry *e = &view->entries[view->count++];
    *e = (struct entry){.kind = kind, .from = from, .dest = dest, .source = -1, .under = -1, .tree = -1, .point = -1};
    e->is_dir = true;
    return e;
}

static struct entry *project_entry(struct view *view) {
    struct entry *e = view->entries;
    while (e->kind != PROJECT) e++;
    return e;
}

#endif
