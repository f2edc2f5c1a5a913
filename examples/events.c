// events.c - three calls at once on one handle, in a poll() loop of your own.
//
//   events [SERVER-PROGRAM]
#include <poll.h>
#include <stdio.h>

#include "mcp.h"

// What your own loop does: wait on the library's descriptors beside yours, for
// at most the time it names, then let it do what is due. More than 16 would
// only be looked at later.
static void wait_for(mcp *m) {
    mcp_fd fds[16];
    struct pollfd p[16];
    int ms, n = mcp_fds(m, fds, 16, &ms);

    for (int i = 0; i < n && i < 16; i++) {
        p[i].fd = fds[i].fd;
        p[i].events = (short)((fds[i].want & MCP_READABLE ? POLLIN : 0) |
                              (fds[i].want & MCP_WRITABLE ? POLLOUT : 0));
    }
    poll(p, (nfds_t)(n < 16 ? n : 16), ms);
    mcp_poll(m, 0);
}

int main(int argc, char **argv) {
    static const char *const args[] = {"{\"steps\":5}", "{\"a\":1,\"b\":2}",
                                       "{\"text\":\"hi\"}"};
    static const char *const tool[] = {"demo.slow", "demo.add", "demo.echo"};
    uint64_t id[3] = {0};
    int left = 0;
    char server[4096];
    mcp *m;

    snprintf(server, sizeof server, "{\"command\":\"%s\"}",
             argc > 1 ? argv[1] : "build/demo_server");
    if (mcp_open(&m, NULL) || mcp_add(m, "demo", server)) return 1;
    for (int i = 0; i < 3; i++)
        if (mcp_submit(m, MCP_DO_CALL, tool[i], args[i], &id[i]) == MCP_OK)
            left++;
    // They come back in any order: here the slow one last.
    while (left) {
        wait_for(m);
        for (int i = 0; i < 3; i++) {
            mcp_result *r;
            mcp_code rc = id[i] ? mcp_take(m, id[i], &r) : MCP_PENDING;
            if (rc == MCP_PENDING) continue;
            printf("%s: %s\n", tool[i], rc ? mcp_errmsg(m) : mcp_text(r));
            mcp_free(r);
            id[i] = 0;
            left--;
        }
    }
    mcp_close(m);
    return 0;
}
