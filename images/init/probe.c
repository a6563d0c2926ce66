/* `init probe DIR -- COMMAND`: a probe of kubelet, run inside the container. It must not fail a container that cannot
 * answer for itself, also where that begins while the probe is under way. */
#include "init.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LOOK_AGAIN_NS = 50 * 1000 * 1000 };

static bool held(const char *volume)
{
	static const char *const states[] = { "frozen", "waiting", "restoring" };
	struct word state, name;
	word_read(volume, "state", &state);
	for (unsigned i = 0; i < sizeof(states) / sizeof(*states); i++)
		if (!strcmp(state.text, states[i]))
			return true;
	word_read("/proc/1", "comm", &name);
	return !strcmp(name.text, "stasis-wait");
}

static _Noreturn void run(char **command, const sigset_t *mask)
{
	setpgid(0, 0);
	prctl(PR_SET_PDEATHSIG, SIGKILL); /* the runtime kills a probe that takes too long, which is its parent */
	sigprocmask(SIG_SETMASK, mask, NULL);
	execvp(command[0], command);
	bool there = errno != ENOENT;
	complain(command[0], strerror(errno));
	_exit(there ? EXIT_NOT_EXECUTABLE : EXIT_NOT_FOUND);
}

int probe(int argc, char **argv)
{
	const struct timespec look_again = { 0, LOOK_AGAIN_NS };
	sigset_t child_ended, mask;
	int status;
	if (argc < 5 || strcmp(argv[3], "--"))
		fail("probe", "expected: probe DIR -- COMMAND");
	const char *volume = argv[2];
	if (held(volume))
		return 0;
	sigemptyset(&child_ended);
	sigaddset(&child_ended, SIGCHLD);
	sigprocmask(SIG_BLOCK, &child_ended, &mask);
	pid_t pid = fork();
	if (pid == 0)
		run(argv + 4, &mask);
	if (pid < 0)
		fail("probe", strerror(errno));
	for (;;) {
		sigtimedwait(&child_ended, NULL, &look_again);
		bool ended = waitpid(pid, &status, WNOHANG) == pid;
		if (ended && status == 0)
			return 0;
		if (held(volume)) {
			kill(-pid, SIGKILL);
			return 0;
		}
		if (ended)
			return exit_code(status);
	}
}
