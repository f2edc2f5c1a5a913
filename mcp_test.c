// mcp_test.c - all tests. Usage: mcp_test [-l] [prefix...]
//
// It includes mcp.c, so it can test what no caller sees. Parts stand in the
// order of mcp.c's sections; tables where cases are many. Tests that start
// processes or open sockets come last in their part and use loopback only.

#include "mcp.c"

//=============================================================================
// MARK: - Harness
//=============================================================================

typedef struct test {
    const char *name;
    void (*fn)(void);
} test;

static int checks, failures;

#define CHECK(cond) check((cond), #cond, __FILE__, __LINE__)
#define CHECK_STR(got, want) check_str((got), (want), __FILE__, __LINE__)
#define CHECK_INT(got, want)                                                  \
    check_int((long long)(got), (long long)(want), #got, __FILE__, __LINE__)

static bool check(bool ok, const char *what, const char *file, int line) {
    checks++;
    if (ok) return true;
    failures++;
    printf("%s:%d: %s\n", file, line, what);
    return false;
}

static bool check_str(str got, str want, const char *file, int line) {
    checks++;
    if (str_eq(got, want)) return true;
    failures++;
    printf("%s:%d: got \"%.*s\", want \"%.*s\"\n", file, line, MCP_ARG(got),
           MCP_ARG(want));
    return false;
}

static bool check_int(long long got, long long want, const char *what,
                      const char *file, int line) {
    checks++;
    if (got == want) return true;
    failures++;
    printf("%s:%d: %s is %lld, want %lld\n", file, line, what, got, want);
    return false;
}

// An allocator that counts, checks the sizes it is told, and can fail once.
typedef struct heap {
    size_t live, calls, fail_at;
    bool failed;
} heap;

static void *heap_fn(void *user, void *ptr, size_t old, size_t size) {
    heap *h = user;
    size_t *block = ptr ? (size_t *)ptr - 2 : NULL, *p;
    if (block) CHECK_INT(*block, old);  // the size it was made with
    if (!size) {
        h->live -= old;
        free(block);
        return NULL;
    }
    if (++h->calls == h->fail_at) return h->failed = true, NULL;
    p = realloc(block, size + 2 * sizeof *p);
    if (!p) return NULL;
    h->live += size - (ptr ? old : 0);
    *p = size;
    return p + 2;
}

// Run `body` with allocation 1, 2, 3... failing until it gets through: nothing
// may leak and only out_of_memory may come out. Above 2,000 it samples.
static void torture(mcp_code (*body)(mem *m)) {
    for (size_t n = 1;; n += n > 2000 ? n / 50 : 1) {
        heap h = {0, 0, n, false};
        mem m = {heap_fn, &h};
        mcp_code rc = body(&m);
        CHECK(rc == MCP_OK || (h.failed && rc == MCP_OUT_OF_MEMORY));
        CHECK_INT(h.live, 0);
        if (!h.failed) return;
    }
}

// A copy of `s` in a block of exactly its size: ASan then sees one byte over.
static char *exact(str s) {
    char *p = malloc(s.len ? s.len : 1);
    if (p && s.len) memcpy(p, s.ptr, s.len);
    return p;
}

//=============================================================================
// MARK: - Text
//=============================================================================

#define T(literal) (literal), sizeof(literal) - 1

static void test_text_views(void) {
    str head, tail;

    CHECK(str_of(NULL).len == 0 && str_of("abc").len == 3);
    CHECK(str_eq(S(""), str_make(NULL, 0)) && !str_eq(S("a"), S("b")));
    CHECK(str_is(S("ab"), "ab") && !str_is(S("ab"), "abc"));
    CHECK(str_is(S(""), "") && str_is(S(""), NULL));
    CHECK(str_eq_nocase(S("Content-TYPE"), S("content-type")));
    CHECK(!str_eq_nocase(S("a"), S("ab")) && !str_eq_nocase(S("["), S("{")));
    CHECK(str_starts(S("abc"), S("ab")) && str_starts(S("abc"), S("")));
    CHECK(!str_starts(S("ab"), S("abc")) && !str_starts(S(""), S("a")));
    CHECK(str_ends(S("abc"), S("bc")) && str_ends(S(""), S("")));
    CHECK(!str_ends(S("bc"), S("abc")) && str_ends(S("abc"), S("abc")));
    CHECK(str_cmp(S("a"), S("b")) < 0 && str_cmp(S("b"), S("a")) > 0);
    CHECK(str_cmp(S("a"), S("ab")) < 0 && str_cmp(S("\xFF"), S("a")) > 0);
    CHECK(str_cmp(S(""), str_make(NULL, 0)) == 0);
    CHECK_INT(str_find(S("abcabd"), S("abd")), 3);
    CHECK_INT(str_find(S("aab"), S("ab")), 1);
    CHECK_INT(str_find(S("abc"), S("")), 0);
    CHECK(str_find(S("abc"), S("abcd")) == SIZE_MAX);
    CHECK(str_find(S(""), S("a")) == SIZE_MAX);
    CHECK(str_cut(S("a=b=c"), '=', &head, &tail));
    CHECK_STR(head, S("a"));
    CHECK_STR(tail, S("b=c"));
    CHECK(str_cut(S("a="), '=', &head, &tail) && tail.len == 0);
    CHECK(!str_cut(S("abc"), '=', &head, &tail) && tail.len == 0);
    CHECK_STR(head, S("abc"));
    CHECK(!str_cut(str_make(NULL, 0), '=', &head, &tail));
    CHECK_STR(str_skip(S("abc"), 1), S("bc"));
    CHECK_STR(str_skip(S("abc"), 9), S(""));
    CHECK_STR(str_head(S("abc"), 2), S("ab"));
    CHECK_STR(str_head(S("abc"), 9), S("abc"));
    CHECK_STR(str_trim(S(" \t\r\n\f\va b \n")), S("a b"));
    CHECK_STR(str_trim(S("   ")), S(""));
}

// Whatever the host's locale, only ASCII counts.
static void test_text_ascii(void) {
    for (int i = 0; i < 256; i++) {
        char c = (char)i;
        bool digit = i >= '0' && i <= '9';
        bool upper = i >= 'A' && i <= 'Z', lower = i >= 'a' && i <= 'z';
        CHECK_INT(is_digit(c), digit);
        CHECK_INT(is_alpha(c), upper || lower);
        CHECK_INT(is_alnum(c), digit || upper || lower);
        CHECK_INT(is_space(c), i == ' ' || (i >= 9 && i <= 13));
        CHECK_INT(to_lower(c), upper ? (char)(i + 32) : c);
        CHECK_INT(hex_digit(c) >= 0,
                  digit || (i >= 'a' && i <= 'f') || (i >= 'A' && i <= 'F'));
    }
    CHECK(hex_digit('7') == 7 && hex_digit('b') == 11 && hex_digit('F') == 15);
}

static void test_text_integers(void) {
    static const struct {
        const char *in;
        uint64_t max, want;
        bool ok;
    } rows[] = {
        {"0", 0, 0, true},
        {"7", 7, 7, true},
        {"8", 7, 0, false},
        {"007", 7, 7, true},
        {"18446744073709551615", UINT64_MAX, UINT64_MAX, true},
        {"18446744073709551616", UINT64_MAX, 0, false},
        {"99999999999999999999", UINT64_MAX, 0, false},
        {"65535", 65535, 65535, true},
        {"65536", 65535, 0, false},
        {"", 9, 0, false},
        {"-1", 9, 0, false},
        {"+1", 9, 0, false},
        {" 1", 9, 0, false},
        {"1 ", 9, 0, false},
        {"1a", 99, 0, false},
        {"a", 99, 0, false},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        uint64_t n = 77;
        CHECK_INT(str_to_u64(str_of(rows[i].in), rows[i].max, &n), rows[i].ok);
        CHECK(n == (rows[i].ok ? rows[i].want : 77));
    }
}

static void test_text_utf8(void) {
    static const struct {
        const char *p;
        size_t n, want;
    } rows[] = {
        {T(""), 0},                 {T("a"), 1},
        {T("\0"), 1},               {T("\x7F"), 1},
        {T("\x80"), 0},             {T("\xBF"), 0},
        {T("\xC1\xBF"), 0},         {T("\xC2\x80"), 2},
        {T("\xC2"), 0},             {T("\xC2z"), 0},
        {T("\xDF\xBF"), 2},         {T("\xE0\x9F\xBF"), 0},
        {T("\xE0\xA0\x80"), 3},     {T("\xE1\x80"), 0},
        {T("\xE1\x80z"), 0},        {T("\xED\x9F\xBF"), 3},
        {T("\xED\xA0\x80"), 0},     {T("\xEF\xBF\xBF"), 3},
        {T("\xF0\x8F\xBF\xBF"), 0}, {T("\xF0\x90\x80\x80"), 4},
        {T("\xF0\x90\x80"), 0},     {T("\xF0\x90\x80z"), 0},
        {T("\xF4\x8F\xBF\xBF"), 4}, {T("\xF4\x90\x80\x80"), 0},
        {T("\xF5\x80\x80\x80"), 0}, {T("\xFF"), 0},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char *p = exact(str_make(rows[i].p, rows[i].n));
        CHECK_INT(utf8_len(p, rows[i].n), rows[i].want);
        free(p);
    }
}

static void test_text_utf8_all(void) {
    int bad = 0;
    for (uint32_t cp = 0; cp <= 0x110000; cp++) {
        bool valid = cp <= 0x10FFFF && (cp < 0xD800 || cp > 0xDFFF);
        char out[4];
        size_t n = utf8_put(out, cp), at = 0;
        uint32_t back = utf8_next(str_make(out, n), &at);
        bad += back != (valid ? cp : 0xFFFD) || at != n;
    }
    CHECK_INT(bad, 0);
}

static void test_text_utf8_cut(void) {
    static const char text[] = "a\xC3\xA9\xE2\x82\xAC\xF0\x9F\x98\x80\x80\x80";
    // The longest run of whole characters; the last two bytes are faults.
    static const size_t want[] = {0, 1, 1, 3, 3, 3, 6, 6, 6, 6, 10, 11, 12};

    for (size_t max = 0; max < COUNT(want); max++) {
        char *p = exact(str_make(text, sizeof text - 1));
        CHECK_INT(utf8_cut(str_make(p, sizeof text - 1), max).len, want[max]);
        free(p);
    }
    CHECK_INT(utf8_cut(S("\xF0\x9F\x98"), 2).len, 2);  // it never was whole
    CHECK_INT(utf8_cut(S("\x80\x80\x80\x80\x80\x80"), 5).len, 5);
    CHECK_INT(utf8_cut(S("abc"), 3).len, 3);
}

static void test_text_width(void) {
    static const struct {
        const char *text;
        size_t want;
    } rows[] = {
        {"", 0},
        {"abc", 3},
        {"\n\t", 0},
        {"\xC3\xA9", 1},                                  // e acute
        {"e\xCC\x81", 1},                                 // combining acute
        {"\xE5\xB7\xA5\xE5\x85\xB7", 4},                  // two ideographs
        {"\xEA\xB0\x80", 2},                              // Hangul
        {"\xE1\x84\x80\xE1\x85\xA1", 2},                  // conjoining jamo
        {"\xEF\xBC\xA1", 2},                              // fullwidth A
        {"\xF0\x9F\x98\x80", 2},                          // grinning face
        {"\xE2\x9D\xA4\xEF\xB8\x8F", 1},                  // heart, selector
        {"\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x9A\x80", 2},  // astronaut
        {"\xE2\x80\x8B", 0},                              // zero width space
        {"\xE0\xB8\x81\xE0\xB8\xB1", 1},                  // Thai with a vowel
        {"\xD7\x90\xD6\xB8", 1},                          // Hebrew with a point
        {"\xF0\xA0\x80\x80", 2},                          // plane 2
        {"\xE2\x94\x80", 1},                              // box drawing
        {"\xFF", 1},                                      // U+FFFD
    };
    for (size_t i = 0; i < COUNT(rows); i++)
        CHECK_INT(text_width(str_of(rows[i].text)), rows[i].want);
    for (size_t i = 1; i < COUNT(cp_zero); i++)
        CHECK(cp_zero[i - 1].last < cp_zero[i].first);
    for (size_t i = 1; i < COUNT(cp_wide); i++)
        CHECK(cp_wide[i - 1].last < cp_wide[i].first);
    for (size_t i = 0; i < COUNT(cp_wide); i++) {
        CHECK_INT(cp_width(cp_wide[i].first), 2);
        CHECK_INT(cp_width(cp_wide[i].last), 2);
    }
    CHECK_INT(cp_width(0x10FFFD), 1);
}

typedef struct plain_row {
    const char *in;
    size_t n;
    const char *plain, *line;
} plain_row;

static const plain_row plain_rows[] = {
    {T(""), "", ""},
    {T("plain text"), "plain text", "plain text"},
    {T("a\tb\nc\r\nd"), "a\tb\nc\nd", "a b c d"},
    {T("  two  blanks  "), "  two  blanks  ", "two blanks"},
    {T("a\0b\x01\x08\x0B\x0C\x1F\x7F" "c"), "abc", "abc"},
    // CSI
    {T("\x1b[31mred\x1b[0m"), "red", "red"},
    {T("\x1b[1;38;2;1;2;3mx"), "x", "x"},
    {T("\x1b[?25lx"), "x", "x"},
    {T("\x1b[ qx"), "x", "x"},
    {T("\x1b[2J\x1b[Hx"), "x", "x"},
    {T("\x1b[31"), "", ""},
    {T("\x1b[31\xC3\xA9m"), "\xC3\xA9m", "\xC3\xA9m"},
    {T("\x1b[3\x1b[1mx"), "x", "x"},
    {T("\x1b["), "", ""},
    {T("\xC2\x9B" "31mx"), "x", "x"},
    // OSC and the other strings
    {T("\x1b]0;pwn\x07ok"), "ok", "ok"},
    {T("\x1b]0;pwn\x1b\\ok"), "ok", "ok"},
    {T("\x1b]0;pwn\xC2\x9Cok"), "ok", "ok"},
    {T("\xC2\x9D" "0;pwn\x07ok"), "ok", "ok"},
    {T("\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\"), "link", "link"},
    {T("\x1bP1;2q#0\x1b\\ok"), "ok", "ok"},
    {T("\xC2\x90q#0\xC2\x9Cok"), "ok", "ok"},
    {T("\x1bXtext\x1b\\ok"), "ok", "ok"},
    {T("\x1b^text\x1b\\ok"), "ok", "ok"},
    {T("\x1b_text\x1b\\ok"), "ok", "ok"},
    {T("\xC2\x98t\x07ok\xC2\x9Et\x07ok\xC2\x9Ft\x07ok"), "okokok", "okokok"},
    {T("\x1b]0;never ends"), "0;never ends", "0;never ends"},
    {T("\x1b]0;a\x1b[1mb"), "0;ab", "0;ab"},
    {T("\x1b]0;a\xC2\x85" "b"), "0;ab", "0;ab"},
    {T("\x1b]0;two\nlines\x07ok"), "ok", "ok"},
    // other escapes
    {T("\x1b(Bx\x1b" "7y\x1b" "cz"), "xyz", "xyz"},
    {T("\x1b#8x"), "x", "x"},
    {T("\x1b"), "", ""},
    {T("\x1b\x1b[mx"), "x", "x"},
    {T("\x1b\nx"), "\nx", "x"},
    {T("\x1b\xC3\xA9"), "\xC3\xA9", "\xC3\xA9"},
    {T("\xC2\x84" "a\xC2\x85" "b\xC2\x9C"), "ab", "ab"},
    // bidi
    {T("a\xE2\x80\xAA\xE2\x80\xABz"), "az", "az"},
    {T("a\xE2\x80\xAC\xE2\x80\xAD\xE2\x80\xAEz"), "az", "az"},
    {T("a\xE2\x81\xA6\xE2\x81\xA7\xE2\x81\xA8\xE2\x81\xA9z"), "az", "az"},
    {T("\xE2\x80\xA9\xE2\x80\xAFz"), "\xE2\x80\xA9\xE2\x80\xAFz", "z"},
    // bytes that are no UTF-8
    {T("a\x80z"), "a?z", "a?z"},
    {T("\x9B" "31m"), "?31m", "?31m"},
    {T("\xC3"), "?", "?"},
    {T("\xE2\x82x"), "?\?x", "?\?x"},
    {T("\xED\xA0\x80"), "???", "???"},
    {T("\xC2\x1b[mx"), "?x", "?x"},
    {T("\xEF\xBF\xBD"), "\xEF\xBF\xBD", "\xEF\xBF\xBD"},
    // blanks of Unicode
    {T("a\xC2\xA0\xE3\x80\x80\xE2\x80\x83z"),
     "a\xC2\xA0\xE3\x80\x80\xE2\x80\x83z", "a z"},
    {T("\xEF\xBB\xBFz\xE2\x80\xA8"), "\xEF\xBB\xBFz\xE2\x80\xA8", "z"},
    {T("\xF0\x9F\x98\x80 \xE5\xB7\xA5"), "\xF0\x9F\x98\x80 \xE5\xB7\xA5",
     "\xF0\x9F\x98\x80 \xE5\xB7\xA5"},
};

static void plain_check(const plain_row *r) {
    char *in = exact(str_make(r->in, r->n)), *out = malloc(r->n + 1);
    str s = str_make(in, r->n);
    size_t n = text_plain(out, s);

    CHECK_STR(str_make(out, n), str_of(r->plain));
    CHECK_INT(text_plain(out, str_make(out, n)), n);  // nothing left to do
    CHECK_STR(str_make(out, n), str_of(r->plain));
    n = text_line(out, s);
    CHECK_STR(str_make(out, n), str_of(r->line));
    CHECK_INT(text_line(out, str_make(out, n)), n);
    n = text_line(in, s);  // in place
    CHECK_STR(str_make(in, n), str_of(r->line));
    free(in);
    free(out);
}

static void test_text_plain(void) {
    for (size_t i = 0; i < COUNT(plain_rows); i++) plain_check(&plain_rows[i]);
}

// A text may end anywhere: no byte over, and nothing unsafe comes out.
static void test_text_plain_cut(void) {
    for (size_t i = 0; i < COUNT(plain_rows); i++) {
        const plain_row *r = &plain_rows[i];
        for (size_t cut = 0; cut < r->n; cut++) {
            char *in = exact(str_make(r->in, cut));
            size_t n = text_plain(in, str_make(in, cut)), at = 0;
            while (at < n) CHECK(!cp_unsafe(utf8_next(str_make(in, n), &at)));
            free(in);
        }
    }
}

// Introducers without an end must not make each of them look to the end.
static void test_text_plain_linear(void) {
    static const char *const seeds[] = {"\x1b]", "\x1bP", "\xC2\x9D",
                                        "\x1b[", "\x1b]x\x1b", "\x1b[;;;"};
    size_t n = 4 << 20;
    char *text = malloc(n);

    for (size_t k = 0; k < COUNT(seeds); k++) {
        size_t len = strlen(seeds[k]);
        for (size_t i = 0; i < n; i++) text[i] = seeds[k][i % len];
        CHECK(text_plain(text, str_make(text, n)) < n);
    }
    free(text);
}

// fr.36: a title set by a tool's description.
static void test_text_terminal(void) {
    char out[64];
    str in = S("Reads \x1b]0;pwn\x07" "files\x1b[2J\r\n\xE2\x80\xAE now");
    CHECK_STR(str_make(out, text_line(out, in)), S("Reads files now"));
}

static void test_text_base64(void) {
    static const char *const rows[][2] = {
        {"", ""},           {"f", "Zg=="},         {"fo", "Zm8="},
        {"foo", "Zm9v"},    {"foob", "Zm9vYg=="},  {"fooba", "Zm9vYmE="},
        {"foobar", "Zm9vYmFy"},
    };
    static const char *const bad[] = {"Z",    "Zg",   "Zg=",   "Zm9vYg",
                                      "Zg==Zg==", "Z===", "====", "Zh==",
                                      "Zm9=", "Zm 9", "Zm9v\n", "Zm-_",
                                      "Zm9vZ=g=", "=Zg=", "\xC3\xA9zz"};
    char out[16];
    size_t n;

    for (size_t i = 0; i < COUNT(rows); i++) {
        str plain = str_of(rows[i][0]), code = str_of(rows[i][1]);
        CHECK_INT(BASE64_LEN(plain.len), code.len);
        CHECK_STR(str_make(out, base64_encode(out, plain)), code);
        CHECK(base64_decode(out, &n, code));
        CHECK_STR(str_make(out, n), plain);
    }
    for (size_t i = 0; i < COUNT(bad); i++)
        CHECK(!base64_decode(out, &n, str_of(bad[i])));
}

static void test_text_base64_all(void) {
    char raw[64], code[BASE64_LEN(64)];
    for (size_t len = 0; len <= sizeof raw; len++) {
        size_t n, k;
        for (size_t i = 0; i < len; i++) raw[i] = (char)(i * 37 + len * 101);
        n = base64_encode(code, str_make(raw, len));
        CHECK(base64_decode(code, &k, str_make(code, n)));  // in place
        CHECK_STR(str_make(code, k), str_make(raw, len));
    }
}

static void test_text_glob(void) {
    static const struct {
        const char *pattern, *s;
        bool want;
    } rows[] = {
        {"", "", true},          {"", "a", false},
        {"a", "a", true},        {"a", "A", false},
        {"a", "ab", false},      {"*", "", true},
        {"*", "anything", true}, {"*", "a\nb", false},
        {"a*", "abc", true},     {"a*", "ba", false},
        {"*c", "abc", true},     {"*c", "abcd", false},
        {"a*c", "abbc", true},   {"a*c", "ac", true},
        {"a*c", "acb", false},   {"*b*", "abc", true},
        {"*b*", "ac", false},    {"**", "x", true},
        {"a**b", "ab", true},    {"*ab*ab", "abab", true},
        {"*ab*ab", "ab", false}, {"*aab", "aaab", true},
        {"a.c", "abc", false},   {"a?c", "abc", false},
        {"[a]", "[a]", true},    {"get_*_by_*", "get_user_by_id", true},
        {"a*\nb", "axx\nb", true}, {"*\n*b", "\n\nb", false},
        {"*a\nb*", "xa\nbc", true}, {"a*b", "a\nb", false},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char *s = exact(str_of(rows[i].s));
        CHECK_INT(glob_match(str_of(rows[i].pattern),
                             str_make(s, strlen(rows[i].s))),
                  rows[i].want);
        free(s);
    }
}

// Each pair was worked out with exact rational arithmetic.
static void test_text_doubles(void) {
    static const struct {
        const char *text;
        uint64_t bits;
    } rows[] = {
        {"0", 0x0000000000000000},
        {"-0", 0x8000000000000000},
        {"0.0", 0x0000000000000000},
        {"0e5", 0x0000000000000000},
        {"1", 0x3FF0000000000000},
        {"-1", 0xBFF0000000000000},
        {"10", 0x4024000000000000},
        {"0.1", 0x3FB999999999999A},
        {"0.5", 0x3FE0000000000000},
        {"2.5", 0x4004000000000000},
        {"123456789012345", 0x42DC12218377DE40},
        {"1e22", 0x4480F0CF064DD592},
        {"1e23", 0x44B52D02C7E14AF6},
        {"1e-22", 0x3B5E392010175EE6},
        {"1e-23", 0x3B282DB34012B251},
        {"9007199254740993", 0x4340000000000000},
        {"9007199254740992.999999999999999999", 0x4340000000000000},
        {"9007199254740993.000000000000000001", 0x4340000000000001},
        {"9007199254740995", 0x4340000000000002},
        {"4503599627370496.5", 0x4330000000000000},
        {"4503599627370497.5", 0x4330000000000002},
        {"2.2250738585072011e-308", 0x000FFFFFFFFFFFFF},
        {"2.2250738585072014e-308", 0x0010000000000000},
        {"4.9406564584124654e-324", 0x0000000000000001},
        {"2.4703282292062327e-324", 0x0000000000000000},
        {"2.4703282292062328e-324", 0x0000000000000001},
        {"1e-324", 0x0000000000000000},
        {"3e-324", 0x0000000000000001},
        {"7.4109846876186981e-324", 0x0000000000000001},
        {"1.7976931348623157e308", 0x7FEFFFFFFFFFFFFF},
        {"1.7976931348623158e308", 0x7FEFFFFFFFFFFFFF},
        {"1e308", 0x7FE1CCF385EBC8A0},
        {"123456789.125e-3", 0x40FE240CA0418937},
        {"6.02214076e23", 0x44DFE185CA57C517},
        {"1.6e-19", 0x3C079CA10C924223},
        {"3.141592653589793238462643383279", 0x400921FB54442D18},
        {"0.30000000000000004", 0x3FD3333333333334},
        {"8.41e21", 0x447C7E83209E90B2},
        {"9214843084008499e-7", 0x41CB765E0A334F0D},
        {"1e-400", 0x0000000000000000},
        {"-1e-5000", 0x8000000000000000},
        {"2.2250738585072011360574097967091319759348195463516456480234261097"
         "248222220210769455165295239081350879141491589130396211068700864386"
         "945946455276572074078206217433799881410632673292535522868813721490"
         "129811224514518898490572223072852551331557550159143974763979834118"
         "019993239625482890171070818506906306666559949382757725720157630626"
         "906633326475653000092458883164330377797918696120494973903778297049"
         "050510806099407302629371289589500035837999672072543043602840788957"
         "717961509455167482434710307026091446215722898802581825451803257070"
         "188608721131280795122334262883686223215037756666225039825343359745"
         "688844239002654981983854879482922068947216898310996983658468140228"
         "542433306603398508864458040010349339704275671864433837704860378616"
         "227717385456230658746790140867233276367187512345678901234567890123"
         "45678901e-308",
         0x0010000000000000},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        char *p = exact(str_of(rows[i].text));
        number10 d;
        double v = -7;
        uint64_t bits;
        decimal_read(&d, str_make(p, strlen(rows[i].text)));
        CHECK(decimal_double(&d, &v));
        memcpy(&bits, &v, sizeof bits);
        if (!CHECK(bits == rows[i].bits)) printf("%s\n", rows[i].text);
        free(p);
    }
}

static void test_text_doubles_range(void) {
    static const char *const over[] = {
        "1e309", "1.8e308", "1.7976931348623159e308", "-1e400",
        "1e99999999999999999999", "123456789012345678901234567890e290",
        "1797693134862315808e290"};
    char *nines = malloc(2001);
    number10 d;
    double v;
    uint64_t n;

    for (size_t i = 0; i < COUNT(over); i++) {
        decimal_read(&d, str_of(over[i]));
        CHECK(!decimal_double(&d, &v) && !decimal_integer(&d, &n));
    }
    memset(nines, '9', 2000);
    memcpy(nines + 1, ".", 1);
    decimal_read(&d, str_make(nines, 2000));
    CHECK(decimal_double(&d, &v) && v == 10);
    CHECK(!decimal_integer(&d, &n));
    free(nines);
}

// What is printed is short, and reads back as the same bits.
static void test_text_doubles_print(void) {
    static const struct {
        double v;
        const char *want;
    } rows[] = {
        {0.1, "0.1"},
        {0.1 + 0.2, "0.30000000000000004"},
        {1.0 / 3, "0.3333333333333333"},
        {1e23, "1e+23"},
        {5e-324, "5e-324"},
        {1e-310, "1e-310"},
        {2.2250738585072014e-308, "2.2250738585072014e-308"},
        {1.7976931348623157e308, "1.7976931348623157e+308"},
        {-123456.789, "-123456.789"},
        {9007199254740993e3, "9.007199254740993e+18"},
    };
    uint64_t seed = 4711;

    for (size_t i = 0; i < COUNT(rows); i++) {
        char out[40];
        CHECK_STR(str_make(out, double_text(out, rows[i].v)),
                  str_of(rows[i].want));
    }
    for (int i = 0; i < 2000; i++) {
        char out[40];
        double v, back = 0;
        number10 d;
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        memcpy(&v, &seed, sizeof v);
        if (!(v >= -DBL_MAX && v <= DBL_MAX)) continue;
        decimal_read(&d, str_make(out, double_text(out, v)));
        CHECK(decimal_double(&d, &back) && memcmp(&v, &back, sizeof v) == 0);
    }
}

static const test tests_text[] = {
    {"text.views", test_text_views},
    {"text.ascii", test_text_ascii},
    {"text.integers", test_text_integers},
    {"text.utf8", test_text_utf8},
    {"text.utf8.all", test_text_utf8_all},
    {"text.utf8.cut", test_text_utf8_cut},
    {"text.width", test_text_width},
    {"text.plain", test_text_plain},
    {"text.plain.cut", test_text_plain_cut},
    {"text.plain.linear", test_text_plain_linear},
    {"fr.36", test_text_terminal},
    {"text.base64", test_text_base64},
    {"text.base64.all", test_text_base64_all},
    {"text.glob", test_text_glob},
    {"text.doubles", test_text_doubles},
    {"text.doubles.range", test_text_doubles_range},
    {"text.doubles.print", test_text_doubles_print},
};

//=============================================================================
// MARK: - Memory
//=============================================================================

static void test_memory_sizes(void) {
    CHECK_INT(size_add(2, 3), 5);
    CHECK(size_add(SIZE_MAX, 0) == SIZE_MAX);
    CHECK(size_add(SIZE_MAX, 1) == SIZE_MAX);
    CHECK(size_add(SIZE_MAX - 1, 1) == SIZE_MAX);
    CHECK(size_add(SIZE_MAX / 2 + 1, SIZE_MAX / 2 + 1) == SIZE_MAX);
    CHECK(size_mul(6, 7) == 42 && size_mul(0, SIZE_MAX) == 0);
    CHECK(size_mul(SIZE_MAX, 0) == 0 && size_mul(SIZE_MAX, 1) == SIZE_MAX);
    CHECK(size_mul(SIZE_MAX / 2 + 1, 2) == SIZE_MAX);
    CHECK(size_mul(SIZE_MAX / 16, 16) == SIZE_MAX / 16 * 16);
}

static void test_memory_blocks(void) {
    heap h = {0, 0, 0, false};
    mem m, own;
    char *p, *z;

    mem_init(&own, NULL, &h);
    CHECK(own.fn == mem_default && own.user == NULL);
    mem_init(&m, heap_fn, &h);
    p = mem_new(&m, 100);
    for (int i = 0; i < 100; i++) CHECK(p[i] == 0);
    p = mem_resize(&m, p, 100, 7);
    p = mem_resize(&m, p, 7, 0);
    p = mem_resize(&m, p, 0, 50);
    mem_free(&m, p, 50);
    mem_free(&m, mem_new(&m, 0), 0);
    mem_free(&m, NULL, 12);
    CHECK(mem_new(&m, SIZE_MAX) == NULL);
    CHECK(mem_resize(&m, NULL, 0, (size_t)PTRDIFF_MAX + 1) == NULL);
    CHECK_INT(h.calls, 5);  // the last two never reached the allocator
    z = mem_text(&m, S("abc"));
    CHECK_STR(str_of(z), S("abc"));
    mem_text_free(&m, z);
    z = mem_text(&m, S("ab\0cd"));
    CHECK_STR(str_of(z), S("ab"));
    mem_text_free(&m, z);
    z = mem_text(&m, str_make(NULL, 0));
    CHECK_STR(str_of(z), S(""));
    mem_text_free(&m, z);
    mem_text_free(&m, NULL);
    CHECK_INT(h.live, 0);
}

static mcp_code arena_body(mem *m) {
    arena a;
    mcp_code rc;

    arena_init(&a, m, 1 << 20);
    for (int i = 0; i < 300; i++) {
        char *p = arena_new(&a, (size_t)i), *z = arena_fmt(&a, "n%d", i);
        CHECK(!p || ((uintptr_t)p % ARENA_ALIGN == 0 && (!i || !p[i - 1])));
        if (p) memset(p, 'x', (size_t)i);
        CHECK(!z || atoi(z + 1) == i);
        z = arena_text(&a, S("text"));
        CHECK(!z || strcmp(z, "text") == 0);
        CHECK(a.err || str_is(arena_str(&a, S("view")), "view") || a.err);
    }
    arena_new(&a, 100000);  // larger than a block
    rc = a.err;
    arena_free(&a);
    CHECK(a.block == NULL && a.used == 0 && a.err == MCP_OK);
    return rc;
}

static void test_memory_arena(void) {
    heap h = {0, 0, 0, false};
    mem m = {heap_fn, &h};
    arena a;

    torture(arena_body);
    arena_init(&a, &m, 64);
    CHECK(arena_new(&a, 48) && !a.err);
    CHECK(arena_new(&a, 16) && !a.err);   // to the last byte
    CHECK(!arena_new(&a, 1));             // though the block has room
    CHECK_INT(a.err, MCP_LIMIT_EXCEEDED);
    CHECK(!arena_text(&a, S("")) && arena_str(&a, S("x")).len == 0);
    arena_free(&a);
    CHECK(arena_new(&a, SIZE_MAX) == NULL && a.err == MCP_LIMIT_EXCEEDED);
    arena_free(&a);
    arena_init(&a, &m, SIZE_MAX);
    CHECK(arena_new(&a, SIZE_MAX - 40) == NULL);
    CHECK_INT(a.err, MCP_OUT_OF_MEMORY);
    arena_free(&a);
    CHECK_INT(h.live, 0);
}

static mcp_code buf_body(mem *m) {
    buf b;
    mcp_code rc;

    buf_init(&b, m, 1 << 20);
    for (int i = 0; i < 500; i++) {
        buf_add(&b, S("abcdef"));
        buf_byte(&b, 'x');
        buf_fmt(&b, "%d", i);
        buf_plain(&b, S("\x1b[1mp"));
        buf_line(&b, S(" l  l "));
        buf_base64(&b, S("foo"));
        buf_percent(&b, S("a b"), "");
        CHECK(!b.ptr || b.ptr[b.len] == 0);
    }
    rc = b.err;
    buf_free(&b);
    return rc;
}

static void test_memory_buf(void) {
    heap h = {0, 0, 0, false};
    mem m = {heap_fn, &h};
    buf b;

    torture(buf_body);
    buf_init(&b, &m, 1000);
    CHECK_STR(str_of(buf_z(&b)), S(""));
    CHECK(buf_str(&b).len == 0);
    buf_add(&b, S(""));
    CHECK(b.ptr == NULL);
    buf_fmt(&b, "%s-%d", "abc", 42);
    CHECK_STR(buf_str(&b), S("abc-42"));
    buf_byte(&b, 0);
    CHECK_STR(buf_str(&b), S("abc-42\0"));
    buf_drop(&b, 4);
    CHECK_STR(buf_str(&b), S("42\0"));
    buf_drop(&b, 0);
    buf_drop(&b, 99);
    CHECK(b.len == 0 && b.ptr[0] == 0);
    buf_plain(&b, S("a\x1b[31mb"));
    buf_line(&b, S("  c \n d "));
    buf_plain(&b, S(""));
    CHECK_STR(buf_str(&b), S("abc d"));
    buf_clear(&b);
    CHECK_STR(str_of(buf_z(&b)), S(""));
    buf_base64(&b, S("fo"));
    buf_base64(&b, S(""));
    CHECK_STR(buf_str(&b), S("Zm8="));
    buf_clear(&b);
    buf_percent(&b, S("a-._~Z0 /?\xC3\xA9%\0"), "/");
    CHECK_STR(buf_str(&b), S("a-._~Z0%20/%3F%C3%A9%25%00"));
    buf_free(&b);
    buf_quote(&b, str_make(NULL, 0));
    buf_quote(&b, S("a\"\\/\n\x01\xC3\xA9\xFF\0"));
    CHECK_STR(buf_str(&b), S("\"\"\"a\\\"\\\\/\\n\\u0001\xC3\xA9\xEF\xBF\xBD"
                           "\\u0000\""));
    buf_free(&b);
    buf_fmt(&b, "%0500d", 7);
    CHECK(b.len == 500 && b.ptr[499] == '7');
    buf_free(&b);
    CHECK_INT(h.live, 0);
}

// The limit counts, not the room that is there; the first error stays.
static void test_memory_buf_limit(void) {
    heap h = {0, 0, 0, false};
    mem m = {heap_fn, &h};
    buf b;

    buf_init(&b, &m, 10);
    buf_add(&b, S("0123456789"));
    CHECK(b.err == MCP_OK && b.len == 10 && b.cap >= 64);
    buf_byte(&b, 'x');
    CHECK(b.err == MCP_LIMIT_EXCEEDED && b.len == 10);
    buf_clear(&b);
    buf_byte(&b, 'x');
    CHECK(b.err == MCP_LIMIT_EXCEEDED && b.len == 0);
    buf_free(&b);
    buf_byte(&b, 'x');
    CHECK(b.err == MCP_OK && b.len == 1);
    buf_fmt(&b, "%d", 123456789);
    CHECK(b.err == MCP_OK && b.len == 10);
    buf_fmt(&b, "%d", 1);
    CHECK(b.err == MCP_LIMIT_EXCEEDED);
    buf_free(&b);
    CHECK(!buf_reserve(&b, SIZE_MAX) && b.err == MCP_LIMIT_EXCEEDED);
    buf_free(&b);
    buf_init(&b, &m, SIZE_MAX);
    CHECK(!buf_reserve(&b, SIZE_MAX) && b.err == MCP_OUT_OF_MEMORY);
    buf_free(&b);
    buf_init(&b, &m, 0);
    buf_byte(&b, 'x');
    CHECK(b.err == MCP_LIMIT_EXCEEDED && b.ptr == NULL);
    buf_free(&b);
    CHECK_INT(h.live, 0);
}

static mcp_code vec_body(mem *m) {
    struct { int a, b, c; } *items = NULL;
    uint32_t cap = 0, n = 0;
    mcp_code rc = MCP_OK;

    for (; n < 100; n++) {
        rc = vec_room(m, &items, &cap, n, sizeof *items, 100);
        if (rc) break;
        CHECK(items[n].a == 0 && items[n].c == 0);
        items[n].a = items[n].c = (int)n + 1;
    }
    for (uint32_t i = 0; i < n; i++) CHECK_INT(items[i].c, i + 1);
    if (!rc) {
        CHECK_INT(cap, 100);
        CHECK_INT(vec_room(m, &items, &cap, n, sizeof *items, 100),
                  MCP_LIMIT_EXCEEDED);
        CHECK_INT(vec_room(m, &items, &cap, 5, sizeof *items, 5),
                  MCP_LIMIT_EXCEEDED);  // though there is room
    }
    mem_free(m, items, cap * sizeof *items);
    return rc;
}

static void test_memory_vec(void) {
    mem m;
    char *p = NULL;
    uint32_t cap = 0;

    torture(vec_body);
    mem_init(&m, NULL, NULL);
    CHECK_INT(vec_room(&m, &p, &cap, 0, 1, 0), MCP_LIMIT_EXCEEDED);
    CHECK_INT(vec_room(&m, &p, &cap, 0, 1, 1), MCP_OK);
    CHECK_INT(cap, 1);
    CHECK_INT(vec_room(&m, &p, &cap, UINT32_MAX - 1, SIZE_MAX / 2, UINT32_MAX),
              MCP_OUT_OF_MEMORY);
    mem_free(&m, p, cap);
}

enum { MAP_KEYS = 300 };

// Against a plain array: the same after any order of puts and deletions.
static mcp_code map_body(mem *m) {
    char keys[MAP_KEYS][8];
    void *want[MAP_KEYS] = {NULL};
    uint64_t seed = 12345;
    uint32_t n = 0;
    mcp_code rc = MCP_OK;
    map t;

    map_init(&t, m);
    for (int i = 0; i < MAP_KEYS; i++) snprintf(keys[i], 8, "k%d", i * 7);
    for (int step = 0; step < 4000 && !rc; step++) {
        uint32_t i;
        seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
        i = (uint32_t)(seed >> 16) % MAP_KEYS;
        if (seed >> 15 & 1) {
            map_del(&t, str_of(keys[i]));
            n -= want[i] != NULL;
            want[i] = NULL;
        } else if (map_put(&t, str_of(keys[i]), &keys[step % MAP_KEYS])) {
            n += want[i] == NULL;
            want[i] = &keys[step % MAP_KEYS];
        } else {
            rc = MCP_OUT_OF_MEMORY;
        }
        if (step % 100 && !rc) continue;
        for (int k = 0; k < MAP_KEYS; k++)
            CHECK(map_get(&t, str_of(keys[k])) == want[k]);
        CHECK_INT(t.n, n);
    }
    map_free(&t);
    return rc;
}

static void test_memory_map(void) {
    int one = 1, two = 2;
    mem m;
    map t;

    torture(map_body);
    mem_init(&m, NULL, NULL);
    map_init(&t, &m);
    CHECK(map_get(&t, S("a")) == NULL);
    map_del(&t, S("a"));
    CHECK(map_put(&t, str_make(NULL, 0), &one));
    CHECK(map_get(&t, S("")) == &one);
    CHECK(map_put(&t, S("a\0b"), &two) && map_get(&t, S("a")) == NULL);
    CHECK(map_put(&t, S("a\0b"), &one) && map_get(&t, S("a\0b")) == &one);
    CHECK_INT(t.n, 2);
    map_del(&t, S(""));
    CHECK(map_get(&t, S("")) == NULL && t.n == 1);
    map_free(&t);
    map_free(&t);
}

static const test tests_memory[] = {
    {"memory.sizes", test_memory_sizes},
    {"memory.blocks", test_memory_blocks},
    {"memory.arena", test_memory_arena},
    {"memory.buf", test_memory_buf},
    {"memory.buf.limit", test_memory_buf_limit},
    {"memory.vec", test_memory_vec},
    {"memory.map", test_memory_map},
};

//=============================================================================
// MARK: - Diagnostics
//=============================================================================

// Each code has a word, a message and a hint of its own, each one line; hints
// name no placeholder that is not known.
static void test_diag_codes(void) {
    mem m;
    buf b;
    diag d;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, 10000);
    diag_init(&d, &m, NULL);
    CHECK_INT(COUNT(code_texts), MCP_PENDING + 1);
    for (int i = 0; i <= MCP_PENDING; i++) {
        mcp_code code = (mcp_code)i;
        const char *word = mcp_code_name(code), *text = code_message(code);
        CHECK(word && strcmp(word, "unknown") != 0);
        CHECK(text && *text && text[strlen(text) - 1] == '.');
        CHECK(strpbrk(text, "{}\n\t") == NULL);
        CHECK_INT(fail(&d, code, NULL), code);
        buf_clear(&b);
        hint_text(&b, &d, "mcp ", true);
        CHECK(b.len && strpbrk(buf_z(&b), "{}\n\t%") == NULL);
        CHECK(b.ptr[b.len - 1] == '.');
        for (int k = 0; k < i; k++) {
            CHECK(strcmp(word, mcp_code_name((mcp_code)k)) != 0);
            CHECK(strcmp(text, code_message((mcp_code)k)) != 0);
            CHECK(strcmp(code_hint(code, MCP_OP_NONE),
                         code_hint((mcp_code)k, MCP_OP_NONE)) != 0);
        }
    }
    CHECK_STR(str_of(mcp_code_name((mcp_code)99)), S("unknown"));
    CHECK(strcmp(code_message((mcp_code)-1),
                 code_message(MCP_OPERATION_FAILED)) == 0);
    CHECK_STR(str_of(mcp_code_name(MCP_TOOL_CHANGED)), S("tool_changed"));
    buf_free(&b);
    diag_free(&d);
}

static void test_diag_hints(void) {
    mem m;
    buf b;
    diag d;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, 10000);
    diag_init(&d, &m, NULL);
    fail(&d, MCP_CONNECTION_FAILED, "secret detail");
    hint_text(&b, &d, "/mcp ", true);
    CHECK(str_find(buf_str(&b), S("/mcp refresh <server>.")) != SIZE_MAX);
    memcpy(d.server, "docs", 5);
    buf_clear(&b);
    hint_text(&b, &d, "mcp ", true);
    CHECK(str_find(buf_str(&b), S("with mcp refresh docs.")) != SIZE_MAX);
    buf_clear(&b);
    diag_text(&b, &d, "/mcp ");
    CHECK(str_starts(buf_str(&b), S("docs: [connection_failed] There ")));
    CHECK(str_find(buf_str(&b), S("secret")) == SIZE_MAX);
    d.server[0] = 0;
    buf_clear(&b);
    diag_text(&b, &d, "/mcp ");
    CHECK(str_starts(buf_str(&b), S("[connection_failed] ")));
    fail(&d, MCP_AUTHENTICATION_REQUIRED, NULL);
    buf_clear(&b);
    hint_text(&b, &d, "/mcp ", false);
    CHECK(str_find(buf_str(&b), S("login")) == SIZE_MAX);
    buf_clear(&b);
    hint_text(&b, &d, "/mcp ", true);
    CHECK(str_find(buf_str(&b), S("Authorization")) != SIZE_MAX);
    d.operation = MCP_OP_AUTH;
    buf_clear(&b);
    hint_text(&b, &d, "/mcp ", true);
    CHECK_STR(buf_str(&b), S("Sign in with /mcp login <server>."));
    buf_free(&b);
    diag_free(&d);
}

static void test_diag_fail(void) {
    mem m;
    diag d, copy;

    mem_init(&m, NULL, NULL);
    diag_init(&d, &m, NULL);
    diag_init(&copy, &m, NULL);
    CHECK_INT(d.exit_status, -1);
    CHECK_INT(fail(NULL, MCP_BUSY, "%d", 1), MCP_BUSY);
    fail_more(NULL, "x");
    fail_text(NULL, S("x"));
    CHECK_INT(fail(&d, MCP_TIMEOUT, "after %d ms\nin \x1b[1mall", 15),
              MCP_TIMEOUT);
    CHECK_STR(buf_str(&d.detail), S("after 15 ms in all"));
    CHECK(d.first);
    fail_text(&d, S("  server said\n\x1b]0;x\x07 two lines\r\n"));
    fail_text(&d, S(" \n"));
    fail_more(&d, "exit status %d", 3);
    CHECK_STR(buf_str(&d.detail), S("after 15 ms in all\nserver said\n two "
                                    "lines\nexit status 3"));
    d.operation = MCP_OP_CALL;
    memcpy(d.server, "s", 2);
    d.rpc_code = -32000, d.http_status = 500, d.exit_status = 3;
    diag_copy(&copy, &d);
    CHECK_STR(buf_str(&copy.detail), buf_str(&d.detail));
    CHECK(copy.code == MCP_TIMEOUT && copy.operation == MCP_OP_CALL);
    CHECK(copy.rpc_code == -32000 && copy.http_status == 500 && copy.first);
    CHECK(copy.exit_status == 3 && strcmp(copy.server, "s") == 0);
    diag_copy(&copy, &copy);
    CHECK(copy.detail.len > 0);
    // An argument may be the old detail itself.
    fail(&d, MCP_BUSY, "again: %s", buf_z(&d.detail));
    CHECK(str_starts(buf_str(&d.detail), S("again: after 15 ms in all se")));
    CHECK(d.rpc_code == 0 && d.http_status == 0 && d.exit_status == -1);
    CHECK(d.operation == MCP_OP_CALL && strcmp(d.server, "s") == 0);
    fail(&d, MCP_BUSY, NULL);
    CHECK(!d.first && d.detail.len == 0);
    fail_text(&d, S("words"));
    CHECK(!d.first && d.detail.len == 5);
    diag_clear(&d);
    CHECK(d.code == MCP_OK && d.operation == MCP_OP_NONE && !d.server[0]);
    CHECK_INT(d.detail.len, 0);
    diag_free(&d);
    diag_free(&copy);
}

// LIMIT_DETAIL on both sides, and never half a character.
static void test_diag_limit(void) {
    mem m;
    diag d;
    char *text = malloc(3 * LIMIT_DETAIL);

    mem_init(&m, NULL, NULL);
    diag_init(&d, &m, NULL);
    for (size_t i = 0; i < 3 * LIMIT_DETAIL; i++)
        text[i] = "\xE2\x82\xAC"[i % 3];
    for (size_t head = 0; head < 5; head++) {
        fail(&d, MCP_BUSY, "%.*s", (int)head, "abcde");
        fail_text(&d, str_make(text, 3 * LIMIT_DETAIL));
        CHECK(d.detail.len <= LIMIT_DETAIL && d.detail.len > LIMIT_DETAIL - 3);
        for (size_t at = head ? head + 1 : 0; at < d.detail.len; at += 3)
            CHECK_INT(utf8_len(d.detail.ptr + at, d.detail.len - at), 3);
        fail_text(&d, S("more"));
        CHECK(d.detail.len <= LIMIT_DETAIL && d.detail.err == MCP_OK);
    }
    memset(text, 'x', LIMIT_DETAIL + 1);
    fail(&d, MCP_BUSY, NULL);
    fail_text(&d, str_make(text, LIMIT_DETAIL));
    CHECK_INT(d.detail.len, LIMIT_DETAIL);
    fail(&d, MCP_BUSY, NULL);
    fail_text(&d, str_make(text, LIMIT_DETAIL + 1));
    CHECK_INT(d.detail.len, LIMIT_DETAIL);
    free(text);
    diag_free(&d);
}

static void test_diag_secrets(void) {
    static const struct {
        const char *in, *want;
    } rows[] = {
        {"", ""},
        {"nothing here", "nothing here"},
        {"hunter2", "***"},
        {"a hunter2 b", "a *** b"},
        {"hunter", "hunter"},
        {"hunter2hunter2", "******"},
        {"huntehunter2", "hunte***"},
        {"abcdefghij", "***"},         // two that overlap are one run
        {"abcdefXefghij", "***X***"},
        {"abcdefg", "***g"},
        {"longer-hunter2-one", "***"},  // one inside another
        {"pa\"ss", "***"},
        {"{\"k\":\"pa\\\"ss\"}", "{\"k\":\"***\"}"},
        {"abc", "abc"},
        {"w1th\nlf", "***"},
        {"\"w1th\\nlf\"", "\"***\""},
    };
    mem m;
    secrets k;
    buf b;

    mem_init(&m, NULL, NULL);
    secrets_init(&k, &m);
    buf_init(&b, &m, 1000);
    buf_add(&b, S("hunter2"));
    secrets_mask(&k, &b, 0);
    secrets_mask(NULL, &b, 0);
    CHECK_STR(buf_str(&b), S("hunter2"));
    CHECK(secrets_add(&k, S("hunter2")) && secrets_add(&k, S("hunter2")));
    CHECK_INT(k.n, 1);
    CHECK(secrets_add(&k, S("abc")) && secrets_add(&k, S("")));
    CHECK_INT(k.n, 1);  // too short to be told from a word
    CHECK(secrets_add(&k, S("abcdef")) && secrets_add(&k, S("efghij")));
    CHECK(secrets_add(&k, S("longer-hunter2-one")));
    CHECK(secrets_add(&k, S("pa\"ss")) && secrets_add(&k, S("w1th\nlf")));
    CHECK_INT(k.n, 8);
    for (size_t i = 0; i < COUNT(rows); i++) {
        buf_clear(&b);
        buf_add(&b, str_of(rows[i].in));
        secrets_mask(&k, &b, 0);
        CHECK_STR(buf_str(&b), str_of(rows[i].want));
    }
    buf_clear(&b);
    buf_add(&b, S("hunter2 hunter2"));
    secrets_mask(&k, &b, 3);
    CHECK_STR(buf_str(&b), S("hunter2 ***"));
    buf_free(&b);
    secrets_free(&k);
    secrets_free(&k);
}

// A canary in every place of a diagnostic, also where the text is cut and
// where an escape sequence stands inside.
static void test_diag_secret_nowhere(void) {
    static const char canary[] = "canary-4711-value";
    mem m;
    secrets k;
    diag d;
    char *text = malloc(LIMIT_DETAIL + 100);

    mem_init(&m, NULL, NULL);
    secrets_init(&k, &m);
    diag_init(&d, &m, &k);
    CHECK(secrets_add(&k, str_of(canary)));
    fail(&d, MCP_BUSY, "first %s", canary);
    fail_more(&d, "%s", canary);
    fail_text(&d, S("x canary-\x1b[1m4711-value canary-4711-va\x07lue"));
    CHECK_STR(buf_str(&d.detail), S("first ***\n***\nx *** ***"));
    for (size_t at = LIMIT_DETAIL - 20; at <= LIMIT_DETAIL; at++) {
        memset(text, '.', LIMIT_DETAIL + 100);
        memcpy(text + at, canary, sizeof canary - 1);
        fail(&d, MCP_BUSY, NULL);
        fail_text(&d, str_make(text, LIMIT_DETAIL + 100));
        CHECK(str_find(buf_str(&d.detail), S("can")) == SIZE_MAX);
        CHECK(strchr(buf_z(&d.detail), 'c') == NULL);
    }
    free(text);
    diag_free(&d);
    secrets_free(&k);
}

// Without memory a failure is still recorded, only its detail is shorter.
static void test_diag_memory(void) {
    for (size_t n = 1; n < 12; n++) {
        heap h = {0, 0, n, false};
        mem m = {heap_fn, &h};
        secrets k;
        diag d, copy;
        bool kept;

        secrets_init(&k, &m);
        kept = secrets_add(&k, S("a secret\"value"));
        CHECK(kept || h.failed);
        diag_init(&d, &m, &k);
        diag_init(&copy, &m, &k);
        CHECK_INT(fail(&d, MCP_BUSY, "first %d", 1), MCP_BUSY);
        fail_more(&d, "more");
        fail_text(&d, S("words"));
        diag_copy(&copy, &d);
        CHECK(d.code == MCP_BUSY && copy.code == MCP_BUSY);
        CHECK(h.failed ||
              str_is(buf_str(&copy.detail), "first 1\nmore\nwords"));
        h.fail_at = 0;
        fail(&d, MCP_TIMEOUT, "works again");
        CHECK_STR(buf_str(&d.detail), S("works again"));
        diag_free(&d);
        diag_free(&copy);
        secrets_free(&k);
        CHECK_INT(h.live, 0);
    }
}

static const test tests_diag[] = {
    {"diag.codes", test_diag_codes},
    {"diag.hints", test_diag_hints},
    {"diag.fail", test_diag_fail},
    {"diag.limit", test_diag_limit},
    {"diag.secrets", test_diag_secrets},
    {"diag.secret.nowhere", test_diag_secret_nowhere},
    {"diag.memory", test_diag_memory},
};

//=============================================================================
// MARK: - 6 Loop
//=============================================================================

#if USE_POSIX
#include <pthread.h>
#endif

// For these tests and those of the sections that use the platform.

// A handle without servers, on the real platform or with a clock of its own.
typedef struct rig {
    mcp m;
    heap heap;
    int64_t now;        // of the fake clock
    int64_t slow;       // each look at the clock takes so long
    int waits;          // calls of wait
    int64_t slept;      // asked of wait in all
    uint32_t last_n;    // descriptors in the last wait
    int last_ms;
    int (*script)(struct rig *r, mcp_fd *fds, uint32_t n, int ms);
} rig;

static int64_t rig_now(os *o) {
    rig *r = o->user;
    return r->now += r->slow;
}

// Looks at the real descriptors without waiting; sleeping is only counted.
static int rig_wait(os *o, mcp_fd *fds, uint32_t n, int ms) {
    rig *r = o->user;
    int ready;

    r->waits++;
    r->last_n = n;
    r->last_ms = ms;
    if (r->script) return r->script(r, fds, n, ms);
#if USE_POSIX
    ready = unix_wait(o, fds, n, 0);
#else
    ready = 0;
#endif
    if (ready == 0 && ms > 0) {
        r->now += ms;
        r->slept += ms;
    }
    return ready;
}

static int64_t rig_host_now(void *user) {
    (void)user;
    return 1000000;
}

static int rig_host_random(void *user, void *to, size_t n) {
    (void)user;
    memset(to, 42, n);
    return 0;
}

static bool rig_init(rig *r, mem *mm) {
    static const mcp_os host = {NULL, rig_host_now, NULL, rig_host_random,
                                NULL, NULL};
    mcp *m = &r->m;

    memset(r, 0, sizeof *r);
    if (mm) m->mem = *mm;
    else mem_init(&m->mem, heap_fn, &r->heap);
    if (!os_adopt(&m->os, USE_POSIX ? NULL : &host)) return false;
    m->os.user = r;
    secrets_init(&m->secrets, &m->mem);
    return loop_init(m);
}

// With the fake clock.
static bool rig_fake(rig *r) {
    if (!rig_init(r, NULL)) return false;
    r->now = r->m.loop.now = 1000000;
    r->m.loop.all_polled = r->now;
    r->m.os.now_ms = rig_now;
    r->m.os.wait = rig_wait;
    return true;
}

static void rig_free(rig *r) {
    loop_free(&r->m);
    secrets_free(&r->m.secrets);
    CHECK_INT(r->heap.live, 0);
}

#if USE_POSIX

// A private directory for one test; path() is a name in it.
typedef struct place {
    char dir[200];
    char path[300];
} place;

static void place_init(place *p) {
    const char *tmp = getenv("TMPDIR");
    snprintf(p->dir, sizeof p->dir, "%s/mcp-test-XXXXXX", tmp ? tmp : "/tmp");
    CHECK(mkdtemp(p->dir) != NULL);
}

static const char *place_at(place *p, const char *name) {
    snprintf(p->path, sizeof p->path, "%s/%s", p->dir, name);
    return p->path;
}

static void place_put(place *p, const char *name, const char *text, int mode) {
    FILE *f = fopen(place_at(p, name), "w");
    if (!CHECK(f != NULL)) return;
    fputs(text, f);
    fclose(f);
    chmod(p->path, (mode_t)mode);
}

static int place_count(place *p) {
    char command[600];
    int n = -1;
    FILE *f;
    snprintf(command, sizeof command, "ls -A '%s' | wc -l", p->dir);
    f = popen(command, "r");
    if (f && fscanf(f, "%d", &n) != 1) n = -1;
    if (f) pclose(f);
    return n;
}

static void place_free(place *p) {
    char command[600];
    snprintf(command, sizeof command, "chmod -R u+rwx '%s'; rm -rf '%s'",
             p->dir, p->dir);
    CHECK(system(command) == 0);
}

static int fds_open(void) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

#endif  // USE_POSIX

static uint32_t rig_random(uint32_t *seed) {
    return *seed = *seed * 1664525u + 1013904223u;
}

typedef struct ticker {
    job job;
    rig *rig;
    int steps;
    int64_t due, last;
    int again;  // wake itself so often
    struct ticker *kill;
    bool suicide;
    struct ticker *watched;  // what it saw of another's steps
    int seen;
} ticker;

static void ticker_step(mcp *m, job *j) {
    ticker *t = (ticker *)j;
    t->steps++;
    t->last = m->loop.now;
    if (t->watched) t->seen = t->watched->steps;
    if (t->again && t->again--) job_wake(m, j);
    if (t->kill) {
        job_end(m, &t->kill->job);
        free(t->kill);
        t->kill = NULL;
    }
    if (t->suicide) {
        job_end(m, j);
        free(t);
    }
}

static bool ticker_init(rig *r, ticker *t) {
    memset(t, 0, sizeof *t);
    t->rig = r;
    return job_init(&r->m, &t->job, ticker_step);
}

// Thousands of settings, movements and deletions: each timer fires at its time
// and no other.
static void test_loop_timers(void) {
    enum { JOBS = 300, ROUNDS = 4000 };
    static ticker t[JOBS];
    uint32_t seed = 7;
    bool bad = false;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    for (int i = 0; i < JOBS; i++) {
        CHECK(ticker_init(&r, &t[i]));
        t[i].due = NEVER;
    }
    for (int k = 0; k < ROUNDS; k++) {
        ticker *x = &t[rig_random(&seed) >> 8 & 255];
        uint32_t what = rig_random(&seed) >> 16 & 7;
        if (what == 0) x->due = NEVER;
        else if (what < 6) x->due = r.now + (rig_random(&seed) >> 20) % 50;
        job_at(&r.m, &x->job, x->due);
        if (what > 2) continue;
        loop_turn(&r.m, r.now + what);
        for (int i = 0; i < JOBS; i++) {
            bool fired = t[i].due <= r.m.loop.now;
            if (t[i].steps != fired || (fired && t[i].job.at != NEVER))
                bad = true;
            if (fired) t[i].due = NEVER;
            t[i].steps = 0;
        }
        for (uint32_t i = 2; i <= r.m.loop.timers; i++)
            if (r.m.loop.heap[i / 2]->at > r.m.loop.heap[i]->at) bad = true;
    }
    CHECK(!bad);
    for (int i = 0; i < JOBS; i++) job_end(&r.m, &t[i].job);
    CHECK_INT(r.m.loop.jobs, 0);
    CHECK_INT(r.m.loop.timers, 0);
    rig_free(&r);
}

static void test_loop_sleep(void) {
    ticker a, b;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    CHECK(ticker_init(&r, &a) && ticker_init(&r, &b));
    CHECK(loop_due(&r.m) == NEVER);
    job_at(&r.m, &a.job, r.now + 70);
    job_at(&r.m, &b.job, r.now + 30);
    CHECK_INT(loop_due(&r.m), r.now + 30);
    loop_turn(&r.m, r.now + 10);  // the caller's limit comes first
    CHECK_INT(r.slept, 10);
    CHECK_INT(a.steps + b.steps, 0);
    loop_turn(&r.m, NEVER);
    CHECK_INT(r.slept, 30);
    CHECK_INT(b.steps, 1);
    loop_turn(&r.m, NEVER);
    CHECK_INT(r.slept, 70);
    CHECK_INT(a.steps, 1);
    r.script = NULL;
    loop_turn(&r.m, r.now);  // 0: do what is due, do not wait
    CHECK_INT(r.last_ms, 0);
    job_at(&r.m, &a.job, r.now - 5);  // long past
    loop_turn(&r.m, NEVER);
    CHECK_INT(a.steps, 2);
    CHECK_INT(r.slept, 70);
    job_end(&r.m, &a.job);
    job_end(&r.m, &b.job);
    rig_free(&r);
}

static void test_loop_jobs(void) {
    ticker a, *x, *y, *z;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    memset(&a, 0, sizeof a);
    job_end(&r.m, &a.job);  // never begun
    job_wake(&r.m, &a.job);
    job_wake(&r.m, NULL);
    CHECK(!r.m.loop.run);
    CHECK(ticker_init(&r, &a));
    job_wake(&r.m, &a.job);
    job_wake(&r.m, &a.job);  // once is enough
    loop_turn(&r.m, r.now);
    CHECK_INT(a.steps, 1);

    x = malloc(sizeof *x), y = malloc(sizeof *y), z = malloc(sizeof *z);
    CHECK(ticker_init(&r, x) && ticker_init(&r, y) && ticker_init(&r, z));
    x->suicide = true;  // frees itself in its step, and y while it waits
    x->kill = y;
    job_at(&r.m, &x->job, r.now);
    job_at(&r.m, &y->job, r.now);
    job_wake(&r.m, &x->job);
    job_wake(&r.m, &y->job);
    z->suicide = true;
    job_wake(&r.m, &z->job);
    job_wake(&r.m, &a.job);
    loop_turn(&r.m, r.now);
    CHECK_INT(a.steps, 2);
    CHECK_INT(r.m.loop.jobs, 1);
    CHECK(!r.m.loop.run && r.m.loop.tail == &r.m.loop.run);

    job_wake(&r.m, &a.job);  // the only one in the queue is taken out
    job_end(&r.m, &a.job);
    job_end(&r.m, &a.job);
    job_at(&r.m, &a.job, r.now);
    loop_turn(&r.m, r.now);
    CHECK_INT(a.steps, 2);
    CHECK_INT(r.m.loop.jobs, 0);
    rig_free(&r);
}

// One that wakes itself for ever keeps nobody from the descriptors, the timers
// or a cancel.
static void test_loop_restless(void) {
    ticker a, b;
    bool cancelled = false;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    r.slow = 1;
    CHECK(ticker_init(&r, &a) && ticker_init(&r, &b));
    a.again = INT_MAX;
    job_wake(&r.m, &a.job);
    job_at(&r.m, &b.job, r.now + 100);
    mcp_cancel(&r.m);
    for (int i = 0; i < 200 && !(b.steps && cancelled == USE_POSIX); i++)
        if (loop_turn(&r.m, NEVER)) cancelled = true;
    CHECK(cancelled == USE_POSIX);
    CHECK_INT(b.steps, 1);
    CHECK_INT(r.slept, 0);
    job_end(&r.m, &a.job);
    job_end(&r.m, &b.job);
    rig_free(&r);
}

#if USE_POSIX

typedef struct reader {
    job job;
    watch w;
    rig *rig;
    int steps, bytes, chunk;
    ticker *other;  // was it stepped before us?
    bool late;
} reader;

static void reader_step(mcp *m, job *j) {
    reader *d = (reader *)j;
    char b[64];
    d->steps++;
    if (d->other && d->other->steps) d->late = true;
    if (!(d->w.got & MCP_READABLE)) return;
    d->w.got = 0;
    if (m->os.read(&m->os, d->w.fd, b, (size_t)d->chunk) > 0)
        d->bytes += d->chunk;
}

static bool reader_init(rig *r, reader *d, int pipe_fd[2]) {
    memset(d, 0, sizeof *d);
    d->rig = r;
    d->chunk = 1;
    return unix_wake_open(&r->m.os, pipe_fd) &&
           job_init(&r->m, &d->job, reader_step) &&
           watch_add(&r->m, &d->w, pipe_fd[0], MCP_READABLE, &d->job);
}

static void reader_free(rig *r, reader *d, int pipe_fd[2]) {
    watch_del(&r->m, &d->w);
    watch_del(&r->m, &d->w);
    job_end(&r->m, &d->job);
    close(pipe_fd[0]);
    close(pipe_fd[1]);
}

// Nobody has turned the loop for an hour; the answer came in time and waits.
// All of it is taken in, though each step reads one byte only.
static void test_loop_bytes_first(void) {
    int fd[2];
    ticker t;
    reader d;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    CHECK(reader_init(&r, &d, fd) && ticker_init(&r, &t));
    d.other = &t;
    job_at(&r.m, &t.job, r.now + 50);
    CHECK(write(fd[1], "abcde", 5) == 5);
    r.now += 3600000;
    loop_turn(&r.m, NEVER);
    CHECK_INT(d.bytes, 5);
    CHECK(!d.late);
    CHECK_INT(t.steps, 1);

    t.steps = 0;  // the same when a wake-up lets the turn skip its wait
    d.bytes = 0;
    job_at(&r.m, &t.job, r.now + 1);
    loop_turn(&r.m, r.now);
    CHECK(write(fd[1], "xyz", 3) == 3);
    r.now += 1;
    job_wake(&r.m, &d.job);
    loop_turn(&r.m, NEVER);
    CHECK_INT(d.bytes, 3);
    CHECK(!d.late);
    CHECK_INT(t.steps, 1);
    job_end(&r.m, &t.job);
    reader_free(&r, &d, fd);
    rig_free(&r);
}

enum { CROWD = 40 };

typedef struct crowd {
    watch w[CROWD];
    ticker t[CROWD];
    uint32_t hits[CROWD];
} crowd;

// A platform whose descriptor 1003 is always ready; it costs 1 ms to look.
static int crowd_busy(rig *r, mcp_fd *fds, uint32_t n, int ms) {
    int ready = 0;
    (void)ms;
    r->now += 1;
    for (uint32_t i = 0; i < n; i++) {
        fds[i].got = fds[i].fd == 1003 ? MCP_READABLE : 0;
        ready += fds[i].got != 0;
    }
    return ready;
}

static int crowd_idle(rig *r, mcp_fd *fds, uint32_t n, int ms) {
    for (uint32_t i = 0; i < n; i++) fds[i].got = 0;
    r->now += ms;
    return 0;
}

static void test_loop_hot(void) {
    static crowd c;
    int all = 0, few = 0, gap = 0, widest = 0;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    for (int i = 0; i < CROWD; i++) {
        CHECK(ticker_init(&r, &c.t[i]));
        CHECK(watch_add(&r.m, &c.w[i], 1000 + i, MCP_READABLE, &c.t[i].job));
    }
    CHECK_INT(r.m.loop.n, CROWD + 1);  // and the self-pipe
    watch_hot(&r.m, &c.w[3], true);
    watch_hot(&r.m, &c.w[3], true);
    CHECK_INT(r.m.loop.hot, 2);  // and the self-pipe
    r.script = crowd_busy;
    for (int i = 0; i < 200; i++) {
        loop_turn(&r.m, NEVER);
        if (r.last_n == CROWD + 1) all++, gap = 0;
        else few++, gap++;
        if (gap > widest) widest = gap;
        CHECK(r.last_n == 2 || r.last_n == CROWD + 1);
    }
    CHECK_INT(c.t[3].steps, 200);
    CHECK(few > 150 && all >= 9);  // busy: mostly alone, all every 20 ms
    CHECK(widest <= TIME_HOT_TURN);

    r.script = crowd_idle;  // idle: 20 ms for the hot, then all for the rest
    r.waits = 0;
    r.m.loop.all_polled = r.now;
    loop_turn(&r.m, r.now + 500);
    CHECK_INT(r.waits, 2);
    CHECK_INT(r.last_n, CROWD + 1);
    CHECK_INT(r.last_ms, 480);

    watch_hot(&r.m, &c.w[3], false);  // nothing hot: no 20 ms for a cold one
    r.m.loop.all_polled = r.now;
    r.waits = 0;
    loop_turn(&r.m, r.now + 500);
    CHECK_INT(r.waits, 1);
    for (int i = 0; i < CROWD; i++) {
        watch_del(&r.m, &c.w[(i * 7) % CROWD]);
        job_end(&r.m, &c.t[i].job);
    }
    CHECK_INT(r.m.loop.n, 1);
    CHECK_INT(r.m.loop.hot, 1);
    rig_free(&r);
}

static void test_loop_watch(void) {
    int fd[2];
    watch none = {0};
    reader d;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    watch_del(&r.m, &none);  // zeroed, never added: fd 0 is not its own
    CHECK_INT(none.fd, -1);
    CHECK_INT(r.m.loop.n, 1);
    watch_del(&r.m, &none);
    CHECK(reader_init(&r, &d, fd));
    CHECK(write(fd[1], "ab", 2) == 2);
    watch_want(&r.m, &d.w, 0);
    loop_turn(&r.m, r.now + 30);
    CHECK_INT(d.steps, 0);
    CHECK_INT(r.slept, 30);
    close(fd[1]);  // a hang-up of which nothing is wanted wakes nobody
    fd[1] = dup(fd[0]);
    loop_turn(&r.m, r.now + 30);
    CHECK_INT(d.steps, 0);
    CHECK_INT(r.slept, 60);
    watch_want(&r.m, &d.w, MCP_READABLE);
    loop_turn(&r.m, r.now + 30);
    loop_turn(&r.m, r.now + 30);
    CHECK_INT(d.bytes, 2);
    CHECK_INT(r.slept, 60);
    reader_free(&r, &d, fd);
    rig_free(&r);
}

#endif  // USE_POSIX

static void test_loop_listeners(void) {
    listener l[3];
    ticker t[3];
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    for (int i = 0; i < 3; i++) {
        CHECK(ticker_init(&r, &t[i]));
        listen_add(&r.m, &l[i], &t[i].job);
        listen_add(&r.m, &l[i], &t[i].job);
    }
    listen_del(&r.m, &l[1]);
    listen_del(&r.m, &l[1]);
    listeners_wake(&r.m);
    listeners_wake(&r.m);
    loop_turn(&r.m, r.now);
    CHECK(t[0].steps == 1 && t[1].steps == 0 && t[2].steps == 1);
    listen_del(&r.m, &l[0]);
    listen_del(&r.m, &l[2]);
    CHECK(!r.m.loop.listeners);
    for (int i = 0; i < 3; i++) job_end(&r.m, &t[i].job);
    rig_free(&r);
}

// What the host was told, one line an event.
typedef struct told {
    rig *rig;
    char text[4096];
    size_t len;
    int n, again;
    bool outside;
} told;

static void told_event(void *user, const mcp_event *ev) {
    told *t = user;
    t->n++;
    if (t->len > sizeof t->text / 2) t->len = 0;  // too many to be looked at
    if (!t->rig->m.loop.in_callback) t->outside = true;
    t->len += (size_t)snprintf(
        t->text + t->len, sizeof t->text - t->len,
        "%d|%s|%.*s|%llu|%d|%g/%g|%d\n", ev->type, ev->server,
        MCP_ARG(str_head(ev->text, 1000)), (unsigned long long)ev->id,
        ev->code, ev->progress, ev->total, ev->outgoing);
    if (t->again > 0) {
        t->again--;
        event_push(&t->rig->m, MCP_EV_LOG, "", S("again"), 0);
    }
}

static void told_init(told *t, rig *r) {
    memset(t, 0, sizeof *t);
    t->rig = r;
    r->m.opt.on_event = told_event;
    r->m.opt.user = t;
}

static void test_loop_events(void) {
    char *big = malloc(LIMIT_EVENT + 100);
    told t;
    rig r;

    if (!CHECK(rig_fake(&r)) || !CHECK(big != NULL)) return;
    event_push(&r.m, MCP_EV_LOG, "s", S("nobody listens"), 0);
    CHECK(!r.m.loop.events);
    told_init(&t, &r);
    CHECK(secrets_add(&r.m.secrets, S("hunter2")));
    event_push(&r.m, MCP_EV_LOG, "files", S("a\x1b[31mb\nc hunter2 d"), 7);
    event_push(&r.m, MCP_EV_LOG, NULL, S("hun\x01ter2"), 0);
    event_progress(&r.m, "files", S("half"), 8, 1, 2);
    event_done(&r.m, 9, MCP_TIMEOUT);
    event_trace(&r.m, "files", true, S("not asked for"));
    r.m.opt.trace = true;
    event_trace(&r.m, "files", true, S("{\"k\":\"hunter2\"}"));
    event_push(&r.m, MCP_EV_STATE, "files", S(""), 0);
    CHECK_INT(t.n, 0);  // not from inside
    CHECK_INT(loop_due(&r.m), r.now);
    loop_turn(&r.m, NEVER);
    CHECK(!t.outside && !r.m.loop.in_callback);
    CHECK_STR(str_of(t.text), S("2|files|ab c *** d|7|0|0/0|0\n"
                                "2||***|0|0|0/0|0\n"
                                "3|files|half|8|0|1/2|0\n"
                                "5|||9|6|0/0|0\n"
                                "6|files|{\"k\":\"***\"}|0|0|0/0|1\n"
                                "1|files||0|0|0/0|0\n"));
    t.n = 0;
    t.len = 0;
    t.again = INT_MAX;  // a function that always causes another event
    event_push(&r.m, MCP_EV_LOG, "", S("first"), 0);
    loop_turn(&r.m, NEVER);
    CHECK_INT(t.n, 1);
    loop_turn(&r.m, NEVER);
    CHECK_INT(t.n, 2);
    CHECK_INT(r.slept, 0);

    memset(big, 'x', LIMIT_EVENT + 100);
    memcpy(big + LIMIT_EVENT - 3, "hunter2", 7);  // no half of it is shown
    event_push(&r.m, MCP_EV_LOG, "", str_make(big, LIMIT_EVENT + 100), 0);
    for (event *e = r.m.loop.events; e; e = e->next) {
        if (e->tell.text.len < 100) continue;
        CHECK_INT(e->tell.text.len, LIMIT_EVENT);
        CHECK_STR(str_skip(e->tell.text, LIMIT_EVENT - 5), S("xx***"));
    }
    free(big);
    rig_free(&r);  // frees what was not delivered
}

static mcp_code torture_loop(mem *mm) {
    static rig r;
    mcp_code rc = MCP_OUT_OF_MEMORY;
    ticker t[9];
    watch w[9];
    told heard;
    int n = 0;

    if (!rig_init(&r, mm)) return secrets_free(&r.m.secrets), rc;
    told_init(&heard, &r);
    for (; n < 9; n++) {
        if (!ticker_init(&r, &t[n])) break;
        job_at(&r.m, &t[n].job, r.m.loop.now + n);  // cannot fail
        job_wake(&r.m, &t[n].job);
        if (!watch_add(&r.m, &w[n], 1000, 0, &t[n].job)) {
            CHECK_INT(w[n].fd, -1);
            n++;
            break;
        }
    }
    if (n == 9 && w[8].fd >= 0) rc = MCP_OK;
    event_push(&r.m, MCP_EV_LOG, "s", S("lost if there is no memory"), 1);
    loop_turn(&r.m, r.m.loop.now);
    if (!heard.n) rc = MCP_OUT_OF_MEMORY;
    for (int i = 0; i < n; i++) {
        CHECK_INT(t[i].steps > 0, 1);
        watch_del(&r.m, &w[i]);
        job_end(&r.m, &t[i].job);
    }
    loop_free(&r.m);
    secrets_free(&r.m.secrets);
    return rc;
}

static void test_loop_torture(void) {
    torture(torture_loop);
}

#if USE_POSIX

static void *cancel_later(void *m) {
    struct timespec t = {0, 30000000};
    nanosleep(&t, NULL);
    mcp_cancel(m);
    return NULL;
}

static void test_loop_cancel_thread(void) {
    int64_t begun;
    pthread_t thread;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(!loop_drain_cancel(&r.m));
    begun = r.m.loop.now;
    CHECK(pthread_create(&thread, NULL, cancel_later, &r.m) == 0);
    CHECK(loop_turn(&r.m, begun + 10000));
    CHECK(r.m.loop.now - begun < 5000);
    pthread_join(thread, NULL);
    CHECK(!loop_turn(&r.m, r.m.loop.now));
    for (int i = 0; i < 100000; i++) mcp_cancel(&r.m);  // the pipe is full
    CHECK(loop_drain_cancel(&r.m));  // all were for a call that is over
    CHECK(!loop_turn(&r.m, r.m.loop.now));
    mcp_cancel(NULL);
    rig_free(&r);
}

static mcp *cancel_target;  // signal handlers have no argument

static void cancel_handler(int number) {
    (void)number;
    errno = 77;
    mcp_cancel(cancel_target);
    if (errno != 77) cancel_target = NULL;
}

static void test_loop_cancel_signal(void) {
    struct sigaction act = {0}, old;
    int64_t begun;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    cancel_target = &r.m;
    act.sa_handler = cancel_handler;
    sigaction(SIGALRM, &act, &old);
    loop_drain_cancel(&r.m);
    begun = r.m.loop.now;
    alarm(1);
    CHECK(loop_turn(&r.m, begun + 10000) || loop_turn(&r.m, begun + 10000));
    CHECK(r.m.loop.now - begun < 5000);
    sigaction(SIGALRM, &old, NULL);
    CHECK(cancel_target == &r.m);
    rig_free(&r);
}

#endif  // USE_POSIX

static bool wakeless(os *o, os_fd fd[2]) {
    (void)o;
    fd[0] = fd[1] = -1;
    return true;
}

static bool wake_fails(os *o, os_fd fd[2]) {
    (void)o;
    fd[0] = fd[1] = -1;
    return false;
}

static void test_loop_no_pipe(void) {
    ticker t;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    loop_free(&r.m);
    r.m.os.wake_open = wake_fails;
    CHECK(!loop_init(&r.m));
    r.m.os.wake_open = wakeless;
    CHECK(loop_init(&r.m));
    CHECK(ticker_init(&r, &t));
    job_at(&r.m, &t.job, r.now + 5);
    mcp_cancel(&r.m);
    CHECK(!loop_drain_cancel(&r.m));
    CHECK(!loop_turn(&r.m, NEVER));
    CHECK_INT(t.steps, 1);
    job_end(&r.m, &t.job);
    rig_free(&r);
}

#if !USE_POSIX

// Without a system whatever needs one says so, and nothing is NULL.
static void test_os_none(void) {
    mcp_os host = {NULL, rig_host_now, NULL, rig_host_random, NULL, NULL};
    os_addr at = {0};
    os_child c;
    os_stat st;
    os_fd fd;
    char b[4];
    int n;
    str s;
    os o;

    CHECK(!os_adopt(&o, NULL));
    host.random = NULL;
    CHECK(!os_adopt(&o, &host));
    host.random = rig_host_random;
    CHECK(os_adopt(&o, &host));
    CHECK(o.unix_s(&o) == 0 && o.wait(&o, NULL, 0, 9) == 0);
    o.log(&o, "");
    o.wake(&o, -1);
    o.close(&o, -1);
    CHECK(o.read(&o, 0, b, 4) == IO_FAIL && o.write(&o, 0, b, 4) == IO_FAIL);
    CHECK(o.send(&o, 0, b, 4) == IO_FAIL && !o.quiet(&o, 0));
    CHECK(o.connect(&o, &at, &fd) && o.connected(&o, 0, b, 4));
    CHECK(o.datagram(&o, &at, &fd) && o.listen(&o, &at, &fd));
    CHECK(o.accept(&o, 0, &fd) && o.file_lock(&o, "x", &fd) && fd == -1);
    CHECK(o.file_stat(&o, "x", &st) && o.file_read(&o, "x", 1, NULL));
    CHECK(o.file_map(&o, "x", 1, &s, &st) && s.len == 0);
    o.file_unmap(&o, s);
    CHECK(o.file_replace(&o, "x", s, 0600, NULL, NULL));
    CHECK(o.file_remove(&o, "x") && o.file_real(&o, "x", NULL));
    CHECK(o.file_link(&o, "x") && o.dir_make(&o, "x", 0700));
    CHECK(o.dir_temp(&o, "x", NULL) && o.cwd(&o, NULL));
    CHECK(!o.env(&o, "x") && o.environ(&o)[0] == NULL);
    CHECK(o.can_run(&o, "x") && o.spawn(&o, NULL, &c) && c.pid == -1);
    CHECK(o.exited(&o, 1, &n) && n == -1);
    o.signal_group(&o, 1, true);
    o.reap(&o, 1);
}

#else

static int64_t host_now(void *user) {
    return *(int64_t *)user;
}

static int host_random(void *user, void *to, size_t n) {
    memset(to, 42, n);
    return user ? 0 : 1;
}

static int host_wait(void *user, mcp_fd *fds, int n, int ms) {
    (void)fds, (void)n;
    *(int64_t *)user += ms;
    return 0;
}

static void host_log(void *user, const char *line) {
    *(int64_t *)user += (int64_t)strlen(line);
}

static void test_os_adopt(void) {
    int64_t now = 5;
    mcp_os host = {&now, host_now, host_now, host_random, host_wait, host_log};
    unsigned char b[2] = {0, 0};
    os o;

    CHECK(os_adopt(&o, NULL));
    CHECK(o.now_ms(&o) > 0 && o.unix_s(&o) > 1600000000);
    CHECK(o.random(&o, b, 2));
    CHECK(os_adopt(&o, &host));
    CHECK_INT(o.now_ms(&o), 5);
    CHECK_INT(o.wait(&o, NULL, 0, 7), 0);
    CHECK_INT(o.unix_s(&o), 12);
    CHECK(o.random(&o, b, 2) && b[1] == 42);
    o.log(&o, "abc");
    CHECK_INT(now, 15);
}

#endif  // USE_POSIX

#if USE_STDIO || USE_HTTP

static void test_io_fds(void) {
    int in[2], out[2];
    char b[8];
    ticker t;
    rig r;
    io *s;

    if (!CHECK(rig_fake(&r))) return;
    CHECK(ticker_init(&r, &t));
    CHECK(unix_wake_open(&r.m.os, in) && unix_wake_open(&r.m.os, out));
    s = io_new_fds(&r.m, in[0], out[1], false, &t.job);
    if (!CHECK(s != NULL)) return;
    CHECK_INT(io_read(&r.m, s, b, 8), IO_AGAIN);
    CHECK(write(in[1], "hello", 5) == 5);
    CHECK_INT(io_read(&r.m, s, b, 8), IO_AGAIN);  // the loop has not seen it
    io_want(&r.m, s, true, false);
    io_hot(&r.m, s, true);
    loop_turn(&r.m, r.now + 10);
    CHECK_INT(t.steps, 1);
    CHECK_INT(io_read(&r.m, s, b, 2), 2);
    CHECK_INT(io_read(&r.m, s, b, 8), 3);
    CHECK_INT(io_read(&r.m, s, b, 8), IO_AGAIN);
    CHECK_INT(io_write(&r.m, s, "abc", 3), 3);
    CHECK_INT(read(out[0], b, 8), 3);
    io_want(&r.m, s, true, true);  // room in the pipe wakes the owner
    loop_turn(&r.m, r.now + 10);
    CHECK_INT(t.steps, 2);
    io_want(&r.m, s, true, false);
    close(in[1]);
    loop_turn(&r.m, r.now + 10);
    CHECK_INT(t.steps, 3);
    CHECK_INT(io_read(&r.m, s, b, 8), IO_END);
    CHECK_INT(io_read(&r.m, s, b, 8), IO_END);
    loop_turn(&r.m, r.now + 10);  // an ended stream lets us sleep
    CHECK_INT(t.steps, 3);
    close(out[0]);
    CHECK_INT(io_write(&r.m, s, "abc", 3), IO_FAIL);  // and no SIGPIPE
    CHECK_INT(s->why, MCP_CONNECTION_FAILED);
    io_fds_shut(&r.m, s);
    CHECK_INT(io_write(&r.m, s, "abc", 3), IO_FAIL);
    io_close(&r.m, s);
    io_close(&r.m, NULL);
    CHECK_INT(r.m.loop.n, 1);
    job_end(&r.m, &t.job);
    rig_free(&r);
}

static mcp_code torture_io(mem *mm) {
    static rig r;
    mcp_code rc = MCP_OUT_OF_MEMORY;
    int in[2], out[2];
    io *s;

    if (!rig_init(&r, mm)) return secrets_free(&r.m.secrets), rc;
    CHECK(unix_wake_open(&r.m.os, in) && unix_wake_open(&r.m.os, out));
    s = io_new_fds(&r.m, in[0], out[1], false, NULL);
    if (s) rc = MCP_OK;
    else CHECK(fcntl(in[0], F_GETFD) < 0 && fcntl(out[1], F_GETFD) < 0);
    io_close(&r.m, s);
    CHECK(fcntl(in[0], F_GETFD) < 0 && fcntl(out[1], F_GETFD) < 0);
    close(in[1]);
    close(out[0]);
    loop_free(&r.m);
    secrets_free(&r.m.secrets);
    return rc;
}

static void test_io_torture(void) {
    torture(torture_io);
}

// One call on a pipe pair: one write, at most two polls and two reads, the
// self-pipe's included (DESIGN section 5).
typedef struct caller {
    job job;
    io *io;
    int state;
} caller;

static int cost_reads, cost_writes;

static ptrdiff_t cost_read(os *o, os_fd fd, void *to, size_t n) {
    cost_reads++;
    return unix_read(o, fd, to, n);
}

static ptrdiff_t cost_write(os *o, os_fd fd, const void *from, size_t n) {
    cost_writes++;
    return unix_write(o, fd, from, n);
}

static void caller_step(mcp *m, job *j) {
    caller *c = (caller *)j;
    char b[512];
    ptrdiff_t n, all = 0;

    if (c->state == 0) {
        c->state = 1;
        CHECK_INT(io_write(m, c->io, "question", 8), 8);
        return;
    }
    while ((n = io_read(m, c->io, b, sizeof b)) > 0) all += n;
    if (all == 8) c->state = 2;
}

static void test_loop_cost(void) {
    int in[2], out[2];
    char b[16];
    caller c;
    rig r;

    if (!CHECK(rig_fake(&r))) return;
    r.m.os.read = cost_read;
    r.m.os.write = cost_write;
    CHECK(unix_wake_open(&r.m.os, in) && unix_wake_open(&r.m.os, out));
    CHECK(job_init(&r.m, &c.job, caller_step));
    c.io = io_new_fds(&r.m, in[0], out[1], false, &c.job);
    if (!CHECK(c.io != NULL)) return;
    io_want(&r.m, c.io, true, false);
    for (int i = 0; i < 5; i++) {
        r.now += i * 10;  // some right after the last, some after a pause
        r.waits = cost_reads = cost_writes = 0;
        c.state = 0;
        loop_drain_cancel(&r.m);
        io_hot(&r.m, c.io, true);
        job_at(&r.m, &c.job, r.now + 1000);
        job_wake(&r.m, &c.job);
        loop_turn(&r.m, NEVER);
        CHECK(read(out[0], b, 16) == 8 && write(in[1], b, 8) == 8);
        while (c.state != 2) loop_turn(&r.m, NEVER);
        job_at(&r.m, &c.job, NEVER);
        io_hot(&r.m, c.io, false);
        CHECK(r.waits <= 2 && cost_reads <= 2 && cost_writes == 1);
    }
    io_close(&r.m, c.io);
    job_end(&r.m, &c.job);
    close(in[1]);
    close(out[0]);
    rig_free(&r);
}

#endif  // USE_STDIO || USE_HTTP

// A stream of the caller's: an echo that answers every third time.
typedef struct echo {
    char data[64];
    size_t len;
    int tries, opens, closes, fails;
    int fd[2];
    bool over, lies;
} echo;

static int echo_open(void *user) {
    echo *e = user;
    e->over = false;
    e->opens++;
    return e->fails > 0 ? e->fails-- : 0;
}

static ptrdiff_t echo_read(void *user, void *to, size_t n) {
    echo *e = user;
    size_t k = e->len < n ? e->len : n;
    if (e->lies) return (ptrdiff_t)n + 1;
    if (e->over) return -1;
    if (++e->tries % 3 || !k) return 0;
    memcpy(to, e->data, k);
    memmove(e->data, e->data + k, e->len -= k);
    return (ptrdiff_t)k;
}

static ptrdiff_t echo_write(void *user, const void *from, size_t n) {
    echo *e = user;
    size_t k = sizeof e->data - e->len;
    if (e->lies) return (ptrdiff_t)n + 1;
    if (e->over) return -1;
    if (k > n) k = n;
    memcpy(e->data + e->len, from, k);
    e->len += k;
    return (ptrdiff_t)k;
}

static int echo_fds(void *user, mcp_fd *out, int cap) {
    echo *e = user;
    if (cap < 2) return 0;
    out[0].fd = e->fd[0];
    out[0].want = MCP_READABLE;
    out[1].fd = e->fd[1];
    out[1].want = MCP_WRITABLE;
    return 2;
}

static void echo_close(void *user) {
    ((echo *)user)->closes++;
}

static void test_io_caller(void) {
    mcp_io user = {NULL, echo_open, echo_read, echo_write, NULL, echo_close};
    echo e = {0};
    char b[16];
    ticker t;
    rig r;
    io *s;

    user.user = &e;
    if (!CHECK(rig_fake(&r))) return;
    CHECK(ticker_init(&r, &t));
    s = io_new_caller(&r.m, &user, &t.job);
    if (!CHECK(s != NULL)) return;
    CHECK_INT(e.opens, 0);
    e.fails = 1;
    CHECK(!io_caller_open(s));
    CHECK(io_caller_open(s));
    CHECK_INT(io_write(&r.m, s, "ping", 4), 4);
    io_want(&r.m, s, true, false);
    io_hot(&r.m, s, true);
    while (io_read(&r.m, s, b, 16) == IO_AGAIN && t.steps < 10)
        loop_turn(&r.m, NEVER);  // no descriptor: tried again by the clock
    CHECK_INT(t.steps, 2);
    CHECK_INT(r.slept, 2 * TIME_POLLED);
    CHECK(memcmp(b, "ping", 4) == 0);
    io_want(&r.m, s, false, false);
    loop_turn(&r.m, r.now + 50);
    loop_turn(&r.m, r.now + 50);
    CHECK(r.slept >= 50);  // nothing wanted: no tick
    e.over = true;
    CHECK_INT(io_read(&r.m, s, b, 16), IO_END);
    CHECK_INT(io_read(&r.m, s, b, 16), IO_END);
    CHECK_INT(io_write(&r.m, s, "x", 1), IO_FAIL);
    CHECK(io_caller_open(s));
    CHECK_INT(io_write(&r.m, s, "x", 1), 1);
    e.lies = true;
    CHECK_INT(io_read(&r.m, s, b, 16), IO_FAIL);
    CHECK_INT(io_write(&r.m, s, "x", 1), IO_FAIL);
    io_close(&r.m, s);
    CHECK_INT(e.closes, 1);
    CHECK_INT(e.opens, 3);

    user.open = NULL;  // cannot be opened again
    user.close = NULL;
    e.lies = false;
    s = io_new_caller(&r.m, &user, &t.job);
    CHECK(s && io_caller_open(s) && io_caller_open(s));
    e.over = true;
    CHECK_INT(io_read(&r.m, s, b, 16), IO_END);
    CHECK(!io_caller_open(s));
    io_close(&r.m, s);
    CHECK_INT(r.m.loop.jobs, 1);
    job_end(&r.m, &t.job);
    rig_free(&r);
}

#if USE_POSIX

static void test_io_caller_fds(void) {
    mcp_io user = {NULL, NULL, echo_read, echo_write, echo_fds, NULL};
    echo e = {0};
    ticker t;
    rig r;
    io *s;

    user.user = &e;
    if (!CHECK(rig_fake(&r))) return;
    CHECK(unix_wake_open(&r.m.os, e.fd));
    CHECK(ticker_init(&r, &t));
    s = io_new_caller(&r.m, &user, &t.job);
    if (!CHECK(s && io_caller_open(s))) return;
    CHECK_INT(r.m.loop.n, 3);
    io_hot(&r.m, s, true);
    CHECK_INT(r.m.loop.hot, 3);
    io_want(&r.m, s, true, false);
    loop_turn(&r.m, r.now + 40);
    CHECK_INT(t.steps, 0);
    CHECK_INT(r.slept, 40);
    CHECK(write(e.fd[1], "!", 1) == 1);
    loop_turn(&r.m, r.now + 40);
    CHECK_INT(t.steps, 1);
    io_want(&r.m, s, false, true);
    loop_turn(&r.m, r.now + 40);
    CHECK_INT(t.steps, 2);
    CHECK(io_caller_open(s));  // other descriptors, what was wanted stays
    loop_turn(&r.m, r.now + 40);
    CHECK_INT(t.steps, 3);
    CHECK_INT(r.slept, 40);
    io_close(&r.m, s);
    CHECK_INT(r.m.loop.n, 1);
    job_end(&r.m, &t.job);
    close(e.fd[0]);
    close(e.fd[1]);
    rig_free(&r);
}

#endif  // USE_POSIX

static mcp_code torture_caller(mem *mm) {
    mcp_io user = {NULL, NULL, echo_read, echo_write, echo_fds, NULL};
    static rig r;
    mcp_code rc = MCP_OUT_OF_MEMORY;
    echo e = {0};
    io *s;

    if (!rig_init(&r, mm)) return secrets_free(&r.m.secrets), rc;
    user.user = &e;
    e.fd[0] = e.fd[1] = 1000;
    s = io_new_caller(&r.m, &user, NULL);
    if (s && io_caller_open(s)) rc = MCP_OK;
    io_close(&r.m, s);
    CHECK_INT(r.m.loop.jobs, 0);
    loop_free(&r.m);
    secrets_free(&r.m.secrets);
    return rc;
}

static void test_io_caller_torture(void) {
    torture(torture_caller);
}

// The stream is tried again before the deadline of what waits for it, though
// both are due when somebody turns the loop at last.
static void test_io_caller_late(void) {
    mcp_io user = {NULL, NULL, echo_read, echo_write, NULL, NULL};
    ticker wait, late;
    echo e = {0};
    rig r;
    io *s;

    user.user = &e;
    if (!CHECK(rig_fake(&r))) return;
    CHECK(ticker_init(&r, &wait) && ticker_init(&r, &late));
    s = io_new_caller(&r.m, &user, &wait.job);
    if (!CHECK(s && io_caller_open(s))) return;
    io_want(&r.m, s, true, false);
    late.watched = &wait;
    job_at(&r.m, &late.job, r.now + 50);
    r.now += 3600000;
    loop_turn(&r.m, NEVER);
    CHECK_INT(late.steps, 1);
    CHECK_INT(late.seen, 1);
    io_close(&r.m, s);
    job_end(&r.m, &wait.job);
    job_end(&r.m, &late.job);
    rig_free(&r);
}

static const test tests_loop[] = {
    {"loop.timers", test_loop_timers},
    {"loop.sleep", test_loop_sleep},
    {"loop.jobs", test_loop_jobs},
    {"loop.restless", test_loop_restless},
    {"loop.listeners", test_loop_listeners},
    {"loop.events", test_loop_events},
    {"loop.torture", test_loop_torture},
    {"loop.no_pipe", test_loop_no_pipe},
    {"loop.io_caller", test_io_caller},
    {"loop.io_caller_late", test_io_caller_late},
    {"loop.io_caller_torture", test_io_caller_torture},
#if USE_POSIX
    {"loop.bytes_first", test_loop_bytes_first},
    {"loop.hot", test_loop_hot},
    {"loop.watch", test_loop_watch},
    {"loop.cancel_thread", test_loop_cancel_thread},
    {"loop.cancel_signal", test_loop_cancel_signal},
    {"loop.os_adopt", test_os_adopt},
    {"loop.io_caller_fds", test_io_caller_fds},
#else
    {"loop.os_none", test_os_none},
#endif
#if USE_STDIO || USE_HTTP
    {"loop.io_fds", test_io_fds},
    {"loop.io_torture", test_io_torture},
    {"loop.cost", test_loop_cost},
#endif
};

//=============================================================================
// MARK: - JSON
//
// The table is the contract of the strict pass. Three verdicts a text: what
// RFC 8259 says, what we say, what jsmn alone (strict, with parent links) says:
// y is JSON, n is not, L is beyond a limit of ours. The third column shows
// why jsmn does not decide here: it lets texts through that are no JSON, and
// by itself refuses a number with nothing after it.
//=============================================================================

typedef struct json_row {
    const char *p;
    size_t n;
    const char *verdict;
} json_row;

static const json_row json_rows[] = {
    // literals
    {T("true"), "yyn"}, {T("false"), "yyn"}, {T("null"), "yyn"},
    {T(" true"), "yyn"}, {T("null\n"), "yyy"}, {T("[true]"), "yyy"},
    {T("[false,null]"), "yyy"}, {T("{\"t\":true}"), "yyy"},
    {T("[null]"), "yyy"}, {T("tru"), "nnn"}, {T("truee"), "nnn"},
    {T("True"), "nnn"}, {T("TRUE"), "nnn"}, {T("fals"), "nnn"},
    {T("falsey"), "nnn"}, {T("nul"), "nnn"}, {T("nulll"), "nnn"},
    {T("NULL"), "nnn"}, {T("nil"), "nnn"}, {T("none"), "nnn"},
    {T("undefined"), "nnn"}, {T("NaN"), "nnn"}, {T("Infinity"), "nnn"},
    {T("-Infinity"), "nnn"}, {T("yes"), "nnn"}, {T("[tru]"), "nny"},
    {T("[nul]"), "nny"}, {T("[falsee]"), "nny"}, {T("t"), "nnn"},
    {T("n"), "nnn"}, {T("[truefalse]"), "nny"}, {T("[true false]"), "nny"},
    {T("trueX"), "nnn"}, {T("[true,nul]"), "nny"}, {T("[t]"), "nny"},
    {T("[nan]"), "nny"},
    // integers
    {T("0"), "yyn"}, {T("-0"), "yyn"}, {T("1"), "yyn"}, {T("-1"), "yyn"},
    {T("9"), "yyn"}, {T("10"), "yyn"}, {T("42"), "yyn"}, {T("-17"), "yyn"},
    {T("1234567890"), "yyn"}, {T("9007199254740993"), "yyn"},
    {T("1234567890123456789"), "yyn"}, {T("18446744073709551616"), "yyn"},
    {T("123456789012345678901234567890"), "yyn"}, {T("[0]"), "yyy"},
    {T("[-0]"), "yyy"}, {T("[0,1,2]"), "yyy"}, {T("{\"n\":7}"), "yyy"},
    {T("00"), "nnn"}, {T("01"), "nnn"}, {T("-01"), "nnn"}, {T("-00"), "nnn"},
    {T("+1"), "nnn"}, {T("-"), "nnn"}, {T("--1"), "nnn"}, {T("- 1"), "nnn"},
    {T("1-"), "nnn"}, {T("0x1F"), "nnn"}, {T("1_000"), "nnn"},
    {T("1,000"), "nnn"}, {T("[01]"), "nny"}, {T("[-]"), "nny"},
    {T("[+0]"), "nnn"}, {T("[0x0]"), "nny"}, {T("1a"), "nnn"},
    {T("[1a]"), "nny"}, {T("0b1"), "nnn"}, {T("\331\241"), "nnn"},
    {T("[\357\274\221]"), "nnn"}, {T("[-a]"), "nny"}, {T("#1"), "nnn"},
    {T("$1"), "nnn"}, {T("[-01]"), "nny"},
    // fractions
    {T("0.0"), "yyn"}, {T("0.5"), "yyn"}, {T("-0.25"), "yyn"},
    {T("1.0"), "yyn"}, {T("10.125"), "yyn"}, {T("0.000001"), "yyn"},
    {T("123.4560"), "yyn"}, {T("[3.14,2.71]"), "yyy"}, {T(".5"), "nnn"},
    {T("5."), "nnn"}, {T("-.5"), "nnn"}, {T("1."), "nnn"}, {T("[.1]"), "nnn"},
    {T("[1.]"), "nny"}, {T("1..2"), "nnn"}, {T("1.2.3"), "nnn"},
    {T("0."), "nnn"}, {T("-0."), "nnn"}, {T("1.e3"), "nnn"},
    {T("[0.,1]"), "nny"}, {T("1.-2"), "nnn"}, {T("0,5x"), "nnn"},
    {T("1.+2"), "nnn"}, {T("[1. 5]"), "nny"},
    // exponents
    {T("1e1"), "yyn"}, {T("1E1"), "yyn"}, {T("1e+1"), "yyn"},
    {T("1e-1"), "yyn"}, {T("0e0"), "yyn"}, {T("-0e0"), "yyn"},
    {T("0E+00"), "yyn"}, {T("1.5e10"), "yyn"}, {T("1.5E-10"), "yyn"},
    {T("1e400"), "yyn"}, {T("1e-400"), "yyn"}, {T("[1e01,2]"), "yyy"},
    {T("2e000"), "yyn"}, {T("1e"), "nnn"}, {T("1E"), "nnn"}, {T("1e+"), "nnn"},
    {T("1e-"), "nnn"}, {T("e1"), "nnn"}, {T("1ee1"), "nnn"},
    {T("1e1.5"), "nnn"}, {T("1e1e1"), "nnn"}, {T("1e 1"), "nnn"},
    {T("1 e1"), "nnn"}, {T("1e+-1"), "nnn"}, {T("[1e]"), "nny"},
    {T("[1e+]"), "nny"}, {T("1e0x"), "nnn"}, {T("-e1"), "nnn"},
    {T("1.0e"), "nnn"}, {T("[1E-,2]"), "nny"}, {T("1e++2"), "nnn"},
    // simple strings
    {T("\"\""), "yyy"}, {T("\"a\""), "yyy"}, {T("\"hello world\""), "yyy"},
    {T("\" \""), "yyy"}, {T("\"/\""), "yyy"}, {T("\"[1,2]\""), "yyy"},
    {T("\"{}\""), "yyy"}, {T("\"//\""), "yyy"}, {T("\"/* */\""), "yyy"},
    {T("\"\177\""), "yyy"}, {T("\"a,b:c\""), "yyy"}, {T("[\"\",\"\"]"), "yyy"},
    {T("\"'\""), "yyy"}, {T("\""), "nnn"}, {T("\"a"), "nnn"},
    {T("a\""), "nnn"}, {T("''"), "nnn"}, {T("'a'"), "nnn"},
    {T("\"\"a"), "nnn"}, {T("\"a\"\"b\""), "nny"}, {T("[\"a]"), "nnn"},
    {T("[\"a\""), "nnn"}, {T("[a\"]"), "nnn"}, {T("\"a\n\""), "nny"},
    {T("\"\t\""), "nny"}, {T("\"\001\""), "nny"}, {T("\"\037\""), "nny"},
    {T("\"a\r\""), "nny"}, {T("[\"\n\"]"), "nny"}, {T("`a`"), "nnn"},
    {T("\342\200\234a\342\200\235"), "nnn"}, {T("['a']"), "nnn"},
    {T("\"a\"b"), "nnn"}, {T("\"\"\"\""), "nny"}, {T("[\"a\"\"b\"]"), "nny"},
    // escapes
    {T("\"\\\"\""), "yyy"}, {T("\"\\\\\""), "yyy"}, {T("\"\\/\""), "yyy"},
    {T("\"\\b\\f\\n\\r\\t\""), "yyy"}, {T("\"\\\\\\\"\""), "yyy"},
    {T("\"\\\\\\\\\""), "yyy"}, {T("\"a\\nb\""), "yyy"},
    {T("[\"\\\"]\"]"), "yyy"}, {T("\"\\\\n\""), "yyy"},
    {T("{\"\\n\":1}"), "yyy"}, {T("\"\\\"\\\\\\/\""), "yyy"},
    {T("[\"\\\\\"]"), "yyy"}, {T("\"\\\""), "nnn"}, {T("\"\\a\""), "nnn"},
    {T("\"\\x41\""), "nnn"}, {T("\"\\0\""), "nnn"}, {T("\"\\v\""), "nnn"},
    {T("\"\\'\""), "nnn"}, {T("\"\\e\""), "nnn"}, {T("\"\\N\""), "nnn"},
    {T("\"\\U0041\""), "nnn"}, {T("\"\\\\\\\""), "nnn"},
    {T("\"abc\\\""), "nnn"}, {T("\"\\ \""), "nnn"}, {T("\"\\\n\""), "nnn"},
    {T("\"\\\?\""), "nnn"}, {T("\"\\101\""), "nnn"}, {T("[\"\\]"), "nnn"},
    {T("\"\\8\""), "nnn"}, {T("\"\\B\""), "nnn"}, {T("\\\"a\\\""), "nnn"},
    {T("\"\\{\""), "nnn"}, {T("\"\\\303\251\""), "nnn"},
    // unicode escapes
    {T("\"\\u0041\""), "yyy"}, {T("\"\\u00e9\""), "yyy"},
    {T("\"\\u20AC\""), "yyy"}, {T("\"\\u0000\""), "yyy"},
    {T("\"\\uFFFF\""), "yyy"}, {T("\"\\uabCD\""), "yyy"},
    {T("\"\\u0022\""), "yyy"}, {T("\"\\u005C\""), "yyy"},
    {T("\"a\\u0041b\""), "yyy"}, {T("\"\\u00410\""), "yyy"},
    {T("{\"\\u0061\":1}"), "yyy"}, {T("\"\\\\u00zz\""), "yyy"},
    {T("\"\\u\""), "nnn"}, {T("\"\\u1\""), "nnn"}, {T("\"\\u12\""), "nnn"},
    {T("\"\\u123\""), "nnn"}, {T("\"\\u004\""), "nnn"},
    {T("\"\\u00g0\""), "nnn"}, {T("\"\\u 041\""), "nnn"},
    {T("\"\\uD83D\\u\""), "nnn"}, {T("\"\\u+041\""), "nnn"},
    {T("\"\\u-041\""), "nnn"}, {T("\"\\u{41}\""), "nnn"},
    {T("\"\\u0x41\""), "nnn"}, {T("\"\\u00"), "nnn"}, {T("\"\\u00"), "nnn"},
    {T("[\"\\u00\"]"), "nnn"}, {T("\"\\uD83D\\uDE0\""), "nnn"},
    {T("\"\\uZZZZ\""), "nnn"}, {T("\"\\u004\n\""), "nnn"},
    // surrogate escapes
    {T("\"\\uD83D\\uDE00\""), "yyy"}, {T("\"\\ud83d\\ude00\""), "yyy"},
    {T("\"\\uD800\\uDC00\""), "yyy"}, {T("\"\\uDBFF\\uDFFF\""), "yyy"},
    {T("\"x\\uD83D\\uDE00y\""), "yyy"},
    {T("[\"\\uD83D\\uDE00\\uD83D\\uDE01\"]"), "yyy"},
    {T("\"\\uD800\""), "yyy"}, {T("\"\\uDBFF\""), "yyy"},
    {T("\"\\uDC00\""), "yyy"}, {T("\"\\uDFFF\""), "yyy"},
    {T("\"\\uD800x\""), "yyy"}, {T("\"\\uDC00\\uD800\""), "yyy"},
    {T("\"\\uD800\\uD800\""), "yyy"}, {T("\"\\uD800\\u0041\""), "yyy"},
    {T("\"\\uD800\\n\""), "yyy"}, {T("\"\\uD83D\\uD83D\\uDE00\""), "yyy"},
    {T("\"\\uDE00\\uDE00\""), "yyy"}, {T("{\"\\uD800\":1}"), "yyy"},
    {T("\"\\uD800\\uDC0\""), "nnn"}, {T("\"\\uD800\\x\""), "nnn"},
    // UTF-8
    {T("\"\303\251\""), "yyy"}, {T("\"\342\202\254\""), "yyy"},
    {T("\"\360\237\230\200\""), "yyy"},
    {T("\"\345\267\245\345\205\267\""), "yyy"}, {T("\"\302\200\""), "yyy"},
    {T("\"\337\277\""), "yyy"}, {T("\"\340\240\200\""), "yyy"},
    {T("\"\355\237\277\""), "yyy"}, {T("\"\356\200\200\""), "yyy"},
    {T("\"\357\277\277\""), "yyy"}, {T("\"\360\220\200\200\""), "yyy"},
    {T("\"\364\217\277\277\""), "yyy"}, {T("\"\357\273\277x\""), "yyy"},
    {T("\"\342\200\250\""), "yyy"}, {T("\"12345678\303\251\""), "yyy"},
    {T("\"1234567\303\251\""), "yyy"},
    {T("\"na\303\257ve caf\303\251\""), "yyy"},
    {T("{\"\320\272\320\273\321\216\321\207\":1}"), "yyy"},
    // UTF-8, a lone continuation byte
    {T("\"\200\""), "nny"}, {T("\"\277\""), "nny"}, {T("\"a\200\""), "nny"},
    {T("\"\200\200\""), "nny"}, {T("\"\303\251\251\""), "nny"},
    {T("\"1234567\200\""), "nny"}, {T("\"12345678\200\""), "nny"},
    {T("\200"), "nnn"}, {T("[\277]"), "nnn"},
    // UTF-8, a sequence cut short
    {T("\"\303\""), "nny"}, {T("\"\303a\""), "nny"},
    {T("\"\342\202\""), "nny"}, {T("\"\342\202a\""), "nny"},
    {T("\"\342\""), "nny"}, {T("\"\342a\202\""), "nny"},
    {T("\"\360\237\230\""), "nny"}, {T("\"\360\237\230a\""), "nny"},
    {T("\"\360\237\""), "nny"}, {T("\"\360\237a\""), "nny"},
    {T("\"\360\""), "nny"}, {T("\"\360aaa\""), "nny"}, {T("\"\303"), "nnn"},
    {T("\"\342\202"), "nnn"}, {T("\"\360\237\230"), "nnn"},
    {T("\"\303\303\251\""), "nny"},
    // UTF-8, overlong
    {T("\"\300\200\""), "nny"}, {T("\"\300\257\""), "nny"},
    {T("\"\301\277\""), "nny"}, {T("\"\340\200\200\""), "nny"},
    {T("\"\340\237\277\""), "nny"}, {T("\"\360\200\200\200\""), "nny"},
    {T("\"\360\217\277\277\""), "nny"}, {T("\"\300\242\""), "nny"},
    {T("\"\370\200\200\200\200\""), "nny"},
    {T("\"\374\200\200\200\200\200\""), "nny"},
    // UTF-8, surrogates and beyond
    {T("\"\355\240\200\""), "nny"}, {T("\"\355\277\277\""), "nny"},
    {T("\"\355\240\275\355\270\200\""), "nny"},
    {T("\"\364\220\200\200\""), "nny"}, {T("\"\365\200\200\200\""), "nny"},
    {T("\"\367\277\277\277\""), "nny"}, {T("\"\376\""), "nny"},
    {T("\"\377\""), "nny"}, {T("\"\377\376\""), "nny"}, {T("\"\370\""), "nny"},
    {T("{\"\377\":1}"), "nny"}, {T("\377"), "nnn"},
    {T("\357\273\277{}"), "nnn"}, {T("\376\377\000["), "nnn"},
    {T("[\303\251]"), "nnn"},
    // arrays
    {T("[]"), "yyy"}, {T("[ ]"), "yyy"}, {T("[1]"), "yyy"},
    {T("[1,2]"), "yyy"}, {T("[[]]"), "yyy"}, {T("[[],[]]"), "yyy"},
    {T("[[[]]]"), "yyy"}, {T("[1,\"a\",true,null,{},[]]"), "yyy"},
    {T("[ 1 , 2 ]"), "yyy"}, {T("[\n]"), "yyy"}, {T("[{}]"), "yyy"},
    {T("[{},{}]"), "yyy"}, {T("["), "nnn"}, {T("]"), "nnn"}, {T("[1"), "nnn"},
    {T("1]"), "nnn"}, {T("[,]"), "nny"}, {T("[1,]"), "nny"},
    {T("[,1]"), "nny"}, {T("[1,,2]"), "nny"}, {T("[1 2]"), "nny"},
    {T("[1;2]"), "nny"}, {T("[1:2]"), "nny"}, {T("[[]"), "nnn"},
    {T("[]]"), "nnn"}, {T("[1][2]"), "nny"}, {T("[]1"), "nnn"},
    {T("[}"), "nnn"}, {T("[1}"), "nnn"}, {T("[{]"), "nnn"}, {T("[{]}"), "nnn"},
    {T("[[1,2]"), "nnn"}, {T("[\"a\":1]"), "nny"}, {T("[1,2,"), "nnn"},
    {T("[]]]"), "nnn"}, {T("(1)"), "nnn"}, {T("<1>"), "nnn"},
    {T("[1,[2,]]"), "nny"}, {T("[1 ,]"), "nny"}, {T("[,,]"), "nny"},
    {T("[1\"a\"]"), "nny"}, {T("[\"a\"1]"), "nny"}, {T("[[]1]"), "nny"},
    {T("[1[]]"), "nnn"}, {T("[[][]]"), "nny"}, {T("[{}{}]"), "nny"},
    {T("[[]\"a\"]"), "nny"},
    // objects
    {T("{}"), "yyy"}, {T("{ }"), "yyy"}, {T("{\"a\":1}"), "yyy"},
    {T("{\"a\":1,\"b\":2}"), "yyy"}, {T("{\"a\":{}}"), "yyy"},
    {T("{\"a\":{\"b\":{\"c\":null}}}"), "yyy"}, {T("{ \"a\" : 1 }"), "yyy"},
    {T("{\"\":0}"), "yyy"}, {T("{\"a\":[],\"b\":{}}"), "yyy"},
    {T("{\"a\":\"b\"}"), "yyy"}, {T("{\"a b\":1}"), "yyy"},
    {T("{\"\\\"\":1}"), "yyy"}, {T("{"), "nnn"}, {T("}"), "nnn"},
    {T("{\"a\"}"), "nny"}, {T("{\"a\":}"), "nny"}, {T("{:1}"), "nnn"},
    {T("{\"a\":1"), "nnn"}, {T("{\"a\":1,}"), "nny"}, {T("{,}"), "nny"},
    {T("{,\"a\":1}"), "nny"}, {T("{\"a\" 1}"), "nnn"},
    {T("{\"a\":1 \"b\":2}"), "nny"}, {T("{\"a\":1\"b\":2}"), "nny"},
    {T("{\"a\":1,,\"b\":2}"), "nny"}, {T("{\"a\"::1}"), "nny"},
    {T("{\"a\":1:2}"), "nny"}, {T("{\"a\",\"b\"}"), "nny"},
    {T("{a:1}"), "nnn"}, {T("{'a':1}"), "nnn"}, {T("{1:1}"), "nnn"},
    {T("{null:1}"), "nnn"}, {T("{true:1}"), "nnn"}, {T("{[]:1}"), "nnn"},
    {T("{{}:1}"), "nnn"}, {T("{\"a\":1]"), "nnn"}, {T("{\"a\":1}}"), "nnn"},
    {T("{\"a\":1}{\"b\":2}"), "nny"}, {T("{\"a\"=1}"), "nnn"},
    {T("{\"a\"=>1}"), "nnn"}, {T("{\"a\":1;\"b\":2}"), "nny"},
    {T("{\"a\":1,\"b\"}"), "nny"}, {T("{\"a\":1,\"b\":}"), "nny"},
    {T("{\"a\":1,2}"), "nnn"}, {T("{\"a\",1}"), "nnn"},
    {T("{\"a\":\"b\",\"c\"}"), "nny"}, {T("{\"a\":{}"), "nnn"},
    {T("{\"a\":[}"), "nnn"}, {T("{\"a\":[1}"), "nnn"}, {T("{\"a\":{]"), "nnn"},
    {T("{\"a\" \"b\":1}"), "nny"}, {T("{\"a\":\"b\":\"c\"}"), "nny"},
    {T("{{}}"), "nnn"}, {T("{[]}"), "nnn"}, {T("{1}"), "nnn"},
    {T("{\"a\":1,\"b\":2"), "nnn"}, {T("{\"a\":{\"b\":1}\"c\":2}"), "nny"},
    {T("{\"a\":[]\"b\":1}"), "nny"}, {T("{\"a\":1 2}"), "nnn"},
    {T("{\"a\":1,null:2}"), "nnn"}, {T("{\"a\":null\"b\":1}"), "nny"},
    {T("{\"a\":\"b\"\"c\":\"d\"}"), "nny"}, {T("{\"a\":1,[]}"), "nnn"},
    {T("{\"a\":[]1}"), "nnn"}, {T("{\"a\"{}}"), "nnn"},
    {T("{\"a\"[]}"), "nnn"},
    // duplicate keys
    {T("{\"a\":1,\"a\":2}"), "yyy"}, {T("{\"a\":1,\"a\":1}"), "yyy"},
    {T("{\"a\":{},\"a\":[]}"), "yyy"}, {T("{\"\":1,\"\":2}"), "yyy"},
    {T("{\"a\":1,\"\\u0061\":2}"), "yyy"},
    {T("{\"a\":1,\"b\":2,\"a\":3}"), "yyy"},
    // blanks
    {T(" 1"), "yyn"}, {T("1 "), "yyy"}, {T("\t1"), "yyn"}, {T("\n1\n"), "yyy"},
    {T("\r1\r"), "yyy"}, {T(" \t\r\n1 \t\r\n"), "yyy"},
    {T("[\t1\n,\r2 ]"), "yyy"}, {T("{\n\t\"a\"\r:\n1\n}"), "yyy"},
    {T("{}\n"), "yyy"}, {T("[]\r\n"), "yyy"}, {T(""), "nnn"}, {T(" "), "nnn"},
    {T("\n"), "nnn"}, {T("\t\t"), "nnn"}, {T("\0141"), "nnn"},
    {T("\0131"), "nnn"}, {T("\302\2401"), "nnn"}, {T("\343\200\2001"), "nnn"},
    {T("[\0141]"), "nnn"}, {T("\357\273\2771"), "nnn"},
    {T("\342\200\250[]"), "nnn"}, {T("[1\342\200\251]"), "nnn"},
    {T("\032"), "nnn"}, {T("[]\032"), "nnn"}, {T("\014{}"), "nnn"},
    {T("{\"a\"\013:1}"), "nnn"}, {T("\010[]"), "nnn"},
    // after the value
    {T("1 2"), "nnn"}, {T("1,"), "nny"}, {T("{},"), "nny"},
    {T("{} {}"), "nny"}, {T("[] []"), "nny"}, {T("\"a\" \"b\""), "nny"},
    {T("null null"), "nnn"}, {T("1]"), "nnn"}, {T("1}"), "nnn"},
    {T("{}x"), "nnn"}, {T("[]#"), "nnn"}, {T("1//"), "nnn"},
    {T("{}/**/"), "nnn"}, {T("true,false"), "nnn"}, {T("{};"), "nnn"},
    {T("[]]"), "nnn"}, {T("0 0"), "nnn"}, {T("{\"a\":1} x"), "nnn"},
    {T("\"a\","), "nny"}, {T("1:2"), "nnn"}, {T("\"a\":1"), "nnn"},
    // comments and other dialects
    {T("//\n1"), "nnn"}, {T("/**/1"), "nnn"}, {T("# c\n1"), "nnn"},
    {T("[1,/*c*/2]"), "nnn"}, {T("[1]//c"), "nnn"},
    {T("{/*c*/\"a\":1}"), "nnn"}, {T("[1,2,] "), "nny"},
    {T("{\"a\":1,} "), "nny"}, {T("[Infinity]"), "nnn"}, {T("[0xA]"), "nny"},
    {T("{\"a\":+1}"), "nnn"}, {T("[.5]"), "nnn"}, {T("['a']"), "nnn"},
    {T("{a:\"b\"}"), "nnn"}, {T("[1,2,3,]//"), "nnn"},
    {T("\"a\" + \"b\""), "nnn"}, {T("<a/>"), "nnn"}, {T("a=1"), "nnn"},
    {T("---\na: 1"), "nnn"}, {T("(function(){})"), "nnn"},
    {T("[undefined]"), "nnn"}, {T("[new Date]"), "nnn"}, {T("b'1'"), "nnn"},
    {T("{\"a\":`b`}"), "nnn"}, {T("[5.]"), "nny"}, {T("--1"), "nnn"},
    {T("@\"a\""), "nnn"},
    // NUL
    {T("\000"), "nnn"}, {T("1\000"), "nnn"}, {T("\0001"), "nnn"},
    {T("[]\000"), "nny"}, {T("\"\000\""), "nnn"}, {T("\"a\000b\""), "nnn"},
    {T("{\"a\000\":1}"), "nnn"}, {T("[1\000]"), "nnn"}, {T("[1,\000]"), "nnn"},
    {T("{\"a\":\000}"), "nnn"}, {T("tru\000"), "nnn"}, {T("{}\000{}"), "nny"},
    {T("[\"a\",\000\"b\"]"), "nnn"}, {T("\"a\"\000"), "nny"},
    {T("[\000]"), "nnn"}, {T("1\0002"), "nnn"},
    // cut short
    {T("{\"jsonrpc\":\"2.0\",\"id\":1"), "nnn"},
    {T("{\"jsonrpc\":\"2.0\",\"id\":1,"), "nnn"},
    {T("{\"jsonrpc\":\"2.0\",\"id\""), "nnn"},
    {T("{\"jsonrpc\":\"2.0\",\"id\":"), "nnn"},
    {T("{\"result\":{\"tools\":["), "nnn"},
    {T("{\"result\":{\"tools\":[{\"name\":\"a\"}"), "nnn"},
    {T("{\"result\":{\"tools\":[{\"name\":\"a\"}]}"), "nnn"},
    {T("{\"a\":\"b"), "nnn"}, {T("{\"a\":\"b\\"), "nnn"},
    {T("{\"a\":\"b\\u0"), "nnn"}, {T("{\"a\":1."), "nnn"},
    {T("{\"a\":-"), "nnn"}, {T("{\"a\":1e"), "nnn"}, {T("{\"a\":t"), "nnn"},
    {T("[1,2"), "nnn"}, {T("[[[["), "nnn"},
    {T("{\"a\":{\"a\":{\"a\":"), "nnn"},
};

static char json_verdict(mcp_code rc) {
    return rc == MCP_OK ? 'y' : rc == MCP_LIMIT_EXCEEDED ? 'L' : 'n';
}

// Parse it from a block of exactly its size.
static mcp_code json_try(str text, mcp_doc **d, size_t *at, const char **why) {
    mem m;
    char *p = exact(text);
    mcp_code rc;

    mem_init(&m, NULL, NULL);
    rc = json_parse(&m, str_make(p, text.len), d, at, why);
    free(p);
    return rc;
}

// One that must be JSON.
static mcp_doc *json_make(str text) {
    mcp_doc *d;
    CHECK_INT(json_try(text, &d, NULL, NULL), MCP_OK);
    return d;
}

static char json_bare(str text) {
    static jsmntok_t tokens[2000];
    jsmn_parser p;
    jsmn_init(&p);
    return jsmn_parse(&p, text.ptr, text.len, tokens, 2000) > 0 ? 'y' : 'n';
}

static void json_judge(str text, const char *verdict) {
    mcp_doc *d;
    size_t at = 99999;
    const char *why = NULL;
    mcp_code rc = json_try(text, &d, &at, &why);
    bool ok = json_verdict(rc) == verdict[1] && json_bare(text) == verdict[2];

    ok = ok && (rc == MCP_OK) == (d != NULL);
    ok = ok && (rc == MCP_OK || (at <= text.len && why && *why));
    // We part from the grammar only where a limit says so.
    ok = ok && (verdict[0] == verdict[1] || verdict[1] == 'L');
    if (!CHECK(ok)) printf("%s: %.*s\n", verdict, MCP_ARG(text));
    if (d) CHECK_STR(mcp_raw(json_root(d)), str_trim(text));
    json_free(d);
}

static void test_json_table(void) {
    size_t wrong = 0;

    CHECK(COUNT(json_rows) >= 300);
    for (size_t i = 0; i < COUNT(json_rows); i++) {
        const json_row *r = &json_rows[i];
        json_judge(str_make(r->p, r->n), r->verdict);
        wrong += r->verdict[0] == 'n' && r->verdict[2] == 'y';
    }
    CHECK(wrong > 100);  // what jsmn alone would have let through
}

// `head` n times, the middle, `tail` n times.
static const struct {
    size_t n;
    const char *head, *middle, *tail, *verdict;
} json_nests[] = {
    {99, "[", "", "]", "yyy"},          {100, "[", "", "]", "yyy"},
    {101, "[", "", "]", "yLy"},         {100, "[", "1", "]", "yyy"},
    {101, "[", "1", "]", "yLy"},        {99, "[", "{}", "]", "yyy"},
    {100, "[", "{}", "]", "yLy"},       {100, "{\"a\":", "1", "}", "yyy"},
    {101, "{\"a\":", "1", "}", "yLy"},  {99, "{\"a\":", "[]", "}", "yyy"},
    {100, "{\"a\":", "[]", "}", "yLy"}, {50, "[{\"a\":", "0", "}]", "yyy"},
    {50, "[{\"a\":", "[]", "}]", "yLy"}, {100, "[ ", " ", " ]", "yyy"},
    {101, "[", "x", "]", "nLn"},        {101, "[", "", "", "nLn"},
    {100, "[", "", "", "nnn"},          {100, "[", "", "}", "nnn"},
    {50, "[[],", "[[]]", ",[[]]]", "yyy"}, {98, "[[],", "[1]", ",[[]]]", "yyy"},
};

static void test_json_depth(void) {
    mem m;
    buf b;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    for (size_t i = 0; i < COUNT(json_nests); i++) {
        buf_clear(&b);
        for (size_t k = 0; k < json_nests[i].n; k++)
            buf_add(&b, str_of(json_nests[i].head));
        buf_add(&b, str_of(json_nests[i].middle));
        for (size_t k = 0; k < json_nests[i].n; k++)
            buf_add(&b, str_of(json_nests[i].tail));
        json_judge(buf_str(&b), json_nests[i].verdict);
    }
    buf_free(&b);
}

// Every beginning of a text with all the grammar in it is refused, but where
// only the blanks at its end are missing.
static void test_json_cut(void) {
    str text = S(" {\"a\\n\\u00e9\\ud83d\\ude00\xE2\x82\xAC\" : [ -0.5e+10 , "
                 "true,false , null,\"\",{ } , [ ] ] , \"b\" : 12345678 } \n");
    size_t whole = text.len - 2;

    for (size_t n = 0; n <= text.len; n++)
        json_judge(str_head(text, n),
                   n >= whole ? "yyy" : "nnn");
}

static void test_json_faults(void) {
    static const struct {
        const char *text;
        size_t at;
        const char *why;
    } rows[] = {
        {"", 0, "the text ends too early"},
        {"[1,]", 3, "value expected"},
        {"{\"a\":1,}", 7, "key in quotes expected"},
        {"{\"a\" 1}", 5, "':' expected after a key"},
        {"[1 2]", 3, "',' or the closing bracket expected"},
        {"{\"a\":1\"b\":2}", 6, "',' or the closing bracket expected"},
        {"1 2", 2, "text after the value"},
        {"\"abc", 4, "string without an end"},
        {"\"a\nb\"", 2, "control character in a string"},
        {"\"a\\xb\"", 2, "unknown escape in a string"},
        {"\"\\u12g4\"", 1, "\\u without four hex digits"},
        {"\"12345678\xFF\"", 9, "not UTF-8"},
        {"[-]", 2, "digit expected"},
        {"[1", 2, "the text ends too early"},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d;
        size_t at = 999;
        const char *why = "";
        str text = str_of(rows[i].text);
        CHECK_INT(json_try(text, &d, &at, &why), MCP_PROTOCOL_ERROR);
        CHECK_INT(at, rows[i].at);
        CHECK_STR(str_of(why), str_of(rows[i].why));
        CHECK_INT(json_try(text, &d, NULL, NULL), MCP_PROTOCOL_ERROR);
    }
}

static uint32_t json_random(uint64_t *seed, uint32_t n) {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    return (uint32_t)(*seed >> 11) % n;
}

// A text of any shape, valid by construction.
static void json_generate(buf *b, uint64_t *seed, int depth) {
    static const char *const scalars[] = {
        "0", "-1.5e3", "true", "false", "null", "12345678901234567890", "1E+2",
        "\"\"", "\"a\\\"b\"", "\"\\ud83d\\ude00\"", "\"\\ud83d\"", "\"\\\\\"",
        "\"\xC3\xA9{[,:]}\"", "\"a longer string of plain bytes\""};
    static const char *const blanks[] = {"", "", "", " ", "\n", "\t \r"};
    uint32_t kind = json_random(seed, depth > 6 ? 6 : 10), n;

    buf_add(b, str_of(blanks[json_random(seed, COUNT(blanks))]));
    if (kind < 6) {
        buf_add(b, str_of(scalars[json_random(seed, COUNT(scalars))]));
    } else {
        buf_byte(b, kind & 1 ? '{' : '[');
        buf_add(b, str_of(blanks[json_random(seed, COUNT(blanks))]));
        n = json_random(seed, 5);
        for (uint32_t i = 0; i < n; i++) {
            if (i) buf_byte(b, ',');
            buf_add(b, str_of(blanks[json_random(seed, COUNT(blanks))]));
            if (kind & 1) {
                buf_add(b, str_of(scalars[7 + json_random(seed, 7)]));
                buf_add(b, str_of(blanks[json_random(seed, COUNT(blanks))]));
                buf_byte(b, ':');
            }
            json_generate(b, seed, depth + 1);
        }
        buf_byte(b, kind & 1 ? '}' : ']');
    }
    buf_add(b, str_of(blanks[json_random(seed, COUNT(blanks))]));
}

// Walk by next links: counts agree, each child lies in its parent, a value's
// raw text is one by itself. Returns how many tokens there were.
static uint32_t json_walk(mcp_json v, bool member) {
    uint32_t n = 1 + member;
    size_t kids = 0;
    str raw = mcp_raw(v);
    bool object = mcp_typeof(v) == MCP_OBJECT;

    for (mcp_json k = mcp_first(v); k.doc; k = mcp_next(k), kids++) {
        str inner = mcp_raw(k);
        CHECK(inner.ptr > raw.ptr);
        CHECK(inner.ptr + inner.len < raw.ptr + raw.len);
        CHECK(k.node == v.node + n - member + object);
        n += json_walk(k, object);
    }
    if (object || mcp_typeof(v) == MCP_ARRAY) CHECK_INT(kids, mcp_length(v));
    return n;
}

// Where jsmn is right it must agree: the same tokens at the same places.
static void test_json_jsmn(void) {
    uint64_t seed = 20260101;
    static jsmntok_t tokens[20000];
    mem m;
    buf b;
    size_t jsmn_wrong = 0;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    for (int i = 0; i < 3000; i++) {
        jsmn_parser p;
        mcp_doc *d;
        int n;
        buf_clear(&b);
        json_generate(&b, &seed, 0);
        buf_byte(&b, '\n');
        jsmn_init(&p);
        n = jsmn_parse(&p, b.ptr, b.len, tokens, COUNT(tokens));
        d = json_make(buf_str(&b));
        if (!d) continue;
        CHECK_INT(d->n, n);
        for (int k = 0; k < n; k++)
            if (d->tok[k].start != tokens[k].start ||
                d->tok[k].end != tokens[k].end)
                CHECK(false);
        CHECK_INT(json_walk(json_root(d), false), n);
        json_free(d);
        // One byte changed: if we still take it, jsmn must as well.
        b.ptr[json_random(&seed, (uint32_t)b.len - 1)] =
            "{}[],:\"0a\\ \x80"[json_random(&seed, 12)];
        jsmn_init(&p);
        n = jsmn_parse(&p, b.ptr, b.len, tokens, COUNT(tokens));
        if (json_try(buf_str(&b), &d, NULL, NULL) == MCP_OK)
            CHECK_INT(d->n, n);
        else
            jsmn_wrong += n > 0;
        json_free(d);
    }
    CHECK(jsmn_wrong > 100);
    buf_free(&b);
}

// Every reader on a value of every type, and on what is missing.
static void test_json_readers(void) {
    mcp_doc *d = json_make(S("[null,true,7,\"x\",[1,2],{\"k\":1,\"l\":2}]"));
    static const mcp_type types[] = {MCP_MISSING, MCP_NULL,   MCP_BOOL,
                                     MCP_NUMBER,  MCP_STRING, MCP_ARRAY,
                                     MCP_OBJECT};
    static const char *const raws[] = {"",    "null",  "true",
                                       "7",   "\"x\"", "[1,2]",
                                       "{\"k\":1,\"l\":2}"};
    static const size_t lengths[] = {0, 0, 0, 0, 1, 2, 2};

    for (size_t i = 0; i < COUNT(types); i++) {
        mcp_json v = {NULL, 0};
        mcp_type t = types[i];
        uint64_t u = 55;
        if (i) v = mcp_at(json_root(d), i - 1);
        CHECK_INT(mcp_typeof(v), t);
        CHECK_INT(mcp_exists(v), t != MCP_MISSING);
        CHECK_STR(mcp_raw(v), str_of(raws[i]));
        CHECK_INT(mcp_length(v), lengths[i]);
        CHECK_STR(str_of(mcp_string(v, "other")),
                  t == MCP_STRING ? S("x") : S("other"));
        CHECK(mcp_string(v, NULL) != NULL || t != MCP_STRING);
        CHECK_INT(mcp_view(v).len, t == MCP_STRING);
        CHECK_INT(mcp_integer(v, -5), t == MCP_NUMBER ? 7 : -5);
        CHECK(mcp_number(v, -5) == (t == MCP_NUMBER ? 7 : -5));
        CHECK_INT(mcp_boolean(v, false), t == MCP_BOOL);
        CHECK(mcp_boolean(v, true));
        CHECK_INT(json_to_u64(v, 9, &u), t == MCP_NUMBER);
        CHECK_INT(u, t == MCP_NUMBER ? 7 : 55);
        CHECK_INT(json_same_id(v, 7), t == MCP_NUMBER);
        CHECK_INT(json_is_null(v), t == MCP_NULL);
        CHECK_INT(mcp_exists(mcp_get(v, "l")), t == MCP_OBJECT);
        CHECK(!mcp_exists(mcp_get(v, "m")) && !mcp_exists(mcp_get(v, NULL)));
        CHECK_INT(mcp_exists(mcp_at(v, 1)), t == MCP_ARRAY);
        CHECK(!mcp_exists(mcp_at(v, 2)) && !mcp_exists(mcp_at(v, SIZE_MAX)));
        CHECK_INT(mcp_exists(mcp_first(v)),
                  t == MCP_ARRAY || t == MCP_OBJECT);
        CHECK_STR(str_of(mcp_key(mcp_first(v))),
                  t == MCP_OBJECT ? S("k") : S(""));
        CHECK_STR(str_of(mcp_key(v)), S(""));
        CHECK_INT(mcp_exists(mcp_next(v)), i && t != MCP_OBJECT);
        CHECK_INT(mcp_exists(mcp_pointer(v, "")), t != MCP_MISSING);
        CHECK(!mcp_exists(mcp_pointer(v, NULL)));
        CHECK_INT(mcp_exists(mcp_pointer(v, "/1")), t == MCP_ARRAY);
    }
    CHECK_INT(mcp_length(json_root(d)), 6);
    CHECK(json_size(d) > sizeof *d);
    json_free(d);
    json_free(NULL);
}

static void test_json_strings(void) {
    static const struct {
        const char *raw, *want;
        size_t n;
    } rows[] = {
        {"\"\"", T("")},
        {"\"abc\"", T("abc")},
        {"\"\\\"\\\\\\/\\b\\f\\n\\r\\t\"", T("\"\\/\b\f\n\r\t")},
        {"\"a\\u0000b\"", T("a\0b")},
        {"\"\\u0041\\u00e9\\u20AC\"", T("A\xC3\xA9\xE2\x82\xAC")},
        {"\"\\uD83D\\uDE00\"", T("\xF0\x9F\x98\x80")},
        {"\"\\uD800\"", T("\xEF\xBF\xBD")},
        {"\"\\uDC00x\"", T("\xEF\xBF\xBDx")},
        {"\"\\uD800\\uD83D\\uDE00\"", T("\xEF\xBF\xBD\xF0\x9F\x98\x80")},
        {"\"\\uD800\\u0041\"", T("\xEF\xBF\xBD" "A")},
        {"\"\\uD800\\\\u0041\"", T("\xEF\xBF\xBD\\u0041")},
        {"\"\\uD800\\n\"", T("\xEF\xBF\xBD\n")},
        {"\"\\uDBFF\\uDFFF\"", T("\xF4\x8F\xBF\xBF")},
        {"\"\\\\n\"", T("\\n")},
        {"\"\xE5\xB7\xA5\\u5177\"", T("\xE5\xB7\xA5\xE5\x85\xB7")},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        str want = str_make(rows[i].want, rows[i].n);
        for (int order = 0; order < 3; order++) {
            mcp_doc *d = json_make(str_of(rows[i].raw));
            mcp_json v = json_root(d);
            if (order == 0) CHECK_INT(mcp_length(v), want.len);
            if (order == 1) CHECK_STR(mcp_view(v), want);
            CHECK(memcmp(mcp_string(v, "?"), want.ptr, want.len + 1) == 0);
            CHECK_STR(mcp_view(v), want);
            CHECK_INT(mcp_length(v), want.len);
            CHECK(mcp_string(v, "?") == mcp_view(v).ptr);
            // Reading changed nothing of what was received.
            CHECK_STR(mcp_raw(v), str_of(rows[i].raw));
            json_free(d);
        }
    }
}

static void test_json_keys(void) {
    mcp_doc *d = json_make(
        S("{\"a\":1,\"b\\u0063\":2,\"a\":3,\"\":4,\"x\\u0000y\":5,\"ab\":6,"
          "\"\\uD800\":7,\"a\\nb\":{\"a\":8},\"\\u0061\":9,\"null\":null}"));
    mcp_json o = json_root(d);

    CHECK_INT(mcp_integer(mcp_get(o, "a"), 0), 9);  // the last, however written
    CHECK_INT(mcp_integer(mcp_get(o, "bc"), 0), 2);
    CHECK_INT(mcp_integer(mcp_get(o, ""), 0), 4);
    CHECK_INT(mcp_integer(mcp_get(o, "ab"), 0), 6);
    CHECK_INT(mcp_integer(json_get(o, S("x\0y")), 0), 5);
    CHECK(!mcp_exists(mcp_get(o, "x")));
    CHECK(!mcp_exists(mcp_get(o, "b\\u0063")));
    CHECK_INT(mcp_integer(mcp_get(o, "\xEF\xBF\xBD"), 0), 7);
    CHECK_INT(mcp_integer(mcp_get(mcp_get(o, "a\nb"), "a"), 0), 8);
    CHECK(mcp_exists(json_get(o, S("null"))));
    CHECK(!mcp_exists(json_opt(o, S("null"))));
    CHECK(!mcp_exists(json_opt(o, S("none"))));
    CHECK_INT(mcp_integer(json_opt(o, S("ab")), 0), 6);
    CHECK_STR(json_key(mcp_at(o, 0)), S(""));
    CHECK_STR(json_key(mcp_next(mcp_first(o))), S("bc"));
    CHECK_STR(str_of(mcp_key(mcp_next(mcp_first(o)))), S("bc"));
    CHECK_STR(json_key(mcp_get(o, "")), S(""));
    CHECK_STR(json_key(json_get(o, S("x\0y"))), S("x\0y"));
    CHECK_INT(mcp_length(o), 10);
    json_free(d);
}

static void test_json_numbers(void) {
    static const struct {
        const char *raw;
        int64_t want;  // -99: not an integer, or out of range
    } rows[] = {
        {"0", 0},
        {"-0", 0},
        {"-0.0", 0},
        {"0e99999999999999999999", 0},
        {"1.0", 1},
        {"-1.0", -1},
        {"1e3", 1000},
        {"10e-1", 1},
        {"1230e-1", 123},
        {"1.5", -99},
        {"1.5e1", 15},
        {"0.1e1", 1},
        {"0.001e3", 1},
        {"100e-3", -99},
        {"9223372036854775807", INT64_MAX},
        {"9223372036854775808", -99},
        {"-9223372036854775808", INT64_MIN},
        {"-9223372036854775809", -99},
        {"-18446744073709551616", -99},
        {"9223372036854775807.0", INT64_MAX},
        {"9007199254740993", 9007199254740993},
        {"1e18", 1000000000000000000},
        {"1e19", -99},
        {"1e20", -99},
        {"1e400", -99},
        {"1e-400", -99},
        {"1e99999999999999999999", -99},
        {"1e-99999999999999999999", -99},
        {"123456789012345678901234567890e-20", -99},
        {"120000000000000000000000e-20", 1200},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d = json_make(str_of(rows[i].raw));
        mcp_json v = json_root(d);
        if (!CHECK_INT(mcp_integer(v, -99), rows[i].want)) puts(rows[i].raw);
        CHECK_STR(mcp_raw(v), str_of(rows[i].raw));
        json_free(d);
    }
}

static void test_json_u64(void) {
    static const struct {
        const char *raw;
        uint64_t max, want;
        bool ok;
    } rows[] = {
        {"0", 0, 0, true},
        {"-0", 0, 0, true},
        {"1", 0, 0, false},
        {"-1", 9, 0, false},
        {"1.0", 1, 1, true},
        {"18446744073709551615", UINT64_MAX, UINT64_MAX, true},
        {"18446744073709551615", UINT64_MAX - 1, 0, false},
        {"18446744073709551616", UINT64_MAX, 0, false},
        {"1.8446744073709551615e19", UINT64_MAX, UINT64_MAX, true},
        {"99999999999999999999", UINT64_MAX, 0, false},
        {"0.5", 9, 0, false},
        {"\"1\"", 9, 0, false},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d = json_make(str_of(rows[i].raw));
        uint64_t n = 0;
        CHECK_INT(json_to_u64(json_root(d), rows[i].max, &n), rows[i].ok);
        CHECK(n == rows[i].want);
        json_free(d);
    }
}

static void test_json_doubles(void) {
    static const struct {
        const char *raw;
        double want;
    } rows[] = {
        {"0", 0},         {"0.1", 0.1},     {"-2.5e-3", -0.0025},
        {"1e22", 1e22},   {"1e23", 1e23},   {"1e400", -7},
        {"-1e400", -7},   {"1e-400", 0},    {"0e400", 0},
        {"123456789012345678", 123456789012345678.0},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d = json_make(str_of(rows[i].raw));
        CHECK(mcp_number(json_root(d), -7) == rows[i].want);
        json_free(d);
    }
}

// RFC 6901 section 5's document, and what is no reference.
static void test_json_pointer(void) {
    static const struct {
        const char *path, *want;  // NULL: missing
    } rows[] = {
        {"/foo", "[\"bar\",\"baz\"]"},
        {"/foo/0", "\"bar\""},
        {"/foo/1", "\"baz\""},
        {"/", "0"},
        {"/a~1b", "1"},
        {"/c%d", "2"},
        {"/e^f", "3"},
        {"/g|h", "4"},
        {"/i\\j", "5"},
        {"/k\"l", "6"},
        {"/ ", "7"},
        {"/m~0n", "8"},
        {"/m~n", NULL},
        {"/m~", NULL},
        {"/m~2n", NULL},
        {"/dup", "[2]"},
        {"/dup/0", "2"},
        {"/foo/2", NULL},
        {"/foo/-", NULL},
        {"/foo/01", NULL},
        {"/foo/00", NULL},
        {"/foo/+1", NULL},
        {"/foo/1e0", NULL},
        {"/foo/", NULL},
        {"/foo/0/0", NULL},
        {"/foo/99999999999999999999", NULL},
        {"/foo/4294967296", NULL},
        {"foo", NULL},
        {"#/foo", NULL},
        {"/fo", NULL},
        {"/fooo", NULL},
        {"/~01", "\"tilde one\""},
        {"/deep/a//b", "9"},
    };
    mcp_doc *d = json_make(
        S("{\"foo\":[\"bar\",\"baz\"],\"\":0,\"a/b\":1,\"c%d\":2,\"e^f\":3,"
          "\"g|h\":4,\"i\\\\j\":5,\"k\\\"l\":6,\" \":7,\"m~n\":8,\"dup\":1,"
          "\"dup\":[2],\"~1\":\"tilde one\",\"deep\":{\"a\":{\"\":{\"b\":9}}}"
          "}"));
    mcp_json o = json_root(d);

    CHECK(mcp_pointer(o, "").node == 0 && mcp_pointer(o, "").doc == d);
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_json v = mcp_pointer(o, rows[i].path);
        CHECK_INT(mcp_exists(v), rows[i].want != NULL);
        CHECK_STR(mcp_raw(v), str_of(rows[i].want));
    }
    json_free(d);
}

static void test_json_ids(void) {
    static const struct {
        const char *raw;
        uint64_t id;
        bool want;
    } rows[] = {
        {"1", 1, true},        {"\"1\"", 1, true},   {"1.0", 1, true},
        {"\"1.0\"", 1, true},  {"1e0", 1, true},     {"2", 1, false},
        {"\"0\"", 1, false},   {"0", 1, false},      {"0", 0, true},
        {"-0.0", 0, true},     {"\"\"", 0, false},   {"\"\"", 1, false},
        {"\"01\"", 1, false},  {"\" 1\"", 1, false}, {"\"1 \"", 1, false},
        {"\"1x\"", 1, false},  {"null", 0, false},   {"true", 1, false},
        {"[1]", 1, false},     {"-1", 1, false},     {"\"-1\"", 1, false},
        {"1.5", 1, false},     {"\"\\u0031\"", 1, true},
        {"\"a\"", 1, false},   {"\"-\"", 0, false},  {"\"1.\"", 1, false},
        {"9007199254740993", 9007199254740993, true},
        {"9007199254740993", 9007199254740992, false},
        {"18446744073709551615", UINT64_MAX, true},
        {"\"18446744073709551616\"", 0, false},
    };
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d = json_make(str_of(rows[i].raw));
        if (!CHECK_INT(json_same_id(json_root(d), rows[i].id), rows[i].want))
            puts(rows[i].raw);
        json_free(d);
    }
}

// fr.26: a number that no double holds goes through whole.
static void test_json_big_integers(void) {
    mcp_doc *d = json_make(S("{\"Id\":1234567890123456789,\"n\":1e2}"));
    mcp_writer w;
    mem m;

    mem_init(&m, NULL, NULL);
    w_init(&w, &m, 1000);
    mcp_w_object(&w);
    w_key(&w, S("Id"));
    w_value(&w, mcp_get(json_root(d), "Id"));
    w_pair_int(&w, "next", 9007199254740993);
    w_key(&w, S("n"));
    w_value(&w, mcp_get(json_root(d), "n"));
    w_key(&w, S("none"));
    w_value(&w, mcp_get(json_root(d), "none"));
    mcp_w_end(&w);
    CHECK_STR(w_str(&w), S("{\"Id\":1234567890123456789,"
                           "\"next\":9007199254740993,\"n\":1e2,"
                           "\"none\":null}"));
    CHECK(mcp_integer(mcp_get(json_root(d), "Id"), 0) == 1234567890123456789);
    w_free(&w);
    json_free(d);
}

// fr.27: null stands for "not there" wherever a member is optional.
static void test_json_null_members(void) {
    mcp_doc *d = json_make(S("{\"nextCursor\":null,\"description\":null,"
                             "\"content\":null,\"a\":false,\"b\":\"\"}"));
    mcp_json o = json_root(d);

    CHECK(!mcp_exists(json_opt(o, S("nextCursor"))));
    CHECK(!mcp_exists(json_opt(o, S("description"))));
    CHECK(!mcp_exists(mcp_first(json_opt(o, S("content")))));
    CHECK(mcp_exists(json_opt(o, S("a"))) && mcp_exists(json_opt(o, S("b"))));
    json_free(d);
}

// fr.29: a schema comes out byte for byte, odd blanks and references too, also
// after its strings were read.
static void test_json_verbatim(void) {
    str schema = S("{ \"$ref\":\"#\\/$defs\\/N\",\n\t\"$defs\": {\"N\" : "
                   "{\"n\":{\"$ref\":\"#/$defs/N\"}}}, \"x\": 1.10 }");
    mem m;
    buf b;
    mcp_doc *d;
    mcp_json v;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, 1000);
    buf_add(&b, S("{\"inputSchema\":"));
    buf_add(&b, schema);
    buf_add(&b, S("}"));
    d = json_make(buf_str(&b));
    v = mcp_get(json_root(d), "inputSchema");
    CHECK_STR(str_of(mcp_string(mcp_get(v, "$ref"), "")), S("#/$defs/N"));
    CHECK_STR(mcp_raw(v), schema);
    json_free(d);
    buf_free(&b);
}

// `n` elements after each other, with commas.
static str json_many(buf *b, size_t n, str element) {
    buf_clear(b);
    buf_byte(b, '[');
    for (size_t i = 0; i < n; i++) {
        if (i) buf_byte(b, ',');
        buf_add(b, element);
    }
    buf_byte(b, ']');
    return buf_str(b);
}

static void test_json_token_limit(void) {
    mem m;
    buf b;
    mcp_doc *d;
    size_t at = 0;
    const char *why = "";

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    json_many(&b, LIMIT_JSON_TOKENS - 1, S("0"));  // and the array itself
    CHECK_INT(json_parse(&m, buf_str(&b), &d, NULL, NULL), MCP_OK);
    CHECK_INT(d->n, LIMIT_JSON_TOKENS);
    json_free(d);
    json_many(&b, LIMIT_JSON_TOKENS, S("0"));
    CHECK_INT(json_parse(&m, buf_str(&b), &d, &at, &why), MCP_LIMIT_EXCEEDED);
    CHECK(d == NULL && at == b.len - 2 && strstr(why, "4 Mi"));
    buf_free(&b);
}

// jsmn counts in int, so does nothing here get past that.
static void test_json_huge(void) {
    mem m;
    mcp_doc *d;
    size_t at = 5;
    const char *why = "";

    mem_init(&m, NULL, NULL);
    CHECK_INT(json_parse(&m, str_make("1", INT_MAX), &d, &at, &why),
              MCP_LIMIT_EXCEEDED);
    CHECK(d == NULL && at == 0 && strstr(why, "2 GiB"));
    CHECK_INT(json_parse(&m, str_make(NULL, 0), &d, &at, &why),
              MCP_PROTOCOL_ERROR);
    CHECK(d == NULL && at == 0);
}

static void test_json_linear(void) {
    static const char *const elements[] = {
        "[]", "{}", "{\"a\":[{\"b\":[[]]}]}", "\"a\\\\b\"",
        "[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]]"};
    mem m;
    buf b;
    mcp_doc *d;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    for (size_t i = 0; i < COUNT(elements); i++) {
        json_many(&b, (1 << 21) / strlen(elements[i]), str_of(elements[i]));
        CHECK_INT(json_parse(&m, buf_str(&b), &d, NULL, NULL), MCP_OK);
        json_free(d);
    }
    // One object with many members, each looked at.
    buf_clear(&b);
    for (int i = 0; i < 20000; i++)
        buf_fmt(&b, "%c\"k%d\":%d", i ? ',' : '{', i, i);
    buf_byte(&b, '}');
    CHECK_INT(json_parse(&m, buf_str(&b), &d, NULL, NULL), MCP_OK);
    CHECK_INT(mcp_integer(mcp_get(json_root(d), "k19999"), 0), 19999);
    json_free(d);
    buf_free(&b);
}

// fr.31: 160 KB of '[' and a million tokens, in no time.
static void test_json_hostile(void) {
    mem m;
    buf b;
    mcp_doc *d;
    mcp_json v;
    size_t n = 0;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    for (int i = 0; i < 160000; i++) buf_byte(&b, '[');
    CHECK_INT(json_parse(&m, buf_str(&b), &d, NULL, NULL),
              MCP_LIMIT_EXCEEDED);
    json_many(&b, 1000000, S("{}"));
    CHECK_INT(json_parse(&m, buf_str(&b), &d, NULL, NULL), MCP_OK);
    for (v = mcp_first(json_root(d)); v.doc; v = mcp_next(v)) n++;
    CHECK_INT(n, 1000000);
    json_free(d);
    buf_free(&b);
}

static mcp_code json_body(mem *m) {
    str text = S("{\"b\":[1,2,{\"c\":\"\\n\"}],\"a\":{\"y\":1,\"x\":2}}");
    mcp_doc *d;
    buf b;
    hex64 h;
    mcp_writer w;
    mcp_code rc = json_parse(m, text, &d, NULL, NULL);

    if (rc) return rc;
    buf_init(&b, m, 1000);
    w_init(&w, m, 1000);
    json_canonical(&b, json_root(d));
    json_pretty(&b, json_root(d));
    mcp_w_array(&w);
    for (int i = 0; i < 100; i++) mcp_w_integer(&w, i);
    mcp_w_end(&w);
    rc = b.err ? b.err : w_err(&w);
    if (!fingerprint(m, h, json_root(d))) rc = MCP_OUT_OF_MEMORY;
    CHECK(mcp_string(mcp_pointer(json_root(d), "/b/2/c"), NULL) != NULL);
    CHECK(rc || mcp_w_text(&w));
    buf_free(&b);
    w_free(&w);
    json_free(d);
    return rc;
}

// A document is one allocation, whatever is read of it.
static void test_json_memory(void) {
    heap h = {0, 0, 0, false};
    mem m = {heap_fn, &h};
    mcp_doc *d;

    torture(json_body);
    CHECK_INT(json_parse(&m, S("{\"a\\n\":[\"\\u0041\",\"b\"]}"), &d, NULL,
                         NULL),
              MCP_OK);
    CHECK_INT(mcp_length(mcp_get(json_root(d), "a\n")), 2);
    CHECK_STR(str_of(mcp_string(mcp_pointer(json_root(d), "/a\n/0"), "")),
              S("A"));
    CHECK_STR(str_of(mcp_key(mcp_first(json_root(d)))), S("a\n"));
    CHECK(h.calls == 1 && h.live == json_size(d));
    json_free(d);
    CHECK_INT(h.live, 0);
}

static void test_json_canonical(void) {
    static const char *const rows[][2] = {
        {"null", "null"},
        {" [ 1 , 2 ] ", "[1,2]"},
        {"{\"b\":1,\"a\":2}", "{\"a\":2,\"b\":1}"},
        {"{\"a\":1,\"a\":2}", "{\"a\":2}"},
        {"{\"a\":1,\"\\u0061\":2,\"A\":3}", "{\"A\":3,\"a\":2}"},
        {"{\"ab\":1,\"a\":2,\"\":3}", "{\"\":3,\"a\":2,\"ab\":1}"},
        {"[{\"z\":{\"y\":[],\"x\":{}}}]", "[{\"z\":{\"x\":{},\"y\":[]}}]"},
        {"[1.0,1,1e0,-0]", "[1.0,1,1e0,-0]"},
        {"\"\\u0041\\/\\u00e9\\n\\u0001\"", "\"A/\xC3\xA9\\n\\u0001\""},
        {"\"\\u007f\\u2028\"", "\"\x7F\xE2\x80\xA8\""},
        {"\"\\ud800\"", "\"\xEF\xBF\xBD\""},
        {"{\"\xC3\xA9\":1,\"z\":2,\"\\ud83d\\ude00\":3}",
         "{\"z\":2,\"\xC3\xA9\":1,\"\xF0\x9F\x98\x80\":3}"},
        {"{\"e\":5,\"d\":4,\"c\":3,\"b\":2,\"a\":1,\"e\":6,\"c\":7}",
         "{\"a\":1,\"b\":2,\"c\":7,\"d\":4,\"e\":6}"},
    };
    mem m;
    buf b;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d = json_make(str_of(rows[i][0])), *again;
        buf_clear(&b);
        json_canonical(&b, json_root(d));
        CHECK_STR(buf_str(&b), str_of(rows[i][1]));
        again = json_make(buf_str(&b));
        buf_clear(&b);
        json_canonical(&b, json_root(again));
        CHECK_STR(buf_str(&b), str_of(rows[i][1]));
        json_free(d);
        json_free(again);
    }
    buf_clear(&b);
    json_canonical(&b, json_at(NULL, 0));
    CHECK_STR(buf_str(&b), S("null"));
    buf_free(&b);
}

// A shuffled object of many members comes out in order.
static void test_json_canonical_many(void) {
    mem m;
    buf b, out;
    mcp_doc *d;
    mcp_json v;
    int n = 0;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    buf_init(&out, &m, SIZE_MAX);
    for (int i = 0; i < 1000; i++)
        buf_fmt(&b, "%c\"%04d\":%d", i ? ',' : '{', i * 387 % 1000, i);
    buf_byte(&b, '}');
    d = json_make(buf_str(&b));
    json_canonical(&out, json_root(d));
    json_free(d);
    d = json_make(buf_str(&out));
    for (v = mcp_first(json_root(d)); v.doc; v = mcp_next(v), n++) {
        uint64_t key = 0;
        CHECK(str_to_u64(json_key(v), 9999, &key) && key == (uint64_t)n);
        CHECK_INT(mcp_integer(v, 0) * 387 % 1000, n);
    }
    CHECK_INT(n, 1000);
    json_free(d);
    buf_free(&b);
    buf_free(&out);
}

static void test_json_fingerprint(void) {
    // SHA-256 of the canonical text, from sha256sum.
    static const char *const rows[][2] = {
        {"{}",
         "44136fa355b3678a1146ad16f7e8649e"
         "94fb4fc21fe77e8310c060f61caaff8a"},
        {"[]",
         "4f53cda18c2baa0c0354bb5f9a3ecbe5"
         "ed12ab4d8e11ba873c2f11161202b945"},
        {"{\"b\":1,\"a\":2}",
         "d3626ac30a87e6f7a6428233b3c68299"
         "976865fa5508e4267c5415c76af7a772"},
        {"{ \"a\" : 2 , \"b\" : 1 }",
         "d3626ac30a87e6f7a6428233b3c68299"
         "976865fa5508e4267c5415c76af7a772"},
        {"[\"docs\",\"read_file\"]",
         "609e7a6556aa3b7fb7b5c9574ae64253"
         "708557008ff08a3d7a91994bd0c28238"},
        {"{\"url\":\"https://a/mcp\",\"x\":{\"z\":null,\"y\":\"\\u00e9\"}}",
         "20372c3b0b3cbf8cc17f57e71133854a"
         "871185c1f73457a8bd98884c5246ab91"},
    };
    mem m;
    hex64 h;

    mem_init(&m, NULL, NULL);
    fingerprint_text(h, S(""));
    CHECK_STR(str_of(h), S("e3b0c44298fc1c149afbf4c8996fb924"
                           "27ae41e4649b934ca495991b7852b855"));
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d = json_make(str_of(rows[i][0]));
        CHECK(fingerprint(&m, h, json_root(d)));
        CHECK_STR(str_of(h), str_of(rows[i][1]));
        json_free(d);
    }
}

static void test_json_pretty(void) {
    static const char *const rows[][2] = {
        {"1.50", "1.50"},
        {"[]", "[]"},
        {" { } ", "{}"},
        {"[[],{}]", "[\n  [],\n  {}\n]"},
        {"{\"b\":1,\"a\\n\":[1,\"\\u0041\"],\"b\":null}",
         "{\n  \"b\": 1,\n  \"a\\n\": [\n    1,\n    \"\\u0041\"\n  ],\n"
         "  \"b\": null\n}"},
    };
    mem m;
    buf b;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    for (size_t i = 0; i < COUNT(rows); i++) {
        mcp_doc *d = json_make(str_of(rows[i][0]));
        buf_clear(&b);
        json_pretty(&b, json_root(d));
        CHECK_STR(buf_str(&b), str_of(rows[i][1]));
        json_free(d);
    }
    buf_clear(&b);
    json_pretty(&b, json_at(NULL, 0));
    CHECK_STR(buf_str(&b), S("null"));
    buf_free(&b);
}

typedef struct relax_row {
    const char *in;
    const char *out;  // NULL: the same
    bool comments;
} relax_row;

static const relax_row relax_rows[] = {
    {"", NULL, false},
    {"{\"a\":1}", NULL, false},
    {"\xEF\xBB\xBF{}", "   {}", false},
    {"\xEF\xBB", NULL, false},
    {"{}\xEF\xBB\xBF", NULL, false},
    {"// c\n1", "    \n1", true},
    {"1 // c", "1     ", true},
    {"1 //", "1   ", true},
    {"//\r\n1", "  \r\n1", true},
    {"/**/1", "    1", true},
    {"/***/1", "     1", true},
    {"/* a\n * b */1", "    \n       1", true},
    {"/* // */1", "        1", true},
    {"// /* \n1 // */", "      \n1      ", true},
    {"/*/1", NULL, false},
    {"/* open", NULL, false},
    {"/ 1", NULL, false},
    {"/", NULL, false},
    {"\"// /* */ ,]\"", NULL, false},
    {"\"\\\"// x\"", NULL, false},
    {"\"\\\\\"// x", "\"\\\\\"    ", true},
    {"\"open // x", NULL, false},
    {"\"open \\", NULL, false},
    {"[1,]", "[1 ]", false},
    {"{\"a\":1,}", "{\"a\":1 }", false},
    {"[1 , ]", "[1   ]", false},
    {"[1,\n]", "[1 \n]", false},
    {"[1,/* c */]", "[1        ]", true},
    {"[1,// c\n]", "[1     \n]", true},
    {"[1/**/,]", "[1     ]", true},
    {"[[1,],]", "[[1 ] ]", false},
    {"[{\"a\":[],},]", "[{\"a\":[] } ]", false},
    {"[\"a\",]", "[\"a\" ]", false},
    {"[,]", NULL, false},
    {"{,}", NULL, false},
    {"[1,,]", NULL, false},
    {"{\"a\":,}", NULL, false},
    {",]", NULL, false},
    {"[1,2]", NULL, false},
    {"[1,\"]\"]", NULL, false},
};

static void test_json_relax(void) {
    for (size_t i = 0; i < COUNT(relax_rows); i++) {
        const relax_row *r = &relax_rows[i];
        str in = str_of(r->in);
        char *p = exact(in);
        bool comments = !r->comments;
        json_relax(p, in.len, &comments);
        CHECK_STR(str_make(p, in.len), r->out ? str_of(r->out) : in);
        CHECK_INT(comments, r->comments);
        json_relax(p, in.len, NULL);  // and nothing is left to do
        CHECK_STR(str_make(p, in.len), r->out ? str_of(r->out) : in);
        free(p);
    }
}

// Wherever a text ends, nothing is read beyond it; and a comment may stand at
// every place between two tokens.
static void test_json_relax_everywhere(void) {
    static const char *const tokens[] = {"{", "\"a/*\"", ":", "[", "1", ",",
                                         "\"//\"", ",", "]", ",", "}"};
    static const char *const fills[] = {"/* , ] */", "// }\n", " ", "\n/**/"};
    mem m;
    buf b;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX);
    for (size_t place = 0; place <= COUNT(tokens); place++) {
        for (size_t f = 0; f < COUNT(fills); f++) {
            mcp_doc *d;
            buf_clear(&b);
            for (size_t i = 0; i <= COUNT(tokens); i++) {
                if (i == place) buf_add(&b, str_of(fills[f]));
                if (i < COUNT(tokens)) buf_add(&b, str_of(tokens[i]));
            }
            for (size_t cut = 0; cut < b.len; cut++) {
                char *p = exact(str_head(buf_str(&b), cut));
                json_relax(p, cut, NULL);
                free(p);
            }
            json_relax(b.ptr, b.len, NULL);
            d = json_make(buf_str(&b));
            CHECK(d && mcp_length(mcp_get(json_root(d), "a/*")) == 2);
            json_free(d);
        }
    }
    buf_free(&b);
}

static void test_json_writer(void) {
    mcp_writer *w = mcp_w_new(NULL);

    mcp_w_object(w);
    mcp_w_key(w, "a");
    mcp_w_array(w);
    mcp_w_integer(w, INT64_MIN);
    mcp_w_number(w, 0.5);
    mcp_w_number(w, 3);
    mcp_w_number(w, -0.0);
    mcp_w_number(w, 1e300);
    mcp_w_boolean(w, true);
    mcp_w_boolean(w, false);
    mcp_w_null(w);
    mcp_w_raw(w, " [1, {\"x\" : 2}]\n");
    mcp_w_array(w);
    mcp_w_end(w);
    mcp_w_end(w);
    mcp_w_key(w, "q\"\n");
    mcp_w_string(w, "\"\\/\b\f\n\r\t\x01\x1F\x7F\xC3\xA9\xFF\xED\xA0\x80");
    CHECK(mcp_w_text(w) == NULL);  // still open
    mcp_w_end(w);
    CHECK_STR(str_of(mcp_w_text(w)),
              S("{\"a\":[-9223372036854775808,0.5,3,0,1e+300,true,false,null,"
                "[1, {\"x\" : 2}],[]],\"q\\\"\\n\":\"\\\"\\\\/\\b\\f\\n\\r\\t"
                "\\u0001\\u001f\x7F\xC3\xA9\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF"
                "\xBD\xEF\xBF\xBD\"}"));
    mcp_w_null(w);  // a second value
    CHECK(mcp_w_text(w) == NULL);
    mcp_w_free(w);
    mcp_w_free(NULL);
}

// Each misplaced call sticks: o [ e ] k " are the calls, in that order.
static void test_json_writer_misuse(void) {
    static const char *const rows[] = {
        "",   "e",    "k",    "o",    "[",    "oe]", "ok",   "oke",  "okk",
        "o\"", "o[",  "[k",   "[e]e", "\"\"", "oee", "ok\"\"", "\"e", "okoe",
        "[]]", "n",   "[n]e", "#",    "[#e",  "!",   "[!e",  "okee", "x"};
    static const char *const fine[] = {"oe", "[e", "\"", "ok\"e", "[\"\"e",
                                       "okoee", "[[e[ee", "ok[ek\"e", "r"};
    double most = DBL_MAX;

    for (size_t i = 0; i < COUNT(rows) + COUNT(fine); i++) {
        bool bad = i < COUNT(rows);
        mcp_writer *w = mcp_w_new(NULL);
        for (const char *p = bad ? rows[i] : fine[i - COUNT(rows)]; *p; p++) {
            if (*p == 'o') mcp_w_object(w);
            if (*p == '[') mcp_w_array(w);
            if (*p == 'e') mcp_w_end(w);
            if (*p == ']') mcp_w_end(w);
            if (*p == 'k') mcp_w_key(w, "k");
            if (*p == '"') mcp_w_string(w, "s");
            if (*p == 'n') mcp_w_string(w, NULL);
            if (*p == '#') mcp_w_number(w, most + most);
            if (*p == '!') mcp_w_raw(w, "{\"a\":1\"b\":2}");
            if (*p == 'x') mcp_w_raw(w, NULL);
            if (*p == 'r') mcp_w_raw(w, "{\"a\":1}");
        }
        if (!CHECK_INT(mcp_w_text(w) == NULL, bad))
            puts(bad ? rows[i] : fine[i - COUNT(rows)]);
        mcp_w_free(w);
    }
    // Without memory mcp_w_new() gives NULL, which every call takes.
    mcp_w_object(NULL), mcp_w_array(NULL), mcp_w_end(NULL);
    mcp_w_key(NULL, "k"), mcp_w_string(NULL, "s"), mcp_w_integer(NULL, 1);
    mcp_w_number(NULL, 0.5), mcp_w_boolean(NULL, true), mcp_w_null(NULL);
    mcp_w_raw(NULL, "1"), mcp_w_key(NULL, NULL), mcp_w_string(NULL, NULL);
    CHECK(mcp_w_text(NULL) == NULL);
}

static void test_json_writer_limits(void) {
    mem m;
    mcp_writer w;
    mcp_doc *d;

    mem_init(&m, NULL, NULL);
    w_init(&w, &m, SIZE_MAX);
    for (int i = 0; i < LIMIT_JSON_DEPTH; i++) mcp_w_array(&w);
    CHECK_INT(w_err(&w), MCP_OK);
    for (int i = 0; i < LIMIT_JSON_DEPTH; i++) mcp_w_end(&w);
    d = json_make(str_of(mcp_w_text(&w)));
    json_free(d);
    w_free(&w);
    w_init(&w, &m, SIZE_MAX);
    for (int i = 0; i <= LIMIT_JSON_DEPTH; i++) mcp_w_array(&w);
    CHECK_INT(w_err(&w), MCP_LIMIT_EXCEEDED);
    w_free(&w);
    // Raw text counts with the depth it is put at.
    w_init(&w, &m, SIZE_MAX);
    for (int i = 0; i < LIMIT_JSON_DEPTH - 2; i++) mcp_w_array(&w);
    mcp_w_raw(&w, "[[]]");
    CHECK_INT(w_err(&w), MCP_OK);
    mcp_w_raw(&w, "[[[]]]");
    CHECK_INT(w_err(&w), MCP_LIMIT_EXCEEDED);
    w_free(&w);
    w_init(&w, &m, 10);
    w_string(&w, S("12345678"));
    CHECK(w_err(&w) == MCP_OK && mcp_w_text(&w));
    w_free(&w);
    w_init(&w, &m, 10);
    w_string(&w, S("123456789"));
    CHECK(w_err(&w) == MCP_LIMIT_EXCEEDED && !mcp_w_text(&w));
    w_free(&w);
}

static void test_json_writer_indent(void) {
    mem m;
    mcp_writer w;

    mem_init(&m, NULL, NULL);
    w_init(&w, &m, SIZE_MAX);
    w.indent = 2;
    mcp_w_object(&w);
    w_pair(&w, "a", S("x\0y"));
    w_pair_bool(&w, "b", true);
    w_key(&w, S("c"));
    mcp_w_array(&w);
    mcp_w_integer(&w, 1);
    mcp_w_object(&w);
    mcp_w_end(&w);
    mcp_w_end(&w);
    w_pair_raw(&w, "d", S("[ ]"));
    mcp_w_end(&w);
    CHECK_STR(w_str(&w), S("{\n  \"a\": \"x\\u0000y\",\n  \"b\": true,\n  "
                           "\"c\": [\n    1,\n    {}\n  ],\n  \"d\": [ ]\n}"));
    w_free(&w);
}

// What the writer writes the reader reads, for every byte in a string.
static void test_json_writer_round(void) {
    mem m;
    char all[256];

    mem_init(&m, NULL, NULL);
    for (int i = 0; i < 256; i++) all[i] = (char)i;
    for (size_t n = 0; n <= 128; n++) {
        mcp_writer w;
        mcp_doc *d;
        w_init(&w, &m, SIZE_MAX);
        mcp_w_object(&w);
        w_key(&w, str_make(all, n));
        w_string(&w, str_make(all, 128 - n));
        mcp_w_end(&w);
        d = json_make(w_str(&w));
        CHECK_STR(json_key(mcp_first(json_root(d))), str_make(all, n));
        CHECK_STR(mcp_view(mcp_first(json_root(d))), str_make(all, 128 - n));
        json_free(d);
        w_free(&w);
    }
}

static const test tests_json[] = {
    {"json.table", test_json_table},
    {"json.depth", test_json_depth},
    {"json.cut", test_json_cut},
    {"json.faults", test_json_faults},
    {"json.jsmn", test_json_jsmn},
    {"json.readers", test_json_readers},
    {"json.strings", test_json_strings},
    {"json.keys", test_json_keys},
    {"json.numbers", test_json_numbers},
    {"json.u64", test_json_u64},
    {"json.doubles", test_json_doubles},
    {"json.pointer", test_json_pointer},
    {"fr.23", test_json_ids},
    {"fr.26", test_json_big_integers},
    {"fr.27", test_json_null_members},
    {"fr.29", test_json_verbatim},
    {"json.limit.tokens", test_json_token_limit},
    {"json.limit.bytes", test_json_huge},
    {"json.linear", test_json_linear},
    {"fr.31", test_json_hostile},
    {"json.memory", test_json_memory},
    {"json.canonical", test_json_canonical},
    {"json.canonical.many", test_json_canonical_many},
    {"json.fingerprint", test_json_fingerprint},
    {"json.pretty", test_json_pretty},
    {"json.relax", test_json_relax},
    {"json.relax.everywhere", test_json_relax_everywhere},
    {"json.writer", test_json_writer},
    {"json.writer.misuse", test_json_writer_misuse},
    {"json.writer.limits", test_json_writer_limits},
    {"json.writer.indent", test_json_writer_indent},
    {"json.writer.round", test_json_writer_round},
};


//=============================================================================
// MARK: - 8 HTTP messages
//=============================================================================

static mem plain_mem(void) {
    mem m;
    mem_init(&m, NULL, NULL);
    return m;
}

// In, and the normal form; NULL: refused.
static const char *const url_cases[][2] = {
    {"http://a", "http://a/"},
    {"HTTP://EXAMPLE.com", "http://example.com/"},
    {"hTTps://Example.COM:443/Path", "https://example.com/Path"},
    {"http://a:80/", "http://a/"},
    {"http://a:443/", "http://a:443/"},
    {"https://a:80", "https://a:80/"},
    {"http://a:/x", "http://a/x"},
    {"http://a:65535/", "http://a:65535/"},
    {"http://a:0008080/", "http://a:8080/"},
    {"http://a?q", "http://a/?q"},
    {"http://a/?", "http://a/?"},
    {"http://a/b/./c/../d", "http://a/b/d"},
    {"http://a/b/%2e/c/%2E%2e/d/%2E", "http://a/b/d/"},
    {"http://a/..", "http://a/"},
    {"http://a/../../b/..", "http://a/"},
    {"http://a//b///c", "http://a//b///c"},
    {"http://a/b/../..//c", "http://a//c"},
    {"http://a/%7euser/%41%2f%e4", "http://a/~user/A%2F%E4"},
    {"http://a/x?y=%7e&z=%2f../..", "http://a/x?y=%7e&z=%2f../.."},
    {"http://a/\xC3\xA4?\xC3\xA4\"", "http://a/%C3%A4?%C3%A4%22"},
    {"http://a/{x}|`^<>\"[]", "http://a/%7Bx%7D%7C%60%5E%3C%3E%22%5B%5D"},
    {"http://a/!$&'()*+,;=:@", "http://a/!$&'()*+,;=:@"},
    {"http://a./", "http://a./"},
    {"http://a_b-c.x1/", "http://a_b-c.x1/"},
    {"http://xn--bcher-kva.example/", "http://xn--bcher-kva.example/"},
    {"http://127.0.0.1:9/", "http://127.0.0.1:9/"},
    {"http://255.255.255.255/", "http://255.255.255.255/"},
    {"http://[::1]", "http://[::1]/"},
    {"http://[::]:8080/a", "http://[::]:8080/a"},
    {"http://[0:0:0:0:0:0:0:1]:80", "http://[::1]/"},
    {"http://[2001:DB8::A:0:0:1]/", "http://[2001:db8::a:0:0:1]/"},
    {"http://[2001:db8:0:0:1:0:0:0]/", "http://[2001:db8:0:0:1::]/"},
    {"http://[2001:db8:0:0:1:0:0:1]/", "http://[2001:db8::1:0:0:1]/"},
    {"http://[1:2:3:4:5:6:7:8]/", "http://[1:2:3:4:5:6:7:8]/"},
    {"http://[1:0:3:4:5:6:7::]/", "http://[1:0:3:4:5:6:7:0]/"},
    {"http://[::ffff:1.2.3.4]/", "http://[::ffff:102:304]/"},
    {"http://[1:2:3:4:5:6:1.2.3.4]/", "http://[1:2:3:4:5:6:102:304]/"},
    {"http://[00ab::000f]/", "http://[ab::f]/"},
    {"http://4.4.4.a/", "http://4.4.4.a/"},
    {"", NULL},
    {"http:", NULL},
    {"http:/a", NULL},
    {"http://", NULL},
    {"http:///a", NULL},
    {"https://?q", NULL},
    {"ftp://a/", NULL},
    {"file:///etc/passwd", NULL},
    {"//a/", NULL},
    {"a", NULL},
    {" http://a/", NULL},
    {"http://a/ ", NULL},
    {"http://a/b c", NULL},
    {"http://a/\t", NULL},
    {"http://a/\r\nX: y", NULL},
    {"http://a/\x7F", NULL},
    {"http://a\\b/", NULL},
    {"http://a/b\\c", NULL},
    {"http://user@a/", NULL},
    {"http://user:pass@a/", NULL},
    {"http://@a/", NULL},
    {"http://a/#", NULL},
    {"http://a#b", NULL},
    {"http://a/%", NULL},
    {"http://a/%4", NULL},
    {"http://a/%4g", NULL},
    {"http://a/?%zz", NULL},
    {"http://a%41/", NULL},
    {"http://\xC3\xA4/", NULL},
    {"http://a b/", NULL},
    {"http://a..b/", NULL},
    {"http://.a/", NULL},
    {"http://./", NULL},
    {"http://a!/", NULL},
    {"http://a:0/", NULL},
    {"http://a:65536/", NULL},
    {"http://a:-1/", NULL},
    {"http://a:8x/", NULL},
    {"http://a:1:2/", NULL},
    {"http://1.2.3/", NULL},
    {"http://1.2.3.4.5/", NULL},
    {"http://1.2.3.256/", NULL},
    {"http://01.2.3.4/", NULL},
    {"http://127.1/", NULL},
    {"http://2130706433/", NULL},
    {"http://0x7f.0.0.0x1/", NULL},
    {"http://0x7f000001/", NULL},
    {"http://1.2.3.4./", NULL},
    {"http://[::1/", NULL},
    {"http://[]/", NULL},
    {"http://[:]/", NULL},
    {"http://[1]/", NULL},
    {"http://[:::]/", NULL},
    {"http://[1::2::3]/", NULL},
    {"http://[1:2:3:4:5:6:7]/", NULL},
    {"http://[1:2:3:4:5:6:7:8:9]/", NULL},
    {"http://[1:2:3:4::5:6:7:8]/", NULL},
    {"http://[1:2:3:4:5:6:7:1.2.3.4]/", NULL},
    {"http://[1:2:3:4:5:6:7:]/", NULL},
    {"http://[::12345]/", NULL},
    {"http://[::g]/", NULL},
    {"http://[::1.2.3]/", NULL},
    {"http://[fe80::1%25eth0]/", NULL},
    {"http://[::1]x/", NULL},
    {"http://[::1]x:80/", NULL},
    {"http://::1/", NULL}};

static void test_http_url(void) {
    mem m = plain_mem();

    for (size_t i = 0; i < COUNT(url_cases); i++) {
        str in = str_of(url_cases[i][0]);
        const char *want = url_cases[i][1];
        char *copy = exact(in);
        url u, v;
        mcp_code rc = url_parse(&m, str_make(copy, in.len), &u);
        free(copy);
        if (!want) {
            if (!CHECK_INT(rc, MCP_PROTOCOL_ERROR)) printf("%s\n", in.ptr);
            CHECK(u.text == NULL);
            url_free(&m, &u);
            continue;
        }
        CHECK_INT(rc, MCP_OK);
        CHECK_STR(str_of(u.text), str_of(want));
        // The normal form is its own normal form.
        CHECK_INT(url_parse(&m, str_of(u.text), &v), MCP_OK);
        CHECK_STR(str_of(v.text), str_of(want));
        CHECK(url_same_origin(&u, &v));
        url_free(&m, &v);
        url_free(&m, &u);
    }
}

static void test_http_url_parts(void) {
    mem m = plain_mem();
    url u, c;
    buf b;

    buf_init(&b, &m, 1000);
    CHECK_INT(url_parse(&m, S("https://[2001:DB8::1]:8443/a/b?key=s#"), &u),
              MCP_PROTOCOL_ERROR);
    CHECK_INT(url_parse(&m, S("https://[2001:DB8::1]:8443/a/b?key=s"), &u),
              MCP_OK);
    CHECK_INT(url_copy(&m, &u, &c), MCP_OK);
    url_free(&m, &u);
    CHECK_STR(c.scheme, S("https"));
    CHECK_STR(c.host, S("2001:db8::1"));
    CHECK_STR(c.path, S("/a/b"));
    CHECK_STR(c.query, S("key=s"));
    CHECK_INT(c.port, 8443);
    CHECK(c.https && c.literal);
    CHECK_STR(url_host_field(&c), S("[2001:db8::1]:8443"));
    CHECK_STR(url_target(&c), S("/a/b?key=s"));
    url_origin(&b, &c);
    CHECK_STR(buf_str(&b), S("https://[2001:db8::1]:8443"));
    buf_clear(&b);
    url_show(&b, &c);
    CHECK_STR(buf_str(&b), S("https://[2001:db8::1]:8443/a/b"));
    url_free(&m, &c);
    CHECK_INT(url_parse(&m, S("http://h"), &u), MCP_OK);
    CHECK(u.query.ptr == NULL && !u.https && !u.literal && u.port == 80);
    CHECK_INT(url_copy(&m, &u, &c), MCP_OK);
    CHECK(c.query.ptr == NULL && url_same_origin(&u, &c));
    url_free(&m, &c);
    url_free(&m, &u);
    url_free(&m, &u);
    buf_free(&b);
}

static void test_http_url_limit(void) {
    mem m = plain_mem();
    buf b;
    url u;

    buf_init(&b, &m, 2 * LIMIT_URL);
    buf_add(&b, S("http://host/"));
    while (b.len < LIMIT_URL) buf_byte(&b, 'a');
    CHECK_INT(url_parse(&m, buf_str(&b), &u), MCP_OK);
    CHECK_INT(strlen(u.text), LIMIT_URL);
    url_free(&m, &u);
    buf_byte(&b, 'a');
    CHECK_INT(url_parse(&m, buf_str(&b), &u), MCP_LIMIT_EXCEEDED);
    b.ptr[50] = '<';  // short enough, but not once it is encoded
    CHECK_INT(url_parse(&m, str_head(buf_str(&b), LIMIT_URL), &u),
              MCP_LIMIT_EXCEEDED);
    buf_clear(&b);
    buf_add(&b, S("http://"));  // a label of 63, a name of 253
    for (int i = 0; i < 253; i++) buf_byte(&b, i % 64 == 63 ? '.' : 'x');
    CHECK_INT(url_parse(&m, buf_str(&b), &u), MCP_OK);
    url_free(&m, &u);
    buf_byte(&b, 'x');
    CHECK_INT(url_parse(&m, buf_str(&b), &u), MCP_PROTOCOL_ERROR);
    buf_clear(&b);
    buf_add(&b, S("http://"));
    for (int i = 0; i < 64; i++) buf_byte(&b, 'x');
    CHECK_INT(url_parse(&m, buf_str(&b), &u), MCP_PROTOCOL_ERROR);
    buf_free(&b);
}

static void test_http_url_join(void) {
    // RFC 3986 5.4, with http for its base; and what it does not show.
    static const char *const cases[][2] = {
        {"g", "http://a/b/c/g"},
        {"./g", "http://a/b/c/g"},
        {"g/", "http://a/b/c/g/"},
        {"/g", "http://a/g"},
        {"//g", "http://g/"},
        {"?y", "http://a/b/c/d;p?y"},
        {"g?y", "http://a/b/c/g?y"},
        {"#s", "http://a/b/c/d;p?q"},
        {"g#s", "http://a/b/c/g"},
        {"g?y#s", "http://a/b/c/g?y"},
        {";x", "http://a/b/c/;x"},
        {"g;x", "http://a/b/c/g;x"},
        {"", "http://a/b/c/d;p?q"},
        {".", "http://a/b/c/"},
        {"./", "http://a/b/c/"},
        {"..", "http://a/b/"},
        {"../", "http://a/b/"},
        {"../g", "http://a/b/g"},
        {"../..", "http://a/"},
        {"../../g", "http://a/g"},
        {"../../../g", "http://a/g"},
        {"/./g", "http://a/g"},
        {"/../g", "http://a/g"},
        {"g.", "http://a/b/c/g."},
        {"..g", "http://a/b/c/..g"},
        {"./../g", "http://a/b/g"},
        {"g/./h", "http://a/b/c/g/h"},
        {"g;x=1/../y", "http://a/b/c/y"},
        {"g?y/../x", "http://a/b/c/g?y/../x"},
        {"a/b:c", "http://a/b/c/a/b:c"},
        {"https://X:443/y", "https://x/y"},
        {"//b:81?z", "http://b:81/?z"},
        {"http:g", NULL},
        {"ftp://a/", NULL},
        {"javascript:x", NULL},
        {"a:b", NULL},
        {"//u@b/", NULL},
        {"x y", NULL},
        {"x\r\ny", NULL}};
    mem m = plain_mem();
    url base, u;

    CHECK_INT(url_parse(&m, S("http://a/b/c/d;p?q"), &base), MCP_OK);
    for (size_t i = 0; i < COUNT(cases); i++) {
        str ref = str_of(cases[i][0]);
        char *copy = exact(ref);
        mcp_code rc = url_join(&m, &base, str_make(copy, ref.len), &u);
        free(copy);
        CHECK_INT(rc, cases[i][1] ? MCP_OK : MCP_PROTOCOL_ERROR);
        CHECK_STR(str_of(u.text), str_of(cases[i][1]));
        url_free(&m, &u);
    }
    CHECK_INT(url_join(&m, &base, str_make("/a\0b", 4), &u),
              MCP_PROTOCOL_ERROR);
    url_free(&m, &base);
}

static void test_http_origin(void) {
    static const struct {
        const char *a, *b;
        bool same;
    } cases[] = {{"http://localhost/x", "http://LOCALHOST:80/y", true},
                 {"http://localhost/", "https://localhost/", false},
                 {"http://localhost/", "http://localhost:81/", false},
                 {"http://127.0.0.1/", "http://localhost/", false},
                 {"http://[::1]/", "http://[0::1]/", true},
                 {"http://a.b/", "http://a.b./", false},
                 {"https://a/", "https://b/", false}};
    mem m = plain_mem();
    url a, b;

    for (size_t i = 0; i < COUNT(cases); i++) {
        CHECK_INT(url_parse(&m, str_of(cases[i].a), &a), MCP_OK);
        CHECK_INT(url_parse(&m, str_of(cases[i].b), &b), MCP_OK);
        CHECK_INT(url_same_origin(&a, &b), cases[i].same);
        url_free(&m, &a);
        url_free(&m, &b);
    }
}

static mcp_code torture_url_body(mem *m) {
    url a, b, c;
    mcp_code rc = url_parse(m, S("http://[2001:db8::5]:81/a/b?c"), &a);

    if (rc) return rc;
    memset(&c, 0, sizeof c);
    rc = url_join(m, &a, S("../x/\xC3\xA4"), &b);
    if (!rc) rc = url_copy(m, &b, &c);
    url_free(m, &c);
    url_free(m, &b);
    url_free(m, &a);
    return rc;
}

static void test_http_url_torture(void) {
    torture(torture_url_body);
}

static void test_http_header(void) {
    static const struct {
        str name, value;
        bool ok;
    } cases[] = {
        {{"A", 1}, {"b", 1}, true},
        {{"X-y_z!", 6}, {"", 0}, true},
        {{"A", 1}, {"b\tc d", 5}, true},
        {{"A", 1}, {"\xC3\xA4", 2}, true},
        {{"A", 1}, {" b", 2}, false},
        {{"A", 1}, {"b ", 2}, false},
        {{"A", 1}, {"\tb", 2}, false},
        {{"A", 1}, {"b\r\nC: d", 7}, false},
        {{"A", 1}, {"b\nC: d", 6}, false},
        {{"A", 1}, {"b\rC", 3}, false},
        {{"A", 1}, {"b\0c", 3}, false},
        {{"A", 1}, {"b\x1B[0m", 5}, false},
        {{"A", 1}, {"b\x7F", 2}, false},
        {{"", 0}, {"b", 1}, false},
        {{"A ", 2}, {"b", 1}, false},
        {{"A:", 2}, {"b", 1}, false},
        {{"A\r\nB", 4}, {"b", 1}, false},
        {{"A\0", 2}, {"b", 1}, false},
        {{"\xC3\xA4", 2}, {"b", 1}, false}};
    mem m = plain_mem();
    buf b, want;

    buf_init(&b, &m, 1000);
    buf_init(&want, &m, 1000);
    for (size_t i = 0; i < COUNT(cases); i++) {
        header_add(&b, cases[i].name, cases[i].value);
        CHECK_INT(b.err, cases[i].ok ? MCP_OK : MCP_MISUSE);
        buf_clear(&want);
        if (cases[i].ok)
            buf_fmt(&want, "%.*s: %.*s\r\n", MCP_ARG(cases[i].name),
                    MCP_ARG(cases[i].value));
        CHECK_STR(buf_str(&b), buf_str(&want));
        buf_free(&b);
    }
    buf_free(&want);
}

static void test_http_media(void) {
    CHECK(media_is(S("application/json"), S("application/json")));
    CHECK(media_is(S("Application/JSON; charset=utf-8"),
                   S("application/json")));
    CHECK(media_is(S(" text/event-stream ;x"), S("text/event-stream")));
    CHECK(!media_is(S("application/json5"), S("application/json")));
    CHECK(!media_is(S("text/html"), S("application/json")));
    CHECK(!media_is(S(""), S("application/json")));
}

// Parse an answer's head, cut in two at `cut` (or byte by byte for SIZE_MAX).
static mcp_code head_cut(head_parser *p, str text, size_t cut, size_t *rest) {
    mcp_code rc = MCP_OK;
    size_t at = 0;

    while (at < text.len && !rc && p->state != HEAD_DONE) {
        size_t n = cut == SIZE_MAX ? 1 : at < cut ? cut - at : text.len - at;
        char *piece = exact(str_make(text.ptr + at, n));
        str in = str_make(piece, n);
        rc = head_feed(p, &in);
        at += n - in.len;
        free(piece);
    }
    *rest = text.len - at;
    return rc;
}

static const struct {
    const char *text;  // up to the body, which is "!"
    mcp_code rc;
    int status;
    bool keep, chunked, has_length, close;
    int length;
    const char *what;  // a part of `why`, or the block
} head_cases[] = {
    {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n!", MCP_OK, 200, true,
     false, true, false, 5, "Content-Length: 5\n"},
    {"HTTP/1.1 200\r\ncontent-length:5\r\n\r\n!", MCP_OK, 200, true, false,
     true, false, 5, "content-length: 5\n"},
    {"HTTP/1.1 200 \r\nA:b\r\n\r\n!", MCP_OK, 200, false, false, false, true,
     0, "A: b\n"},
    {"HTTP/1.1 200 OK\nA: \t b c \t\nB:\n\n!", MCP_OK, 200, false, false,
     false, true, 0, "A: b c\nB: \n"},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n!", MCP_OK, 200,
     true, true, false, false, 0, "Transfer-Encoding: Chunked\n"},
    {"HTTP/1.1 404 Not Found\r\nConnection: x , CLOSE\r\nContent-Length: 0"
     "\r\n\r\n!", MCP_OK, 404, false, false, true, false, 0, NULL},
    {"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\n!", MCP_OK, 200, false,
     false, true, false, 1, NULL},
    {"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 1\r\n\r\n!",
     MCP_OK, 200, true, false, true, false, 1, NULL},
    {"HTTP/1.2 200 OK\r\nContent-Length: 1\r\n\r\n!", MCP_OK, 200, true,
     false, true, false, 1, NULL},
    {"HTTP/1.1 200 OK\r\nContent-Length: 42, 42\r\nContent-Length: 42\r\n\r\n"
     "!", MCP_OK, 200, true, false, true, false, 42, NULL},
    {"HTTP/1.1 204 None\r\n\r\n!", MCP_OK, 204, true, false, true, false, 0,
     ""},
    {"HTTP/1.1 204 None\r\nContent-Length: 5\r\n\r\n!", MCP_OK, 204, true,
     false, true, false, 0, NULL},
    {"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n!", MCP_OK, 202, true,
     false, true, false, 0, NULL},
    {"HTTP/1.1 304 Same\r\nTransfer-Encoding: chunked\r\n\r\n!", MCP_OK, 304,
     true, false, true, false, 0, NULL},
    {"HTTP/1.1 100 Continue\r\nA: b\r\n\r\nHTTP/1.1 103 Early\r\n\r\n"
     "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n!", MCP_OK, 200, true,
     false, true, false, 1, "Content-Length: 1\n"},
    {"HTTP/1.1 200 OK\r\nContent-Encoding: identity\r\nContent-Length: 1"
     "\r\n\r\n!", MCP_OK, 200, true, false, true, false, 1, NULL},
    {"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 0\r\n\r\n!",
     MCP_OK, 200, true, false, true, false, 0, NULL},
    {"HTTP/1.1 200 OK\r\nX: \xE4\r\nContent-Length: 1\r\n\r\n!", MCP_OK, 200,
     true, false, true, false, 1, NULL},

    {"HTTP/1.1 101 Switching\r\n\r\n!", MCP_PROTOCOL_ERROR, 101, false, false,
     false, false, 0, "protocol"},
    {"\r\nHTTP/1.1 200 OK\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false,
     false, false, 0, "status line"},
    {"HTTP/2 200 OK\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false,
     false, 0, "status line"},
    {"HTTP/1.1 20 OK\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false,
     false, 0, "status line"},
    {"HTTP/1.1 2000\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false,
     false, 0, "status line"},
    {"HTTP/1.1 099 x\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false,
     false, 0, "status line"},
    {"HTTP/1.1 600 x\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false,
     false, 0, "status line"},
    {"HTTP/1.1\t200 OK\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false,
     false, 0, "status line"},
    {"ICY 200 OK\r\n\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false, false,
     0, "status line"},
    {"<html>hello</html>\r\n!", MCP_PROTOCOL_ERROR, 0, false, false, false,
     false, 0, "status line"},
    {"HTTP/1.1 200 OK\r\nA: b\r\n c\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false,
     false, false, false, 0, "folded"},
    {"HTTP/1.1 200 OK\r\n\tA: b\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false,
     false, false, false, 0, "folded"},
    {"HTTP/1.1 200 OK\r\nA : b\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false,
     false, false, false, 0, "name"},
    {"HTTP/1.1 200 OK\r\nno colon\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false,
     false, false, false, 0, "name"},
    {"HTTP/1.1 200 OK\r\n: b\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false, false,
     false, false, 0, "name"},
    {"HTTP/1.1 200 OK\r\nA: b\rc\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false,
     false, false, false, 0, "bare CR"},
    {"HTTP/1.1 200 OK\r\nA: b\r\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false,
     false, false, false, 0, "bare CR"},
    {"HTTP/1.1 200 OK\r\nA: b\x01\r\n\r\n!", MCP_PROTOCOL_ERROR, 200, false,
     false, false, false, 0, "control"},
    {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, false, true, false, 5, "different"},
    {"HTTP/1.1 200 OK\r\nContent-Length: 5, 6\r\n\r\n!", MCP_PROTOCOL_ERROR,
     200, false, false, true, false, 5, "different"},
    {"HTTP/1.1 200 OK\r\nContent-Length: +5\r\n\r\n!", MCP_PROTOCOL_ERROR,
     200, false, false, false, false, 0, "no number"},
    {"HTTP/1.1 200 OK\r\nContent-Length: 0x5\r\n\r\n!", MCP_PROTOCOL_ERROR,
     200, false, false, false, false, 0, "no number"},
    {"HTTP/1.1 200 OK\r\nContent-Length: 5 5\r\n\r\n!", MCP_PROTOCOL_ERROR,
     200, false, false, false, false, 0, "no number"},
    {"HTTP/1.1 200 OK\r\nContent-Length: 9223372036854775808\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, false, false, false, 0, "no number"},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, false, false, false, 0, "not chunked"},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked, chunked\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, true, false, false, 0, "not chunked"},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, false, false, false, 0, "not chunked"},
    {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n"
     "\r\n!", MCP_PROTOCOL_ERROR, 200, false, true, true, false, 5,
     "not certain"},
    {"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, true, false, false, 0, "not certain"},
    {"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 9\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, false, true, false, 9, "compressed"},
    {"HTTP/1.1 200 OK\r\nContent-Encoding: identity, br\r\n\r\n!",
     MCP_PROTOCOL_ERROR, 200, false, false, false, true, 0, "compressed"}};

static void head_check(size_t i, size_t cut) {
    mem m = plain_mem();
    head_parser p;
    const http_head *h = &p.head;
    size_t rest;
    mcp_code rc;

    head_init(&p, &m);
    rc = head_cut(&p, str_of(head_cases[i].text), cut, &rest);
    if (rc != head_cases[i].rc || h->status != head_cases[i].status)
        printf("case %zu cut %zu: %s\n", i, cut, head_cases[i].text);
    CHECK_INT(rc, head_cases[i].rc);
    CHECK_INT(h->status, head_cases[i].status);
    CHECK_INT(h->keep_alive, head_cases[i].keep);
    CHECK_INT(h->chunked, head_cases[i].chunked);
    CHECK_INT(h->has_length, head_cases[i].has_length);
    CHECK_INT(h->close_delimited, head_cases[i].close);
    CHECK_INT(h->length, head_cases[i].length);
    CHECK_INT(p.state, rc ? HEAD_BAD : HEAD_DONE);
    if (!rc) CHECK_INT(rest, 1);
    if (rc && CHECK(p.why != NULL))
        CHECK(strstr(p.why, head_cases[i].what) != NULL);
    if (!rc && head_cases[i].what)
        CHECK_STR(buf_str(&h->block), str_of(head_cases[i].what));
    head_free(&p);
}

static void test_http_head(void) {
    for (size_t i = 0; i < COUNT(head_cases); i++) {
        size_t n = strlen(head_cases[i].text);
        for (size_t cut = 0; cut <= n; cut++) head_check(i, cut);
        head_check(i, SIZE_MAX);
    }
}

static void test_http_head_values(void) {
    mem m = plain_mem();
    head_parser p;
    size_t rest, at = 0;
    str list = {NULL, 0}, one;

    head_init(&p, &m);
    CHECK_INT(head_cut(&p, S("HTTP/1.1 401 No\r\nWWW-Authenticate: a, b\r\n"
                             "Mcp-Session-Id: 7\r\nwww-authenticate:\r\n"
                             "WWW-AUTHENTICATE: c ,, d:e\r\n"
                             "Content-Length: 0\r\n\r\n"), 3, &rest), MCP_OK);
    CHECK_STR(head_get(&p.head, S("mcp-session-id")), S("7"));
    CHECK(head_get(&p.head, S("Mcp-Session")).ptr == NULL);
    CHECK_STR(head_next(&p.head, S("WWW-Authenticate"), &at), S("a, b"));
    one = head_next(&p.head, S("WWW-Authenticate"), &at);
    CHECK(one.ptr != NULL && one.len == 0);
    CHECK_STR(head_next(&p.head, S("WWW-Authenticate"), &at), S("c ,, d:e"));
    CHECK(head_next(&p.head, S("WWW-Authenticate"), &at).ptr == NULL);
    at = 0;
    CHECK(head_member(&p.head, S("WWW-Authenticate"), &at, &list, &one));
    CHECK_STR(one, S("a"));
    CHECK(head_member(&p.head, S("WWW-Authenticate"), &at, &list, &one));
    CHECK(head_member(&p.head, S("WWW-Authenticate"), &at, &list, &one));
    CHECK_STR(one, S("c"));
    CHECK(head_member(&p.head, S("WWW-Authenticate"), &at, &list, &one));
    CHECK_STR(one, S("d:e"));
    CHECK(!head_member(&p.head, S("WWW-Authenticate"), &at, &list, &one));
    head_free(&p);
}

// A head with one line of `line` bytes and `total` bytes in all.
static mcp_code head_of_size(size_t line, size_t total, size_t piece) {
    mem m = plain_mem();
    head_parser p;
    mcp_code rc = MCP_OK;
    buf b;

    buf_init(&b, &m, 4 * LIMIT_HTTP_HEAD);
    buf_add(&b, S("HTTP/1.1 200 OK\r\nA:"));
    for (size_t i = 2; i < line; i++) buf_byte(&b, 'x');
    while (b.len + 6 < total) {
        size_t left = total - 6 - b.len, n = left > 2000 ? 1000 : left;
        buf_add(&b, S("\r\nB:"));
        for (n += b.len - 2; b.len < n;) buf_byte(&b, 'y');
    }
    buf_add(&b, S("\r\n\r\n"));
    head_init(&p, &m);
    for (str all = buf_str(&b); all.len && !rc;) {
        str in = str_head(all, piece);
        all = str_skip(all, piece);
        rc = head_feed(&p, &in);
    }
    if (!rc) CHECK_INT(p.state, HEAD_DONE);
    head_free(&p);
    buf_free(&b);
    return rc;
}

static void test_http_head_limits(void) {
    static const size_t pieces[] = {1, 100, 4 * LIMIT_HTTP_HEAD};

    for (size_t i = 0; i < COUNT(pieces); i++) {
        // The CR counts: it is known to end a line only when its LF is here.
        CHECK_INT(head_of_size(LIMIT_HTTP_LINE - 1, 0, pieces[i]), MCP_OK);
        CHECK_INT(head_of_size(LIMIT_HTTP_LINE, 0, pieces[i]),
                  MCP_LIMIT_EXCEEDED);
        CHECK_INT(head_of_size(10, LIMIT_HTTP_HEAD, pieces[i]), MCP_OK);
        CHECK_INT(head_of_size(10, LIMIT_HTTP_HEAD + 1, pieces[i]),
                  MCP_LIMIT_EXCEEDED);
    }
}

// Interim answers without end meet the limit of the head.
static void test_http_head_interim(void) {
    mem m = plain_mem();
    head_parser p;
    mcp_code rc = MCP_OK;
    int n = 0;

    head_init(&p, &m);
    for (; !rc && n < 100000; n++) {
        str in = S("HTTP/1.1 102 Processing\r\n\r\n");
        rc = head_feed(&p, &in);
    }
    CHECK_INT(rc, MCP_LIMIT_EXCEEDED);
    CHECK(n < 5000);
    head_free(&p);
}

static mcp_code torture_head_body(mem *m) {
    head_parser p;
    size_t rest;
    mcp_code rc;

    head_init(&p, m);
    rc = head_cut(&p, S("HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 200 OK\r\n"
                        "Content-Type: text/plain\r\nX-Long: aaaaaaaaaaaaaaaa"
                        "bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb\r\n"
                        "\r\n"), 60, &rest);
    head_free(&p);
    return rc;
}

static void test_http_head_torture(void) {
    torture(torture_head_body);
}

// Feed a body in two pieces (or byte by byte) and collect it. False: broken.
static bool body_cut(http_framing *f, str text, size_t cut, buf *out,
                     size_t *rest) {
    size_t at = 0;
    bool ok = true;

    while (at < text.len && ok && !f->done) {
        size_t n = cut == SIZE_MAX ? 1 : at < cut ? cut - at : text.len - at;
        char *piece = exact(str_make(text.ptr + at, n));
        str in = str_make(piece, n), data;
        do {
            ok = http_framing_next(f, &in, &data);
            buf_add(out, data);
        } while (ok && data.len);
        at += n - in.len;
        free(piece);
    }
    *rest = text.len - at;
    return ok;
}

static void test_http_chunked(void) {
    static const struct {
        const char *in, *want;  // NULL: broken
        bool done;
    } cases[] = {
        {"0\r\n\r\n!", "", true},
        {"3\r\nabc\r\n0\r\n\r\n!", "abc", true},
        {"1\r\na\r\nA\r\n0123456789\r\n0a\r\n0123456789\r\n00\r\n\r\n!",
         "a01234567890123456789", true},
        {"3;a=b;c=\"d\"\r\nabc\r\n0;x\r\n\r\n!", "abc", true},
        {"3 ;a\r\nabc\r\n0\t\r\n\r\n!", "abc", true},
        {"3\r\nabc\r\n0\r\nA: b\r\nC: d\r\n\r\n!", "abc", true},
        {"00000000000000000003\r\nabc\r\n0\r\n\r\n!", "abc", true},
        {"2\r\n\r\n\r\n0\r\n\r\n!", "\r\n", true},
        {"3\r\nab", "ab", false},
        {"3\r\nabc\r\n", "abc", false},
        {"0\r\n", "", false},
        {"\r\n", NULL, false},
        {"x\r\n", NULL, false},
        {"-1\r\n", NULL, false},
        {"0x3\r\nabc\r\n0\r\n\r\n", NULL, false},
        {";a\r\n", NULL, false},
        {" 3\r\nabc\r\n", NULL, false},
        {"3\nabc\r\n0\r\n\r\n", NULL, false},
        {"3;a\nabc\r\n0\r\n\r\n", NULL, false},
        {"3\rabc\r\n", NULL, false},
        {"3\r\nabc\n0\r\n\r\n", NULL, false},
        {"3\r\nabcd\r\n0\r\n\r\n", NULL, false},
        {"3\r\nabc0\r\n\r\n", NULL, false},
        {"0\r\n\n", NULL, false},
        {"0\r\nA: b\n\r\n", NULL, false},
        {"0\r\n\rx", NULL, false},
        {"fffffffffffffffff\r\n", NULL, false}};
    mem m = plain_mem();
    http_head h;
    buf out;

    memset(&h, 0, sizeof h);
    h.chunked = true;
    buf_init(&out, &m, 1000);
    for (size_t i = 0; i < COUNT(cases); i++) {
        str in = str_of(cases[i].in);
        for (size_t cut = 0; cut <= in.len + 1; cut++) {
            http_framing f;
            size_t rest;
            http_framing_init(&f, &h);
            buf_clear(&out);
            CHECK_INT(body_cut(&f, in, cut > in.len ? SIZE_MAX : cut, &out,
                               &rest), cases[i].want != NULL);
            CHECK_INT(f.done, cases[i].done);
            CHECK_INT(http_framing_eof(&f), cases[i].done);
            if (cases[i].want) CHECK_STR(buf_str(&out), str_of(cases[i].want));
            if (cases[i].done) CHECK_INT(rest, 1);
        }
    }
    buf_free(&out);
}

// Framing has a limit between two runs of data, and only there.
static void test_http_chunk_limit(void) {
    static const char *const begin[] = {"1;", "1\r\na\r\n0\r\nA: "};
    mem m = plain_mem();
    buf b, out;

    buf_init(&b, &m, 1 << 20);
    buf_init(&out, &m, 1 << 20);
    for (size_t i = 0; i < 4; i++) {
        const char *tail = i & 1 ? "\r\n\r\n" : "\r\na\r\n0\r\n\r\n";
        size_t fixed = i & 1 ? strlen("\r\n0\r\nA: \r\n\r\n")
                             : strlen("1;\r\n");
        http_head h;
        http_framing f;
        size_t rest;
        memset(&h, 0, sizeof h);
        h.chunked = true;
        http_framing_init(&f, &h);
        buf_clear(&b);
        buf_clear(&out);
        for (int k = 0; k < 3000; k++) buf_add(&b, S("1\r\nx\r\n"));
        // What ends the last chunk's line belongs to the next run.
        buf_add(&b, str_of(begin[i & 1]));
        if (i & 1) fixed -= 2;
        for (size_t k = fixed + (i < 2); k <= LIMIT_CHUNK_LINE; k++)
            buf_byte(&b, 'x');
        buf_add(&b, str_of(tail));
        CHECK_INT(body_cut(&f, buf_str(&b), 7, &out, &rest), i < 2);
        CHECK_INT(f.done, i < 2);
        CHECK_INT(out.len, i < 2 || (i & 1) ? 3001 : 3000);
    }
    buf_free(&b);
    buf_free(&out);
}

static void test_http_framing(void) {
    mem m = plain_mem();
    http_head h;
    http_framing f;
    size_t rest;
    buf out;

    buf_init(&out, &m, 100);
    for (size_t cut = 0; cut <= 7; cut++) {
        memset(&h, 0, sizeof h);
        h.has_length = true;
        h.length = 5;
        http_framing_init(&f, &h);
        CHECK_INT(http_framing_sure(&f), 5);
        buf_clear(&out);
        CHECK(body_cut(&f, S("hello!!"), cut, &out, &rest));
        CHECK(f.done && rest == 2);
        CHECK_STR(buf_str(&out), S("hello"));
        CHECK_INT(http_framing_sure(&f), 0);
        CHECK(http_framing_eof(&f));

        memset(&h, 0, sizeof h);
        h.close_delimited = true;
        http_framing_init(&f, &h);
        buf_clear(&out);
        CHECK(body_cut(&f, S("hello!!"), cut, &out, &rest));
        CHECK(!f.done && rest == 0);
        CHECK_STR(buf_str(&out), S("hello!!"));
        CHECK(http_framing_sure(&f) == UINT64_MAX);
        CHECK(http_framing_eof(&f));
    }
    h.close_delimited = false;
    h.has_length = true;
    http_framing_init(&f, &h);
    CHECK(f.done);
    h.length = 3;
    http_framing_init(&f, &h);
    http_framing_took(&f, 2);
    CHECK(!f.done && !http_framing_eof(&f));
    http_framing_took(&f, 1);
    CHECK(f.done && http_framing_eof(&f));
    buf_free(&out);
}

static const test tests_http[] = {
    {"http.url", test_http_url},
    {"http.url_parts", test_http_url_parts},
    {"http.url_limit", test_http_url_limit},
    {"http.url_join", test_http_url_join},
    {"http.url_torture", test_http_url_torture},
    {"http.origin", test_http_origin},
    {"http.header", test_http_header},
    {"http.media", test_http_media},
    {"http.head", test_http_head},
    {"http.head_values", test_http_head_values},
    {"http.head_limits", test_http_head_limits},
    {"http.head_interim", test_http_head_interim},
    {"http.head_torture", test_http_head_torture},
    {"http.chunked", test_http_chunked},
    {"http.chunk_limit", test_http_chunk_limit},
    {"http.framing", test_http_framing},
};

//=============================================================================
// MARK: - 9 SSE
//=============================================================================

// Feed a stream cut in two (SIZE_MAX: byte by byte) and write what comes out
// as "type|data|id;" with a '!' where the event brought the id.
static mcp_code sse_cut(sse *s, str text, size_t cut, buf *out) {
    size_t at = 0;
    sse_event e;

    while (at < text.len) {
        size_t n = cut == SIZE_MAX ? 1 : at < cut ? cut - at : text.len - at;
        char *piece = exact(str_make(text.ptr + at, n));
        str in = str_make(piece, n);
        while (sse_feed(s, &in, &e)) {
            buf_add(out, e.type);
            buf_byte(out, '|');
            buf_add(out, e.data);
            buf_byte(out, '|');
            buf_add(out, e.id);
            buf_add(out, e.has_id ? S("!;") : S(";"));
        }
        CHECK_INT(in.len, 0);
        free(piece);
        at += n;
    }
    return sse_err(s);
}

static void sse_check(str in, const char *want) {
    mem m;
    buf out;

    mem_init(&m, NULL, NULL);
    buf_init(&out, &m, 100000);
    for (size_t cut = 0; cut <= in.len + 1; cut++) {
        sse s;
        sse_init(&s, &m, 1000);
        buf_clear(&out);
        CHECK_INT(sse_cut(&s, in, cut > in.len ? SIZE_MAX : cut, &out),
                  MCP_OK);
        if (!CHECK_STR(buf_str(&out), str_of(want))) printf("cut %zu\n", cut);
        sse_free(&s);
    }
    buf_free(&out);
}

#define IN(literal) {literal, sizeof(literal) - 1}

static const struct {
    str in;
    const char *want;
} sse_cases[] = {
    {IN("data: a\n\n"), "message|a|;"},
    {IN("data:a\n\ndata:  b\n\ndata: \n\n"), "message|a|;message| b|;"},
    {IN("event: x\ndata: a\n\ndata: b\n\n"), "x|a|;message|b|;"},
    {IN("event: x\n\ndata: b\n\n"), "message|b|;"},
    {IN("event: x\nevent: yy\nevent\nevent: z\ndata: b\n\n"), "z|b|;"},
    {IN("id: 1\ndata: a\n\ndata: b\n\nid\ndata: c\n\n"),
     "message|a|1!;message|b|1;message|c|!;"},
    {IN("id: 1\n\n"), "message||1!;"},
    {IN("id: 1\nid: a\0b\ndata: x\n\n"), "message|x|1!;"},
    {IN("id: a\0b\n\n"), ""},
    {IN("retry: 5\n\nretry: x\n\n: c\n\n\n\n"), ""},
    {IN(":\n:x\n: data: y\n:data: z\ndata: a\n:\n\n"), "message|a|;"},
    {IN("data\n\ndata\ndata\n\n"), "message|\n|;"},
    {IN("data: a\ndata\ndata: b\ndata:\n\n"), "message|a\n\nb\n|;"},
    {IN("Data: a\ndatax: b\ndat: c\n data: d\ndata : e\nfoo\n\n"), ""},
    {IN("data: unfinished\n"), ""},
    {IN("data: unfinished"), ""},
    {IN("data: {\"a\":\"b: c\"}\n\n"), "message|{\"a\":\"b: c\"}|;"},
    {IN("\xEF\xBB\xBF" "data: a\n\n\xEF\xBB\xBF" "data: b\n\n"),
     "message|a|;"},
    {IN("\xEF\xBB" "data: a\n\ndata: b\n\n"), "message|b|;"},
    {IN("\xEF\xBB\xBF\xEF\xBB\xBF" "data: a\n\n"), ""},
    {IN("\xEF\xBB\xBF\n\ndata: \xEF\xBB\xBF\n\n"),
     "message|\xEF\xBB\xBF|;"},
    {IN("data: \xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80\n\n"),
     "message|\xC3\xA4\xE2\x82\xAC\xF0\x9F\x98\x80|;"},
    {IN("\n\n\ndata: a\n\n\n\ndata: b\n\n"), "message|a|;message|b|;"}};

static void test_sse_stream(void) {
    for (size_t i = 0; i < COUNT(sse_cases); i++)
        sse_check(sse_cases[i].in, sse_cases[i].want);
}

// Each case once more with CR and CRLF for LF, and with all three mixed.
static void test_sse_line_ends(void) {
    static const char *const ends[] = {"\r", "\r\n", "\n"};
    mem m;
    buf b;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, 10000);
    for (size_t i = 0; i < COUNT(sse_cases); i++) {
        for (size_t mix = 0; mix < 5; mix++) {
            size_t line = 0;
            buf_clear(&b);
            for (size_t k = 0; k < sse_cases[i].in.len; k++) {
                size_t pick = mix < 2 ? mix : (line * 7 / mix + mix) % 3;
                char c = sse_cases[i].in.ptr[k];
                // "\r" before "\n" would be one end and not two
                if (c == '\n' && pick == 2 && b.len &&
                    b.ptr[b.len - 1] == '\r')
                    pick = 0;
                if (c != '\n') buf_byte(&b, c);
                else buf_add(&b, str_of(ends[pick]));
                line += c == '\n';
            }
            sse_check(buf_str(&b), sse_cases[i].want);
        }
    }
    buf_free(&b);
}

// Field report 53: a server that ends its lines with CRLF, and a lone CR.
static void test_fr_53(void) {
    sse_check(S("event: message\r\ndata: {\"a\":1}\r\n\r\n"),
              "message|{\"a\":1}|;");
    sse_check(S("event: message\rdata: {\"a\":1}\r\r"),
              "message|{\"a\":1}|;");
    sse_check(S("data: a\r\n\r\ndata: b\r\n\r\n"), "message|a|;message|b|;");
}

static void test_fr_54(void) {
    sse_check(S("data: {\ndata: \"a\":1\ndata: }\n\n"),
              "message|{\n\"a\":1\n}|;");
}

static void test_fr_56(void) {
    sse_check(S(": ping\n\n:\n\ndata: a\n: keep-alive\ndata: b\n\n: ping\n\n"),
              "message|a\nb|;");
}

// The priming event: no data, but the place to go on from.
static void test_fr_57(void) {
    mem m;
    sse s;
    sse_event e;
    str in = S("id: 1\nretry: 500\ndata:\n\ndata:\n\n");

    mem_init(&m, NULL, NULL);
    sse_init(&s, &m, 100);
    CHECK(sse_feed(&s, &in, &e));
    CHECK(e.has_id && e.data.len == 0);
    CHECK_STR(e.id, S("1"));
    CHECK_STR(e.type, S("message"));
    CHECK(s.retry_set && s.retry == 500);
    CHECK(!sse_feed(&s, &in, &e));
    CHECK_STR(buf_str(&s.id), S("1"));
    sse_free(&s);
    sse_check(S("id: 1\nretry: 500\ndata:\n\n"), "message||1!;");
}

static void test_sse_retry(void) {
    static const struct {
        const char *in;
        bool set;
        int64_t want;
    } cases[] = {{"retry: 0\n", true, 0},
                 {"retry:123\n", true, 123},
                 {"retry: 9223372036854775807\n", true, INT64_MAX},
                 {"retry: 9223372036854775808\n", false, 0},
                 {"retry: -1\n", false, 0},
                 {"retry: 1.5\n", false, 0},
                 {"retry:  1\n", false, 0},
                 {"retry: 1 \n", false, 0},
                 {"retry\n", false, 0},
                 {"retry: 7\nretry: x\n", true, 7}};
    mem m;

    mem_init(&m, NULL, NULL);
    for (size_t i = 0; i < COUNT(cases); i++) {
        str in = str_of(cases[i].in);
        sse_event e;
        sse s;
        sse_init(&s, &m, 100);
        CHECK(!sse_feed(&s, &in, &e));
        CHECK_INT(s.retry_set, cases[i].set);
        CHECK_INT(s.retry, cases[i].want);
        sse_free(&s);
    }
}

static void test_sse_nul(void) {
    mem m;
    sse s;
    sse_event e;
    str in = str_make("data: a\0b\n\n", 11);

    mem_init(&m, NULL, NULL);
    sse_init(&s, &m, 100);
    CHECK(sse_feed(&s, &in, &e));
    CHECK_STR(e.data, str_make("a\0b", 3));
    sse_free(&s);
}

// One event of `n` bytes in `lines` data lines, in pieces of `piece`.
static mcp_code sse_of_size(size_t n, size_t lines, size_t max, size_t piece) {
    mem m;
    sse s;
    sse_event e;
    buf b;
    int events = 0;
    mcp_code rc;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX / 2);
    for (size_t i = 0; i < lines; i++) {
        size_t part = n / lines + (i < n % lines);
        buf_add(&b, S("data: "));
        for (; part > (i > 0); part--) buf_byte(&b, 'x');  // '\n' counts
        buf_byte(&b, '\n');
    }
    buf_byte(&b, '\n');
    sse_init(&s, &m, max);
    for (str all = buf_str(&b); all.len; all = str_skip(all, piece)) {
        str in = str_head(all, piece);
        while (sse_feed(&s, &in, &e)) {
            events++;
            CHECK_INT(e.data.len, n);
        }
    }
    rc = sse_err(&s);
    CHECK_INT(events, rc ? 0 : 1);
    sse_free(&s);
    buf_free(&b);
    return rc;
}

static void test_sse_limits(void) {
    static const size_t pieces[] = {1, 7, 1000, 1 << 20};

    for (size_t i = 0; i < COUNT(pieces); i++) {
        for (size_t lines = 1; lines < 4; lines++) {
            CHECK_INT(sse_of_size(100, lines, 100, pieces[i]), MCP_OK);
            CHECK_INT(sse_of_size(101, lines, 100, pieces[i]),
                      MCP_LIMIT_EXCEEDED);
        }
        CHECK_INT(sse_of_size(70000, 2, 70000, pieces[i]), MCP_OK);
        CHECK_INT(sse_of_size(70001, 2, 70000, pieces[i]),
                  MCP_LIMIT_EXCEEDED);
    }
}

// Other lines have a limit of their own, wherever they are cut; comments none.
static void test_sse_line_limit(void) {
    static const char *const fields[] = {"x", "id: ", "event: ", ":"};
    static const size_t pieces[] = {1, 5, 4096, 1 << 20};
    mem m;
    buf b;

    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, SIZE_MAX / 2);
    for (size_t i = 0; i < COUNT(fields) * COUNT(pieces) * 2; i++) {
        const char *field = fields[i % COUNT(fields)];
        size_t piece = pieces[i / 2 / COUNT(fields)];
        size_t over = i / COUNT(fields) % 2;
        sse_event e;
        sse s;
        int events = 0;
        buf_clear(&b);
        buf_add(&b, str_of(field));
        while (b.len < LIMIT_SSE_LINE + over) buf_byte(&b, 'y');
        buf_add(&b, S("\ndata: a\n\n"));
        sse_init(&s, &m, 10);
        for (str all = buf_str(&b); all.len; all = str_skip(all, piece)) {
            str in = str_head(all, piece);
            while (sse_feed(&s, &in, &e)) events++;
        }
        if (*field == ':') over = 0;
        CHECK_INT(sse_err(&s), over ? MCP_LIMIT_EXCEEDED : MCP_OK);
        CHECK_INT(events, !over);
        sse_free(&s);
    }
    buf_free(&b);
}

// A giant event does not leave its memory behind.
static void test_sse_memory(void) {
    heap h = {0, 0, 0, false};
    mem m = {heap_fn, &h};
    sse_event e;
    sse s;
    str in;

    sse_init(&s, &m, 10 << 20);
    in = S("data: ");
    CHECK(!sse_feed(&s, &in, &e));
    for (int i = 0; i < 1000; i++) {
        in = S("fifty bytes of text again and again, so it grows. "
               "fifty bytes of text again and again, so it grows. "
               "fifty bytes of text again and again, so it grows. ");
        CHECK(!sse_feed(&s, &in, &e));
    }
    in = S("\n\ndata: a\n\n");
    CHECK(sse_feed(&s, &in, &e));
    CHECK(h.live > 150000);
    CHECK(sse_feed(&s, &in, &e));
    CHECK_STR(e.data, S("a"));
    CHECK(h.live < 10000);
    sse_free(&s);
    CHECK_INT(h.live, 0);
}

static mcp_code torture_sse_body(mem *m) {
    mcp_code rc;
    sse s;
    buf out;

    buf_init(&out, m, 1000);
    sse_init(&s, m, 1000);
    rc = sse_cut(&s, S("id: 12\nevent: endpoint\ndata: one and two and more "
                       "than sixty-four bytes of text, so that it has to "
                       "grow\ndata: b\n\ndata: c\n\n"), 30, &out);
    if (!rc) rc = out.err;
    sse_free(&s);
    buf_free(&out);
    return rc;
}

static void test_sse_torture(void) {
    torture(torture_sse_body);
}

static const test tests_sse[] = {
    {"sse.stream", test_sse_stream},
    {"sse.line_ends", test_sse_line_ends},
    {"sse.retry", test_sse_retry},
    {"sse.nul", test_sse_nul},
    {"sse.limits", test_sse_limits},
    {"sse.line_limit", test_sse_line_limit},
    {"sse.memory", test_sse_memory},
    {"sse.torture", test_sse_torture},
    {"fr.53", test_fr_53},
    {"fr.54", test_fr_54},
    {"fr.56", test_fr_56},
    {"fr.57", test_fr_57},
};
//=============================================================================
// MARK: - 10 TLS
//
// Certificates are made by the openssl tool in a directory of its own, and its
// s_server is the peer. "Expired" is our wall clock put forward.
//=============================================================================

#if USE_TLS

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static const char tls_pki_script[] =
    "set -e\n"
    "EC='-newkey ec -pkeyopt ec_paramgen_curve:'\n"
    "ca() { openssl req -x509 $3 -nodes -keyout $1.key -out $1.pem -days 9000"
    " -subj \"$2\" -addext basicConstraints=critical,CA:TRUE; }\n"
    "leaf() { openssl req -new $4 -nodes -keyout $1.key -out $1.csr"
    " -subj \"/CN=$1.test\"; printf \"$3\" >$1.ext; openssl x509 -req"
    " -in $1.csr -CA $2.pem -CAkey $2.key -CAcreateserial -days ${5:-3000}"
    " -extfile $1.ext -out $1.pem; }\n"
    "ca ca '/O=Test House/CN=Test CA' \"${EC}P-256\"\n"
    "ca rsaca '/O=Rivest and Sons' '-newkey rsa:2048'\n"
    "ca fake '/O=Test House/CN=Test CA' \"${EC}P-256\"\n"
    "ca far '/O=Far Away/CN=Far Root' \"${EC}P-256\"\n"
    "ca self '/CN=self.test' \"${EC}P-256 -addext"
    " subjectAltName=DNS:self.test\"\n"
    "N='subjectAltName=DNS:good.test,DNS:*.wild.test,DNS:*.test,"
    "DNS:localhost,IP:127.0.0.1,IP:::1'\n"
    "leaf good ca \"$N\" \"${EC}P-256\"\n"
    "leaf p384 ca \"$N\" \"${EC}P-384\"\n"
    "leaf rsa rsaca \"$N\" '-newkey rsa:2048'\n"
    "leaf mixed rsaca \"$N\" \"${EC}P-256\"\n"
    "leaf weak ca \"$N\" '-newkey rsa:1024'\n"
    "leaf stranger far \"$N\" \"${EC}P-256\"\n"
    "leaf impostor fake \"$N\" \"${EC}P-256\"\n"
    "leaf cn ca 'keyUsage=digitalSignature' \"${EC}P-256\"\n"
    "leaf mail ca 'subjectAltName=email:a@good.test' \"${EC}P-256\"\n"
    "leaf client ca \"$N\\nextendedKeyUsage=clientAuth\" \"${EC}P-256\"\n"
    "leaf both ca \"$N\\nextendedKeyUsage=clientAuth,serverAuth\""
    " \"${EC}P-256\"\n"
    "leaf any ca \"$N\\nextendedKeyUsage=2.5.29.37.0\" \"${EC}P-256\"\n"
    "leaf odd ca \"$N\\n1.2.3.4=critical,DER:0500\" \"${EC}P-256\"\n"
    "leaf old ca \"$N\" \"${EC}P-256\" 30\n"
    "leaf middle ca 'basicConstraints=critical,CA:TRUE' \"${EC}P-256\" 30\n"
    "leaf below middle \"$N\" \"${EC}P-256\"\n"
    "cat below.pem far.pem middle.pem >untidy.pem\n"
    "leaf noca good \"$N\" \"${EC}P-256\"\n"
    "leaf big ca \"subjectAltName=$(seq -f DNS:n%04g.good.test -s, 1100)\""
    " \"${EC}P-256\"\n"
    "cat ca.pem rsaca.pem >bundle.pem\n"
    "for f in good ca; do openssl x509 -in $f.pem -outform DER -out $f.der;"
    " done\n"
    "head -c 3000000 /dev/zero | tr '\\0' 'x' >big.txt\n";

static char tls_dir[64];  // "": not made yet
static bool tls_dir_bad;

static int tls_shell(const char *dir, const char *script) {
    int status = -1, pid = fork();

    if (pid == 0) {
        int null = open("/dev/null", O_RDWR);
        if (null < 0 || chdir(dir)) _exit(126);
        dup2(null, 0);
        dup2(null, 1);
        dup2(null, 2);
        execl("/bin/sh", "sh", "-c", script, (char *)NULL);
        _exit(127);
    }
    if (pid > 0) waitpid(pid, &status, 0);
    return status;
}

static void tls_pki_remove(void) {
    if (tls_dir[0]) tls_shell("/tmp", "rm -rf /tmp/mcp-tls-test-$PPID");
}

// The directory of certificates, made once; NULL (and a failure) without one.
static const char *tls_pki(void) {
    char dir[64];

    if (tls_dir[0]) return CHECK(!tls_dir_bad) ? tls_dir : NULL;
    snprintf(dir, sizeof dir, "/tmp/mcp-tls-test-%d", (int)getpid());
    tls_shell("/tmp", "mkdir -m 700 /tmp/mcp-tls-test-$PPID");
    memcpy(tls_dir, dir, sizeof tls_dir);
    atexit(tls_pki_remove);
    tls_dir_bad = !CHECK(tls_shell(dir, tls_pki_script) == 0);
    return tls_dir_bad ? NULL : tls_dir;
}

// A file of the directory, whole.
static str tls_pki_file(const char *name, char *to, size_t cap) {
    char path[128];
    FILE *f;
    size_t n = 0;

    snprintf(path, sizeof path, "%s/%s", tls_dir, name);
    if ((f = fopen(path, "rb"))) {
        n = fread(to, 1, cap, f);
        fclose(f);
    }
    CHECK(n > 0);
    return str_make(to, n);
}

static bool tls_handle(mcp *m, mem *a) {
    memset(m, 0, sizeof *m);
    if (a)
        m->mem = *a;
    else
        mem_init(&m->mem, NULL, NULL);
    secrets_init(&m->secrets, &m->mem);
    return os_adopt(&m->os, NULL) && loop_init(m);
}

static void tls_handle_free(mcp *m) {
    tls_free(m);
    loop_free(m);
    secrets_free(&m->secrets);
}

static void test_tls_der(void) {
    char text[4096];
    str der_text;
    tls_cert c;

    if (!tls_pki()) return;
    der_text = tls_pki_file("good.der", text, sizeof text);
    for (size_t n = 0; n <= der_text.len; n++) {
        char *p = exact(str_head(der_text, n));
        der d = {(const uint8_t *)p, n};
        CHECK(cert_read(d, &c) == (n == der_text.len));
        free(p);
    }
    // One byte wrong anywhere: any answer will do, if it reads no byte over.
    for (size_t i = 0; i < der_text.len; i++) {
        static const uint8_t flip[] = {0x01, 0x80, 0xFF, 0x7F};
        for (size_t k = 0; k < COUNT(flip); k++) {
            char *p = exact(der_text);
            der d = {(const uint8_t *)p, der_text.len};
            tls_x509 x;
            memset(&x, 0, sizeof x);
            x.host = "good.test";
            p[i] = (char)(p[i] ^ flip[k]);
            if (cert_read(d, &c)) {
                tls_judge(&x, &c);
                tls_note(&x, &c);
                CHECK(strlen(x.names) < TLS_TEXT);
            }
            free(p);
        }
    }
}

static void test_tls_dates(void) {
    static const struct {
        int tag;
        const char *in;
        int64_t want;   // -1: refused
        const char *text;
    } t[] = {
        {DER_UTC_TIME, "700101000000Z", 0, "1970-01-01"},
        {DER_UTC_TIME, "261201104419Z", 1796121859, "2026-12-01"},
        {DER_UTC_TIME, "491231235959Z", 2524607999, "2049-12-31"},
        {DER_UTC_TIME, "500101000000Z", -631152000, "1950-01-01"},
        {DER_LONG_TIME, "20500101000000Z", 2524608000, "2050-01-01"},
        {DER_LONG_TIME, "20000229120000Z", 951825600, "2000-02-29"},
        {DER_LONG_TIME, "99991231235959Z", 253402300799, "9999-12-31"},
        {DER_UTC_TIME, "2612011044Z", -1, ""},
        {DER_UTC_TIME, "261201104419+", -1, ""},
        {DER_UTC_TIME, "261301104419Z", -1, ""},
        {DER_UTC_TIME, "260001104419Z", -1, ""},
        {DER_UTC_TIME, "2612x1104419Z", -1, ""},
        {DER_LONG_TIME, "261201104419Z", -1, ""},
        {DER_OID, "261201104419Z", -1, ""},
        {DER_UTC_TIME, "", -1, ""},
    };

    for (size_t i = 0; i < COUNT(t); i++) {
        char *p = exact(str_of(t[i].in)), text[11] = "";
        der d = {(const uint8_t *)p, strlen(t[i].in)};
        int64_t got = -1;
        bool ok = der_time(t[i].tag, d, &got, text);
        CHECK_INT(ok, t[i].text[0] != 0);
        if (ok) CHECK_INT(got, t[i].want);
        if (ok) CHECK_STR(str_of(text), str_of(t[i].text));
        free(p);
    }
}

static void test_tls_names(void) {
    static const struct {
        const char *host, *name;
        bool fits;
    } t[] = {
        {"good.test", "good.test", true},
        {"GOOD.test", "good.TEST", true},
        {"good.test", "good.test.", false},
        {"good.test", "ood.test", false},
        {"a.wild.test", "*.wild.test", true},
        {"A.Wild.Test", "*.wIld.teSt", true},
        {"a.b.wild.test", "*.wild.test", false},
        {"wild.test", "*.wild.test", false},
        {".wild.test", "*.wild.test", false},
        {"good.test", "*.test", false},   // over all of a top-level domain
        {"test", "*.", false},
        {"good.test", "*", false},
        {"good.test", "g*.test", false},  // a whole label or nothing
        {"a.wild.test", "a.*.test", false},
        {"a.wild.test", "*.*.test", false},
        {"good.test", "", false},
        {"good.test", "good.test\0.evil", true},  // ends at its NUL here
    };

    for (size_t i = 0; i < COUNT(t); i++)
        if (tls_name_fits(str_of(t[i].host), str_of(t[i].name)) != t[i].fits)
            CHECK_STR(str_of(t[i].name), str_of(t[i].host));
    CHECK(tls_name_fits(S("good.test"), S("good.test")));
    CHECK(!tls_name_fits(S("good.test"), S("good.test\0.evil")));
    CHECK(!tls_name_fits(S("good.test\0"), S("good.test")));
}

// The message names what the certificate says; none of it may harm.
static void test_tls_untrusted_words(void) {
    char out[TLS_TEXT], dn[] = "\x30\x19\x31\x17\x30\x15\x06\x03\x55\x04\x03"
                               "\x0C\x0E" "Ev\x1B[31m\nil\xE2\x80\xAEx";
    der d = {(const uint8_t *)dn, sizeof dn - 1};
    char list[TLS_TEXT] = "", name[TLS_TEXT];

    tls_dn(out, d);
    CHECK(strstr(out, "Ev") && !strchr(out, '\x1B') && !strchr(out, '\n'));
    CHECK(!strstr(out, "\xE2\x80\xAE"));
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = 0;
    tls_list(list, "one.test");
    tls_list(list, name);  // too long: left out
    CHECK_STR(str_of(list), S("one.test"));
    tls_list(list, "two.test");
    CHECK_STR(str_of(list), S("one.test, two.test"));
}

static uint32_t tls_bundle(str pem, br_x509_trust_anchor *last) {
    struct tls_shared t;
    mem a;
    uint32_t n;

    mem_init(&a, NULL, NULL);
    memset(&t, 0, sizeof t);
    buf_init(&t.pem, &a, LIMIT_BUNDLE);
    buf_add(&t.pem, pem);
    CHECK_INT(anchors_read(&a, &t), MCP_OK);
    n = t.n;
    if (last && n) {
        *last = t.anchors[n - 1];
        last->dn.data = NULL;
    }
    anchors_drop(&a, &t);
    return n;
}

static void test_tls_bundle(void) {
    static const char begin[] = "-----BEGIN CERTIFICATE-----\n";
    br_x509_trust_anchor ta;
    char ca[4096], leaf[4096], all[16384];
    str c, l;
    int n;

    if (!tls_pki()) return;
    c = tls_pki_file("ca.pem", ca, sizeof ca);
    l = tls_pki_file("good.pem", leaf, sizeof leaf);
    CHECK_INT(tls_bundle(c, &ta), 1);
    CHECK_INT(ta.flags, BR_X509_TA_CA);
    CHECK_INT(ta.pkey.key_type, BR_KEYTYPE_EC);
    CHECK_INT(ta.pkey.key.ec.qlen, 65);
    CHECK_INT(tls_bundle(l, NULL), 0);  // no CA
    CHECK_INT(tls_bundle(S(""), NULL), 0);
    CHECK_INT(tls_bundle(S("no PEM at all\n"), NULL), 0);
    CHECK_INT(tls_bundle(str_of(begin), NULL), 0);
    // Twice the same, a leaf, comments, another object, rubbish inside one.
    n = snprintf(all, sizeof all,
                 "# ours\n%.*s%.*snoise -----END\n%.*s-----BEGIN X-----\n"
                 "AAAA\n-----END X-----\n%s!!!!\n%.*s",
                 MCP_ARG(c), MCP_ARG(l), MCP_ARG(c), begin, MCP_ARG(c));
    CHECK_INT(tls_bundle(str_make(all, (size_t)n), NULL), 3);
    // Every truncation: one anchor only once its last byte of DER is there.
    for (size_t i = 0; i <= c.len; i++) {
        uint32_t k = tls_bundle(str_head(c, i), NULL);
        CHECK(k == (i + 36 > c.len) || (k <= 1 && i + 36 > c.len));
    }
    // CRLF, one long line, and blanks change nothing.
    n = 0;
    for (size_t i = 0; i < c.len; i++) {
        if (c.ptr[i] == '\n') all[n++] = '\r';
        all[n++] = c.ptr[i];
        if (i % 7 == 0 && i > 30 && i + 40 < c.len) all[n++] = ' ';
    }
    CHECK_INT(tls_bundle(str_make(all, (size_t)n), NULL), 1);
}

// A platform whose files are two: "/one" and what is at `place`.
typedef struct tls_disk {
    const char *place;
    str text;
    const char *cert_file;
    os_result missing;
} tls_disk;

static os_result tls_disk_read(os *o, const char *path, size_t max, buf *out) {
    const tls_disk *d = o->user;
    (void)max;
    if (strcmp(path, d->place)) return d->missing;
    buf_add(out, d->text);
    return out->err ? OS_NO_MEMORY : OS_OK;
}

static const char *tls_disk_env(os *o, const char *name) {
    const tls_disk *d = o->user;
    return strcmp(name, "SSL_CERT_FILE") ? NULL : d->cert_file;
}

static void test_tls_where_anchors_are(void) {
    char ca[4096];
    const str pem = tls_pki() ? tls_pki_file("ca.pem", ca, sizeof ca) : S("");
    const struct {
        const char *option, *env, *place;
        str text;
        os_result missing;
        const char *words;   // NULL: found
    } t[] = {
        {"/one", "/two", "/one", pem, OS_ABSENT, NULL},
        {"/one", "/two", "/two", pem, OS_ABSENT,
         "cannot read CA certificates: /one does not exist (option ca_file)"},
        {"/one", NULL, "", pem, OS_DENIED,
         "cannot read CA certificates: /one may not be read (option ca_file)"},
        {"/one", NULL, "/one", S("x"), OS_ABSENT,
         "/one holds no usable CA certificate in PEM form (option ca_file)"},
        {NULL, "/two", "/two", pem, OS_ABSENT, NULL},
        {"", "/two", "/two", pem, OS_ABSENT, NULL},
        {NULL, "/two", "", pem, OS_TOO_BIG,
         "cannot read CA certificates: /two is too large or no file "
         "(SSL_CERT_FILE)"},
        {NULL, "", "/etc/ssl/cert.pem", pem, OS_ABSENT, NULL},
        {NULL, NULL, "/etc/ssl/certs/ca-certificates.crt", pem, OS_ABSENT,
         NULL},
        {NULL, NULL, "/etc/ssl/cert.pem", S("x"), OS_ABSENT,
         "this system has no file of trusted CA certificates in a usual "
         "place; name one in SSL_CERT_FILE"},
    };

    for (size_t i = 0; i < COUNT(t); i++) {
        tls_disk disk = {t[i].place, t[i].text, t[i].env, t[i].missing};
        mcp m;
        diag d;
        if (!CHECK(tls_handle(&m, NULL))) return;
        diag_init(&d, &m.mem, NULL);
        m.os.user = &disk;
        m.os.file_read = tls_disk_read;
        m.os.env = tls_disk_env;
        m.opt.ca_file = t[i].option;
        CHECK_INT(tls_share(&m, &d),
                  t[i].words ? MCP_CONNECTION_FAILED : MCP_OK);
        CHECK_STR(buf_str(&d.detail), str_of(t[i].words));
        CHECK((m.tls != NULL) == !t[i].words);
        diag_free(&d);
        tls_handle_free(&m);
    }
}

// A stream that is always busy.
static ptrdiff_t tls_mute_read(mcp *m, io *s, void *to, size_t n) {
    (void)m, (void)s, (void)to, (void)n;
    return IO_AGAIN;
}

static ptrdiff_t tls_mute_write(mcp *m, io *s, const void *from, size_t n) {
    (void)m, (void)s, (void)from, (void)n;
    return IO_AGAIN;
}

static void tls_mute_want(mcp *m, io *s, bool reading, bool writing) {
    (void)m, (void)s, (void)reading, (void)writing;
}

static void tls_mute_hot(mcp *m, io *s, bool on) {
    (void)m, (void)s, (void)on;
}

static void tls_mute_close(mcp *m, io *s) {
    mem_free(&m->mem, s, sizeof *s);
}

static mcp_code tls_torture_body(mem *a) {
    static const io_class mute = {tls_mute_read, tls_mute_write, tls_mute_want,
                                  tls_mute_hot, tls_mute_close};
    char path[128], c;
    mcp_code rc = MCP_OUT_OF_MEMORY;
    io *plain, *s;
    mcp m;
    diag d;

    snprintf(path, sizeof path, "%s/bundle.pem", tls_dir);
    if (!tls_handle(&m, a)) return rc;
    diag_init(&d, &m.mem, NULL);
    m.opt.ca_file = path;
    if ((plain = mem_new(&m.mem, sizeof *plain))) {
        plain->is = &mute;
        s = tls_open(&m, plain, "good.test", 443, NULL, NULL, &d);
        rc = s ? MCP_OK : d.code;
        if (s) CHECK_INT(io_write(&m, s, "x", 1), IO_AGAIN);
        if (s) CHECK_INT(io_read(&m, s, &c, 1), IO_AGAIN);
        if (s) io_want(&m, s, true, true);
        io_close(&m, s);
    }
    diag_free(&d);
    tls_handle_free(&m);
    return rc;
}

static void test_tls_memory(void) {
    if (tls_pki()) torture(tls_torture_body);
}

//-----------------------------------------------------------------------------
// Real peers

typedef struct tls_peer {
    int pid;
    uint16_t port;
} tls_peer;

// Start openssl s_server with these words on a port that it tells.
static bool tls_peer_start(tls_peer *p, const char *words) {
    char line[200], script[400], *at;
    size_t n = 0;
    int fd[2];

    memset(p, 0, sizeof *p);
    if (!tls_pki() || !CHECK(pipe(fd) == 0)) return false;
    snprintf(script, sizeof script,
             "exec openssl s_server -accept 127.0.0.1:0 -naccept 60 %s",
             words);
    p->pid = fork();
    if (p->pid == 0) {
        int null = open("/dev/null", O_RDWR);
        alarm(60);
        if (null < 0 || chdir(tls_dir)) _exit(126);
        dup2(null, 0);
        dup2(fd[1], 1);
        dup2(null, 2);
        close(fd[0]);
        close(fd[1]);
        execl("/bin/sh", "sh", "-c", script, (char *)NULL);
        _exit(127);
    }
    close(fd[1]);
    while (n + 1 < sizeof line && read(fd[0], line + n, 1) == 1) {
        if (line[n++] != '\n') continue;
        line[n] = 0;
        n = 0;
        if (strncmp(line, "ACCEPT ", 7) || !(at = strrchr(line, ':'))) continue;
        p->port = (uint16_t)strtol(at + 1, NULL, 10);
        break;
    }
    // The pipe stays open in the server alone: what it prints is lost.
    fcntl(fd[0], F_SETFL, O_NONBLOCK);
    close(fd[0]);
    return CHECK(p->port != 0);
}

static void tls_peer_stop(tls_peer *p) {
    int status;
    if (p->pid <= 0) return;
    kill(p->pid, SIGKILL);
    waitpid(p->pid, &status, 0);
    p->pid = 0;
}

// What a caller of section 10 does, as a job.
typedef struct tls_client {
    job job;
    io *io;
    str send;
    size_t sent, max_read;
    buf got;
    ptrdiff_t end;     // 0: still open
    bool stop_reading;
} tls_client;

static void tls_client_step(mcp *m, job *j) {
    tls_client *c = (tls_client *)(void *)j;
    char in[5000];
    ptrdiff_t n;

    while (!c->end && c->sent < c->send.len) {
        n = io_write(m, c->io, c->send.ptr + c->sent, c->send.len - c->sent);
        if (n == IO_AGAIN) break;
        if (n < 0) break;  // what it said last is still to be read
        c->sent += (size_t)n;
    }
    while (!c->end) {
        n = io_read(m, c->io, in, c->max_read);
        if (n == IO_AGAIN) break;
        if (n < 0) c->end = n;
        if (n > 0) buf_add(&c->got, str_make(in, (size_t)n));
    }
    if (!c->end) io_want(m, c->io, true, c->sent < c->send.len);
}

static io *tls_connect(mcp *m, uint16_t port, job *owner) {
    os_addr a = {4, {127, 0, 0, 1}, 0, 0};
    struct pollfd p = {-1, POLLOUT, 0};
    char why[100];

    a.port = port;
    if (!CHECK(m->os.connect(&m->os, &a, &p.fd) == OS_OK)) return NULL;
    poll(&p, 1, 5000);
    CHECK_INT(m->os.connected(&m->os, p.fd, why, sizeof why), OS_OK);
    return io_new_fds(m, p.fd, p.fd, true, owner);
}

// One exchange with a peer on 127.0.0.1; the answer in c->got, d says why not.
static ptrdiff_t tls_talk(mcp *m, tls_client *c, const tls_peer *p,
                          const char *host, str send, diag *d) {
    size_t most = c->max_read ? c->max_read : sizeof(char[5000]);
    int64_t end = m->os.now_ms(&m->os) + 20000;
    os_addr ip;
    bool literal = addr_parse(host, &ip);
    io *plain;

    memset(c, 0, sizeof *c);
    buf_init(&c->got, &m->mem, 64 << 20);
    c->send = send;
    c->max_read = most;
    diag_clear(d);
    if (!CHECK(job_init(m, &c->job, tls_client_step))) return IO_FAIL;
    plain = tls_connect(m, p->port, &c->job);
    if (!plain) return IO_FAIL;
    c->io = tls_open(m, plain, host, p->port, literal ? &ip : NULL, &c->job,
                     d);
    if (!c->io) return c->end = IO_FAIL;
    io_hot(m, c->io, true);
    job_wake(m, &c->job);
    while (!c->end && m->os.now_ms(&m->os) < end)
        loop_turn(m, m->os.now_ms(&m->os) + 1000);
    if (c->end == IO_FAIL) tls_why(c->io, d);
    return c->end;
}

static void tls_client_free(mcp *m, tls_client *c) {
    io_close(m, c->io);
    job_end(m, &c->job);
    buf_free(&c->got);
}

static int64_t tls_later_by;  // added to the wall clock, in days

static int64_t tls_later(os *o) {
    (void)o;
    return (int64_t)time(NULL) + tls_later_by * DAY_S;
}

static bool tls_handle_with(mcp *m, diag *d, const char *bundle) {
    static char path[128];
    if (!CHECK(tls_handle(m, NULL))) return false;
    diag_init(d, &m->mem, NULL);
    snprintf(path, sizeof path, "%s/%s", tls_dir, bundle);
    m->opt.ca_file = path;
    m->os.unix_s = tls_later;
    tls_later_by = 0;
    return true;
}

#define TLS_GET S("GET / HTTP/1.0\r\n\r\n")
#define TLS_WWW "-tls1_2 -www "
#define TLS_GOOD TLS_WWW "-cert good.pem -key good.key"

typedef struct tls_case {
    const char *host, *words;   // NULL: it works; else how the detail goes on
    int64_t days;               // the clock put forward
} tls_case;

static void tls_cases(const char *words, const tls_case *t, size_t n) {
    tls_peer p;

    if (!tls_peer_start(&p, words)) return;
    for (size_t i = 0; i < n; i++) {
        tls_client c = {0};
        mcp m;
        diag d;
        if (!tls_handle_with(&m, &d, "bundle.pem")) break;
        tls_later_by = t[i].days;
        tls_talk(&m, &c, &p, t[i].host, TLS_GET, &d);
        if (t[i].words) {
            CHECK_INT(c.end, IO_FAIL);
            CHECK_INT(d.code, MCP_CONNECTION_FAILED);
            CHECK_STR(str_head(buf_str(&d.detail), strlen(t[i].words)),
                      str_of(t[i].words));
            CHECK_INT(c.got.len, 0);
        } else {
            CHECK_INT(c.end, IO_END);
            CHECK(str_starts(buf_str(&c.got), S("HTTP/1.0 200")));
            if (c.end == IO_FAIL) CHECK_STR(buf_str(&d.detail), S("none"));
        }
        tls_client_free(&m, &c);
        diag_free(&d);
        tls_handle_free(&m);
    }
    tls_peer_stop(&p);
}

#define TLS_CASES(words, ...)                                                \
    do {                                                                      \
        static const tls_case t[] = {__VA_ARGS__};                            \
        tls_cases(words, t, COUNT(t));                                        \
    } while (0)

static void test_tls_host_names(void) {
    TLS_CASES(TLS_GOOD, {"good.test", NULL, 0}, {"GOOD.test.", NULL, 0},
              {"localhost", NULL, 0}, {"x.wild.test", NULL, 0},
              {"127.0.0.1", NULL, 0}, {"::1", NULL, 0},
              {"other.test",
               "TLS with other.test: its certificate is not for this host but for "
               "good.test, *.wild.test, *.test, localhost, 127.0.0.1, "
               "0:0:0:0:0:0:0:1", 0},
              {"a.b.wild.test", "TLS with a.b.wild.test: its certificate is not", 0},
              {"127.0.0.2", "TLS with 127.0.0.2: its certificate is not for", 0},
              {"::2", "TLS with ::2: its certificate is not for this host", 0});
    TLS_CASES(TLS_WWW "-cert cn.pem -key cn.key",
              {"cn.test",
               "TLS with cn.test: its certificate has no host names "
               "(subjectAltName)",
               0});
    TLS_CASES(TLS_WWW "-cert mail.pem -key mail.key",
              {"good.test", "TLS with good.test: its certificate has no host names",
               0});
}

static void test_tls_dates_of_chains(void) {
    TLS_CASES(TLS_WWW "-cert old.pem -key old.key", {"good.test", NULL, 0},
              {"good.test",
               "TLS with good.test: its certificate is expired since 20", 40},
              {"good.test",
               "TLS with good.test: its certificate is not valid before 20",
               -40});
    TLS_CASES(TLS_WWW "-cert below.pem -key below.key -cert_chain middle.pem",
              {"good.test", NULL, 0},
              {"good.test",
               "TLS with good.test: a CA in its chain is expired since 20",
               40});
}

static void test_tls_chains(void) {
    // The leaf twice and a stranger in between: forgiven.
    TLS_CASES(TLS_WWW "-cert below.pem -key below.key -cert_chain untidy.pem",
              {"good.test", NULL, 0});
    TLS_CASES(TLS_WWW "-cert big.pem -key big.key",
              {"n0001.good.test", "TLS with n0001.good.test: its certificate is "
               "larger than 16 KiB", 0});
    TLS_CASES(TLS_WWW "-cert below.pem -key below.key",
              {"good.test",
               "TLS with good.test: its certificate has the unknown issuer "
               "middle.test", 0});
    TLS_CASES(TLS_WWW "-cert stranger.pem -key stranger.key",
              {"good.test", "TLS with good.test: its certificate has the unknown "
               "issuer Far Root", 0});
    TLS_CASES(TLS_WWW "-cert self.pem -key self.key",
              {"self.test",
               "TLS with self.test: its certificate is self-signed by the "
               "untrusted self.test", 0});
    TLS_CASES(TLS_WWW "-cert impostor.pem -key impostor.key",
              {"good.test",
               "TLS with good.test: its certificate has a false signature of "
               "the trusted Test CA", 0});
    TLS_CASES(TLS_WWW "-cert noca.pem -key noca.key "
              "-cert_chain good.pem",
              {"good.test", "TLS with good.test: a certificate was issued by "
               "one that is no CA", 0});
    TLS_CASES(TLS_WWW "-cert odd.pem -key odd.key",
              {"good.test", "TLS with good.test: a certificate has a critical "
               "extension not supported here", 0});
}

static void test_tls_usage(void) {
    TLS_CASES(TLS_WWW "-cert client.pem -key client.key",
              {"good.test", "TLS with good.test: its certificate is not for "
               "servers", 0});
    TLS_CASES(TLS_WWW "-cert both.pem -key both.key", {"good.test", NULL, 0});
    TLS_CASES(TLS_WWW "-cert any.pem -key any.key", {"good.test", NULL, 0});
}

static void test_tls_keys(void) {
    TLS_CASES(TLS_WWW "-cert rsa.pem -key rsa.key", {"good.test", NULL, 0});
    TLS_CASES(TLS_WWW "-cert mixed.pem -key mixed.key",
              {"good.test", NULL, 0});
    TLS_CASES(TLS_WWW "-cert p384.pem -key p384.key", {"good.test", NULL, 0});
    TLS_CASES(TLS_WWW "-cipher ALL@SECLEVEL=0 -cert weak.pem -key weak.key",
              {"good.test", "TLS with good.test: a certificate has an RSA key "
               "under 2048 bits", 0});
}

static void test_tls_ciphers(void) {
    TLS_CASES(TLS_GOOD " -cipher ECDHE-ECDSA-AES128-GCM-SHA256",
              {"good.test", NULL, 0});
    TLS_CASES(TLS_GOOD " -cipher ECDHE-ECDSA-AES256-GCM-SHA384",
              {"good.test", NULL, 0});
    TLS_CASES(TLS_GOOD " -cipher ECDHE-ECDSA-CHACHA20-POLY1305",
              {"good.test", NULL, 0});
    TLS_CASES(TLS_GOOD " -named_curve P-384", {"good.test", NULL, 0});
    TLS_CASES(TLS_GOOD " -cipher ECDHE-ECDSA-AES128-SHA256",
              {"good.test", "TLS with good.test: it found no cipher in common, "
               "or wants a client certificate", 0});
}

static void test_tls_other_versions(void) {
    TLS_CASES("-tls1_3 -www -cert good.pem -key good.key",
              {"good.test", "TLS with good.test: it refuses TLS 1.2, most "
               "likely because it insists on TLS 1.3, which is not supported "
               "here", 0});
    TLS_CASES("-tls1_1 -www -cipher ALL@SECLEVEL=0 -cert good.pem "
              "-key good.key",
              {"good.test", "TLS with good.test: it ", 0});
    TLS_CASES("-www -cert good.pem -key good.key", {"good.test", NULL, 0});
}

// A server in this process that says something to any client, then ends.
static void tls_rude(str say, const char *words) {
    tls_client c = {0};
    tls_peer p = {0, 0};
    os_addr a = {4, {127, 0, 0, 1}, 0, 0};
    mcp m;
    diag d;
    os_fd fd;

    if (!tls_pki() || !tls_handle_with(&m, &d, "bundle.pem")) return;
    if (!CHECK(m.os.listen(&m.os, &a, &fd) == OS_OK)) return;
    p.pid = fork();
    if (p.pid == 0) {
        struct pollfd w = {fd, POLLIN, 0};
        char in[2000];
        os_fd k = -1;
        alarm(20);
        poll(&w, 1, 10000);
        if (m.os.accept(&m.os, fd, &k) != OS_OK) _exit(1);
        w.fd = k;
        poll(&w, 1, 10000);
        if (read(k, in, sizeof in) < 0) _exit(1);
        if (write(k, say.ptr, say.len) < 0) _exit(1);
        _exit(0);
    }
    p.port = a.port;
    close(fd);
    tls_talk(&m, &c, &p, "good.test", TLS_GET, &d);
    CHECK_INT(c.end, IO_FAIL);
    CHECK_INT(d.code, MCP_CONNECTION_FAILED);
    CHECK_STR(str_head(buf_str(&d.detail), strlen(words)), str_of(words));
    tls_client_free(&m, &c);
    diag_free(&d);
    tls_handle_free(&m);
    waitpid(p.pid, NULL, 0);
}

static void test_tls_no_tls_there(void) {
    tls_rude(S("HTTP/1.1 400 Bad Request\r\n\r\n"),
             "TLS with good.test: it speaks plain HTTP on this port");
    tls_rude(S("220 mail.test ESMTP\r\n"), 
             "TLS with good.test: it does not speak TLS on this port");
    tls_rude(S(""), "TLS with good.test: it closed the connection during the handshake");
    tls_rude(S("\x15\x03\x03"), "TLS with good.test: it closed");
    tls_rude(S("\x15\x03\x03\x00\x02\x02\x50"),
             "TLS with good.test: it refuses with alert 80");
    tls_rude(S("\x15\x03\x03\x00\x02\x02\x70"),
             "TLS with good.test: it does not know this host name");
    // A record of handshake that is no ServerHello, one that is too long.
    tls_rude(S("\x16\x03\x03\x00\x04\x0E\x00\x00\x00"),
             "TLS with good.test: BearSSL error 10");
    tls_rude(S("\x16\x03\x03\xFF\xFF\x0E\x00\x00\x00"),
             "TLS with good.test: BearSSL error 5");
}

static char tls_private_ca[128];

static const char *tls_private_env(os *o, const char *name) {
    (void)o;
    return strcmp(name, "SSL_CERT_FILE") ? NULL : tls_private_ca;
}

// A company's own CA, by the variable that every other client obeys.
static void test_tls_private_ca(void) {
    tls_client c = {0};
    tls_peer p;
    mcp m;
    diag d;

    if (!tls_peer_start(&p, TLS_GOOD)) return;
    if (!tls_handle_with(&m, &d, "bundle.pem")) return;
    snprintf(tls_private_ca, sizeof tls_private_ca, "%s", m.opt.ca_file);
    m.opt.ca_file = NULL;
    m.os.env = tls_private_env;
    CHECK_INT(tls_talk(&m, &c, &p, "good.test", TLS_GET, &d), IO_END);
    tls_client_free(&m, &c);
    diag_free(&d);
    tls_handle_free(&m);
    tls_peer_stop(&p);
}

static void test_tls_resumes(void) {
    tls_client c = {0};
    tls_peer p;
    mcp m;
    diag d;

    if (!tls_peer_start(&p, TLS_GOOD " -no_ticket")) return;
    if (!tls_handle_with(&m, &d, "bundle.pem")) return;
    for (int i = 0; i < 4; i++) {
        const tls *t;
        // A session is for one host: another name is checked in full.
        const char *host = i == 2 ? "x.wild.test" : "good.test";
        CHECK_INT(tls_talk(&m, &c, &p, host, TLS_GET, &d), IO_END);
        t = (const tls *)(const void *)c.io;
        if (c.io) CHECK_INT(t->x509.seen, i == 1 || i == 3 ? 0 : 1);
        tls_client_free(&m, &c);
    }
    // An old one is not offered.
    for (size_t i = 0; i < TLS_SESSIONS; i++) m.tls->sessions[i].until = 0;
    CHECK_INT(tls_talk(&m, &c, &p, "good.test", TLS_GET, &d), IO_END);
    CHECK_INT(((const tls *)(const void *)c.io)->x509.seen, 1);
    tls_client_free(&m, &c);
    // The table is bounded: old ones make room.
    for (int i = 0; i < TLS_SESSIONS + 2; i++) {
        tls fill;
        memset(&fill, 0, sizeof fill);
        snprintf(fill.host, sizeof fill.host, "h%d.test", i);
        tls_session_keep(&m, &fill);
    }
    CHECK(!tls_session_find(m.tls, "h0.test", 0));
    CHECK(tls_session_find(m.tls, "h33.test", 0) != NULL);
    diag_free(&d);
    tls_handle_free(&m);
    tls_peer_stop(&p);
}

static void test_tls_large_answer(void) {
    static const size_t reads[] = {5000, 1, 4096};
    tls_peer p;
    mcp m;
    diag d;

    if (!tls_peer_start(&p, "-tls1_2 -HTTP -cert good.pem -key good.key"))
        return;
    if (!tls_handle_with(&m, &d, "bundle.pem")) return;
    for (size_t i = 0; i < COUNT(reads); i++) {
        tls_client c = {0};
        c.max_read = reads[i];
        CHECK_INT(tls_talk(&m, &c, &p, "good.test",
                           reads[i] == 1 ? S("GET /good.pem HTTP/1.0\r\n\r\n")
                                         : S("GET /big.txt HTTP/1.0\r\n\r\n"),
                           &d), IO_END);
        if (reads[i] == 1)
            CHECK(str_find(buf_str(&c.got), S("BEGIN CERT")) != SIZE_MAX);
        else
            CHECK_INT(c.got.len, 3000000);
        tls_client_free(&m, &c);
    }
    diag_free(&d);
    tls_handle_free(&m);
    tls_peer_stop(&p);
}

// Lines sent come back reversed, while more are being sent: both directions at
// once, with full buffers on the way. Then the server is killed: no
// close_notify, and the end must not look like a good one.
static void test_tls_both_ways_and_cut(void) {
    enum { LINE = 1000, LINES = 2000 };
    static char text[LINE * LINES + 1];
    tls_client c = {0};
    tls_peer p;
    mcp m;
    diag d;
    int64_t end;

    for (size_t i = 0; i < LINE * LINES; i++)
        text[i] = i % LINE == LINE - 1 ? '\n' : (char)('a' + i / LINE % 26);
    if (!tls_peer_start(&p, "-tls1_2 -rev -cert good.pem -key good.key"))
        return;
    if (!tls_handle_with(&m, &d, "bundle.pem")) return;
    buf_init(&c.got, &m.mem, 64 << 20);
    c.max_read = 5000;
    c.send = str_make(text, LINE * LINES);
    CHECK(job_init(&m, &c.job, tls_client_step));
    c.io = tls_connect(&m, p.port, &c.job);
    c.io = tls_open(&m, c.io, "good.test", p.port, NULL, &c.job, &d);
    job_wake(&m, &c.job);
    end = m.os.now_ms(&m.os) + 30000;
    while (!c.end && c.got.len < LINE * LINES && m.os.now_ms(&m.os) < end)
        loop_turn(&m, m.os.now_ms(&m.os) + 1000);
    CHECK(str_eq(buf_str(&c.got), c.send));  // each line is a palindrome
    CHECK_INT(c.end, 0);
    tls_peer_stop(&p);
    while (!c.end && m.os.now_ms(&m.os) < end)
        loop_turn(&m, m.os.now_ms(&m.os) + 1000);
    CHECK_INT(c.end, IO_FAIL);
    tls_why(c.io, &d);
    CHECK_STR(buf_str(&d.detail), S("TLS with good.test: it ended without "
                                    "close_notify: data may be missing"));
    tls_client_free(&m, &c);
    diag_free(&d);
    tls_handle_free(&m);
}

static uint64_t tls_now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

// Is this root, sent as a chain of one, accepted by what was read of it? Its
// own signature tells whether name and key were taken out right.
static unsigned tls_root_verdict(const struct tls_shared *t, der root) {
    br_ssl_client_context ssl;
    br_x509_minimal_context x;
    const br_x509_class **c = &x.vtable;

    br_ssl_client_zero(&ssl);
    br_ssl_engine_set_default_rsavrfy(&ssl.eng);
    br_ssl_engine_set_default_ecdsa(&ssl.eng);
    br_x509_minimal_init(&x, &br_sha256_vtable, t->anchors, t->n);
    br_x509_minimal_set_hash(&x, br_sha1_ID, &br_sha1_vtable);
    br_x509_minimal_set_hash(&x, br_sha256_ID, &br_sha256_vtable);
    br_x509_minimal_set_hash(&x, br_sha384_ID, &br_sha384_vtable);
    br_x509_minimal_set_hash(&x, br_sha512_ID, &br_sha512_vtable);
    br_x509_minimal_set_rsa(&x, br_ssl_engine_get_rsavrfy(&ssl.eng));
    br_x509_minimal_set_ecdsa(&x, br_ssl_engine_get_ec(&ssl.eng),
                              br_ssl_engine_get_ecdsa(&ssl.eng));
    br_x509_minimal_set_time(&x, 739000, 0);  // 2023-04-27
    x.vtable->start_chain(c, NULL);
    x.vtable->start_cert(c, (uint32_t)root.len);
    x.vtable->append(c, root.ptr, root.len);
    x.vtable->end_cert(c);
    return x.vtable->end_chain(c);
}

// The system's own bundle, if there is one: all of it, and fast. The bound is
// wide, as this runs under sanitizers.
static void test_tls_system_bundle(void) {
    static const char path[] = "/etc/ssl/certs/ca-certificates.crt";
    static uint8_t one[65536];
    const str begin = S("-----BEGIN CERTIFICATE-----");
    uint64_t best = UINT64_MAX;
    uint32_t n = 0, good = 0;
    str rest;
    buf text;
    mcp m;
    diag d;

    if (access(path, R_OK)) return;
    for (int i = 0; i < 5; i++) {
        uint64_t at = tls_now_us();
        if (!CHECK(tls_handle(&m, NULL))) return;
        diag_init(&d, &m.mem, NULL);
        m.opt.ca_file = path;
        CHECK_INT(tls_share(&m, &d), MCP_OK);
        at = tls_now_us() - at;
        if (at < best) best = at;
        diag_free(&d);
        if (i < 4) tls_handle_free(&m);
    }
    CHECK(best < 100000);
    buf_init(&text, &m.mem, LIMIT_BUNDLE);
    CHECK_INT(m.os.file_read(&m.os, path, LIMIT_BUNDLE, &text), OS_OK);
    for (rest = buf_str(&text); m.tls; n++) {
        size_t at = str_find(rest, begin);
        der root = {one, 0};
        if (at == SIZE_MAX) break;
        rest = str_skip(rest, at + begin.len);
        root.len = pem_decode(one, str_head(rest, sizeof one));
        good += tls_root_verdict(m.tls, root) == 0;
    }
    CHECK(n > 50);
    CHECK_INT(m.tls->n, n);
    // A root may be newer than that date or have a signature of another kind.
    CHECK(good >= n - 5);
    buf_free(&text);
    tls_handle_free(&m);
}

// The host's own TLS: here it turns every byte by 13.
typedef struct tls_rot {
    mcp_io plain;
    bool closed;
    int wraps;
} tls_rot;

static ptrdiff_t tls_rot_read(void *user, void *to, size_t n) {
    tls_rot *r = user;
    ptrdiff_t k = r->plain.read(r->plain.user, to, n);
    for (ptrdiff_t i = 0; i < k; i++)
        ((unsigned char *)to)[i] = (unsigned char)(((char *)to)[i] - 13);
    return k;
}

static ptrdiff_t tls_rot_write(void *user, const void *from, size_t n) {
    tls_rot *r = user;
    char turned[100];
    if (n > sizeof turned) n = sizeof turned;
    for (size_t i = 0; i < n; i++)
        turned[i] = (char)(((const char *)from)[i] + 13);
    return r->plain.write(r->plain.user, turned, n);
}

static void tls_rot_close(void *user) {
    tls_rot *r = user;
    r->closed = true;
    r->plain.close(r->plain.user);
}

static int tls_rot_wrap(void *user, const char *host, const mcp_io *plain,
                        mcp_io *secure) {
    tls_rot *r = user;
    r->wraps++;
    if (strcmp(host, "good.test")) return -1;
    r->plain = *plain;
    secure->user = r;
    secure->read = tls_rot_read;
    secure->write = tls_rot_write;
    secure->close = tls_rot_close;
    return 0;
}

static void test_tls_of_the_host(void) {
    tls_rot rot = {{0}, false, 0};
    mcp_tls own = {&rot, tls_rot_wrap};
    tls_client c = {0};
    char seen[200] = "";
    int fd[2][2];
    mcp m;
    diag d;
    ssize_t n;

    if (!CHECK(tls_handle(&m, NULL))) return;
    if (!CHECK(pipe(fd[0]) == 0 && pipe(fd[1]) == 0)) return;
    fcntl(fd[0][0], F_SETFL, O_NONBLOCK);
    diag_init(&d, &m.mem, NULL);
    m.opt.tls = &own;
    CHECK(job_init(&m, &c.job, tls_client_step));
    c.io = tls_open(&m, io_new_fds(&m, fd[0][0], fd[1][1], false, &c.job),
                    "good.test", 443, NULL, &c.job, &d);
    if (!CHECK(c.io != NULL)) return;
    buf_init(&c.got, &m.mem, 1000);
    c.max_read = 100;
    c.send = S("hello");
    job_wake(&m, &c.job);
    loop_turn(&m, m.loop.now);
    n = read(fd[1][0], seen, sizeof seen);
    CHECK_STR(str_make(seen, n > 0 ? (size_t)n : 0), S("uryy|"));
    CHECK(write(fd[0][1], "uryy|", 5) == 5);
    loop_turn(&m, m.loop.now + 2000);
    CHECK_STR(buf_str(&c.got), S("hello"));
    close(fd[0][1]);
    loop_turn(&m, m.loop.now + 2000);
    CHECK_INT(c.end, IO_END);
    tls_client_free(&m, &c);
    CHECK(rot.closed);
    close(fd[1][0]);
    // It may refuse; then nothing is left open.
    CHECK(pipe(fd[0]) == 0);
    CHECK(!tls_open(&m, io_new_fds(&m, fd[0][0], fd[0][1], false, NULL),
                    "evil.test", 443, NULL, NULL, &d));
    CHECK_STR(buf_str(&d.detail), S("the program's own TLS refuses evil.test"));
    CHECK(fcntl(fd[0][0], F_GETFD) < 0 && fcntl(fd[0][1], F_GETFD) < 0);
    CHECK(!m.tls);  // no bundle was needed
    diag_free(&d);
    tls_handle_free(&m);
}

#elif USE_HTTP

static void test_tls_not_built(void) {
    mcp m;
    diag d;
    os_fd fd[2];

    memset(&m, 0, sizeof m);
    mem_init(&m.mem, NULL, NULL);
    CHECK(os_adopt(&m.os, NULL) && loop_init(&m));
    CHECK(m.os.wake_open(&m.os, fd));  // any two descriptors will do
    diag_init(&d, &m.mem, NULL);
    CHECK(!tls_open(&m, io_new_fds(&m, fd[0], fd[1], false, NULL), "a.test",
                    443, NULL, NULL, &d));
    CHECK_INT(d.code, MCP_NOT_BUILT);
    CHECK_STR(buf_str(&d.detail), S("TLS, which https://a.test needs"));
    CHECK(m.os.read(&m.os, fd[0], &d, 0) == IO_FAIL);  // both are closed
    diag_free(&d);
    tls_free(&m);
    loop_free(&m);
}

#else

static void test_tls_not_built(void) {
    mcp m;
    memset(&m, 0, sizeof m);
    tls_free(&m);
    CHECK(!m.tls);
}

#endif

static const test tests_tls[] = {
#if USE_TLS
    {"tls.der", test_tls_der},
    {"tls.dates", test_tls_dates},
    {"tls.names", test_tls_names},
    {"tls.untrusted_words", test_tls_untrusted_words},
    {"tls.bundle", test_tls_bundle},
    {"tls.where_anchors_are", test_tls_where_anchors_are},
    {"tls.memory", test_tls_memory},
    {"tls.host_names", test_tls_host_names},
    {"tls.dates_of_chains", test_tls_dates_of_chains},
    {"tls.chains", test_tls_chains},
    {"tls.usage", test_tls_usage},
    {"tls.keys", test_tls_keys},
    {"tls.ciphers", test_tls_ciphers},
    {"tls.other_versions", test_tls_other_versions},
    {"tls.no_tls_there", test_tls_no_tls_there},
    {"fr.71", test_tls_private_ca},
    {"tls.resumes", test_tls_resumes},
    {"tls.large_answer", test_tls_large_answer},
    {"tls.both_ways_and_cut", test_tls_both_ways_and_cut},
    {"tls.system_bundle", test_tls_system_bundle},
    {"tls.of_the_host", test_tls_of_the_host},
#else
    {"tls.not_built", test_tls_not_built},
#endif
};
//=============================================================================
// MARK: - 11 Names
//
// The name server is a process of ours on loopback: the platform's entries for
// sockets are replaced by ones that lead port 53 of 127.0.0.N to its Nth
// socket. No test asks a real server.
//=============================================================================

#if USE_HTTP

#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static void test_names_addresses(void) {
    static const struct {
        const char *in;
        int family;       // 0: none
        const char *ip;   // hex
        uint32_t scope;
    } t[] = {
        {"127.0.0.1", 4, "7f000001", 0},
        {"255.255.255.255", 4, "ffffffff", 0},
        {"::1", 6, "00000000000000000000000000000001", 0},
        {"2001:db8::1", 6, "20010db8000000000000000000000001", 0},
        {"1:2:3:4:5:6:7:8", 6, "00010002000300040005000600070008", 0},
        {"::ffff:192.0.2.1", 6, "00000000000000000000ffffc0000201", 0},
        {"fe80::1%2", 6, "fe800000000000000000000000000001", 2},
        {"fe80::1%4294967295", 6, "fe800000000000000000000000000001",
         4294967295u},
        {"fe80::1%eth0", 0, "", 0},
        {"fe80::1%", 0, "", 0},
        {"127.0.0.1%1", 0, "", 0},
        {"127.1", 0, "", 0},
        {"0127.0.0.1", 0, "", 0},
        {"256.0.0.1", 0, "", 0},
        {"1.2.3.4.5", 0, "", 0},
        {"1.2.3.4 ", 0, "", 0},
        {"[::1]", 0, "", 0},
        {":::", 0, "", 0},
        {"", 0, "", 0},
        {"host", 0, "", 0},
    };

    for (size_t i = 0; i < COUNT(t); i++) {
        char hex[33] = "";
        os_addr a;
        bool ok = addr_parse(t[i].in, &a);
        CHECK_INT(ok ? a.family : 0, t[i].family);
        for (int k = 0; ok && k < (a.family == 4 ? 4 : 16); k++)
            snprintf(hex + 2 * k, 3, "%02x", a.ip[k]);
        CHECK_STR(str_of(hex), str_of(t[i].ip));
        if (ok) CHECK_INT(a.scope, t[i].scope);
    }
}

static void test_dns_names(void) {
    static const char l63[] =
        "abcdefghijklmnopqrstuvwxyz0123456789abcdefghijklmnopqrstuvwxyz0";
    uint8_t out[DNS_NAME];
    char text[300];
    static const char *const bad[] = {
        "",      ".",     "a..b",  ".a",   "-a.test", "a b.test", "a/b",
        "a\x1B", "a%1",   "127.1", "1.2.3", "0x7f.1", "a.\xC3\xA9",
    };

    CHECK_INT(dns_name_write(out, S("Mcp.Test")), 10);
    CHECK(memcmp(out, "\3mcp\4test", 10) == 0);
    CHECK_INT(dns_name_write(out, S("mcp.test.")), 10);
    CHECK_INT(dns_name_write(out, S("_x-1.y")), 8);
    CHECK_INT(dns_name_write(out, str_of(l63)), 65);
    for (size_t i = 0; i < COUNT(bad); i++)
        CHECK_INT(dns_name_write(out, str_of(bad[i])), 0);
    snprintf(text, sizeof text, "%sx", l63);
    CHECK_INT(dns_name_write(out, str_of(text)), 0);  // a label of 64
    snprintf(text, sizeof text, "%s.%s.%s.%.61s", l63, l63, l63, l63);
    CHECK_INT(dns_name_write(out, str_of(text)), 255);
    snprintf(text, sizeof text, "%s.%s.%s.%.62s", l63, l63, l63, l63);
    CHECK_INT(dns_name_write(out, str_of(text)), 0);
}

static void test_dns_pointers(void) {
    static const struct {
        const char *in;
        size_t n, at, len, end;   // len 0: malformed
    } t[] = {
        {"\0", 1, 0, 1, 1},
        {"\1a\0", 3, 0, 3, 3},
        {"\1a\0\1B\xC0\0", 7, 3, 5, 7},    // back to "a"
        {"\1a\xC0\0", 4, 0, 0, 0},         // to itself
        {"\xC0\0", 2, 0, 0, 0},
        {"\xC0\2\1a\0", 5, 0, 0, 0},       // forward
        {"\1a\xC0\5\0\xC0\0", 7, 5, 0, 0},  // back, then forward
        {"\1a\xC0\5\0\xC0\2", 7, 5, 0, 0},  // a loop of two
        {"\1a\0\xC0\0\xC0\3", 7, 5, 3, 7},  // pointer to pointer, both back
        {"\1a\0\xC0\0\xC0\3\xC0\5", 9, 7, 3, 9},
        {"\x40" "a\0", 3, 0, 0, 0},        // reserved label types
        {"\x80" "a\0", 3, 0, 0, 0},
        {"\2a", 2, 0, 0, 0},
        {"\1a", 2, 0, 0, 0},
        {"\1a\xC0", 3, 0, 0, 0},
        {"\1a\0\xC1\0", 5, 3, 0, 0},       // beyond the packet
        {"", 0, 0, 0, 0},
    };
    char chain[1024];
    uint8_t out[DNS_NAME];
    size_t at, n = 0;

    for (size_t i = 0; i < COUNT(t); i++) {
        char *p = exact(str_make(t[i].in, t[i].n));
        at = t[i].at;
        CHECK_INT(dns_name_read(str_make(p, t[i].n), &at, out), t[i].len);
        if (t[i].len) CHECK_INT(at, t[i].end);
        free(p);
    }
    // Labels that sum up to more than a name, each one legal.
    chain[n++] = 0;
    for (size_t before = 0; n < 250; before = n - 4) {
        memcpy(chain + n, "\1x\xC0", 3);
        chain[n + 3] = (char)before;
        n += 4;
    }
    at = n - 4;
    CHECK_INT(dns_name_read(str_make(chain, n), &at, out), n / 4 * 2 + 1);
    memset(chain, 0, sizeof chain);
    for (n = 0; n < 256; n += 2) chain[n] = 1, chain[n + 1] = 'x';
    at = 0;
    CHECK_INT(dns_name_read(str_make(chain, n + 1), &at, out), 0);
    at = 2;
    CHECK_INT(dns_name_read(str_make(chain, n + 1), &at, out), 255);
}

// A packet under construction.
typedef struct dns_pack {
    uint8_t p[2048];
    size_t n;
} dns_pack;

static void dns_put16(dns_pack *k, unsigned v) {
    k->p[k->n++] = (uint8_t)(v >> 8);
    k->p[k->n++] = (uint8_t)v;
}

static void dns_put_name(dns_pack *k, const char *name) {
    uint8_t wire[DNS_NAME];
    size_t n = dns_name_write(wire, str_of(name));
    memcpy(k->p + k->n, wire, n);
    k->n += n;
}

// The head of an answer to `q`, and its question.
static void dns_begin(dns_pack *k, const uint8_t *q, size_t n, unsigned flags) {
    memcpy(k->p, q, n);
    k->n = n;
    k->p[2] = (uint8_t)(flags >> 8);
    k->p[3] = (uint8_t)flags;
}

static void dns_record(dns_pack *k, const char *owner, unsigned type,
                       const void *data, size_t n) {
    k->p[7]++;
    dns_put_name(k, owner);
    dns_put16(k, type);
    dns_put16(k, 1);
    dns_put16(k, 0);
    dns_put16(k, 60);
    dns_put16(k, (unsigned)n);
    memcpy(k->p + k->n, data, n);
    k->n += n;
}

static void dns_cname(dns_pack *k, const char *owner, const char *to) {
    uint8_t wire[DNS_NAME];
    dns_record(k, owner, DNS_CNAME, wire, dns_name_write(wire, str_of(to)));
}

static void dns_question_of(dns_question *q, const char *name, unsigned type) {
    uint8_t wire[DNS_NAME];
    memset(q, 0, sizeof *q);
    q->type = (uint16_t)type;
    dns_ask(q, 0xBEEF, wire, dns_name_write(wire, str_of(name)));
}

static dns_result dns_judge(dns_question *q, const dns_pack *k) {
    char *p = exact(str_make((const char *)k->p, k->n));
    dns_result r = dns_answer(str_make(p, k->n), q);
    free(p);
    return r;
}

static void test_dns_answers(void) {
    static const uint8_t ip[4] = {192, 0, 2, 1}, six[16] = {0x20, 1, 0xD, 0xB8};
    dns_question q;
    dns_pack k;

    // The question is a whole packet of its own.
    dns_question_of(&q, "a.test", DNS_A);
    CHECK_INT(q.len, 12 + 8 + 4);
    CHECK_INT(dns_16(q.packet), q.len);
    CHECK(memcmp(q.packet + 2, "\xBE\xEF\1\0\0\1\0\0\0\0\0\0\1a\4test\0\0\1\0\1",
                 q.len) == 0);

    dns_begin(&k, q.packet + 2, q.len, 0x8180);
    CHECK_INT(dns_judge(&q, &k), DNS_EMPTY);
    dns_record(&k, "A.TEST", DNS_A, ip, 4);
    dns_record(&k, "a.test", DNS_AAAA, six, 16);      // not asked for
    dns_record(&k, "b.test", DNS_A, "\1\2\3\4", 4);   // somebody else's
    dns_record(&k, "a.test", DNS_A, "\1\2\3\4\5", 5);  // no address
    CHECK_INT(dns_judge(&q, &k), DNS_FOUND);
    CHECK_INT(q.n, 1);
    CHECK(q.found[0].family == 4 && memcmp(q.found[0].ip, ip, 4) == 0);
    // Cut anywhere it is no answer, and never a part of one.
    for (size_t n = 0; n < k.n; n++) {
        dns_pack cut = k;
        dns_result r;
        cut.n = n;
        r = dns_judge(&q, &cut);
        CHECK(r == DNS_FOREIGN || r == DNS_REFUSED);
        CHECK(r == DNS_FOREIGN || q.n == 0);
        q.n = 0;
    }
    for (size_t i = 0; i < k.n * 255; i++) {  // any byte, any value
        dns_pack odd = k;
        odd.p[i / 255] = (uint8_t)(odd.p[i / 255] + 1 + i % 255);
        dns_judge(&q, &odd);
        CHECK(q.n <= LIMIT_ADDRESSES);
    }
}

static void test_dns_foreign(void) {
    static const struct {
        size_t at;
        uint8_t to;
        dns_result want;
    } t[] = {
        {0, 0xBF, DNS_FOREIGN},    // id
        {1, 0x00, DNS_FOREIGN},
        {2, 0x01, DNS_FOREIGN},    // a query
        {2, 0x89, DNS_FOREIGN},    // another opcode
        {2, 0x83, DNS_TRUNCATED},
        {3, 0x83, DNS_ABSENT},
        {3, 0x82, DNS_REFUSED},    // SERVFAIL
        {3, 0x85, DNS_REFUSED},
        {4, 1, DNS_FOREIGN},       // 257 questions
        {5, 0, DNS_FOREIGN},
        {5, 2, DNS_FOREIGN},
        {13, 'b', DNS_FOREIGN},    // another name
        {13, 'A', DNS_FOUND},      // in capitals
        {21, DNS_AAAA, DNS_FOREIGN},   // another type
        {23, 3, DNS_FOREIGN},      // another class
        {35, 3, DNS_EMPTY},        // of the record
        {7, 2, DNS_REFUSED},       // fewer records than told
    };
    dns_question q;
    dns_pack k;

    for (size_t i = 0; i < COUNT(t); i++) {
        dns_question_of(&q, "a.test", DNS_A);
        dns_begin(&k, q.packet + 2, q.len, 0x8180);
        dns_record(&k, "a.test", DNS_A, "\1\2\3\4", 4);
        k.p[t[i].at] = t[i].to;
        CHECK_INT(dns_judge(&q, &k), t[i].want);
        CHECK_INT(q.n, t[i].want == DNS_FOUND);
    }
}

static void test_dns_chains(void) {
    dns_question q;
    dns_pack k;
    char from[20], to[20];

    // In any order.
    dns_question_of(&q, "a.test", DNS_A);
    dns_begin(&k, q.packet + 2, q.len, 0x8180);
    dns_record(&k, "c.test", DNS_A, "\1\2\3\4", 4);
    dns_cname(&k, "b.test", "c.test");
    dns_cname(&k, "a.test", "b.test");
    CHECK_INT(dns_judge(&q, &k), DNS_FOUND);
    CHECK_INT(q.n, 1);
    // A loop ends, and so does a chain of any length.
    dns_begin(&k, q.packet + 2, q.len, 0x8180);
    dns_cname(&k, "a.test", "b.test");
    dns_cname(&k, "b.test", "a.test");
    CHECK_INT(dns_judge(&q, &k), DNS_EMPTY);
    for (int len = DNS_CHAIN - 2; len <= DNS_CHAIN; len++) {
        dns_begin(&k, q.packet + 2, q.len, 0x8180);
        for (int i = 0; i < len; i++) {
            snprintf(from, sizeof from, i ? "n%d.test" : "a.test", i);
            snprintf(to, sizeof to, "n%d.test", i + 1);
            dns_cname(&k, from, to);
        }
        dns_record(&k, to, DNS_A, "\1\2\3\4", 4);
        CHECK_INT(dns_judge(&q, &k),
                  len < DNS_CHAIN ? DNS_FOUND : DNS_EMPTY);
    }
    // More addresses than we keep.
    for (int n = LIMIT_ADDRESSES - 1; n <= LIMIT_ADDRESSES + 1; n++) {
        dns_begin(&k, q.packet + 2, q.len, 0x8180);
        for (int i = 0; i < n; i++)
            dns_record(&k, "a.test", DNS_A, "\1\2\3\4", 4);
        CHECK_INT(dns_judge(&q, &k), DNS_FOUND);
        CHECK_INT(q.n, n < LIMIT_ADDRESSES ? n : LIMIT_ADDRESSES);
    }
    // A name in a name: the dot inside a label is not one between two.
    dns_begin(&k, q.packet + 2, q.len, 0x8180);
    dns_record(&k, "a-test", DNS_A, "\1\2\3\4", 4);
    memcpy(k.p + q.len, "\6a.test", 7);
    CHECK_INT(dns_judge(&q, &k), DNS_EMPTY);
}

static void test_names_hosts(void) {
    static const char file[] =
        "# comment\n"
        "127.0.0.1\tlocalhost\n"
        "192.0.2.7  box.test box  # and its alias\r\n"
        "\n"
        "   2001:db8::7 BOX other\n"
        "bad.address box\n"
        "10.0.0.1\n"
        "10.0.0.2 #box\n"
        "10.0.0.3 boxes\n"
        "192.0.2.8 box";
    os_addr a[4];

    CHECK_INT(hosts_find(str_of(file), S("box"), a, 4), 3);
    CHECK_INT(a[0].ip[3], 7);
    CHECK_INT(a[1].family, 6);
    CHECK_INT(a[2].ip[3], 8);
    CHECK_INT(hosts_find(str_of(file), S("box"), a, 2), 2);
    CHECK_INT(hosts_find(str_of(file), S("Box.Test"), a, 4), 1);
    CHECK_INT(hosts_find(str_of(file), S("ox"), a, 4), 0);
    CHECK_INT(hosts_find(S(""), S("box"), a, 4), 0);
    for (size_t n = 0; n < sizeof file; n++) {
        char *p = exact(str_make(file, n));
        CHECK(hosts_find(str_make(p, n), S("box"), a, 4) <= 3);
        free(p);
    }
}

static void test_names_resolv_conf(void) {
    static const char file[] =
        "; old\n"
        "domain first.test\n"
        "nameserver 192.0.2.53 # ours\n"
        "nameserver fe80::53%3\n"
        "nameserver none\n"
        "nameserver\n"
        "search a.test\tb.test  c d e f g h\n"
        "nameserver 127.0.0.53\n"
        "nameserver 127.0.0.54\n"
        "options ndots:3 timeout:2 attempts:4 rotate\n"
        "options ndots:x use-vc timeout:\n"
        "sortlist 1.2.3.4";
    dns_conf c;

    dns_conf_read(&c, str_of(file));
    CHECK_INT(c.servers, 3);
    CHECK_INT(c.server[0].ip[3], 53);
    CHECK_INT(c.server[0].port, 53);
    CHECK_INT(c.server[1].scope, 3);
    CHECK_INT(c.server[2].ip[3], 53);
    CHECK_INT(c.searches, 6);
    CHECK_STR(c.search[0], S("a.test"));
    CHECK_STR(c.search[5], S("f"));
    CHECK_INT(c.dots, 3);
    CHECK_INT(c.again, 2000);
    CHECK_INT(c.attempts, 4);
    dns_conf_read(&c, S("options ndots:99 timeout:99 attempts:99\n"));
    CHECK_INT(c.servers, 1);  // this machine
    CHECK_INT(c.server[0].ip[0], 127);
    CHECK_INT(c.dots, 15);
    CHECK_INT(c.again, 5000);
    CHECK_INT(c.attempts, 5);
    dns_conf_read(&c, S("options timeout:0 attempts:0 ndots:0"));
    CHECK_INT(c.again, TIME_DNS_AGAIN);
    CHECK_INT(c.attempts, 1);
    CHECK_INT(c.dots, 0);
    for (size_t n = 0; n < sizeof file; n++) {
        char *p = exact(str_make(file, n));
        dns_conf_read(&c, str_make(p, n));
        CHECK(c.servers >= 1 && c.servers <= 3);
        free(p);
    }
}

//-----------------------------------------------------------------------------
// A platform with files and name servers of its own

typedef struct names_world {
    os native;
    const char *hosts, *resolv;
    uint16_t port[4];        // of 127.0.0.N; 0: nobody
    int sockets;             // opened and not closed
    const char *script;      // in place of the system's program; NULL: none
    int spawned;
} names_world;

static os_result names_read(os *o, const char *path, size_t max, buf *out) {
    const names_world *w = o->user;
    const char *text = strcmp(path, "/etc/hosts") == 0         ? w->hosts
                       : strcmp(path, "/etc/resolv.conf") == 0 ? w->resolv
                                                               : NULL;
    (void)max;
    if (!text) return OS_ABSENT;
    buf_add(out, str_of(text));
    return out->err ? OS_NO_MEMORY : OS_OK;
}

static bool names_route(os *o, const os_addr *a, os_addr *to) {
    const names_world *w = o->user;
    unsigned n = a->ip[3] & 3;
    *to = *a;
    CHECK_INT(a->port, 53);
    to->ip[3] = 1;
    to->port = w->port[n];
    return to->port != 0;
}

static os_result names_datagram(os *o, const os_addr *a, os_fd *out) {
    names_world *w = o->user;
    os_addr to;
    os_result rc = names_route(o, a, &to)
                       ? w->native.datagram(&w->native, &to, out)
                       : OS_FAILED;
    w->sockets += rc == OS_OK;
    return rc;
}

static os_result names_connect(os *o, const os_addr *a, os_fd *out) {
    names_world *w = o->user;
    os_addr to;
    os_result rc = names_route(o, a, &to)
                       ? w->native.connect(&w->native, &to, out)
                       : OS_FAILED;
    w->sockets += rc == OS_OK;
    return rc;
}

static void names_close(os *o, os_fd fd) {
    names_world *w = o->user;
    w->sockets--;
    w->native.close(&w->native, fd);
}

static os_result names_can_run(os *o, const char *path) {
    const names_world *w = o->user;
    return w->script && strcmp(path, "/usr/bin/getent") == 0 ? OS_OK
                                                             : OS_ABSENT;
}

static os_result names_spawn(os *o, const os_spawn *what, os_child *out) {
    names_world *w = o->user;
    char sh[] = "sh", c[] = "-c", script[200];
    char *argv[6] = {sh, c, script, what->argv[0], what->argv[2], NULL};
    os_spawn mine = *what;
    os_result rc;

    CHECK_STR(str_of(what->argv[1]), S("ahosts"));
    CHECK(!what->argv[3]);
    snprintf(script, sizeof script, "%s", w->script);
    mine.path = "/bin/sh";
    mine.argv = argv;
    rc = w->native.spawn(&w->native, &mine, out);
    if (rc == OS_OK) w->sockets++, w->spawned++;
    return rc;
}

static bool names_handle(mcp *m, names_world *w, mem *a) {
    memset(m, 0, sizeof *m);
    if (a)
        m->mem = *a;
    else
        mem_init(&m->mem, NULL, NULL);
    secrets_init(&m->secrets, &m->mem);
    if (!os_adopt(&m->os, NULL) || !loop_init(m)) return false;
    w->native = m->os;
    m->os.user = w;
    m->os.file_read = names_read;
    m->os.datagram = names_datagram;
    m->os.connect = names_connect;
    m->os.can_run = names_can_run;
    m->os.spawn = names_spawn;
    m->os.close = names_close;
    w->sockets = w->spawned = 0;
    return true;
}

static void names_handle_free(mcp *m) {
    names_world *w = m->os.user;
    CHECK_INT(w->sockets, 0);
    m->os = w->native;
    loop_free(m);
    secrets_free(&m->secrets);
}

typedef struct names_owner {
    job job;
    int woken;
} names_owner;

static void names_woken(mcp *m, job *j) {
    (void)m;
    ((names_owner *)(void *)j)->woken++;
}

// Look a name up and write its addresses, or the detail's first line, to
// `out`. How long it took is returned.
static int64_t names_ask(mcp *m, const char *host, char *out, size_t cap) {
    int64_t start = m->os.now_ms(&m->os);
    names_owner owner;
    os_addr a[LIMIT_ADDRESSES];
    mcp_code rc = MCP_OUT_OF_MEMORY;
    lookup *l;
    size_t at = 0;
    diag d;
    int n = 0;

    out[0] = 0;
    loop_clock(m);
    diag_init(&d, &m->mem, NULL);
    owner.woken = 0;
    if (!CHECK(job_init(m, &owner.job, names_woken))) return 0;
    l = lookup_start(m, host, 80, &owner.job);
    while (l && (rc = lookup_take(l, a, COUNT(a), &n, &d)) == MCP_PENDING &&
           m->os.now_ms(&m->os) < start + 15000)
        loop_turn(m, m->os.now_ms(&m->os) + 1000);
    if (rc) snprintf(out, cap, "%s", buf_z(&d.detail));
    if (rc) CHECK_INT(rc, MCP_CONNECTION_FAILED);
    for (int i = 0; !rc && i < n; i++) {
        at += (size_t)snprintf(out + at, cap - at, "%s%d:%d.%d", i ? " " : "",
                               a[i].family, a[i].ip[0],
                               a[i].ip[a[i].family == 4 ? 3 : 15]);
        CHECK_INT(a[i].port, 80);
    }
    lookup_free(m, l);
    if (l) loop_turn(m, 0);
    CHECK_INT(owner.woken, l ? 1 : 0);
    job_end(m, &owner.job);
    diag_free(&d);
    return m->os.now_ms(&m->os) - start;
}

static void names_want(mcp *m, const char *host, const char *want) {
    char got[500];
    names_ask(m, host, got, sizeof got);
    CHECK_STR(str_of(got), str_of(want));
}

static void test_names_static(void) {
    static names_world w = {
        .hosts = "192.0.2.9 box localhost evil.localhost\n"
                 "2001:db8::9 box\n127.0.0.1 self\n::1 self\n"};
    char longest[400];
    mcp m;

    if (!CHECK(names_handle(&m, &w, NULL))) return;
    names_want(&m, "192.0.2.1", "4:192.1");
    names_want(&m, "::1", "6:0.1");
    names_want(&m, "fe80::1%1", "6:254.1");
    names_want(&m, "box", "4:192.9 6:32.9");
    names_want(&m, "BOX", "4:192.9 6:32.9");
    names_want(&m, "self", "4:127.1 6:0.1");  // as the file says
    names_want(&m, "-x", "not a host name: -x");
    names_want(&m, "fe80::1%eth0", "not a host name: fe80::1%eth0");
    names_want(&m, "a b", "not a host name: a b");
    names_want(&m, "127.1", "not a host name: 127.1");
    memset(longest, 'a', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    names_want(&m, longest, "not a host name: (too long)");
    names_want(&m, "", "not a host name: (too long)");
    names_handle_free(&m);
}

// Both loopbacks, IPv6 first and then the other: a server may listen on one.
static void test_names_localhost(void) {
    static names_world w = {.hosts = "192.0.2.9 localhost a.localhost\n"};
    mcp m;

    if (!CHECK(names_handle(&m, &w, NULL))) return;
    names_want(&m, "localhost", "6:0.1 4:127.1");
    names_want(&m, "LocalHost.", "6:0.1 4:127.1");
    names_want(&m, "a.localhost", "6:0.1 4:127.1");
    names_want(&m, "a.localhost.", "6:0.1 4:127.1");
    CHECK(!names_is_localhost(S("mylocalhost")));
    CHECK(!names_is_localhost(S("localhost.test")));
    CHECK(!names_is_localhost(S("ocalhost")));
    names_handle_free(&m);
}

static int names_own(void *user, const char *host, char (*out)[46], int cap) {
    int *asked = user;
    ++*asked;
    if (strcmp(host, "absent.test") == 0) return -1;
    if (strcmp(host, "odd.test") == 0) {
        memset(out[0], 'x', sizeof out[0]);
        return 1;
    }
    if (strcmp(host, "own.test") || cap < 2) return 0;
    snprintf(out[0], sizeof out[0], "192.0.2.33");
    snprintf(out[1], sizeof out[1], "2001:db8::33");
    return 2;
}

static void test_names_of_the_host(void) {
    static names_world w = {.hosts = "192.0.2.9 box own.test\n"};
    int asked = 0;
    mcp m;

    if (!CHECK(names_handle(&m, &w, NULL))) return;
    m.opt.resolve = names_own;
    m.opt.resolve_user = &asked;
    names_want(&m, "own.test", "4:192.33 6:32.51");
    names_want(&m, "absent.test", "name not found: absent.test");
    names_want(&m, "odd.test", "name not found: odd.test");
    names_want(&m, "box", "4:192.9");
    CHECK_INT(asked, 4);
    names_want(&m, "localhost", "6:0.1 4:127.1");  // nobody is asked
    names_want(&m, "192.0.2.1", "4:192.1");
    CHECK_INT(asked, 4);
    names_handle_free(&m);
}

static void test_names_candidates(void) {
    static const struct {
        const char *host, *conf, *want;
    } t[] = {
        {"www", "search a.test b.test\n", "www.a.test www.b.test www"},
        {"www.x", "search a.test b.test\n", "www.x www.x.a.test www.x.b.test"},
        {"www.", "search a.test\n", "www"},
        {"www.x", "search a.test\noptions ndots:2\n", "www.x.a.test www.x"},
        {"www", "", "www"},
        {"www", "search -bad a.test\n", "- www.a.test www"},
        {"www", "domain a.test\noptions ndots:0\n", "www www.a.test"},
    };

    for (size_t i = 0; i < COUNT(t); i++) {
        static lookup l;
        char got[200] = "";
        size_t at = 0;
        memset(&l, 0, sizeof l);
        snprintf(l.host, sizeof l.host, "%s", t[i].host);
        dns_conf_read(&l.conf, str_of(t[i].conf));
        for (int k = 0;; k++) {
            uint8_t name[DNS_NAME];
            bool end;
            size_t n = lookup_candidate(&l, k, name, &end), p = 0;
            if (end) break;
            if (k) got[at++] = ' ';
            if (!n) got[at++] = '-';
            while (n && name[p]) {
                if (p) got[at++] = '.';
                memcpy(got + at, name + p + 1, name[p]);
                at += name[p];
                p += 1u + name[p];
            }
        }
        CHECK_STR(str_make(got, at), str_of(t[i].want));
    }
}

//-----------------------------------------------------------------------------
// The name server

static bool names_asks(const uint8_t *q, const char *name) {
    uint8_t wire[DNS_NAME];
    size_t n = dns_name_write(wire, str_of(name));
    return memcmp(q + DNS_HEAD, wire, n) == 0;
}

// One answer by the name that is asked for; 0: silence.
static size_t names_reply(const uint8_t *q, size_t n, bool tcp, int which,
                          dns_pack *k) {
    static const uint8_t four[4] = {192, 0, 2, 1};
    static const uint8_t six[16] = {0x20, 1, 0x0D, 0xB8, [15] = 6};
    bool a = q[n - 3] == DNS_A;
    const char *who = "a.test";
    unsigned flags = 0x8180;

    if (names_asks(q, "gone.test") || names_asks(q, "www.b.test")) flags |= 3;
    if (names_asks(q, "fail.test") && !which) flags |= 2;
    if (names_asks(q, "big.test") && !tcp) flags |= 0x200;
    if (names_asks(q, "stuck.test") && !which) flags |= 0x200;
    if (names_asks(q, "dead.test") && !which) return 0;
    if (names_asks(q, "mute.test")) return 0;
    if (names_asks(q, "half.test") && !a) return 0;
    if (names_asks(q, "lone.test") && a) return 0;
    dns_begin(k, q, n, flags);
    if (flags != 0x8180 || names_asks(q, "none.test")) return k->n;
    if (names_asks(q, "alias.test")) dns_cname(k, "alias.test", "a.test");
    if (names_asks(q, "loop.test")) dns_cname(k, "loop.test", "loop.test");
    if (names_asks(q, "big.test")) who = "big.test";
    if (names_asks(q, "fail.test")) who = "fail.test";
    if (names_asks(q, "dead.test")) who = "dead.test";
    if (names_asks(q, "stuck.test")) who = "stuck.test";
    if (names_asks(q, "half.test")) who = "half.test";
    if (names_asks(q, "lone.test")) who = "lone.test";
    if (names_asks(q, "late.test")) who = "late.test";
    if (names_asks(q, "forged.test")) who = "forged.test";
    if (names_asks(q, "four.test")) who = "four.test";
    if (names_asks(q, "www.a.test")) who = "www.a.test";
    if (a)
        dns_record(k, who, DNS_A, four, 4);
    else if (!names_asks(q, "four.test"))
        dns_record(k, who, DNS_AAAA, six, 16);
    for (uint8_t i = 2; tcp && a && i < 22; i++) {
        uint8_t more[4] = {192, 0, 2, 0};
        more[3] = i;
        dns_record(k, who, DNS_A, more, 4);
    }
    return k->n;
}

static void names_serve_udp(int fd, int which) {
    struct sockaddr_in from;
    socklen_t len = sizeof from;
    uint8_t q[512];
    ssize_t got = recvfrom(fd, q, sizeof q, 0, (struct sockaddr *)&from, &len);
    dns_pack k;
    size_t n;

    if (got < DNS_HEAD) return;
    n = names_reply(q, (size_t)got, false, which, &k);
    if (!n) return;
    if (names_asks(q, "late.test")) poll(NULL, 0, 200);
    for (int i = names_asks(q, "forged.test") ? 0 : 3; i < 4; i++) {
        dns_pack out = k;
        if (i == 0) out.n = 0;                // an empty packet
        if (i == 1) out.p[1] ^= 1;            // another id
        if (i == 2) out.p[DNS_HEAD + 1] = 'F' + 1;   // another question
        if (i < 3 && n > 4) out.p[n - 1] = 66;       // and its own address
        sendto(fd, out.p, out.n, 0, (struct sockaddr *)&from, len);
    }
}

// The answer comes in pieces, as TCP may cut it.
static void names_serve_tcp(int listener_fd) {
    int fd = accept(listener_fd, NULL, NULL);
    uint8_t q[512], head[2];
    dns_pack k;
    size_t n = 0;
    ssize_t got;

    while (n < sizeof q && (got = read(fd, q + n, sizeof q - n)) > 0) {
        n += (size_t)got;
        if (n >= 2 && n == 2 + dns_16(q)) break;
    }
    if (n > 2 + DNS_HEAD && !names_asks(q + 2, "stuck.test")) {
        n = names_reply(q + 2, n - 2, true, 0, &k);
        head[0] = (uint8_t)(n >> 8);
        head[1] = (uint8_t)n;
        for (size_t i = 0; i < n + 2; i++) {
            size_t piece = i < 6 ? 1 : n + 2 - i;
            const uint8_t *from = i < 2 ? head + i : k.p + i - 2;
            if (write(fd, from, i < 2 ? 1 : piece) < 0) break;
            if (i >= 6) break;
            poll(NULL, 0, 2);
        }
    }
    close(fd);
}

static int names_bind(int type, uint16_t *port) {
    struct sockaddr_in a;
    socklen_t len = sizeof a;
    int fd = socket(AF_INET, type, 0);

    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_port = htons(*port);
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, (struct sockaddr *)&a, sizeof a)) {
        close(fd);
        return -1;
    }
    if (getsockname(fd, (struct sockaddr *)&a, &len)) return -1;
    *port = ntohs(a.sin_port);
    return fd;
}

// Servers at 127.0.0.1 (with TCP) and 127.0.0.2; nobody listens at 127.0.0.3.
static bool names_server_start(names_world *w, int *pid) {
    int udp[2] = {-1, -1}, tcp = -1, shut;
    uint16_t port = 0;

    for (int i = 0; i < 50 && tcp < 0; i++) {  // one number, free in both
        close(udp[0]);
        port = 0;
        udp[0] = names_bind(SOCK_DGRAM, &port);
        w->port[1] = port;
        tcp = names_bind(SOCK_STREAM, &port);
    }
    port = 0;
    udp[1] = names_bind(SOCK_DGRAM, &port);
    w->port[2] = port;
    port = 0;
    shut = names_bind(SOCK_DGRAM, &port);
    w->port[3] = port;
    close(shut);
    if (!CHECK(tcp >= 0 && udp[1] >= 0 && listen(tcp, 5) == 0)) return false;
    *pid = fork();
    if (*pid == 0) {
        struct pollfd p[3] = {{udp[0], POLLIN, 0},
                              {udp[1], POLLIN, 0},
                              {tcp, POLLIN, 0}};
        signal(SIGPIPE, SIG_IGN);
        alarm(60);
        while (poll(p, 3, -1) > 0) {
            if (p[0].revents) names_serve_udp(udp[0], 0);
            if (p[1].revents) names_serve_udp(udp[1], 1);
            if (p[2].revents) names_serve_tcp(tcp);
        }
        _exit(0);
    }
    close(udp[0]);
    close(udp[1]);
    close(tcp);
    return CHECK(*pid > 0);
}

static void names_server_stop(int pid) {
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

#define NAMES_TWO "nameserver 127.0.0.1\nnameserver 127.0.0.2\n"

static void test_names_server(void) {
    static names_world w;
    char got[500];
    int64_t ms;
    int pid;
    mcp m;

    memset(&w, 0, sizeof w);
    w.resolv = NAMES_TWO "search x.test\n";
    if (!names_server_start(&w, &pid)) return;
    if (!CHECK(names_handle(&m, &w, NULL))) return;
    names_want(&m, "a.test", "6:32.6 4:192.1");
    names_want(&m, "A.Test.", "6:32.6 4:192.1");
    names_want(&m, "four.test", "4:192.1");
    names_want(&m, "alias.test", "6:32.6 4:192.1");
    names_want(&m, "late.test", "6:32.6 4:192.1");
    names_want(&m, "forged.test", "6:32.6 4:192.1");
    names_want(&m, "gone.test", "name not found: gone.test");
    names_want(&m, "none.test", "name not found: none.test");
    names_want(&m, "loop.test", "name not found: loop.test");
    ms = names_ask(&m, "fail.test", got, sizeof got);  // the second at once
    CHECK_STR(str_of(got), S("6:32.6 4:192.1"));
    CHECK(ms < TIME_DNS_AGAIN / 2);
    ms = names_ask(&m, "dead.test", got, sizeof got);  // the second in time
    CHECK_STR(str_of(got), S("6:32.6 4:192.1"));
    CHECK(ms >= TIME_DNS_AGAIN - 50 && ms < TIME_DNS_AGAIN * 2);
    // One half is there: the other is not waited for to the end.
    ms = names_ask(&m, "half.test", got, sizeof got);
    CHECK_STR(str_of(got), S("4:192.1"));
    CHECK(ms >= TIME_DNS_OTHER - 50 && ms < TIME_DNS_OTHER * 3);
    names_want(&m, "lone.test", "6:32.6");
    w.resolv = "nameserver 127.0.0.1\nsearch b.test a.test\n";
    names_want(&m, "www", "6:32.6 4:192.1");
    // A port that nobody has: refused, so the next one at once.
    w.resolv = "nameserver 127.0.0.3\nnameserver 127.0.0.1\n";
    ms = names_ask(&m, "a.test", got, sizeof got);
    CHECK_STR(str_of(got), S("6:32.6 4:192.1"));
    CHECK(ms < TIME_DNS_AGAIN / 2);
    w.resolv = "nameserver 127.0.0.3\n";
    names_want(&m, "a.test", "no name server answers for: a.test");
    w.resolv = "nameserver 127.0.0.4\n";  // no way there at all
    names_want(&m, "a.test", "no name server answers for: a.test");
    names_handle_free(&m);
    names_server_stop(pid);
}

static void test_names_tcp(void) {
    static names_world w;
    char got[500];
    int64_t ms;
    int pid;
    mcp m;

    memset(&w, 0, sizeof w);
    w.resolv = NAMES_TWO;
    if (!names_server_start(&w, &pid)) return;
    if (!CHECK(names_handle(&m, &w, NULL))) return;
    names_ask(&m, "big.test", got, sizeof got);
    CHECK_STR(str_head(str_of(got), 31),
              S("6:32.6 4:192.1 4:192.2 4:192.3 "));
    CHECK(strstr(got, " 4:192.15") && !strstr(got, " 4:192.16"));
    // TCP that says nothing: the next server.
    ms = names_ask(&m, "stuck.test", got, sizeof got);
    CHECK_STR(str_of(got), S("6:32.6 4:192.1"));
    CHECK(ms < TIME_DNS_AGAIN / 2);
    // A server without TCP.
    w.resolv = "nameserver 127.0.0.2\n";
    w.port[1] = 0;
    names_want(&m, "big.test", "no name server answers for: big.test");
    names_handle_free(&m);
    names_server_stop(pid);
}

// All servers silent: it ends by its own bound, here on a clock that jumps.
static int64_t names_clock_ms;

static int64_t names_clock(os *o) {
    (void)o;
    return names_clock_ms;
}

static int names_jump(os *o, mcp_fd *fds, uint32_t n, int ms) {
    names_world *w = o->user;
    int ready = w->native.wait(&w->native, fds, n, 0);
    if (!ready) names_clock_ms += ms > 0 ? ms : 0;
    return ready;
}

static void test_names_silence(void) {
    static names_world w;
    char got[500];
    int64_t ms;
    int pid;
    mcp m;

    memset(&w, 0, sizeof w);
    w.resolv = NAMES_TWO;
    if (!names_server_start(&w, &pid)) return;
    if (!CHECK(names_handle(&m, &w, NULL))) return;
    names_clock_ms = m.loop.now;
    m.os.now_ms = names_clock;
    m.os.wait = names_jump;
    ms = names_ask(&m, "mute.test", got, sizeof got);
    CHECK_STR(str_of(got), S("no name server answers for: mute.test"));
    CHECK_INT(ms, 4 * TIME_DNS_AGAIN);
    w.resolv = NAMES_TWO "options timeout:5 attempts:5\n";
    ms = names_ask(&m, "mute.test", got, sizeof got);
    CHECK_STR(str_of(got), S("no name server answers for: mute.test"));
    CHECK_INT(ms, TIME_LOOKUP);
    names_handle_free(&m);
    names_server_stop(pid);
}

static void test_names_program(void) {
    static names_world w;
    lookup *l;
    int pid, child;
    mcp m;

    memset(&w, 0, sizeof w);
    w.resolv = "nameserver 127.0.0.1\n";
    if (!names_server_start(&w, &pid)) return;
    if (!CHECK(names_handle(&m, &w, NULL))) return;
    // As getent says it, the name handed over as one word.
    w.script = "echo \"192.0.2.5       STREAM $1\"; echo '192.0.2.5  DGRAM';"
               "echo '192.0.2.5 RAW'; echo '2001:db8::5 STREAM'";
    names_want(&m, "gone.test", "6:32.5 4:192.5");
    CHECK_INT(w.spawned, 1);
    // What DNS knows needs no program.
    names_want(&m, "a.test", "6:32.6 4:192.1");
    CHECK_INT(w.spawned, 1);
    // As dscacheutil says it.
    w.script = "printf 'name: x\\nipv6_address: 2001:db8::4\\n\\nname: x\\n"
               "ip_address: 192.0.2.4\\n'";
    names_want(&m, "gone.test", "6:32.4 4:192.4");
    // ".local" is for it alone, unless it fails.
    names_want(&m, "printer.local", "6:32.4 4:192.4");
    w.script = "exit 2";
    names_want(&m, "gone.test", "name not found: gone.test");
    w.script = "echo nonsense; echo; printf 'x %05000d' 1";
    names_want(&m, "gone.test", "name not found: gone.test");
    // Given up while it runs: no process, no descriptor.
    w.script = "sleep 100";
    l = lookup_start(&m, "printer.local", 80, NULL);
    if (!CHECK(l != NULL)) return;
    loop_turn(&m, m.loop.now);
    child = l->child.pid;
    CHECK(child > 0);
    lookup_free(&m, l);
    CHECK(kill(child, 0) < 0);
    CHECK_INT(waitpid(child, NULL, WNOHANG), -1);
    // The same while servers are asked.
    l = lookup_start(&m, "mute.test", 80, NULL);
    if (!CHECK(l != NULL)) return;
    loop_turn(&m, m.loop.now);
    CHECK_INT(w.sockets, 1);
    lookup_free(&m, l);
    lookup_free(&m, NULL);
    names_handle_free(&m);
    names_server_stop(pid);
}

static int names_memory_pid;

static mcp_code names_memory_body(mem *a) {
    static const char *const hosts[] = {"box", "a.test", "x.local",
                                        "big.test", "gone.test"};
    static names_world w, fresh;
    mcp_code rc = MCP_OK;
    mcp m;

    if (!names_memory_pid && !names_server_start(&fresh, &names_memory_pid))
        return MCP_OK;
    w = fresh;
    w.hosts = "192.0.2.1 box\n";
    w.resolv = "nameserver 127.0.0.1\n";
    w.script = "echo 192.0.2.5";
    if (!names_handle(&m, &w, a)) return MCP_OUT_OF_MEMORY;
    for (size_t i = 0; !rc && i < COUNT(hosts); i++) {
        os_addr out[LIMIT_ADDRESSES];
        lookup *l = lookup_start(&m, hosts[i], 80, NULL);
        diag d;
        int n;
        diag_init(&d, &m.mem, NULL);
        rc = l ? MCP_PENDING : MCP_OUT_OF_MEMORY;
        for (int k = 0; rc == MCP_PENDING && k < 1000; k++) {
            rc = lookup_take(l, out, COUNT(out), &n, &d);
            if (rc == MCP_PENDING) loop_turn(&m, m.os.now_ms(&m.os) + 100);
        }
        lookup_free(&m, l);
        diag_free(&d);
    }
    names_handle_free(&m);
    return rc;
}

static void test_names_memory(void) {
    torture(names_memory_body);
    if (names_memory_pid) names_server_stop(names_memory_pid);
    names_memory_pid = 0;
}

// The real program, for a name of which only the system knows.
static void test_names_getent(void) {
    static names_world w;
    char name[256] = "", got[500];
    os_addr a;
    mcp m;

    memset(&w, 0, sizeof w);
    w.hosts = w.resolv = "";
    if (access("/usr/bin/getent", X_OK) || gethostname(name, sizeof name - 1))
        return;
    if (!dns_name_write(w.native.user ? NULL : (uint8_t[DNS_NAME]){0},
                        str_of(name)) || addr_parse(name, &a))
        return;
    if (!CHECK(names_handle(&m, &w, NULL))) return;
    m.os.can_run = w.native.can_run;
    m.os.spawn = w.native.spawn;
    w.sockets++;  // the pipe is made behind our back
    names_ask(&m, name, got, sizeof got);
    if (strstr(got, "name server"))  // this machine does not know itself
        w.sockets = 0;
    else
        CHECK(strchr(got, ':') != NULL);
    w.sockets = 0;
    names_handle_free(&m);
}

#else

static void test_names_not_built(void) {
    CHECK(!USE_TLS);  // nobody is left who would need an address
}

#endif

static const test tests_names[] = {
#if USE_HTTP
    {"names.addresses", test_names_addresses},
    {"dns.names", test_dns_names},
    {"dns.pointers", test_dns_pointers},
    {"dns.answers", test_dns_answers},
    {"dns.foreign", test_dns_foreign},
    {"dns.chains", test_dns_chains},
    {"names.hosts", test_names_hosts},
    {"names.resolv_conf", test_names_resolv_conf},
    {"names.static", test_names_static},
    {"names.localhost", test_names_localhost},
    {"fr.70", test_names_localhost},
    {"names.of_the_host", test_names_of_the_host},
    {"names.candidates", test_names_candidates},
    {"names.server", test_names_server},
    {"names.tcp", test_names_tcp},
    {"names.silence", test_names_silence},
    {"names.program", test_names_program},
    {"names.memory", test_names_memory},
    {"names.getent", test_names_getent},
#else
    {"names.not_built", test_names_not_built},
#endif
};

//=============================================================================
// MARK: - 12 HTTP client
//
// A client and a server in one thread, each with a handle (and so an allocator
// and a platform table) of its own, turned in alternation. What the server
// does is a script for each connection.
//=============================================================================

typedef enum web_act {
    WEB_HOLD,     // nothing more; what comes is read
    WEB_REQUEST,  // wait for one whole request
    WEB_SEND,     // text
    WEB_TRICKLE,  // text, a byte a turn
    WEB_FLOOD,    // n bytes 'x'
    WEB_EVENTS,   // n events of 1,000 bytes
    WEB_WAIT,     // n ms
    WEB_CLOSE,
    WEB_DEAF      // hold, and read nothing
} web_act;

typedef struct web_step {
    web_act act;
    const char *text;
    size_t n;
} web_step;

#define HOLD {WEB_HOLD, NULL, 0}
#define REQ {WEB_REQUEST, NULL, 0}
#define SEND(t) {WEB_SEND, (t), 0}
#define TRICKLE(t) {WEB_TRICKLE, (t), 0}
#define FLOOD(n) {WEB_FLOOD, NULL, (n)}
#define EVENTS(n) {WEB_EVENTS, NULL, (n)}
#define PAUSE(ms) {WEB_WAIT, NULL, (ms)}
#define CLOSE {WEB_CLOSE, NULL, 0}
#define DEAF {WEB_DEAF, NULL, 0}

#define HEAD200 "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
#define ANSWER HEAD200 "Content-Length: 2\r\n\r\n{}"
#define STREAM200 "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"

enum { WEB_CONNS = 24, WEB_STEPS = 12 };

typedef struct web_conn {
    struct web *w;
    job job;
    watch watch;
    const web_step *step;  // of its script
    size_t done;           // bytes of this step
    int64_t until;
    buf in, out;
    bool ended;            // the client has closed
    int requests;
} web_conn;

typedef struct web {
    heap heap;             // the client's
    mcp client, server;
    job owner;             // of exchanges
    int wakes;
    os_addr at;
    job accept;
    watch listen;
    const web_step *scripts[WEB_CONNS];
    web_conn conn[WEB_CONNS];
    int conns;
    buf log;               // every request
    size_t flood;          // bytes that the server got rid of
} web;

// What the replaced entries of the client's table note.
static struct {
    os real;
    int64_t skew;
    int waits, reads, sends, connects;
    uint8_t deaf_ip;       // last byte of the address that never answers
} web_os;

static int64_t web_now(os *o) {
    return web_os.real.now_ms(o) + web_os.skew;
}

static int web_wait(os *o, mcp_fd *fds, uint32_t n, int ms) {
    web_os.waits++;
    return web_os.real.wait(o, fds, n, ms);
}

static ptrdiff_t web_read(os *o, os_fd fd, void *to, size_t n) {
    web_os.reads++;
    return web_os.real.read(o, fd, to, n);
}

static ptrdiff_t web_send(os *o, os_fd fd, const void *from, size_t n) {
    web_os.sends++;
    return web_os.real.send(o, fd, from, n);
}

// A descriptor that never becomes writable: a listening socket.
static os_result web_connect(os *o, const os_addr *a, os_fd *out) {
    os_addr any = *a;
    web_os.connects++;
    if (!web_os.deaf_ip || a->ip[3] != web_os.deaf_ip)
        return web_os.real.connect(o, a, out);
    any.port = 0;
    any.ip[3] = 1;
    return web_os.real.listen(o, &any, out);
}

static void web_handle(mcp *m, mcp_alloc_fn fn, void *user) {
    memset(m, 0, sizeof *m);
    mem_init(&m->mem, fn, user);
    CHECK(os_adopt(&m->os, NULL));
    secrets_init(&m->secrets, &m->mem);
    CHECK(loop_init(m));
}

static void web_handle_free(mcp *m) {
    http_free(m);
    tls_free(m);
    loop_free(m);
    secrets_free(&m->secrets);
}

static bool web_next(web_conn *c) {
    c->step++;
    c->done = 0;
    return true;
}

// Is a whole request there? Then it moves to the log.
static bool web_request(web_conn *c) {
    str in = buf_str(&c->in), name = S("Content-Length: ");
    size_t head = str_find(in, S("\r\n\r\n")), at;
    uint64_t n = 0;
    str digits, rest;

    if (head == SIZE_MAX) return false;
    at = str_find(str_head(in, head), name);
    if (at != SIZE_MAX) {
        str_cut(str_skip(in, at + name.len), '\r', &digits, &rest);
        CHECK(str_to_u64(digits, INT64_MAX, &n));
    }
    if (in.len < head + 4 + n) return false;
    buf_add(&c->w->log, str_head(in, head + 4 + (size_t)n));
    buf_drop(&c->in, head + 4 + (size_t)n);
    c->requests++;
    return web_next(c);
}

static bool web_send_text(web_conn *c, bool trickle) {
    mcp *m = &c->w->server;
    str left = str_skip(str_of(c->step->text), c->done);
    ptrdiff_t n;

    if (!left.len) return web_next(c);
    n = m->os.send(&m->os, c->watch.fd, left.ptr, trickle ? 1 : left.len);
    if (n < 0) return false;
    c->done += (size_t)n;
    if (trickle) job_at(m, &c->job, m->loop.now);
    return !trickle;
}

// Bytes or events without end, until the socket is full.
static bool web_flood(web_conn *c, bool events) {
    mcp *m = &c->w->server;
    char block[1000];
    size_t total = c->step->n * (events ? sizeof block : 1), k = 0;
    ptrdiff_t n;

    if (c->done == total) return web_next(c);
    memset(block, 'x', sizeof block);
    if (events) {
        memcpy(block, "data: ", 6);
        memcpy(block + sizeof block - 2, "\n\n", 2);
        k = c->done % sizeof block;
    }
    n = (ptrdiff_t)(sizeof block - k);
    if ((size_t)n > total - c->done) n = (ptrdiff_t)(total - c->done);
    n = m->os.send(&m->os, c->watch.fd, block + k, (size_t)n);
    if (n < 0) return false;
    c->done += (size_t)n;
    c->w->flood += (size_t)n;
    return true;
}

static void web_shut(web_conn *c) {
    mcp *m = &c->w->server;
    os_fd fd = c->watch.fd;
    watch_del(m, &c->watch);
    if (fd >= 0) m->os.close(&m->os, fd);
}

// One step of the script; false: wait.
static bool web_act_one(web_conn *c) {
    mcp *m = &c->w->server;

    switch (c->step->act) {
    case WEB_HOLD: return false;
    case WEB_DEAF: return false;
    case WEB_REQUEST: return web_request(c);
    case WEB_SEND: return web_send_text(c, false);
    case WEB_TRICKLE: return web_send_text(c, true);
    case WEB_FLOOD: return web_flood(c, false);
    case WEB_EVENTS: return web_flood(c, true);
    case WEB_WAIT:
        if (!c->done++) c->until = m->loop.now + (int64_t)c->step->n;
        if (m->loop.now >= c->until) return web_next(c);
        job_at(m, &c->job, c->until);
        return false;
    case WEB_CLOSE:
        web_shut(c);
        return false;
    }
    return false;
}

static void web_conn_step(mcp *m, job *j) {
    web_conn *c = (web_conn *)((char *)j - offsetof(web_conn, job));
    char block[16384];
    ptrdiff_t n = IO_AGAIN;
    short want = MCP_READABLE;

    if (c->watch.fd < 0) return;
    while (c->step->act != WEB_DEAF &&
           (n = m->os.read(&m->os, c->watch.fd, block, sizeof block)) > 0)
        buf_add(&c->in, str_make(block, (size_t)n));
    if (n == IO_END || n == IO_FAIL) c->ended = true;
    while (web_act_one(c)) continue;
    if (c->watch.fd < 0) return;
    if (c->ended || c->step->act == WEB_DEAF) want = 0;
    if (c->step->act == WEB_FLOOD || c->step->act == WEB_EVENTS ||
        c->step->act == WEB_SEND)
        want |= MCP_WRITABLE;
    watch_want(m, &c->watch, want);
}

static void web_accept(mcp *m, job *j) {
    web *w = (web *)((char *)j - offsetof(web, accept));
    os_fd fd;

    while (w->conns < WEB_CONNS && w->scripts[w->conns] &&
           m->os.accept(&m->os, w->listen.fd, &fd) == OS_OK) {
        web_conn *c = &w->conn[w->conns];
        c->w = w;
        c->step = w->scripts[w->conns++];
        buf_init(&c->in, &m->mem, SIZE_MAX / 2);
        CHECK(job_init(m, &c->job, web_conn_step));
        CHECK(watch_add(m, &c->watch, fd, MCP_READABLE, &c->job));
        job_wake(m, &c->job);
    }
}

static void web_owner(mcp *m, job *j) {
    web *w = (web *)((char *)j - offsetof(web, owner));
    (void)m;
    w->wakes++;
}

static void web_open_at(web *w, const char *address) {
    mcp *s = &w->server;
    os_fd fd;

    memset(w, 0, sizeof *w);
    web_handle(&w->client, heap_fn, &w->heap);
    web_handle(s, NULL, NULL);
    web_os.real = w->client.os;
    web_os.skew = 0;
    web_os.deaf_ip = 0;
    web_os.waits = web_os.reads = web_os.sends = web_os.connects = 0;
    w->client.os.now_ms = web_now;
    w->client.os.wait = web_wait;
    w->client.os.read = web_read;
    w->client.os.send = web_send;
    w->client.os.connect = web_connect;
    CHECK(job_init(&w->client, &w->owner, web_owner));
    buf_init(&w->log, &s->mem, SIZE_MAX / 2);
    CHECK(addr_parse(address, &w->at));
    w->at.port = 0;
    CHECK_INT(s->os.listen(&s->os, &w->at, &fd), OS_OK);
    CHECK(job_init(s, &w->accept, web_accept));
    CHECK(watch_add(s, &w->listen, fd, MCP_READABLE, &w->accept));
}

static void web_open(web *w) {
    web_open_at(w, "127.0.0.1");
}

// Everything is given back: no memory of the client's, no descriptor.
static void web_close(web *w) {
    mcp *s = &w->server;
    os_fd fd = w->listen.fd;

    job_end(&w->client, &w->owner);
    web_handle_free(&w->client);
    CHECK_INT(w->heap.live, 0);
    for (int i = 0; i < w->conns; i++) {
        web_shut(&w->conn[i]);
        job_end(s, &w->conn[i].job);
        buf_free(&w->conn[i].in);
    }
    watch_del(s, &w->listen);
    s->os.close(&s->os, fd);
    job_end(s, &w->accept);
    buf_free(&w->log);
    web_handle_free(s);
}

static int web_fds(void) {
    int n = 0;
    for (int fd = 0; fd < 200; fd++) n += fcntl(fd, F_GETFD) >= 0;
    return n;
}

static void web_turn(web *w) {
    loop_turn(&w->server, w->server.loop.now);
    loop_turn(&w->client, w->client.loop.now + 1);
}

// Turn both until the exchange has reached that state or is over.
static http_state web_until(web *w, const http_xchg *x, http_state at) {
    int64_t end = w->server.os.now_ms(&w->server.os) + 5000;

    while (http_now(x) < at && http_now(x) < HTTP_DONE) {
        web_turn(w);
        if (!CHECK(w->server.loop.now < end)) break;
    }
    return http_now(x);
}

// Time goes by, for the client alone.
static void web_skip(web *w, int64_t ms) {
    web_os.skew += ms;
    loop_drain_cancel(&w->client);
}

// For a while; what happens must not depend on how long that is.
static void web_idle(web *w, int turns) {
    while (turns--) web_turn(w);
}

static url web_url_at(const web *w, const char *host, const char *path) {
    mem m = plain_mem();
    buf b;
    url u;

    buf_init(&b, &m, LIMIT_URL);
    buf_fmt(&b, "http://%s:%u%s", host, (unsigned)w->at.port, path);
    CHECK_INT(url_parse(&m, buf_str(&b), &u), MCP_OK);
    buf_free(&b);
    return u;
}

static url web_url(const web *w, const char *path) {
    return web_url_at(w, w->at.family == 6 ? "[::1]" : "127.0.0.1", path);
}

static http_ask web_ask(web *w, const url *u, const char *body) {
    http_ask how = {"POST", NULL, {NULL, 0}, {NULL, 0}, true, 1 << 20, 0,
                    false};
    how.url = u;
    how.body = str_of(body);
    how.deadline = w->client.os.now_ms(&w->client.os) + 5000;
    return how;
}

static http_xchg *web_start(web *w, const char *path, const char *body) {
    mem m = plain_mem();
    url u = web_url(w, path);
    http_ask how = web_ask(w, &u, body);
    http_xchg *x = http_start(&w->client, &how, &w->owner);
    url_free(&m, &u);
    CHECK(x != NULL);
    return x;
}

// A tool call: not repeatable.
static http_xchg *web_start_once(web *w, const char *body) {
    mem m = plain_mem();
    url u = web_url(w, "/once");
    http_ask how = web_ask(w, &u, body);
    http_xchg *x;
    how.repeatable = false;
    x = http_start(&w->client, &how, &w->owner);
    url_free(&m, &u);
    CHECK(x != NULL);
    return x;
}

static bool web_says(const http_xchg *x, mcp_code code, const char *part) {
    const diag *d = http_failure(x);
    bool ok = CHECK_INT(http_now(x), HTTP_FAILED) &&
              CHECK_INT(d->code, code) &&
              CHECK(strstr(buf_z(&d->detail), part) != NULL);
    if (!ok) printf("wanted \"%s\" in \"%s\"\n", part, buf_z(&d->detail));
    return ok;
}

static void web_free(web *w, http_xchg *x) {
    http_end(&w->client, x);
}

// One exchange that ends well with this body.
static void web_good(web *w, http_xchg *x, const char *body) {
    if (CHECK_INT(web_until(w, x, HTTP_DONE), HTTP_DONE))
        CHECK_STR(http_body(x), str_of(body));
    else
        printf("%s\n", buf_z(&http_failure(x)->detail));
    web_free(w, x);
}

static void test_client_request(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), REQ, SEND(ANSWER),
                                      REQ, SEND(ANSWER), HOLD};
    mem m = plain_mem();
    buf want;
    web w;
    url u;
    http_ask how;

    web_open(&w);
    w.scripts[0] = script;
    web_good(&w, web_start(&w, "/a/b?c=d", "hello"), "{}");
    buf_init(&want, &m, 10000);
    buf_fmt(&want, "POST /a/b?c=d HTTP/1.1\r\nHost: 127.0.0.1:%u\r\n"
            "Accept-Encoding: identity\r\nContent-Length: 5\r\n\r\nhello",
            (unsigned)w.at.port);
    CHECK_STR(buf_str(&w.log), buf_str(&want));
    buf_clear(&w.log);
    buf_clear(&want);
    u = web_url(&w, "");
    how = web_ask(&w, &u, NULL);
    how.method = "GET";
    how.headers = S("Accept: text/event-stream\r\nX: y\r\n");
    web_good(&w, http_start(&w.client, &how, &w.owner), "{}");
    buf_fmt(&want, "GET / HTTP/1.1\r\nHost: 127.0.0.1:%u\r\n"
            "Accept-Encoding: identity\r\nAccept: text/event-stream\r\n"
            "X: y\r\n\r\n", (unsigned)w.at.port);
    CHECK_STR(buf_str(&w.log), buf_str(&want));
    buf_clear(&w.log);
    how.method = "POST";  // RFC 9110 8.6: a length all the same
    web_good(&w, http_start(&w.client, &how, &w.owner), "{}");
    CHECK(str_find(buf_str(&w.log), S("Content-Length: 0\r\n")) != SIZE_MAX);
    CHECK_INT(w.conns, 1);
    url_free(&m, &u);
    buf_free(&want);
    web_close(&w);
}

// One write, one read, and no more than two polls a call.
static void test_client_calls(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), REQ, SEND(ANSWER),
                                      HOLD};
    web w;
    http_xchg *x;

    web_open(&w);
    w.scripts[0] = script;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    web_os.waits = web_os.reads = web_os.sends = 0;
    x = web_start(&w, "/", "2");
    loop_turn(&w.client, w.client.loop.now);  // it is sent
    for (int i = 0; i < 100 && w.conn[0].requests < 2; i++)
        loop_turn(&w.server, w.server.loop.now + 1);
    loop_turn(&w.client, w.client.loop.now + 1000);
    CHECK_INT(http_now(x), HTTP_DONE);
    CHECK_INT(web_os.sends, 1);
    CHECK_INT(web_os.reads, 1);
    CHECK(web_os.waits <= 2);
    web_free(&w, x);
    web_close(&w);
}

static const struct {
    const char *text;  // CLOSE follows
    int status;
    const char *body;
} client_answers[] = {
    {ANSWER, 200, "{}"},
    {HEAD200 "Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\nA\r\n"
     "0123456789\r\n0\r\nTrailer: x\r\nb: c\r\n\r\n", 200, "abc0123456789"},
    {HEAD200 "\r\nto the end", 200, "to the end"},
    {"HTTP/1.0 200 OK\r\n\r\nto the end", 200, "to the end"},
    {HEAD200 "Content-Length: 0\r\n\r\n", 200, ""},
    {HEAD200 "\r\n", 200, ""},
    {"HTTP/1.1 202 Accepted\r\n\r\n", 202, ""},
    {"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", 202, ""},
    {"HTTP/1.1 204 No Content\r\n\r\n", 204, ""},
    {"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", 204, ""},
    {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
     ANSWER, 200, "{}"},
    {"HTTP/1.1 400 Bad\r\nContent-Length: 12\r\n\r\n{\"error\":{}}", 400,
     "{\"error\":{}}"},
    {"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nno\r\n0"
     "\r\n\r\n", 404, "no"},
    {"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: 0\r\n\r\n", 405, ""},
    {"HTTP/1.1 503 Busy\r\nContent-Type: text/event-stream\r\n"
     "Content-Length: 9\r\n\r\ndata: x\n\n", 503, "data: x\n\n"},
    {"HTTP/1.1 302 Found\r\nContent-Length: 2\r\n\r\nno", 302, "no"},
    {"HTTP/1.1 304 Same\r\nContent-Length: 5\r\n\r\n", 304, ""}};

// Whole, and in bytes of a packet each.
static void test_client_answers(void) {
    for (size_t i = 0; i < COUNT(client_answers) * 2; i++) {
        const char *text = client_answers[i / 2].text;
        web_step script[] = {REQ, SEND(text), CLOSE};
        http_xchg *x;
        web w;
        if (i & 1) script[1].act = WEB_TRICKLE;
        web_open(&w);
        w.scripts[0] = script;
        x = web_start(&w, "/", "q");
        CHECK_INT(web_until(&w, x, HTTP_DONE), HTTP_DONE);
        CHECK_INT(http_answer(x)->status, client_answers[i / 2].status);
        CHECK_STR(http_body(x), str_of(client_answers[i / 2].body));
        CHECK(w.wakes > 0 && http_sent(x));
        web_free(&w, x);
        web_close(&w);
    }
}

static const struct {
    const char *text;  // CLOSE follows
    mcp_code code;
    int status;
    const char *says;
} client_faults[] = {
    {"", MCP_CONNECTION_FAILED, 0, "closed the connection without an answer"},
    {"HTTP/1.1 2", MCP_CONNECTION_FAILED, 0, "within the headers"},
    {HEAD200, MCP_CONNECTION_FAILED, 200, "within the headers"},
    {HEAD200 "Content-Length: 5\r\n\r\nabcd", MCP_CONNECTION_FAILED, 200,
     "in the middle of the answer"},
    {HEAD200 "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
     MCP_CONNECTION_FAILED, 200, "in the middle of the answer"},
    {HEAD200 "Transfer-Encoding: chunked\r\n\r\n3\r\nabcd",
     MCP_PROTOCOL_ERROR, 200, "framing"},
    {HEAD200 "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
     MCP_PROTOCOL_ERROR, 200, "not certain"},
    {HEAD200 "Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
     MCP_PROTOCOL_ERROR, 200, "different Content-Length"},
    {"SSH-2.0-OpenSSH_9.2\r\n", MCP_PROTOCOL_ERROR, 0, "status line"},
    {HEAD200 "Content-Length: 1048577\r\n\r\n", MCP_LIMIT_EXCEEDED, 200,
     "1048576"},
    {"HTTP/1.1 101 Switching\r\n\r\n", MCP_PROTOCOL_ERROR, 101, "protocol"}};

static void client_fault(const char *text, mcp_code code, int status,
                         const char *says) {
    web_step script[] = {REQ, SEND(text), CLOSE};
    http_xchg *x;
    web w;
    char where[32];

    web_open(&w);
    w.scripts[0] = script;
    x = web_start(&w, "/path?key=secret", "q");
    web_until(&w, x, HTTP_DONE);
    web_says(x, code, says);
    snprintf(where, sizeof where, "127.0.0.1:%u", (unsigned)w.at.port);
    web_says(x, code, where);
    CHECK(strstr(buf_z(&http_failure(x)->detail), "secret") == NULL);
    CHECK_INT(http_failure(x)->http_status, status);
    CHECK_INT(w.conns, 1);  // a new connection that ends is not tried again
    web_free(&w, x);
    web_close(&w);
}

static void test_client_faults(void) {
    for (size_t i = 0; i < COUNT(client_faults); i++)
        client_fault(client_faults[i].text, client_faults[i].code,
                     client_faults[i].status, client_faults[i].says);
}

// A proxy that compresses what nobody asked it to.
static void test_fr_67(void) {
    client_fault(HEAD200 "Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n"
                 "\x1F\x8B\x08", MCP_PROTOCOL_ERROR, 200, "compressed");
    client_fault(HEAD200 "Content-Encoding: br\r\nTransfer-Encoding: chunked"
                 "\r\n\r\n1\r\nx\r\n0\r\n\r\n", MCP_PROTOCOL_ERROR, 200,
                 "compressed");
}

// The end of a kept connection meets the next request on its way.
static void test_fr_68(void) {
    static const web_step stale[] = {REQ, SEND(ANSWER), REQ, CLOSE};
    static const web_step fresh[] = {REQ, SEND(ANSWER), HOLD};
    static const web_step half[] = {REQ, SEND(ANSWER), REQ, SEND("HTTP/1."),
                                    CLOSE};
    web w;
    http_xchg *x;

    web_open(&w);  // repeatable: it goes once more
    w.scripts[0] = stale;
    w.scripts[1] = fresh;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    web_good(&w, web_start(&w, "/", "2"), "{}");
    CHECK_INT(w.conns, 2);
    web_close(&w);

    web_open(&w);  // but only once
    w.scripts[0] = stale;
    w.scripts[1] = stale + 2;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    x = web_start(&w, "/", "2");
    web_until(&w, x, HTTP_DONE);
    web_says(x, MCP_CONNECTION_FAILED, "without an answer");
    CHECK_INT(w.conns, 2);
    web_free(&w, x);
    web_close(&w);

    web_open(&w);  // a call that may have been carried out does not
    w.scripts[0] = stale;
    w.scripts[1] = fresh;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    x = web_start_once(&w, "2");
    web_until(&w, x, HTTP_DONE);
    web_says(x, MCP_CONNECTION_FAILED, "not sent again");
    CHECK(http_sent(x));
    CHECK_INT(w.conns, 1);
    web_free(&w, x);
    web_close(&w);

    web_open(&w);  // a byte of the answer: the server has acted
    w.scripts[0] = half;
    w.scripts[1] = fresh;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    x = web_start(&w, "/", "2");
    web_until(&w, x, HTTP_DONE);
    web_says(x, MCP_CONNECTION_FAILED, "within the headers");
    CHECK_INT(w.conns, 1);
    web_free(&w, x);
    web_close(&w);
}

// Closed in silence after its answer, or spoken on out of turn: seen before it
// is used, and so harmless even to a call.
static void test_client_quiet(void) {
    static const web_step closes[] = {REQ, SEND(ANSWER), CLOSE};
    static const web_step speaks[] = {REQ, SEND(ANSWER), PAUSE(1),
                                      SEND("HTTP/1.1 408 Slow\r\n\r\n"), HOLD};
    static const web_step fresh[] = {REQ, SEND(ANSWER), HOLD};
    static const web_step *const first[] = {closes, speaks};

    for (int i = 0; i < 4; i++) {
        web w;
        web_open(&w);
        w.scripts[0] = first[i & 1];
        w.scripts[1] = fresh;
        web_good(&w, web_start_once(&w, "1"), "{}");
        for (int k = 0; k < 20; k++)  // the client sleeps, or sees it
            i < 2 ? (void)loop_turn(&w.server, w.server.loop.now + 1)
                  : web_turn(&w);
        web_good(&w, web_start_once(&w, "2"), "{}");
        CHECK_INT(w.conns, 2);
        web_close(&w);
    }
}

// Bytes behind an answer are nobody's: the connection goes.
static void test_client_excess(void) {
    static const web_step more[] = {REQ, SEND(ANSWER "HTTP/1.1 200 OK\r\n"),
                                    HOLD};
    static const web_step fresh[] = {REQ, SEND(ANSWER), HOLD};
    web w;

    web_open(&w);
    w.scripts[0] = more;
    w.scripts[1] = fresh;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    web_good(&w, web_start(&w, "/", "2"), "{}");
    CHECK_INT(w.conns, 2);
    web_idle(&w, 5);
    CHECK(w.conn[0].ended && !w.conn[1].ended);
    web_close(&w);
}

// What must not be sent twice takes only what was used a moment ago.
static void test_client_reuse_age(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), REQ, SEND(ANSWER),
                                      REQ, SEND(ANSWER), HOLD};
    web w;

    web_open(&w);
    for (int i = 0; i < 4; i++) w.scripts[i] = script;
    web_good(&w, web_start_once(&w, "1"), "{}");
    web_skip(&w, TIME_SAFE_REUSE - 100);
    web_good(&w, web_start_once(&w, "2"), "{}");
    CHECK_INT(w.conns, 1);
    web_skip(&w, TIME_SAFE_REUSE + 100);
    web_good(&w, web_start_once(&w, "3"), "{}");
    CHECK_INT(w.conns, 2);
    web_skip(&w, TIME_SAFE_REUSE + 100);
    web_good(&w, web_start(&w, "/", "4"), "{}");
    CHECK_INT(w.conns, 2);
    web_skip(&w, TIME_IDLE_CONN + 100);  // then all go by themselves
    web_idle(&w, 5);
    CHECK(w.conn[0].ended && w.conn[1].ended);
    web_good(&w, web_start(&w, "/", "5"), "{}");
    CHECK_INT(w.conns, 3);
    web_close(&w);
}

static void test_client_pool_limit(void) {
    static const web_step script[] = {REQ, PAUSE(2), SEND(ANSWER), REQ,
                                      SEND(ANSWER), HOLD};
    enum { N = LIMIT_IDLE_CONNS + 4 };
    http_xchg *x[N];
    web w;
    int ended = 0;

    web_open(&w);
    for (int i = 0; i < WEB_CONNS; i++) w.scripts[i] = script;
    for (int i = 0; i < N; i++) x[i] = web_start(&w, "/", "1");
    for (int i = 0; i < N; i++) web_good(&w, x[i], "{}");
    CHECK_INT(w.conns, N);
    web_idle(&w, 10);
    for (int i = 0; i < N; i++) ended += w.conn[i].ended;
    CHECK_INT(ended, N - LIMIT_IDLE_CONNS);
    for (int i = 0; i < LIMIT_IDLE_CONNS; i++) x[i] = web_start(&w, "/", "2");
    for (int i = 0; i < LIMIT_IDLE_CONNS; i++) web_good(&w, x[i], "{}");
    CHECK_INT(w.conns, N);
    web_close(&w);
}

// Another origin gets a connection of its own.
static void test_client_origins(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), REQ, SEND(ANSWER),
                                      HOLD};
    mem m = plain_mem();
    web w;
    url u;
    http_ask how;

    web_open(&w);
    w.scripts[0] = w.scripts[1] = script;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    u = web_url_at(&w, "localhost", "/");
    how = web_ask(&w, &u, "2");
    web_good(&w, http_start(&w.client, &how, &w.owner), "{}");
    CHECK_INT(w.conns, 2);
    web_good(&w, web_start(&w, "/", "3"), "{}");
    CHECK_INT(w.conns, 2);
    url_free(&m, &u);
    web_close(&w);
}

static const struct {
    const char *head;  // "%u" is our port
    bool kept;         // its body is empty, so the connection serves again
    const char *next;  // the request that follows, or NULL and what is said:
    const char *says;
} client_redirects[] = {
    {"307 T\r\nLocation: /new?x=1\r\nContent-Length: 0", true,
     "POST /new?x=1 HTTP/1.1\r\n", NULL},
    {"308 P\r\nLocation: /new/\r\nContent-Length: 0", true,
     "POST /new/ HTTP/1.1\r\n", NULL},
    {"308 P\r\nLocation: new\r\nContent-Length: 2\r\n\r\nno", false,
     "POST /a/new HTTP/1.1\r\n", NULL},
    {"307 T\r\nLocation: http://127.0.0.1:%u/abs#f\r\nContent-Length: 0", true,
     "POST /abs HTTP/1.1\r\n", NULL},
    {"307 T\r\nLocation: //127.0.0.1:%u/abs\r\nConnection: close\r\n"
     "Content-Length: 0", false, "POST /abs HTTP/1.1\r\n", NULL},
    {"301 M\r\nLocation: /new?key=secret\r\nContent-Length: 0", true, NULL,
     "/new: which would turn it into another request, not followed"},
    {"302 F\r\nLocation: /new\r\nContent-Length: 0", true, NULL,
     "(HTTP 302)"},
    {"303 S\r\nLocation: /new\r\nContent-Length: 0", true, NULL,
     "(HTTP 303)"},
    {"307 T\r\nLocation: http://127.0.0.1:1/x?key=secret\r\nContent-Length: 0",
     true, NULL, "to http://127.0.0.1:1/x: another origin, not followed"},
    {"308 T\r\nLocation: http://localhost:%u/x\r\nContent-Length: 0", true,
     NULL, "another origin"},
    {"307 T\r\nLocation: https://127.0.0.1:%u/x\r\nContent-Length: 0", true,
     NULL, "another origin"},
    {"307 T\r\nLocation: https://127.0.0.1/x\r\nContent-Length: 0", true,
     NULL, "another origin"},
    {"307 T\r\nLocation: ftp://x/\r\nContent-Length: 0", true, NULL,
     "no URL for us"},
    {"307 T\r\nLocation: //me@127.0.0.1:%u/\r\nContent-Length: 0", true, NULL,
     "no URL for us"}};

static void client_redirect(size_t i, bool once) {
    web_step script[] = {REQ, SEND(NULL), REQ, SEND(ANSWER), HOLD};
    mem m = plain_mem();
    http_xchg *x;
    buf text;
    url u;
    http_ask how;
    web w;

    web_open(&w);
    buf_init(&text, &m, 10000);
    buf_add(&text, S("HTTP/1.1 "));
    buf_fmt(&text, client_redirects[i].head, (unsigned)w.at.port);
    if (str_find(buf_str(&text), S("\r\n\r\n")) == SIZE_MAX)
        buf_add(&text, S("\r\n\r\n"));
    script[1].text = buf_z(&text);
    w.scripts[0] = script;
    w.scripts[1] = script + 2;
    u = web_url(&w, "/a/b");
    how = web_ask(&w, &u, "body");
    how.headers = S("Authorization: Bearer t\r\n");
    how.repeatable = !once;
    x = http_start(&w.client, &how, &w.owner);
    web_until(&w, x, HTTP_DONE);
    if (client_redirects[i].next) {
        size_t at = str_find(buf_str(&w.log), str_of(client_redirects[i].next));
        str second = str_skip(buf_str(&w.log), at);
        CHECK_INT(http_now(x), HTTP_DONE);
        CHECK(at != SIZE_MAX && at > 0);
        CHECK(str_find(second, S("\r\nAuthorization: Bearer t\r\n")) !=
              SIZE_MAX);
        CHECK(str_ends(second, S("\r\n\r\nbody")));
        CHECK_INT(w.conns, client_redirects[i].kept ? 1 : 2);
    } else {
        web_says(x, MCP_PROTOCOL_ERROR, client_redirects[i].says);
        CHECK(strstr(buf_z(&http_failure(x)->detail), "secret") == NULL);
        CHECK(http_failure(x)->http_status / 100 == 3);
        CHECK_INT(w.conn[0].requests, 1);
    }
    web_free(&w, x);
    url_free(&m, &u);
    buf_free(&text);
    web_close(&w);
}

// A redirect is a refusal, so even a call that must not be repeated follows.
static void test_fr_65(void) {
    for (size_t i = 0; i < COUNT(client_redirects); i++) {
        client_redirect(i, false);
        client_redirect(i, true);
    }
}

static void test_client_redirect_upgrade(void) {
    static const struct {
        const char *from, *to;
        bool ok;
    } cases[] = {{"http://a/x", "https://a/x", true},
                 {"http://a:80/x", "https://a:443/y", true},
                 {"http://a/x", "https://b/x", false},
                 {"http://a/x", "https://a:8443/x", false},
                 {"http://a:8080/x", "https://a/x", false},
                 {"https://a/x", "http://a/x", false},
                 {"https://a/x", "https://a/x", false}};
    mem m = plain_mem();

    for (size_t i = 0; i < COUNT(cases); i++) {
        url a, b;
        CHECK_INT(url_parse(&m, str_of(cases[i].from), &a), MCP_OK);
        CHECK_INT(url_parse(&m, str_of(cases[i].to), &b), MCP_OK);
        CHECK_INT(redirect_upgrade(&a, &b), cases[i].ok);
        url_free(&m, &a);
        url_free(&m, &b);
    }
}

static void test_client_redirect_limit(void) {
#define ROUND REQ, SEND("HTTP/1.1 307 T\r\nLocation: /x\r\n"                  \
                        "Content-Length: 0\r\n\r\n")
    static const web_step most[] = {ROUND, ROUND, ROUND, ROUND, ROUND, REQ,
                                    SEND(ANSWER), HOLD};
    static const web_step over[] = {ROUND, ROUND, ROUND, ROUND, ROUND, ROUND,
                                    HOLD};
    web w;
    http_xchg *x;

    web_open(&w);
    w.scripts[0] = most;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    CHECK_INT(w.conn[0].requests, LIMIT_REDIRECTS + 1);
    web_close(&w);
    web_open(&w);
    w.scripts[0] = over;
    x = web_start(&w, "/", "1");
    web_until(&w, x, HTTP_DONE);
    web_says(x, MCP_PROTOCOL_ERROR, "too many redirects");
    web_free(&w, x);
    web_close(&w);
}

static const struct {
    web_step script[6];
    const char *says;
} client_slow[] = {
    {{REQ, HOLD}, "no answer from"},
    {{REQ, SEND("HTTP/1.1 200 OK\r\nA: "), HOLD}, "no whole answer from"},
    {{REQ, SEND(HEAD200 "Content-Length: 9\r\n\r\n"), HOLD},
     "no whole answer from"},
    {{REQ, SEND(HEAD200 "Transfer-Encoding: chunked\r\n\r\n3\r\nabc"), HOLD},
     "no whole answer from"}};

static void test_client_deadline(void) {
    for (size_t i = 0; i < COUNT(client_slow); i++) {
        web w;
        http_xchg *x;
        web_open(&w);
        w.scripts[0] = client_slow[i].script;
        x = web_start(&w, "/", "1");
        for (int k = 0; k < 30 || w.conns == 0; k++) web_turn(&w);
        CHECK(http_now(x) < HTTP_DONE);
        web_skip(&w, 4000);  // not yet
        web_idle(&w, 5);
        CHECK(http_now(x) < HTTP_DONE);
        web_skip(&w, 1001);
        web_idle(&w, 5);
        web_says(x, MCP_TIMEOUT, client_slow[i].says);
        web_free(&w, x);
        web_idle(&w, 5);
        CHECK(w.conn[0].ended);
        web_close(&w);
    }
}

// What came in is looked at before the clock.
static void test_client_late_reader(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), HOLD};
    http_xchg *x;
    web w;

    web_open(&w);
    w.scripts[0] = script;
    x = web_start(&w, "/", "1");
    while (!w.conn[0].requests) web_turn(&w);
    loop_turn(&w.server, w.server.loop.now + 1);
    web_skip(&w, 3600000);
    loop_turn(&w.client, w.client.loop.now);
    web_good(&w, x, "{}");
    web_close(&w);
}

// An address that does not answer.
static void test_client_connect_deadline(void) {
    mem m = plain_mem();
    http_xchg *x;
    http_ask how;
    url u;
    web w;

    web_open(&w);
    web_os.deaf_ip = 9;
    u = web_url_at(&w, "127.0.0.9", "/");
    how = web_ask(&w, &u, "1");
    x = http_start(&w.client, &how, &w.owner);
    web_idle(&w, 10);
    CHECK_INT(http_now(x), HTTP_WAITING);
    CHECK(!http_sent(x));
    web_skip(&w, 5500);
    web_idle(&w, 5);
    web_says(x, MCP_TIMEOUT, "no connection to 127.0.0.9:");
    web_free(&w, x);
    url_free(&m, &u);
    web_close(&w);
}

static const char *client_list;  // what the resolver of a test answers

static int client_resolve(void *user, const char *host, char (*out)[46],
                          int cap) {
    int n = 0;
    str all = str_of(client_list), one;
    (void)user, (void)host;

    for (bool more = true; more && n < cap; n++) {
        more = str_cut(all, ' ', &one, &all);
        snprintf(out[n], 46, "%.*s", MCP_ARG(one));
    }
    return n;
}

static http_xchg *client_named(web *w, const char *addresses) {
    mem m = plain_mem();
    url u = web_url_at(w, "some.name.example", "/");
    http_ask how = web_ask(w, &u, "1");
    http_xchg *x;

    client_list = addresses;
    w->client.opt.resolve = client_resolve;
    x = http_start(&w->client, &how, &w->owner);
    url_free(&m, &u);
    return x;
}

// localhost is ::1 first, and the server listens on 127.0.0.1 alone, or the
// other way round.
static void test_fr_70(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), HOLD};
    static const char *const where[] = {"127.0.0.1", "::1"};
    mem m = plain_mem();

    for (int i = 0; i < 2; i++) {
        web w;
        url u;
        http_ask how;
        web_open_at(&w, where[i]);
        w.scripts[0] = w.scripts[1] = script;
        u = web_url_at(&w, "localhost", "/");
        how = web_ask(&w, &u, "1");
        web_good(&w, http_start(&w.client, &how, &w.owner), "{}");
        web_good(&w, web_start(&w, "/", "2"), "{}");  // also as a literal
        CHECK_INT(w.conns, 2);
        url_free(&m, &u);
        web_close(&w);
    }
}

static void test_client_addresses(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), HOLD};
    http_xchg *x;
    web w;

    web_open(&w);  // refused, refused, good: at once
    w.scripts[0] = script;
    web_good(&w, client_named(&w, "127.0.0.2 127.0.0.3 127.0.0.1"), "{}");
    CHECK_INT(web_os.connects, 3);
    web_close(&w);

    web_open(&w);  // the first says nothing: the next after 250 ms
    w.scripts[0] = script;
    web_os.deaf_ip = 9;
    x = client_named(&w, "127.0.0.9 127.0.0.1");
    web_idle(&w, 10);
    CHECK_INT(web_os.connects, 1);
    CHECK_INT(http_now(x), HTTP_WAITING);
    web_skip(&w, TIME_NEXT_ADDRESS);
    web_good(&w, x, "{}");
    CHECK_INT(web_os.connects, 2);
    web_close(&w);

    web_open(&w);  // none: the first cause is told
    x = client_named(&w, "127.0.0.2 127.0.0.3");
    web_until(&w, x, HTTP_DONE);
    web_says(x, MCP_CONNECTION_FAILED, "cannot connect to some.name.example:");
    web_says(x, MCP_CONNECTION_FAILED, "refused");
    CHECK(!http_sent(x));
    web_free(&w, x);
    web_close(&w);

    web_open(&w);
    w.client.opt.resolve = client_resolve;
    x = client_named(&w, "no address at all");
    web_until(&w, x, HTTP_DONE);
    web_says(x, MCP_CONNECTION_FAILED, "some.name.example");
    web_free(&w, x);
    web_close(&w);
}

static void client_big(const web_step *script, size_t max, mcp_code code,
                       size_t n) {
    mem m = plain_mem();
    http_xchg *x;
    http_ask how;
    url u;
    web w;

    web_open(&w);
    w.scripts[0] = script;
    u = web_url(&w, "/");
    how = web_ask(&w, &u, "1");
    how.max_body = max;
    x = http_start(&w.client, &how, &w.owner);
    web_until(&w, x, HTTP_DONE);
    CHECK_INT(http_now(x), code ? HTTP_FAILED : HTTP_DONE);
    CHECK_INT(http_failure(x)->code, code);
    if (!code) CHECK_INT(http_body(x).len, n);
    for (size_t i = 0; !code && i < http_body(x).len; i += 997)
        CHECK(http_body(x).ptr[i] == 'x');
    web_free(&w, x);
    url_free(&m, &u);
    web_close(&w);
}

// Both sides of max_body, for each way to say where a body ends.
static void test_client_big(void) {
    static const web_step length[] = {
        REQ, SEND(HEAD200 "Content-Length: 3000000\r\n\r\n"), FLOOD(3000000),
        HOLD};
    static const web_step chunks[] = {
        REQ, SEND(HEAD200 "Transfer-Encoding: chunked\r\n\r\n16e360\r\n"),
        FLOOD(1500000), SEND("\r\n1\r\nx\r\n00016e35F;y\r\n"), FLOOD(1499999),
        SEND("\r\n0\r\n\r\n"), HOLD};
    static const web_step end[] = {REQ, SEND(HEAD200 "\r\n"), FLOOD(3000000),
                                   CLOSE};
    static const web_step *const all[] = {length, chunks, end};

    for (size_t i = 0; i < COUNT(all); i++) {
        client_big(all[i], 3000000, MCP_OK, 3000000);
        client_big(all[i], 3000001, MCP_OK, 3000000);
        client_big(all[i], 2999999, MCP_LIMIT_EXCEEDED, 0);
        client_big(all[i], 100, MCP_LIMIT_EXCEEDED, 0);
    }
}

// The body of an error is cut and told all the same.
static void test_client_big_error(void) {
    static const web_step length[] = {
        REQ, SEND("HTTP/1.1 500 Oh\r\nContent-Length: 900000\r\n\r\n"),
        FLOOD(900000), HOLD};
    static const web_step chunks[] = {
        REQ, SEND("HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n10000"
                  "\r\n"), FLOOD(65536), SEND("\r\n1\r\nx"), HOLD};
    static const web_step whole[] = {
        REQ, SEND("HTTP/1.1 404 No\r\nTransfer-Encoding: chunked\r\n\r\n10000"
                  "\r\n"), FLOOD(65536), SEND("\r\n0\r\n\r\n"), REQ,
        SEND(ANSWER), HOLD};
    static const web_step end[] = {REQ, SEND("HTTP/1.1 400 Bad\r\n\r\n"),
                                   FLOOD(900000), CLOSE};
    static const web_step *const all[] = {length, chunks, whole, end};
    static const web_step fresh[] = {REQ, SEND(ANSWER), HOLD};

    for (size_t i = 0; i < COUNT(all); i++) {
        web w;
        client_big(all[i], 1 << 20, MCP_OK, LIMIT_HTTP_ERROR);
        client_big(all[i], 100, MCP_OK, 100);
        web_open(&w);  // only a whole one leaves a usable connection
        w.scripts[0] = all[i];
        w.scripts[1] = fresh;
        http_xchg *x = web_start(&w, "/", "1");
        web_until(&w, x, HTTP_DONE);
        web_free(&w, x);
        web_good(&w, web_start(&w, "/", "2"), "{}");
        CHECK_INT(w.conns, all[i] == whole ? 1 : 2);
        web_close(&w);
    }
}

static http_xchg *client_upload(web *w, size_t n) {
    mem m = plain_mem();
    url u = web_url(w, "/");
    http_ask how = web_ask(w, &u, NULL);
    char *big = malloc(n);
    http_xchg *x;

    memset(big, 'y', n);
    how.body = str_make(big, n);
    x = http_start(&w->client, &how, &w->owner);
    free(big);
    url_free(&m, &u);
    return x;
}

// A large request; and a server that answers before it has heard it all.
static void test_client_upload(void) {
    static const web_step good[] = {REQ, SEND(ANSWER), REQ, SEND(ANSWER),
                                    HOLD};
    static const web_step early[] = {
        SEND("HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig"), DEAF};
    static const web_step fresh[] = {REQ, SEND(ANSWER), HOLD};
    http_xchg *x;
    web w;

    web_open(&w);
    w.scripts[0] = good;
    web_good(&w, client_upload(&w, 8 << 20), "{}");
    CHECK(w.log.len > 8 << 20);
    CHECK_STR(str_skip(buf_str(&w.log), w.log.len - 4), S("yyyy"));
    web_good(&w, web_start(&w, "/", "2"), "{}");
    CHECK_INT(w.conns, 1);
    web_close(&w);

    web_open(&w);
    w.scripts[0] = early;
    w.scripts[1] = fresh;
    x = client_upload(&w, 32 << 20);
    web_until(&w, x, HTTP_DONE);
    CHECK_INT(http_answer(x)->status, 413);
    web_good(&w, x, "big");
    web_good(&w, web_start(&w, "/", "2"), "{}");
    CHECK_INT(w.conns, 2);
    web_close(&w);
}

// The next event as "type|data|id", waiting for it; "" when it is over.
static void client_event(web *w, http_xchg *x, buf *out) {
    sse_event e;

    buf_clear(out);
    for (int i = 0; i < 2000; i++) {
        if (http_event(x, &e)) {
            buf_fmt(out, "%.*s|%.*s|%.*s", MCP_ARG(e.type), MCP_ARG(e.data),
                    MCP_ARG(e.id));
            return;
        }
        if (http_now(x) >= HTTP_DONE) return;
        web_turn(w);
    }
    CHECK_STR(S("no event"), S("an event"));
}

static const struct {
    web_step script[10];
    const char *events[5];
    http_state end;
} client_streams[] = {
    {{REQ, SEND(STREAM200 "\r\n: hello\n\n"), PAUSE(2),
      SEND("id: 1\ndata: a\n\nevent: x\nda"), PAUSE(2),
      SEND("ta: b\n\ndata: c\n"), CLOSE},
     {"message|a|1", "x|b|1", ""}, HTTP_DONE},
    {{REQ, SEND(STREAM200 "Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n"
                "\r\n"), PAUSE(2), SEND("7\r\ndata: b\r\n2\r\n\n\n\r\n0\r\n"),
      PAUSE(2), SEND("\r\n"), HOLD},
     {"message|a|", "message|b|", ""}, HTTP_DONE},
    {{REQ, SEND(STREAM200 "Content-Length: 18\r\n\r\ndata: a\n\ndata: b\n\n"),
      HOLD},
     {"message|a|", "message|b|", ""}, HTTP_DONE},
    {{REQ, SEND(STREAM200 "Content-Length: 0\r\n\r\n"), HOLD},
     {""}, HTTP_DONE},
    {{REQ, SEND(STREAM200 "Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n"
                "\r\n"), CLOSE},
     {"message|a|", ""}, HTTP_FAILED},
    {{REQ, SEND(STREAM200 "Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n"
                "x"), HOLD},
     {"message|a|", ""}, HTTP_FAILED},
    {{REQ, SEND("HTTP/1.1 200 OK\r\nContent-Type: Text/Event-Stream; "
                "charset=utf-8\r\n\r\ndata: a\r\n\r\n"), CLOSE},
     {"message|a|", ""}, HTTP_DONE}};

static void test_client_stream(void) {
    mem m = plain_mem();
    buf got;

    buf_init(&got, &m, 10000);
    for (size_t i = 0; i < COUNT(client_streams) * 2; i++) {
        web_step script[10];
        http_xchg *x;
        web w;
        memcpy(script, client_streams[i / 2].script, sizeof script);
        for (size_t k = 0; i & 1 && k < COUNT(script); k++)
            if (script[k].act == WEB_SEND) script[k].act = WEB_TRICKLE;
        web_open(&w);
        w.scripts[0] = script;
        x = web_start(&w, "/", "1");
        CHECK_INT(web_until(&w, x, HTTP_STREAM), HTTP_STREAM);
        for (size_t k = 0; client_streams[i / 2].events[k]; k++) {
            client_event(&w, x, &got);
            CHECK_STR(buf_str(&got), str_of(client_streams[i / 2].events[k]));
        }
        CHECK_INT(http_now(x), client_streams[i / 2].end);
        web_free(&w, x);
        web_close(&w);
    }
    buf_free(&got);
}

// A stream that ended in good order leaves its connection to the next.
static void test_client_stream_reuse(void) {
    static const web_step script[] = {
        REQ, SEND(STREAM200 "Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n"
                  "\n\r\n0\r\n\r\n"), REQ, SEND(ANSWER), HOLD};
    mem m = plain_mem();
    http_xchg *x;
    buf got;
    web w;

    web_open(&w);
    w.scripts[0] = script;
    buf_init(&got, &m, 100);
    x = web_start(&w, "/", "1");
    client_event(&w, x, &got);
    client_event(&w, x, &got);
    CHECK_INT(http_now(x), HTTP_DONE);
    web_free(&w, x);
    web_good(&w, web_start(&w, "/", "2"), "{}");
    CHECK_INT(w.conns, 1);
    buf_free(&got);
    web_close(&w);
}

// Nobody takes the events: we stop reading, and the server has to wait.
static void test_client_stream_flood(void) {
    static const web_step script[] = {REQ, SEND(STREAM200 "\r\n"),
                                      EVENTS(60000), CLOSE};
    http_xchg *x;
    sse_event e;
    size_t before, events = 0;
    web w;

    web_open(&w);
    w.scripts[0] = script;
    x = web_start(&w, "/", "1");
    CHECK_INT(web_until(&w, x, HTTP_STREAM), HTTP_STREAM);
    before = w.heap.live;
    web_idle(&w, 50);
    CHECK(w.heap.live <= before);
    CHECK(w.flood < 40000000);  // what two sockets hold
    while (http_now(x) == HTTP_STREAM) {
        while (http_event(x, &e)) events++;
        CHECK(w.heap.live < before + 10000);
        web_turn(&w);
    }
    CHECK_INT(http_now(x), HTTP_DONE);
    CHECK_INT(events, 60000);
    web_free(&w, x);
    web_close(&w);
}

static void test_client_stream_limit(void) {
    static const web_step script[] = {REQ, SEND(STREAM200 "\r\ndata: "),
                                      FLOOD(50000), SEND("\n\n"), HOLD};
    mem m = plain_mem();

    for (size_t max = 49999; max <= 50000; max++) {
        http_xchg *x;
        sse_event e;
        http_ask how;
        url u;
        web w;
        bool any = false;
        web_open(&w);
        w.scripts[0] = script;
        u = web_url(&w, "/");
        how = web_ask(&w, &u, "1");
        how.max_body = max;
        x = http_start(&w.client, &how, &w.owner);
        for (int i = 0; i < 1000 && !any && http_now(x) < HTTP_DONE; i++) {
            web_turn(&w);
            any = http_event(x, &e);
        }
        CHECK_INT(any, max == 50000);
        if (!any) web_says(x, MCP_LIMIT_EXCEEDED, "49999");
        web_free(&w, x);
        url_free(&m, &u);
        web_close(&w);
    }
}

// The deadline is for the head; a stream may last, unless it was asked not to.
static void test_client_stream_deadline(void) {
    static const web_step script[] = {REQ, SEND(STREAM200 "\r\ndata: a\n\n"),
                                      HOLD};
    mem m = plain_mem();

    for (int keep = 0; keep < 2; keep++) {
        http_xchg *x;
        sse_event e;
        http_ask how;
        url u;
        web w;
        web_open(&w);
        w.scripts[0] = script;
        u = web_url(&w, "/");
        how = web_ask(&w, &u, "1");
        how.keep_deadline = keep;
        x = http_start(&w.client, &how, &w.owner);
        CHECK_INT(web_until(&w, x, HTTP_STREAM), HTTP_STREAM);
        CHECK(http_event(x, &e));
        web_skip(&w, 1000000);
        web_idle(&w, 5);
        CHECK_INT(http_now(x), keep ? HTTP_FAILED : HTTP_STREAM);
        if (keep) web_says(x, MCP_TIMEOUT, "no whole answer");
        CHECK(!http_event(x, &e));
        web_free(&w, x);
        url_free(&m, &u);
        web_close(&w);
    }
}

static const struct {
    web_step script[5];
    http_state at;
} client_cancels[] = {
    {{HOLD}, HTTP_WAITING},
    {{DEAF}, HTTP_SENDING},
    {{REQ, HOLD}, HTTP_HEAD},
    {{REQ, SEND("HTTP/1.1 200"), HOLD}, HTTP_HEAD},
    {{REQ, SEND(HEAD200 "Content-Length: 9\r\n\r\nabc"), HOLD}, HTTP_BODY},
    {{REQ, SEND(STREAM200 "\r\ndata: x\n\n"), HOLD}, HTTP_STREAM}};

// Giving up, in every state, closes the connection and leaves nothing.
static void test_client_cancel(void) {
    int fds = web_fds();

    for (size_t i = 0; i < COUNT(client_cancels) * 2; i++) {
        http_state at = client_cancels[i / 2].at;
        http_xchg *x;
        web w;
        web_open(&w);
        w.scripts[0] = client_cancels[i / 2].script;
        x = at == HTTP_SENDING ? client_upload(&w, 32 << 20)
                               : web_start(&w, "/", "1");
        http_hot(&w.client, x, i & 1);
        CHECK_INT(web_until(&w, x, at), at);
        if (at > HTTP_WAITING) web_idle(&w, 10);
        http_hot(&w.client, x, i & 1);
        CHECK_INT(http_now(x), at);
        CHECK(http_answer(x)->status == (at >= HTTP_BODY ? 200 : 0));
        web_free(&w, x);
        web_idle(&w, 10);
        if (at > HTTP_WAITING && at != HTTP_SENDING) CHECK(w.conn[0].ended);
        CHECK_INT(w.client.loop.n, 1);  // only the self-pipe is watched
        web_close(&w);
        CHECK_INT(web_fds(), fds);
    }
}

// Also while addresses are being tried.
static void test_client_cancel_connect(void) {
    int fds = web_fds();
    http_xchg *x;
    web w;

    web_open(&w);
    web_os.deaf_ip = 9;
    x = client_named(&w, "127.0.0.9 127.0.1.9 127.0.2.9");
    http_hot(&w.client, x, true);
    web_idle(&w, 5);
    web_skip(&w, TIME_NEXT_ADDRESS);
    web_idle(&w, 5);
    CHECK_INT(web_os.connects, 2);
    CHECK_INT(w.client.loop.n, 3);
    http_hot(&w.client, x, false);
    web_free(&w, x);
    CHECK_INT(w.client.loop.n, 1);
    web_close(&w);
    CHECK_INT(web_fds(), fds);
}

// The handle goes while an exchange is under way.
static void test_client_free(void) {
    static const web_step script[] = {REQ, SEND(ANSWER), REQ,
                                      SEND(STREAM200 "\r\ndata: a\n\n"), HOLD};
    http_xchg *x;
    sse_event e;
    web w;

    web_open(&w);
    w.scripts[0] = script;
    web_good(&w, web_start(&w, "/", "1"), "{}");
    x = web_start(&w, "/", "2");
    CHECK_INT(web_until(&w, x, HTTP_STREAM), HTTP_STREAM);
    http_free(&w.client);
    web_says(x, MCP_CANCELLED, "");
    CHECK(!http_event(x, &e));
    http_hot(&w.client, x, true);
    web_free(&w, x);
    http_free(&w.client);
    http_end(&w.client, NULL);
    web_close(&w);
}

// Every allocation of whole flows fails once; the exchange then says so, or
// was not made, and nothing stays.
static void client_tortured(int flow, size_t fail_at, bool *failed) {
    static const web_step plain[] = {REQ, SEND(ANSWER), REQ, SEND(ANSWER),
                                     HOLD};
    static const web_step moved[] = {
        REQ, SEND("HTTP/1.1 307 T\r\nLocation: /x\r\nContent-Length: 0\r\n"
                  "\r\n"), REQ,
        SEND(HEAD200 "Transfer-Encoding: chunked\r\n\r\n3e8\r\n"), FLOOD(1000),
        SEND("\r\n0\r\n\r\n"), HOLD};
    static const web_step events[] = {
        REQ, SEND(STREAM200 "\r\nid: 1\nevent: e\ndata: "), FLOOD(500),
        SEND("\n\n"), CLOSE};
    static const web_step stale[] = {REQ, SEND(ANSWER), REQ, CLOSE};
    static const web_step *const scripts[] = {plain, moved, events, stale};
    int requests = flow == 0 || flow == 3 ? 2 : 1;
    mem m = plain_mem();
    http_ask how;
    url u;
    web w;

    web_open(&w);
    w.scripts[0] = scripts[flow];
    w.scripts[1] = plain;
    u = web_url(&w, "/");
    how = web_ask(&w, &u, "1");
    w.heap.calls = 0;
    w.heap.fail_at = fail_at;
    for (int i = 0; i < requests && !w.heap.failed; i++) {
        http_xchg *x = http_start(&w.client, &how, &w.owner);
        sse_event e;
        if (!x) {
            CHECK(w.heap.failed);
            break;
        }
        for (int k = 0; k < 1000 && http_now(x) < HTTP_DONE; k++) {
            web_turn(&w);
            while (http_event(x, &e)) CHECK_INT(e.data.len, 500);
        }
        CHECK(http_now(x) >= HTTP_DONE);
        if (http_now(x) == HTTP_FAILED)
            CHECK(w.heap.failed &&
                  http_failure(x)->code == MCP_OUT_OF_MEMORY);
        web_free(&w, x);
    }
    *failed = w.heap.failed;
    url_free(&m, &u);
    web_close(&w);
}

static void test_client_torture(void) {
    int fds = web_fds();

    for (int flow = 0; flow < 4; flow++) {
        bool failed = true;
        for (size_t n = 1; failed && n < 500; n++)
            client_tortured(flow, n, &failed);
        CHECK(!failed);
    }
    CHECK_INT(web_fds(), fds);
}

static const test tests_client[] = {
    {"client.request", test_client_request},
    {"client.calls", test_client_calls},
    {"client.answers", test_client_answers},
    {"client.faults", test_client_faults},
    {"client.quiet", test_client_quiet},
    {"client.excess", test_client_excess},
    {"client.reuse_age", test_client_reuse_age},
    {"client.pool_limit", test_client_pool_limit},
    {"client.origins", test_client_origins},
    {"client.redirect_upgrade", test_client_redirect_upgrade},
    {"client.redirect_limit", test_client_redirect_limit},
    {"client.deadline", test_client_deadline},
    {"client.late_reader", test_client_late_reader},
    {"client.connect_deadline", test_client_connect_deadline},
    {"client.addresses", test_client_addresses},
    {"client.big", test_client_big},
    {"client.big_error", test_client_big_error},
    {"client.upload", test_client_upload},
    {"client.stream", test_client_stream},
    {"client.stream_reuse", test_client_stream_reuse},
    {"client.stream_flood", test_client_stream_flood},
    {"client.stream_limit", test_client_stream_limit},
    {"client.stream_deadline", test_client_stream_deadline},
    {"client.cancel", test_client_cancel},
    {"client.cancel_connect", test_client_cancel_connect},
    {"client.free", test_client_free},
    {"client.torture", test_client_torture},
    {"fr.65", test_fr_65},
    {"fr.67", test_fr_67},
    {"fr.68", test_fr_68},
    {"fr.70", test_fr_70},
};
//=============================================================================
// MARK: - 13 Processes
//
// Real children of /bin/sh, each for two or three seconds at most.
//=============================================================================

#if USE_STDIO || USE_HTTP

// A child under test, its stdout and the job that owns it.
typedef struct child {
    job job;
    rig *rig;
    proc *proc;
    diag why;
    buf out;
    bool ended, settled;
    int steps;
} child;

static void child_step(mcp *m, job *j) {
    child *c = (child *)j;
    char b[4096];
    ptrdiff_t n;

    c->steps++;
    if (!c->proc) return;
    while ((n = io_read(m, proc_io(c->proc), b, sizeof b)) > 0)
        buf_add(&c->out, str_make(b, (size_t)n));
    if (n == IO_END) c->ended = true;
    if (c->ended && proc_settled(c->proc)) c->settled = true;
}

static bool child_spec(rig *r, child *c, const proc_spec *spec) {
    memset(c, 0, sizeof *c);
    c->rig = r;
    diag_init(&c->why, &r->m.mem, &r->m.secrets);
    buf_init(&c->out, &r->m.mem, 1 << 20);
    if (!job_init(&r->m, &c->job, child_step)) return false;
    c->proc = proc_start(&r->m, spec, &c->job, &c->why);
    if (c->proc) io_want(&r->m, proc_io(c->proc), true, false);
    return c->proc != NULL;
}

// sh -c script
static bool child_sh(rig *r, child *c, const char *script) {
    char sh[] = "sh", opt[] = "-c", text[2000], *argv[] = {sh, opt, text, NULL};
    proc_spec spec = {0};

    snprintf(text, sizeof text, "%s", script);
    spec.command = sh;
    spec.argv = argv;
    spec.server = "kid";
    return child_spec(r, c, &spec);
}

static void child_free(rig *r, child *c) {
    job_end(&r->m, &c->job);
    diag_free(&c->why);
    buf_free(&c->out);
}

static int64_t ms_now(void) {
    return unix_now_ms(NULL);
}

// Turn the loop until `flag`, or for `ms`.
static bool turn_until(rig *r, const bool *flag, int ms) {
    int64_t end = ms_now() + ms;
    while (!*flag && ms_now() < end) loop_turn(&r->m, end);
    return *flag;
}

// Stop everything as mcp_close() does; how long it took.
static int64_t all_gone(rig *r) {
    int64_t begun = ms_now();
    loop_drain_cancel(&r->m);
    for (proc *p = r->m.procs; p; p = p->next) proc_stop(p);
    while (!procs_gone(&r->m) && ms_now() < begun + 9000)
        loop_turn(&r->m, begun + 9000);
    CHECK(procs_gone(&r->m));
    return ms_now() - begun;
}

// Nothing is left: no descriptor, no child, no memory.
static void rig_bare(rig *r, int fds_before) {
    rig_free(r);
    CHECK_INT(fds_open(), fds_before);
    CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

// Processes of a group that live; orphans may stay zombies where nobody reaps.
static int group_alive(int group) {
    char line[600], *p;
    int n = 0, state, g;
    FILE *f = popen("cat /proc/[0-9]*/stat 2>/dev/null", "r");

    while (f && fgets(line, sizeof line, f)) {
        p = strrchr(line, ')');
        if (!p || strlen(p) < 4) continue;
        state = p[2];
        strtol(p + 4, &p, 10);  // parent
        g = (int)strtol(p, NULL, 10);
        if (g == group && state != 'Z' && state != 'X') n++;
    }
    if (f) pclose(f);
    return n;
}

#if USE_STDIO

static bool child_detail_has(const child *c, const char *what) {
    if (str_find(buf_str(&c->why.detail), str_of(what)) != SIZE_MAX)
        return true;
    printf("detail: %s\n", buf_z(&c->why.detail));
    return false;
}

static void test_proc_echo(void) {
    int before = fds_open(), pid;
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL)) || !CHECK(child_sh(&r, &c, "cat"))) return;
    pid = c.proc->pid;
    CHECK(getsid(pid) == pid && getpgid(pid) == pid);
    CHECK_INT(io_write(&r.m, proc_io(c.proc), "hello\n", 6), 6);
    for (int i = 0; i < 50 && !c.out.len; i++)
        loop_turn(&r.m, r.m.loop.now + 100);
    CHECK_STR(buf_str(&c.out), S("hello\n"));
    CHECK(all_gone(&r) < 900);  // the end of its stdin is enough
    CHECK_INT(kill(pid, 0), -1);
    child_free(&r, &c);
    rig_bare(&r, before);
}

// fr.9: noticed at once, with what it said.
static void test_proc_early_exit(void) {
    int before = fds_open();
    int64_t begun = ms_now();
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(child_sh(&r, &c, "echo early >&2; echo boom >&2; exit 3"));
    CHECK(turn_until(&r, &c.settled, 5000));
    CHECK(ms_now() - begun < 2000);
    CHECK(c.proc->ended);
    fail(&c.why, MCP_CONNECTION_FAILED, "\"sh\" ended");
    proc_why(c.proc, &c.why);
    CHECK_STR(buf_str(&c.why.detail),
              S("\"sh\" ended\n"
                "The process ended with exit status 3.\n"
                "Its last lines on stderr:\nearly\nboom"));
    CHECK_INT(c.why.exit_status, 3);
    CHECK(all_gone(&r) < 900);
    child_free(&r, &c);
    rig_bare(&r, before);
}

static void test_proc_signalled(void) {
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(child_sh(&r, &c, "kill -KILL $$"));
    CHECK(turn_until(&r, &c.settled, 5000));
    proc_why(c.proc, &c.why);
    CHECK(child_detail_has(&c, "The process was ended by SIGKILL."));
    CHECK_INT(c.why.exit_status, 137);
    all_gone(&r);
    child_free(&r, &c);
    rig_free(&r);
}

static void test_proc_last_lines(void) {
    static const struct {
        const char *in;
        int lines;
        size_t max;
        const char *want;
    } t[] = {
        {"", 3, 100, ""},           {"a\n", 3, 100, "a"},
        {"a\nb\nc\n", 2, 100, "b\nc"}, {"a\nb\nc", 3, 100, "a\nb\nc"},
        {"abcdef", 3, 4, "cdef"},   {"a\n\nb\n", 2, 100, "\nb"},
    };
    for (size_t i = 0; i < COUNT(t); i++)
        CHECK_STR(proc_last_lines(str_of(t[i].in), t[i].lines, t[i].max),
                  str_of(t[i].want));
}

// fr.17, fr.18: three faults, three sentences, each with its setting.
static void test_proc_missing(void) {
    char env_path[700], *env[2] = {env_path, NULL};
    char none[] = "no-such", *argv[] = {none, NULL};
    int before = fds_open();
    proc_spec spec = {0};
    place p;
    child c;
    rig r;

    place_init(&p);
    if (!CHECK(rig_init(&r, NULL))) return;
    place_put(&p, "plain", "text", 0644);
    snprintf(env_path, sizeof env_path, "PATH=/usr/bin:%s", p.dir);
    spec.argv = argv;
    spec.env = env;
    spec.command = none;
    CHECK(!child_spec(&r, &c, &spec));
    CHECK_INT(c.why.code, MCP_CONNECTION_FAILED);
    CHECK(child_detail_has(&c, "\"command\" was not found: no \"no-such\" in PATH "
                         "(/usr/bin:"));
    child_free(&r, &c);

    spec.command = "./no-such";
    CHECK(!child_spec(&r, &c, &spec));
    CHECK_STR(buf_str(&c.why.detail),
              S("\"command\" was not found: \"./no-such\""));
    child_free(&r, &c);

    spec.command = "plain";
    CHECK(!child_spec(&r, &c, &spec));
    CHECK(child_detail_has(&c, "\"command\" names a file that cannot be executed: "
                         "\"plain\""));
    child_free(&r, &c);

    spec.command = "no-such-either";  // the directory comes first
    spec.cwd = "/nope";
    CHECK(!child_spec(&r, &c, &spec));
    CHECK_STR(buf_str(&c.why.detail), S("\"cwd\" names no directory: "
                                        "\"/nope\""));
    child_free(&r, &c);

    place_put(&p, "lame-one", "#!/no/such/interpreter\n", 0755);
    spec.cwd = NULL;
    spec.command = "lame-one";
    if (child_spec(&r, &c, &spec)) {  // valgrind makes a fork of the spawn
        CHECK(turn_until(&r, &c.settled, 5000) && c.proc->status > 0);
        all_gone(&r);
    } else {
        CHECK(child_detail_has(&c, "cannot be executed: \"lame-one\""));
    }
    child_free(&r, &c);

    memset(env_path + 5, 'x', 600);  // a long PATH is shown cut
    env_path[605] = 0;
    spec.command = none;
    CHECK(!child_spec(&r, &c, &spec));
    CHECK(child_detail_has(&c, "xx...)") && c.why.detail.len < 400);
    child_free(&r, &c);
    CHECK(procs_gone(&r.m));
    rig_bare(&r, before);
    place_free(&p);
}

// The PATH is the child's own; its relative parts, and a relative command,
// start from its directory; one that cannot be run does not end the search.
static void test_proc_path(void) {
    static const struct {
        const char *path, *command, *want;
    } t[] = {
        {"sub", "tool", "sub\n"},
        {"no:dead:sub:other", "tool", "sub\n"},
        {"other:sub", "tool", "other\n"},
        {":sub", "tool", "here\n"},
        {"sub:", "here-only", "only\n"},
        {"/nope", "sub/tool", "sub\n"},
        {"/nope", "./tool", "here\n"},
    };
    char env_path[100], *env[2] = {env_path, NULL}, command[50];
    char *argv[] = {command, NULL};
    proc_spec spec = {0};
    place p;
    child c;
    rig r;

    place_init(&p);
    if (!CHECK(rig_init(&r, NULL))) return;
    mkdir(place_at(&p, "sub"), 0700);
    mkdir(place_at(&p, "other"), 0700);
    mkdir(place_at(&p, "dead"), 0700);
    place_put(&p, "tool", "#!/bin/sh\necho here\n", 0755);
    place_put(&p, "here-only", "#!/bin/sh\necho only\n", 0755);
    place_put(&p, "sub/tool", "#!/bin/sh\necho sub\n", 0755);
    place_put(&p, "other/tool", "#!/bin/sh\necho other\n", 0755);
    place_put(&p, "dead/tool", "#!/bin/sh\necho dead\n", 0644);
    spec.argv = argv;
    spec.env = env;
    spec.cwd = p.dir;
    spec.command = command;
    for (size_t i = 0; i < COUNT(t); i++) {
        snprintf(env_path, sizeof env_path, "PATH=%s", t[i].path);
        snprintf(command, sizeof command, "%s", t[i].command);
        if (!CHECK(child_spec(&r, &c, &spec))) puts(buf_z(&c.why.detail));
        else CHECK(turn_until(&r, &c.settled, 5000));
        CHECK_STR(buf_str(&c.out), str_of(t[i].want));
        all_gone(&r);
        child_free(&r, &c);
    }
    rig_free(&r);
    place_free(&p);
}

// A child sees nothing of the host but what it is given.
static void test_proc_clean(void) {
    struct sigaction act = {0}, old;
    int leak = open("/dev/null", O_RDONLY);  // not close-on-exec
    sigset_t mask, was;
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    act.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &act, &old);
    sigemptyset(&mask);
    sigaddset(&mask, SIGTERM);
    sigprocmask(SIG_BLOCK, &mask, &was);
    CHECK(child_sh(&r, &c, "grep -E 'SigBlk|SigIgn' /proc/self/status; "
                           "ls /proc/self/fd | wc -l"));
    sigprocmask(SIG_SETMASK, &was, NULL);
    sigaction(SIGPIPE, &old, NULL);
    CHECK(turn_until(&r, &c.settled, 5000));
    CHECK_STR(str_head(buf_str(&c.out), 25), S("SigBlk:\t0000000000000000\n"));
    if (UNIX_ADDCLOSEFROM) CHECK(str_ends(buf_str(&c.out), S("\n4\n")));
    // 32 and 33 are the C library's own.
    CHECK_INT(strtoull(c.out.ptr + 33, NULL, 16) & 0x7FFFFFFF, 0);
    all_gone(&r);
    child_free(&r, &c);
    rig_free(&r);
    close(leak);
}

// Each step has its second, and two at once take no longer than one.
static void test_proc_stop_stubborn(void) {
    const char *deaf = "trap '' TERM; while :; do sleep 0.05; done";
    int before = fds_open(), a, b;
    int64_t took;
    child c[2];
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(child_sh(&r, &c[0], deaf) && child_sh(&r, &c[1], deaf));
    a = c[0].proc->pid, b = c[1].proc->pid;
    loop_turn(&r.m, r.m.loop.now + 100);
    took = all_gone(&r);
    CHECK(took >= 1900 && took < 3500);
    CHECK_INT(group_alive(a) + group_alive(b), 0);
    child_free(&r, &c[0]);
    child_free(&r, &c[1]);
    rig_bare(&r, before);
}

static void test_proc_stop_term(void) {
    int64_t took;
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(child_sh(&r, &c, "exec sleep 999"));  // deaf to the end of stdin
    took = all_gone(&r);
    CHECK(took >= 900 && took < 1900);
    child_free(&r, &c);

    CHECK(child_sh(&r, &c, "exec sleep 999"));
    proc_kill(c.proc);
    CHECK(all_gone(&r) < 900);
    child_free(&r, &c);
    rig_free(&r);
}

// One that must write before it ends is read from while it is being stopped.
static void test_proc_stop_flush(void) {
    int64_t took;
    place p;
    child c;
    rig r;
    char script[600];

    place_init(&p);
    if (!CHECK(rig_init(&r, NULL))) return;
    snprintf(script, sizeof script,
             "cat >/dev/null; head -c 300000 /dev/zero; "
             "head -c 300000 /dev/zero >&2; echo done >'%s'",
             place_at(&p, "done"));
    CHECK(child_sh(&r, &c, script));
    took = all_gone(&r);
    CHECK(took < 900);
    CHECK_INT(place_count(&p), 1);
    child_free(&r, &c);
    rig_free(&r);
    place_free(&p);
}

// fr.12: what the server has started goes with it, however it sits there.
static void test_proc_grandchildren(void) {
    static const struct {
        const char *script;
        int64_t least, most;
    } t[] = {
        {"sleep 999 & exec cat", 0, 900},
        {"sleep 999 >/dev/null 2>&1 & exec cat", 0, 900},
        {"(trap '' TERM; while :; do sleep 0.05; done) & exec cat", 900, 1900},
        {"sleep 999 & sleep 999 & exit 0", 0, 900},
    };
    int before = fds_open(), group;
    int64_t took;
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    for (size_t i = 0; i < COUNT(t); i++) {
        CHECK(child_sh(&r, &c, t[i].script));
        group = c.proc->pid;
        loop_turn(&r.m, r.m.loop.now + 200);
        CHECK(group_alive(group) >= 2 || i == 3);
        took = all_gone(&r);
        CHECK(took >= t[i].least && took < t[i].most);
        for (int k = 0; k < 50 && group_alive(group); k++)
            unix_wait(NULL, NULL, 0, 10);
        CHECK_INT(group_alive(group), 0);
        child_free(&r, &c);
    }
    rig_bare(&r, before);
}

// fr.10: a megabyte on stderr before the answer, and nobody waits for it.
static void test_proc_flood(void) {
    int64_t begun = ms_now();
    told heard;
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    told_init(&heard, &r);
    CHECK(child_sh(&r, &c, "head -c 1000000 /dev/zero | tr '\\0' x >&2; "
                           "echo last >&2; echo done; exec cat"));
    while (!c.out.len && ms_now() < begun + 9000)
        loop_turn(&r.m, begun + 9000);
    CHECK_STR(buf_str(&c.out), S("done\n"));
    CHECK(c.proc->tail.len >= LIMIT_STDERR - 5);
    CHECK(c.proc->tail.len <= 2 * LIMIT_STDERR + PROC_READ);
    CHECK(str_ends(buf_str(&c.proc->tail), S("xlast\n")));
    CHECK(heard.n >= 200);
    all_gone(&r);
    child_free(&r, &c);
    rig_free(&r);
}

static void test_proc_stderr_events(void) {
    const char *script = "printf 'one\\r\\n\\ntwo' >&2; sleep 0.05; "
                         "printf '\\033[1m!\\nlast' >&2";
    told heard;
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    told_init(&heard, &r);
    CHECK(child_sh(&r, &c, script));
    CHECK(turn_until(&r, &c.settled, 5000));
    all_gone(&r);
    CHECK_STR(str_of(heard.text), S("2|kid|one|0|0|0/0|0\n"
                                    "2|kid|two!|0|0|0/0|0\n"
                                    "2|kid|last|0|0|0/0|0\n"));
    child_free(&r, &c);

    told_init(&heard, &r);  // too many are counted, too long ones cut
    CHECK(child_sh(&r, &c, "seq -f '' 1 1000 >/dev/null; yes a | head -n 5000 "
                           "| tr -d x >&2"));
    CHECK(turn_until(&r, &c.settled, 5000));
    all_gone(&r);
    CHECK(heard.n >= PROC_LINES && heard.n < 5000);
    child_free(&r, &c);
    rig_free(&r);
}

// Its stdout is closed but it lives: told so after a quarter of a second.
static void test_proc_closes_stdout(void) {
    int64_t begun = ms_now();
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(child_sh(&r, &c, "exec >&-; exec sleep 5"));
    CHECK(turn_until(&r, &c.settled, 5000));
    CHECK(ms_now() - begun >= TIME_EXIT_LOOK && ms_now() - begun < 2000);
    CHECK(!c.proc->ended);
    proc_why(c.proc, &c.why);
    CHECK(child_detail_has(&c, "The process still runs."));
    CHECK_INT(c.why.exit_status, -1);
    proc_kill(c.proc);
    all_gone(&r);
    child_free(&r, &c);
    rig_free(&r);
}

// A grandchild holds its streams open, so only looking tells that it is gone.
static void test_proc_expect(void) {
    int64_t begun = ms_now();
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(child_sh(&r, &c, "sleep 999 & exit 5"));
    proc_expect_exit(c.proc, true);
    CHECK(turn_until(&r, &c.proc->ended, 5000));
    CHECK(ms_now() - begun < 2000);
    CHECK_INT(c.proc->status, 5);
    loop_turn(&r.m, r.m.loop.now);
    CHECK(c.steps > 0);  // the owner was told
    CHECK(!c.ended);
    all_gone(&r);
    child_free(&r, &c);
    rig_free(&r);
}

// The host's own children are left to the host, also an ended one.
static void test_manners_reap(void) {
    int before = fds_open(), status = 0;
    pid_t own = fork();
    child c;
    rig r;

    if (own == 0) _exit(42);
    if (!CHECK(rig_init(&r, NULL))) return;
    CHECK(child_sh(&r, &c, "exit 0"));
    CHECK(turn_until(&r, &c.settled, 5000));
    all_gone(&r);
    child_free(&r, &c);
    CHECK_INT(waitpid(own, &status, 0), own);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42);
    rig_bare(&r, before);
}

// A host that ignores SIGCHLD reaps behind our back.
static void test_manners_sigchld(void) {
    struct sigaction act = {0}, old;
    child c;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    act.sa_handler = SIG_IGN;
    sigaction(SIGCHLD, &act, &old);
    CHECK(child_sh(&r, &c, "exit 4"));
    CHECK(turn_until(&r, &c.settled, 5000));
    CHECK(c.proc->ended);
    CHECK_INT(c.proc->status, -1);
    proc_why(c.proc, &c.why);
    CHECK(child_detail_has(&c, "The process has ended."));
    CHECK(all_gone(&r) < 900);
    sigaction(SIGCHLD, &old, NULL);
    child_free(&r, &c);
    rig_free(&r);
}

static mcp_code torture_proc(mem *mm) {
    mcp_code rc = MCP_OUT_OF_MEMORY;
    static rig r;
    child c;

    if (!rig_init(&r, mm)) return secrets_free(&r.m.secrets), rc;
    if (child_sh(&r, &c, "exec cat")) {
        CHECK(io_write(&r.m, proc_io(c.proc), "x", 1) == 1);
        loop_turn(&r.m, r.m.loop.now + 5);
        proc_kill(c.proc);
        rc = MCP_OK;
    } else if (c.job.live) {
        CHECK_INT(c.why.code, MCP_OUT_OF_MEMORY);
    }
    all_gone(&r);
    child_free(&r, &c);
    loop_free(&r.m);
    secrets_free(&r.m.secrets);
    return rc;
}

static void test_proc_torture(void) {
    int before = fds_open();
    torture(torture_proc);
    CHECK_INT(fds_open(), before);
    CHECK(waitpid(-1, NULL, WNOHANG) < 0 && errno == ECHILD);
}

#endif  // USE_STDIO

typedef struct asker {
    job job;
    helper *helper;
    bool done;
} asker;

static void asker_step(mcp *m, job *j) {
    asker *a = (asker *)j;
    int status;
    str out;
    (void)m;
    if (a->helper && helper_take(a->helper, &out, &status) != MCP_PENDING)
        a->done = true;
}

// Run sh -c script and take what it answers.
static mcp_code ask_sh(rig *r, const char *script, str input, size_t max,
                       int ms, buf *out, int *status) {
    char sh[] = "sh", opt[] = "-c", text[1000], *argv[] = {sh, opt, text, NULL};
    helper_spec spec = {0};
    mcp_code rc = MCP_OUT_OF_MEMORY;
    asker a = {{0}, NULL, false};
    str got;

    snprintf(text, sizeof text, "%s", script);
    spec.argv = argv;
    spec.input = input;
    spec.max = max;
    loop_drain_cancel(&r->m);
    spec.deadline = r->m.loop.now + ms;
    if (!job_init(&r->m, &a.job, asker_step)) return rc;
    a.helper = helper_start(&r->m, &spec, &a.job);
    if (a.helper) {
        job_wake(&r->m, &a.job);
        turn_until(r, &a.done, 9000);
        rc = helper_take(a.helper, &got, status);
        buf_add(out, got);
    }
    helper_free(&r->m, a.helper);
    job_end(&r->m, &a.job);
    all_gone(r);
    return rc;
}

static void test_helper(void) {
    static const struct {
        const char *script, *input;
        size_t max;
        mcp_code rc;
        const char *out;
        int status;
    } t[] = {
        {"echo hi", "", 100, MCP_OK, "hi\n", 0},
        {"echo hi; echo secret >&2; exit 7", "", 100, MCP_OK, "hi\n", 7},
        {"printf 12345", "", 5, MCP_OK, "12345", 0},
        {"printf 123456", "", 5, MCP_LIMIT_EXCEEDED, "12345", -2},
        {"cat", "in and out", 100, MCP_OK, "in and out", 0},
        {"exec <&-; echo deaf", "not read", 100, MCP_OK, "deaf\n", 0},
        {"read x || echo none", "", 100, MCP_OK, "none\n", 0},
        {"kill -TERM $$", "", 100, MCP_OK, "", 143},
        {"exec >&-; sleep 0.2; exit 6", "", 100, MCP_OK, "", 6},
        {"sleep 999 & echo left; exit 1", "", 100, MCP_OK, "left\n", 1},
    };
    int before = fds_open(), status;
    buf out;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    buf_init(&out, &r.m.mem, 1000);
    for (size_t i = 0; i < COUNT(t); i++) {
        buf_clear(&out);
        CHECK_INT(ask_sh(&r, t[i].script, str_of(t[i].input), t[i].max, 8000,
                         &out, &status), t[i].rc);
        if (t[i].status != -2) {
            CHECK_STR(buf_str(&out), str_of(t[i].out));
            CHECK_INT(status, t[i].status);
        }
    }
    buf_free(&out);
    rig_bare(&r, before);
}

static void test_helper_big(void) {
    char *big = malloc(300000);
    int status;
    buf out;
    rig r;

    if (!CHECK(rig_init(&r, NULL)) || !CHECK(big != NULL)) return;
    buf_init(&out, &r.m.mem, 1 << 20);
    memset(big, 'q', 300000);
    CHECK_INT(ask_sh(&r, "cat", str_make(big, 300000), 1 << 20, 8000, &out,
                     &status), MCP_OK);
    CHECK_STR(buf_str(&out), str_make(big, 300000));
    free(big);
    buf_free(&out);
    rig_free(&r);
}

static void test_helper_late(void) {
    int64_t begun = ms_now();
    int status;
    buf out;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    buf_init(&out, &r.m.mem, 1000);
    CHECK_INT(ask_sh(&r, "trap '' TERM; echo half; sleep 999", S(""), 100, 200,
                     &out, &status), MCP_TIMEOUT);
    CHECK(ms_now() - begun >= 200 && ms_now() - begun < 2000);
    buf_free(&out);
    rig_free(&r);
}

static void test_helper_start(void) {
    char none[] = "/no/such", *argv[] = {none, NULL};
    char nap[] = "sleep", time[] = "999", *napping[] = {nap, time, NULL};
    helper_spec spec = {0};
    helper *h;
    int status;
    str out;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    spec.argv = argv;
    spec.deadline = NEVER;
    h = helper_start(&r.m, &spec, NULL);
    CHECK(h && helper_take(h, &out, &status) == MCP_OPERATION_FAILED);
    helper_free(&r.m, h);
    helper_free(&r.m, NULL);
    spec.argv = napping;  // freed while it runs
    h = helper_start(&r.m, &spec, NULL);
    CHECK(h && helper_take(h, &out, &status) == MCP_PENDING);
    helper_free(&r.m, h);
    CHECK(all_gone(&r) < 900);
    rig_free(&r);
}

static mcp_code torture_helper(mem *mm) {
    mcp_code rc = MCP_OUT_OF_MEMORY;
    static rig r;
    int status;
    buf out;

    if (!rig_init(&r, mm)) return secrets_free(&r.m.secrets), rc;
    buf_init(&out, mm, 1000);
    rc = ask_sh(&r, "cat", S("text"), 100, 8000, &out, &status);
    if (!rc && out.err) rc = out.err;
    buf_free(&out);
    loop_free(&r.m);
    secrets_free(&r.m.secrets);
    return rc;
}

static void test_helper_torture(void) {
    int before = fds_open();
    torture(torture_helper);
    CHECK_INT(fds_open(), before);
}

#endif  // USE_STDIO || USE_HTTP

static char *const *fake_environ(os *o) {
    return o->user;
}

// fr.16: `env` adds to what is inherited, and replaces what it names.
static void test_proc_env(void) {
    static const char *const over[] = {"A", "1",    "TERM", "dumb", "A",
                                       "2", "PATH", "/x"};
    char e[][40] = {"HOME=/h",  "PATH=/bin",      "TERM=xterm",    "X=secret",
                    "LC_ALL=C", "HOMER=simpson",  "SHELL=() { :; }",
                    "broken",   "https_proxy=p:1", "=odd"};
    char *from[COUNT(e) + 1];
    char *nothing[] = {NULL};
    char **env;
    arena a;
    rig r;
    buf all;

    if (!CHECK(rig_fake(&r))) return;
    for (size_t i = 0; i < COUNT(e); i++) from[i] = e[i];
    from[COUNT(e)] = NULL;
    r.m.os.environ = fake_environ;
    arena_init(&a, &r.m.mem, 1 << 16);
    buf_init(&all, &r.m.mem, 1 << 16);

    r.m.os.user = from;
    env = env_make(&r.m, &a, false, over, 4);
    for (; env && *env; env++) buf_fmt(&all, "%s\n", *env);
    CHECK_STR(buf_str(&all), S("HOME=/h\nLC_ALL=C\nhttps_proxy=p:1\n"
                               "TERM=dumb\nA=2\nPATH=/x\n"));
    buf_clear(&all);
    env = env_make(&r.m, &a, true, over, 1);
    for (; env && *env; env++) buf_fmt(&all, "%s\n", *env);
    CHECK_STR(buf_str(&all),
              S("HOME=/h\nPATH=/bin\nTERM=xterm\nX=secret\nLC_ALL=C\n"
                "HOMER=simpson\nSHELL=() { :; }\nhttps_proxy=p:1\n=odd\n"
                "A=1\n"));
    r.m.os.user = nothing;
    env = env_make(&r.m, &a, false, NULL, 0);
    CHECK(env && !*env);
    r.m.os.user = &r;
    arena_free(&a);
    buf_free(&all);
    rig_free(&r);
}

#if !USE_STDIO && !USE_HTTP

static void test_helper_left_out(void) {
    helper_spec spec = {0};
    helper *h;
    int status;
    str out;
    rig r;

    if (!CHECK(rig_init(&r, NULL))) return;
    h = helper_start(&r.m, &spec, NULL);
    CHECK(h && helper_take(h, &out, &status) == MCP_NOT_BUILT);
    helper_free(&r.m, h);
    CHECK(procs_gone(&r.m));
    rig_free(&r);
}

#endif

static const test tests_proc[] = {
    {"fr.16", test_proc_env},
#if USE_STDIO
    {"proc.echo", test_proc_echo},
    {"fr.9", test_proc_early_exit},
    {"proc.signalled", test_proc_signalled},
    {"proc.last_lines", test_proc_last_lines},
    {"fr.17", test_proc_missing},
    {"fr.18", test_proc_path},
    {"proc.clean", test_proc_clean},
    {"proc.stop_stubborn", test_proc_stop_stubborn},
    {"proc.stop_term", test_proc_stop_term},
    {"proc.stop_flush", test_proc_stop_flush},
    {"fr.12", test_proc_grandchildren},
    {"fr.10", test_proc_flood},
    {"proc.stderr_events", test_proc_stderr_events},
    {"proc.closes_stdout", test_proc_closes_stdout},
    {"proc.expect", test_proc_expect},
    {"manners.reap", test_manners_reap},
    {"manners.sigchld", test_manners_sigchld},
    {"proc.torture", test_proc_torture},
#endif
#if USE_STDIO || USE_HTTP
    {"proc.helper", test_helper},
    {"proc.helper_big", test_helper_big},
    {"proc.helper_late", test_helper_late},
    {"proc.helper_start", test_helper_start},
    {"proc.helper_torture", test_helper_torture},
#else
    {"proc.helper_left_out", test_helper_left_out},
#endif
};

//=============================================================================
// MARK: - 17 RPC
//=============================================================================

// For these tests and those of 18 and 19: a scripted server behind an mcp_io.
// `say` is called with each line the client wrote and appends to `out`.
typedef struct peer peer;
struct peer {
    mem mem;
    buf in, out, all;    // half a line; to be read; all that was written
    size_t gate;         // after so many bytes one read brings nothing
    size_t piece;        // bytes a read brings at most
    size_t room;         // bytes a write takes at most, in all
    bool ended, refused;
    int opens, closes, reads, writes, lines, busy;
    void (*say)(peer *p, mcp_json msg, str line);
    int mode;            // the script's own
    const char *with;    // the script's own
    int seen;            // the script's own
};

static ptrdiff_t peer_read(void *user, void *to, size_t n) {
    peer *p = user;

    p->reads++;
    if (p->gate == 0) return p->gate = SIZE_MAX, 0;
    if (!p->out.len) return p->ended ? -1 : 0;
    if (n > p->piece) n = p->piece;
    if (n > p->out.len) n = p->out.len;
    if (n > p->gate) n = p->gate;
    memcpy(to, p->out.ptr, n);
    buf_drop(&p->out, n);
    if (p->gate != SIZE_MAX) p->gate -= n;
    return (ptrdiff_t)n;
}

static void peer_lines(peer *p) {
    const char *end;

    while (p->in.len && (end = memchr(p->in.ptr, '\n', p->in.len))) {
        size_t n = (size_t)(end - p->in.ptr);
        mcp_doc *doc = NULL;
        CHECK(json_parse(&p->mem, str_make(p->in.ptr, n), &doc, NULL, NULL) ==
              MCP_OK);
        p->lines++;
        if (p->say) p->say(p, json_root(doc), str_make(p->in.ptr, n));
        json_free(doc);
        buf_drop(&p->in, n + 1);
    }
}

static ptrdiff_t peer_write(void *user, const void *from, size_t n) {
    peer *p = user;

    p->writes++;
    if (p->refused) return -1;
    if (n > p->room) n = p->room;
    if (p->room != SIZE_MAX) p->room -= n;
    buf_add(&p->in, str_make(from, n));
    buf_add(&p->all, str_make(from, n));
    if (!p->busy++) peer_lines(p);
    p->busy--;
    return (ptrdiff_t)n;
}

static int peer_open(void *user) {
    peer *p = user;

    if (p->opens++) {
        buf_clear(&p->in);
        buf_clear(&p->out);
        p->ended = p->refused = false;
    }
    return 0;
}

static void peer_close(void *user) {
    ((peer *)user)->closes++;
}

static void peer_init(peer *p, void (*say)(peer *, mcp_json, str)) {
    memset(p, 0, sizeof *p);
    mem_init(&p->mem, NULL, NULL);
    buf_init(&p->in, &p->mem, SIZE_MAX);
    buf_init(&p->out, &p->mem, SIZE_MAX);
    buf_init(&p->all, &p->mem, SIZE_MAX);
    p->gate = p->piece = p->room = SIZE_MAX;
    p->say = say;
}

static void peer_free(peer *p) {
    buf_free(&p->in);
    buf_free(&p->out);
    buf_free(&p->all);
}

static void peer_puts(peer *p, const char *line) {
    buf_add(&p->out, str_of(line));
    buf_byte(&p->out, '\n');
}

// Answer `msg` with a result, or (starting with '!') an error.
static void peer_answer(peer *p, mcp_json msg, const char *what) {
    buf_add(&p->out, S("{\"jsonrpc\":\"2.0\",\"id\":"));
    buf_add(&p->out, mcp_raw(json_get(msg, S("id"))));
    buf_add(&p->out, *what == '!' ? S(",\"error\":") : S(",\"result\":"));
    buf_add(&p->out, str_of(*what == '!' ? what + 1 : what));
    buf_add(&p->out, S("}\n"));
}

static bool peer_is(mcp_json msg, const char *method) {
    return str_is(mcp_view(json_get(msg, S("method"))), method);
}

#define CAPS_ALL                                                              \
    "{\"tools\":{\"listChanged\":true},\"resources\":{\"subscribe\":true,"    \
    "\"listChanged\":true},\"prompts\":{\"listChanged\":true},"               \
    "\"completions\":{},\"logging\":{}}"
#define CAPS_TOOLS "{\"tools\":{}}"
#define INIT_AS(version, caps)                                                \
    "{\"protocolVersion\":\"" version "\",\"capabilities\":" caps             \
    ",\"serverInfo\":{\"name\":\"s\",\"version\":\"1\"},"                     \
    "\"instructions\":\"be nice\"}"
#define DISCOVER_AS(versions, caps)                                           \
    "{\"resultType\":\"complete\",\"supportedVersions\":[" versions "],"      \
    "\"capabilities\":" caps ",\"ttlMs\":0,\"cacheScope\":\"private\"}"
#define NO_METHOD "!{\"code\":-32601,\"message\":\"Method not found\"}"

// A legacy server. "echo" answers, "hold" does not.
static void legacy_say(peer *p, mcp_json msg, str line) {
    (void)line;
    if (!mcp_exists(json_get(msg, S("id"))) || peer_is(msg, "hold") ||
        !mcp_exists(json_get(msg, S("method"))))
        return;
    if (peer_is(msg, "initialize"))
        peer_answer(p, msg, p->with ? p->with
                                    : INIT_AS("2025-06-18", CAPS_TOOLS));
    else if (peer_is(msg, "echo") || peer_is(msg, "tools/call") ||
             peer_is(msg, "tools/list"))
        peer_answer(p, msg, "{\"said\":\"\xC3\xA9\"}");
    else
        peer_answer(p, msg, NO_METHOD);
}

// A modern one, as strict about _meta as the specification allows it to be.
static void modern_say(peer *p, mcp_json msg, str line) {
    mcp_json meta = json_get(json_get(msg, S("params")), S("_meta"));

    (void)line;
    if (!mcp_exists(json_get(msg, S("id"))) || peer_is(msg, "hold")) return;
    if (!str_is(mcp_view(json_get(meta, S(META_VERSION))), "2026-07-28") ||
        mcp_typeof(json_get(meta, S(META_CAPABILITIES))) != MCP_OBJECT)
        peer_answer(p, msg, "!{\"code\":-32602,\"message\":\"no _meta\"}");
    else if (peer_is(msg, "server/discover"))
        peer_answer(p, msg,
                    p->with ? p->with
                            : DISCOVER_AS("\"2026-07-28\"", CAPS_TOOLS));
    else if (peer_is(msg, "echo") || peer_is(msg, "tools/call") ||
             peer_is(msg, "tools/list"))
        peer_answer(p, msg, "{\"resultType\":\"complete\",\"said\":1}");
    else
        peer_answer(p, msg, NO_METHOD);
}

// A handle with one server "srv" and a fake clock.
typedef struct bench {
    rig rig;
    server *s;
    peer peer;
    diag d;
    job me;               // stands for a call: owns requests
    int woken;
    buf events;           // "type server text\n"
    buf kept;
    bool opened;
    uint32_t ticket;
} bench;

static void bench_event(void *user, const mcp_event *e) {
    bench *b = user;
    buf_fmt(&b->events, "%d %.*s%s\n", (int)e->type, MCP_ARG(e->text),
            e->type != MCP_EV_TRACE ? "" : e->outgoing ? " >" : " <");
}

static void bench_step(mcp *m, job *j) {
    (void)m;
    ((bench *)(void *)((char *)j - offsetof(bench, me)))->woken++;
}

static mcp_io bench_io(bench *b) {
    mcp_io stream = {&b->peer, peer_open, peer_read,
                     peer_write, NULL, peer_close};
    return stream;
}

static mcp *bench_mcp(bench *b) {
    return &b->rig.m;
}

static void bench_config(mcp *m) {
    m->opt.config_dir = "/nonexistent";
    m->opt.no_cache = true;
}

static bool bench_init(bench *b, mem *mm) {
    mcp *m = bench_mcp(b);

    if (mm) {
        if (!rig_init(&b->rig, mm)) return false;
        b->rig.now = m->loop.now = 1000000;
        m->os.now_ms = rig_now;
        m->os.wait = rig_wait;
    } else if (!CHECK(rig_fake(&b->rig))) {
        return false;
    }
    diag_init(&b->d, &m->mem, &m->secrets);
    buf_init(&b->events, &b->peer.mem, SIZE_MAX);
    m->opt.on_event = bench_event;
    m->opt.user = b;
    bench_config(m);
    b->s = NULL;
    b->ticket = 0;
    b->woken = 0;
    return job_init(m, &b->me, bench_step);
}

static mcp_code bench_add(bench *b, const char *definition) {
    mcp *m = bench_mcp(b);
    mcp_io stream = bench_io(b);
    mcp_code rc = config_put(m, "srv", str_of(definition ? definition : ""),
                             definition ? NULL : &stream, &b->d);

    if (rc) return rc;
    b->s = server_add(m, config_find(m->config, S("srv")));
    return b->s ? MCP_OK : fail(&b->d, MCP_OUT_OF_MEMORY, NULL);
}

static bool bench_peer(bench *b, void (*say)(peer *, mcp_json, str)) {
    peer_init(&b->peer, say);
    return bench_init(b, NULL) && CHECK_INT(bench_add(b, NULL), MCP_OK);
}

static void bench_free(bench *b) {
    mcp *m = bench_mcp(b);

    job_end(m, &b->me);
    servers_free(m);
    http_free(m);
    while (!procs_gone(m)) loop_turn(m, m->loop.now + 10);
    config_free(m->config);
    diag_free(&b->d);
    buf_free(&b->events);
    loop_free(m);
    secrets_free(&m->secrets);
    if (m->mem.user == &b->rig.heap) CHECK_INT(b->rig.heap.live, 0);
    peer_free(&b->peer);
}

// Connect; at most `ms` of the fake clock.
static mcp_code bench_connect(bench *b, int64_t ms) {
    mcp *m = bench_mcp(b);
    int64_t until = m->loop.now + ms;
    mcp_code rc;

    diag_clear(&b->d);
    b->ticket = 0;
    while ((rc = server_ready(b->s, &b->ticket, &b->d)) == MCP_PENDING &&
           m->loop.now < until)
        loop_turn(m, until);
    return rc;
}

static request *bench_ask(bench *b, const char *method, const char *params,
                          uint64_t op_id) {
    ask a = {0};

    a.method = method;
    a.params = str_of(params);
    a.owner = &b->me;
    a.op_id = op_id;
    a.once = strcmp(method, "tools/call") == 0;
    if (a.once) a.name = S("t");
    return server_ask(b->s, &a);
}

static void bench_wait(bench *b, const request *r, int64_t ms) {
    mcp *m = bench_mcp(b);
    int64_t until = m->loop.now + ms;

    while (!r->done && m->loop.now < until) loop_turn(m, until);
}

static void bench_pass(bench *b, int64_t ms) {
    mcp *m = bench_mcp(b);
    int64_t until = m->loop.now + ms;

    do loop_turn(m, until);
    while (m->loop.now < until);
}

// Ask and wait: the code of the answer.
static mcp_code bench_call(bench *b, const char *method, const char *params) {
    request *r = bench_ask(b, method, params, 0);
    mcp_code rc;

    if (!r) return fail(&b->d, MCP_OUT_OF_MEMORY, NULL);
    bench_wait(b, r, 700000);
    CHECK(r->done);
    diag_copy(&b->d, &r->failed);
    rc = r->failed.code;
    request_free(bench_mcp(b), r);
    return rc;
}

static bool bench_saw(const bench *b, const char *line) {
    return str_find(buf_str(&b->events), str_of(line)) != SIZE_MAX;
}

static bool bench_wrote(const bench *b, const char *text) {
    return str_find(buf_str(&b->peer.all), str_of(text)) != SIZE_MAX;
}

static bool detail_has(const diag *d, const char *text) {
    return str_find(buf_str(&d->detail), str_of(text)) != SIZE_MAX;
}

// What a request looks like on the wire.
static void test_rpc_text(void) {
    static const struct {
        const char *method, *params;
        bool modern;
        const char *want;
    } cases[] = {
        {"tools/list", "", false, "\"method\":\"tools/list\"}"},
        {"tools/list", "{\"cursor\":\"a\"}", false,
         "\"method\":\"tools/list\",\"params\":{\"cursor\":\"a\","
         "\"_meta\":{\"progressToken\":7}}}"},
        {"ping", "", false,
         "\"method\":\"ping\",\"params\":{\"_meta\":{\"progressToken\":7}}}"},
        {"x", " {} ", false,
         "\"method\":\"x\",\"params\":{\"_meta\":{\"progressToken\":7}}}"},
        {"x", "{\"a\":\n 1\r\n}", false,
         "\"method\":\"x\",\"params\":{\"a\":  1,"
         "\"_meta\":{\"progressToken\":7}}}"},
        {"x", "{\"_meta\":{\"traceparent\":\"t\",\"progressToken\":\"mine\"},"
              "\"a\":12345678901234567890}", false,
         "\"method\":\"x\",\"params\":{\"a\":12345678901234567890,"
         "\"_meta\":{\"progressToken\":7,\"traceparent\":\"t\"}}}"},
        {"x", "{\"a\":{\"_meta\":1}}", false,
         "\"method\":\"x\",\"params\":{\"a\":{\"_meta\":1},"
         "\"_meta\":{\"progressToken\":7}}}"},
        {"we\"ird\n", "", false,
         "\"method\":\"we\\\"ird\\n\",\"params\":"
         "{\"_meta\":{\"progressToken\":7}}}"},
        {"tools/list", "", true,
         "\"method\":\"tools/list\",\"params\":{\"_meta\":{\"" META_VERSION
         "\":\"2026-07-28\",\"" META_CLIENT "\":{\"name\":\"mcp-c\","
         "\"version\":\"" MCP_VERSION "\"},\"" META_CAPABILITIES "\":{},"
         "\"progressToken\":7}}}"},
        {"x", "{\"_meta\":{\"" META_VERSION "\":\"1\",\"k/x\":[1]}}", true,
         "\"method\":\"x\",\"params\":{\"_meta\":{\"" META_VERSION
         "\":\"2026-07-28\",\"" META_CLIENT "\":{\"name\":\"mcp-c\","
         "\"version\":\"" MCP_VERSION "\"},\"" META_CAPABILITIES "\":{},"
         "\"progressToken\":7,\"k/x\":[1]}}}"},
        {"subscriptions/listen", "{\"notifications\":{}}", true,
         "\"method\":\"subscriptions/listen\",\"params\":{\"notifications\":"
         "{},\"_meta\":{\"" META_VERSION
         "\":\"2026-07-28\",\"" META_CLIENT "\":{\"name\":\"mcp-c\","
         "\"version\":\"" MCP_VERSION "\"},\"" META_CAPABILITIES "\":{}}}}"}};
    bench b;

    if (!bench_peer(&b, NULL)) return;
    for (size_t i = 0; i < COUNT(cases); i++) {
        ask a = {0};
        request *r;
        mcp_doc *doc = NULL;
        buf out;
        char *params = exact(str_of(cases[i].params));

        snprintf(b.s->version, sizeof b.s->version, "2026-07-28");
        b.s->modern = cases[i].modern;
        bench_mcp(&b)->last_id = 6;
        a.method = cases[i].method;
        a.params = str_make(params, strlen(cases[i].params));
        r = rpc_new(b.s, &a);
        free(params);
        buf_init(&out, &b.peer.mem, SIZE_MAX);
        rpc_text(r, &out);
        CHECK(str_starts(buf_str(&out), S("{\"jsonrpc\":\"2.0\",\"id\":7,")));
        CHECK_STR(str_skip(buf_str(&out), 24), str_of(cases[i].want));
        CHECK(json_parse(&b.peer.mem, buf_str(&out), &doc, NULL, NULL) ==
              MCP_OK);
        json_free(doc);
        buf_free(&out);
        rpc_delete(r);
    }
    bench_free(&b);
}

// The id in a line that is no JSON.
static void test_rpc_scan_id(void) {
    static const struct {
        const char *text, *id;
    } cases[] = {
        {"{\"jsonrpc\":\"2.0\",\"id\":5,\"result\":{\"a\":\"b", "5"},
        {"{\"id\" : \"x1\" , \"result\":tru", "\"x1\""},
        {"{\"result\":{\"id\":9,},\"id\":5}", "5"},
        {"{\"result\":{\"id\":9},\"id\":5", "5"},
        {"{\"id\":5", "5"},
        {"{\"id\":5,\"method\":\"ping\",", ""},
        {"{\"method\":\"ping\",\"id\":5,", ""},
        {"{\"a\":\"\\\"id\\\":5\"", ""},
        {"[info] \"id\":5", ""},
        {"{\"i", ""},
        {"{\"id", ""},
        {"{\"id\"", ""},
        {"{\"id\":", ""},
        {"", ""}};

    for (size_t i = 0; i < COUNT(cases); i++) {
        size_t n = strlen(cases[i].text);
        char *p = exact(str_of(cases[i].text));
        str id = rpc_scan_id(str_make(p, n));
        CHECK_STR(str_trim(id), str_of(cases[i].id));
        free(p);
    }
}

static void test_rpc_versions(void) {
    static const struct {
        const char *list;
        const char *modern, *legacy;
    } cases[] = {
        {"[\"2026-07-28\",\"2025-06-18\"]", "2026-07-28", "2025-06-18"},
        {"[\"2024-11-05\",\"2025-11-25\"]", NULL, "2025-11-25"},
        {"[\"2027-01-01\"]", NULL, NULL},
        {"[]", NULL, NULL},
        {"[null,1,\"2024-10-07\"]", NULL, "2024-10-07"}};

    for (size_t i = 0; i < COUNT(cases); i++) {
        mem m;
        mcp_doc *doc = NULL;
        const char *v;
        mem_init(&m, NULL, NULL);
        json_parse(&m, str_of(cases[i].list), &doc, NULL, NULL);
        v = rpc_best_version(json_root(doc), true);
        CHECK_STR(str_of(v), str_of(cases[i].modern));
        v = rpc_best_version(json_root(doc), false);
        CHECK_STR(str_of(v), str_of(cases[i].legacy));
        json_free(doc);
    }
    CHECK(!rpc_speaks_legacy(S("2026-07-28")));
    CHECK(!rpc_speaks_legacy(S("")));
    CHECK(rpc_speaks_legacy(S("2024-10-07")));
}

// fr.23, fr.24: which echo of an id is ours.
static void test_rpc_ids(void) {
    static const struct {
        const char *id;
        bool ours;
    } cases[] = {{"%", true},      {"\"%\"", true}, {"%.0", true},
                 {"%e0", true},    {"0", false},    {"\"0\"", false},
                 {"null", false},  {"true", false}, {"-%", false},
                 {"\"%x\"", false}, {"%.5", false}, {"[%]", false}};
    bench b;

    if (!bench_peer(&b, legacy_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    for (size_t i = 0; i < COUNT(cases); i++) {
        request *r = bench_ask(&b, "hold", "{}", 0);
        buf line;
        buf_init(&line, &b.peer.mem, SIZE_MAX);
        buf_add(&line, S("{\"jsonrpc\":\"2.0\",\"result\":{},\"id\":"));
        for (const char *c = cases[i].id; *c; c++)
            if (*c == '%') buf_fmt(&line, "%d", (int)r->id);
            else buf_byte(&line, *c);
        buf_byte(&line, '}');
        peer_puts(&b.peer, buf_z(&line));
        bench_pass(&b, 5);
        CHECK_INT(r->done, cases[i].ours);
        buf_free(&line);
        request_free(bench_mcp(&b), r);
    }
    bench_free(&b);
}

// Answers that break the rules, and what becomes of the call.
static void test_rpc_answers(void) {
    static const struct {
        const char *answer;  // after the id
        mcp_code code;
        int64_t rpc;
        const char *detail;
    } cases[] = {
        {",\"result\":{}", MCP_OK, 0, ""},
        {",\"result\":{},\"error\":null", MCP_OK, 0, ""},
        {",\"result\":{\"resultType\":\"task\"}", MCP_OK, 0, ""},
        {",\"result\":[1]", MCP_PROTOCOL_ERROR, 0, "not an object"},
        {",\"result\":null", MCP_PROTOCOL_ERROR, 0, "not an object"},
        {",\"error\":{\"code\":-32601,\"message\":\"no \\u001b[31msuch\"}",
         MCP_PROTOCOL_ERROR, -32601, "no such"},
        {",\"error\":{\"code\":-32042,\"message\":\"m\",\"data\":{\"a\":1}}",
         MCP_PROTOCOL_ERROR, -32042, "JSON-RPC error -32042"},
        {",\"error\":{}", MCP_PROTOCOL_ERROR, 0, "refused"},
        {",\"error\":\"no\",\"result\":{}", MCP_PROTOCOL_ERROR, 0, "refused"}};
    bench b;

    if (!bench_peer(&b, legacy_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    for (size_t i = 0; i < COUNT(cases); i++) {
        request *r = bench_ask(&b, "hold", "{}", 0);
        char line[300];
        snprintf(line, sizeof line, "{\"jsonrpc\":\"2.0\",\"id\":%d%s}",
                 (int)r->id, cases[i].answer);
        peer_puts(&b.peer, line);
        bench_wait(&b, r, 100);
        CHECK(r->done);
        CHECK_INT(r->failed.code, cases[i].code);
        CHECK_INT(r->failed.rpc_code, cases[i].rpc);
        CHECK(detail_has(&r->failed, cases[i].detail));
        if (r->failed.rpc_code == -32042)
            CHECK_STR(mcp_raw(r->error_data), S("{\"a\":1}"));
        request_free(bench_mcp(&b), r);
    }
    bench_free(&b);
}

// resultType counts in the modern era (basic, "Result").
static void test_rpc_result_type(void) {
    static const struct {
        const char *type;
        mcp_code code;
        const char *detail;
    } cases[] = {{"\"a\":1", MCP_OK, ""},
                 {"\"resultType\":null", MCP_OK, ""},
                 {"\"resultType\":\"complete\"", MCP_OK, ""},
                 {"\"resultType\":\"input_required\"", MCP_PROTOCOL_ERROR,
                  "further input"},
                 {"\"resultType\":\"task\"", MCP_PROTOCOL_ERROR, "unknown"},
                 {"\"resultType\":7", MCP_PROTOCOL_ERROR, "unknown"}};
    bench b;

    if (!bench_peer(&b, modern_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    CHECK(b.s->modern);
    for (size_t i = 0; i < COUNT(cases); i++) {
        request *r = bench_ask(&b, "hold", "{}", 0);
        char line[300];
        snprintf(line, sizeof line,
                 "{\"jsonrpc\":\"2.0\",\"id\":%d,\"result\":{%s}}",
                 (int)r->id, cases[i].type);
        peer_puts(&b.peer, line);
        bench_wait(&b, r, 100);
        CHECK_INT(r->failed.code, cases[i].code);
        CHECK(detail_has(&r->failed, cases[i].detail));
        request_free(bench_mcp(&b), r);
    }
    bench_free(&b);
}

// A late answer to a request that was given up; its tombstone.
static void test_rpc_late(void) {
    bench b;
    request *r, *next;
    char line[100];
    int id;

    if (!bench_peer(&b, legacy_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    r = bench_ask(&b, "hold", "{}", 0);
    id = (int)r->id;
    request_free(bench_mcp(&b), r);
    snprintf(line, sizeof line, "{\"jsonrpc\":\"2.0\",\"method\":\"notificatio"
             "ns/cancelled\",\"params\":{\"requestId\":%d,", id);
    CHECK(bench_wrote(&b, line));
    CHECK(b.s->pending && b.s->pending->abandoned);
    next = bench_ask(&b, "hold", "{}", 0);
    CHECK(next->id > (uint64_t)id);
    snprintf(line, sizeof line, "{\"jsonrpc\":\"2.0\",\"id\":%d,\"result\":{}}",
             id);
    peer_puts(&b.peer, line);
    bench_pass(&b, 10);
    CHECK(b.s->pending == next && !next->done);
    CHECK(!b.s->junk);
    peer_puts(&b.peer, line);  // and once more: nobody's
    bench_pass(&b, 10);
    CHECK(!next->done);
    // Without an answer it is forgotten after a minute.
    request_free(bench_mcp(&b), next);
    CHECK(b.s->pending != NULL);
    bench_pass(&b, TIME_TOMBSTONE - 100);
    CHECK(b.s->pending != NULL);
    bench_pass(&b, 200);
    CHECK(b.s->pending == NULL);
    CHECK_INT(b.s->state, SERVER_READY);
    bench_free(&b);
}

// Deadlines: default, on timeout a cancel, an answer after it.
static void test_rpc_timeout(void) {
    bench b;
    request *r;
    char line[100];
    int64_t from;

    if (!bench_peer(&b, legacy_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    from = b.rig.now;
    r = bench_ask(&b, "hold", "{}", 0);
    bench_wait(&b, r, 20000);
    CHECK_INT(r->failed.code, MCP_TIMEOUT);
    CHECK(b.rig.now - from >= TIME_REQUEST &&
          b.rig.now - from < TIME_REQUEST + 50);
    CHECK(bench_wrote(&b, "\"reason\":\"timeout\""));
    CHECK(detail_has(&r->failed, "no answer to hold within"));
    snprintf(line, sizeof line, "{\"jsonrpc\":\"2.0\",\"id\":%d,\"result\":{}}",
             (int)r->id);
    peer_puts(&b.peer, line);
    bench_pass(&b, 10);
    CHECK_INT(r->failed.code, MCP_TIMEOUT);
    request_free(bench_mcp(&b), r);
    CHECK(!b.s->pending);
    // What the user set goes before what the method has.
    bench_mcp(&b)->opt.timeout_ms = 1000;
    from = b.rig.now;
    r = bench_ask(&b, "hold", "{}", 0);
    bench_wait(&b, r, 20000);
    CHECK(r->done && b.rig.now - from < 1050);
    request_free(bench_mcp(&b), r);
    bench_free(&b);
}

static void progress_of(bench *b, uint64_t token, const char *more) {
    char line[300];
    snprintf(line, sizeof line,
             "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\","
             "\"params\":{\"progressToken\":%d%s}}", (int)token, more);
    peer_puts(&b->peer, line);
}

// Progress moves the deadline, at most up to the ceiling (fr.73).
static void test_rpc_progress(void) {
    bench b;
    request *r;
    int64_t from;

    if (!bench_peer(&b, legacy_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    from = b.rig.now;
    r = bench_ask(&b, "hold", "{}", 44);
    CHECK(bench_wrote(&b, "\"progressToken\":"));
    for (int i = 0; i < 100 && !r->done; i++) {
        bench_pass(&b, 10000);
        progress_of(&b, r->id, ",\"progress\":0.5,\"total\":2,"
                               "\"message\":\"half\"");
    }
    CHECK_INT(r->failed.code, MCP_TIMEOUT);
    CHECK(b.rig.now - from >= TIME_CEILING &&
          b.rig.now - from <= TIME_CEILING + 10100);
    CHECK(bench_saw(&b, "3 half"));
    request_free(bench_mcp(&b), r);
    // Others' tokens, no number, none at all: ignored.
    r = bench_ask(&b, "hold", "{}", 45);
    from = r->deadline;
    bench_pass(&b, 100);
    progress_of(&b, r->id + 1, ",\"progress\":1");
    progress_of(&b, r->id, ",\"progress\":\"1\"");
    progress_of(&b, r->id, "");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/"
                       "progress\"}");
    bench_pass(&b, 10);
    CHECK_INT(r->deadline, from);
    progress_of(&b, r->id, ",\"progress\":1");
    bench_pass(&b, 10);
    CHECK(r->deadline > from);
    request_free(bench_mcp(&b), r);
    bench_free(&b);
}

// Notifications and what they move.
static void test_rpc_notices(void) {
    bench b;
    server *s;

    if (!bench_peer(&b, legacy_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    s = b.s;
    s->changed[LIST_TOOLS] = s->noted[LIST_TOOLS] = 0;
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"method\":"
                       "\"notifications/tools/list_changed\"}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/"
                       "resources/list_changed\",\"params\":null}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"method\":"
                       "\"notifications/prompts/list_changed\"}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/"
                       "message\",\"params\":{\"level\":\"info\",\"logger\":"
                       "\"db\",\"data\":\"up\\u001b[1m\"}}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"method\":\"notifications/"
                       "message\",\"params\":{\"level\":\"error\","
                       "\"data\":{\"a\":1}}}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"method\":\"new/thing\"}");
    bench_pass(&b, 10);
    for (int k = 0; k < LIST_KINDS; k++) CHECK_INT(s->noted[k], 1);
    CHECK_INT(s->changed[LIST_TOOLS], 1);
    CHECK(bench_saw(&b, "4 tools\n"));
    CHECK(bench_saw(&b, "4 resources\n"));
    CHECK(bench_saw(&b, "4 prompts\n"));
    CHECK(bench_saw(&b, "2 [info] db: up\n"));
    CHECK(bench_saw(&b, "2 [error] {\"a\":1}\n"));
    bench_free(&b);
}

// What a legacy server asks of us: ping is answered, the rest refused, with
// the id as it came.
static void test_rpc_serve(void) {
    bench b;

    if (!bench_peer(&b, legacy_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"id\":\"\\u0041 x\",\"method\":"
                       "\"roots/list\"}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"id\":1.50,\"method\":"
                       "\"sampling/createMessage\",\"params\":{}}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"id\":null,\"method\":\"ping\"}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"id\":{},\"method\":\"ping\"}");
    bench_pass(&b, 10);
    CHECK(bench_wrote(&b, "{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{}}\n"));
    CHECK(bench_wrote(&b, "{\"jsonrpc\":\"2.0\",\"id\":\"\\u0041 x\",\"error\""
                          ":{\"code\":-32601,"));
    CHECK(bench_wrote(&b, "{\"jsonrpc\":\"2.0\",\"id\":1.50,\"error\":"));
    CHECK(!bench_wrote(&b, "\"id\":null"));
    CHECK(!bench_wrote(&b, "\"id\":{}"));
    bench_free(&b);
}

// In the modern era a client sends no responses at all.
static void test_rpc_serve_modern(void) {
    bench b;

    if (!bench_peer(&b, modern_say)) return;
    CHECK_INT(bench_connect(&b, 20000), MCP_OK);
    buf_clear(&b.peer.all);
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"ping\"}");
    peer_puts(&b.peer, "{\"jsonrpc\":\"2.0\",\"id\":2,\"method\":"
                       "\"roots/list\"}");
    bench_pass(&b, 10);
    CHECK_INT(b.peer.all.len, 0);
    CHECK_INT(bench_call(&b, "echo", "{}"), MCP_OK);
    bench_free(&b);
}

static const test tests_rpc[] = {
    {"rpc.text", test_rpc_text},
    {"fr.40", test_rpc_text},
    {"rpc.scan-id", test_rpc_scan_id},
    {"rpc.versions", test_rpc_versions},
    {"rpc.ids", test_rpc_ids},
    {"fr.23", test_rpc_ids},
    {"fr.24", test_rpc_ids},
    {"rpc.answers", test_rpc_answers},
    {"fr.27", test_rpc_answers},
    {"rpc.result-type", test_rpc_result_type},
    {"fr.95", test_rpc_result_type},
    {"rpc.late", test_rpc_late},
    {"fr.74", test_rpc_late},
    {"rpc.timeout", test_rpc_timeout},
    {"rpc.progress", test_rpc_progress},
    {"fr.73", test_rpc_progress},
    {"rpc.notices", test_rpc_notices},
    {"rpc.serve", test_rpc_serve},
    {"rpc.serve-modern", test_rpc_serve_modern}};

//=============================================================================
// MARK: - 26 POSIX
//=============================================================================

#if USE_POSIX

static void unix_table(os *o) {
    CHECK(os_adopt(o, NULL));
}

static void test_posix_clock(void) {
    unsigned char a[300] = {0}, b[300] = {0};
    os o;

    unix_table(&o);
    CHECK(o.now_ms(&o) <= o.now_ms(&o));
    CHECK_INT(o.wait(&o, NULL, 0, 5), 0);
    CHECK(llabs(o.unix_s(&o) - (int64_t)time(NULL)) <= 1);
    CHECK(o.random(&o, a, sizeof a) && o.random(&o, b, sizeof b));
    CHECK(memcmp(a, b, sizeof a) != 0);
    CHECK(o.random(&o, a, 0));
    CHECK(o.env(&o, "PATH") != NULL && o.env(&o, "NO_SUCH_VAR") == NULL);
    CHECK(o.environ(&o) == environ);
}

static void test_posix_wait(void) {
    mcp_fd f[3];
    int p[2];
    os o;

    unix_table(&o);
    CHECK(o.wake_open(&o, p));
    memset(f, 0, sizeof f);
    f[0].fd = p[0];
    f[0].want = MCP_READABLE;
    f[1].fd = p[1];
    f[1].want = MCP_WRITABLE;
    f[2].fd = -1;
    f[2].want = MCP_READABLE;
    CHECK_INT(o.wait(&o, f, 3, 0), 1);
    CHECK(f[0].got == 0 && f[1].got == MCP_WRITABLE && f[2].got == 0);
    o.wake(&o, p[1]);
    CHECK_INT(o.wait(&o, f, 3, -1), 2);
    CHECK(f[0].got == MCP_READABLE && f[1].got == MCP_WRITABLE);
    o.close(&o, p[1]);  // a hang-up, and a descriptor that is none
    CHECK_INT(o.wait(&o, f, 2, -1), 2);
    CHECK(f[0].got == MCP_READABLE && f[1].got == MCP_WRITABLE);
    o.close(&o, p[0]);
}

static volatile sig_atomic_t sigpipes;

static void on_sigpipe(int number) {
    (void)number;
    sigpipes++;
}

// None is raised, and what the host did with its own stays as it was.
static void test_manners_sigpipe(void) {
    struct sigaction act = {0}, old;
    sigset_t mask, was, now;
    int p[2];
    os o;

    unix_table(&o);
    sigpipes = 0;
    act.sa_handler = on_sigpipe;
    sigaction(SIGPIPE, &act, &old);
    sigemptyset(&mask);
    sigaddset(&mask, SIGPIPE);
    CHECK(o.wake_open(&o, p));
    CHECK_INT(o.write(&o, p[1], "ab", 2), 2);
    o.close(&o, p[0]);
    for (int i = 0; i < 3; i++)
        CHECK_INT(o.write(&o, p[1], "ab", 2), IO_FAIL);
    sigprocmask(SIG_BLOCK, NULL, &now);
    CHECK(!sigismember(&now, SIGPIPE));
    CHECK_INT(sigpipes, 0);

    sigprocmask(SIG_BLOCK, &mask, &was);  // blocked by the host, none pending
    CHECK_INT(o.write(&o, p[1], "ab", 2), IO_FAIL);
    sigpending(&now);
    CHECK(!sigismember(&now, SIGPIPE));
    raise(SIGPIPE);  // one of the host's is pending: it stays
    CHECK_INT(o.write(&o, p[1], "ab", 2), IO_FAIL);
    sigpending(&now);
    CHECK(sigismember(&now, SIGPIPE));
    sigprocmask(SIG_BLOCK, NULL, &now);
    CHECK(sigismember(&now, SIGPIPE));
    sigprocmask(SIG_SETMASK, &was, NULL);
    CHECK_INT(sigpipes, 1);

    act.sa_handler = SIG_IGN;
    sigaction(SIGPIPE, &act, NULL);
    CHECK_INT(o.write(&o, p[1], "ab", 2), IO_FAIL);
    sigpending(&now);
    CHECK(!sigismember(&now, SIGPIPE));
    sigaction(SIGPIPE, &old, NULL);
    o.close(&o, p[1]);
}

static void test_posix_pipe_full(void) {
    char big[70000];
    int p[2];
    os o;

    unix_table(&o);
    memset(big, 1, sizeof big);
    CHECK(o.wake_open(&o, p));
    CHECK_INT(o.read(&o, p[0], big, 10), IO_AGAIN);
    CHECK(o.write(&o, p[1], big, sizeof big) > 0);
    CHECK_INT(o.write(&o, p[1], big, 4096), IO_AGAIN);
    CHECK(o.read(&o, p[0], big, sizeof big) > 0);
    o.close(&o, p[1]);
    while (o.read(&o, p[0], big, sizeof big) > 0) continue;
    CHECK_INT(o.read(&o, p[0], big, 10), IO_END);
    o.close(&o, p[0]);
    CHECK_INT(o.read(&o, p[0], big, 10), IO_FAIL);
}

static int wait_fd(os *o, os_fd fd, short want) {
    mcp_fd f = {fd, want, 0};
    return o->wait(o, &f, 1, 5000);
}

static void socket_case(const os_addr *any) {
    os_addr at = *any;
    os_fd door, a, b, u;
    char why[64], c[8];
    os o;

    unix_table(&o);
    if (o.listen(&o, &at, &door)) return;  // no IPv6 here
    CHECK(at.port != 0);
    CHECK_INT(o.listen(&o, &at, &b), OS_EXISTS);
    CHECK_INT(o.accept(&o, door, &b), OS_AGAIN);
    CHECK_INT(b, -1);
    CHECK_INT(o.connect(&o, &at, &a), OS_OK);
    CHECK_INT(wait_fd(&o, a, MCP_WRITABLE), 1);
    CHECK_INT(o.connected(&o, a, why, sizeof why), OS_OK);
    CHECK_INT(wait_fd(&o, door, MCP_READABLE), 1);
    CHECK_INT(o.accept(&o, door, &b), OS_OK);
    CHECK(o.quiet(&o, a));
    CHECK_INT(o.read(&o, a, c, 8), IO_AGAIN);
    CHECK_INT(o.send(&o, b, "hey", 3), 3);
    CHECK_INT(wait_fd(&o, a, MCP_READABLE), 1);
    CHECK(!o.quiet(&o, a));
    CHECK_INT(o.read(&o, a, c, 8), 3);
    CHECK(o.quiet(&o, a));
    o.close(&o, b);
    CHECK_INT(wait_fd(&o, a, MCP_READABLE), 1);
    CHECK(!o.quiet(&o, a));
    CHECK_INT(o.read(&o, a, c, 8), IO_END);
    for (int i = 0; i < 100 && o.send(&o, a, "x", 1) == 1; i++)
        o.wait(&o, NULL, 0, 2);
    CHECK_INT(o.send(&o, a, "x", 1), IO_FAIL);  // and no signal
    o.close(&o, a);
    CHECK_INT(o.datagram(&o, &at, &u), OS_OK);
    o.close(&o, u);
    o.close(&o, door);

    if (o.connect(&o, &at, &a) == OS_OK) {  // nobody listens any more
        CHECK_INT(wait_fd(&o, a, MCP_WRITABLE), 1);
        CHECK_INT(o.connected(&o, a, why, sizeof why), OS_REFUSED);
        CHECK_STR(str_of(why), S("connection refused"));
        o.close(&o, a);
    }
}

static void test_posix_sockets(void) {
    os_addr v4 = {4, {127, 0, 0, 1}, 0, 0}, v6 = {6, {0}, 0, 0};
    int before = fds_open();

    v6.ip[15] = 1;
    socket_case(&v4);
    socket_case(&v6);
    CHECK_INT(fds_open(), before);
}

static void test_posix_words(void) {
    char why[64], tiny[5];

    unix_words(ETIMEDOUT, why, sizeof why);
    CHECK_STR(str_of(why), S("connection timed out"));
    unix_words(9999, why, sizeof why);
    CHECK_STR(str_of(why), S("system error 9999"));
    unix_words(ECONNRESET, tiny, sizeof tiny);
    CHECK_STR(str_of(tiny), S("conn"));
    CHECK_INT(unix_result(ENOENT), OS_ABSENT);
    CHECK_INT(unix_result(EIO), OS_FAILED);
}

static void cloexec(os_fd fd) {
    CHECK(fd > 2);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
}

// Also while the host has closed its own stdin, stdout and stderr.
static void every_descriptor(place *p) {
    os_addr at = {4, {127, 0, 0, 1}, 0, 0};
    os_child c;
    os_spawn what = {0};
    char name[] = "true", *argv[] = {name, NULL};
    os_fd fd[6], pipe_fd[2];
    int status;
    os o;

    unix_table(&o);
    CHECK(o.wake_open(&o, pipe_fd));
    CHECK_INT(o.listen(&o, &at, &fd[0]), OS_OK);
    CHECK_INT(o.connect(&o, &at, &fd[1]), OS_OK);
    CHECK_INT(wait_fd(&o, fd[0], MCP_READABLE), 1);
    CHECK_INT(o.accept(&o, fd[0], &fd[2]), OS_OK);
    CHECK_INT(o.datagram(&o, &at, &fd[3]), OS_OK);
    CHECK_INT(o.file_lock(&o, place_at(p, "lock"), &fd[4]), OS_OK);
    CHECK_INT(o.file_lock(&o, p->dir, &fd[5]), OS_OK);
    what.path = "/bin/true";
    what.argv = argv;
    what.env = environ;
    what.want_in = what.want_out = what.want_err = true;
    CHECK_INT(o.spawn(&o, &what, &c), OS_OK);
    for (int i = 0; i < 6; i++) {
        cloexec(fd[i]);
        close(fd[i]);
    }
    cloexec(pipe_fd[0]), close(pipe_fd[0]);
    cloexec(pipe_fd[1]), close(pipe_fd[1]);
    cloexec(c.in), close(c.in);
    cloexec(c.out), close(c.out);
    cloexec(c.err), close(c.err);
    for (int i = 0; i < 1000 && !o.exited(&o, c.pid, &status); i++)
        o.wait(&o, NULL, 0, 5);
    o.reap(&o, c.pid);
}

static void test_manners_cloexec(void) {
    int before = fds_open(), saved[3];
    place p;

    place_init(&p);
    every_descriptor(&p);
    fflush(stdout);
    for (int i = 0; i < 3; i++) saved[i] = fcntl(i, F_DUPFD_CLOEXEC, 100);
    for (int i = 0; i < 3; i++) close(i);
    every_descriptor(&p);
    for (int i = 0; i < 3; i++) {
        if (saved[i] < 0) continue;
        dup2(saved[i], i);
        close(saved[i]);
    }
    CHECK_INT(fds_open(), before);
    place_free(&p);
}

static void test_posix_file_read(void) {
    os_stat st;
    place p;
    heap h = {0, 0, 0, false};
    mem m = {heap_fn, &h};
    str mapped;
    buf b;
    os o;

    unix_table(&o);
    place_init(&p);
    buf_init(&b, &m, 100);
    place_put(&p, "f", "0123456789", 0640);
    CHECK_INT(o.file_stat(&o, p.path, &st), OS_OK);
    CHECK(st.size == 10 && st.mode == 0640 && st.file && !st.dir);
    CHECK(st.ino != 0 && llabs(st.mtime_s - (int64_t)time(NULL)) < 100);
    CHECK_INT(o.file_read(&o, p.path, 10, &b), OS_OK);
    CHECK_STR(buf_str(&b), S("0123456789"));
    CHECK_INT(o.file_read(&o, p.path, 9, &b), OS_TOO_BIG);
    CHECK_INT(o.file_read(&o, p.path, 50, &b), OS_OK);  // appends
    CHECK_STR(buf_str(&b), S("01234567890123456789"));
    CHECK_INT(o.file_map(&o, p.path, 10, &mapped, &st), OS_OK);
    CHECK_STR(mapped, S("0123456789"));
    o.file_unmap(&o, mapped);
    CHECK_INT(o.file_map(&o, p.path, 9, &mapped, &st), OS_TOO_BIG);
    place_put(&p, "empty", "", 0600);
    CHECK_INT(o.file_map(&o, p.path, 9, &mapped, &st), OS_OK);
    CHECK_INT(mapped.len, 0);
    o.file_unmap(&o, mapped);
    buf_clear(&b);
    CHECK_INT(o.file_read(&o, p.path, 0, &b), OS_OK);
    CHECK_INT(o.file_read(&o, p.dir, 10, &b), OS_FAILED);
    CHECK_INT(o.file_read(&o, place_at(&p, "no"), 10, &b), OS_ABSENT);
    CHECK_INT(o.file_read(&o, place_at(&p, "f/x"), 10, &b), OS_ABSENT);
    CHECK_INT(o.file_read(&o, "/proc/self/cmdline", 100, &b), OS_OK);
    CHECK(b.len > 0);  // though its size says 0
    buf_free(&b);
    CHECK_INT(o.file_read(&o, "/proc/self/cmdline", 3, &b), OS_TOO_BIG);
    buf_free(&b);
    CHECK_INT(o.file_remove(&o, place_at(&p, "f")), OS_OK);
    CHECK_INT(o.file_remove(&o, p.path), OS_ABSENT);
    h.fail_at = h.calls + 1;
    CHECK_INT(o.file_read(&o, "/proc/self/cmdline", 99, &b), OS_NO_MEMORY);
    buf_free(&b);
    CHECK_INT(h.live, 0);
    place_free(&p);
}

// Whoever names a FIFO as a configuration file must not stop the program.
static void test_posix_fifo(void) {
    os_stat st;
    place p;
    os_fd fd;
    mem m;
    str mapped;
    buf b;
    os o;

    unix_table(&o);
    place_init(&p);
    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, 100);
    CHECK(mkfifo(place_at(&p, "fifo"), 0600) == 0);
    CHECK_INT(o.file_read(&o, p.path, 10, &b), OS_FAILED);
    CHECK_INT(o.file_map(&o, p.path, 10, &mapped, &st), OS_FAILED);
    CHECK_INT(o.file_lock(&o, p.path, &fd), OS_OK);
    o.close(&o, fd);
    CHECK_INT(o.file_read(&o, "/dev/null", 10, &b), OS_FAILED);
    buf_free(&b);
    place_free(&p);
}

static bool says(void *arg) {
    return *(bool *)arg;
}

static void test_posix_replace(void) {
    bool yes = true, no = false;
    os_stat st;
    place p;
    mem m;
    buf b;
    os o;

    unix_table(&o);
    place_init(&p);
    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, 100);
    place_at(&p, "f");
    CHECK_INT(o.file_replace(&o, p.path, S("one"), 0600, NULL, NULL), OS_OK);
    CHECK_INT(o.file_stat(&o, p.path, &st), OS_OK);
    CHECK_INT(st.mode, 0600);
    CHECK_INT(o.file_replace(&o, p.path, S("two"), 0644, says, &yes), OS_OK);
    CHECK_INT(o.file_stat(&o, p.path, &st), OS_OK);
    CHECK_INT(st.mode, 0644);  // whatever the umask says
    CHECK_INT(o.file_replace(&o, p.path, S("3"), 0600, says, &no), OS_AGAIN);
    CHECK_INT(o.file_read(&o, p.path, 10, &b), OS_OK);
    CHECK_STR(buf_str(&b), S("two"));
    CHECK_INT(place_count(&p), 1);  // no temporary file is left
    CHECK_INT(o.file_replace(&o, place_at(&p, "no/f"), S(""), 0600, NULL,
                             NULL), OS_ABSENT);
    CHECK(mkdir(place_at(&p, "d"), 0700) == 0);
    place_put(&p, "d/x", "", 0600);
    CHECK(o.file_replace(&o, place_at(&p, "d"), S(""), 0600, NULL, NULL));
    CHECK_INT(place_count(&p), 2);
    buf_free(&b);
    place_free(&p);
}

static void test_posix_lock(void) {
    char command[400];
    os_fd a, b;
    place p;
    os o;

    unix_table(&o);
    place_init(&p);
    CHECK_INT(o.file_lock(&o, place_at(&p, "lock"), &a), OS_OK);
    CHECK_INT(o.file_lock(&o, p.path, &b), OS_AGAIN);
    CHECK_INT(b, -1);
    snprintf(command, sizeof command, "flock -n '%s' true", p.path);
    CHECK(system(command) != 0);  // nor does another process get it
    close(open(p.path, O_RDONLY));  // would lose an fcntl() lock
    CHECK_INT(o.file_lock(&o, p.path, &b), OS_AGAIN);
    o.close(&o, a);
    CHECK_INT(o.file_lock(&o, p.path, &b), OS_OK);
    CHECK_INT(o.file_lock(&o, p.dir, &a), OS_OK);
    o.close(&o, b);
    CHECK_INT(o.file_lock(&o, p.dir, &b), OS_AGAIN);
    o.close(&o, a);
    CHECK_INT(o.file_lock(&o, place_at(&p, "no/lock"), &a), OS_ABSENT);
    place_free(&p);
}

static void test_posix_dirs(void) {
    os_stat st;
    place p;
    mem m;
    buf b, c;
    os o;

    unix_table(&o);
    place_init(&p);
    mem_init(&m, NULL, NULL);
    buf_init(&b, &m, 4096);
    buf_init(&c, &m, 4096);
    CHECK_INT(o.dir_make(&o, place_at(&p, "a/b//c/"), 0700), OS_OK);
    CHECK_INT(o.dir_make(&o, p.path, 0700), OS_OK);
    CHECK_INT(o.file_stat(&o, place_at(&p, "a/b"), &st), OS_OK);
    CHECK(st.dir && !st.file && st.mode == 0700);
    place_put(&p, "file", "", 0600);
    CHECK(o.dir_make(&o, p.path, 0700) == OS_EXISTS);
    CHECK(o.dir_make(&o, place_at(&p, "file/x"), 0700) != OS_OK);
    CHECK_INT(o.dir_temp(&o, p.dir, &b), OS_OK);
    CHECK_INT(o.file_stat(&o, buf_z(&b), &st), OS_OK);
    CHECK(st.dir && st.mode == 0700 && str_starts(buf_str(&b), str_of(p.dir)));
    CHECK_INT(o.dir_temp(&o, place_at(&p, "no"), &b), OS_ABSENT);

    CHECK(symlink("a/b", place_at(&p, "link")) == 0);
    CHECK_INT(o.file_link(&o, p.path), OS_OK);
    buf_clear(&b);
    CHECK_INT(o.file_real(&o, p.path, &b), OS_OK);
    CHECK_INT(o.file_link(&o, place_at(&p, "a")), OS_FAILED);
    CHECK_INT(o.file_link(&o, place_at(&p, "no")), OS_ABSENT);
    CHECK_INT(o.file_real(&o, place_at(&p, "a/b"), &c), OS_OK);
    CHECK_STR(buf_str(&b), buf_str(&c));
    CHECK_INT(o.file_real(&o, place_at(&p, "no"), &c), OS_ABSENT);
    buf_clear(&c);
    CHECK_INT(o.cwd(&o, &c), OS_OK);
    CHECK(c.len && *c.ptr == '/');
    buf_free(&b);
    buf_free(&c);
    place_free(&p);
}

static void test_posix_can_run(void) {
    place p;
    os o;

    unix_table(&o);
    place_init(&p);
    CHECK_INT(o.can_run(&o, "/bin/sh"), OS_OK);
    CHECK_INT(o.can_run(&o, place_at(&p, "no")), OS_ABSENT);
    CHECK_INT(o.can_run(&o, p.dir), OS_NOT_RUNNABLE);
    place_put(&p, "plain", "x", 0644);
    CHECK_INT(o.can_run(&o, p.path), OS_NOT_RUNNABLE);
    place_free(&p);
}

#endif  // USE_POSIX

static void test_posix_built(void) {
    os o;
    CHECK_INT(os_adopt(&o, NULL), USE_POSIX);
}

static const test tests_posix[] = {
    {"posix.built", test_posix_built},
#if USE_POSIX
    {"posix.clock", test_posix_clock},
    {"posix.wait", test_posix_wait},
    {"posix.pipe_full", test_posix_pipe_full},
    {"posix.words", test_posix_words},
    {"posix.file_read", test_posix_file_read},
    {"posix.fifo", test_posix_fifo},
    {"posix.replace", test_posix_replace},
    {"posix.lock", test_posix_lock},
    {"posix.dirs", test_posix_dirs},
    {"posix.can_run", test_posix_can_run},
    {"posix.sockets", test_posix_sockets},
    {"manners.sigpipe", test_manners_sigpipe},
    {"manners.cloexec", test_manners_cloexec},
#endif
};

//=============================================================================
// MARK: - Registry
//=============================================================================

#define PART(list) {list, COUNT(list)}

static const struct {
    const test *list;
    size_t n;
} parts[] = {
    PART(tests_text),
    PART(tests_memory),
    PART(tests_diag),
    PART(tests_loop),
    PART(tests_json),
    PART(tests_http),
    PART(tests_sse),
    PART(tests_tls),
    PART(tests_names),
    PART(tests_client),
    PART(tests_proc),
    PART(tests_rpc),
    PART(tests_posix),
};

static bool wanted(const char *name, int argc, char **argv) {
    bool any = false;
    for (int i = 1; i < argc; i++) {
        any = true;
        if (strncmp(name, argv[i], strlen(argv[i])) == 0) return true;
    }
    return !any;
}

int main(int argc, char **argv) {
    bool list = argc > 1 && strcmp(argv[1], "-l") == 0;
    int passed = 0, failed = 0;

    for (size_t p = 0; p < COUNT(parts); p++) {
        for (size_t i = 0; i < parts[p].n; i++) {
            const test *t = &parts[p].list[i];
            int before = failures;
            if (list) {
                puts(t->name);
                continue;
            }
            if (!wanted(t->name, argc, argv)) continue;
            t->fn();
            if (failures == before) {
                passed++;
            } else {
                failed++;
                printf("FAILED %s\n", t->name);
            }
        }
    }
    if (list) return 0;
    printf("%d checks\n%d passed, %d failed\n", checks, passed, failed);
    return failed || !passed;
}
