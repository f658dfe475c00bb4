/*
 * deltabox-sh: runs one command in a live session and stands for it: its input, output, signals and
 * exit status. Must not decide what the command may do; the session's owner does.
 *
 *   deltabox-sh [--session ID] [--socket PATH] [--profile NAME] [--cwd DIR] [--] CMD [ARG...]
 *   deltabox-sh [options] -c COMMAND [NAME [ARG...]]     (so that it can be given as a shell)
 *
 * The session is --session, else $DELTABOX_SESSION, else the only one that is open. Its owner listens
 * in $DELTABOX_RUNTIME_DIR, else $XDG_RUNTIME_DIR/deltabox, else `run` in the state directory.
 *
 * Anonymous pipes and /dev/null are handed to the command as they are. Anything else (a file, a
 * socket, a terminal) could be opened anew through /proc with more rights than the descriptor has, so
 * it stays here and is relayed: by a pipe, or where input and output are terminals by a terminal of
 * the command's own. When this process dies the command dies. Exit status: the command's, 128 plus its
 * signal, or 125 with one sentence. The packets are described in server/shell_socket.py.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

enum { FAILED = 125, PACKET = 8192, CHUNK = 65536 };

struct options {
	const char *session, *socket, *profile, *cwd;
	char **argv;
};

struct relay {
	pid_t pump[3];
	int given[3]; /* what the command gets */
};

static struct termios cooked;
static bool is_raw;

static void leave_raw(void)
{
	if (is_raw)
		tcsetattr(0, TCSAFLUSH, &cooked);
	is_raw = false;
}

static void enter_raw(void)
{
	struct termios raw = cooked;
	cfmakeraw(&raw);
	is_raw = tcsetattr(0, TCSADRAIN, &raw) == 0;
}

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...)
{
	va_list words;
	leave_raw();
	va_start(words, format);
	dprintf(2, "deltabox-sh: ");
	vdprintf(2, format, words);
	dprintf(2, "\n");
	va_end(words);
	_exit(FAILED);
}

/* ---- what is asked ---- */

static char *const shell[] = {"/bin/bash", "--noprofile", "--norc"};

/* `-c`, `-lc`, `-ic`: how programs call a shell. */
static bool is_shell_flag(const char *word)
{
	return word[0] == '-' && word[1] && word[1] != '-' && strspn(word + 1, "lic") == strlen(word + 1);
}

static char **as_shell(char **rest)
{
	size_t count = 0, at = 0;
	while (rest[count])
		count++;
	char **argv = calloc(count + 6, sizeof *argv);
	if (!argv)
		die("out of memory");
	for (size_t i = 0; i < sizeof shell / sizeof *shell; i++)
		argv[at++] = shell[i];
	bool command = false;
	for (; *rest && is_shell_flag(*rest); rest++)
		command = command || strchr(*rest, 'c');
	if (command)
		argv[at++] = (char *)(uintptr_t)"-c";
	while (*rest)
		argv[at++] = *rest++;
	return argv;
}

static struct options parse(char **argv)
{
	struct options o = {.session = getenv("DELTABOX_SESSION")};
	const struct {
		const char *name;
		const char **value;
	} known[] = {
		{"--session", &o.session}, {"--socket", &o.socket}, {"--profile", &o.profile}, {"--cwd", &o.cwd}};
	for (argv++; *argv; argv++) {
		size_t i = 0;
		while (i < sizeof known / sizeof *known && strcmp(*argv, known[i].name) != 0)
			i++;
		if (i < sizeof known / sizeof *known) {
			if (!*++argv)
				die("%s needs a value", known[i].name);
			*known[i].value = *argv;
		} else if (strcmp(*argv, "--") == 0) {
			o.argv = argv + 1;
			break;
		} else if (**argv == '-' && !is_shell_flag(*argv)) {
			die("%s is no option; write the command after --", *argv);
		} else {
			break;
		}
	}
	if (!o.argv)
		o.argv = *argv && !is_shell_flag(*argv) ? argv : as_shell(argv);
	if (!*o.argv)
		die("there is no command; write it after --");
	return o;
}

