/* A seccomp filter that answers ENOSYS to what CRIU cannot dump, from the trainer's start: a program that finds no
 * io_uring falls back to epoll; one that has opened it can no longer be checkpointed. */
#include "init.h"

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#if defined(__x86_64__)
#define ARCH AUDIT_ARCH_X86_64
#elif defined(__aarch64__)
#define ARCH AUDIT_ARCH_AARCH64
#else
#error "unknown architecture"
#endif
#define X32_BIT 0x40000000

static const struct {
	const char *name;
	long first, last;    /* system calls */
	bool any_arch;       /* the same numbers in every ABI of the machine */
} denials[] = {
	{ "io_uring", SYS_io_uring_setup, SYS_io_uring_register, true }, /* bit 0: DENY_DEFAULT */
	{ "userfaultfd", SYS_userfaultfd, SYS_userfaultfd, false },
	{ "perf", SYS_perf_event_open, SYS_perf_event_open, false },
	{ "bpf", SYS_bpf, SYS_bpf, false },
};
enum { DENIALS = sizeof(denials) / sizeof(*denials) };

/* A comma-separated list of the names above, or "none". */
bool deny_parse(const char *names, unsigned *bits)
{
	*bits = 0;
	if (!strcmp(names, "none"))
		return true;
	for (;;) {
		size_t n = strcspn(names, ",");
		unsigned i = 0;
		while (i < DENIALS && (strlen(denials[i].name) != n || strncmp(names, denials[i].name, n)))
			i++;
		if (i == DENIALS)
			return false;
		*bits |= 1u << i;
		if (!names[n])
			return true;
		names += n + 1;
	}
}

/* In a child, since a container's profile may answer by killing. */
static bool denied_already(long nr)
{
	pid_t pid = fork();
	int status;
	if (pid == 0) { /* no call is valid so: none has an effect */
		long r = syscall(nr, -1, NULL, -1, -1, 0);
		_exit(r < 0 && (errno == EPERM || errno == ENOSYS));
	}
	if (pid < 0 || waitpid(pid, &status, 0) != pid)
		return false;
	return !WIFEXITED(status) || WEXITSTATUS(status) != 0;
}

void deny_install(unsigned bits)
{
	struct sock_filter f[8 + 2 * DENIALS];
	unsigned n = 0;
	for (unsigned i = 0; i < DENIALS; i++)
		if (bits & (1u << i) && denied_already(denials[i].first))
			bits &= ~(1u << i);
	if (!bits)
		return;
	for (int any = 1; any >= 0; any--) { /* first what holds in any ABI, then the calls of the native one */
		if (!any) {
			f[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, arch));
			f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, ARCH, 1, 0);
			f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
		}
		f[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
		f[n++] = (struct sock_filter)BPF_STMT(BPF_ALU | BPF_AND | BPF_K, ~X32_BIT);
		for (unsigned i = 0; i < DENIALS; i++)
			if (bits & (1u << i) && denials[i].any_arch == any)
				for (long nr = denials[i].first; nr <= denials[i].last; nr++) {
					f[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, nr, 0, 1);
					f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS);
				}
	}
	f[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);

	struct sock_fprog program = { n, f };
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0)
		return;
	/* Without CAP_SYS_ADMIN the kernel asks for NO_NEW_PRIVS, under which setuid programs gain nothing. */
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program))
		complain("cannot install the seccomp filter", strerror(errno));
}
