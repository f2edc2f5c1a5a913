// demo_server.c - a small MCP server: both eras, stdio or HTTP on loopback.
//
//   demo_server                 speak on stdin and stdout
//   demo_server --http [PORT]   listen on 127.0.0.1, print the URL
//   demo_server --legacy        know no protocol after 2025-11-25
//   demo_server --modern        know only 2026-07-28
//
// It includes mcp.c for its JSON and buffers: a server needs the same ones. One
// thread, one poll(); a slow tool is a timer, so others go on.
//
// It is there to be talked to by tests, the demo and people, on loopback alone:
// it takes well-formed HTTP for granted, has one session for all, and drops who
// sends more than it can hold.
#include "mcp.c"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MODERN "2026-07-28"
#define META "io.modelcontextprotocol/"

enum { MAX_PEERS = 32, MAX_BODY = 4 << 20, MAX_HEAD = 16 << 10 };
enum { STEP_MS = 100, FULL_MS = 10, LISTS_MS = 60000 };

// JSON-RPC 2.0 section 5.1, then what the two eras of MCP added.
enum {
    E_PARSE = -32700, E_METHOD = -32601, E_PARAMS = -32602,
    E_INTERNAL = -32603,
    E_NO_SESSION = -32001, E_NO_RESOURCE = -32002,  // legacy
    E_HEADER = -32020, E_VERSION = -32022           // modern
};

// Where answers go: standard output, or one HTTP connection.
typedef struct peer {
    int in, out;           // -1: free place
    bool http;
    bool streaming;        // an SSE answer has begun
    bool listening;        // a GET stream or subscriptions/listen
    bool modern;           // era of the request being answered
    int status;            // of the answer, if it is one JSON body
    buf in_data, out_data;
    buf listen_id;         // raw id of subscriptions/listen
    bool tools, updates;   // what a modern listener asked to hear
} peer;

typedef struct timer {     // a call of `slow` that is under way
    bool used, modern;
    peer *to;
    int64_t at;
    int step, steps;
    buf id, token;
} timer;

typedef struct demo {
    mem mem;
    peer peers[MAX_PEERS];
    timer timers[8];       // slow calls at once
    int listener, extra_tools, touches;
    bool legacy_only, modern_only;
    bool subscribed;       // legacy resources/subscribe of demo://clock
    char session[33];
} demo;

static const char *const colors[] = {"amber", "azure", "black", "blue",
                                     "crimson", "cyan", "green", "violet"};

// Never steps back, unlike the time of day.
static int64_t clock_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

//=============================================================================
// MARK: - Sending
//
// Each peer has a buffer of what it is still to get, so that one who does not
// read keeps nobody waiting. What is sent before an answer over HTTP turns that
// answer into a stream; alone it is one JSON body.
//=============================================================================

static void flush_peer(peer *p) {
    while (p->out_data.len) {
        ssize_t n = write(p->out, p->out_data.ptr, p->out_data.len);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return;  // full: poll() tells when to go on
        buf_drop(&p->out_data, (size_t)n);
    }
}

static const char *status_words(int status) {
    switch (status) {
    case 200: return "OK";
    case 202: return "Accepted";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    default: return "Error";
    }
}

// `given`: the session that initialize begins, which a client then repeats.
static void http_reply(peer *p, int status, const char *given, str body) {
    buf_fmt(&p->out_data, "HTTP/1.1 %d %s\r\nContent-Length: %zu\r\n", status,
            status_words(status), body.len);
    if (body.len)
        buf_add(&p->out_data, S("Content-Type: application/json\r\n"));
    if (given) buf_fmt(&p->out_data, "Mcp-Session-Id: %s\r\n", given);
    buf_add(&p->out_data, S("\r\n"));
    buf_add(&p->out_data, body);
    flush_peer(p);
}

// Chunked, as nobody knows yet how long it gets (RFC 9112 7.1).
static void begin_stream(peer *p) {
    if (p->streaming) return;
    p->streaming = true;
    buf_add(&p->out_data, S("HTTP/1.1 200 OK\r\nContent-Type: "
                            "text/event-stream\r\nTransfer-Encoding: "
                            "chunked\r\n\r\n"));
}

// One event a chunk. JSON as we write it has no line break, so one data line.
static void send_event(peer *p, str text) {
    size_t frame = sizeof "event: message\ndata: \n\n" - 1;
    buf_fmt(&p->out_data, "%zx\r\nevent: message\ndata: ", text.len + frame);
    buf_add(&p->out_data, text);
    buf_add(&p->out_data, S("\n\n\r\n"));
}

