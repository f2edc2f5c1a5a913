// mcp.h - talk to Model Context Protocol servers from C.
//
// Two files: add mcp.c and mcp.h to your program, link BearSSL
// (cc main.c mcp.c -lbearssl), and that is all. BearSSL's headers and jsmn.h
// must be in the include path. License: the end of this file.
//
//     mcp *m;
//     mcp_result *r = NULL;
//     if (mcp_open(&m, NULL) == MCP_OK && mcp_load(m, NULL) == MCP_OK &&
//         mcp_call(m, "files.read_file", "{\"path\":\"a.txt\"}", &r) == MCP_OK)
//         puts(mcp_text(r));
//     else
//         fprintf(stderr, "%s\n", mcp_errmsg(m));
//     mcp_free(r);
//     mcp_close(m);
//
// CONTENTS         search for the name
//
//   Rules          what holds for every function below
//   Codes          what a call can answer
//   Events         what the library tells you while a call runs
//   Hooks          allocator, operating system, streams, TLS: yours if you like
//   Options        what mcp_open() can be told
//   Handle         open, close, cancel, errors
//   Servers        configure and connect
//   Model          what a language model sees and calls
//   Program        search, call, read: for your own code
//   User           typed commands
//   Own loop       the same verbs without blocking
//   Results        own and free an answer
//   JSON reading   a cursor over an answer
//   JSON writing   arguments without string pasting
#ifndef MCP_H
#define MCP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#ifndef MCP_API
#define MCP_API extern
#endif

#define MCP_VERSION "0.1.0"
#define MCP_VERSION_NUMBER 100  // major*10000 + minor*100 + patch

//=============================================================================
// MARK: - Rules
//
// Strings are UTF-8. A `const char *` argument ends with NUL and is copied if
// the library needs it after the call. JSON goes in as text and comes out as
// an mcp_result, which holds the text and a cursor over it.
//
// Ownership has one rule: free what you got through an `out` argument, with
// the function named beside it. Everything else that is returned is borrowed
// and lives as long as the object it was asked of, with two exceptions: what
// mcp_errmsg() and mcp_last_error() return lives until the next call on the
// handle, and what mcp_w_text() returns until the writer is used again. Every
// free function takes NULL.
//
// A handle is used by one thread at a time. Two handles share nothing: there
// is no global state and no set-up call. Only mcp_cancel() may be called at
// any time. The library prints nothing, starts no thread, installs no signal
// handler and changes nothing of the process.
//
// Functions that can fail return an mcp_code; 0 is success. On failure `*out`
// is NULL and mcp_errmsg() says in one line what was wrong; not so where there
// is no handle to keep it: mcp_open(), mcp_content(), mcp_parse(NULL, ...). A
// NULL argument where one is needed is MCP_MISUSE, as are arguments that are
// not JSON.
//
// A tool is named "server.tool". A model may not write a dot, so to it a tool
// has a native name: "mcp__server__tool", or a cut one with a hash at its end.
// Times are milliseconds, sizes are bytes; a negative time is MCP_MISUSE.
//=============================================================================

typedef struct mcp mcp;                // a set of servers
typedef struct mcp_result mcp_result;  // an owned answer
typedef struct mcp_writer mcp_writer;  // JSON being written
typedef struct mcp_doc mcp_doc;        // a parsed text; never seen from outside

// A borrowed piece of text; not NUL-terminated. printf("%.*s", MCP_ARG(s)).
typedef struct mcp_str {
    const char *ptr;
    size_t len;
} mcp_str;
#define MCP_ARG(s) (int)(s).len, (s).ptr

// A place in a JSON document; pass it by value. A zeroed cursor is "missing":
// every reader accepts it, so a chain of mcp_get() needs one check at the end.
typedef struct mcp_json {
    const mcp_doc *doc;
    uint32_t node;
} mcp_json;

//=============================================================================
// MARK: - Codes
//
// One value for each diagnostic. mcp_code_name() gives the word a user or a
// model sees: MCP_TOOL_CHANGED is "tool_changed".
//=============================================================================

