/* cuCheckpointProcess*: what one process asks of another. Through /proc, so that PID namespaces do not matter and the id
 * of a thread passes for its process's, as with the real driver. */
#define _GNU_SOURCE
#include "cudasim.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct remote {
	struct control *control;
	int fd;
};

/* The last number of a line of /proc/.../status: the id in the innermost PID namespace. */
static long innermost(const char *path, const char *field)
{
	char line[256];
	long id = -1;
	FILE *file = fopen(path, "re");
	if (!file)
		return -1;
	while (id < 0 && fgets(line, sizeof(line), file))
		if (!strncmp(line, field, strlen(field)))
			id = atol(strrchr(line, '\t') + 1);
	fclose(file);
	return id;
}

static void detach(struct remote *remote)
{
	munmap(remote->control, sizeof(*remote->control));
	close(remote->fd);
}

static CUresult attach(int pid, struct remote *remote)
{
	char folder[64], path[400], target[128];
	struct dirent *entry;
	CUresult result = NOT_INITIALIZED;
	if (!control)
		return NOT_INITIALIZED;
	snprintf(folder, sizeof(folder), "/proc/%d/fd", pid);
	DIR *descriptors = opendir(folder);
	if (!descriptors)
		return errno == ENOENT ? INVALID_VALUE : OPERATING_SYSTEM;
	while (result == NOT_INITIALIZED && (entry = readdir(descriptors))) {
		snprintf(path, sizeof(path), "%s/%s", folder, entry->d_name);
		ssize_t length = readlink(path, target, sizeof(target) - 1);
		target[length > 0 ? length : 0] = 0;
		if (strncmp(target, "/memfd:" CONTROL_NAME, strlen("/memfd:" CONTROL_NAME)))
			continue;
		remote->fd = open(path, O_RDWR | O_CLOEXEC);
		if (remote->fd < 0) {
			result = errno == EACCES ? NOT_PERMITTED : OPERATING_SYSTEM;
			continue;
		}
		remote->control = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, remote->fd, 0);
		result = remote->control == MAP_FAILED ? OPERATING_SYSTEM : SUCCESS;
	}
	closedir(descriptors);
	if (!result) { /* a forked child has its parent's page, and is no CUDA process */
		snprintf(path, sizeof(path), "/proc/%d/status", pid);
		if (innermost(path, "NStgid:") != (long)remote->control->pid) {
			detach(remote);
			return NOT_INITIALIZED;
		}
	}
	return result;
}

static void post(struct control *c, enum action action, unsigned ms, unsigned count, const gpu_pair *pairs)
{
	c->action = action;
	c->timeout_ms = ms;
	c->pair_count = count;
	if (count)
		memcpy(c->pairs, pairs, count * sizeof(*pairs));
	__atomic_store_n(&c->asked, c->asked + 1, __ATOMIC_RELEASE);
	syscall(SYS_futex, &c->asked, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* One at a time: the lock is let go by the kernel if the caller dies, but what it has asked for is carried out all the
 * same, and the next request waits for it. */
static CUresult request(int pid, enum action action, unsigned ms, unsigned count, const gpu_pair *pairs)
{
	struct remote remote;
	struct timespec pause = {0, 100000000};
	char process[32];
	bool posted = false;
	CUresult result = count > MAX_PAIRS ? INVALID_VALUE : attach(pid, &remote);
	if (result)
		return result;
	struct control *c = remote.control;
	flock(remote.fd, LOCK_EX);
	snprintf(process, sizeof(process), "/proc/%d", pid);
	for (;;) {
		uint32_t answered = __atomic_load_n(&c->answered, __ATOMIC_ACQUIRE);
		if (answered == c->asked) {
			if (posted)
				break;
			post(c, action, ms, count, pairs);
			posted = true;
			continue;
		}
		syscall(SYS_futex, &c->answered, FUTEX_WAIT, answered, &pause, NULL, 0);
		if (access(process, F_OK)) {
			detach(&remote);
			return OPERATING_SYSTEM;
		}
	}
	result = c->result;
	detach(&remote);
	return result;
}

struct lock_args {
	unsigned timeout_ms, reserved;
	uint64_t more[7];
};

struct restore_args {
	gpu_pair *pairs;
	unsigned count;
	char more[64 - sizeof(gpu_pair *) - sizeof(unsigned)];
};

API CUresult cuCheckpointProcessGetState(int pid, int *state)
{
	struct remote remote;
	CUresult result = attach(pid, &remote);
	if (!result) {
		*state = remote.control->state;
		detach(&remote);
	}
	return result;
}

API CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	struct remote remote;
	struct dirent *entry;
	char folder[64], path[400];
	CUresult result = attach(pid, &remote);
	if (result)
		return result;
	*tid = -1;
	snprintf(folder, sizeof(folder), "/proc/%d/task", pid);
	DIR *tasks = opendir(folder);
	while (tasks && (entry = readdir(tasks))) {
		snprintf(path, sizeof(path), "%s/%s/status", folder, entry->d_name);
		if (atoi(entry->d_name) && innermost(path, "NSpid:") == (long)remote.control->tid)
			*tid = atoi(entry->d_name);
	}
	if (tasks)
		closedir(tasks);
	detach(&remote);
	return *tid < 0 ? OPERATING_SYSTEM : SUCCESS;
}

API CUresult cuCheckpointProcessLock(int pid, struct lock_args *args)
{
	return request(pid, LOCK, args ? args->timeout_ms : 0, 0, NULL);
}

API CUresult cuCheckpointProcessCheckpoint(int pid, void *args)
{
	(void)args;
	return request(pid, CHECKPOINT, 0, 0, NULL);
}

API CUresult cuCheckpointProcessRestore(int pid, struct restore_args *args)
{
	return request(pid, RESTORE, 0, args ? args->count : 0, args ? args->pairs : NULL);
}

API CUresult cuCheckpointProcessUnlock(int pid, void *args)
{
	(void)args;
	return request(pid, UNLOCK, 0, 0, NULL);
}