// A notification to this peer, before its answer (or on its stream).
static void send_note(peer *p, str text) {
    if (p->http) {
        begin_stream(p);
        send_event(p, text);
    } else {
        buf_add(&p->out_data, text);
        buf_byte(&p->out_data, '\n');
    }
    flush_peer(p);
}

// The answer itself: it ends a stream or is the whole body.
static void send_answer(demo *d, peer *p, str text) {
    if (!p->http || p->listening) {
        send_note(p, text);
    } else if (p->streaming) {
        send_event(p, text);
        buf_add(&p->out_data, S("0\r\n\r\n"));
        p->streaming = false;
        flush_peer(p);
    } else {
        http_reply(p, p->status, p->modern ? NULL : d->session, text);
    }
}

//=============================================================================
// MARK: - Messages
//
// A modern result says that it is complete, who answers and for how long lists
// may be kept; a legacy one has none of that. Those are all the differences.
//=============================================================================

// The `id` is the client's own text, sent back byte for byte: 1 is not 1.0.
static void begin_answer(demo *d, mcp_writer *w, str id, const char *member) {
    w_init(w, &d->mem, MAX_BODY);
    mcp_w_object(w);
    w_pair(w, "jsonrpc", S("2.0"));
    w_pair_raw(w, "id", id);
    mcp_w_key(w, member);
    mcp_w_object(w);
}

static void end_answer(demo *d, peer *p, mcp_writer *w) {
    mcp_w_end(w);
    mcp_w_end(w);
    if (!w_err(w)) send_answer(d, p, w_str(w));
    w_free(w);
}

static void begin_result(demo *d, peer *p, mcp_writer *w, str id) {
    p->status = 200;
    begin_answer(d, w, id, "result");
    if (!p->modern) return;
    w_pair(w, "resultType", S("complete"));
    mcp_w_key(w, "_meta");
    mcp_w_object(w);
    w_pair_raw(w, META "serverInfo",
               S("{\"name\":\"demo\",\"version\":\"" MCP_VERSION "\"}"));
    mcp_w_end(w);
}

// For how long a modern client may keep a list or a resource, and for whom.
static void cache_hints(peer *p, mcp_writer *w, int ttl_ms) {
    if (!p->modern) return;
    w_pair_int(w, "ttlMs", ttl_ms);
    w_pair(w, "cacheScope", S("public"));
}

// Legacy clients take an error for an answer only if HTTP says 200. One about
// the version names those that are spoken here.
static void send_error(demo *d, peer *p, str id, int status, int code,
                       const char *message) {
    mcp_writer w;
    p->status = p->modern ? status : 200;
    begin_answer(d, &w, id, "error");
    w_pair_int(&w, "code", code);
    w_pair(&w, "message", str_of(message));
    if (code == E_VERSION)
        w_pair_raw(&w, "data",
                   d->modern_only
                       ? S("{\"supported\":[\"" MODERN "\"]}")
                       : S("{\"supported\":[\"" MODERN "\",\"2025-11-25\"]}"));
    end_answer(d, p, &w);
}

// A tool that failed is a result too: the model is to read why.
static void text_result(mcp_writer *w, str text, bool failed) {
    mcp_w_key(w, "content");
    mcp_w_array(w);
    mcp_w_object(w);
    w_pair(w, "type", S("text"));
    w_pair(w, "text", text);
    mcp_w_end(w);
    mcp_w_end(w);
    if (failed) w_pair_bool(w, "isError", true);
}

// Tell every listener: a modern one what it asked for, a legacy one all but
// updates it did not subscribe to. `updates`: of a resource, `uri` names it.
static void broadcast(demo *d, const char *method, const char *uri,
                      bool updates) {
    for (int i = 0; i < MAX_PEERS; i++) {
        peer *p = &d->peers[i];
        mcp_writer w;
        bool listed = p->listen_id.len != 0;
        if (p->in < 0) continue;
        if (p->http && !p->listening) continue;
        if (listed && !(updates ? p->updates : p->tools)) continue;
        if (!listed && updates && !d->subscribed) continue;
        w_init(&w, &d->mem, MAX_BODY);
        mcp_w_object(&w);
        w_pair(&w, "jsonrpc", S("2.0"));
        w_pair(&w, "method", str_of(method));
        mcp_w_key(&w, "params");
        mcp_w_object(&w);
        if (uri) w_pair(&w, "uri", str_of(uri));
        if (listed) {
            mcp_w_key(&w, "_meta");
            mcp_w_object(&w);
            w_pair_raw(&w, META "subscriptionId", buf_str(&p->listen_id));
            mcp_w_end(&w);
        }
        mcp_w_end(&w);
        mcp_w_end(&w);
        send_note(p, w_str(&w));
        w_free(&w);
    }
}