/* ---- where the owner is ---- */

static void join(char *into, const char *first, const char *second)
{
	if (snprintf(into, PATH_MAX, "%s%s", first, second) >= PATH_MAX)
		die("a path is too long");
}

static void runtime_folder(char *path)
{
	const char *named = getenv("DELTABOX_RUNTIME_DIR"), *xdg = getenv("XDG_RUNTIME_DIR");
	const char *state = getenv("DELTABOX_STATE_DIR"), *state_home = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
	struct stat st;
	if (named && *named)
		join(path, named, "");
	else if (xdg && *xdg && stat(xdg, &st) == 0 && S_ISDIR(st.st_mode))
		join(path, xdg, "/deltabox");
	else if (state && *state)
		join(path, state, "/run");
	else if (state_home && *state_home)
		join(path, state_home, "/deltabox/run");
	else
		join(path, home ? home : "", "/.local/state/deltabox/run");
}

/* The only session with a socket; with none or several the user has to say which. */
static void only_socket(const char *folder, char *path)
{
	DIR *all = opendir(folder);
	int found = 0;
	for (struct dirent *entry; all && (entry = readdir(all));) {
		size_t length = strlen(entry->d_name);
		if (length < 4 || strcmp(entry->d_name + length - 3, ".sh") != 0)
			continue;
		found++;
		if (snprintf(path, PATH_MAX, "%s/%s", folder, entry->d_name) >= PATH_MAX)
			die("a path is too long");
	}
	if (all)
		closedir(all);
	if (found == 0)
		die("no session is open; start one with `deltabox run` or a host, and name it with --session");
	if (found > 1)
		die("%d sessions are open; choose one with --session ID (`deltabox sessions` lists them)", found);
}

static int connected(const struct options *o)
{
	char folder[PATH_MAX], path[PATH_MAX];
	runtime_folder(folder);
	if (o->socket) {
		join(path, o->socket, "");
	} else if (o->session) {
		if (strchr(o->session, '/'))
			die("%s is no session", o->session);
		char name[NAME_MAX];
		if (snprintf(name, sizeof name, "/%s.sh", o->session) >= (int)sizeof name)
			die("%s is no session", o->session);
		join(path, folder, name);
	} else {
		only_socket(folder, path);
	}
	/* By the folder's descriptor: an address holds 108 bytes, state folders can be deeper. */
	char *slash = strrchr(path, '/');
	const char *leaf = slash ? slash + 1 : path;
	int at = slash ? (*slash = '\0', open(*path ? path : "/", O_PATH | O_DIRECTORY | O_CLOEXEC)) : AT_FDCWD;
	int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int n = at >= 0 ? snprintf(address.sun_path, sizeof address.sun_path, "/proc/self/fd/%d/%s", at, leaf)
			: snprintf(address.sun_path, sizeof address.sun_path, "%s", leaf);
	if (n >= (int)sizeof address.sun_path || fd < 0 || (slash && at < 0) ||
	    connect(fd, (struct sockaddr *)&address, sizeof address) != 0)
		die("session %s has no owner that answers (%s); `deltabox sessions` lists what is open",
		    o->session ? o->session : leaf, strerror(errno));
	if (at >= 0)
		close(at);
	return fd;
}

/* ---- packets ---- */

static void tell(int fd, const char *text)
{
	/* An owner that has gone is noticed by the end of file. */
	while (send(fd, text, strlen(text), MSG_NOSIGNAL) < 0 && errno == EINTR)
		;
}

