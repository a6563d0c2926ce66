/* The keeper: root of the tree that is dumped. It holds no file but stdin, stdout and stderr, no timer and no handler,
 * so that there is nothing in it that a dump or a restore could get wrong; every wait can be cut short (EINTR) by
 * either, and what matters is looked at again after each. */
#include "init.h"

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

static bool is_job_stop(int sig)
{
	return sig == SIGTSTP || sig == SIGTTIN || sig == SIGTTOU;
}

static void default_signals(void)
{
	sigset_t none;
	const unsigned long dispositions[4] = {0}; /* struct sigaction as the kernel has it: default, no flags, no mask */
	for (int sig = 1; sig < NSIG; sig++)
		syscall(SYS_rt_sigaction, sig, dispositions, NULL, sizeof(long)); /* libc keeps 32 and 33 to itself */
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
}

static _Noreturn void trainer(char **command)
{
	setsid();
	default_signals();
	execvp(command[0], command);
	bool there = errno != ENOENT && errno != ENOTDIR;
	if (!there && strchr(command[0], '/') && access(command[0], F_OK) == 0) {
		complain(command[0], "the interpreter that it names does not exist");
		there = true;
	} else {
		complain(command[0], strerror(errno));
	}
	_exit(there ? EXIT_NOT_EXECUTABLE : EXIT_NOT_FOUND);
}

static _Noreturn void keeper(const struct options *o)
{
	sigset_t all;
	prctl(PR_SET_NAME, "stasis-keeper", 0, 0, 0);
	closefrom(3);
	setsid();
	deny_install(o->deny);
	pid_t child = fork();
	if (child == 0)
		trainer(o->command);
	if (child < 0) {
		complain("cannot start the command", strerror(errno));
		_exit(EXIT_OWN);
	}
	if (chdir("/")) /* the working directory is the trainer's; the keeper must not depend on it */
		complain("chdir /", strerror(errno));
	sigfillset(&all);
	for (;;) {
		int status;
		pid_t pid;
		siginfo_t info;
		prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); /* again each time: CRIU need not know of it */
		while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
			if (pid == child)
				_exit(exit_code(status));
		int sig = sigwaitinfo(&all, &info);
		if (sig < 0 || sig == SIGCHLD || is_job_stop(sig))
			continue;
		/* After a restore the agent continues each task by itself: only PID 1's CONT is meant for the trainer. */
		if (sig == SIGCONT && info.si_pid != getppid())
			continue;
		kill(child, sig);
	}
}

/* All signals are blocked in the caller and stay so in the keeper: none is lost, none interrupts it. */
pid_t keeper_start(const struct options *o)
{
	pid_t pid = fork();
	if (pid == 0)
		keeper(o);
	if (pid < 0)
		fail("cannot start the command", strerror(errno));
	return pid;
}