//=============================================================================
// MARK: - Tools
//
// One for each thing a client has to handle: arguments of a type, a text, time
// and progress, a failure, a list that grows, a resource that changes.
//=============================================================================

typedef struct demo_tool {
    const char *name, *description, *schema;
} demo_tool;

static const demo_tool tools[] = {
    {"add", "Add two numbers and tell the sum",
     "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"number\","
     "\"description\":\"first number\"},\"b\":{\"type\":\"number\","
     "\"description\":\"second number\"}},\"required\":[\"a\",\"b\"]}"},
    {"echo", "Send a text back unchanged",
     "{\"type\":\"object\",\"properties\":{\"text\":{\"type\":\"string\"}},"
     "\"required\":[\"text\"]}"},
    {"slow", "Take some time and report progress on the way",
     "{\"type\":\"object\",\"properties\":{\"steps\":{\"type\":\"integer\","
     "\"description\":\"how many steps of 100 ms, at most 100\"}}}"},
    {"fail", "Always report that the tool failed",
     "{\"type\":\"object\",\"properties\":{}}"},
    {"grow", "Add one more tool to the list of tools",
     "{\"type\":\"object\",\"properties\":{}}"},
    {"touch", "Change the resource demo://clock",
     "{\"type\":\"object\",\"properties\":{}}"},
};

static void list_tool(mcp_writer *w, const char *name, const char *description,
                      const char *schema) {
    mcp_w_object(w);
    w_pair(w, "name", str_of(name));
    w_pair(w, "description", str_of(description));
    w_pair_raw(w, "inputSchema", str_of(schema));
    mcp_w_end(w);
}

// Two pages, so that a client has to follow the cursor.
static void list_tools(demo *d, peer *p, mcp_writer *w, mcp_json params) {
    bool second = str_is(mcp_view(mcp_get(params, "cursor")), "page-2");
    size_t from = second ? 3 : 0, to = second ? COUNT(tools) : 3;

    mcp_w_key(w, "tools");
    mcp_w_array(w);
    for (size_t i = from; i < to; i++)
        list_tool(w, tools[i].name, tools[i].description, tools[i].schema);
    for (int i = 1; second && i <= d->extra_tools; i++) {
        char name[32];
        snprintf(name, sizeof name, "extra_%d", i);
        list_tool(w, name, "A tool that was added later",
                  "{\"type\":\"object\",\"properties\":{}}");
    }
    mcp_w_end(w);
    if (!second) w_pair(w, "nextCursor", S("page-2"));
    cache_hints(p, w, LISTS_MS);
}

// It is answered later, by step_slow(), unless the client gives it up before.
static void start_slow(demo *d, peer *p, str id, mcp_json params) {
    int64_t steps = mcp_integer(mcp_pointer(params, "/arguments/steps"), 5);
    for (size_t i = 0; i < COUNT(d->timers); i++) {
        timer *t = &d->timers[i];
        if (t->used) continue;
        t->used = true;
        t->modern = p->modern;
        t->to = p;
        t->step = 0;
        t->steps = steps < 1 ? 1 : steps > 100 ? 100 : (int)steps;
        t->at = clock_ms() + STEP_MS;
        buf_clear(&t->id);
        buf_add(&t->id, id);
        buf_clear(&t->token);
        buf_add(&t->token,
                mcp_raw(mcp_pointer(params, "/_meta/progressToken")));
        return;
    }
    send_error(d, p, id, 200, E_INTERNAL, "too many slow calls at once");
}

// Progress only for who gave a token for it; after the last step the answer.
static void step_slow(demo *d, timer *t) {
    mcp_writer w;
    char text[64];

    t->to->modern = t->modern;
    t->step++;
    t->at = clock_ms() + STEP_MS;
    if (t->step < t->steps) {
        if (!t->token.len) return;
        w_init(&w, &d->mem, 4096);
        buf_fmt(&w.b, "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/"
                "progress\",\"params\":{\"progressToken\":%s,\"progress\":%d,"
                "\"total\":%d,\"message\":\"step %d\"}}", buf_z(&t->token),
                t->step, t->steps, t->step);
        send_note(t->to, buf_str(&w.b));
        w_free(&w);
        return;
    }
    t->used = false;
    snprintf(text, sizeof text, "done after %d steps", t->steps);
    begin_result(d, t->to, &w, buf_str(&t->id));
    text_result(&w, str_of(text), false);
    end_answer(d, t->to, &w);
}

