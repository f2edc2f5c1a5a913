// cli.c - the `mcp` command: manage, search, call and read MCP servers.
//
// Everything it knows of MCP comes through mcp.h; what it adds is a terminal:
// options, colours of exit, progress, questions of trust, of servers and of a
// sign-in, a small shell.
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include "mcp.h"

// Told by `mcp --help`: scripts rely on them.
enum { EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_CONFIG = 3, EXIT_AUTH = 4,
       EXIT_INTERRUPTED = 130 };

enum {
    MAX_LINES = 2000,        // on a terminal, without --full
    MAX_BYTES = 50 << 10,    // the same
    MAX_INPUT = 64 << 20,    // arguments on standard input
    MAX_SESSION = 4 << 20,   // a session file
    MAX_WORDS = 4096,
    MAX_MS = 600000,         // of --timeout
    MAX_HISTORY = 100,       // lines
    MAX_TYPED = 64 << 10,    // one line
    MAX_FIELDS = 100,        // of a server's form
    MAX_STATUS = 60          // bytes of a progress message
};

typedef struct cli {
    bool json, cached, verbose, full;
    bool out_tty, err_tty;       // is it a terminal?
    bool progress;               // a progress line stands on stderr
    bool tells_trust;            // the command says what is not trusted
    bool trusted_now;            // the user said yes: remember it
    bool asks_sign_in;           // show the address of a sign-in
    const char *config_dir, *session, *ca_file, *proxy;
    const char *root;            // the directory that servers are told of
    int timeout_ms;
    mcp *m;
} cli;

static mcp *the_handle;          // for the signal handler
static volatile sig_atomic_t interrupted;

// Only what a signal handler may do; mcp_cancel() is made for it.
static void on_interrupt(int sig) {
    (void)sig;
    interrupted = 1;
    if (the_handle) mcp_cancel(the_handle);
}

// The first Ctrl-C cancels what runs; a second one ends us at once.
static void catch_interrupt(void) {
    struct sigaction sa;
    memset(&sa, 0, sizeof sa);
    sa.sa_handler = on_interrupt;
    sa.sa_flags = (int)SA_RESETHAND;
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
}

//=============================================================================
// MARK: - Output
//
// Results go to stdout and nothing else does, so that a pipe gets them whole
// and unchanged; progress, warnings and failures go to stderr.
//
// What a server says must not move the cursor, set a title or hide text: on a
// terminal control characters and bidi controls are left out.
//=============================================================================

// Length of a sequence at s that a terminal must not see, or 0: C0 and C1
// controls, U+202A..202E and U+2066..2069 (all in UTF-8).
static size_t unsafe(const unsigned char *s, size_t n) {
    static const unsigned char bidi[][3] = {{0x80, 0xAA, 0xAE},
                                            {0x81, 0xA6, 0xA9}};
    if (s[0] == '\n' || s[0] == '\t') return 0;
    if (s[0] < 0x20 || s[0] == 0x7F) return 1;
    if (n > 1 && s[0] == 0xC2 && s[1] >= 0x80 && s[1] <= 0x9F) return 2;
    for (size_t i = 0; i < 2 && n > 2 && s[0] == 0xE2; i++)
        if (s[1] == bidi[i][0] && s[2] >= bidi[i][1] && s[2] <= bidi[i][2])
            return 3;
    return 0;
}

static void put_safe(FILE *f, const char *text, size_t n) {
    const unsigned char *s = (const unsigned char *)text;
    size_t from = 0, bad;
    for (size_t i = 0; i < n; i++) {
        if (!(bad = unsafe(s + i, n - i))) continue;
        fwrite(text + from, 1, i - from, f);
        i += bad - 1;
        from = i + 1;
    }
    fwrite(text + from, 1, n - from, f);
}

// How much of the text a terminal gets: whole lines within both bounds.
static size_t bounded(const char *text, size_t n) {
    size_t lines = 0, end = 0;
    for (size_t i = 0; i < n && i < MAX_BYTES && lines < MAX_LINES; i++) {
        if (text[i] != '\n') continue;
        lines++;
        end = i + 1;
    }
    if (n <= MAX_BYTES && lines < MAX_LINES) return n;
    return end ? end : MAX_BYTES;
}

// All of it to stdout, unless the user interrupts: whoever reads may have
// stopped reading. Stdio would go on after a signal.
static bool put_out(const char *text, size_t n) {
    bool ok = fflush(stdout) == 0;
    while (ok && n && !interrupted) {
        ssize_t k = write(STDOUT_FILENO, text, n);
        if (k < 0) {
            ok = errno == EINTR;
            continue;
        }
        text += k;
        n -= (size_t)k;
    }
    return ok && !n;
}

// A pipe gets every byte; a terminal gets what a person can read. False: it
// could not be written.
static bool put_text(const cli *c, const char *text) {
    size_t n = strlen(text), show = n;
    if (!c->out_tty)
        return put_out(text, n) &&
               (!n || text[n - 1] == '\n' || put_out("\n", 1));
    if (!c->full) show = bounded(text, n);
    put_safe(stdout, text, show);
    if (n && text[show - 1] != '\n') putchar('\n');
    if (fflush(stdout)) return false;
    if (show < n)
        fprintf(stderr, "mcp: %zu more bytes not shown; --full or a pipe "
                        "shows everything\n", n - show);
    return true;
}

// Whatever else is said begins on a clean line.
static void clear_progress(cli *c) {
    if (c->progress) fputs("\r\033[K", stderr);
    c->progress = false;
}

static void show_progress(cli *c, const mcp_event *ev) {
    size_t n = ev->text.len;
    if (!c->err_tty) return;
    fputs("\r\033[K", stderr);
    if (ev->total > 0 && ev->progress >= 0 && ev->progress <= ev->total)
        fprintf(stderr, "%s %.0f%% ", ev->server,
                100 * (ev->progress / ev->total));
    else
        fprintf(stderr, "%s %g ", ev->server, ev->progress);
    while (n > MAX_STATUS || (n < ev->text.len &&
                              ((unsigned char)ev->text.ptr[n] & 0xC0) == 0x80))
        n--;  // whole characters
    fprintf(stderr, "%.*s", (int)n, ev->text.ptr);
    c->progress = true;
    fflush(stderr);
}

static int exit_of(mcp_code code) {
    switch (code) {
    case MCP_OK: return 0;
    case MCP_MISUSE: return EXIT_USAGE;
    case MCP_CONFIGURATION_INVALID: return EXIT_CONFIG;
    case MCP_AUTHENTICATION_REQUIRED: return EXIT_AUTH;
    default: return EXIT_FAILED;
    }
}

// With --json a failure is JSON on stdout too; people read stderr.
static void error_json(const mcp_error *e) {
    mcp_writer *w = mcp_w_new(NULL);
    const char *text;
    mcp_w_object(w);
    mcp_w_key(w, "error");
    mcp_w_object(w);
    mcp_w_key(w, "code");
    mcp_w_string(w, e->code == MCP_MISUSE ? "usage" : mcp_code_name(e->code));
    if (*e->server) mcp_w_key(w, "server"), mcp_w_string(w, e->server);
    if (e->code != MCP_MISUSE) {  // those two are for who writes programs
        mcp_w_key(w, "message"), mcp_w_string(w, e->message);
        mcp_w_key(w, "hint"), mcp_w_string(w, e->hint);
    }
    mcp_w_key(w, "detail"), mcp_w_string(w, e->detail);
    if (e->rpc_code) mcp_w_key(w, "rpcCode"), mcp_w_integer(w, e->rpc_code);
    if (e->http_status)
        mcp_w_key(w, "httpStatus"), mcp_w_integer(w, e->http_status);
    if (e->exit_status >= 0)
        mcp_w_key(w, "exitStatus"), mcp_w_integer(w, e->exit_status);
    mcp_w_end(w);
    mcp_w_end(w);
    text = mcp_w_text(w);
    puts(text ? text : "{\"error\":{\"code\":\"out_of_memory\"}}");
    mcp_w_free(w);
}

