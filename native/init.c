/*
 * deltabox-init: pid 1 of a sandbox. Puts the last confinement in place, runs one command, reports how
 * it ended, and ends everything with it or with its owner. Must not decide policy, print, or outlive
 * its owner: the control socket is the life-line, and its end of file is the order to die.
 *
 *   deltabox-init --control FD [--stdin FD --stdout FD --stderr FD | --tty ROWS COLS] [--env FD]
 *                 [--filter FD] [--chdir DIR] [--rlimit NAME=VALUE]... [--unconfined] -- CMD ARGS...
 *
 * The control socket is SOCK_SEQPACKET; a message is one line of words.
 *   out: tty (with the master's descriptor) · ready SCOPE · started · stopped SIG · frozen LEFT · thawed ·
 *        exit CODE · killed SIG · error STEP ERRNO TEXT
 *   in:  signal N · cont · freeze · thaw
 * SCOPE is 1 where Landlock keeps signals and abstract sockets inside; LEFT counts the threads that
 * could not be stopped in time. After exit, killed or error it ends.
 *
 * --unconfined is for isolation `none`: no pid namespace, no Landlock, no filter. The process is then
 * a subreaper, and "everything" is its descendants. Without the flag it insists on being pid 1, so
 * that a mistake in the caller can never run a command with less than was asked.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER _IO('T', 0x41)
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

enum {
	LANDLOCK_CREATE_RULESET = 444, /* one number on every architecture */
	LANDLOCK_RESTRICT_SELF = 446,
	CLOSE_ON_EXEC = 1 << 2,		/* CLOSE_RANGE_CLOEXEC */
	EXIT_INTERNAL = 125,		/* the owner reads messages, not this */
	ENV_LIMIT = 8 << 20,		/* the kernel refuses larger environments anyway */
	MAX_INSTRUCTIONS = 4096,	/* BPF_MAXINSNS */
	FREEZE_MS = 1000,		/* a thread in an uninterruptible wait must not hold the owner longer */
	END_ROUNDS = 10000,		/* 2 s: unconfined, a set-uid descendant may be beyond our signals */
	POLL_NS = 200 * 1000,
};

struct limit {
	int resource;
	rlim_t value;
};

struct options {
	int control, in, out, err, filter, env;
	bool tty, unconfined;
	struct winsize size;
	const char *directory;
	struct limit limits[16];
	size_t limit_count;
	char **argv;
};

struct process {
	pid_t pid, parent;
	bool stopped, ours;
};

struct table {
	struct process *items;
	size_t count, room;
};

struct state {
	int control;
	int terminal; /* the slave, our controlling terminal; -1 without one */
	int children; /* signalfd for SIGCHLD */
	pid_t command;
	bool unconfined, frozen;
	struct table asleep; /* stopped before the freeze, so not ours to wake */
};

/* ---- messages ---- */

static void tell(int control, const char *text)
{
	/* Blocking is right: the owner reads or dies, and its death ends the call with EPIPE. */
	while (send(control, text, strlen(text), MSG_NOSIGNAL) < 0 && errno == EINTR)
		;
}

static void tell_number(int control, const char *word, long number)
{
	char text[64];
	snprintf(text, sizeof text, "%s %ld", word, number);
	tell(control, text);
}

static void tell_error(int control, const char *step, int code)
{
	char text[256];
	snprintf(text, sizeof text, "error %s %d %s", step, code, strerror(code));
	tell(control, text);
}

__attribute__((noreturn)) static void fail(int control, const char *step)
{
	tell_error(control, step, errno);
	_exit(EXIT_INTERNAL);
}

static int tell_descriptor(int control, const char *word, int fd)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} box = {0};
	struct iovec text = {.iov_base = (void *)(uintptr_t)word, .iov_len = strlen(word)};
	struct msghdr message = {
		.msg_iov = &text, .msg_iovlen = 1, .msg_control = box.bytes, .msg_controllen = sizeof box.bytes};
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(head), &fd, sizeof fd);
	return sendmsg(control, &message, MSG_NOSIGNAL) < 0 ? -1 : 0;
}

/* ---- the command line ---- */