typedef enum mcp_code {
    MCP_OK = 0,
    MCP_CONFIGURATION_INVALID = 1,   // a file, a field or a variable is wrong
    MCP_AUTHENTICATION_REQUIRED = 2,  // sign in, or check the header
    MCP_PERMISSION_DENIED = 3,
    MCP_CREDENTIAL_STORE_UNAVAILABLE = 4,
    MCP_SECRET_LOOKUP_FAILED = 5,  // a "!command" failed
    MCP_TIMEOUT = 6,
    MCP_CANCELLED = 7,
    MCP_CONNECTION_FAILED = 8,  // cannot start, connect, or stay connected
    MCP_PROTOCOL_ERROR = 9,     // the peer broke HTTP, JSON-RPC or MCP
    MCP_SERVER_UNKNOWN = 10,
    MCP_SERVER_DISABLED = 11,
    MCP_TOOL_CHANGED = 12,  // gone, other schema, or not active
    MCP_TOOL_ERROR = 13,    // the tool itself reported failure
    MCP_RESOURCE_INVALID = 14,
    MCP_RESOURCE_NOT_FOUND = 15,
    MCP_RESOURCES_UNSUPPORTED = 16,
    MCP_COMPLETIONS_UNSUPPORTED = 17,
    MCP_COMPLETION_INVALID = 18,
    MCP_SUBSCRIPTIONS_UNSUPPORTED = 19,
    MCP_SUBSCRIPTION_LIMIT = 20,
    MCP_CATALOG_CHANGED = 21,  // it kept changing while it was read
    MCP_OAUTH_FAILED = 22,
    MCP_OAUTH_ISSUER_CHANGED = 23,
    MCP_CALLBACK_UNAVAILABLE = 24,
    MCP_BUSY = 25,
    MCP_OPERATION_FAILED = 26,
    MCP_MISUSE = 27,         // an argument breaks the rules above
    MCP_OUT_OF_MEMORY = 28,  // the allocator returned NULL
    MCP_LIMIT_EXCEEDED = 29,  // the detail names the limit
    MCP_NOT_BUILT = 30,       // left out by an MCP_NO_ switch
    MCP_PENDING = 31          // mcp_take(): not done yet
} mcp_code;

// What was being done when it failed.
typedef enum mcp_operation {
    MCP_OP_NONE = 0,
    MCP_OP_CONFIGURATION = 1,
    MCP_OP_CONNECT = 2,
    MCP_OP_SEARCH = 3,
    MCP_OP_CALL = 4,
    MCP_OP_READ = 5,
    MCP_OP_COMPLETE = 6,
    MCP_OP_SUBSCRIBE = 7,
    MCP_OP_AUTH = 8,
    MCP_OP_RECONNECT = 9,
    MCP_OP_REFRESH = 10,
    MCP_OP_ACTIVATE = 11
} mcp_operation;

//=============================================================================
// MARK: - Events
//
// Events come while a call of yours runs (or mcp_poll()), on your thread, at
// one place between two steps of work. The function may submit work but not
// block on or close the handle (MCP_MISUSE).
//=============================================================================

typedef enum mcp_event_type {
    MCP_EV_STATE = 1,     // a server went to another state: text names it
    MCP_EV_LOG = 2,       // a line for people: the server's stderr or log
    MCP_EV_PROGRESS = 3,  // progress, total, text
    MCP_EV_CHANGED = 4,   // a list changed: text is tools, resources or prompts
    MCP_EV_DONE = 5,      // a submitted call is finished: id, code
    MCP_EV_TRACE = 6,     // a message on the wire, secrets masked (see options)
    MCP_EV_WARNING = 7,   // something was skipped or could not be saved
    MCP_EV_ASK = 8,       // somebody waits for mcp_answer(): id, ask, request
    MCP_EV_WITHDRAWN = 9  // and needs no answer any more: id, ask, call
} mcp_event_type;

