// custom_io.c - a server over a stream of your own: here, a socket pair to a
// program. The same five functions would serve a UART or a queue.
//
//   custom_io [SERVER-PROGRAM]
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "mcp.h"

// Bytes read, 0: nothing now, -1: the end or an error.
static ptrdiff_t my_read(void *user, void *to, size_t n) {
    ssize_t k = read(*(int *)user, to, n);
    return k > 0 ? k : k < 0 && errno == EAGAIN ? 0 : -1;
}

static ptrdiff_t my_write(void *user, const void *from, size_t n) {
    ssize_t k = send(*(int *)user, from, n, MSG_NOSIGNAL);
    return k >= 0 ? k : errno == EAGAIN ? 0 : -1;
}

// What a poll() may wait on; without it the library would have to ask again
// and again.
static int my_fds(void *user, mcp_fd *out, int cap) {
    if (cap > 0) out[0].fd = *(int *)user;
    return 1;
}

static void my_close(void *user) { close(*(int *)user); }

int main(int argc, char **argv) {
    const char *program = argc > 1 ? argv[1] : "build/demo_server";
    mcp *m;
    mcp_result *r = NULL;
    mcp_io io = {NULL, NULL, my_read, my_write, my_fds, my_close};
    int fd[2], failed;

    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fd)) return 1;
    if (fork() == 0) {
        dup2(fd[1], 0), dup2(fd[1], 1), close(fd[0]), close(fd[1]);
        execl(program, program, (char *)NULL);
        _exit(127);
    }
    close(fd[1]);
    fcntl(fd[0], F_SETFL, O_NONBLOCK);
    io.user = &fd[0];
    failed = mcp_open(&m, NULL) || mcp_add_io(m, "mine", &io) ||
             mcp_call(m, "mine.echo", "{\"text\":\"over my own stream\"}", &r);
    puts(failed ? mcp_errmsg(m) : mcp_text(r));
    mcp_free(r);
    mcp_close(m);  // calls my_close, so the program sees the end and exits
    wait(NULL);
    return failed;
}
