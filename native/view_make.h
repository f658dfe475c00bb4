/*
 * Makes each mount of a view, detached. Must not attach one or look at where it will stand.
 */
#ifndef DELTABOX_VIEW_MAKE_H
#define DELTABOX_VIEW_MAKE_H

#include "view.h"

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

#endif
