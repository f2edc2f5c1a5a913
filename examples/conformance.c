// conformance.c - the client that the official MCP conformance suite drives.
//
//   conformance [-v] URL      the suite appends the URL of its fake server
//
// Which scenario it is stands in the environment: MCP_CONFORMANCE_SCENARIO, its
// data as JSON in MCP_CONFORMANCE_CONTEXT, the protocol that is to be spoken in
// MCP_CONFORMANCE_PROTOCOL_VERSION. The table near the end says what is done in
// each; everything goes through mcp.h, as in any other program. Exit status 0:
// it went as the scenario wants, which may be a refusal. -v: the messages on
// the wire, on stderr.
//
// The suite watches from the side of the server: what it asks for is proved by
// what the library sends, so that here little more is found than "call this".
#include <bearssl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mcp.h"

// Nobody listens there: the callback is taken from a redirect. Nor is the
// document ever fetched; the suite knows its name.
#define REDIRECT "http://localhost:3000/callback"
#define DOCUMENT "https://conformance-test.local/client-metadata.json"

enum { MAX_PAGE = 16 << 10, MAX_HOST = 256 };

typedef struct driver driver;

// One field of the server's entry in the configuration: a member of the
// scenario's context, or a fixed value.
typedef struct entry_field {
    const char *name, *member;
    const char *json;           // instead of `member`
} entry_field;

typedef struct scenario {
    const char *name;
    mcp_code (*play)(driver *d);
    const char *tool;           // for those who need to know one
    const char *args;
    mcp_code end;               // how it has to end
    const entry_field *fields;  // of the entry, beside its URL
    bool no_document;           // the client has no metadata document
} scenario;

struct driver {
    mcp *m;
    const scenario *now;
    mcp_result *context;        // mcp_root() of NULL is missing: that is fine
    const char *why;            // a refusal of our own
    bool verbose;
    uint64_t ask, beside;       // answers_rounds(): who waits for whom
};

//=============================================================================
// MARK: - Browser
//
// The person and the browser in one: the suite's authorization server agrees at
// once and redirects. Following that is not our part; where it leads to is the
// callback, and the library checks it.
//=============================================================================

// "http://HOST:PORT/REST" in its pieces.
static bool cut_url(const char *url, char *host, char *port,
                    const char **rest) {
    const char *from = url + 7, *slash, *colon;
    if (strncmp(url, "http://", 7) || !(slash = strchr(from, '/')))
        return false;
    colon = memchr(from, ':', (size_t)(slash - from));
    if (!colon || colon - from >= MAX_HOST || slash - colon > 6) return false;
    snprintf(host, MAX_HOST, "%.*s", (int)(colon - from), from);
    snprintf(port, 8, "%.*s", (int)(slash - colon - 1), colon + 1);
    *rest = slash;
    return true;
}

// "localhost" may be ::1 or 127.0.0.1: the first one that answers.
static int dial(const char *host, const char *port) {
    struct addrinfo hint = {0}, *all, *a;
    int fd = -1;
    hint.ai_socktype = SOCK_STREAM;
    if (getaddrinfo(host, port, &hint, &all)) return -1;
    for (a = all; a && fd < 0; a = a->ai_next) {
        fd = socket(a->ai_family, a->ai_socktype, a->ai_protocol);
        if (fd >= 0 && connect(fd, a->ai_addr, a->ai_addrlen)) {
            close(fd);
            fd = -1;
        }
    }
    freeaddrinfo(all);
    return fd;
}

// One GET, until the other side closes. False: no whole head of an answer.
static bool get_page(const char *url, char *page) {
    char host[MAX_HOST], port[8];
    const char *rest;
    size_t have = 0;
    ssize_t n = 0;
    int fd;
    if (!cut_url(url, host, port, &rest) || (fd = dial(host, port)) < 0)
        return false;
    dprintf(fd, "GET %s HTTP/1.1\r\nHost: %s:%s\r\nConnection: close\r\n\r\n",
            rest, host, port);
    while (have < MAX_PAGE - 1 &&
           (n = read(fd, page + have, MAX_PAGE - 1 - have)) > 0)
        have += (size_t)n;
    close(fd);
    page[have] = 0;
    return strstr(page, "\r\n\r\n") != NULL;
}

