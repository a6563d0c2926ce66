/* One rank of a gang under network load:  load RANK STAT BASEPORT BUFFER SPEC ADDRESS...
 *
 * Every pair of ranks has one connection per letter of SPEC: p ping-pong of 64 bytes, b bulk both ways, s the lower rank
 * writes and the other reads slowly, i idle, a lock-step all-to-all. Rank r listens on BASEPORT + r at its ADDRESS.
 * An address with a colon is IPv6; ::ffff:a.b.c.d makes IPv4 connections on IPv6 sockets. BUFFER > 0 fixes the socket
 * buffers. All bytes follow a pattern that depends on connection, direction and offset, and are checked on arrival.
 * STAT is a shared file that the test reads while this runs: struct report below. When the test sets `stop`, what has
 * begun is finished and every sent byte is read. Connections made later are served by an echo.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MAX = 256, PERIOD = 65521, CHUNK = 65536, STEP = 262144, ECHOES = 64 };

struct connection {
	uint64_t mode, peer, letter, sent, received, error, epoch, first_ns;
};
struct report {
	volatile uint64_t epoch, stop; /* written by the test */
	uint64_t ready, count, steps, step_epoch, step_first_ns, pad;
	struct connection c[MAX];
};

static unsigned char pattern[2 * PERIOD + CHUNK];

static uint64_t now_ns(void)
{
	struct timespec t;
	clock_gettime(CLOCK_REALTIME, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static socklen_t sockaddr(struct sockaddr_storage *s, const char *text, int port)
{
	memset(s, 0, sizeof *s);
	if (strchr(text, ':')) {
		struct sockaddr_in6 *a = (void *)s;
		a->sin6_family = AF_INET6;
		a->sin6_port = htons(port);
		if (inet_pton(AF_INET6, text, &a->sin6_addr) != 1)
			die(text);
		return sizeof *a;
	}
	struct sockaddr_in *a = (void *)s;
	a->sin_family = AF_INET;
	a->sin_port = htons(port);
	if (inet_pton(AF_INET, text, &a->sin_addr) != 1)
		die(text);
	return sizeof *a;
}

static int tcp(int family, int buffer)
{
	int one = 1, fd = socket(family, SOCK_STREAM, 0);
	if (fd < 0)
		die("socket");
	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (buffer) {
		setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer, sizeof buffer);
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &buffer, sizeof buffer);
	}
	return fd;
}