// What a model never sees: which file, which line of stderr, which status.
static void put_detail(const mcp_error *e) {
    if (!*e->detail) return;
    put_safe(stderr, e->detail, strlen(e->detail));
    fputc('\n', stderr);
}

// Say why, and what to do about it. A mistake in what was typed needs no code.
static int failed(cli *c, mcp_code code) {
    const mcp_error *e = mcp_last_error(c->m);
    clear_progress(c);
    if (c->json) error_json(e);
    if (code == MCP_MISUSE && *e->detail) {
        fputs("mcp: ", stderr);
        put_detail(e);
        return EXIT_USAGE;
    }
    fprintf(stderr, "mcp: %s%s[%s] %s\n", e->server, *e->server ? ": " : "",
            mcp_code_name(code), e->message);
    put_detail(e);
    if (*e->hint) fprintf(stderr, "%s\n", e->hint);
    return interrupted ? EXIT_INTERRUPTED : exit_of(code);
}

// A finished command: its text, or its JSON for --json.
static int show(cli *c, mcp_code code, const mcp_result *r) {
    bool ok = true;
    clear_progress(c);
    if (code != MCP_OK) return failed(c, code);
    if (c->json) {
        mcp_str raw = mcp_raw(mcp_root(r));
        ok = put_out(raw.ptr, raw.len) && put_out("\n", 1);
    } else if (*mcp_text(r)) {
        ok = put_text(c, mcp_text(r));
    }
    if (!ok && interrupted) return EXIT_INTERRUPTED;
    if (!ok) {
        fprintf(stderr, "mcp: cannot write the result: %s\n", strerror(errno));
        return EXIT_FAILED;
    }
    if (!mcp_is_error(r)) return 0;
    put_detail(mcp_last_error(c->m));
    return EXIT_FAILED;
}

//=============================================================================
// MARK: - Files
//
// A session file keeps what is active between two commands: without it each
// `mcp` begins with nothing activated, as it is a process of its own.
//=============================================================================

// All of a stream, NUL-terminated; NULL: too much, no memory, an error, or the
// user gave up waiting.
static char *read_all(int fd, size_t max, size_t *len) {
    size_t cap = 4096, n = 0;
    char *text = malloc(cap + 1), *more;
    ssize_t k = 1;

    while (text && k != 0) {
        k = read(fd, text + n, cap - n);
        if (k < 0 && errno == EINTR && !interrupted) continue;
        if (k < 0 || (size_t)k > max - n) break;
        n += (size_t)k;
        if (n < cap) continue;
        more = realloc(text, 2 * cap + 1);
        if (!more) break;
        text = more;
        cap *= 2;
    }
    if (!text || k != 0) return free(text), NULL;
    text[n] = 0;
    *len = n;
    return text;
}

// A tool that has changed since is not active any more, and is named: calling
// it by what was known of it would be a surprise.
static int load_session(cli *c) {
    int fd = open(c->session, O_RDONLY | O_CLOEXEC), rc = 0;
    size_t n;
    char *text;
    mcp_result *r = NULL;

    if (fd < 0 && errno == ENOENT) return 0;  // a new one
    text = fd < 0 ? NULL : read_all(fd, MAX_SESSION, &n);
    if (fd >= 0) close(fd);
    if (!text) {
        fprintf(stderr, "mcp: cannot read the session file %s\n", c->session);
        return EXIT_FAILED;
    }
    if (mcp_restore(c->m, text, &r) != MCP_OK) {
        fprintf(stderr, "mcp: the session file %s cannot be used; delete it "
                        "or name another\n", c->session);
        rc = failed(c, mcp_last_error(c->m)->code);
        if (rc == EXIT_USAGE) rc = EXIT_FAILED;
    } else if (mcp_length(mcp_get(mcp_root(r), "lost"))) {
        fprintf(stderr, "mcp: %s\n", mcp_text(r));
    }
    mcp_free(r);
    free(text);
    return rc;
}

// Beside it and then in its place: whatever happens, one of the two is whole.
static bool write_file(const char *path, const char *text) {
    size_t n = strlen(text), size = strlen(path) + 16;
    char *temp = malloc(size);
    bool ok;
    int fd;

    if (!temp) return false;
    snprintf(temp, size, "%s.XXXXXX", path);
    fd = mkstemp(temp);  // 0600
    ok = fd >= 0 && write(fd, text, n) == (ssize_t)n;
    if (fd >= 0 && close(fd)) ok = false;
    if (ok && rename(temp, path)) ok = false;
    if (!ok && fd >= 0) unlink(temp);
    free(temp);
    return ok;
}

// Only when the command changed what is active: a tool that cannot be restored
// today, since its server is switched off, is not forgotten by looking.
static int save_session(cli *c, const mcp_result *before) {
    mcp_result *r = NULL;
    bool ok = mcp_snapshot(c->m, &r) == MCP_OK;
    if (ok && (!before || strcmp(mcp_text(before), mcp_text(r)) != 0))
        ok = write_file(c->session, mcp_text(r));
    if (!ok)
        fprintf(stderr, "mcp: cannot write the session file %s\n", c->session);
    mcp_free(r);
    return ok ? 0 : EXIT_FAILED;
}

//=============================================================================
// MARK: - Trust
//
// A project's .mcp.json names programs to run. On a terminal the user sees
// them and is asked once; elsewhere the file stays unread.
//=============================================================================

// One line a server: what would run, or where it is. A URL's query may hold a
// key, and environment and headers mostly do, so they are left out.
static void list_commands(const char *servers) {
    mcp_result *r = NULL;
    if (mcp_parse(NULL, servers, strlen(servers), &r)) return;
    for (mcp_json s = mcp_first(mcp_get(mcp_root(r), "mcpServers"));
         mcp_exists(s); s = mcp_next(s)) {
        const char *url = mcp_string(mcp_get(s, "url"), "");
        fputs("    ", stderr);
        put_safe(stderr, mcp_key(s), strlen(mcp_key(s)));
        fputs(": ", stderr);
        if (*url) {
            put_safe(stderr, url, strcspn(url, "?"));
        } else {
            const char *command = mcp_string(mcp_get(s, "command"), "?");
            put_safe(stderr, command, strlen(command));
            for (mcp_json a = mcp_first(mcp_get(s, "args")); mcp_exists(a);
                 a = mcp_next(a)) {
                fputc(' ', stderr);
                put_safe(stderr, mcp_string(a, "?"), strlen(mcp_string(a, "")));
            }
        }
        fputc('\n', stderr);
    }
    mcp_free(r);
}

// Standard input must be a terminal too: what is piped in is for the tool, and
// no answer of a person.
static bool on_trust(void *user, const char *path, const char *servers) {
    cli *c = user;
    char line[16] = "";

    // The command itself speaks of it, or there is no file yet to ask about.
    if (c->tells_trust || !*servers) return false;
    if (!isatty(STDIN_FILENO) || !c->err_tty) {
        fprintf(stderr, "mcp: %s is not trusted and was left out; "
                        "`mcp trust` accepts it\n", path);
        return false;
    }
    fprintf(stderr, "The project file %s would run or contact:\n", path);
    list_commands(servers);
    fputs("Trust it from now on? [y/N] ", stderr);
    if (!fgets(line, sizeof line, stdin)) line[0] = 0;
    c->trusted_now = line[0] == 'y' || line[0] == 'Y';
    return c->trusted_now;
}

// After the load: within it no other call is possible.
static void remember_trust(cli *c) {
    static const char *const words[] = {"trust"};
    mcp_result *r = NULL;
    if (!c->trusted_now) return;
    c->trusted_now = false;
    if (mcp_command_argv(c->m, 1, words, &r))
        fprintf(stderr, "mcp: your answer could not be kept: %s\n",
                mcp_errmsg(c->m));
    mcp_free(r);
}