// What can be asked, and what the answer is: a JSON object. The event's `text`
// is the "message" of the request, fit for a terminal; it is empty where there
// is none (MCP_ASK_SAMPLE, MCP_ASK_ROOTS). The strings of a request are the
// server's own, and no function here cleans a single one: leave out control and
// bidi characters yourself. (mcp_plain() is for the text of a result, and what
// mcp_parse() makes has none.)
typedef enum mcp_ask {
    // A server wants input from the person: the parameters of
    // elicitation/create. {"action":"accept","content":{...}}; a form's content
    // is checked, and what it leaves out gets its default. Of a page ("mode":
    // "url") "accept" says that the person has opened it; it has no content.
    MCP_ASK_ELICIT = 1,
    // A server wants a model's words: the parameters of
    // sampling/createMessage. {"role":"assistant","content":...,"model":"..."}
    MCP_ASK_SAMPLE = 2,
    // A server wants to know where it may work.
    // {"roots":[{"uri":"file:///...","name":"..."}]}
    MCP_ASK_ROOTS = 4,
    // A sign-in has begun: {"message","url","redirect_uri","issuer",
    // "scopes":[...],"browser","notes":[...]}. With "browser" the answer comes
    // by itself; else show the URL and answer {"callback":"the whole URL the
    // browser ended at"}.
    MCP_ASK_SIGN_IN = 8
} mcp_ask;

typedef struct mcp_event {
    mcp_event_type type;
    const char *server;  // or ""
    mcp_str text;        // one line, safe for a terminal
    uint64_t id;         // of the call it belongs to, or 0
    mcp_code code;       // MCP_EV_DONE
    double progress;     // MCP_EV_PROGRESS
    double total;        // 0: not told
    bool outgoing;       // MCP_EV_TRACE: we sent it
    mcp_ask ask;         // MCP_EV_ASK, _WITHDRAWN; `id` is for mcp_answer()
    uint64_t call;       // the same: of the call that waits for it, or 0
    mcp_json request;    // MCP_EV_ASK: valid until it is answered (and this
                         // callback has returned) or MCP_EV_WITHDRAWN came
} mcp_event;

typedef void (*mcp_event_fn)(void *user, const mcp_event *ev);

//=============================================================================
// MARK: - Hooks
//=============================================================================

// realloc and free in one, as in Lua: `size` 0 frees, `ptr` NULL allocates.
// `old` is the size that was asked for when `ptr` was made.
typedef void *(*mcp_alloc_fn)(void *user, void *ptr, size_t old, size_t size);

// One descriptor of your stream, or of the handle for your loop.
#define MCP_READABLE 1
#define MCP_WRITABLE 4
typedef struct mcp_fd {
    int fd;
    short want;  // MCP_READABLE | MCP_WRITABLE
    short got;   // filled by a wait
} mcp_fd;

// A byte stream of your own (a socket, a UART, a queue). read and write return
// bytes, 0 for "later", -1 for the end; they never block. `open` may be NULL,
// else it (re)connects and returns 0 for success; `fds` may be NULL, then the
// stream is tried again at every turn; `close` may be NULL.
typedef struct mcp_io {
    void *user;
    int (*open)(void *user);
    ptrdiff_t (*read)(void *user, void *to, size_t n);
    ptrdiff_t (*write)(void *user, const void *from, size_t n);
    int (*fds)(void *user, mcp_fd *out, int cap);
    void (*close)(void *user);
} mcp_io;

// What the library needs of a machine without an operating system. A NULL
// entry is the built-in one; without the built-in POSIX part now_ms and random
// are required. wait() sleeps until a descriptor is ready or `ms` passed (-1:
// no limit) and fills `got`; it returns the number ready.
typedef struct mcp_os {
    void *user;
    int64_t (*now_ms)(void *user);   // monotonic
    int64_t (*unix_s)(void *user);   // wall clock
    int (*random)(void *user, void *to, size_t n);  // 0: success
    int (*wait)(void *user, mcp_fd *fds, int n, int ms);
} mcp_os;

// Your own TLS: turn the stream `plain` into the secure stream `*secure` for
// `host`. Both live until secure->close is called. Returns 0 for success.
typedef struct mcp_tls {
    void *user;
    int (*wrap)(void *user, const char *host, const mcp_io *plain,
                mcp_io *secure);
} mcp_tls;