__attribute__((noreturn)) static void usage(const char *why)
{
	fprintf(stderr, "deltabox-init: %s\n", why);
	_exit(2);
}

static unsigned long long number(const char *text, unsigned long long most)
{
	char *end = NULL;
	errno = 0;
	unsigned long long value = text ? strtoull(text, &end, 10) : 0;
	if (!text || *text < '0' || *text > '9' || *end || errno || value > most)
		usage("a number is missing or out of range");
	return value;
}

static struct limit parse_limit(const char *text)
{
	static const struct {
		const char *name;
		int resource;
	} names[] = {
		{"as", RLIMIT_AS},	 {"core", RLIMIT_CORE},	      {"cpu", RLIMIT_CPU},     {"data", RLIMIT_DATA},
		{"fsize", RLIMIT_FSIZE}, {"memlock", RLIMIT_MEMLOCK}, {"nofile", RLIMIT_NOFILE},
		{"nproc", RLIMIT_NPROC}, {"stack", RLIMIT_STACK},
	};
	for (size_t i = 0; text && i < sizeof names / sizeof *names; i++) {
		size_t length = strlen(names[i].name);
		if (strncmp(text, names[i].name, length) == 0 && text[length] == '=')
			return (struct limit){names[i].resource, number(text + length + 1, LONG_MAX)};
	}
	usage("--rlimit takes NAME=VALUE with a known name");
}

static struct options parse(char **argv)
{
	struct options o = {.control = -1, .in = -1, .out = -1, .err = -1, .filter = -1, .env = -1};
	const struct {
		const char *name;
		int *fd;
	} descriptors[] = {
		{"--control", &o.control}, {"--stdin", &o.in}, {"--stdout", &o.out}, {"--stderr", &o.err},
		{"--filter", &o.filter},   {"--env", &o.env},
	};
	const size_t known = sizeof descriptors / sizeof *descriptors;

	for (argv++; *argv && strcmp(*argv, "--") != 0; argv++) {
		size_t i = 0;
		while (i < known && strcmp(*argv, descriptors[i].name) != 0)
			i++;
		if (i < known) {
			*descriptors[i].fd = (int)number(*++argv, INT_MAX);
		} else if (strcmp(*argv, "--tty") == 0) {
			o.tty = true;
			o.size.ws_row = (unsigned short)number(*++argv, USHRT_MAX);
			o.size.ws_col = (unsigned short)number(*++argv, USHRT_MAX);
		} else if (strcmp(*argv, "--chdir") == 0 && argv[1]) {
			o.directory = *++argv;
		} else if (strcmp(*argv, "--unconfined") == 0) {
			o.unconfined = true;
		} else if (strcmp(*argv, "--rlimit") == 0 && o.limit_count < sizeof o.limits / sizeof *o.limits) {
			o.limits[o.limit_count++] = parse_limit(*++argv);
		} else {
			usage("unknown option");
		}
	}
	if (!*argv || !argv[1])
		usage("no command after --");
	o.argv = argv + 1;
	if (o.control < 0 || (!o.tty && (o.in < 0 || o.out < 0 || o.err < 0)))
		usage("--control and either --tty or --stdin, --stdout and --stderr are needed");
	if (!o.unconfined && o.filter < 0)
		usage("--filter is needed unless --unconfined");
	return o;
}

/* ---- descriptors, environment ---- */

static int compare(const void *a, const void *b)
{
	int x = *(const int *)a, y = *(const int *)b;
	return (x > y) - (x < y);
}

/* Everything else goes: what the caller or bwrap left open must reach neither us nor the command. */
static int close_others(const struct options *o)
{
	int keep[] = {2, o->control, o->in, o->out, o->err, o->filter, o->env};
	const size_t count = sizeof keep / sizeof *keep;
	qsort(keep, count, sizeof *keep, compare);
	for (size_t i = 0; i < count; i++) {
		unsigned first = (unsigned)(keep[i] < 2 ? 3 : keep[i] + 1);
		unsigned last = i + 1 < count ? (unsigned)(keep[i + 1] - 1) : ~0U;
		bool gap = i + 1 == count || keep[i + 1] > (int)first;
		if (gap && first >= 3 && syscall(SYS_close_range, first, last, 0) != 0)
			return -1;
	}
	return (int)syscall(SYS_close_range, 3, ~0U, CLOSE_ON_EXEC);
}

