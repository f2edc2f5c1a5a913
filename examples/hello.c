// hello.c - the least program: start a server, call one of its tools.
//
//   hello [SERVER-PROGRAM]      cc hello.c mcp.c -lbearssl
#include <stdio.h>

#include "mcp.h"

int main(int argc, char **argv) {
    mcp *m;
    mcp_result *r = NULL;
    char server[4096];
    mcp_code rc;

    // The same JSON as an entry of an mcpServers file.
    snprintf(server, sizeof server, "{\"command\":\"%s\"}",
             argc > 1 ? argv[1] : "build/demo_server");
    if ((rc = mcp_open(&m, NULL)) != MCP_OK)
        return fprintf(stderr, "hello: %s\n", mcp_code_name(rc)), 1;
    if ((rc = mcp_add(m, "demo", server)) == MCP_OK &&
        (rc = mcp_call(m, "demo.add", "{\"a\":2,\"b\":40}", &r)) == MCP_OK)
        puts(mcp_text(r));
    else
        fprintf(stderr, "hello: %s\n", mcp_errmsg(m));
    mcp_free(r);
    mcp_close(m);
    return rc != MCP_OK;
}