// Your own names: write up to `cap` numeric addresses, return how many; 0 asks
// the built-in resolver, -1 means there is no such name.
typedef int (*mcp_resolve_fn)(void *user, const char *host, char (*out)[46],
                              int cap);

// Your own place for credentials. An account is 64 hex digits, a secret is text
// of at most 64 KiB. read() writes up to `cap` bytes and returns the length of
// the secret, 0 if there is none, -1 if the store cannot be used; write() and
// remove() return 0 for success (removing what is not there is one). `cap` is
// 64 KiB, so a whole secret fits; a length over `cap` counts as -1. read() may
// be called again at any time, before a removal too. Processes with the same
// config_dir take turns by a lock file in it, unless no_cache is set; others
// that share your store you must keep apart yourself.
typedef struct mcp_store {
    void *user;
    ptrdiff_t (*read)(void *user, const char *account, char *to, size_t cap);
    int (*write)(void *user, const char *account, const char *secret,
                 size_t n);
    int (*remove)(void *user, const char *account);
} mcp_store;

//=============================================================================
// MARK: - Options
//=============================================================================

// Zero means the default everywhere: `mcp_options opt = {0};` is complete.
// Strings are copied by mcp_open(); tables of functions must stay valid.
typedef struct mcp_options {
    const char *client_name;     // told to servers (default "mcp-c")
    const char *client_version;  // default MCP_VERSION
    const char *config_dir;   // the global directory (default: see mcp_load)
    const char *project_dir;  // of .mcp.json and relative paths (default ".")
    const char *ca_file;      // PEM trust anchors (default: the system's)
    const char *command_prefix;  // before a command in a hint ("/mcp ")
    const char *spill_dir;    // for results too large (default: $TMPDIR)
    int timeout_ms;           // replaces the default deadlines (0: keep them)
    size_t max_message;       // one message of a server (default 64 MiB)
    bool inherit_env;         // servers inherit the whole environment
    bool no_cache;            // keep nothing on disk
    bool cached_only;         // never connect: what is not cached fails
    bool list_always;         // list a server's tools before every call
    bool trace;               // send MCP_EV_TRACE events

    mcp_event_fn on_event;
    // May the model see, activate and call this name, a native one or
    // "mcp_tools"? NULL: every one.
    bool (*allow)(void *user, const char *name);
    // Is this project file trusted? Asked when trusted.json in config_dir does
    // not list it; NULL: then it is not. `servers` is the file's text.
    bool (*trust)(void *user, const char *path, const char *servers);
    void *user;               // given to the three above

    mcp_alloc_fn alloc;       // default: realloc and free
    void *alloc_user;
    const mcp_os *os;
    const mcp_tls *tls;       // default: BearSSL
    mcp_resolve_fn resolve;
    void *resolve_user;

    unsigned asks;            // MCP_ASK_... that on_event answers; servers are
                              // told of no other
    bool sign_in;             // a server that wants a sign-in gets it at once,
                              // as if mcp_login() had been called
    const char *redirect_uri; // of a host that brings callbacks itself: an
                              // http loopback or https URL (default: ours)
    const char *client_metadata_url;  // of the client's own metadata document
    const char *credentials;  // "keyring", "file" or "memory" (default:
                              // $MCP_CREDENTIALS, else "keyring")
    const mcp_store *store;   // instead of those three
    const char *proxy;        // http://[user:password@]host[:port]; "": none
                              // (default: $HTTPS_PROXY, $HTTP_PROXY, $NO_PROXY)
} mcp_options;

//=============================================================================
// MARK: - Handle
//=============================================================================

// The last failure of a handle. `detail` is for the user, never for a model:
// its first line is what differs from case to case (which file, program or
// limit), then the server's own words, status and last stderr lines.
typedef struct mcp_error {
    mcp_code code;
    mcp_operation operation;
    const char *server;   // "" when none
    const char *message;  // one line, fixed for each code
    const char *hint;     // what to do
    const char *detail;   // may be "", several lines, at most 4 KiB
    int64_t rpc_code;     // of a JSON-RPC error, or 0
    int http_status;      // or 0
    int exit_status;      // of a server that ended (128 + signal), or -1
} mcp_error;