// The sum as text for a model and as a number for a program.
static void call_add(mcp_writer *w, mcp_json args) {
    mcp_json a = mcp_get(args, "a"), b = mcp_get(args, "b");
    char text[64];

    if (mcp_typeof(a) != MCP_NUMBER || mcp_typeof(b) != MCP_NUMBER) {
        text_result(w, S("add needs two numbers, a and b"), true);
        return;
    }
    snprintf(text, sizeof text, "%.15g", mcp_number(a, 0) + mcp_number(b, 0));
    text_result(w, str_of(text), false);
    mcp_w_key(w, "structuredContent");
    mcp_w_object(w);
    w_pair_raw(w, "sum", str_of(text));
    mcp_w_end(w);
}

static bool known_tool(const demo *d, str name) {
    char extra[32];
    for (size_t i = 0; i < COUNT(tools); i++)
        if (str_is(name, tools[i].name)) return true;
    for (int i = 1; i <= d->extra_tools; i++) {
        snprintf(extra, sizeof extra, "extra_%d", i);
        if (str_is(name, extra)) return true;
    }
    return false;
}

// Who changes something tells all listeners before it answers.
static void call_tool(demo *d, peer *p, str id, mcp_json params) {
    str name = mcp_view(mcp_get(params, "name"));
    mcp_json args = mcp_get(params, "arguments");
    mcp_writer w;

    if (!known_tool(d, name)) {
        send_error(d, p, id, 200, E_PARAMS, "unknown tool");
        return;
    }
    if (str_is(name, "slow")) {
        start_slow(d, p, id, params);
        return;
    }
    if (str_is(name, "grow")) {
        d->extra_tools++;
        broadcast(d, "notifications/tools/list_changed", NULL, false);
    }
    if (str_is(name, "touch")) {
        d->touches++;
        broadcast(d, "notifications/resources/updated", "demo://clock", true);
    }
    begin_result(d, p, &w, id);
    if (str_is(name, "add"))
        call_add(&w, args);
    else if (str_is(name, "echo"))
        text_result(&w, mcp_view(mcp_get(args, "text")), false);
    else if (str_is(name, "fail"))
        text_result(&w, S("this tool always fails"), true);
    else
        text_result(&w, S("done"), false);
    end_answer(d, p, &w);
}

//=============================================================================
// MARK: - Resources
//
// A fixed one, one that changes, and a template with a variable to complete.
//=============================================================================

static void list_resources(mcp_writer *w) {
    mcp_w_key(w, "resources");
    w_raw(w, S("[{\"uri\":\"demo://readme\",\"name\":\"readme\",\"title\":"
               "\"About this server\",\"description\":\"What the demo server "
               "offers\",\"mimeType\":\"text/plain\"},{\"uri\":\"demo://clock\""
               ",\"name\":\"clock\",\"description\":\"A value that the tool "
               "touch changes\",\"mimeType\":\"application/json\"}]"));
}

static void list_templates(mcp_writer *w) {
    mcp_w_key(w, "resourceTemplates");
    w_raw(w, S("[{\"uriTemplate\":\"demo://colors/{name}\",\"name\":\"color\","
               "\"description\":\"One color by its name\",\"mimeType\":"
               "\"application/json\"}]"));
}

// The text of a resource into `out`; false if there is none of that name.
static bool resource_text(const demo *d, str uri, buf *out) {
    if (str_is(uri, "demo://readme")) {
        buf_add(out, S("A small MCP server in C.\nCall add, echo, slow, fail, "
                       "grow or touch; read demo://colors/{name}.\n"));
        return true;
    }
    if (str_is(uri, "demo://clock")) {
        buf_fmt(out, "{\"touched\":%d}", d->touches);
        return true;
    }
    for (size_t i = 0; i < COUNT(colors); i++) {
        char full[64];
        snprintf(full, sizeof full, "demo://colors/%s", colors[i]);
        if (!str_is(uri, full)) continue;
        buf_fmt(out, "{\"color\":\"%s\",\"letters\":%zu}", colors[i],
                strlen(colors[i]));
        return true;
    }
    return false;
}

