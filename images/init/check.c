/* `init check`: what kubelet asks of a container over the network, asked from inside, so that it can be the command of
 * a probe that knows when the container is frozen. The port is looked for at each of the container's own addresses:
 * after a restore a program may listen at the one of its first pod. */
#include "init.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

enum { REQUEST = 64 << 10, HEADER = 9, DATA = 0, HEADERS = 1, RESET = 3, SETTINGS = 4, GOAWAY = 7 };

static char host[INET6_ADDRSTRLEN + 16]; /* of what was connected to, with the port, as in a URL */

static int try(const struct sockaddr *address, in_port_t port)
{
	struct sockaddr_storage to = { 0 };
	bool v6 = address->sa_family == AF_INET6;
	char text[INET6_ADDRSTRLEN];
	const void *ip;
	memcpy(&to, address, v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
	if (v6) {
		struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&to;
		in6->sin6_port = htons(port);
		ip = &in6->sin6_addr;
	} else {
		struct sockaddr_in *in = (struct sockaddr_in *)&to;
		in->sin_port = htons(port);
		ip = &in->sin_addr;
	}
	int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && connect(fd, (struct sockaddr *)&to, v6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in))) {
		int error = errno;
		close(fd);
		errno = error;
		return -1;
	}
	inet_ntop(to.ss_family, ip, text, sizeof(text));
	snprintf(host, sizeof(host), v6 ? "[%s]:%d" : "%s:%d", text, port);
	return fd;
}

static int reach(const char *port_text)
{
	struct ifaddrs *all;
	char *rest;
	int fd = -1;
	long port = strtol(port_text, &rest, 10);
	if (rest == port_text || *rest || port < 1 || port > 65535)
		fail("check", "expected a port from 1 to 65535");
	if (getifaddrs(&all))
		fail("check: getifaddrs", strerror(errno));
	errno = ECONNREFUSED;
	for (int lo = 0; lo <= 1 && fd < 0; lo++) /* the pod's address first, as kubelet asks there */
		for (struct ifaddrs *one = all; one && fd < 0; one = one->ifa_next)
			if (one->ifa_addr && (one->ifa_flags & IFF_UP) && !!(one->ifa_flags & IFF_LOOPBACK) == lo &&
			    (one->ifa_addr->sa_family == AF_INET || one->ifa_addr->sa_family == AF_INET6))
				fd = try(one->ifa_addr, (in_port_t)port);
	freeifaddrs(all);
	return fd;
}

static bool send_all(int fd, const void *data, size_t size)
{
	for (const char *at = data; size > 0;) {
		ssize_t n = send(fd, at, size, MSG_NOSIGNAL);
		if (n <= 0)
			return false;
		at += n;
		size -= (size_t)n;
	}
	return true;
}

static bool receive(int fd, void *data, size_t size)
{
	return recv(fd, data, size, MSG_WAITALL) == (ssize_t)size;
}

static int http(int fd, const char *path, char **headers)
{
	char request[REQUEST], answer[64] = "";
	bool names_host = false;
	int code;
	for (char **h = headers; *h; h++)
		names_host |= !strncasecmp(*h, "host:", 5);
	int n = snprintf(request, sizeof(request), "GET %s%s HTTP/1.1\r\nUser-Agent: kube-probe/stasis\r\nAccept: */*\r\n"
			 "Connection: close\r\n", *path == '/' ? "" : "/", path);
	if (!names_host)
		n += snprintf(request + n, sizeof(request) - (size_t)n, "Host: %s\r\n", host);
	for (char **h = headers; *h && n < REQUEST; h++)
		n += snprintf(request + n, sizeof(request) - (size_t)n, "%s\r\n", *h);
	if (n > REQUEST - 3)
		fail("check", "the request is too long");
	memcpy(request + n, "\r\n", 2);
	if (!send_all(fd, request, (size_t)n + 2) || !receive(fd, answer, 12)) /* "HTTP/1.1 200" */
		fail("check", "no answer of HTTP");
	if (sscanf(answer, "HTTP/1.%*1d %3d", &code) != 1)
		fail("check", "no answer of HTTP");
	if (code >= 200 && code < 400)
		return 0;
	complain("check: the answer is", answer + 9);
	return 1;
}