MCP_API const char *mcp_version(void);
MCP_API const char *mcp_code_name(mcp_code code);

// Make a handle; connects nothing. `opt` may be NULL. Free with mcp_close(),
// which shuts down every server, at most about 2 s; 5 s if a token that was
// just refreshed must still be stored.
MCP_API mcp_code mcp_open_sized(mcp **out, const mcp_options *opt,
                                size_t size);
#define mcp_open(out, opt) mcp_open_sized((out), (opt), sizeof(mcp_options))
MCP_API void mcp_close(mcp *m);

// End the running call soon with MCP_CANCELLED; nothing if none runs. From any
// thread or a signal handler. Submitted calls go on: see mcp_drop().
MCP_API void mcp_cancel(mcp *m);

// Set the deadline of the calls that follow, as mcp_options.timeout_ms.
MCP_API mcp_code mcp_timeout(mcp *m, int ms);

// Do what is due, deliver events; wait for something up to `ms` (0: do not,
// -1: as long as it takes).
MCP_API mcp_code mcp_poll(mcp *m, int ms);

// The last failure in one line, and whole. `m` may be NULL (out of memory).
MCP_API const char *mcp_errmsg(const mcp *m);
MCP_API const mcp_error *mcp_last_error(const mcp *m);

//=============================================================================
// MARK: - Servers
//=============================================================================

// Read the configuration: `path` alone, or for NULL the global file
// (mcp.json in config_dir, else $MCP_CONFIG_DIR, $PI_CODING_AGENT_DIR,
// ~/.pi/agent if it holds one, ${XDG_CONFIG_HOME:-~/.config}/mcp) and a
// trusted .mcp.json of the project. Connects nothing. A bad entry breaks that
// server only and is named in the status; a bad file fails.
MCP_API mcp_code mcp_load(mcp *m, const char *path);
// Read them again; on failure the old setup stays. Closes every connection.
MCP_API mcp_code mcp_reload(mcp *m);
// Add or replace one server in memory: {"command":...} or {"url":...}.
MCP_API mcp_code mcp_add(mcp *m, const char *name, const char *definition);
// Add one that speaks over your own stream; `io` is copied.
MCP_API mcp_code mcp_add_io(mcp *m, const char *name, const mcp_io *io);
// [{"name","state","transport","protocol","tools","active","error"}, ...]
MCP_API mcp_code mcp_servers(mcp *m, mcp_result **out);

// Optional: every call connects by itself.
MCP_API mcp_code mcp_connect(mcp *m, const char *server);
MCP_API mcp_code mcp_disconnect(mcp *m, const char *server);
// Fetch the lists again even if fresh. `server` NULL: every one.
MCP_API mcp_code mcp_refresh(mcp *m, const char *server);

// Sign in to a server over HTTP, and connect again. The only call that may
// register this client, open a browser or ask for more scopes; 120 s. With
// `browser` false you are asked for the callback instead (MCP_ASK_SIGN_IN must
// be one of `asks`).
MCP_API mcp_code mcp_login(mcp *m, const char *server, bool browser);
// Forget the credentials, then have them revoked (5 s). `out` may be NULL:
// {"server","removed","revocation"}, the last one of confirmed, unsupported,
// unconfirmed, nothing.
MCP_API mcp_code mcp_logout(mcp *m, const char *server, mcp_result **out);
// Answer MCP_EV_ASK, at once or later; the call that asked waits meanwhile. A
// NULL answer declines. What does not fit is MCP_MISUSE and may be mended; the
// detail of mcp_last_error() says what is wrong, in words for the person.
MCP_API mcp_code mcp_answer(mcp *m, uint64_t id, const char *answer);

//=============================================================================
// MARK: - Model
//
// An agent loop: send mcp_definitions() with your request, give each tool call
// to mcp_dispatch(), send mcp_content() back. The model starts with one small
// tool, mcp_tools, and activates what it needs; only what is active can be
// called.
//=============================================================================