int main(int argc, char **argv)
{
	int rank = atoi(argv[1]), base = atoi(argv[3]), buffer = atoi(argv[4]), ranks = argc - 6, one = 1;
	const char *spec = argv[5], **address = (const char **)argv + 6;
	int letters = strlen(spec), fd[MAX], n = 0, echo[ECHOES], echoes = 0;
	struct sockaddr_storage s;
	socklen_t length;

	signal(SIGPIPE, SIG_IGN);
	int file = open(argv[2], O_RDWR | O_CREAT, 0600);
	if (file < 0 || ftruncate(file, sizeof(struct report)))
		die(argv[2]);
	struct report *st = mmap(NULL, sizeof *st, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	unsigned x = 12345;
	for (int i = 0; i < PERIOD; i++) {
		x = x * 1103515245 + 12345;
		pattern[i] = x >> 16;
	}
	for (size_t i = PERIOD; i < sizeof pattern; i++)
		pattern[i] = pattern[i - PERIOD];

	length = sockaddr(&s, address[rank], base + rank);
	int listener = tcp(s.ss_family, buffer);
	if (bind(listener, (void *)&s, length) || listen(listener, MAX))
		die("listen");
	for (int p = 0; p < rank; p++)
		for (int k = 0; k < letters; k++) {
			length = sockaddr(&s, address[p], base + p);
			int c;
			while (c = tcp(s.ss_family, buffer), connect(c, (void *)&s, length)) {
				close(c);
				usleep(20000);
			}
			unsigned char hello[2] = { rank, k };
			if (write(c, hello, 2) != 2)
				die("hello");
			st->c[n] = (struct connection){ .mode = spec[k], .peer = p, .letter = k };
			fd[n++] = c;
		}
	for (int i = 0; i < (ranks - 1 - rank) * letters; i++) {
		unsigned char hello[2];
		int c = accept(listener, NULL, NULL);
		if (recv(c, hello, 2, MSG_WAITALL) != 2)
			die("hello");
		st->c[n] = (struct connection){ .mode = spec[hello[1]], .peer = hello[0], .letter = hello[1] };
		fd[n++] = c;
	}
	for (int i = 0; i < n; i++) {
		setsockopt(fd[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
		fcntl(fd[i], F_SETFL, O_NONBLOCK);
	}
	fcntl(listener, F_SETFL, O_NONBLOCK);
	st->count = n;
	st->ready = 1;

	static unsigned char data[CHUNK];
	uint64_t last_slow = 0, last = now_ns(), budget = 0; /* of bulk: 16 MB/s in all, so that tests can share a machine */
	for (;;) {
		struct pollfd pf[MAX + ECHOES + 1];
		uint64_t goal[MAX], t = now_ns();
		int slow = t - last_slow > 10000000, lockstep = 0, arrived = 0;
		if (slow)
			last_slow = t;
		budget += (t - last) / 1000 * 16;
		budget = budget > 4 * CHUNK ? 4 * CHUNK : budget;
		last = t;
		for (int i = 0; i < n; i++)
			if (st->c[i].mode == 'a') {
				lockstep++;
				arrived += st->c[i].received >= (st->steps + 1) * STEP;
			}
		if (lockstep && arrived == lockstep) {
			st->steps++;
			if (st->step_epoch != st->epoch) {
				st->step_first_ns = t;
				st->step_epoch = st->epoch;
			}
		}
		for (int i = 0; i < n; i++) {
			struct connection *c = &st->c[i];
			int lower = rank < (int)c->peer, stop = st->stop;
			switch (c->mode) {
			case 'p':
				if (!lower)
					goal[i] = c->received / 64 * 64;
				else if (c->received == c->sent && !stop)
					goal[i] = c->sent + 64;
				else
					goal[i] = (c->sent + 63) / 64 * 64;
				break;
			case 'b':
				goal[i] = stop ? c->sent : c->sent + budget;
				break;
			case 's':
				goal[i] = lower && !stop ? c->sent + CHUNK : c->sent;
				break;
			case 'a':
				goal[i] = stop ? (c->sent + STEP - 1) / STEP * STEP : (st->steps + 1) * STEP;
				break;
			default:
				goal[i] = stop ? 64 : c->sent;
			}
			pf[i] = (struct pollfd){ c->error ? -1 : fd[i], 0, 0 };
			if (c->mode != 's' || lower || slow || stop)
				pf[i].events |= POLLIN;
			if (goal[i] > c->sent)
				pf[i].events |= POLLOUT;
		}
		for (int i = 0; i < echoes; i++)
			pf[n + i] = (struct pollfd){ echo[i], POLLIN, 0 };
		pf[n + echoes] = (struct pollfd){ listener, POLLIN, 0 };
		poll(pf, n + echoes + 1, 2);
		for (int i = 0; i < n; i++) {
			struct connection *c = &st->c[i];
			unsigned key = c->letter * 131;
			if (c->error)
				continue;
			if (pf[i].revents & (POLLIN | POLLHUP | POLLERR)) {
				int most = c->mode == 's' && !st->stop ? 8192 : CHUNK;
				int r = recv(fd[i], data, most, 0);
				if (r == 0)
					c->error = 1;
				else if (r < 0 && errno != EAGAIN)
					c->error = 1000 + errno;
				else if (r > 0) {
					if (memcmp(data, pattern + (c->received + key + c->peer * 7) % PERIOD, r))
						c->error = 2;
					c->received += r;
					if (c->epoch != st->epoch) {
						c->first_ns = now_ns();
						c->epoch = st->epoch;
					}
				}
			}
			if (goal[i] > c->sent && pf[i].revents & POLLOUT) {
				uint64_t want = goal[i] - c->sent > CHUNK ? CHUNK : goal[i] - c->sent;
				if (c->mode == 'b' && want > budget)
					want = budget;
				if (!want)
					continue;
				int r = send(fd[i], pattern + (c->sent + key + rank * 7) % PERIOD, want, 0);
				if (r > 0) {
					c->sent += r;
					budget -= c->mode == 'b' ? r : 0;
				} else if (errno != EAGAIN)
					c->error = 2000 + errno;
			}
		}
		for (int i = 0; i < echoes; i++)
			if (pf[n + i].revents) {
				int r = recv(echo[i], data, CHUNK, 0);
				if (r <= 0 || send(echo[i], data, r, 0) != r) {
					close(echo[i]);
					echo[i--] = echo[--echoes];
					break;
				}
			}
		if (echoes < ECHOES) {
			int c = accept(listener, NULL, NULL);
			if (c >= 0)
				echo[echoes++] = c;
		}
	}
}