/* HTTP/2 as far as one question of grpc.health.v1.Health needs it. */
static unsigned char *put_frame(unsigned char *at, size_t size, int kind, int flags, int stream)
{
	const unsigned char header[HEADER] = { 0, (unsigned char)(size >> 8), (unsigned char)size, (unsigned char)kind,
					       (unsigned char)flags, 0, 0, 0, (unsigned char)stream };
	memcpy(at, header, HEADER);
	return at + HEADER;
}

static unsigned char *put_text(unsigned char *at, const char *text)
{
	size_t size = strlen(text); /* at most 126: one byte, in HPACK and in protobuf */
	*at++ = (unsigned char)size;
	memcpy(at, text, size);
	return at + size;
}

static int grpc(int fd, const char *service)
{
	static const char preface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
	const char *fields[][2] = { { ":method", "POST" }, { ":scheme", "http" },
				    { ":path", "/grpc.health.v1.Health/Check" }, { ":authority", host },
				    { "content-type", "application/grpc" }, { "te", "trailers" } };
	unsigned char block[1024], request[2048], header[HEADER], payload[1 << 14], *end = block, *at = request;
	size_t name = strlen(service), message = name ? name + 2 : 0;
	if (name > 126)
		fail("check", "the service's name is too long");
	for (unsigned i = 0; i < sizeof(fields) / sizeof(*fields); i++) {
		*end++ = 0; /* a literal, not indexed */
		end = put_text(put_text(end, fields[i][0]), fields[i][1]);
	}
	memcpy(at, preface, sizeof(preface) - 1);
	at = put_frame(at + sizeof(preface) - 1, 0, SETTINGS, 0, 0);
	at = put_frame(at, (size_t)(end - block), HEADERS, 4, 1);
	memcpy(at, block, (size_t)(end - block));
	at = put_frame(at + (end - block), 5 + message, DATA, 1, 1);
	memset(at, 0, 5);
	at[4] = (unsigned char)message;
	at += 5;
	if (name) {
		*at++ = 0x0a;
		at = put_text(at, service);
	}
	if (!send_all(fd, request, (size_t)(at - request)))
		fail("check", "no answer of gRPC");
	while (receive(fd, header, HEADER)) {
		size_t size = (size_t)header[0] << 16 | (size_t)header[1] << 8 | header[2];
		if (size > sizeof(payload) || !receive(fd, payload, size))
			break;
		if (header[3] == SETTINGS && !(header[4] & 1)) {
			put_frame(request, 0, SETTINGS, 1, 0);
			send_all(fd, request, HEADER);
		} else if (header[3] == DATA && size >= 5) {
			if (size == 7 && payload[5] == 0x08 && payload[6] == 1) /* status: SERVING */
				return 0;
			complain("check", "the service does not serve");
			return 1;
		} else if (header[3] == RESET || header[3] == GOAWAY || (header[3] == HEADERS && header[4] & 1)) {
			complain("check", "the service is not known, or there is none for health");
			return 1;
		}
	}
	fail("check", "no answer of gRPC");
}

int check(int argc, char **argv)
{
	const char *kind = argc > 3 ? argv[2] : "";
	bool is_http = !strcmp(kind, "http"), is_grpc = !strcmp(kind, "grpc");
	if (!is_http && !is_grpc && strcmp(kind, "tcp"))
		fail("check", "expected: check http PORT PATH [HEADER...] | tcp PORT | grpc PORT [SERVICE]");
	int fd = reach(argv[3]);
	if (fd < 0) {
		complain("check", strerror(errno));
		return 1;
	}
	if (is_http)
		return http(fd, argc > 4 ? argv[4] : "/", argv + (argc > 5 ? 5 : argc));
	return is_grpc ? grpc(fd, argc > 4 ? argv[4] : "") : 0;
}