typedef enum mcp_shape {
    MCP_SHAPE_MCP = 0,        // {"name","description","inputSchema"}
    MCP_SHAPE_ANTHROPIC = 1,  // {"name","description","input_schema"}
    MCP_SHAPE_OPENAI = 2  // {"type":"function","function":{..."parameters"}}
} mcp_shape;

// The array of tools to send. Never connects. mcp_text() is the JSON.
MCP_API mcp_code mcp_definitions(mcp *m, mcp_shape shape, mcp_result **out);
// Text for the system prompt: one line a server, how to use mcp_tools. Empty
// without a server, or without mcp_tools.
MCP_API mcp_code mcp_instructions(mcp *m, mcp_result **out);
// Run mcp_tools or an active tool by its native name. `args` is a JSON object.
// Always yields a result, but for misuse and memory: a failure is its text,
// mcp_is_error() is true, and the code says which. The text is bounded (2,000
// lines, 50 KiB); if it is cut, it names a private file with the whole result.
// The root is the server's own result, or as of the verb below that was used.
MCP_API mcp_code mcp_dispatch(mcp *m, const char *name, const char *args,
                              mcp_result **out);
// The tool result message for `r` as JSON, in the shape of that API. `call_id`
// is the model's id of the call. Free `*out`.
MCP_API mcp_code mcp_content(const mcp_result *r, mcp_shape shape,
                             const char *call_id, mcp_result **out);
// What is active, as JSON to keep with a conversation; and back, in the place
// of what is active now. What no longer agrees is not restored but named in
// `*out` (may be NULL): {"restored":[{"server","tool"}],"lost":[{"server",
// "tool","reason"}],"failed":[...]}. A text that is no snapshot is
// MCP_OPERATION_FAILED.
MCP_API mcp_code mcp_snapshot(mcp *m, mcp_result **out);
MCP_API mcp_code mcp_restore(mcp *m, const char *snapshot, mcp_result **out);

//=============================================================================
// MARK: - Program
//=============================================================================

typedef enum mcp_kind {
    MCP_ALL = 0,        // tools, resources and templates
    MCP_TOOLS = 1,
    MCP_RESOURCES = 2,  // a search for these finds templates too
    MCP_TEMPLATES = 3,
    MCP_PROMPTS = 4     // for mcp_list() alone
} mcp_kind;

// Best matches: {"candidates":[{"kind","server","name","description","id" or
// "uri" or "template",...}],"failed":[{"server","kinds","code","message",
// "hint","detail"}]}. `query` is not empty, `server` NULL: all, `limit` 1 to
// 50, 0: 5; prompts are not searched. Uses caches, connects where none. A
// server that could not be asked is in "failed"; if nothing but failures came
// of it, mcp_is_error() is true and mcp_last_error() has the first.
MCP_API mcp_code mcp_search(mcp *m, const char *query, mcp_kind kind,
                            const char *server, int limit, mcp_result **out);
// Activate tools: `names` is a JSON array of exact "server.tool" names. The
// outcome of each: {"tools":[{"id","state","server","tool","name","code",
// "reason"}],"failed":[...]}; state is loaded, active (before already) or
// failed, `name` the native one. mcp_is_error(): none is usable.
MCP_API mcp_code mcp_activate(mcp *m, const char *names, mcp_result **out);
// Run "server.tool". `args` is a JSON object, or NULL for none. Never sent
// twice. A tool that reports its own failure is MCP_OK: see mcp_is_error().
// {"content":[...],"structuredContent","isError"}; the text is of `content`,
// or of the structured one if `content` has no text.
MCP_API mcp_code mcp_call(mcp *m, const char *tool, const char *args,
                          mcp_result **out);
// Read a resource: {"contents":[{"uri","mimeType","text" or "blob"}]}. With
// `args` (a JSON object, the values of its variables) `uri` is a template.
MCP_API mcp_code mcp_read(mcp *m, const char *server, const char *uri,
                          const char *args, mcp_result **out);