// The value of Location, ended with NUL in its place.
static char *redirect_of(char *page) {
    for (char *line = page; (line = strstr(line, "\r\n")) && line[2] != '\r';) {
        line += 2;
        if (strncasecmp(line, "location:", 9)) continue;
        line += 9 + strspn(line + 9, " ");
        line[strcspn(line, "\r\n")] = 0;
        return line;
    }
    return NULL;
}

// Where the browser would end, as the answer to MCP_ASK_SIGN_IN.
static void sign_in(driver *d, const mcp_event *ev) {
    char *page = malloc(MAX_PAGE), *to = NULL;
    mcp_writer *w = mcp_w_new(d->m);
    const char *url = mcp_string(mcp_get(ev->request, "url"), "");
    if (page && w && get_page(url, page)) to = redirect_of(page);
    if (to) {
        mcp_w_object(w);
        mcp_w_key(w, "callback");
        mcp_w_string(w, to);
        mcp_w_end(w);
    } else {
        d->why = "no redirect came";
    }
    mcp_answer(d->m, ev->id, to ? mcp_w_text(w) : NULL);
    mcp_w_free(w);
    free(page);
}

//=============================================================================
// MARK: - Questions
//
// Who answers here agrees to everything: a form is sent back empty, for the
// library fills in the defaults of the server's schema.
//=============================================================================

static const char confirmed[] =
    "{\"action\":\"accept\",\"content\":{\"confirmed\":true}}";

static bool wants_confirmation(mcp_json request) {
    return mcp_exists(
        mcp_pointer(request, "/requestedSchema/properties/confirmed"));
}

// While the first question of a multi-round call is open, another call goes to
// the same server: neither may hear of what belongs to the other.
static void confirm_later(driver *d, uint64_t id) {
    if (d->beside || mcp_submit(d->m, MCP_DO_CALL, "peer.test_mrtr_unrelated",
                                NULL, &d->beside)) {
        mcp_answer(d->m, id, confirmed);
        return;
    }
    d->ask = id;
}

static void asked(driver *d, const mcp_event *ev) {
    switch (ev->ask) {
    case MCP_ASK_SIGN_IN: sign_in(d, ev); return;
    case MCP_ASK_ROOTS: mcp_answer(d->m, ev->id, "{\"roots\":[]}"); return;
    case MCP_ASK_SAMPLE: mcp_answer(d->m, ev->id, NULL); return;
    case MCP_ASK_ELICIT: break;
    }
    if (wants_confirmation(ev->request))
        confirm_later(d, ev->id);
    else
        mcp_answer(d->m, ev->id, "{\"action\":\"accept\",\"content\":{}}");
}

static void on_event(void *user, const mcp_event *ev) {
    driver *d = user;
    if (ev->type == MCP_EV_ASK) asked(d, ev);
    if (ev->type == MCP_EV_DONE && ev->id == d->beside && d->ask) {
        mcp_answer(d->m, d->ask, confirmed);
        d->ask = 0;
    }
    if (d->verbose || ev->type == MCP_EV_WARNING)
        fprintf(stderr, "%s %.*s\n", ev->outgoing ? ">" : "<",
                MCP_ARG(ev->text));
}

//=============================================================================
// MARK: - Steps
//=============================================================================

// Call and look at nothing but whether it worked.
static mcp_code call(driver *d, const char *tool, const char *args) {
    char id[300];
    mcp_result *r = NULL;
    mcp_code rc;
    snprintf(id, sizeof id, "peer.%s", tool);
    rc = mcp_call(d->m, id, args, &r);
    if (!rc && mcp_is_error(r)) rc = MCP_TOOL_ERROR;
    mcp_free(r);
    return rc;
}

// `use` is given each item of a list; the first failure ends it.
static mcp_code each(driver *d, mcp_kind kind,
                     mcp_code (*use)(driver *d, mcp_json item)) {
    mcp_result *r = NULL;
    mcp_code rc = mcp_list(d->m, "peer", kind, &r);
    mcp_json t = mcp_first(mcp_root(r));
    for (; !rc && mcp_exists(t); t = mcp_next(t)) rc = use(d, t);
    mcp_free(r);
    return rc;
}