static void request(int fd, const char *text, const int *fds, size_t count)
{
	union {
		char bytes[CMSG_SPACE(4 * sizeof(int))];
		struct cmsghdr align;
	} box = {0};
	struct iovec words = {.iov_base = (void *)(uintptr_t)text, .iov_len = strlen(text)};
	struct msghdr message = {.msg_iov = &words, .msg_iovlen = 1, .msg_control = box.bytes};
	message.msg_controllen = CMSG_SPACE(count * sizeof(int));
	struct cmsghdr *head = CMSG_FIRSTHDR(&message);
	head->cmsg_level = SOL_SOCKET;
	head->cmsg_type = SCM_RIGHTS;
	head->cmsg_len = CMSG_LEN(count * sizeof(int));
	memcpy(CMSG_DATA(head), fds, count * sizeof(int));
	if (sendmsg(fd, &message, MSG_NOSIGNAL) < 0)
		die("the session's owner does not take the request: %s", strerror(errno));
}

/* One packet as text; false when the owner has gone. *passed is a descriptor that came with it, or -1. */
static bool receive(int fd, char *text, int *passed)
{
	union {
		char bytes[CMSG_SPACE(sizeof(int))];
		struct cmsghdr align;
	} box;
	struct iovec words = {.iov_base = text, .iov_len = PACKET - 1};
	struct msghdr message = {
		.msg_iov = &words, .msg_iovlen = 1, .msg_control = box.bytes, .msg_controllen = sizeof box.bytes};
	ssize_t n;
	while ((n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC)) < 0 && errno == EINTR)
		;
	*passed = -1;
	struct cmsghdr *head = n > 0 ? CMSG_FIRSTHDR(&message) : NULL;
	if (head && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_RIGHTS)
		memcpy(passed, CMSG_DATA(head), sizeof *passed);
	text[n > 0 ? n : 0] = '\0';
	return n > 0;
}

static bool write_all(int fd, const char *data, size_t size)
{
	while (size > 0) {
		ssize_t n = write(fd, data, size);
		if (n > 0) {
			data += n;
			size -= (size_t)n;
		} else if (n < 0 && errno == EAGAIN) {
			struct pollfd room = {.fd = fd, .events = POLLOUT}; /* somebody else made it non-blocking */
			poll(&room, 1, -1);
		} else if (n == 0 || errno != EINTR) {
			return false;
		}
	}
	return true;
}

static int words(const struct options *o)
{
	char here[PATH_MAX];
	const char *cwd = o->cwd ? o->cwd : getcwd(here, sizeof here);
	int fd = memfd_create("words", MFD_CLOEXEC);
	const char *first[] = {cwd ? cwd : "/", o->profile ? o->profile : ""};
	bool good = fd >= 0;
	for (size_t i = 0; i < 2; i++)
		good = good && write_all(fd, first[i], strlen(first[i]) + 1);
	for (char **word = o->argv; *word; word++)
		good = good && write_all(fd, *word, strlen(*word) + 1);
	if (!good)
		die("the command cannot be passed on: %s", strerror(errno));
	return fd;
}

/* ---- pipes ---- */

static bool can_be_handed(int fd)
{
	struct stat st;
	char link[64], target[16] = {0};
	if (fstat(fd, &st) != 0)
		return false;
	if (S_ISCHR(st.st_mode))
		return st.st_rdev == makedev(1, 3);
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	return S_ISFIFO(st.st_mode) && readlink(link, target, sizeof target - 1) > 0 && strncmp(target, "pipe:", 5) == 0;
}

/* A process of its own, so that a slow reader holds up neither signals nor the other streams. */
static pid_t pump(int from, int to, int other)
{
	static char buffer[CHUNK];
	pid_t parent = getpid(), pid = fork();
	if (pid != 0)
		return pid;
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	if (getppid() != parent)
		_exit(1);
	close(other);
	for (;;) {
		ssize_t n = read(from, buffer, sizeof buffer);
		if (n < 0 && errno == EAGAIN) {
			struct pollfd ready = {.fd = from, .events = POLLIN};
			poll(&ready, 1, -1);
		} else if (n == 0 || (n < 0 && errno != EINTR) || (n > 0 && !write_all(to, buffer, (size_t)n))) {
			_exit(0);
		}
	}
}