// Values for a template's variable: {"completion":{"values":[...],"total",
// "hasMore"}}. `known`: other variables as a JSON object, or NULL.
MCP_API mcp_code mcp_complete(mcp *m, const char *server, const char *uri,
                              const char *name, const char *value,
                              const char *known, mcp_result **out);
// The whole catalog of a kind as an array, as the server describes it; no
// MCP_ALL.
MCP_API mcp_code mcp_list(mcp *m, const char *server, mcp_kind kind,
                          mcp_result **out);
// Get a prompt: {"messages":[{"role","content"}]}. `args` is a JSON object of
// strings, or NULL.
MCP_API mcp_code mcp_prompt(mcp *m, const char *server, const char *name,
                            const char *args, mcp_result **out);
// Any request; `params` is a JSON object or NULL, _meta is added for you. The
// root is the result.
MCP_API mcp_code mcp_request(mcp *m, const char *server, const char *method,
                             const char *params, mcp_result **out);

//=============================================================================
// MARK: - User
//=============================================================================

// Run what a user typed after "/mcp": "add --scope global docs https://...".
MCP_API mcp_code mcp_command(mcp *m, const char *line, mcp_result **out);
// The same, already cut into words (no quotes are looked at).
MCP_API mcp_code mcp_command_argv(mcp *m, int argc, const char *const *argv,
                                  mcp_result **out);

//=============================================================================
// MARK: - Own loop
//
//     mcp_submit(m, MCP_DO_CALL, "files.stat", "{\"path\":\"/\"}", &id);
//     n = mcp_fds(m, fds, 16, &ms);   poll() them for at most ms
//     mcp_poll(m, 0);                 then take what is ready
//     if (mcp_take(m, id, &r) != MCP_PENDING) ...
//=============================================================================

// `target` and `args` of each verb; args is a JSON object (NULL: {}).
typedef enum mcp_verb {
    MCP_DO_CONNECT = 1,    // server
    MCP_DO_DISCONNECT = 2,  // server
    MCP_DO_REFRESH = 3,    // server or NULL
    MCP_DO_DISPATCH = 4,   // name, its arguments
    MCP_DO_SEARCH = 5,     // query, {"kind","server","limit"}
    MCP_DO_ACTIVATE = 6,   // NULL, {"names":[...]}
    MCP_DO_CALL = 7,       // server.tool, its arguments
    MCP_DO_READ = 8,       // server, {"uri"} or {"template","arguments"}
    MCP_DO_COMPLETE = 9,   // server, {"template","argument","arguments"}
    MCP_DO_LIST = 10,      // server, {"kind":"tools"}
    MCP_DO_PROMPT = 11,    // server, {"name","arguments"}
    MCP_DO_REQUEST = 12,   // server, {"method","params"}
    MCP_DO_RESTORE = 13,   // NULL, the snapshot
    MCP_DO_COMMAND = 14,   // the typed line
    MCP_DO_LOGIN = 15,     // server, {"browser":true}
    MCP_DO_LOGOUT = 16     // server
} mcp_verb;

MCP_API mcp_code mcp_submit(mcp *m, mcp_verb verb, const char *target,
                            const char *args, uint64_t *id);
// The result of a submitted call: MCP_PENDING until it is done. A failure sets
// the handle's last error. The root is that of the blocking verb; of a connect
// and a login it is {"server","protocol"}. Free `*out` with mcp_free().
MCP_API mcp_code mcp_take(mcp *m, uint64_t id, mcp_result **out);
// Give it up; its request is cancelled, work others share goes on.
MCP_API void mcp_drop(mcp *m, uint64_t id);
// The descriptors to wait for, and for how long (-1: no limit). Returns how
// many there are; only `cap` are written.
MCP_API int mcp_fds(mcp *m, mcp_fd *out, int cap, int *timeout_ms);

//=============================================================================
// MARK: - Results
//=============================================================================

// Parse any JSON text; one that is none is MCP_MISUSE, and the detail says
// where. `m` may be NULL. mcp_text() is "".
MCP_API mcp_code mcp_parse(mcp *m, const char *text, size_t len,
                           mcp_result **out);