static void read_resource(demo *d, peer *p, str id, mcp_json params) {
    str uri = mcp_view(mcp_get(params, "uri"));
    buf text;
    mcp_writer w;

    buf_init(&text, &d->mem, 4096);
    if (!resource_text(d, uri, &text)) {
        send_error(d, p, id, 200, p->modern ? E_PARAMS : E_NO_RESOURCE,
                   "resource not found");
        buf_free(&text);
        return;
    }
    begin_result(d, p, &w, id);
    mcp_w_key(&w, "contents");
    mcp_w_array(&w);
    mcp_w_object(&w);
    w_pair(&w, "uri", uri);
    w_pair(&w, "mimeType", str_is(uri, "demo://readme")
                               ? S("text/plain") : S("application/json"));
    w_pair(&w, "text", buf_str(&text));
    mcp_w_end(&w);
    mcp_w_end(&w);
    cache_hints(p, &w, 0);
    end_answer(d, p, &w);
    buf_free(&text);
}

// The colors that begin as the value does.
static void complete(demo *d, peer *p, str id, mcp_json params) {
    str head = mcp_view(mcp_pointer(params, "/argument/value"));
    int total = 0;
    mcp_writer w;

    begin_result(d, p, &w, id);
    mcp_w_key(&w, "completion");
    mcp_w_object(&w);
    mcp_w_key(&w, "values");
    mcp_w_array(&w);
    for (size_t i = 0; i < COUNT(colors); i++) {
        if (!str_starts(str_of(colors[i]), head)) continue;
        mcp_w_string(&w, colors[i]);
        total++;
    }
    mcp_w_end(&w);
    w_pair_int(&w, "total", total);
    w_pair_bool(&w, "hasMore", false);
    mcp_w_end(&w);
    end_answer(d, p, &w);
}

//=============================================================================
// MARK: - Requests
//
// The era is the request's, not the connection's: a modern one carries its
// version in _meta, a legacy one said it once, in initialize.
//=============================================================================

static const char capabilities[] =
    "{\"tools\":{\"listChanged\":true},\"resources\":{\"subscribe\":true,"
    "\"listChanged\":true},\"completions\":{}}";

// A version we do not know is answered with our newest; the client decides.
static void initialize(demo *d, peer *p, str id, mcp_json params) {
    static const char *const known[] = {"2025-11-25", "2025-06-18",
                                        "2025-03-26", "2024-11-05"};
    str asked = mcp_view(mcp_get(params, "protocolVersion"));
    const char *version = known[0];
    mcp_writer w;

    if (d->modern_only) {
        send_error(d, p, id, 400, E_VERSION, "only " MODERN " is spoken here");
        return;
    }
    for (size_t i = 0; i < COUNT(known); i++)
        if (str_is(asked, known[i])) version = known[i];
    begin_result(d, p, &w, id);
    w_pair(&w, "protocolVersion", str_of(version));
    w_pair_raw(&w, "capabilities", S(capabilities));
    w_pair_raw(&w, "serverInfo",
               S("{\"name\":\"demo\",\"version\":\"" MCP_VERSION "\"}"));
    w_pair(&w, "instructions", S("Ask for colors by name."));
    end_answer(d, p, &w);
}

static void discover(demo *d, peer *p, str id) {
    mcp_writer w;
    begin_result(d, p, &w, id);
    w_pair_raw(&w, "supportedVersions",
               d->modern_only ? S("[\"" MODERN "\"]")
                              : S("[\"" MODERN "\",\"2025-11-25\"]"));
    w_pair_raw(&w, "capabilities", S(capabilities));
    w_pair(&w, "instructions", S("Ask for colors by name."));
    cache_hints(p, &w, LISTS_MS);
    end_answer(d, p, &w);
}

// The stream stays open; its first message says what was granted.
static void listen_modern(demo *d, peer *p, str id, mcp_json params) {
    mcp_json want = mcp_get(params, "notifications");
    mcp_writer w;

    p->listening = true;
    p->tools = mcp_boolean(mcp_get(want, "toolsListChanged"), false);
    p->updates = mcp_length(mcp_get(want, "resourceSubscriptions")) > 0;
    buf_clear(&p->listen_id);
    buf_add(&p->listen_id, id);
    w_init(&w, &d->mem, MAX_BODY);
    mcp_w_object(&w);
    w_pair(&w, "jsonrpc", S("2.0"));
    w_pair(&w, "method", S("notifications/subscriptions/acknowledged"));
    mcp_w_key(&w, "params");
    mcp_w_object(&w);
    mcp_w_key(&w, "_meta");
    mcp_w_object(&w);
    w_pair_raw(&w, META "subscriptionId", id);
    mcp_w_end(&w);
    mcp_w_key(&w, "notifications");
    w_value(&w, want);
    mcp_w_end(&w);
    mcp_w_end(&w);
    send_note(p, w_str(&w));
    w_free(&w);
}

