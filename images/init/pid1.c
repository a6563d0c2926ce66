/* PID 1 itself. It belongs to the container, never to a checkpoint. */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_AGAIN_MS = 250, ENDED = 64 };

static const struct options *opt;
static struct word at_start; /* what a container that was here before has left: not about this one */
static pid_t keeper;         /* 0 while waiting */
static int watch = -1;       /* inotify on the volume while waiting */
static double kill_at = -1;  /* seconds of CLOCK_BOOTTIME */
static pid_t hook;           /* the user's preStop while it runs; -1 afterwards */

/* Children that ended while waiting: the restored keeper may be gone before its word is read. */
static struct {
	pid_t pid;
	int status;
} ended[ENDED];
static unsigned ended_next;

static double now(void)
{
	struct timespec t;
	clock_gettime(CLOCK_BOOTTIME, &t);
	return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static _Noreturn void end(int status)
{
	struct word w;
	word_read(opt->volume, "word", &w);
	/* Killed after its checkpoint was committed: told to stop, and to be run again, whatever came of the kill. */
	if (status != 0 && !strcmp(w.text, "released") && !word_same(&w, &at_start))
		exit(EXIT_SIGNAL + SIGTERM);
	exit(exit_code(status));
}

static void reap(void)
{
	int status;
	pid_t pid;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
		if (pid == keeper)
			end(status);
		if (pid == hook) {
			hook = -1;
			kill(keeper, SIGTERM);
		}
		ended[ended_next].pid = pid;
		ended[ended_next].status = status;
		ended_next = (ended_next + 1) % ENDED;
	}
}

static void supervise(pid_t pid)
{
	keeper = pid;
	if (watch >= 0)
		close(watch);
	watch = -1;
	prctl(PR_SET_NAME, "stasis-init", 0, 0, 0);
}

static bool is_child(pid_t pid)
{
	siginfo_t info;
	return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0;
}

static void adopt(pid_t pid, bool first)
{
	char line[96];
	if (is_child(pid)) {
		supervise(pid);
		return;
	}
	for (unsigned i = 1; i <= ENDED; i++) { /* the newest first */
		unsigned at = (ended_next + ENDED - i) % ENDED;
		if (ended[at].pid == pid)
			end(ended[at].status);
	}
	snprintf(line, sizeof(line), "there is no child %d", (int)pid);
	if (first) {
		complain("restored before this container was started again", "running the command");
		supervise(keeper_start(opt));
	} else {
		complain("word not understood", line);
	}
}

/* Obey the agent's word, once for each time that it was written. */
static void listen(bool first)
{
	static struct word last;
	struct word w;
	char *rest;
	word_read(opt->volume, "word", &w);
	if (word_same(&w, &last))
		return;
	last = w;
	if (!strncmp(w.text, "restored ", 9)) {
		long pid = strtol(w.text + 9, &rest, 10);
		if (pid > 1 && pid <= 1 << 22 && !*rest) {
			adopt((pid_t)pid, first);
			return;
		}
	}
	if (!strcmp(w.text, "run"))
		supervise(keeper_start(opt));
	else if (!strcmp(w.text, "released")) /* left in the volume: this container is about to be deleted */
		complain("released", "waiting");
	else if (w.text[0])
		complain("word not understood", w.text);
}

/* The user's preStop, whose place in the pod is taken by ours: before the trainer is told to stop. True while it runs,
 * which is within the grace period, as with kubelet. */
static bool hook_runs(void)
{
	sigset_t none;
	if (hook || !opt->pre_stop)
		return hook > 0;
	hook = fork();
	if (hook == 0) {
		int null = open("/dev/null", O_RDWR);
		for (int fd = 0; fd < 3 && null >= 0; fd++)
			dup2(null, fd);
		sigemptyset(&none);
		sigprocmask(SIG_SETMASK, &none, NULL);
		execvp(opt->pre_stop[0], opt->pre_stop);
		_exit(EXIT_NOT_FOUND);
	}
	if (hook < 0)
		complain("cannot start the preStop hook", strerror(errno));
	return hook > 0;
}

static void on_signal(int sig)
{
	if (sig == SIGCHLD)
		return;
	if (!keeper) {
		if (sig == SIGTERM || sig == SIGINT || sig == SIGQUIT || sig == SIGHUP)
			exit(EXIT_SIGNAL + sig);
		return;
	}
	if (sig == SIGTERM && opt->grace >= 0 && kill_at < 0)
		kill_at = now() + opt->grace;
	if (sig != SIGTERM || !hook_runs())
		kill(keeper, sig);
}

static int timeout_ms(void)
{
	double left = kill_at < 0 ? -1 : (kill_at - now()) * 1e3 + 1;
	if (!keeper)
		return LOOK_AGAIN_MS;
	return kill_at < 0 ? -1 : left < 0 ? 0 : left > 1e6 ? 1000000 : (int)left;
}

_Noreturn void pid1(const struct options *o, bool wait)
{
	sigset_t all;
	struct signalfd_siginfo info;
	char events[4096];
	opt = o;
	signal(SIGCHLD, SIG_DFL); /* ignored, it would hide how a child ended */
	sigfillset(&all);
	sigprocmask(SIG_SETMASK, &all, NULL);
	int signals = signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK);
	if (signals < 0)
		fail("signalfd", strerror(errno));
	word_read(o->volume, "word", &at_start);
	if (wait) {
		prctl(PR_SET_NAME, "stasis-wait", 0, 0, 0); /* `probe` asks for this name */
		watch = word_watch(o->volume);
		complain("waiting for a restore", o->volume);
		listen(true);
	} else {
		supervise(keeper_start(o));
	}
	for (;;) {
		reap();
		if (!keeper)
			listen(false);
		struct pollfd fds[2] = { { signals, POLLIN, 0 }, { watch, POLLIN, 0 } };
		poll(fds, 2, timeout_ms());
		while (watch >= 0 && read(watch, events, sizeof(events)) > 0)
			;
		while (read(signals, &info, sizeof(info)) == sizeof(info))
			on_signal((int)info.ssi_signo);
		if (kill_at >= 0 && now() >= kill_at) {
			complain("still running at the end of the grace period", "killed");
			kill(-1, SIGKILL); /* all of this PID namespace, but for PID 1 */
			kill_at = -1;
		}
	}
}