MCP_API void mcp_free(mcp_result *r);
MCP_API mcp_json mcp_root(const mcp_result *r);
// The text for a model or a person; never NULL.
MCP_API const char *mcp_text(const mcp_result *r);
MCP_API bool mcp_is_error(const mcp_result *r);
// The text without escape sequences, control and bidi characters: what a
// terminal may be given. "" without memory.
MCP_API const char *mcp_plain(mcp_result *r);

//=============================================================================
// MARK: - JSON reading
//
//     for (mcp_json t = mcp_first(mcp_root(r)); mcp_exists(t); t = mcp_next(t))
//         puts(mcp_string(mcp_get(t, "name"), "?"));
//=============================================================================

typedef enum mcp_type {
    MCP_MISSING = 0,
    MCP_NULL = 1,
    MCP_BOOL = 2,
    MCP_NUMBER = 3,
    MCP_STRING = 4,
    MCP_ARRAY = 5,
    MCP_OBJECT = 6
} mcp_type;

MCP_API mcp_type mcp_typeof(mcp_json v);
MCP_API bool mcp_exists(mcp_json v);
// Bytes of a decoded string, elements of an array, members of an object.
MCP_API size_t mcp_length(mcp_json v);

MCP_API mcp_json mcp_get(mcp_json object, const char *key);  // last duplicate
MCP_API mcp_json mcp_at(mcp_json array, size_t index);
MCP_API mcp_json mcp_pointer(mcp_json v, const char *path);  // RFC 6901
MCP_API mcp_json mcp_first(mcp_json container);
MCP_API mcp_json mcp_next(mcp_json member);
MCP_API const char *mcp_key(mcp_json member);  // "" in an array

// The value, or `otherwise` if missing, of another type, or out of range.
MCP_API const char *mcp_string(mcp_json v, const char *otherwise);
MCP_API mcp_str mcp_view(mcp_json v);  // a string with its length; may hold NUL
MCP_API int64_t mcp_integer(mcp_json v, int64_t otherwise);
MCP_API double mcp_number(mcp_json v, double otherwise);
MCP_API bool mcp_boolean(mcp_json v, bool otherwise);
// The value's own JSON text, byte for byte as it was received.
MCP_API mcp_str mcp_raw(mcp_json v);

//=============================================================================
// MARK: - JSON writing
//
// Errors stick: write everything, then ask mcp_w_text() once; NULL on failure
// (memory, a misplaced call, a container left open, raw text that is no JSON).
//=============================================================================

MCP_API mcp_writer *mcp_w_new(mcp *m);  // `m` may be NULL; NULL: no memory
MCP_API void mcp_w_free(mcp_writer *w);
MCP_API const char *mcp_w_text(mcp_writer *w);
MCP_API void mcp_w_object(mcp_writer *w);
MCP_API void mcp_w_array(mcp_writer *w);
MCP_API void mcp_w_end(mcp_writer *w);
MCP_API void mcp_w_key(mcp_writer *w, const char *key);
MCP_API void mcp_w_string(mcp_writer *w, const char *s);
MCP_API void mcp_w_integer(mcp_writer *w, int64_t n);
MCP_API void mcp_w_number(mcp_writer *w, double n);
MCP_API void mcp_w_boolean(mcp_writer *w, bool b);
MCP_API void mcp_w_null(mcp_writer *w);
MCP_API void mcp_w_raw(mcp_writer *w, const char *json);

#ifdef __cplusplus
}
#endif

//=============================================================================
// MIT License
//
// Copyright (c) 2026 the mcp-c authors
//
// Permission is hereby granted, free of charge, to any person obtaining a copy
// of this software and associated documentation files (the "Software"), to
// deal in the Software without restriction, including without limitation the
// rights to use, copy, modify, merge, publish, distribute, sublicense, and/or
// sell copies of the Software, and to permit persons to whom the Software is
// furnished to do so, subject to the following conditions:
//
// The above copyright notice and this permission notice shall be included in
// all copies or substantial portions of the Software.
//
// THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
// IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
// FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
// AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
// LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING
// FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS
// IN THE SOFTWARE.
//=============================================================================
#endif  // MCP_H