//=============================================================================
// MARK: - Line editor
//
// Just what a line needs: cursor keys, home and end, word and line deletion,
// history. When input is no terminal, lines are read as they come.
//
// Positions are bytes, steps are characters of UTF-8. One column each is
// assumed, so the cursor may stand a little off in a line with wide ones; the
// line itself stays right.
//=============================================================================

typedef struct editor {
    char *history[MAX_HISTORY];  // oldest first
    int count, at;               // at == count: the line being typed
    char line[MAX_TYPED];
    size_t n, pos;
    const char *prompt;
    bool question;               // on stderr, and Ctrl-C gives up
    bool hidden;                 // nothing of it is shown or kept
    bool stopped;                // it was given up
} editor;

static size_t back(const char *s, size_t pos) {
    do pos--;
    while (pos && ((unsigned char)s[pos] & 0xC0) == 0x80);
    return pos;
}

static size_t forward(const char *s, size_t n, size_t pos) {
    do pos++;
    while (pos < n && ((unsigned char)s[pos] & 0xC0) == 0x80);
    return pos;
}

// The whole line anew at each key: short enough, and never out of step.
static void redraw(const editor *e) {
    FILE *to = e->question ? stderr : stdout;
    size_t right = 0;
    for (size_t i = e->pos; i < e->n && !e->hidden; i++)
        right += ((unsigned char)e->line[i] & 0xC0) != 0x80;
    fprintf(to, "\r\033[K%s%.*s", e->prompt, e->hidden ? 0 : (int)e->n,
            e->line);
    if (right) fprintf(to, "\033[%zuD", right);
    fflush(to);
}

static void insert(editor *e, char ch) {
    if (e->n + 1 >= sizeof e->line) return;
    memmove(e->line + e->pos + 1, e->line + e->pos, e->n - e->pos);
    e->line[e->pos++] = ch;
    e->n++;
}

static void erase(editor *e, size_t from, size_t to) {
    memmove(e->line + from, e->line + to, e->n - to);
    e->n -= to - from;
    e->pos = from;
}

// Up and down in the history; below the newest there is an empty line.
static void recall(editor *e, int step) {
    int at = e->at + step;
    if (at < 0 || at > e->count) return;
    e->at = at;
    e->n = 0;
    if (at < e->count) {
        e->n = strlen(e->history[at]);
        memcpy(e->line, e->history[at], e->n);
    }
    e->pos = e->n;
}

// ESC [ X or ESC O X, and ESC [ 3 ~ for delete: what terminals send for the
// keys we know. Others are swallowed as far as they are understood.
static void escape_key(editor *e) {
    char seq[3] = "";
    if (read(STDIN_FILENO, seq, 1) != 1 || (seq[0] != '[' && seq[0] != 'O'))
        return;
    if (read(STDIN_FILENO, seq + 1, 1) != 1) return;
    switch (seq[1]) {
    case 'A': recall(e, -1); break;
    case 'B': recall(e, 1); break;
    case 'C':
        if (e->pos < e->n) e->pos = forward(e->line, e->n, e->pos);
        break;
    case 'D': if (e->pos) e->pos = back(e->line, e->pos); break;
    case 'H': e->pos = 0; break;
    case 'F': e->pos = e->n; break;
    case '3':  // delete
        if (read(STDIN_FILENO, seq + 2, 1) == 1 && e->pos < e->n)
            erase(e, e->pos, forward(e->line, e->n, e->pos));
        break;
    default: break;
    }
}

// False: the line is finished (or *end: no more lines will come).
static bool key(editor *e, char ch, bool *end) {
    size_t from = e->pos;
    switch (ch) {
    case '\r': case '\n': return false;
    case 1: e->pos = 0; break;                           // Ctrl-A
    case 5: e->pos = e->n; break;                        // Ctrl-E
    case 3:                                              // Ctrl-C
        e->n = e->pos = 0;
        e->stopped = true;
        return false;
    case 4:                                              // Ctrl-D
        if (!e->n) return *end = true, false;
        if (e->pos < e->n) erase(e, e->pos, forward(e->line, e->n, e->pos));
        break;
    case 8: case 127:                                    // backspace
        if (e->pos) erase(e, back(e->line, e->pos), e->pos);
        break;
    case 11: e->n = e->pos; break;                       // Ctrl-K
    case 21: erase(e, 0, e->pos); break;                 // Ctrl-U
    case 23:                                             // Ctrl-W
        while (from && e->line[from - 1] == ' ') from--;
        while (from && e->line[from - 1] != ' ') from--;
        erase(e, from, e->pos);
        break;
    case 27: escape_key(e); break;
    default: if ((unsigned char)ch >= 0x20) insert(e, ch); break;
    }
    return true;
}

// Not what is empty or said twice in a row; the oldest makes room.
static void remember_line(editor *e) {
    char *copy;
    if (!e->n || (e->count &&
                  strcmp(e->history[e->count - 1], e->line) == 0))
        return;
    if (!(copy = malloc(e->n + 1))) return;
    memcpy(copy, e->line, e->n + 1);
    if (e->count == MAX_HISTORY) {
        free(e->history[0]);
        memmove(e->history, e->history + 1,
                (MAX_HISTORY - 1) * sizeof *e->history);
        e->count--;
    }
    e->history[e->count++] = copy;
}

// The next line in e->line, NUL-terminated. False: there are no more. Signals
// are off only while a line is typed: there Ctrl-C clears it, and while a call
// runs it cancels the call.
static bool edit_line(editor *e) {
    struct termios was, raw;
    bool end = false;
    char ch;

    e->n = e->pos = 0;
    e->at = e->count;
    e->stopped = false;
    if (tcgetattr(STDIN_FILENO, &was)) return false;
    raw = was;
    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO | ISIG);
    raw.c_cc[VMIN] = 1;
    raw.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    redraw(e);
    do {
        if (read(STDIN_FILENO, &ch, 1) != 1) {
            end = true;
            break;
        }
        end = false;
        if (!key(e, ch, &end)) break;
        if (!e->hidden) redraw(e);
    } while (!interrupted);
    tcsetattr(STDIN_FILENO, TCSADRAIN, &was);
    fputc('\n', e->question ? stderr : stdout);
    e->line[e->n] = 0;
    if (!e->question) remember_line(e);
    return !end;
}

static bool next_line(editor *e, bool terminal) {
    if (terminal) return edit_line(e);
    if (!fgets(e->line, sizeof e->line, stdin)) return false;
    e->line[strcspn(e->line, "\r\n")] = 0;
    return true;
}

//=============================================================================
// MARK: - Questions
//
// What a server, or a sign-in, wants of the person. All of it is asked on
// stderr and answered at the terminal, so that stdout stays the result's; the
// call waits meanwhile. Without a terminal nobody can be asked, and the answer
// is no.
//
// Servers write these texts. Whoever asks is named in words of ours, and what
// is theirs is shown without escape sequences.
//=============================================================================

// One line, whatever is in it: a second one could pass for words of ours.
static void put_line(mcp_str s) {
    while (s.len) {
        const char *end = memchr(s.ptr, '\n', s.len);
        size_t n = end ? (size_t)(end - s.ptr) : s.len;
        put_safe(stderr, s.ptr, n);
        if (n < s.len) fputc(' ', stderr), n++;
        s.ptr += n;
        s.len -= n;
    }
}

static void put_words(const char *text) {
    mcp_str s = {text, strlen(text)};
    put_line(s);
}

