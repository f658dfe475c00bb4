/*
 * deltabox-enter: puts itself where a view stands and becomes one program there; it looks nothing up
 * by name once inside, and it is no sandbox.
 *
 * deltabox-enter USERNS_FD|- MNTNS_FD UID GID EXEC_FD ARGV0 [ARG...]
 *
 * The program is given as a descriptor, because inside the view a name may mean the agent's file. It
 * starts in `/` with an empty environment. Other descriptors are left as they are: the program
 * was given them. Fails with one sentence on stderr and status 125.
 */
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Noreturn void die(const char *what, const char *why) {
    dprintf(2, "deltabox-enter: %s: %s\n", what, why);
    _exit(125);
}

static unsigned number(const char *text, const char *what) {
    char *end;
    errno = 0;
    unsigned long value = strtoul(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value >= UINT_MAX) die(what, "not a number");
    return (unsigned)value;
}

/* Closed at exec, not before: a failure until then is still reported with everything in place. */
static int descriptor(const char *text, const char *what) {
    unsigned fd = number(text, what);
    if (fd > INT_MAX || fcntl((int)fd, F_SETFD, FD_CLOEXEC) < 0) die(what, "not an open descriptor");
    return (int)fd;
}

/* In a user namespace of the view only the caller's own ids exist, and they are kept. */
static void become(uid_t uid, gid_t gid, int mapped) {
    if (mapped || geteuid() != 0) {
        if (geteuid() != uid || getegid() != gid) die("owner", "only root can start a program as somebody else");
        return;
    }
    if (setgroups(0, NULL) < 0 || setresgid(gid, gid, gid) < 0 || setresuid(uid, uid, uid) < 0) die("owner", strerror(errno));
}

int main(int argc, char **argv) {
    char *const empty[] = {NULL};
    if (argc < 7) die("usage", "deltabox-enter USERNS_FD|- MNTNS_FD UID GID EXEC_FD ARGV0 [ARG...]");
    int mapped = strcmp(argv[1], "-") != 0;
    int user = mapped ? descriptor(argv[1], "user namespace") : -1;
    int mounts = descriptor(argv[2], "mount namespace");
    uid_t uid = number(argv[3], "uid");
    gid_t gid = number(argv[4], "gid");
    int program = descriptor(argv[5], "program");
    if (mapped && setns(user, CLONE_NEWUSER) < 0) die("user namespace", strerror(errno));
    if (setns(mounts, CLONE_NEWNS) < 0) die("mount namespace", strerror(errno));
    if (chdir("/") < 0) die("/", strerror(errno));
    become(uid, gid, mapped);
    syscall(SYS_execveat, program, "", argv + 6, empty, AT_EMPTY_PATH);
    die(argv[6], strerror(errno));
}