static mcp_code ignore_item(driver *d, mcp_json item) {
    (void)d, (void)item;
    return MCP_OK;
}

// Any value will do for what a tool requires.
static mcp_code call_item(driver *d, mcp_json tool) {
    mcp_writer *w = mcp_w_new(d->m);
    mcp_json need = mcp_first(mcp_pointer(tool, "/inputSchema/required"));
    const char *args;
    mcp_code rc;
    if (!w) return MCP_OUT_OF_MEMORY;
    mcp_w_object(w);
    for (; mcp_exists(need); need = mcp_next(need)) {
        mcp_w_key(w, mcp_string(need, ""));
        mcp_w_string(w, "any");
    }
    mcp_w_end(w);
    args = mcp_w_text(w);
    rc = args ? call(d, mcp_string(mcp_get(tool, "name"), ""), args)
              : MCP_OUT_OF_MEMORY;
    mcp_w_free(w);
    return rc;
}

static mcp_code read_item(driver *d, mcp_json resource) {
    mcp_result *r;
    mcp_code rc = mcp_read(d->m, "peer", mcp_string(mcp_get(resource, "uri"),
                                                    ""), NULL, &r);
    mcp_free(r);
    return rc;
}

static mcp_code prompt_item(driver *d, mcp_json prompt) {
    mcp_result *r;
    mcp_code rc = mcp_prompt(d->m, "peer", mcp_string(mcp_get(prompt, "name"),
                                                      ""), NULL, &r);
    mcp_free(r);
    return rc;
}

//=============================================================================
// MARK: - Skills
//
// An extension that the library does not know: mcp_request() and mcp_read() are
// enough for it. An entry of skills/list names each file with its length and
// SHA-256; the main one begins with the front matter the entry has as well. A
// file that differs is refused, and no other of that skill is read.
//=============================================================================

// "sha256:" and the hash in hex, as it stands in an entry.
static bool digest_fits(mcp_str text, const char *want) {
    br_sha256_context sha;
    unsigned char sum[br_sha256_SIZE];
    char hex[7 + 2 * br_sha256_SIZE + 1] = "sha256:";
    br_sha256_init(&sha);
    br_sha256_update(&sha, text.ptr, text.len);
    br_sha256_out(&sha, sum);
    for (size_t i = 0; i < sizeof sum; i++)
        snprintf(hex + 7 + 2 * i, 3, "%02x", sum[i]);
    return !strcmp(hex, want);
}

// Is "key: value" a line of the block between the two "---"? Of YAML only what
// a front matter of plain texts needs; any other spelling does not fit.
static bool matter_has(const char *text, mcp_json member) {
    const char *key = mcp_key(member), *want = mcp_string(member, "");
    size_t k = strlen(key), n = strlen(want);
    if (strncmp(text, "---\n", 4)) return false;
    for (text += 4; *text && strncmp(text, "---", 3);
         text += strcspn(text, "\n"), text += *text == '\n') {
        if (strncmp(text, key, k) || strncmp(text + k, ": ", 2)) continue;
        return strcspn(text, "\n") == k + 2 + n &&
               !memcmp(text + k + 2, want, n);
    }
    return false;
}

static bool skill_file_fits(mcp_str text, mcp_json skill, mcp_json file) {
    mcp_json member = mcp_first(mcp_get(skill, "frontmatter"));
    if ((int64_t)text.len != mcp_integer(mcp_get(file, "size"), -1) ||
        !digest_fits(text, mcp_string(mcp_get(file, "digest"), "")))
        return false;
    if (strcmp(mcp_string(mcp_get(file, "uri"), ""),
               mcp_string(mcp_get(skill, "uri"), "?")))
        return true;  // only the main file has a front matter
    for (; mcp_exists(member); member = mcp_next(member))
        if (!matter_has(text.ptr, member)) return false;
    return true;
}