// A server's own text, each line marked as such; what would push the question
// out of sight is left out.
static void put_quoted(const char *text) {
    enum { LINES = 30, BYTES = 4000 };
    size_t left = BYTES;

    for (int i = 0; *text && i < LINES && left; i++) {
        size_t n = strcspn(text, "\n"), show = n < left ? n : left;
        while (show && show < n && (text[show] & 0xC0) == 0x80) show--;
        fputs("  | ", stderr);
        put_safe(stderr, text, show);
        fputc('\n', stderr);
        left -= show;
        text += show + (text[show] == '\n');
        if (show < n) break;
    }
    if (*text) fputs("  (more was said, and is not shown)\n", stderr);
}

static bool terminal(const cli *c) {
    return c->err_tty && isatty(STDIN_FILENO);
}

// The next line a person types. NULL: none (Ctrl-D), or the person has had
// enough: then the call is over as well (Ctrl-C).
static const char *ask_line(cli *c, editor *e, const char *prompt,
                            bool hidden) {
    bool typed;
    e->prompt = prompt;
    e->question = true;
    e->hidden = hidden;
    typed = edit_line(e);
    if (e->stopped || interrupted) {
        interrupted = 1;
        mcp_cancel(c->m);
        return NULL;
    }
    return typed ? e->line : NULL;
}

static bool ask_yes(cli *c, editor *e, const char *prompt) {
    const char *line = ask_line(c, e, prompt, false);
    return line && (*line == 'y' || *line == 'Y');
}

// A page for the person's own browser, given to it as one word: no shell has a
// say in it.
static bool open_page(const char *url) {
    static const char *const programs[] = {"xdg-open", "open"};
    extern char **environ;
    posix_spawn_file_actions_t quiet;
    bool ok = false;
    char *copy = strdup(url);

    if (!copy) return false;
    posix_spawn_file_actions_init(&quiet);
    for (int fd = 0; fd < 3; fd++)
        posix_spawn_file_actions_addopen(&quiet, fd, "/dev/null", O_RDWR, 0);
    for (size_t i = 0; i < 2 && !ok; i++) {
        char program[16];
        char *argv[] = {program, copy, NULL};
        pid_t pid;
        snprintf(program, sizeof program, "%s", programs[i]);
        ok = !posix_spawnp(&pid, program, &quiet, NULL, argv, environ);
    }
    posix_spawn_file_actions_destroy(&quiet);
    free(copy);
    return ok;
}

// The whole address, since only the whole says where it leads; its host in bold
// as that is what can be told from a forgery.
static void put_address(const char *url) {
    const char *host = strstr(url, "://");
    size_t n;
    host = host ? host + 3 : url;
    n = strcspn(host, "/?#");
    put_safe(stderr, url, (size_t)(host - url));
    fputs("\033[1m", stderr);
    put_safe(stderr, host, n);
    fputs("\033[0m", stderr);
    put_words(host + n);
}

// Does a label of the host begin with "xn--" (RFC 5890)? It then stands for a
// name in other letters, which may look like a name one knows.
static bool is_punycode(const char *url) {
    const char *host = strstr(url, "://");
    size_t n;
    host = host ? host + 3 : url;
    n = strcspn(host, "/?#");
    for (size_t i = 0; i + 4 <= n; i++)
        if ((i == 0 || host[i - 1] == '.') &&
            strncasecmp(host + i, "xn--", 4) == 0)
            return true;
    return false;
}

// "url" mode: the page is the server's and never comes back to us; whether the
// person has been there is all it is told.
static void ask_page(cli *c, editor *e, const mcp_event *ev) {
    const char *url = mcp_string(mcp_get(ev->request, "url"), "");

    fprintf(stderr, "%s wants you to open this page in your browser:\n\n  ",
            ev->server);
    put_address(url);
    fputs("\n\n", stderr);
    if (is_punycode(url))
        fputs("Look twice: a name that begins with xn-- stands for letters "
              "that may imitate\nanother site.\n\n", stderr);
    if (!ask_yes(c, e, "Open it? [y/N] ")) {
        mcp_answer(c->m, ev->id, NULL);
        return;
    }
    if (!open_page(url))
        fputs("mcp: no browser could be started; open the page yourself\n",
              stderr);
    mcp_answer(c->m, ev->id, "{\"action\":\"accept\"}");
}

// The choices of a field, or a missing cursor: values, or objects with a const
// and a title. Of a list they stand at its items.
static mcp_json choices_of(mcp_json field, bool *several) {
    static const char *const keys[] = {"enum", "oneOf", "anyOf"};
    mcp_json none = {NULL, 0};
    *several = strcmp(mcp_string(mcp_get(field, "type"), ""), "array") == 0;
    if (*several) field = mcp_get(field, "items");
    for (size_t i = 0; i < 3; i++) {
        mcp_json list = mcp_get(field, keys[i]);
        bool ok = mcp_typeof(list) == MCP_ARRAY && mcp_length(list);
        if (ok && i) ok = mcp_exists(mcp_get(mcp_first(list), "const"));
        if (ok) return list;
    }
    return none;
}

static mcp_json choice_value(mcp_json choice) {
    mcp_json v = mcp_get(choice, "const");
    return mcp_exists(v) ? v : choice;
}

// Text as it is, other values as JSON.
static void put_value(mcp_json v) {
    put_line(mcp_typeof(v) == MCP_STRING ? mcp_view(v) : mcp_raw(v));
}

// The i-th choice by its title, if it has one.
static void put_choice(mcp_json field, mcp_json choice, size_t i) {
    mcp_json names = mcp_get(field, "enumNames");
    const char *name = mcp_string(mcp_get(choice, "title"),
                                  mcp_string(mcp_at(names, i), ""));
    if (*name) put_words(name);
    else put_value(choice_value(choice));
}

// A value as the person knows it: a choice by what it was shown as.
static void put_chosen(mcp_json field, mcp_json list, mcp_json value) {
    mcp_json v = mcp_first(list);
    for (size_t i = 0; mcp_exists(v); v = mcp_next(v), i++) {
        mcp_json is = choice_value(v);
        bool text = mcp_typeof(value) == MCP_STRING;
        mcp_str a = text ? mcp_view(is) : mcp_raw(is);
        mcp_str b = text ? mcp_view(value) : mcp_raw(value);
        if (mcp_typeof(is) != mcp_typeof(value) || a.len != b.len ||
            (a.len && memcmp(a.ptr, b.ptr, a.len) != 0))
            continue;
        put_choice(field, v, i);
        return;
    }
    put_value(value);
}

static void put_default(mcp_json field, mcp_json list, bool several) {
    mcp_json v = mcp_get(field, "default");
    const char *between = "";

    if (!mcp_exists(v)) return;
    fputs("  Default: ", stderr);
    several = several && mcp_typeof(v) == MCP_ARRAY;
    if (several && !mcp_length(v)) fputs("none", stderr);
    for (v = several ? mcp_first(v) : v; mcp_exists(v);) {
        fputs(between, stderr);
        put_chosen(field, list, v);
        between = ", ";
        if (!several) break;
        v = mcp_next(v);
    }
    fputc('\n', stderr);
}

// "18 to 120", "2 characters or more"; nothing where there are no bounds.
static void put_range(mcp_json low, mcp_json high, const char *unit) {
    bool from = mcp_typeof(low) == MCP_NUMBER &&
                (!*unit || mcp_number(low, 0) > 0);
    bool to = mcp_typeof(high) == MCP_NUMBER;

    if (!from && !to) return;
    fputs(from ? "  " : "  at most ", stderr);
    if (from) put_value(low);
    if (from && to) fputs(" to ", stderr);
    if (to) put_value(high);
    fputs(unit, stderr);
    fputs(from && !to ? " or more\n" : "\n", stderr);
}

