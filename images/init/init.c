#include "init.h"

#include <errno.h>
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
	"usage: init run   [--deny LIST] [--grace SECONDS] --volume DIR [--pre-stop N HOOK...] -- COMMAND [ARG...]\n"
	"       init wait  [--deny LIST] [--grace SECONDS] --volume DIR [--pre-stop N HOOK...] -- COMMAND [ARG...]\n"
	"       init probe DIR -- COMMAND [ARG...]\n"
	"       init check http PORT PATH [HEADER...] | tcp PORT | grpc PORT [SERVICE]\n"
	"       init sleep SECONDS\n"
	"       init install DIR\n"
	"       init --version\n"
	"run    start COMMAND as a child and exit as it exits\n"
	"wait   wait for the agent's word in DIR: \"restored PID\", or \"run\" to start COMMAND\n"
	"probe  succeed while the container is frozen, waiting or restored; else as COMMAND does\n"
	"check    ask a port of this container, as kubelet's probes do\n"
	"sleep    as a preStop of that kind\n"
	"install  put this program at DIR/BUILD/init\n"
	"--deny   what answers ENOSYS: io_uring,userfaultfd,perf,bpf or none (default: io_uring)\n"
	"--grace  seconds from TERM to SIGKILL (default: for ever)\n"
	"--pre-stop  a command of N words, run at TERM before the signal is passed on\n";

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

static void parse(int argc, char **argv, struct options *o)
{
	static const struct option known[] = {
		{ "volume", required_argument, NULL, 'v' },
		{ "grace", required_argument, NULL, 'g' },
		{ "deny", required_argument, NULL, 'd' },
		{ "pre-stop", required_argument, NULL, 'p' },
		{ NULL, 0, NULL, 0 },
	};
	char *rest;
	int c = 0, words = 0;
	optind = 2;
	opterr = 0;
	while (!words && (c = getopt_long(argc, argv, "+", known, NULL)) != -1)
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
		case 'p': /* the last one: what follows is the hook's */
			words = (int)strtol(optarg, &rest, 10);
			if (*rest || words < 1 || words >= argc - optind || strcmp(argv[optind + words], "--"))
				fail("--pre-stop", "expected: --pre-stop N HOOK... -- COMMAND, with N words of a hook");
			o->pre_stop = argv + optind;
			argv[optind + words] = NULL;
			optind += words + 1;
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

static int pause_for(const char *seconds)
{
	char *rest;
	long count = strtol(seconds, &rest, 10);
	if (rest == seconds || *rest || count < 0)
		fail("sleep", "expected a number of seconds");
	for (unsigned left = (unsigned)count; left;)
		left = sleep(left);
	return 0;
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
	if (!strcmp(mode, "check"))
		return check(argc, argv);
	if (!strcmp(mode, "sleep"))
		return pause_for(argc > 2 ? argv[2] : "");
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