static mcp_code load_skill(driver *d, mcp_json skill) {
    mcp_json file = mcp_first(mcp_get(skill, "resources"));
    for (; mcp_exists(file); file = mcp_next(file)) {
        mcp_result *r = NULL;
        mcp_code rc = mcp_read(d->m, "peer",
                               mcp_string(mcp_get(file, "uri"), ""), NULL, &r);
        mcp_str text = mcp_view(mcp_pointer(mcp_root(r), "/contents/0/text"));
        if (!rc && (!text.ptr || !skill_file_fits(text, skill, file))) {
            d->why = "a file of the skill is not what its entry says";
            rc = MCP_RESOURCE_INVALID;
        }
        mcp_free(r);
        if (rc) return rc;
    }
    return MCP_OK;
}

static mcp_code each_skill(driver *d,
                           mcp_code (*use)(driver *d, mcp_json item)) {
    mcp_result *r = NULL;
    mcp_code rc = mcp_request(d->m, "peer", "skills/list", NULL, &r);
    mcp_json skill = mcp_first(mcp_get(mcp_root(r), "skills"));
    for (; !rc && mcp_exists(skill); skill = mcp_next(skill))
        rc = use(d, skill);
    mcp_free(r);
    return rc;
}

//=============================================================================
// MARK: - Scenarios
//=============================================================================

static mcp_code lists(driver *d) {
    return each(d, MCP_TOOLS, ignore_item);
}

// The row's tool with the row's arguments. Connecting, signing in and listing
// come by themselves.
static mcp_code calls(driver *d) {
    return call(d, d->now->tool, d->now->args);
}

// The context has the calls to make, their arguments byte for byte.
static mcp_code calls_as_told(driver *d) {
    mcp_json c = mcp_first(mcp_get(mcp_root(d->context), "toolCalls"));
    mcp_code rc = MCP_OK;
    for (; !rc && mcp_exists(c); c = mcp_next(c)) {
        mcp_str raw = mcp_raw(mcp_get(c, "arguments"));
        char *args = malloc(raw.len + 1);
        if (!args) return MCP_OUT_OF_MEMORY;
        memcpy(args, raw.ptr, raw.len);
        args[raw.len] = 0;
        rc = call(d, mcp_string(mcp_get(c, "name"), ""), args);
        free(args);
    }
    return rc;
}

// Tools the library has dropped are not in the list.
static mcp_code calls_each(driver *d) {
    return each(d, MCP_TOOLS, call_item);
}

static mcp_code uses_everything(driver *d) {
    mcp_code rc = calls_each(d);
    if (!rc) rc = each(d, MCP_RESOURCES, read_item);
    return rc ? rc : each(d, MCP_PROMPTS, prompt_item);
}

// The schema of the row's tool goes back to the server as it came.
static mcp_code echo_schema(driver *d, mcp_json tool) {
    mcp_str raw = mcp_raw(mcp_get(tool, "inputSchema"));
    char *args;
    mcp_code rc;
    if (strcmp(mcp_string(mcp_get(tool, "name"), ""), d->now->tool))
        return MCP_OK;
    args = malloc(raw.len + 20);
    if (!args) return MCP_OUT_OF_MEMORY;
    snprintf(args, raw.len + 20, "{\"schema\":%.*s}", MCP_ARG(raw));
    rc = call(d, "json_schema_echo", args);
    free(args);
    return rc;
}

static mcp_code echoes_schema(driver *d) {
    return each(d, MCP_TOOLS, echo_schema);
}

// Multi-round requests: on_event() answers what each call asks for.
static mcp_code answers_rounds(driver *d) {
    static const char *const tools[] = {"test_mrtr_echo_state",
                                        "test_mrtr_no_state",
                                        "test_mrtr_no_result_type"};
    mcp_code rc = MCP_OK;
    for (size_t i = 0; !rc && i < sizeof tools / sizeof *tools; i++)
        rc = call(d, tools[i], NULL);
    return rc;
}

static mcp_code lists_skills(driver *d) {
    return each_skill(d, ignore_item);
}

static mcp_code loads_skills(driver *d) {
    return each_skill(d, load_skill);
}

static const entry_field registered[] = {
    {"oauthClientId", "client_id", NULL},
    {"oauthClientSecret", "client_secret", NULL},
    {"oauthIssuer", "issuer", NULL},
    {NULL, NULL, NULL}};