typedef enum method {
    M_DISCOVER, M_INITIALIZE, M_PING, M_TOOLS, M_CALL, M_RESOURCES,
    M_TEMPLATES, M_READ, M_COMPLETE, M_LISTEN, M_SUBSCRIBE, M_UNSUBSCRIBE,
    M_UNKNOWN
} method;

// In the order of the enum; a method of the other era is no method.
static const struct {
    const char *name;
    bool modern, legacy;
} methods[] = {
    {"server/discover", true, false}, {"initialize", false, true},
    {"ping", false, true},            {"tools/list", true, true},
    {"tools/call", true, true},       {"resources/list", true, true},
    {"resources/templates/list", true, true},
    {"resources/read", true, true},   {"completion/complete", true, true},
    {"subscriptions/listen", true, false},
    {"resources/subscribe", false, true},
    {"resources/unsubscribe", false, true},
};

static method method_of(str name, bool modern) {
    for (size_t i = 0; i < COUNT(methods); i++)
        if (str_is(name, methods[i].name) &&
            (modern ? methods[i].modern : methods[i].legacy))
            return (method)i;
    return M_UNKNOWN;
}

static void empty_result(demo *d, peer *p, str id) {
    mcp_writer w;
    begin_result(d, p, &w, id);
    end_answer(d, p, &w);
}

static void list(demo *d, peer *p, str id, method which, mcp_json params) {
    mcp_writer w;
    begin_result(d, p, &w, id);
    if (which == M_TOOLS) {
        list_tools(d, p, &w, params);
    } else {
        if (which == M_RESOURCES) list_resources(&w);
        else list_templates(&w);
        cache_hints(p, &w, LISTS_MS);
    }
    end_answer(d, p, &w);
}

static void answer(demo *d, peer *p, str id, str name, mcp_json params) {
    method which = method_of(name, p->modern);
    switch (which) {
    case M_DISCOVER: discover(d, p, id); return;
    case M_INITIALIZE: initialize(d, p, id, params); return;
    case M_TOOLS: case M_RESOURCES: case M_TEMPLATES:
        list(d, p, id, which, params);
        return;
    case M_CALL: call_tool(d, p, id, params); return;
    case M_READ: read_resource(d, p, id, params); return;
    case M_COMPLETE: complete(d, p, id, params); return;
    case M_LISTEN: listen_modern(d, p, id, params); return;
    case M_SUBSCRIBE: case M_UNSUBSCRIBE:
        d->subscribed = which == M_SUBSCRIBE;
        empty_result(d, p, id);
        return;
    case M_PING: empty_result(d, p, id); return;
    case M_UNKNOWN: break;
    }
    send_error(d, p, id, 404, E_METHOD, "method not found");
}

// Forget the slow call or the listening that the client gave up.
static void cancel(demo *d, peer *p, mcp_json params) {
    str id = mcp_raw(mcp_get(params, "requestId"));
    for (size_t i = 0; i < COUNT(d->timers); i++)
        if (d->timers[i].used && str_eq(buf_str(&d->timers[i].id), id))
            d->timers[i].used = false;
    if (str_eq(buf_str(&p->listen_id), id)) {
        buf_clear(&p->listen_id);
        p->listening = false;
    }
}

// `header` is the method told in Mcp-Method, empty on stdio. A proxy may have
// judged by it, so it has to be the one in the body.
static void receive(demo *d, peer *p, str text, str header) {
    mcp_doc *doc;
    mcp_json msg, params;
    str id, name, version;

    if (json_parse(&d->mem, text, &doc, NULL, NULL)) {
        p->modern = false;
        if (p->http) send_error(d, p, S("null"), 400, E_PARSE, "not JSON");
        return;
    }
    msg = json_root(doc);
    params = mcp_get(msg, "params");
    name = mcp_view(mcp_get(msg, "method"));
    id = mcp_raw(mcp_get(msg, "id"));
    version = mcp_view(json_get(mcp_get(params, "_meta"),
                                S(META "protocolVersion")));
    p->modern = version.len && !d->legacy_only;
    if (!name.len || !id.len) {
        if (str_is(name, "notifications/cancelled")) cancel(d, p, params);
        if (p->http) http_reply(p, 202, NULL, S(""));
    } else if (p->modern && !str_is(version, MODERN)) {
        send_error(d, p, id, 400, E_VERSION, "unsupported protocol version");
    } else if (p->modern && p->http && !str_eq(header, name)) {
        send_error(d, p, id, 400, E_HEADER,
                   "Mcp-Method does not fit the body");
    } else if (!p->modern && d->modern_only &&
               !str_is(name, "initialize")) {
        send_error(d, p, id, 400, E_VERSION, "only " MODERN " is spoken here");
    } else {
        answer(d, p, id, name, params);
    }
    json_free(doc);
}