/* NUL-separated NAME=VALUE from a descriptor: so the command's environment is not ours, and pid 1's is empty. */
static char **read_environment(int fd)
{
	size_t room = 4096, used = 0, count = 0;
	char *data = malloc(room);
	for (ssize_t n = 1; data && fd >= 0 && n > 0; used += (size_t)n) {
		if (room - used < 2) {
			char *larger = room < ENV_LIMIT ? realloc(data, room * 2) : NULL;
			if (!larger)
				return NULL;
			data = larger;
			room *= 2;
		}
		while ((n = read(fd, data + used, room - used - 1)) < 0 && errno == EINTR)
			;
		if (n < 0)
			return NULL;
	}
	if (!data)
		return NULL;
	data[used] = '\0';
	for (size_t i = 0; i < used; i++)
		count += data[i] == '\0';
	char **list = calloc(count + 2, sizeof *list);
	size_t at = 0;
	for (char *word = data; list && word < data + used; word += strlen(word) + 1)
		list[at++] = word;
	return list;
}

/* ---- confinement ---- */

static int set_limits(const struct options *o)
{
	for (size_t i = 0; i < o->limit_count; i++) {
		struct rlimit value = {0}, now;
		if (getrlimit((__rlimit_resource_t)o->limits[i].resource, &now) != 0)
			return -1;
		/* Never more than was inherited: raising a hard limit would fail, and is not what a limit is for. */
		value.rlim_cur = value.rlim_max = o->limits[i].value < now.rlim_max ? o->limits[i].value : now.rlim_max;
		if (setrlimit((__rlimit_resource_t)o->limits[i].resource, &value) != 0)
			return -1;
	}
	return 0;
}

/* No signal to and no abstract socket of anything outside. 1 done, 0 the kernel has no scopes, -1 failed.
 * With the network off and an own pid namespace this is a second wall; with the host's network it is the
 * only one between the command and the host's abstract sockets. */
static int landlock_scope(void)
{
	const struct {
		uint64_t fs, net, scoped;
	} rules = {0, 0, 1 | 2};
	long abi = syscall(LANDLOCK_CREATE_RULESET, NULL, (size_t)0, 1U);
	if (abi < 6)
		return 0;
	int fd = (int)syscall(LANDLOCK_CREATE_RULESET, &rules, sizeof rules, 0U);
	if (fd < 0)
		return -1;
	long done = syscall(LANDLOCK_RESTRICT_SELF, fd, 0U);
	int code = errno;
	close(fd);
	errno = code;
	return done == 0 ? 1 : -1;
}

static int load_filter(int fd)
{
	static struct sock_filter code[MAX_INSTRUCTIONS];
	size_t used = 0;
	for (ssize_t n = 1; n > 0; used += (size_t)n) {
		if (used == sizeof code)
			return errno = E2BIG, -1;
		while ((n = read(fd, (char *)code + used, sizeof code - used)) < 0 && errno == EINTR)
			;
		if (n < 0)
			return -1;
	}
	if (used == 0 || used % sizeof *code != 0)
		return errno = EINVAL, -1;
	struct sock_fprog program = {.len = (unsigned short)(used / sizeof *code), .filter = code};
	return (int)syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0U, &program);
}

static int confine(const struct options *o)
{
	if (o->unconfined) {
		if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
			fail(o->control, "subreaper");
		return 0;
	}
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		fail(o->control, "no_new_privs");
	int scope = landlock_scope();
	if (scope < 0)
		fail(o->control, "landlock");
	if (load_filter(o->filter) != 0)
		fail(o->control, "filter");
	return scope;
}

/* ---- terminal ---- */

/* The session leader is this process, not the command: the command's group then has a parent in its
 * own session but outside the group, so it is not orphaned and Ctrl-Z can stop it. */
