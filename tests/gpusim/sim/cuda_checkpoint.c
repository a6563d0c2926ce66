/* cuda-checkpoint, as far as it was seen: the same options, texts and exit codes over whatever libcuda.so.1 there is. */
#define _GNU_SOURCE
#include "wire.h"
#include <dlfcn.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *HELP =
    "CUDA checkpoint and restore utility.\n\n"
    "    --get-state --pid|-p <value>\n        Prints the current checkpoint state of the specified process.\n\n"
    "    --get-restore-tid --pid|-p <value>\n        Prints the restore thread id of the specified process.\n\n"
    "    --toggle --pid|-p <value>\n        Toggles the checkpoint state of the specified process.\n\n"
    "    --action lock|checkpoint|restore|unlock --pid|-p <value> [--timeout|-t <ms>] [--device-map|-d old=new,...]\n"
    "        Performs the specified action on the specified process.\n\n"
    "    --help|-h\n        Print this help.\n";
static const char *UNSUPPORTED = "Invalid option(s) or option(s) not supported by this CUDA Driver";
static const char *ACTIONS[] = {"lock", "checkpoint", "restore", "unlock"};
static const char *CALLS[] = {"Lock", "Checkpoint", "Restore", "Unlock"};
static const char *STATES[] = {"running", "locked", "checkpointed", "failed"};

static void *driver;

static _Noreturn void usage(const char *message)
{
	fprintf(stderr, "%s\n\n%s", message, HELP);
	exit(1);
}

static _Noreturn __attribute__((format(printf, 1, 2))) void fail(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	vfprintf(stderr, format, arguments);
	va_end(arguments);
	fputc('\n', stderr);
	exit(1);
}

static const char *text(int code)
{
	const char *found = NULL;
	int (*describe)(int, const char **) = dlsym(driver, "cuGetErrorString");
	return describe && !describe(code, &found) && found ? found : "unknown error";
}

static int act(int action, int pid, long timeout, gpu_pair *pairs, unsigned count)
{
	char name[64];
	struct {
		unsigned ms, reserved;
		unsigned long more[7];
	} lock = {timeout > 0 ? timeout : 0, 0, {0}};
	struct {
		gpu_pair *pairs;
		unsigned count;
		char more[52];
	} restore = {count ? pairs : NULL, count, {0}};
	void *arguments[] = {&lock, NULL, &restore, NULL};
	snprintf(name, sizeof(name), "cuCheckpointProcess%s", CALLS[action]);
	int (*call)(int, void *) = dlsym(driver, name);
	return call ? call(pid, arguments[action]) : 801;
}

static bool uuid(const char *s, CUuuid *found)
{
	int count = 0;
	unsigned byte;
	if (!strncmp(s, "GPU-", 4))
		s += 4;
	while (*s && count < 16) {
		if (*s == '-') {
			s++;
			continue;
		}
		if (sscanf(s, "%2x", &byte) != 1)
			return false;
		found->bytes[count++] = byte;
		s += 2;
	}
	return count == 16 && !*s;
}

static unsigned map(char *s, gpu_pair *pairs)
{
	unsigned count = 0;
	for (char *pair = strtok(s, ","); pair; pair = strtok(NULL, ",")) {
		char *to = strchr(pair, '=');
		if (!to || count == MAX_PAIRS)
			usage(UNSUPPORTED);
		*to++ = 0;
		if (!uuid(pair, &pairs[count].from) || !uuid(to, &pairs[count].to))
			usage(UNSUPPORTED);
		count++;
	}
	return count;
}

static long number(const char *s)
{
	char *end;
	long value = strtol(s, &end, 10);
	return *s && !*end && value >= 0 ? value : -1;
}

int main(int argc, char **argv)
{
	enum { GET_STATE = 1, GET_TID, TOGGLE, ACTION };
	static const struct option options[] = {{"get-state", 0, 0, GET_STATE}, {"get-restore-tid", 0, 0, GET_TID},
						{"toggle", 0, 0, TOGGLE},	{"action", 1, 0, ACTION},
						{"pid", 1, 0, 'p'},		{"timeout", 1, 0, 't'},
						{"device-map", 1, 0, 'd'},	{"help", 0, 0, 'h'},
						{0, 0, 0, 0}};
	int option, operation = 0, operations = 0, action = -1, state = 0, tid = 0, code;
	long pid = -1, timeout = -1;
	unsigned pairs_given = 0;
	gpu_pair pairs[MAX_PAIRS];

	driver = dlopen("libcuda.so.1", RTLD_NOW);
	if (!driver) {
		fprintf(stderr, "%s: error while loading shared libraries: libcuda.so.1\n", argv[0]);
		return 127;
	}
	opterr = 0;
	while ((option = getopt_long(argc, argv, "p:t:d:h", options, NULL)) != -1) {
		switch (option) {
		case ACTION:
			for (int i = 0; i < 4; i++)
				if (!strcmp(optarg, ACTIONS[i]))
					action = i;
			if (action < 0)
				usage(UNSUPPORTED);
			/* fall through */
		case GET_STATE:
		case GET_TID:
		case TOGGLE:
			operation = option;
			operations++;
			break;
		case 'p':
			if ((pid = number(optarg)) < 0)
				usage("pid must be a non-negative integer");
			break;
		case 't':
			if ((timeout = number(optarg)) < 0)
				usage("timeout must be a non-negative integer");
			break;
		case 'd':
			pairs_given = map(optarg, pairs);
			break;
		case 'h':
			fputs(HELP, stdout);
			return 0;
		default:
			usage(UNSUPPORTED);
		}
	}
	if (!operations)
		usage("No operation selected");
	if (operations > 1)
		usage("Too many operations selected");
	if (pid < 0)
		usage("Missing pid to perform operation on");
	if (timeout >= 0 && !(operation == ACTION && action == 0))
		usage("Timeout is only valid for --action lock operation");

	int (*init)(unsigned) = dlsym(driver, "cuInit");
	if ((code = init(0)))
		fail("Error initializing CUDA: \"%s\"", text(code));
	unsigned (*version)(void) = dlsym(driver, "cudasimDriver");
	if (version && ((operation == ACTION && version() < 555) || (timeout >= 0 && version() < 570) ||
			(pairs_given && version() < 580)))
		usage(UNSUPPORTED);

	if (operation == GET_TID) {
		int (*thread)(int, int *) = dlsym(driver, "cuCheckpointProcessGetRestoreThreadId");
		if (thread(pid, &tid))
			fail("Could not find restore thread for process ID %ld", pid);
		printf("%d\n", tid);
		return 0;
	}
	if (operation == ACTION) {
		if ((code = act(action, pid, timeout, pairs, pairs_given)))
			fail("Could not %s on process ID %ld: \"%s\"", ACTIONS[action], pid, text(code));
		return 0;
	}
	int (*get)(int, int *) = dlsym(driver, "cuCheckpointProcessGetState");
	code = get(pid, &state);
	if (operation == GET_STATE) {
		if (code)
			fail("Error getting process state for process ID %ld: \"%s\"", pid, text(code));
		puts(STATES[state]);
		return 0;
	}
	int steps[] = {state == CHECKPOINTED ? 2 : 0, state == CHECKPOINTED ? 3 : 1};
	for (int i = 0; !code && i < 2; i++)
		code = act(steps[i], pid, 0, NULL, 0);
	if (code)
		fail("Error toggling CUDA in process ID %ld: \"%s\"", pid, text(code));
	return 0;
}