static const entry_field by_secret[] = {
    {"oauthGrant", NULL, "\"client_credentials\""},
    {"oauthClientId", "client_id", NULL},
    {"oauthClientSecret", "client_secret", NULL},
    {NULL, NULL, NULL}};
static const entry_field by_key[] = {
    {"oauthGrant", NULL, "\"client_credentials\""},
    {"oauthClientId", "client_id", NULL},
    {"oauthPrivateKey", "private_key_pem", NULL},
    {NULL, NULL, NULL}};
static const entry_field by_workload[] = {
    {"oauthGrant", NULL, "\"jwt_bearer\""},
    {"oauthClientId", "client_id", NULL},
    {"oauthAssertion", "valid_jwt", NULL},
    {NULL, NULL, NULL}};
static const entry_field by_enterprise[] = {
    {"oauthGrant", NULL, "\"enterprise\""},
    {"oauthClientId", "client_id", NULL},
    {"oauthClientSecret", "client_secret", NULL},
    {"oauthIdToken", "idp_id_token", NULL},
    {"oauthIdpTokenUrl", "idp_token_endpoint", NULL},
    {"oauthIdpClientId", "idp_client_id", NULL},
    {NULL, NULL, NULL}};
static const entry_field bound[] = {
    {"oauthDpop", NULL, "true"},
    {NULL, NULL, NULL}};

// What stands behind each sign-in.
#define GUARDED .play = calls, .tool = "test-tool"

// The first row that fits counts.
static const scenario scenarios[] = {
    {.name = "initialize", .play = lists},
    {.name = "tools_call", .play = calls, .tool = "add_numbers",
     .args = "{\"a\":5,\"b\":3}"},
    {.name = "elicitation-sep1034-client-defaults", .play = calls,
     .tool = "test_client_elicitation_defaults"},
    {.name = "sse-retry", .play = calls, .tool = "test_reconnection"},
    {.name = "request-metadata", .play = lists},
    {.name = "json-schema-ref-no-deref", .play = lists},
    {.name = "json-schema-2020-12-preservation", .play = echoes_schema,
     .tool = "json_schema_2020_12_tool"},
    {.name = "http-standard-headers", .play = uses_everything},
    {.name = "http-custom-headers", .play = calls_as_told},
    {.name = "http-invalid-tool-headers", .play = calls_each},
    {.name = "sep-2322-client-request-state", .play = answers_rounds},

    {.name = "sep-2640-client-no-prefetch", .play = lists_skills},
    {.name = "sep-2640-", .play = loads_skills, .end = MCP_RESOURCE_INVALID},

    // Without a person: the context has what is shown instead.
    {.name = "auth/client-credentials-basic", GUARDED, .fields = by_secret},
    {.name = "auth/client-credentials-jwt", GUARDED, .fields = by_key},
    {.name = "auth/wif-jwt-bearer", GUARDED, .fields = by_workload},
    {.name = "auth/enterprise-managed-authorization", GUARDED,
     .fields = by_enterprise},
    {.name = "auth/cross-app-access-complete-flow", GUARDED,
     .fields = by_enterprise},

    // Who is asked for more again and again gives up; who meets an impostor
    // does so at once.
    {.name = "auth/scope-retry-limit", GUARDED, .end = MCP_PERMISSION_DENIED},
    {.name = "auth/resource-mismatch", GUARDED, .end = MCP_OAUTH_FAILED},
    {.name = "auth/metadata-issuer-mismatch", GUARDED,
     .end = MCP_OAUTH_FAILED},
    {.name = "auth/iss-supported", GUARDED},
    {.name = "auth/iss-not-advertised", GUARDED},
    {.name = "auth/iss-", GUARDED, .end = MCP_OAUTH_FAILED},

    // Signing in as any host does.
    {.name = "auth/pre-registration", GUARDED, .fields = registered},
    {.name = "auth/offline-access-scope", GUARDED, .no_document = true},
    {.name = "auth/dpop", GUARDED, .fields = bound},
    {.name = "auth/dpop-nonce", GUARDED, .fields = bound},
    {.name = "auth/", GUARDED}};