static int open_terminal(const struct options *o)
{
	int unlock = 0;
	int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
	if (master < 0 || ioctl(master, TIOCSPTLCK, &unlock) != 0)
		fail(o->control, "tty");
	int slave = ioctl(master, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC);
	struct termios modes;
	if (slave < 0 || tcgetattr(slave, &modes) != 0)
		fail(o->control, "tty");
	modes.c_iflag |= IUTF8; /* else backspace over a multi-byte character leaves half of it */
	if (tcsetattr(slave, TCSANOW, &modes) != 0 || ioctl(slave, TIOCSWINSZ, &o->size) != 0 ||
	    ioctl(slave, TIOCSCTTY, 0) != 0 || tell_descriptor(o->control, "tty", master) != 0)
		fail(o->control, "tty");
	close(master);
	return slave;
}

/* ---- the command ---- */

__attribute__((noreturn)) static void run_command(const struct options *o, int terminal, char **env, int report)
{
	const char *step = "chdir";
	static const unsigned long usual[4]; /* the kernel's sigaction: SIG_DFL, no flags, no mask */
	sigset_t none;
	int in = o->tty ? terminal : o->in, out = o->tty ? terminal : o->out, err = o->tty ? terminal : o->err;

	setpgid(0, 0);
	if (o->tty)
		tcsetpgrp(terminal, getpid()); /* SIGTTOU is still blocked */
	/* By number: libc keeps 32 and 33 for itself, and what posix_spawn starts has 32 ignored. */
	for (int i = 1; i < NSIG; i++)
		syscall(SYS_rt_sigaction, i, usual, NULL, sizeof(unsigned long));
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	/* The given descriptors are above 2 (the caller's numbers), so no dup2 overwrites a later source. */
	if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
		step = "stdio";
	else if (!o->directory || chdir(o->directory) == 0) {
		step = "exec";
		environ = env; /* execvp looks PATH up here */
		execvp(o->argv[0], o->argv);
	}
	struct {
		int code;
		char step[8];
	} why = {errno, ""};
	strncpy(why.step, step, sizeof why.step - 1);
	_exit(write(report, &why, sizeof why) == (ssize_t)sizeof why ? EXIT_INTERNAL : EXIT_INTERNAL + 1);
}

static pid_t start_command(const struct options *o, int terminal, char **env)
{
	int report[2];
	struct {
		int code;
		char step[8];
	} why;
	if (pipe2(report, O_CLOEXEC) != 0)
		fail(o->control, "pipe");
	pid_t pid = fork();
	if (pid < 0)
		fail(o->control, "fork");
	if (pid == 0)
		run_command(o, terminal, env, report[1]);
	setpgid(pid, pid); /* both sides do it, so that neither has to wait */
	close(report[1]);
	ssize_t n;
	while ((n = read(report[0], &why, sizeof why)) < 0 && errno == EINTR)
		;
	close(report[0]);
	if (n == (ssize_t)sizeof why) {
		why.step[sizeof why.step - 1] = '\0';
		errno = why.code;
		fail(o->control, why.step);
	}
	/* Our copies would keep the pipes from ever reaching end of file. */
	for (int i = 0; i < 3; i++) {
		const int given[] = {o->in, o->out, o->err};
		if (given[i] > 2)
			close(given[i]);
	}
	return pid;
}

/* ---- everything that runs under us ---- */

/* "pid (name) S ppid …": the name may hold anything, so look from the last parenthesis. */
static bool read_stat(const char *path, char *status, pid_t *parent)
{
	char text[512];
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	if (n <= 0)
		return false;
	text[n] = '\0';
	const char *end = strrchr(text, ')');
	return end && sscanf(end + 1, " %c %d", status, parent) == 2;
}

static bool is_still(char status)
{
	return status == 'T' || status == 't' || status == 'Z' || status == 'X';
}

/* Threads of one process that still run; a group stop is done when the last one has stopped. */
static size_t running_threads(pid_t pid)
{
	char path[300], status;
	pid_t parent;
	size_t running = 0;
	snprintf(path, sizeof path, "/proc/%d/task", pid);
	DIR *tasks = opendir(path);
	if (!tasks)
		return 0;
	for (struct dirent *entry; (entry = readdir(tasks));) {
		snprintf(path, sizeof path, "/proc/%d/task/%s/stat", pid, entry->d_name);
		if (entry->d_name[0] != '.' && read_stat(path, &status, &parent) && !is_still(status))
			running++;
	}
	closedir(tasks);
	return running;
}