// What will be taken, as far as the form says.
static void put_bounds(mcp_json field, bool several) {
    static const char *const formats[][2] = {
        {"email", "an e-mail address"},
        {"uri", "an address such as https://example.com/"},
        {"date", "a date: YYYY-MM-DD"},
        {"date-time", "a date and time: YYYY-MM-DDTHH:MM:SSZ"}};
    const char *format = mcp_string(mcp_get(field, "format"), "");
    mcp_json over = mcp_get(field, "exclusiveMinimum");
    mcp_json under = mcp_get(field, "exclusiveMaximum");

    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (strcmp(format, formats[i][0]) == 0)
            fprintf(stderr, "  %s\n", formats[i][1]);
    put_range(mcp_get(field, "minLength"), mcp_get(field, "maxLength"),
              " characters");
    put_range(mcp_get(field, "minimum"), mcp_get(field, "maximum"), "");
    if (mcp_typeof(over) == MCP_NUMBER)
        fputs("  more than ", stderr), put_value(over), fputc('\n', stderr);
    if (mcp_typeof(under) == MCP_NUMBER)
        fputs("  less than ", stderr), put_value(under), fputc('\n', stderr);
    if (several)
        put_range(mcp_get(field, "minItems"), mcp_get(field, "maxItems"),
                  " of them");
}

// A field's name, what it is for, what may be given. `kept`: what was typed in
// the round before, or NULL.
static void put_field(mcp_json field, bool required, const char *kept) {
    const char *title = mcp_string(mcp_get(field, "title"), mcp_key(field));
    const char *about = mcp_string(mcp_get(field, "description"), "");
    bool several;
    mcp_json list = choices_of(field, &several), v = mcp_first(list);

    put_words(title);
    if (required) fputs(" (required)", stderr);
    fputc('\n', stderr);
    put_quoted(about);
    for (size_t i = 0; mcp_exists(v); v = mcp_next(v), i++) {
        fprintf(stderr, "  %zu) ", i + 1);
        put_choice(field, v, i);
        fputc('\n', stderr);
    }
    put_bounds(field, several);
    if (several) fputs("  Several numbers may be given.\n", stderr);
    if (!kept) {
        put_default(field, list, several);
        return;
    }
    fputs("  Enter keeps: ", stderr);
    put_words(kept);
    fputc('\n', stderr);
}

// The choice of that number, or that very value.
static mcp_json choice_of(mcp_json list, const char *word, size_t n) {
    mcp_json v = mcp_first(list);
    char number[24];
    for (size_t i = 1; mcp_exists(v); v = mcp_next(v), i++) {
        mcp_str text = mcp_view(choice_value(v));
        snprintf(number, sizeof number, "%zu", i);
        if ((strlen(number) == n && strncmp(number, word, n) == 0) ||
            (text.len == n && n && strncmp(text.ptr, word, n) == 0))
            return choice_value(v);
    }
    return v;
}

static void write_value(mcp_writer *w, mcp_json v) {
    char *copy = strndup(mcp_raw(v).ptr, mcp_raw(v).len);
    mcp_w_raw(w, copy ? copy : "null");
    free(copy);
}

static void write_word(mcp_writer *w, const char *word, size_t n) {
    char *copy = strndup(word, n);
    mcp_w_string(w, copy);
    free(copy);
}

// What was typed as a value of the field's type. What does not fit is written
// as text, and the library says what is wrong with it.
static void write_typed(mcp_writer *w, mcp_json field, const char *typed) {
    const char *type = mcp_string(mcp_get(field, "type"), "string");
    bool several;
    mcp_json list = choices_of(field, &several), v;
    mcp_result *r = NULL;

    if (several) mcp_w_array(w);
    if (mcp_exists(list)) {
        for (size_t n; *typed; typed += n) {
            typed += strspn(typed, several ? " ,\t" : " \t");
            n = several ? strcspn(typed, " ,\t") : strlen(typed);
            if (!n) break;
            v = choice_of(list, typed, n);
            if (mcp_exists(v)) write_value(w, v);
            else write_word(w, typed, n);
        }
    } else if (strcmp(type, "boolean") == 0 && strchr("yYtT", *typed)) {
        mcp_w_boolean(w, true);
    } else if (strcmp(type, "boolean") == 0 && strchr("nNfF", *typed)) {
        mcp_w_boolean(w, false);
    } else if ((strcmp(type, "number") == 0 || strcmp(type, "integer") == 0) &&
               !mcp_parse(NULL, typed, strlen(typed), &r) &&
               mcp_typeof(mcp_root(r)) == MCP_NUMBER) {
        mcp_w_raw(w, typed);
    } else {
        mcp_w_string(w, typed);
    }
    if (several) mcp_w_end(w);
    mcp_free(r);
}

static bool is_required(mcp_json schema, const char *name) {
    mcp_json v = mcp_first(mcp_get(schema, "required"));
    while (mcp_exists(v) && strcmp(mcp_string(v, ""), name) != 0)
        v = mcp_next(v);
    return mcp_exists(v);
}

// What cannot be a value of the field's type at all is said at once; NULL: it
// may be one.
static const char *typed_wrong(mcp_json field, const char *typed) {
    const char *type = mcp_string(mcp_get(field, "type"), "");
    bool several, whole = strcmp(type, "integer") == 0, number;
    mcp_result *r = NULL;

    if (!*typed || mcp_exists(choices_of(field, &several))) return NULL;
    if (strcmp(type, "boolean") == 0)
        return strchr("yYtTnNfF", *typed) ? NULL : "Answer yes or no.";
    if (!whole && strcmp(type, "number") != 0) return NULL;
    number = mcp_parse(NULL, typed, strlen(typed), &r) == MCP_OK &&
             mcp_typeof(mcp_root(r)) == MCP_NUMBER;
    mcp_free(r);
    if (number) return NULL;
    return whole ? "This is not a whole number." : "This is not a number.";
}

// What is typed for a field, in *kept from now on; an empty line keeps what is
// there. False: the person has had enough.
static bool ask_field(cli *c, editor *e, mcp_json field, char **kept) {
    bool flag = strcmp(mcp_string(mcp_get(field, "type"), ""), "boolean") == 0;
    const char *line, *wrong;

    for (;;) {
        line = ask_line(c, e, flag ? "  yes or no> " : "  > ", false);
        if (!line) return false;
        wrong = typed_wrong(field, line);
        if (!wrong) break;
        fprintf(stderr, "  %s\n", wrong);
    }
    if (!*line) return true;
    free(*kept);
    return (*kept = strdup(line)) != NULL;
}

// Ask for each field; an empty line takes the default, or leaves it out. False:
// the person has had enough.
static bool fill_form(cli *c, editor *e, mcp_json schema, char **kept,
                      mcp_writer *w) {
    mcp_json field = mcp_first(mcp_get(schema, "properties"));

    mcp_w_object(w);
    mcp_w_key(w, "action");
    mcp_w_string(w, "accept");
    mcp_w_key(w, "content");
    mcp_w_object(w);
    for (int i = 0; mcp_exists(field) && i < MAX_FIELDS; i++) {
        put_field(field, is_required(schema, mcp_key(field)), kept[i]);
        if (!ask_field(c, e, field, &kept[i])) return false;
        if (kept[i])
            mcp_w_key(w, mcp_key(field)), write_typed(w, field, kept[i]);
        field = mcp_next(field);
    }
    mcp_w_end(w);
    mcp_w_end(w);
    return true;
}

// Until the library takes it, or the person has had enough: it checks what is
// given, and says which field is wrong.
static void ask_form(cli *c, editor *e, const mcp_event *ev) {
    mcp_json schema = mcp_get(ev->request, "requestedSchema");
    char *kept[MAX_FIELDS] = {NULL};  // what was typed, by field
    bool done = false;

    fputs("Enter takes the default or leaves a field out, Ctrl-D declines, "
          "Ctrl-C stops the call.\n", stderr);
    while (!done) {
        mcp_writer *w = mcp_w_new(NULL);
        const char *answer = w && fill_form(c, e, schema, kept, w)
                                 ? mcp_w_text(w) : NULL;
        if (answer && !ask_yes(c, e, "Send this? [y/N] ")) {
            fputs("Declined: nothing was sent.\n", stderr);
            answer = NULL;
        }
        done = mcp_answer(c->m, ev->id, answer) == MCP_OK || !answer;
        if (!done) {
            fputs("This does not fit: ", stderr);
            put_words(mcp_last_error(c->m)->detail);
            fputs("\nOnce more; Enter keeps what was typed.\n", stderr);
        }
        mcp_w_free(w);
    }
    for (int i = 0; i < MAX_FIELDS; i++) free(kept[i]);
}

