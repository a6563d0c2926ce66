/* For tests on machines whose root lacks CAP_SYS_RESOURCE: there the kernel does not let CRIU ask for the limits of
 * another user's process (EPERM). Preloaded into CRIU, this reads the same numbers from /proc/PID/limits. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>

enum { LINE = 256, VALUES = 26 }; /* column of the soft limit in fs/proc/base.c: "%-25s %-20s %-20s %-10s" */

static rlim64_t number(const char *text)
{
	return *text == 'u' ? RLIM64_INFINITY : strtoull(text, NULL, 10);
}

/* The file has one line of heading, then one for each resource, in the order of their numbers. */
static int from_proc(pid_t pid, int resource, struct rlimit64 *out)
{
	char path[32], line[LINE], soft[24], hard[24];
	snprintf(path, sizeof(path), "/proc/%d/limits", pid);
	FILE *f = fopen(path, "re");
	if (!f)
		return -1;
	for (int row = -1; row <= resource && fgets(line, sizeof(line), f); row++)
		if (row == resource && sscanf(line + VALUES, "%23s %23s", soft, hard) == 2) {
			*out = (struct rlimit64){ number(soft), number(hard) };
			fclose(f);
			return 0;
		}
	fclose(f);
	errno = EPERM;
	return -1;
}

/* CRIU has no other way to the call: criu/cr-dump.c, dump_task_rlimits(). */
long syscall(long nr, ...)
{
	static long (*next)(long, ...);
	long a[6];
	va_list list;
	va_start(list, nr);
	for (int i = 0; i < 6; i++)
		a[i] = va_arg(list, long);
	va_end(list);
	if (!next)
		*(void **)&next = dlsym(RTLD_NEXT, "syscall");
	long result = next(nr, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (result == -1 && nr == SYS_prlimit64 && errno == EPERM && !a[2] && a[3])
		return from_proc((pid_t)a[0], (int)a[1], (struct rlimit64 *)a[3]);
	return result;
}