static struct process *find(const struct table *t, pid_t pid)
{
	for (size_t i = 0; i < t->count; i++)
		if (t->items[i].pid == pid)
			return &t->items[i];
	return NULL;
}

static int add(struct table *t, struct process p)
{
	if (t->count == t->room) {
		size_t room = t->room ? t->room * 2 : 64;
		struct process *larger = realloc(t->items, room * sizeof *larger);
		if (!larger)
			return -1;
		t->items = larger;
		t->room = room;
	}
	t->items[t->count++] = p;
	return 0;
}

/* All processes under us into `t`: the whole pid namespace, or (unconfined) our descendants. */
static int scan(const struct state *s, struct table *t)
{
	DIR *proc = opendir("/proc");
	if (!proc)
		return -1;
	int result = 0;
	t->count = 0;
	for (struct dirent *entry; result == 0 && (entry = readdir(proc));) {
		char path[300], status;
		struct process p = {.pid = (pid_t)strtol(entry->d_name, NULL, 10)};
		snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
		if (p.pid <= 0 || p.pid == getpid() || !read_stat(path, &status, &p.parent) || status == 'X')
			continue;
		p.stopped = status == 'T';
		p.ours = !s->unconfined || p.parent == getpid();
		result = add(t, p);
	}
	closedir(proc);
	for (bool more = s->unconfined; more;) {
		more = false;
		for (size_t i = 0; i < t->count; i++) {
			const struct process *parent = t->items[i].ours ? NULL : find(t, t->items[i].parent);
			if (parent && parent->ours)
				t->items[i].ours = more = true;
		}
	}
	return result;
}

static void signal_all(const struct state *s, int signal)
{
	struct table all = {0};
	if (!s->unconfined)
		kill(-1, signal); /* pid 1: exactly the namespace without us, and new forks are caught too */
	else if (scan(s, &all) == 0)
		for (size_t i = 0; i < all.count; i++)
			if (all.items[i].ours)
				kill(all.items[i].pid, signal);
	free(all.items);
}

static long count_running(const struct state *s)
{
	struct table all = {0};
	long running = scan(s, &all) == 0 ? 0 : -1;
	for (size_t i = 0; i < all.count; i++)
		if (all.items[i].ours)
			running += (long)running_threads(all.items[i].pid);
	free(all.items);
	return running;
}

/* Stop everything and wait until it has stopped: a signal sent is not yet a thread at rest. Bounded. */
static void freeze(struct state *s)
{
	const struct timespec pause = {.tv_nsec = POLL_NS};
	struct timespec begin, now;
	long left = 0;
	clock_gettime(CLOCK_MONOTONIC, &begin);
	if (!s->frozen && scan(s, &s->asleep) != 0)
		s->asleep.count = 0;
	s->frozen = true;
	do {
		struct pollfd owner = {.fd = s->control};
		signal_all(s, SIGSTOP); /* again each round: unconfined forks may have slipped through the last */
		left = count_running(s);
		clock_gettime(CLOCK_MONOTONIC, &now);
		if (left == 0 || ppoll(&owner, 1, &pause, NULL) > 0) /* no events asked: only a hang-up */
			break;
	} while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 < FREEZE_MS);
	tell_number(s->control, "frozen", left);
}

static void thaw(struct state *s)
{
	struct table all = {0};
	if (s->frozen && scan(s, &all) == 0) {
		for (size_t i = 0; i < all.count; i++) {
			const struct process *before = find(&s->asleep, all.items[i].pid);
			if (all.items[i].ours && !(before && before->stopped))
				kill(all.items[i].pid, SIGCONT);
		}
	}
	free(all.items);
	s->frozen = false;
	tell(s->control, "thawed");
}

/* ---- the loop ---- */

/* The pid namespace ends with us, and the kernel waits for all of it. Unconfined there is no such
 * kernel help: kill descendants until none is left; each dead one's children fall to us, the subreaper. */
