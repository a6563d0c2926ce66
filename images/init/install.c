/* `init install DIR`: an init container leaves init in a volume that it shares with the container to be prepared. The
 * path holds the build, so that a tree which was dumped under one build finds it again after an upgrade. */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void copy(int from, int to)
{
	char buffer[1 << 16];
	ssize_t n;
	while ((n = read(from, buffer, sizeof(buffer))) > 0)
		for (ssize_t done = 0; done < n;) {
			ssize_t written = write(to, buffer + done, (size_t)(n - done));
			if (written < 0)
				fail("install: write", strerror(errno));
			done += written;
		}
	if (n < 0)
		fail("install: read", strerror(errno));
}

int install(int argc, char **argv)
{
	char folder[4096], path[4200], aside[4200];
	if (argc != 3)
		fail("install", "expected: install DIR");
	if (snprintf(folder, sizeof(folder), "%s/" BUILD, argv[2]) >= (int)sizeof(folder))
		fail("install", "the path is too long");
	snprintf(path, sizeof(path), "%s/init", folder);
	snprintf(aside, sizeof(aside), "%s/.init.%d", folder, (int)getpid());
	if (mkdir(folder, 0755) && errno != EEXIST)
		fail(folder, strerror(errno));
	chmod(folder, 0755); /* whatever the umask; by another user than the one that made it, it fails */
	if (access(path, X_OK) == 0)
		return 0; /* by the container that was here before this one */
	int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	if (from < 0)
		fail("/proc/self/exe", strerror(errno));
	unlink(aside);
	int to = open(aside, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0755);
	if (to < 0)
		fail(aside, strerror(errno));
	copy(from, to);
	if (fchmod(to, 0755) || close(to) || rename(aside, path))
		fail(path, strerror(errno));
	return 0;
}