//=============================================================================
// MARK: - Reading
//
// On stdio a message is a line; over HTTP a head, and a body of the length that
// the head tells. Both may come in any pieces, or several at once.
//=============================================================================

// Its slow calls go with it: nobody is left to be answered.
static void drop_peer(demo *d, peer *p) {
    for (size_t i = 0; i < COUNT(d->timers); i++)
        if (d->timers[i].to == p) d->timers[i].used = false;
    if (p->in >= 0) close(p->in);
    p->in = p->out = -1;
    p->listening = p->streaming = false;
    buf_free(&p->in_data);
    buf_free(&p->out_data);
    buf_free(&p->listen_id);
}

// False: a line is too long to hold.
static bool take_lines(demo *d, peer *p) {
    char *end;
    while (p->in_data.len &&
           (end = memchr(p->in_data.ptr, '\n', p->in_data.len))) {
        size_t n = (size_t)(end - p->in_data.ptr);
        receive(d, p, str_make(p->in_data.ptr, n), S(""));
        buf_drop(&p->in_data, n + 1);
    }
    return !p->in_data.err;
}

// The value of a header, empty if there is none; names in any case (RFC 9110).
static str head_value(str head, const char *name) {
    str line, value;
    while (head.len) {
        str key;
        str_cut(head, '\n', &line, &head);
        if (str_cut(str_trim(line), ':', &key, &value) &&
            str_eq_nocase(key, str_of(name)))
            return str_trim(value);
    }
    return S("");
}

// One request. A client that names a session which is not ours has to begin
// anew, as after a restart of the server.
static void serve_http(demo *d, peer *p, str head, str body) {
    str asked = head_value(head, "mcp-session-id");
    bool right = !asked.len || str_is(asked, d->session);

    p->modern = false;
    if (!right) {
        send_error(d, p, S("null"), 404, E_NO_SESSION, "no such session");
    } else if (str_starts(head, S("POST "))) {
        receive(d, p, body, head_value(head, "mcp-method"));
    } else if (str_starts(head, S("GET ")) && asked.len) {
        p->listening = true;
        begin_stream(p);
        buf_add(&p->out_data, S("4\r\n:ok\n\r\n"));
        flush_peer(p);
    } else if (str_starts(head, S("DELETE "))) {
        http_reply(p, 200, NULL, S(""));
    } else {
        http_reply(p, 405, NULL, S(""));
    }
}

// False: head or body is too long to hold.
static bool take_http(demo *d, peer *p) {
    for (;;) {
        str all = buf_str(&p->in_data), head;
        size_t n = all.len ? str_find(all, S("\r\n\r\n")) : SIZE_MAX;
        uint64_t length = 0;
        if (n == SIZE_MAX) return all.len < MAX_HEAD;
        head = str_head(all, n);
        str_to_u64(head_value(head, "content-length"), MAX_BODY, &length);
        if (all.len < n + 4 + length) return !p->in_data.err;
        serve_http(d, p, head, str_head(str_skip(all, n + 4), (size_t)length));
        buf_drop(&p->in_data, n + 4 + (size_t)length);
    }
}

// False: the peer is gone.
static bool read_peer(demo *d, peer *p) {
    char block[65536];
    ssize_t n = read(p->in, block, sizeof block);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    if (n == 0) return false;
    buf_add(&p->in_data, str_make(block, (size_t)n));
    return p->http ? take_http(d, p) : take_lines(d, p);
}

// NULL: all places are taken, and the caller closes the connection.
static peer *new_peer(demo *d, int in, int out, bool http) {
    for (int i = 0; i < MAX_PEERS; i++) {
        peer *p = &d->peers[i];
        if (p->in >= 0) continue;
        memset(p, 0, sizeof *p);
        p->in = in;
        p->out = out;
        p->http = http;
        buf_init(&p->in_data, &d->mem, MAX_BODY + MAX_HEAD);
        buf_init(&p->out_data, &d->mem, 4 * MAX_BODY);
        buf_init(&p->listen_id, &d->mem, 256);
        return p;
    }
    return NULL;
}

//=============================================================================
// MARK: - Main
//=============================================================================