__attribute__((noreturn)) static void end(const struct state *s)
{
	const struct timespec pause = {.tv_nsec = POLL_NS};
	for (long round = 0; s->unconfined && round < END_ROUNDS; round++) {
		pid_t pid;
		signal_all(s, SIGKILL);
		while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
			;
		if (pid < 0 && errno == ECHILD)
			break;
		nanosleep(&pause, NULL);
	}
	_exit(0);
}

static void reap(struct state *s)
{
	int status;
	for (pid_t pid; (pid = waitpid(-1, &status, WNOHANG | WUNTRACED)) > 0;) {
		if (pid != s->command)
			continue;
		if (WIFSTOPPED(status)) {
			if (!s->frozen)
				tell_number(s->control, "stopped", WSTOPSIG(status));
			continue;
		}
		if (WIFEXITED(status))
			tell_number(s->control, "exit", WEXITSTATUS(status));
		else
			tell_number(s->control, "killed", WTERMSIG(status));
		end(s);
	}
}

static void obey(struct state *s, const char *order)
{
	pid_t front = s->terminal >= 0 ? tcgetpgrp(s->terminal) : -1;
	pid_t group = front > 1 && front != getpgrp() ? front : s->command;
	if (strncmp(order, "signal ", 7) == 0) {
		long wanted = strtol(order + 7, NULL, 10);
		if (wanted > 0 && wanted < NSIG)
			kill(-group, (int)wanted);
	} else if (strcmp(order, "cont") == 0) {
		kill(-s->command, SIGCONT);
		if (group != s->command)
			kill(-group, SIGCONT);
	} else if (strcmp(order, "freeze") == 0) {
		freeze(s);
	} else if (strcmp(order, "thaw") == 0) {
		thaw(s);
	}
}

__attribute__((noreturn)) static void serve(struct state *s)
{
	for (;;) {
		char order[64];
		struct pollfd ready[] = {{.fd = s->control, .events = POLLIN}, {.fd = s->children, .events = POLLIN}};
		if (poll(ready, 2, -1) < 0 && errno != EINTR)
			end(s);
		if (ready[1].revents) {
			struct signalfd_siginfo ignored;
			if (read(s->children, &ignored, sizeof ignored) < 0 && errno != EAGAIN && errno != EINTR)
				end(s);
			reap(s);
		}
		if (ready[0].revents) {
			ssize_t n = recv(s->control, order, sizeof order - 1, MSG_DONTWAIT);
			if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR))
				end(s);
			if (n > 0) {
				order[n] = '\0';
				obey(s, order);
			}
		}
	}
}

int main(int argc, char **argv)
{
	if (argc < 2)
		usage("no arguments");
	struct options o = parse(argv);
	struct state s = {.control = o.control, .terminal = -1, .unconfined = o.unconfined};
	sigset_t all, child;

	if (!o.unconfined && getpid() != 1) {
		errno = EPERM;
		fail(o.control, "pid1");
	}
	prctl(PR_SET_NAME, "deltabox-init", 0, 0, 0);
	/* A signal that is blocked here cannot end us, and tcsetpgrp works from the background. */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	if (close_others(&o) != 0)
		fail(o.control, "descriptors");
	char **env = read_environment(o.env);
	if (!env)
		fail(o.control, "environment");

	if (set_limits(&o) != 0)
		fail(o.control, "rlimit");
	/* The proxy's listening socket is made and handed out here, before the filter. */
	int scope = confine(&o);
	/* Not readable and not traceable by the command it starts, which has the same uid; exec undoes it there. */
	if (prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) != 0)
		fail(o.control, "dumpable");
	if (setsid() < 0 && getsid(0) != getpid())
		fail(o.control, "session");
	if (o.tty)
		s.terminal = open_terminal(&o);

	sigemptyset(&child);
	sigaddset(&child, SIGCHLD);
	s.children = signalfd(-1, &child, SFD_CLOEXEC | SFD_NONBLOCK);
	if (s.children < 0)
		fail(o.control, "signalfd");
	tell_number(o.control, "ready", scope);
	s.command = start_command(&o, s.terminal, env);
	tell(o.control, "started");
	serve(&s);
}
