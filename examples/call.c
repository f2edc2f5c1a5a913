// call.c - call any tool of your configured servers, with progress and Ctrl-C.
//
//   call SERVER.TOOL ['{"json":"arguments"}']
#include <signal.h>
#include <stdio.h>

#include "mcp.h"

static mcp *the_handle;  // for the signal handler

static void on_interrupt(int sig) {
    (void)sig;
    mcp_cancel(the_handle);  // may be called from a signal handler
}

// Called while mcp_call() below runs, on the same thread.
static void on_event(void *user, const mcp_event *ev) {
    (void)user;
    if (ev->type == MCP_EV_PROGRESS)
        fprintf(stderr, "%s: %g of %g %.*s\n", ev->server, ev->progress,
                ev->total, MCP_ARG(ev->text));
}

int main(int argc, char **argv) {
    mcp_options opt = {0};
    mcp_result *r = NULL;
    int failed = 1;

    if (argc < 2) return fprintf(stderr, "usage: call SERVER.TOOL [JSON]\n"), 2;
    opt.on_event = on_event;
    if (mcp_open(&the_handle, &opt)) return fprintf(stderr, "no memory\n"), 1;
    signal(SIGINT, on_interrupt);
    if (mcp_load(the_handle, NULL) ||
        mcp_call(the_handle, argv[1], argc > 2 ? argv[2] : NULL, &r)) {
        fprintf(stderr, "call: %s\n", mcp_errmsg(the_handle));
    } else {
        puts(mcp_text(r));
        failed = mcp_is_error(r);  // the tool's own failure is a result
    }
    mcp_free(r);
    mcp_close(the_handle);
    return failed;
}