static void relay_one(struct relay *r, int fd)
{
	int ends[2];
	r->given[fd] = fd;
	r->pump[fd] = 0;
	if (fcntl(fd, F_GETFD) < 0) {
		r->given[fd] = open("/dev/null", O_RDWR | O_CLOEXEC);
		return;
	}
	if (can_be_handed(fd))
		return;
	if (pipe2(ends, O_CLOEXEC) != 0)
		die("no pipe can be made: %s", strerror(errno));
	r->pump[fd] = fd == 0 ? pump(0, ends[1], ends[0]) : pump(ends[0], fd, ends[1]);
	if (r->pump[fd] < 0)
		die("no process can be started: %s", strerror(errno));
	close(ends[fd == 0 ? 1 : 0]);
	r->given[fd] = ends[fd == 0 ? 0 : 1];
}

/* Our copies would keep the command's readers from the end of file. */
static void let_go(struct relay *r)
{
	for (int fd = 0; fd < 3; fd++)
		if (r->given[fd] != fd)
			close(r->given[fd]);
}

/* What the command printed is passed on to its end; what it did not read is left. */
static void finish(struct relay *r)
{
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL); /* a reader that does not read: now signals end us */
	for (int fd = 1; fd < 3; fd++)
		if (r->pump[fd] > 0)
			waitpid(r->pump[fd], NULL, 0);
	if (r->pump[0] > 0)
		kill(r->pump[0], SIGKILL);
}

/* ---- the end ---- */

/* -1 while the packet is not the last one. */
static int status_of(const char *text)
{
	char *rest;
	if (strncmp(text, "exit ", 5) == 0) {
		int code = (int)strtol(text + 5, &rest, 10);
		if (*rest == ' ')
			dprintf(2, "deltabox-sh:%s\n", rest);
		return code & 255;
	}
	if (strncmp(text, "killed ", 7) == 0)
		return 128 + (int)strtol(text + 7, NULL, 10);
	if (strncmp(text, "error ", 6) == 0)
		die("%s", text + 6);
	return -1;
}

static int signals(void)
{
	sigset_t wanted;
	const int list[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGWINCH, SIGTSTP};
	sigemptyset(&wanted);
	for (size_t i = 0; i < sizeof list / sizeof *list; i++)
		sigaddset(&wanted, list[i]);
	sigprocmask(SIG_BLOCK, &wanted, NULL);
	signal(SIGPIPE, SIG_IGN);
	return signalfd(-1, &wanted, SFD_CLOEXEC);
}

static void tell_size(int owner)
{
	struct winsize size = {.ws_row = 24, .ws_col = 80};
	char text[64];
	ioctl(1, TIOCGWINSZ, &size);
	snprintf(text, sizeof text, "size %d %d", size.ws_row, size.ws_col);
	tell(owner, text);
}

static void pass_signal(int owner, int received, bool terminal)
{
	struct signalfd_siginfo info;
	char text[64];
	if (read(received, &info, sizeof info) != (ssize_t)sizeof info)
		return;
	if (info.ssi_signo == SIGWINCH) {
		if (terminal)
			tell_size(owner);
		return;
	}
	snprintf(text, sizeof text, "signal %u", info.ssi_signo);
	tell(owner, text);
}

/* The command has stopped (Ctrl-Z): stop too, so that the user's shell takes over. */
static void stop_too(int owner, bool terminal)
{
	leave_raw();
	raise(SIGSTOP);
	if (terminal) { /* here again after `fg` */
		enter_raw();
		tell_size(owner);
	}
	tell(owner, "cont");
}

