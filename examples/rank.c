// rank.c - how well the search finds the right tool: answers a set of queries.
//
//     rank TOOLS.json QUERIES.json
//
// TOOLS is an array of {"server","name","description","inputSchema"}, QUERIES
// an array of {"query"}. Prints one line a query, best tool first, at most ten:
// {"query":"...","results":["server.tool",...]}. It includes mcp.c to reach the
// index without a server.
#include "../mcp.c"

enum { RESULTS = 10, MAX_SERVERS = 1000 };

typedef struct rank {
    mcp m;
    server servers[MAX_SERVERS];
    catalog *catalogs[MAX_SERVERS];
    uint32_t n;
} rank;

static mcp_doc *rank_read(mem *m, const char *path) {
    FILE *f = fopen(path, "rb");
    mcp_doc *doc = NULL;
    char part[8192];
    size_t got;
    buf text;

    buf_init(&text, m, 256 << 20);
    while (f && (got = fread(part, 1, sizeof part, f)) > 0)
        buf_add(&text, str_make(part, got));
    if (!f || json_parse(m, str_trim(buf_str(&text)), &doc, NULL, NULL))
        fprintf(stderr, "rank: cannot read %s\n", path);
    if (f) fclose(f);
    buf_free(&text);
    return doc;
}

static bool rank_known(const rank *r, str name) {
    for (uint32_t i = 0; i < r->n; i++)
        if (str_is(name, r->servers[i].name)) return true;
    return false;
}

// One catalog of all the tools of a server, as if it had listed them.
static bool rank_server(rank *r, mcp_json tools, str name) {
    server *s = &r->servers[r->n];
    mcp_doc *doc = NULL;
    mcp_writer w;
    catalog *c;

    w_init(&w, &r->m.mem, 256 << 20);
    mcp_w_array(&w);
    for (mcp_json t = mcp_first(tools); mcp_exists(t); t = mcp_next(t))
        if (str_eq(mcp_view(mcp_get(t, "server")), name)) w_value(&w, t);
    mcp_w_end(&w);
    s->m = &r->m;
    snprintf(s->name, sizeof s->name, "%.*s", MCP_ARG(name));
    c = r->catalogs[r->n++] = catalog_new(s, LIST_TOOLS);
    if (!w_err(&w)) json_parse(&r->m.mem, w_str(&w), &doc, NULL, NULL);
    w_free(&w);
    if (c && doc && catalog_page_add(c, doc, json_root(doc)) == MCP_OK)
        return !catalog_build(c, (uint32_t)mcp_length(json_root(doc)), false);
    json_free(doc);
    return false;
}

static bool rank_servers(rank *r, mcp_json tools) {
    for (mcp_json t = mcp_first(tools); mcp_exists(t); t = mcp_next(t)) {
        str name = mcp_view(mcp_get(t, "server"));
        if (rank_known(r, name)) continue;
        if (r->n == MAX_SERVERS || !rank_server(r, tools, name)) return false;
    }
    return true;
}

static bool rank_query(rank *r, mcp_json query) {
    hit hits[RESULTS];
    uint32_t n = 0;

    if (search_run(&r->m, r->catalogs, r->n, mcp_view(query), 1 << LIST_TOOLS,
                   RESULTS, hits, &n))
        return false;
    printf("{\"query\": %.*s, \"results\": [", MCP_ARG(mcp_raw(query)));
    for (uint32_t i = 0; i < n; i++) {
        item it;
        if (!catalog_item(hits[i].catalog, hits[i].index, &it)) return false;
        printf("%s\"%s.%.*s\"", i ? ", " : "",
               hits[i].catalog->server->name, MCP_ARG(it.name));
    }
    printf("]}\n");
    return true;
}

int main(int argc, char **argv) {
    rank *r = calloc(1, sizeof *r);
    mcp_doc *tools = NULL, *queries = NULL;
    bool ok = false;

    if (argc != 3 || !r) {
        fprintf(stderr, "usage: rank TOOLS.json QUERIES.json\n");
        free(r);
        return 2;
    }
    mem_init(&r->m.mem, NULL, NULL);
    tools = rank_read(&r->m.mem, argv[1]);
    queries = rank_read(&r->m.mem, argv[2]);
    if (tools && queries && rank_servers(r, json_root(tools))) {
        mcp_json q = mcp_first(json_root(queries));
        ok = true;
        for (; ok && mcp_exists(q); q = mcp_next(q))
            ok = rank_query(r, mcp_get(q, "query"));
    }
    for (uint32_t i = 0; i < r->n; i++) catalog_free(r->catalogs[i]);
    json_free(tools);
    json_free(queries);
    free(r);
    return ok ? 0 : 1;
}
