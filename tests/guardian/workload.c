// A container's processes for tests of freezing: this is its PID 1, its child the keeper (the tree's root, a subreaper).
//   workload FILE MODE COUNT
// Every process of the tree counts up its own 64-bit word of FILE for as long as it runs. The keeper's pid is printed.
// Modes: beat (COUNT children that run), storm (COUNT children that fork short-lived children without end), hop (COUNT
// chains in which each process forks its successor and exits), threads (a process of COUNT threads whose leader has
// ended), talk (COUNT processes that each hold both ends of a TCP connection and pass bytes through it), stuck (a child that waits in the kernel uninterruptibly until FILE's last word is set).
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

enum { WORDS = 512 };
static volatile uint64_t *word;
static char *zero;

static void beat(int i) {
	for (;; usleep(200))
		word[i]++;
}

static void *beating(void *i) { beat((int)(intptr_t)i); return NULL; }

static void storm(int i) {
	for (;;) {
		pid_t child = fork();
		if (child == 0) {
			if (fork() == 0)
				for (int n = 0; n < 3; n++, usleep(100))
					__atomic_fetch_add(&word[i], 1, __ATOMIC_RELAXED);
			_exit(0); // its child becomes the keeper's
		}
		waitpid(child, NULL, 0);
		usleep(2000); // a keeper that is short of time must still reap as fast as this makes orphans
	}
}

static void talk(int i) {
	struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
	socklen_t length = sizeof at;
	int listener = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
	char byte = 0;
	if (bind(listener, (void *)&at, length) || listen(listener, 1) || getsockname(listener, (void *)&at, &length) ||
	    connect(client, (void *)&at, length))
		_exit(9);
	int server = accept(listener, NULL, NULL);
	close(listener);
	for (;; usleep(200))
		if (send(client, &byte, 1, MSG_NOSIGNAL) == 1 && recv(server, &byte, 1, 0) == 1)
			word[i]++;
}

static void hop(int i) {
	for (;;) {
		word[i]++;
		pid_t next = fork();
		if (next > 0)
			_exit(0);
		usleep(300);
	}
}

static void threads(int count) {
	pthread_t thread;
	for (int i = 0; i < count; i++)
		pthread_create(&thread, NULL, beating, (void *)(intptr_t)i);
	pthread_exit(NULL);
}

// A remote read of a page that userfaultfd does not fill: it waits in the kernel, deaf to all but SIGKILL.
static void *waker(void *fd) {
	while (!word[WORDS - 1])
		usleep(1000);
	struct uffdio_zeropage fill = {.range = {(uintptr_t)zero, 4096}};
	ioctl((int)(intptr_t)fd, UFFDIO_ZEROPAGE, &fill);
	return NULL;
}

static void stuck(void) {
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC);
	struct uffdio_api api = {.api = UFFD_API};
	zero = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct uffdio_register area = {.range = {(uintptr_t)zero, 4096}, .mode = UFFDIO_REGISTER_MODE_MISSING};
	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) || ioctl(fd, UFFDIO_REGISTER, &area))
		_exit(9);
	pthread_t thread;
	pthread_create(&thread, NULL, waker, (void *)(intptr_t)fd);
	char byte;
	struct iovec to = {&byte, 1}, from = {zero, 1};
	word[0]++;
	if (process_vm_readv(getpid(), &to, 1, &from, 1, 0) != 1)
		_exit(9);
	beat(1);
}

int main(int argc, char **argv) {
	if (argc != 4)
		return 2;
	int file = open(argv[1], O_RDWR | O_CREAT, 0600), count = atoi(argv[3]);
	if (ftruncate(file, WORDS * sizeof *word))
		return 1;
	word = mmap(NULL, WORDS * sizeof *word, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	signal(SIGCHLD, SIG_DFL);
	pid_t keeper = fork();
	if (keeper == 0) {
		setsid();
		close(file), close(0), close(1), close(2);
		prctl(PR_SET_CHILD_SUBREAPER, 1);
		for (int i = 0; i < (strcmp(argv[2], "threads") && strcmp(argv[2], "stuck") ? count : 1); i++)
			if (fork() == 0) {
				if (!strcmp(argv[2], "beat")) beat(i);
				if (!strcmp(argv[2], "storm")) storm(i);
				if (!strcmp(argv[2], "hop")) hop(i);
				if (!strcmp(argv[2], "talk")) talk(i);
				if (!strcmp(argv[2], "threads")) threads(count);
				if (!strcmp(argv[2], "stuck")) stuck();
				_exit(2);
			}
		for (;;)
			if (waitpid(-1, NULL, 0) < 0)
				pause();
	}
	close(file);
	printf("%d\n", keeper);
	fflush(stdout);
	close(0), close(1), close(2);
	for (;;)
		if (waitpid(-1, NULL, 0) < 0)
			pause();
}