static int on_pipes(int owner, const struct options *o, int received)
{
	struct relay r;
	char text[PACKET];
	for (int fd = 0; fd < 3; fd++)
		relay_one(&r, fd);
	const int fds[] = {words(o), r.given[0], r.given[1], r.given[2]};
	request(owner, "run", fds, 4);
	let_go(&r);
	for (;;) {
		struct pollfd ready[] = {{.fd = owner, .events = POLLIN}, {.fd = received, .events = POLLIN}};
		if (poll(ready, 2, -1) < 0)
			continue;
		if (ready[1].revents)
			pass_signal(owner, received, false);
		if (!ready[0].revents)
			continue;
		int passed;
		if (!receive(owner, text, &passed))
			die("the session's owner went away, and the command with it");
		int status = status_of(text);
		if (status >= 0) {
			finish(&r);
			return status;
		}
		if (strncmp(text, "stopped ", 8) == 0)
			stop_too(owner, false);
	}
}

/* ---- a terminal ---- */

/* What is left on the command's terminal when it has ended. */
static void drain(int master)
{
	static char buffer[CHUNK];
	ssize_t n;
	while (master >= 0 && (n = read(master, buffer, sizeof buffer)) > 0 && write_all(1, buffer, (size_t)n))
		;
}

static int on_terminal(int owner, const struct options *o, int received)
{
	static char output[CHUNK], input[4096];
	char text[PACKET];
	struct winsize size = {.ws_row = 24, .ws_col = 80};
	int master = -1, passed, status = -1;
	size_t waiting = 0;
	const int fds[] = {words(o)};
	if (tcgetattr(0, &cooked) != 0)
		die("the terminal cannot be read: %s", strerror(errno));
	ioctl(1, TIOCGWINSZ, &size);
	snprintf(text, sizeof text, "tty %d %d", size.ws_row, size.ws_col);
	request(owner, text, fds, 1);
	while (status < 0) {
		bool typed = master >= 0 && waiting == 0;
		struct pollfd ready[] = {{.fd = owner, .events = POLLIN},
					 {.fd = received, .events = POLLIN},
					 {.fd = master, .events = (short)(POLLIN | (waiting ? POLLOUT : 0))},
					 {.fd = typed ? 0 : -1, .events = POLLIN}};
		if (poll(ready, 4, -1) < 0)
			continue;
		if (ready[1].revents)
			pass_signal(owner, received, true);
		if (ready[3].revents) {
			ssize_t n = read(0, input, sizeof input);
			if (n <= 0 && errno != EINTR)
				die("the terminal has gone");
			waiting = n > 0 ? (size_t)n : 0;
		}
		if (waiting && (ready[2].revents & POLLOUT)) {
			ssize_t n = write(master, input, waiting);
			if (n > 0) {
				waiting -= (size_t)n;
				memmove(input, input + n, waiting);
			}
		}
		if (ready[2].revents & POLLIN) {
			ssize_t n = read(master, output, sizeof output);
			if (n > 0)
				write_all(1, output, (size_t)n);
		} else if (ready[2].revents & (POLLHUP | POLLERR)) {
			close(master); /* nobody inside holds the terminal any more; the end will be told */
			master = -1;
		}
		if (!ready[0].revents)
			continue;
		if (!receive(owner, text, &passed))
			die("the session's owner went away, and the command with it");
		if (strcmp(text, "tty") == 0 && passed >= 0 && master < 0) {
			master = passed;
			fcntl(master, F_SETFL, O_NONBLOCK); /* a command that does not read must not hold us up */
			enter_raw();
		} else if (strncmp(text, "stopped ", 8) == 0) {
			stop_too(owner, true);
		} else {
			status = status_of(text);
		}
	}
	drain(master);
	leave_raw();
	return status;
}

int main(int argc, char **argv)
{
	if (argc < 1)
		return FAILED;
	struct options o = parse(argv);
	int owner = connected(&o), received = signals();
	if (received < 0)
		die("signals cannot be received: %s", strerror(errno));
	bool terminal = isatty(0) && isatty(1);
	return terminal ? on_terminal(owner, &o, received) : on_pipes(owner, &o, received);
}
