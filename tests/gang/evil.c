/* A tenant's library that leaves a mark when CRIU loads it; as a program it always does. -DMARK=\"/owned-...\". */
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

static void mark(void)
{
    close(open(MARK, O_CREAT | O_WRONLY, 0644));
}

__attribute__((constructor)) static void loaded(void)
{
    char line[4096] = "";
    int fd = open("/proc/self/cmdline", O_RDONLY);
    ssize_t size = fd < 0 ? 0 : read(fd, line, sizeof line - 1);
    for (ssize_t at = 0; at < size; at++)
        if (!strncmp(line + at, "/criu", 6))
            mark();
}

int main(void)
{
    mark();
    return 0;
}