static void ask_elicit(cli *c, const mcp_event *ev) {
    editor *e = terminal(c) ? calloc(1, sizeof *e) : NULL;
    const char *mode = mcp_string(mcp_get(ev->request, "mode"), "form");

    if (!e) {
        fprintf(stderr, "mcp: %s asks for input, which was declined: %s\n",
                ev->server, c->err_tty ? "standard input is not a terminal"
                                       : "there is no terminal to ask at");
        mcp_answer(c->m, ev->id, NULL);
        return;
    }
    fprintf(stderr, "The server %s asks:\n", ev->server);
    put_quoted(mcp_string(mcp_get(ev->request, "message"), ""));
    if (strcmp(mode, "url") == 0) ask_page(c, e, ev);
    else ask_form(c, e, ev);
    free(e);
}

// Who wants what, for which the person is asked to vouch elsewhere.
static void put_sign_in(const mcp_event *ev) {
    mcp_json v = mcp_first(mcp_get(ev->request, "scopes"));

    fprintf(stderr, "Sign in to %s\n  Issuer: ", ev->server);
    put_words(mcp_string(mcp_get(ev->request, "issuer"), "?"));
    fputs("\n  Scopes:", stderr);
    if (!mcp_exists(v)) fputs(" none asked for", stderr);
    for (; mcp_exists(v); v = mcp_next(v)) {
        fputc(' ', stderr);
        put_words(mcp_string(v, ""));
    }
    fputs("\n  Callback: ", stderr);
    put_words(mcp_string(mcp_get(ev->request, "redirect_uri"), "?"));
    fputc('\n', stderr);
    for (v = mcp_first(mcp_get(ev->request, "notes")); mcp_exists(v);
         v = mcp_next(v)) {
        fputs("  Note: ", stderr);
        put_words(mcp_string(v, ""));
        fputc('\n', stderr);
    }
}

// The address that the browser ended at, from the terminal (it holds a code, so
// it is not shown) or, where there is none, a line of standard input.
static const char *pasted_line(cli *c, editor *e) {
    if (terminal(c)) return ask_line(c, e, "Address: ", true);
    if (!fgets(e->line, sizeof e->line, stdin)) return NULL;
    e->line[strcspn(e->line, "\r\n")] = 0;
    return e->line;
}

static void paste_callback(cli *c, editor *e, const mcp_event *ev) {
    bool done = false;

    fputs("\nOpen this address in a browser, on any machine:\n\n", stderr);
    put_words(mcp_string(mcp_get(ev->request, "url"), ""));
    fputs("\n\nWhen you are through, the browser ends at the callback, which "
          "may look like an\nerror. Paste the whole address it shows, within "
          "two minutes, and nowhere else.\nCtrl-D gives up.\n", stderr);
    while (!done) {
        const char *line = pasted_line(c, e), *text = NULL;
        mcp_writer *w = line ? mcp_w_new(NULL) : NULL;
        if (w) {
            mcp_w_object(w);
            mcp_w_key(w, "callback");
            mcp_w_string(w, line);
            mcp_w_end(w);
            text = mcp_w_text(w);
        }
        done = mcp_answer(c->m, ev->id, text) == MCP_OK || !text;
        if (!done) {
            fputs("mcp: ", stderr);
            put_words(mcp_last_error(c->m)->detail);
            fputc('\n', stderr);
        }
        mcp_w_free(w);
    }
    memset(e->line, 0, sizeof e->line);
}

static void ask_sign_in(cli *c, const mcp_event *ev) {
    editor *e;

    put_sign_in(ev);
    if (mcp_boolean(mcp_get(ev->request, "browser"), false)) {
        fputs("Opening the browser; Ctrl-C stops. If none opens, go to:\n\n",
              stderr);
        put_words(mcp_string(mcp_get(ev->request, "url"), ""));
        fputs("\n\n", stderr);
        return;  // the answer comes by itself
    }
    e = calloc(1, sizeof *e);
    if (e) paste_callback(c, e, ev);
    else mcp_answer(c->m, ev->id, NULL);
    free(e);
}

// The path of --root as a file URI (RFC 8089); a path may hold anything.
static char *root_uri(const char *path) {
    static const char plain[] = "-._~/";
    size_t size = 3 * strlen(path) + sizeof "file://";
    char *uri = malloc(size);
    size_t n = 0;

    if (!uri) return NULL;
    n = (size_t)snprintf(uri, size, "file://");
    for (; *path; path++) {
        unsigned char ch = (unsigned char)*path;
        bool ok = isalnum(ch) || strchr(plain, ch);
        n += (size_t)snprintf(uri + n, size - n, ok ? "%c" : "%%%02X", ch);
    }
    return uri;
}

static void answer_roots(cli *c, const mcp_event *ev) {
    mcp_writer *w = mcp_w_new(NULL);
    char *uri = c->root ? root_uri(c->root) : NULL;

    mcp_w_object(w);
    mcp_w_key(w, "roots");
    mcp_w_array(w);
    mcp_w_object(w);
    mcp_w_key(w, "uri");
    mcp_w_string(w, uri);
    mcp_w_end(w);
    mcp_w_end(w);
    mcp_w_end(w);
    mcp_answer(c->m, ev->id, uri ? mcp_w_text(w) : NULL);
    mcp_w_free(w);
    free(uri);
}

// Nothing is sampled here: the command has no model, and says so to servers.
static void on_ask(cli *c, const mcp_event *ev) {
    switch (ev->ask) {
    case MCP_ASK_ELICIT: ask_elicit(c, ev); return;
    case MCP_ASK_SIGN_IN: ask_sign_in(c, ev); return;
    case MCP_ASK_ROOTS: answer_roots(c, ev); return;
    case MCP_ASK_SAMPLE: break;
    }
    mcp_answer(c->m, ev->id, NULL);
}

// The library has made the texts safe to show and masked what is secret.
static void on_event(void *user, const mcp_event *ev) {
    cli *c = user;
    const char *arrow = ev->outgoing ? "->" : "<-";
    switch (ev->type) {
    case MCP_EV_PROGRESS:
        show_progress(c, ev);
        return;
    case MCP_EV_WARNING:
        clear_progress(c);
        fprintf(stderr, "mcp: %s%s%.*s\n", ev->server, *ev->server ? ": " : "",
                MCP_ARG(ev->text));
        return;
    case MCP_EV_TRACE:
        clear_progress(c);
        fprintf(stderr, "%s %s %.*s\n", ev->server, arrow, MCP_ARG(ev->text));
        return;
    case MCP_EV_LOG:
    case MCP_EV_STATE:
    case MCP_EV_CHANGED:
        if (!c->verbose) return;
        clear_progress(c);
        fprintf(stderr, "%s: %.*s\n", ev->server, MCP_ARG(ev->text));
        return;
    case MCP_EV_ASK:
        clear_progress(c);
        on_ask(c, ev);
        return;
    case MCP_EV_WITHDRAWN:  // what is asked here is answered at once
    case MCP_EV_DONE:
        return;
    }
}

//=============================================================================
// MARK: - Shell
//
// One process and one handle for many lines, so that connections stay open and
// what is activated stays active: the way a model's host lives.
//=============================================================================

