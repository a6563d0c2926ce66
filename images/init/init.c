#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef VERSION
#define VERSION "0"
#endif

static const char usage[] =
	"usage: init run   [--deny LIST] [--grace SECONDS] --volume DIR -- COMMAND [ARG...]\n"
	"       init wait  [--deny LIST] [--grace SECONDS] --volume DIR -- COMMAND [ARG...]\n"
	"       init probe DIR -- COMMAND [ARG...]\n"
	"       init install DIR\n"
	"       init --version\n"
	"run    start COMMAND as a child and exit as it exits\n"
	"wait   wait for the agent's word in DIR: \"restored PID\", or \"run\" to start COMMAND\n"
	"probe  succeed while the container is frozen, waiting or restored; else become COMMAND\n"
	"install  put this program at DIR/BUILD/init\n"
	"--deny   what answers ENOSYS: io_uring,userfaultfd,perf,bpf or none (default: io_uring)\n"
	"--grace  seconds from TERM to SIGKILL (default: for ever)\n";

void complain(const char *what, const char *why)
{
	dprintf(STDERR_FILENO, "stasis-init: %s: %s\n", what, why);
}

void fail(const char *what, const char *why)
{
	complain(what, why);
	exit(EXIT_OWN);
}

int exit_code(int status)
{
	return WIFSIGNALED(status) ? EXIT_SIGNAL + WTERMSIG(status) : WEXITSTATUS(status);
}

static bool says(const char *text, const char *const *any)
{
	for (; *any; any++)
		if (!strcmp(text, *any))
			return true;
	return false;
}

/* A probe of kubelet, run inside the container: it must not fail a container that cannot answer for itself. */
static int probe(int argc, char **argv)
{
	static const char *const held[] = { "frozen", "waiting", "restoring", NULL };
	struct word state, name;
	if (argc < 5 || strcmp(argv[3], "--"))
		fail("probe", "expected: probe DIR -- COMMAND");
	word_read(argv[2], "state", &state);
	word_read("/proc/1", "comm", &name);
	if (says(state.text, held) || !strcmp(name.text, "stasis-wait"))
		return 0;
	execvp(argv[4], argv + 4);
	bool there = errno != ENOENT;
	complain(argv[4], strerror(errno));
	return there ? EXIT_NOT_EXECUTABLE : EXIT_NOT_FOUND;
}

static void parse(int argc, char **argv, struct options *o)
{
	static const struct option known[] = {
		{ "volume", required_argument, NULL, 'v' },
		{ "grace", required_argument, NULL, 'g' },
		{ "deny", required_argument, NULL, 'd' },
		{ NULL, 0, NULL, 0 },
	};
	char *rest;
	int c;
	optind = 2;
	opterr = 0;
	while ((c = getopt_long(argc, argv, "+", known, NULL)) != -1)
		switch (c) {
		case 'v':
			o->volume = optarg;
			break;
		case 'g':
			o->grace = strtod(optarg, &rest);
			if (rest == optarg || *rest || !(o->grace >= 0 && o->grace < 1e9))
				fail("--grace", "not a number of seconds");
			break;
		case 'd':
			if (!deny_parse(optarg, &o->deny))
				fail("--deny", "expected a list of io_uring,userfaultfd,perf,bpf, or none");
			break;
		default:
			fail(argv[optind - 1], "unknown option, or without its argument");
		}
	o->command = argv + optind;
	if (!o->volume)
		fail("--volume", "missing");
	if (!o->command[0])
		fail("COMMAND", "missing");
}

int main(int argc, char **argv)
{
	struct options o = { .grace = -1, .deny = DENY_DEFAULT };
	const char *mode = argc > 1 ? argv[1] : "";
	if (!strcmp(mode, "--version")) {
		printf("stasis-init %s %s\n", VERSION, BUILD);
		return fflush(stdout) ? EXIT_OWN : 0;
	}
	if (!strcmp(mode, "--help")) {
		fputs(usage, stdout);
		return fflush(stdout) ? EXIT_OWN : 0;
	}
	if (!strcmp(mode, "probe"))
		return probe(argc, argv);
	if (!strcmp(mode, "install"))
		return install(argc, argv);
	if (strcmp(mode, "run") && strcmp(mode, "wait")) {
		fputs(usage, stderr);
		return EXIT_OWN;
	}
	parse(argc, argv, &o);
	if (getpid() != 1)
		fail(mode, "not PID 1: init is the first process of a container");
	prctl(PR_SET_NAME, "stasis-init", 0, 0, 0);
	pid1(&o, !strcmp(mode, "wait"));
}
