/* The agent's words. init never calls out: the agent writes files into a volume of the pod, also before init starts. */
#include "init.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

void word_read(const char *volume, const char *name, struct word *out)
{
	char path[4096];
	struct stat st;
	memset(out, 0, sizeof(*out));
	if (snprintf(path, sizeof(path), "%s/%s", volume, name) >= (int)sizeof(path))
		return;
	int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return;
	ssize_t n = read(fd, out->text, sizeof(out->text) - 1);
	if (n >= 0 && fstat(fd, &st) == 0) {
		out->inode = st.st_ino;
		out->written = st.st_mtim;
	}
	close(fd);
	out->text[n > 0 ? n : 0] = '\0';
	out->text[strcspn(out->text, "\r\n")] = '\0';
}

bool word_same(const struct word *a, const struct word *b)
{
	return a->inode == b->inode && a->written.tv_sec == b->written.tv_sec &&
	       a->written.tv_nsec == b->written.tv_nsec && !strcmp(a->text, b->text);
}

/* -1 where the kernel has no instance left: the caller looks again from time to time in any case. */
int word_watch(const char *volume)
{
	int fd = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
	if (fd >= 0)
		inotify_add_watch(fd, volume, IN_MOVED_TO | IN_CLOSE_WRITE);
	return fd;
}