// Loopback alone; port 0 lets the system choose, so the URL is printed.
static bool listen_on(demo *d, int port) {
    struct sockaddr_in a;
    socklen_t n = sizeof a;
    int one = 1;

    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_port = htons((uint16_t)port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    d->listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(d->listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(d->listener, (struct sockaddr *)&a, sizeof a) ||
        listen(d->listener, 16) ||
        getsockname(d->listener, (struct sockaddr *)&a, &n))
        return false;
    printf("http://127.0.0.1:%d/mcp\n", ntohs(a.sin_port));
    return fflush(stdout) == 0;
}

static void accept_peer(demo *d) {
    int fd = accept(d->listener, NULL, NULL);
    if (fd < 0) return;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    if (!new_peer(d, fd, fd, true)) close(fd);
}

// Do what is due; how long until the next, -1: for ever.
static int next_timer(demo *d, int64_t now) {
    int wait = -1;
    for (size_t i = 0; i < COUNT(d->timers); i++) {
        timer *t = &d->timers[i];
        if (t->used && t->at <= now) step_slow(d, t);
        if (t->used && (wait < 0 || t->at - now < wait))
            wait = t->at > now ? (int)(t->at - now) : 0;
    }
    return wait;
}

// All peers that are there into both arrays, and what can be sent is sent. One
// that cannot take all is tried again a little later: its descriptor to write
// to may be another than the one to read from.
static nfds_t gather(demo *d, struct pollfd *fds, peer **who, int *wait) {
    nfds_t n = 0;
    for (int i = 0; i < MAX_PEERS; i++) {
        peer *p = &d->peers[i];
        if (p->in < 0) continue;
        who[n] = p;
        fds[n].fd = p->in;
        fds[n++].events = POLLIN;
        if (p->out_data.len) flush_peer(p);
        if (p->out_data.len && (*wait < 0 || *wait > FULL_MS)) *wait = FULL_MS;
    }
    return n;
}

// Until standard input ends, or for ever when it listens.
static void run(demo *d) {
    for (;;) {
        struct pollfd fds[MAX_PEERS + 1];
        peer *who[MAX_PEERS];
        int wait = next_timer(d, clock_ms());
        nfds_t n = gather(d, fds, who, &wait);

        if (!n && d->listener < 0) return;
        fds[n].fd = d->listener;
        fds[n].events = POLLIN;
        if (poll(fds, n + 1, wait) < 0 && errno != EINTR) return;
        for (nfds_t i = 0; i < n; i++)
            if (fds[i].revents && !read_peer(d, who[i])) drop_peer(d, who[i]);
        if (d->listener >= 0 && fds[n].revents) accept_peer(d);
    }
}

// Random, so that nobody else on the machine can guess it.
static void make_session(demo *d) {
    static const char hex[] = "0123456789abcdef";
    unsigned char raw[16] = {0};
    int fd = open("/dev/urandom", O_RDONLY);
    if (fd >= 0 && read(fd, raw, sizeof raw) < 0) raw[0] = 1;
    if (fd >= 0) close(fd);
    for (size_t i = 0; i < sizeof raw; i++) {
        d->session[2 * i] = hex[raw[i] >> 4];
        d->session[2 * i + 1] = hex[raw[i] & 15];
    }
}

int main(int argc, char **argv) {
    static demo d;
    bool http = false;
    int port = 0;

    mem_init(&d.mem, NULL, NULL);
    d.listener = -1;
    for (int i = 0; i < MAX_PEERS; i++) d.peers[i].in = -1;
    for (size_t i = 0; i < COUNT(d.timers); i++) {
        buf_init(&d.timers[i].id, &d.mem, 256);
        buf_init(&d.timers[i].token, &d.mem, 256);
    }
    for (int i = 1; i < argc; i++) {
        uint64_t n;
        if (strcmp(argv[i], "--http") == 0) http = true;
        else if (strcmp(argv[i], "--legacy") == 0) d.legacy_only = true;
        else if (strcmp(argv[i], "--modern") == 0) d.modern_only = true;
        else if (http && str_to_u64(str_of(argv[i]), 65535, &n)) port = (int)n;
        else return fprintf(stderr, "usage: demo_server [--http [PORT]] "
                                    "[--legacy | --modern]\n"), 2;
    }
    signal(SIGPIPE, SIG_IGN);
    make_session(&d);
    if (http ? !listen_on(&d, port) : !new_peer(&d, 0, 1, false))
        return perror("demo_server"), 1;
    run(&d);
    for (int i = 0; i < MAX_PEERS; i++) drop_peer(&d, &d.peers[i]);
    for (size_t i = 0; i < COUNT(d.timers); i++) {
        buf_free(&d.timers[i].id);
        buf_free(&d.timers[i].token);
    }
    return 0;
}