static const char shell_help[] =
    "  COMMAND...             any command: status, search, /mcp help\n"
    "  mcp_tools {JSON}       what a model would send: {\"query\":\"...\"}\n"
    "  NATIVE_NAME {JSON}     call an active tool by its name for the model\n"
    "  definitions            the tools a model would be given now\n"
    "  quit                   leave (Ctrl-D too)\n";

// What a model sends begins with mcp_ (mcp_tools, mcp__server__tool). All else
// is a command, with /mcp in front of it or not: the place of its first word.
static const char *command_of(const char *line, size_t word) {
    if (strncmp(line, "mcp_", 4) == 0) return NULL;
    if (word == 4 && strncmp(line, "/mcp", 4) == 0) return line + word;
    return word == 3 && strncmp(line, "mcp", 3) == 0 ? line + word : line;
}

static int shell_line(cli *c, char *line) {
    char *rest = line + strspn(line, " \t");
    size_t word = strcspn(rest, " \t");
    mcp_result *r = NULL;
    mcp_code rc;
    int status;

    if (!*rest) return 0;
    if (word == 4 && strncmp(rest, "help", 4) == 0)
        return fputs(shell_help, stdout), 0;
    if (strcmp(rest, "definitions") == 0) {
        rc = mcp_definitions(c->m, MCP_SHAPE_MCP, &r);
    } else if (command_of(rest, word)) {
        rc = mcp_command(c->m, command_of(rest, word), &r);
    } else {
        char *args = rest + word;
        if (*args) *args++ = 0;
        args += strspn(args, " \t");
        rc = mcp_dispatch(c->m, rest, *args ? args : NULL, &r);
        if (rc != MCP_OK && r) {  // a failure is a result here: show it
            clear_progress(c);
            put_text(c, mcp_text(r));
            mcp_free(r);
            return EXIT_FAILED;
        }
    }
    status = show(c, rc, r);
    mcp_free(r);
    return status;
}

// The status of the last line is that of the shell, as in any other.
static int shell(cli *c) {
    static editor e;
    bool terminal = isatty(STDIN_FILENO) && c->out_tty;
    int status = 0;

    e.prompt = "mcp> ";
    if (terminal) puts("Type help for help, Ctrl-D to leave.");
    while (next_line(&e, terminal)) {
        const char *word = e.line + strspn(e.line, " \t");
        if (strcmp(word, "quit") == 0 || strcmp(word, "exit") == 0) break;
        catch_interrupt();
        status = shell_line(c, e.line);
        interrupted = 0;  // what it ended is over, and not the next line
    }
    for (int i = 0; i < e.count; i++) free(e.history[i]);
    return status;
}

//=============================================================================
// MARK: - Main
//
// Options of our own may stand anywhere; the rest goes to the library word by
// word, untouched: no quoting is undone twice.
//=============================================================================

static const char usage[] =
    "usage: mcp [options] [command]\n"
    "\n"
    "Options, anywhere before a lone --:\n"
    "  --json             print the result as JSON\n"
    "  --config-dir DIR   the directory of mcp.json\n"
    "  --timeout TIME     deadline of each request: 500ms, 30s, or a number\n"
    "                     of milliseconds\n"
    "  --cached           never connect; use what is cached\n"
    "  --session FILE     keep activated tools in FILE between commands\n"
    "  --ca-file FILE     trust these certificate authorities (PEM)\n"
    "  --proxy URL        an http:// proxy, or none (default: $HTTPS_PROXY,\n"
    "                     $HTTP_PROXY, $NO_PROXY)\n"
    "  --root DIR         tell servers that ask that they may work in DIR\n"
    "  --full             show long results whole on a terminal too\n"
    "  --verbose          show each message and what the servers log\n"
    "  --help, --version\n"
    "\n";

// What the library knows nothing of. "call" is half its own.
static const struct own {
    const char *name, *usage, *about;
} own_commands[] = {
    {"call", "<server.tool> -",
     "Call a tool with the JSON object on standard input."},
    {"shell", "",
     "Type commands, and what a model would send, one after another."},
    {"version", "", "Print the version."},
};

static const char more[] =
    "\n"
    "Environment: MCP_CONFIG_DIR, the directory of mcp.json; MCP_CREDENTIALS,\n"
    "where a sign-in is kept: keyring (the default), file or memory.\n"
    "\n"
    "Exit status: 0 done, 1 failed or the tool reported an error, 2 usage,\n"
    "3 configuration, 4 authentication required, 130 interrupted.\n";

// `word` is one of our own, never what was typed: that may be a secret.
static int bad_usage(const char *word, const char *what) {
    fprintf(stderr, "mcp: %s%s%s\nRun mcp --help for the options.\n", word,
            *word ? " " : "", what);
    return EXIT_USAGE;
}

// "500", "500ms", "30s" in milliseconds; 0: none of them.
static int time_of(const char *s) {
    char *end;
    long n;
    if (!isdigit((unsigned char)*s)) return 0;
    errno = 0;
    n = strtol(s, &end, 10);
    if (errno || n > MAX_MS) return 0;
    if (strcmp(end, "s") == 0) n = n <= MAX_MS / 1000 ? n * 1000 : 0;
    else if (*end && strcmp(end, "ms") != 0) return 0;
    return n >= 1 ? (int)n : 0;
}

typedef struct option {
    const char *name;
    enum { OPT_JSON, OPT_CONFIG, OPT_TIME, OPT_CACHED, OPT_SESSION, OPT_CA,
           OPT_PROXY, OPT_ROOT, OPT_FULL, OPT_VERBOSE } is;
    bool value;
} option;

static const option options[] = {
    {"--json", OPT_JSON, false},        {"--config-dir", OPT_CONFIG, true},
    {"--timeout", OPT_TIME, true},      {"--cached", OPT_CACHED, false},
    {"--session", OPT_SESSION, true},   {"--ca-file", OPT_CA, true},
    {"--proxy", OPT_PROXY, true},       {"--root", OPT_ROOT, true},
    {"--full", OPT_FULL, false},        {"--verbose", OPT_VERBOSE, false},
};

// Of one given twice the last counts, as a script may add its own to yours.
static int set_option(cli *c, const option *o, const char *value) {
    switch (o->is) {
    case OPT_JSON: c->json = true; break;
    case OPT_CONFIG: c->config_dir = value; break;
    case OPT_CACHED: c->cached = true; break;
    case OPT_SESSION: c->session = value; break;
    case OPT_CA: c->ca_file = value; break;
    case OPT_PROXY: c->proxy = strcmp(value, "none") ? value : ""; break;
    case OPT_ROOT: c->root = value; break;
    case OPT_FULL: c->full = true; break;
    case OPT_VERBOSE: c->verbose = true; break;
    case OPT_TIME:
        if (!(c->timeout_ms = time_of(value)))
            return bad_usage(o->name, "needs a time such as 500ms or 30s, at "
                                      "most 600s");
        break;
    }
    return 0;
}

// Take our options out of argv; what is left is the command. The value of an
// option may follow it or stand behind '='.
static int take_options(cli *c, int *argc, const char **argv) {
    int n = 0, rc;
    for (int i = 1; i < *argc; i++) {
        const option *o = NULL;
        size_t len = strcspn(argv[i], "=");
        if (strcmp(argv[i], "--") == 0) {
            while (i < *argc) argv[n++] = argv[i++];
            break;
        }
        for (size_t k = 0; k < sizeof options / sizeof *options; k++)
            if (strlen(options[k].name) == len &&
                strncmp(options[k].name, argv[i], len) == 0)
                o = &options[k];
        if (!o) {
            argv[n++] = argv[i];
        } else if (!o->value) {
            if (argv[i][len]) return bad_usage(o->name, "takes no value");
            set_option(c, o, NULL);
        } else {
            const char *value = argv[i][len] ? argv[i] + len + 1 : argv[++i];
            if (!value || !*value)
                return bad_usage(o->name, "needs a value");
            if ((rc = set_option(c, o, value))) return rc;
        }
    }
    argv[*argc = n] = NULL;
    return 0;
}

