/* stasis-init: PID 1 of a prepared container.
 *
 *   PID 1 (pid1.c)     outside of every checkpoint: reaps, forwards signals, holds the grace period, reads the agent's words
 *   `- keeper (keeper.c)   root of the tree that CRIU dumps: subreaper of the trainer's orphans
 *      `- trainer          the user's command, in a session of its own
 */
#pragma once
#define _GNU_SOURCE
#include <stdbool.h>
#include <sys/stat.h>
#include <sys/types.h>

#ifndef BUILD
#define BUILD "unknown" /* digest of the source */
#endif

enum { EXIT_OWN = 125, EXIT_NOT_EXECUTABLE = 126, EXIT_NOT_FOUND = 127, EXIT_SIGNAL = 128 };

struct options {
	const char *volume; /* the agent's folder in this container */
	double grace;       /* seconds from TERM to SIGKILL; negative: for ever */
	unsigned deny;      /* bits of deny.c */
	char **command;
	char **pre_stop; /* the user's hook; NULL where there is none */
};

/* One line on stderr: "stasis-init: what: why". */
void complain(const char *what, const char *why);
_Noreturn void fail(const char *what, const char *why);
/* Of a wait status, as a shell and a container runtime count: 128 more than the signal. */
int exit_code(int status);

/* deny.c */
enum { DENY_DEFAULT = 1 };
bool deny_parse(const char *names, unsigned *bits);
void deny_install(unsigned bits);

/* word.c: what the agent last wrote into VOLUME/word (atomically, by rename), and which writing of it that was. */
struct word {
	char text[64]; /* without the newline; "" where there is none */
	ino_t inode;
	struct timespec written;
};
void word_read(const char *volume, const char *name, struct word *out);
bool word_same(const struct word *a, const struct word *b);
int word_watch(const char *volume);

/* probe.c, check.c, install.c */
int probe(int argc, char **argv);
int check(int argc, char **argv);
int install(int argc, char **argv);

/* keeper.c, pid1.c */
pid_t keeper_start(const struct options *o);
_Noreturn void pid1(const struct options *o, bool wait);
