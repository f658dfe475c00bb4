/*
 * Reads requests and writes replies; the format stands at the head of view.c. Must not act on them.
 */
#ifndef DELTABOX_VIEW_WIRE_H
#define DELTABOX_VIEW_WIRE_H

#include "view.h"

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

#endif