// A name that ends with '/' or '-' stands for all that begin so.
static const scenario *scenario_named(const char *name) {
    for (size_t i = 0; i < sizeof scenarios / sizeof *scenarios; i++) {
        const char *row = scenarios[i].name;
        size_t n = strlen(row);
        if (!strncmp(name, row, n) &&
            (!name[n] || row[n - 1] == '/' || row[n - 1] == '-'))
            return &scenarios[i];
    }
    return NULL;
}

//=============================================================================
// MARK: - Set-up
//=============================================================================

// The server's entry, as it could stand in an mcp.json.
static mcp_code add_server(driver *d, const char *url) {
    const char *version = getenv("MCP_CONFORMANCE_PROTOCOL_VERSION"), *text;
    const entry_field *f = d->now->fields;
    mcp_json context = mcp_root(d->context);
    mcp_writer *w = mcp_w_new(d->m);
    mcp_code rc;
    if (!w) return MCP_OUT_OF_MEMORY;
    mcp_w_object(w);
    mcp_w_key(w, "url");
    mcp_w_string(w, url);
    mcp_w_key(w, "protocol");
    mcp_w_string(w, version && strcmp(version, "2026-07-28") >= 0 ? "modern"
                                                                  : "legacy");
    for (; f && f->name; f++) {
        const char *value = mcp_string(mcp_get(context, f->member), NULL);
        if (!value && !f->json) continue;
        mcp_w_key(w, f->name);
        if (f->json)
            mcp_w_raw(w, f->json);
        else
            mcp_w_string(w, value);
    }
    mcp_w_end(w);
    text = mcp_w_text(w);
    rc = text ? mcp_add(d->m, "peer", text) : MCP_OUT_OF_MEMORY;
    mcp_w_free(w);
    return rc;
}

static mcp_code open_handle(driver *d) {
    mcp_options opt = {0};
    opt.client_name = "mcp-c-conformance";
    opt.no_cache = true;
    opt.trace = d->verbose;
    opt.on_event = on_event;
    opt.user = d;
    opt.asks = MCP_ASK_ELICIT | MCP_ASK_SAMPLE | MCP_ASK_ROOTS |
               MCP_ASK_SIGN_IN;
    opt.sign_in = true;
    opt.redirect_uri = REDIRECT;
    if (!d->now->no_document) opt.client_metadata_url = DOCUMENT;
    opt.credentials = "memory";
    return mcp_open(&d->m, &opt);
}

static mcp_code parse_context(driver *d) {
    const char *text = getenv("MCP_CONFORMANCE_CONTEXT");
    return text ? mcp_parse(d->m, text, strlen(text), &d->context) : MCP_OK;
}

// Did it end as it has to?
static int verdict(const driver *d, mcp_code rc) {
    const mcp_error *e = mcp_last_error(d->m);
    if (rc == d->now->end && !rc) return 0;
    fprintf(stderr, "conformance: %s: %s, %s wanted\n", d->now->name,
            rc ? mcp_code_name(rc) : "it got through",
            d->now->end ? mcp_code_name(d->now->end) : "success");
    if (d->why) fprintf(stderr, "  %s\n", d->why);
    if (rc && e) fprintf(stderr, "  %s\n  %s\n", e->message, e->detail);
    return rc != d->now->end;
}

int main(int argc, char **argv) {
    const char *name = getenv("MCP_CONFORMANCE_SCENARIO");
    driver d = {0};
    mcp_code rc;
    int failed;
    d.verbose = argc > 2 && !strcmp(argv[1], "-v");
    d.now = name ? scenario_named(name) : NULL;
    if (argc < 2 || !d.now) {
        fprintf(stderr, "conformance: run me with the suite; scenario \"%s\" "
                        "is unknown to me\n", name ? name : "");
        return 1;
    }
    rc = open_handle(&d);
    if (!rc) rc = parse_context(&d);
    if (!rc) rc = add_server(&d, argv[argc - 1]);
    if (!rc) rc = d.now->play(&d);
    failed = verdict(&d, rc);
    mcp_free(d.context);
    mcp_close(d.m);
    return failed;
}