static void put_own(const struct own *o) {
    printf("  mcp %s%s%s\n      %s\n", o->name, *o->usage ? " " : "", o->usage,
           o->about);
}

// Is this about a command of ours alone? Then it was answered.
static bool help_own(const cli *c, const char *topic) {
    const struct own *o = &own_commands[1];
    mcp_writer *w;
    const char *text;

    if (strcmp(topic, "shell") != 0 && strcmp(topic, "version") != 0)
        return false;
    if (strcmp(topic, o->name) != 0) o++;
    if (!c->json) return put_own(o), true;
    w = mcp_w_new(NULL);
    mcp_w_object(w);
    mcp_w_key(w, "commands");
    mcp_w_array(w);
    mcp_w_object(w);
    mcp_w_key(w, "name"), mcp_w_string(w, o->name);
    mcp_w_key(w, "usage"), mcp_w_string(w, o->usage);
    mcp_w_key(w, "about"), mcp_w_string(w, o->about);
    mcp_w_end(w);
    mcp_w_end(w);
    mcp_w_end(w);
    text = mcp_w_text(w);
    puts(text ? text : "{}");
    mcp_w_free(w);
    return true;
}

// The library knows the commands; options and exit statuses are ours.
static int help(cli *c) {
    static const char *const words[] = {"help"};
    mcp_result *r = NULL;
    mcp_code rc = mcp_command_argv(c->m, 1, words, &r);
    if (rc != MCP_OK || c->json) {
        int status = show(c, rc, r);
        return mcp_free(r), status;
    }
    fputs(usage, stdout);
    puts(mcp_text(r));
    for (size_t i = 0; i < sizeof own_commands / sizeof *own_commands; i++)
        put_own(&own_commands[i]);
    fputs(more, stdout);
    mcp_free(r);
    return 0;
}

// `call TOOL -` reads the arguments, which may be too long for a command line
// or not be meant for the list of processes.
// A person, or a shell's completion, wants one value a line.
static int show_values(cli *c, const mcp_result *r) {
    clear_progress(c);
    for (mcp_json v = mcp_first(mcp_pointer(mcp_root(r), "/completion/values"));
         mcp_exists(v); v = mcp_next(v))
        if (!put_text(c, mcp_string(v, ""))) return EXIT_FAILED;
    return 0;
}

static int run_command(cli *c, int argc, const char **argv) {
    mcp_result *r = NULL;
    char *input = NULL;
    const char *word = argc ? argv[0] : "";
    size_t n;
    mcp_code rc;
    int status;

    if (argc > 1 && strcmp(word, "call") == 0 &&
        strcmp(argv[argc - 1], "-") == 0) {
        input = read_all(STDIN_FILENO, MAX_INPUT, &n);
        if (!input || strlen(input) != n)
            return free(input),
                   bad_usage("", "the arguments on standard input cannot be "
                                 "read, hold a NUL byte or are over 64 MiB");
        argv[argc - 1] = input;
    }
    rc = mcp_command_argv(c->m, argc, argv, &r);
    if (rc == MCP_OK && !c->json && strcmp(word, "complete") == 0)
        status = show_values(c, r);
    else
        status = show(c, rc, r);
    if (!status && !c->session && !c->json && strcmp(word, "activate") == 0)
        fputs("mcp: for this command only; --session FILE keeps it\n", stderr);
    mcp_free(r);
    free(input);
    return status;
}

// Help needs no configuration, so a broken file cannot stop it.
static bool asks_help(const char *word) {
    return strcmp(word, "help") == 0 || strcmp(word, "--help") == 0 ||
           strcmp(word, "-h") == 0;
}

static int run(cli *c, int argc, const char **argv) {
    const char *word = argc ? argv[0] : "";
    mcp_result *before = NULL;
    int status = 0;
    mcp_code rc;

    if (asks_help(word) || (argc == 2 && asks_help(argv[1]))) {
        if (!asks_help(word)) argv[1] = word;  // mcp add --help
        argv[0] = "help";
        if (argc == 2 && help_own(c, argv[1])) return 0;
        return argc == 1 ? help(c) : run_command(c, argc, argv);
    }
    if (*word == '-') return bad_usage("", "there is no such option");
    c->tells_trust = argc == 0 || strcmp(word, "list") == 0 ||
                     strcmp(word, "status") == 0 || strcmp(word, "trust") == 0;
    rc = mcp_load(c->m, NULL);
    // A project file that is broken can be taken off the list all the same.
    if (rc != MCP_OK && strcmp(word, "trust") != 0) return failed(c, rc);
    remember_trust(c);
    if (c->session && (status = load_session(c))) return status;
    if (c->session && access(c->session, F_OK) == 0)
        mcp_snapshot(c->m, &before);
    if (strcmp(word, "shell") == 0) {
        if (argc > 1) return bad_usage("shell", "takes no arguments");
        status = shell(c);
    } else {
        status = run_command(c, argc, argv);
    }
    if (c->session && !interrupted) {
        int saved = save_session(c, before);
        if (!status) status = saved;
    }
    mcp_free(before);
    return status;
}

// Servers are told that a person can be asked even where there is no terminal:
// a tool that hears "no" can go on, one that hears of no such thing may not run
// at all. Of a sign-in only one who can read hears, or a program that brings
// the callback.
static int open_handle(cli *c) {
    mcp_options opt;
    mcp_code rc;

    memset(&opt, 0, sizeof opt);
    opt.config_dir = c->config_dir;
    opt.ca_file = c->ca_file;
    opt.command_prefix = "mcp ";
    opt.timeout_ms = c->timeout_ms;
    opt.cached_only = c->cached;
    opt.trace = c->verbose;
    opt.proxy = c->proxy;
    opt.on_event = on_event;
    opt.asks = MCP_ASK_ELICIT;
    if (c->root) opt.asks |= MCP_ASK_ROOTS;
    if (c->err_tty || c->asks_sign_in) opt.asks |= MCP_ASK_SIGN_IN;
    opt.trust = on_trust;
    opt.user = c;
    rc = mcp_open(&c->m, &opt);
    if (rc == MCP_OK) return 0;
    fprintf(stderr, "mcp: cannot start: %s\n", mcp_code_name(rc));
    return exit_of(rc);
}

int main(int argc, char **argv) {
    const char *words[MAX_WORDS + 1];
    char *root = NULL;
    cli c;
    int rc;

    memset(&c, 0, sizeof c);
    c.out_tty = isatty(STDOUT_FILENO);
    c.err_tty = isatty(STDERR_FILENO);
    if (argc > MAX_WORDS)
        return bad_usage("", "too many arguments; `call TOOL -` reads them "
                             "from standard input");
    for (int i = 0; i <= argc; i++) words[i] = argv[i];
    if ((rc = take_options(&c, &argc, words))) return rc;
    if (argc && (strcmp(words[0], "--version") == 0 ||
                 strcmp(words[0], "version") == 0) &&
        !(argc == 2 && asks_help(words[1])))
        return printf(c.json ? "{\"version\":\"%s\"}\n" : "mcp %s\n",
                      mcp_version()), 0;
    for (int i = 0; i < argc; i++)
        if (strcmp(words[i], "--no-browser") == 0) c.asks_sign_in = true;
    if (c.root && !(root = realpath(c.root, NULL)))
        return bad_usage("--root", "names no directory there is");
    if (root) c.root = root;
    rc = open_handle(&c);
    if (rc) return free(root), rc;
    the_handle = c.m;
    catch_interrupt();
    rc = run(&c, argc, words);
    clear_progress(&c);
    fflush(stdout);  // the result is out before the servers are shut down
    the_handle = NULL;
    mcp_close(c.m);
    free(root);
    return rc;
}
