// fuzz.c - feeds arbitrary bytes to each parser of mcp.c and checks what must
// hold for all of them.
//
//     clang -g -I. -fsanitize=fuzzer,address,undefined -o fuzz examples/fuzz.c
//         -lbearssl                    (one line)
//     ./fuzz --list                    the names of the parsers
//     ./fuzz --seed DIR                write DIR/NAME/seed for each
//     MCP_FUZZ=json ./fuzz DIR/json    one of them; else byte 0 chooses
//     cc -DFUZZ_MAIN -I. -o fuzz examples/fuzz.c -lbearssl
//     MCP_FUZZ=json ./fuzz FILE...     run files again, with any compiler
//
// Inputs stand in blocks of exactly their size. Where an input can be cut, the
// whole and the pieces must give the same.
#include "mcp.c"

#include <sys/stat.h>
#include <unistd.h>

#define MUST(cond) must((cond), #cond, __LINE__)

static void must(bool ok, const char *what, int line) {
    if (ok) return;
    fprintf(stderr, "fuzz.c:%d: does not hold: %s\n", line, what);
    abort();
}

static mem fuzz_mem(void) {
    mem m;
    mem_init(&m, NULL, NULL);
    return m;
}

// Where to cut an input: anywhere, but the same each time it is run.
static size_t fuzz_cut(str in) {
    size_t n = in.len;
    for (size_t i = 0; i < in.len && i < 64; i++)
        n = n * 31 % 1000003 + (uint8_t)in.ptr[i];
    return n % (in.len + 1);
}

static bool fuzz_is_utf8(str s) {
    for (size_t at = 0, n; at < s.len; at += n) {
        n = utf8_len(s.ptr + at, s.len - at);
        if (!n) return false;
    }
    return true;
}

//-----------------------------------------------------------------------------
// Text

static void fuzz_text(str in) {
    char *a = malloc(in.len + 1), *b = malloc(in.len + 1);
    size_t cut = fuzz_cut(in), n, k;
    str whole = str_skip(in, cut);

    n = text_plain(a, in);
    MUST(n <= in.len && fuzz_is_utf8(str_make(a, n)));
    for (size_t at = 0; at < n;) {
        uint32_t c = utf8_next(str_make(a, n), &at);
        MUST(c >= 0x20 || c == '\n' || c == '\t');
        MUST(!(c >= 0x7F && c <= 0x9F) && !(c >= 0x202A && c <= 0x202E));
    }
    k = text_plain(b, str_make(a, n));  // clean text stays
    MUST(str_eq(str_make(a, n), str_make(b, k)));
    n = text_line(a, in);
    MUST(n <= in.len && (!n || !memchr(a, '\n', n)));
    MUST(str_trim(str_make(a, n)).len == n);
    if (in.len) memcpy(b, in.ptr, in.len);  // in place is allowed
    k = text_line(b, str_make(b, in.len));
    MUST(str_eq(str_make(a, n), str_make(b, k)));
    whole = utf8_cut(in, cut);
    MUST(whole.len <= cut && whole.ptr == in.ptr);
    if (fuzz_is_utf8(in)) MUST(fuzz_is_utf8(whole));
    glob_match(str_head(in, cut), str_skip(in, cut));
    MUST(glob_match(S("*"), in) == (!in.len || !memchr(in.ptr, '\n', in.len)));
    free(a);
    free(b);
}

static void fuzz_base64(str in) {
    char *text = malloc(BASE64_LEN(in.len) + 1), *back = malloc(in.len + 4);
    size_t n = base64_encode(text, in), k = 0;

    MUST(n == BASE64_LEN(in.len));
#if USE_TLS
    k = pem_decode((uint8_t *)back, str_make(text, n));
    MUST(str_eq(str_make(back, k), in));
#endif
    (void)k;
    free(text);
    free(back);
}

//-----------------------------------------------------------------------------
// JSON

// Read with the cursor and write again.
static void fuzz_json_write(mcp_writer *w, mcp_json v) {
    mcp_type type = mcp_typeof(v);
    size_t n = 0;

    if (type == MCP_OBJECT || type == MCP_ARRAY) {
        if (type == MCP_OBJECT) mcp_w_object(w);
        else mcp_w_array(w);
        for (mcp_json e = mcp_first(v); mcp_exists(e); e = mcp_next(e), n++) {
            if (type == MCP_OBJECT) w_key(w, json_key(e));
            fuzz_json_write(w, e);
        }
        mcp_w_end(w);
        MUST(n == mcp_length(v));
    } else if (type == MCP_STRING) {
        MUST(fuzz_is_utf8(mcp_view(v)));
        w_string(w, mcp_view(v));
    } else {
        w_raw(w, mcp_raw(v));
        mcp_number(v, 0);
        mcp_integer(v, 0);
    }
}

static void fuzz_json_same(const buf *a, const buf *b) {
    MUST(!a->err && !b->err);
    MUST(str_eq(buf_str(a), buf_str(b)));
}

static void fuzz_json_parsed(mem *m, mcp_doc *doc) {
    mcp_doc *again = NULL;
    hex64 print;
    mcp_writer w;
    buf a, b, pretty;

    w_init(&w, m, SIZE_MAX / 2);
    buf_init(&a, m, SIZE_MAX / 2);
    buf_init(&b, m, SIZE_MAX / 2);
    buf_init(&pretty, m, SIZE_MAX / 2);
    fuzz_json_write(&w, json_root(doc));
    MUST(w_err(&w) == MCP_OK);
    json_canonical(&a, json_root(doc));
    MUST(json_parse(m, w_str(&w), &again, NULL, NULL) == MCP_OK);
    json_canonical(&b, json_root(again));
    fuzz_json_same(&a, &b);
    json_free(again);
    MUST(json_parse(m, buf_str(&a), &again, NULL, NULL) == MCP_OK);
    buf_clear(&b);
    json_canonical(&b, json_root(again));
    fuzz_json_same(&a, &b);
    json_free(again);
    json_pretty(&pretty, json_root(doc));
    MUST(json_parse(m, buf_str(&pretty), &again, NULL, NULL) == MCP_OK);
    buf_clear(&b);
    json_canonical(&b, json_root(again));
    fuzz_json_same(&a, &b);
    json_free(again);
    MUST(fingerprint(m, print, json_root(doc)) && strlen(print) == 64);
    buf_free(&pretty);
    buf_free(&a);
    buf_free(&b);
    w_free(&w);
}

static void fuzz_json(str in) {
    mem m = fuzz_mem();
    char *relaxed = malloc(in.len + 1), *twice = malloc(in.len + 1);
    const char *why = NULL;
    size_t at = SIZE_MAX;
    mcp_doc *doc = NULL;
    mcp_code rc = json_parse(&m, in, &doc, &at, &why);

    if (in.len) memcpy(relaxed, in.ptr, in.len);
    json_relax(relaxed, in.len, NULL);
    if (in.len) memcpy(twice, relaxed, in.len);
    json_relax(twice, in.len, NULL);
    if (rc) {
        MUST(!doc && why && at <= in.len);
    } else {  // jsmn agrees, and nothing is left to relax
        jsmn_parser p;
        jsmn_init(&p);
        MUST(jsmn_parse(&p, doc->text, in.len + 1, NULL, 0) == (int)doc->n);
        MUST(str_eq(str_make(relaxed, in.len), in));
        fuzz_json_parsed(&m, doc);
        json_free(doc);
    }
    MUST(str_eq(str_make(relaxed, in.len), str_make(twice, in.len)));
    free(relaxed);
    free(twice);
}

//-----------------------------------------------------------------------------
// HTTP, event streams

static void fuzz_url(str in) {
    mem m = fuzz_mem();
    size_t cut = fuzz_cut(in);
    url base, u, again;
    buf header;

    if (url_parse(&m, in, &u) == MCP_OK) {
        MUST(url_parse(&m, str_of(u.text), &again) == MCP_OK);
        MUST(strcmp(u.text, again.text) == 0);
        MUST(u.port && u.host.len && *u.path.ptr == '/');
        url_free(&m, &again);
        url_free(&m, &u);
    }
    MUST(url_parse(&m, S("https://a.example:81/b/c/d?e"), &base) == MCP_OK);
    if (url_join(&m, &base, in, &u) == MCP_OK) {
        MUST(url_same_origin(&base, &u) || str_find(in, S("//")) != SIZE_MAX);
        url_free(&m, &u);
    }
    url_free(&m, &base);
    buf_init(&header, &m, SIZE_MAX / 2);
    header_add(&header, str_head(in, cut), str_skip(in, cut));
    MUST(header.err || str_find(buf_str(&header), S("\n")) == header.len - 1);
    buf_free(&header);
}

// What a piece leaves comes again with the next.
static void fuzz_head_feed(head_parser *p, str in, size_t cut, size_t *rest) {
    str first = str_head(in, cut), second = str_skip(in, cut);

    if (!head_feed(p, &first)) head_feed(p, &second);
    *rest = first.len + second.len;
}

static void fuzz_head(str in) {
    mem m = fuzz_mem();
    head_parser a, b;
    size_t left_a, left_b;

    head_init(&a, &m);
    head_init(&b, &m);
    fuzz_head_feed(&a, in, in.len, &left_a);
    fuzz_head_feed(&b, in, fuzz_cut(in), &left_b);
    MUST(a.state == b.state && a.head.status == b.head.status);
    MUST(a.why == b.why);
    if (a.state == HEAD_DONE) {
        MUST(left_a == left_b);
        MUST(a.head.length == b.head.length);
        MUST(a.head.chunked + a.head.has_length + a.head.close_delimited == 1);
        MUST(str_eq(buf_str(&a.head.block), buf_str(&b.head.block)));
    }
    head_free(&a);
    head_free(&b);
}

// A proxy's answer to CONNECT; a byte behind it is a failure only if it comes
// together with the head.
static void fuzz_tunnel(str in) {
    mem m = fuzz_mem();
    proxy via;
    size_t cut = fuzz_cut(in), left;
    tunnel a, b;
    mcp_code whole, cut_rc;
    str first = in, second = str_skip(in, cut);

    memset(&via, 0, sizeof via);
    via.title = (char *)(uintptr_t)"the proxy";
    MUST(tunnel_init(&a, &m, &via, "a:443") == MCP_OK);
    MUST(tunnel_init(&b, &m, &via, "a:443") == MCP_OK);
    whole = tunnel_feed(&a, &first, NULL);
    left = first.len;
    first = str_head(in, cut);
    cut_rc = tunnel_feed(&b, &first, NULL);
    if (cut_rc == MCP_PENDING) cut_rc = tunnel_feed(&b, &second, NULL);
    MUST(whole == cut_rc || (whole == MCP_PROTOCOL_ERROR && left > 0));
    MUST(a.head.head.status == b.head.head.status);
    tunnel_free(&a);
    tunnel_free(&b);
}

// What HTTPS_PROXY may hold, and NO_PROXY against a URL.
static void fuzz_proxy(str in) {
    mem m = fuzz_mem();
    mcp handle;
    proxy *list = NULL, *p;
    url u;

    memset(&handle, 0, sizeof handle);
    handle.mem = m;
    secrets_init(&handle.secrets, &m);
    p = proxy_of(&handle, &list, in, "X");
    MUST(p && (p->bad || (p->port && p->host && *p->host)));
    MUST(proxy_of(&handle, &list, str_of(p->text), "X") == p ||
         memchr(in.ptr, 0, in.len));
    while ((p = list)) {
        list = p->next;
        proxy_free(&m, p);
    }
    secrets_free(&handle.secrets);
    MUST(url_parse(&m, S("https://a.example:81/"), &u) == MCP_OK);
    route_exempt(in, &u);
    url_free(&m, &u);
    MUST(url_parse(&m, S("http://[2001:db8::1]/"), &u) == MCP_OK);
    route_exempt(in, &u);
    url_free(&m, &u);
}

static bool fuzz_body(const http_head *h, str in, size_t cut, buf *out,
                      bool *done) {
    str part[2] = {str_head(in, cut), str_skip(in, cut)}, data;
    http_framing f;
    bool ok = true;

    http_framing_init(&f, h);
    for (int i = 0; i < 2 && ok; i++) {
        do {
            ok = http_framing_next(&f, &part[i], &data);
            buf_add(out, data);
        } while (ok && data.len);
        if (f.done) break;
    }
    *done = f.done;
    return ok;
}

static void fuzz_chunked(str in) {
    mem m = fuzz_mem();
    buf a, b;
    bool ok, done_a, done_b;
    http_head h;

    memset(&h, 0, sizeof h);
    h.chunked = true;
    buf_init(&a, &m, SIZE_MAX / 2);
    buf_init(&b, &m, SIZE_MAX / 2);
    ok = fuzz_body(&h, in, in.len, &a, &done_a);
    MUST(fuzz_body(&h, in, fuzz_cut(in), &b, &done_b) == ok);
    MUST(done_a == done_b && str_eq(buf_str(&a), buf_str(&b)));
    buf_free(&a);
    buf_free(&b);
}

static mcp_code fuzz_sse_feed(mem *m, str in, size_t cut, buf *out) {
    str part[2] = {str_head(in, cut), str_skip(in, cut)};
    sse_event e;
    mcp_code rc;
    sse s;

    sse_init(&s, m, 64);
    for (int i = 0; i < 2; i++) {
        while (sse_feed(&s, &part[i], &e)) {
            MUST(e.data.len <= 64 && (e.data.len || e.has_id) && e.type.len);
            buf_add(out, e.type);
            buf_byte(out, 0);
            buf_add(out, e.data);
            buf_byte(out, e.has_id);
            buf_add(out, e.id);
        }
        MUST(!part[i].len);
    }
    rc = sse_err(&s);
    sse_free(&s);
    return rc;
}

static void fuzz_sse(str in) {
    mem m = fuzz_mem();
    mcp_code rc;
    buf a, b;

    buf_init(&a, &m, SIZE_MAX / 2);
    buf_init(&b, &m, SIZE_MAX / 2);
    rc = fuzz_sse_feed(&m, in, in.len, &a);
    MUST(fuzz_sse_feed(&m, in, fuzz_cut(in), &b) == rc);
    MUST(str_eq(buf_str(&a), buf_str(&b)));
    buf_free(&a);
    buf_free(&b);
}

//-----------------------------------------------------------------------------
// Names, certificates

// One record: the number of them, then its name (a pointer), type A, class
// Internet, time to live, length, address.
static void fuzz_dns_seed(buf *out) {
    buf_add(out, S("\1\xC0\x0C\0\1\0\1\0\0\0\1\0\4\1\2\3\4"));
}

// As a packet of its own, and as the records behind our own question.
static void fuzz_dns(str in) {
    mem m = fuzz_mem();
    uint8_t name[DNS_NAME], out[DNS_NAME];
    char *text = mem_text(&m, in);
    dns_question q;
    dns_conf conf;
    os_addr addr, list[4];
    size_t n = dns_name_write(name, S("www.example.org")), at = 0;
    buf packet;

    memset(&q, 0, sizeof q);
    q.type = in.len & 1 ? DNS_A : DNS_AAAA;
    dns_ask(&q, 0x1234, name, n);
    dns_answer(in, &q);
    MUST(q.n >= 0 && q.n <= LIMIT_ADDRESSES);
    dns_name_read(in, &at, out);
    buf_init(&packet, &m, SIZE_MAX / 2);
    buf_add(&packet, str_make((const char *)q.packet + 2, q.len));
    packet.ptr[2] = (char)0x81;
    if (in.len > 1) packet.ptr[7] = in.ptr[0];
    buf_add(&packet, str_skip(in, 1));
    if (dns_answer(buf_str(&packet), &q) == DNS_FOUND) MUST(q.n > 0);
    MUST(q.n >= 0 && q.n <= LIMIT_ADDRESSES);
    buf_free(&packet);
    dns_conf_read(&conf, in);
    MUST(conf.servers > 0 && conf.servers <= DNS_SERVERS);
    MUST(hosts_find(in, S("a"), list, (int)COUNT(list)) <= (int)COUNT(list));
    if (addr_parse(text, &addr)) MUST(addr.family == 4 || addr.family == 6);
    mem_text_free(&m, text);
}

#if USE_TLS

// A certificate of nobody's, so that the walk begins inside one.
static const char fuzz_cert[] =
    "MIIBoDCCAUagAwIBAgIUFzg7i15atkgYLARq/0A2s7IQk74wCgYIKoZIzj0EAwIw\n"
    "DzENMAsGA1UEAwwEc2VlZDAgFw0yNjEyMDExMTAyMjVaGA8yMTI2MTEwNzExMDIy\n"
    "NVowDzENMAsGA1UEAwwEc2VlZDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABLRC\n"
    "wUpC+VMxe+dfcRsUW2wbOSgO9MaBiOK7PWY6Y8c3kPi52xqQ3G9SRMs3sw9aKy09\n"
    "ZIDmvAfp+m2CnrtMzpOjfjB8MB0GA1UdDgQWBBR9z54OZbVBrxfZYPRj+ZoqE++O\n"
    "/zAfBgNVHSMEGDAWgBR9z54OZbVBrxfZYPRj+ZoqE++O/zAPBgNVHRMBAf8EBTAD\n"
    "AQH/MBQGA1UdEQQNMAuCA2EuYocEfwAAATATBgNVHSUEDDAKBggrBgEFBQcDATAK\n"
    "BggqhkjOPQQDAgNIADBFAiBz+O4jrb/E2yoRmEY8GJ6YoLSGTKF1eX6K26JMC+0Y\n"
    "sAIhAM4MRDr8KhDUKGhLfd/hrgsUuaByNFdIaAkhmgqpFgK2\n";

static void fuzz_der_seed(buf *out) {
    buf_reserve(out, sizeof fuzz_cert);
    out->len = pem_decode((uint8_t *)out->ptr, str_of(fuzz_cert));
}

// The names of a leaf, against a host and against an address.
static void fuzz_leaf(const tls_cert *c) {
    mem m = fuzz_mem();
    tls_x509 *x = mem_new(&m, sizeof *x);

    x->host = "a.b";
    tls_judge(x, c);
    x->host = "127.0.0.1";
    MUST(addr_parse(x->host, &x->ip));
    tls_judge(x, c);
    MUST(memchr(x->names, 0, sizeof x->names) != NULL);
    MUST(fuzz_is_utf8(str_of(x->names)));
    mem_free(&m, x, sizeof *x);
}

static void fuzz_der(str in) {
    der d = {(const uint8_t *)in.ptr, in.len}, value, left = d;
    br_x509_pkey key;
    tls_cert c;

    while (der_next(&left, &value) >= 0)
        MUST(value.ptr >= d.ptr && value.ptr + value.len <= d.ptr + d.len);
    if (cert_read(d, &c)) {
        cert_is_ca(&c);
        fuzz_leaf(&c);
        key_read(c.key, &key);
    }
    key_read(d, &key);
}

static void fuzz_pem(str in) {
    mem m = fuzz_mem();
    struct tls_shared *t = mem_new(&m, sizeof *t);

    buf_init(&t->pem, &m, SIZE_MAX / 2);
    buf_add(&t->pem, S("-----BEGIN CERTIFICATE-----"));
    buf_add(&t->pem, in);
    MUST(anchors_read(&m, t) == MCP_OK);
    for (uint32_t i = 0; i < t->n; i++)
        MUST((const char *)t->anchors[i].dn.data >= t->pem.ptr &&
             (const char *)t->anchors[i].dn.data + t->anchors[i].dn.len <=
                 t->pem.ptr + t->pem.len);
    anchors_drop(&m, t);
    mem_free(&m, t, sizeof *t);
}

#endif

//-----------------------------------------------------------------------------
// OAuth

#if USE_OAUTH

static bool fuzz_inside(const buf *text, str s) {
    return !s.len || (s.ptr >= text->ptr && s.len <= text->len &&
                      s.ptr + s.len <= text->ptr + text->len);
}

static void fuzz_ring(mcp *m, str head) {
    bool damaged;
    vault v;

    memset(&v, 0, sizeof v);
    v.m = m;
    v.kind = STORE_KEYCHAIN;
    MUST(ring_parts(&v, head, &damaged) == MCP_OK);
    MUST(v.ring.parts <= ring_most(&v) && v.ring.size <= LIMIT_RECORD);
    MUST(!v.ring.parts || v.ring.set == 'a' || v.ring.set == 'b');
    MUST(!damaged || !v.ring.parts);
}

// What is read as a record is written as the same record, and the head of a
// split one stays within its bounds.
static void fuzz_record(str in) {
    str site, text;
    record *r, *again;
    buf a, b;
    mcp m;

    memset(&m, 0, sizeof m);
    m.mem = fuzz_mem();
    buf_init(&a, &m.mem, LIMIT_RECORD);
    buf_init(&b, &m.mem, LIMIT_RECORD);
    str_cut(in, '\n', &site, &text);
    if (record_read(&m, "https://h/", NULL, text, &r, NULL) == MCP_OK) {
        MUST(r->n <= LIMIT_GRANTS && record_text(r, &a, NULL) == MCP_OK);
        MUST(!record_read(&m, "https://h/", NULL, buf_str(&a), &again, NULL));
        MUST(!record_text(again, &b, NULL) && str_eq(buf_str(&a), buf_str(&b)));
        record_free(&m, again);
    }
    record_free(&m, r);
    buf_free(&a);
    buf_free(&b);
    fuzz_ring(&m, site);
}

// Each line of the input is a header line of its own.
static void fuzz_challenge(str in) {
    mem m = fuzz_mem();
    str left = in, line;
    challenge c, again;
    http_head h;
    buf scopes;

    memset(&h, 0, sizeof h);
    buf_init(&h.block, &m, SIZE_MAX / 2);
    while (left.len) {
        str_cut(left, '\n', &line, &left);
        if (h.block.len + line.len > LIMIT_HTTP_HEAD / 2) break;
        buf_add(&h.block, S("WWW-Authenticate: "));
        buf_add(&h.block, line);
        buf_byte(&h.block, '\n');
    }
    MUST(challenge_parse(&m, &h, &c) == MCP_OK);
    MUST(fuzz_inside(&c.text, c.metadata) && fuzz_inside(&c.text, c.scope));
    MUST(fuzz_inside(&c.text, c.error) && fuzz_inside(&c.text, c.description));
    buf_init(&scopes, &m, SIZE_MAX / 2);
    if (scope_add(&scopes, c.scope) == MCP_OK) {
        size_t n = scopes.len;
        MUST(scope_add(&scopes, c.scope) == MCP_OK && scopes.len == n);
        MUST(scope_has(buf_str(&scopes), buf_str(&scopes)));
    }
    MUST(oauth_visible(buf_str(&scopes), true));
    // What comes in a line of its own behind it is found.
    buf_add(&h.block, S("WWW-Authenticate: DPoP error=e\n"));
    MUST(challenge_parse(&m, &h, &again) == MCP_OK &&
         again.scheme == SCHEME_DPOP);
    challenge_free(&again);
    challenge_free(&c);
    buf_free(&scopes);
    buf_free(&h.block);
}

static void fuzz_prm(str in) {
    mem m = fuzz_mem();
    url site, u;
    prm p;

    MUST(url_parse(&m, S("https://h/mcp/a"), &site) == MCP_OK);
    if (prm_parse(&m, &site, in, &p, NULL) == MCP_OK) {
        MUST(url_parse(&m, p.resource, &u) == MCP_OK);
        MUST(url_same_origin(&u, &site) && mcp_length(p.servers) > 0);
        url_free(&m, &u);
        prm_free(&p);
    }
    MUST(!p.doc);
    url_free(&m, &site);
}

static void fuzz_as(str in) {
    mem m = fuzz_mem();
    as_meta a, any;
    mcp_code rc = as_parse(&m, S("https://a/t"), in, &a, NULL);
    url u;

    if (as_parse(&m, str_make(NULL, 0), in, &any, NULL) == MCP_OK) {
        MUST((rc == MCP_OK) == str_is(any.issuer, "https://a/t"));
        MUST(url_parse(&m, any.token, &u) == MCP_OK);
        url_free(&m, &u);
    } else {
        MUST(rc != MCP_OK);
    }
    MUST(rc != MCP_OK || str_is(a.issuer, "https://a/t"));
    as_free(&any);
    as_free(&a);
}

static void fuzz_callback(str in) {
    mem m = fuzz_mem();
    str redirect = S("http://127.0.0.1:7/callback");
    callback_answer a;
    buf whole;

    buf_init(&whole, &m, SIZE_MAX / 2);
    for (int i = 0; i < 2; i++) {  // the query alone, and as a whole
        if (i) buf_clear(&whole);
        else buf_add(&whole, redirect);
        buf_add(&whole, in);
        if (callback_parse(&m, buf_str(&whole), redirect, S("S"), &a, NULL))
            continue;
        MUST((a.code.len > 0) != (a.error.len > 0));
        MUST(oauth_visible(a.code, true) && oauth_visible(a.error, true));
        MUST(str_find(buf_str(&whole), S("state=S")) != SIZE_MAX ||
             str_find(buf_str(&whole), S("%")) != SIZE_MAX);
        callback_answer_free(&a);
    }
    buf_free(&whole);
}

static void fuzz_token(str in) {
    mem m = fuzz_mem();
    token_answer t;

    if (token_parse(&m, in.len & 1 ? 200 : 400, in, &t, NULL) == MCP_OK) {
        MUST(t.access.len && t.access.len <= LIMIT_TOKEN);
        MUST(header_value_ok(t.access) && t.expires_in >= 0);
        token_free(&t);
    }
    MUST(!t.doc && strlen(t.error) < sizeof t.error);
}

static void fuzz_registration(str in) {
    mem m = fuzz_mem();
    registration_answer r;

    if (registration_parse(&m, 201, in, &r, NULL) == MCP_OK) {
        MUST(r.id.len && oauth_visible(r.id, true) && r.secret_expires >= 0);
        registration_free(&r);
    }
    MUST(!r.doc);
}

// A key that is read makes a signature and is found again in its number. What
// is not text is taken for what is inside.
static void fuzz_key(str in) {
    mem m = fuzz_mem();
    key_pair k, again;
    mcp_code rc;
    buf jwt;

    buf_init(&jwt, &m, SIZE_MAX / 2);
    buf_add(&jwt, S("-----BEGIN PRIVATE KEY-----\n"));
    buf_base64(&jwt, in);
    buf_add(&jwt, S("\n-----END PRIVATE KEY-----\n"));
    rc = key_from_pem(&m, str_starts(in, S("-")) ? in : buf_str(&jwt), &k,
                      NULL);
    buf_free(&jwt);
    if (rc) return;
    MUST(key_from_secret(k.d, &again) && memcmp(&k, &again, sizeof k) == 0);
    buf_init(&jwt, &m, SIZE_MAX / 2);
    MUST(jwt_sign(&jwt, &k, S("{}"), S("{}")) == MCP_OK && jwt.len == 94);
    buf_free(&jwt);
}

// A request as the listener for callbacks sees it.
static void fuzz_listener(str in) {
    mem m = fuzz_mem();
    callback *c = mem_new(&m, sizeof *c);
    mcp *h = mem_new(&m, sizeof *h);
    size_t end = caller_head_end(in);
    buf page;

    h->mem = m;
    c->m = h;
    MUST(url_parse(&m, S("http://127.0.0.1:7/callback"), &c->redirect_url) ==
         MCP_OK);
    buf_init(&c->redirect, &m, LIMIT_URL);
    buf_init(&c->state, &m, LIMIT_URL);
    buf_add(&c->redirect, str_of(c->redirect_url.text));
    buf_add(&c->state, S("S"));
    buf_init(&page, &m, SIZE_MAX / 2);
    MUST(end == SIZE_MAX || end < in.len);
    page_write(&page, caller_page(c, in), "name");
    MUST(!page.err && str_find(buf_str(&page), S("name")) != SIZE_MAX);
    MUST(c->answered == (c->answer.len > 0));
    buf_free(&page);
    buf_free(&c->redirect);
    buf_free(&c->state);
    if (c->answered) buf_free(&c->answer);
    url_free(&m, &c->redirect_url);
    mem_free(&m, h, sizeof *h);
    mem_free(&m, c, sizeof *c);
}

#endif  // USE_OAUTH

//-----------------------------------------------------------------------------
// Configuration, commands, templates

// A handle with one server, "s", that never connects. The text is all that its
// files hold.
typedef struct fuzz_host {
    mcp *m;
    str file;
} fuzz_host;

static os_result fuzz_file_stat(os *o, const char *path, os_stat *st) {
    const fuzz_host *h = o->user;
    (void)path;
    memset(st, 0, sizeof *st);
    if (!h->file.ptr) return OS_ABSENT;
    st->file = true;
    st->size = h->file.len;
    return OS_OK;
}

static os_result fuzz_file_read(os *o, const char *path, size_t max,
                                buf *out) {
    const fuzz_host *h = o->user;
    (void)path;
    if (!h->file.ptr) return OS_ABSENT;
    if (h->file.len > max) return OS_TOO_BIG;
    buf_add(out, h->file);
    return out->err ? OS_NO_MEMORY : OS_OK;
}

static void fuzz_open(fuzz_host *h) {
    mcp_options opt;

    memset(h, 0, sizeof *h);
    memset(&opt, 0, sizeof opt);
    opt.config_dir = "/fuzz";
    opt.project_dir = "/fuzz/project";
    opt.no_cache = opt.cached_only = true;
    MUST(mcp_open(&h->m, &opt) == MCP_OK);
    h->m->os.user = h;
    h->m->os.file_stat = fuzz_file_stat;
    h->m->os.file_read = fuzz_file_read;
    MUST(mcp_add(h->m, "s", "{\"command\":\"x\"}") == MCP_OK);
}

static void fuzz_config(str in) {
    fuzz_host h;
    config *c = NULL;
    mcp_code rc;
    diag d;

    fuzz_open(&h);
    diag_init(&d, &h.m->mem, &h.m->secrets);
    h.file = in;
    rc = config_load(h.m, "/fuzz/mcp.json", &c, &d);
    MUST((rc == MCP_OK) == (c != NULL) && d.code == rc);
    for (uint32_t i = 0; c && i < c->n; i++) {
        resolved *r = NULL;
        MUST(config_find(c, str_of(c->servers[i]->name)) == c->servers[i]);
        if (c->servers[i]->bad) continue;
        if (config_resolve(h.m, c->servers[i], &r, &d) == MCP_OK)
            MUST(strlen(r->identity) == 64);
        resolved_free(r);
        diag_clear(&d);
    }
    config_free(c);
    h.file.ptr = NULL;
    diag_free(&d);
    mcp_close(h.m);
}

// The words of a line, each put in quotes again, are the same words.
static void fuzz_quote(str in) {
    mem m = fuzz_mem();
    strings a = {NULL, 0}, b = {NULL, 0};
    arena words;
    diag d;
    buf line;

    if (in.len && memchr(in.ptr, 0, in.len)) return;
    arena_init(&words, &m, SIZE_MAX / 2);
    diag_init(&d, &m, NULL);
    buf_init(&line, &m, SIZE_MAX / 2);
    if (command_words(&m, in, &a, &words, &d) == MCP_OK) {
        for (uint32_t i = 0; i < a.n; i++) {
            buf_add(&line, S(" \""));
            for (const char *p = a.list[i]; *p; p++) {
                if (*p == '"' || *p == '\\') buf_byte(&line, '\\');
                buf_byte(&line, *p);
            }
            buf_byte(&line, '"');
        }
        if (command_words(&m, buf_str(&line), &b, &words, &d) == MCP_OK) {
            MUST(a.n == b.n);
            for (uint32_t i = 0; i < a.n; i++)
                MUST(strcmp(a.list[i], b.list[i]) == 0);
        } else {  // quotes and backslashes made it longer
            MUST(d.code == MCP_LIMIT_EXCEEDED);
        }
    }
    buf_free(&line);
    diag_free(&d);
    arena_free(&words);
}

// A line with the template, then the values as JSON.
static void fuzz_template(str in) {
    mem m = fuzz_mem();
    mcp_doc *values = NULL, *names = NULL;
    mcp_writer w;
    str text, json;
    buf out;

    str_cut(in, '\n', &text, &json);
    if (!fuzz_is_utf8(text) || !template_ok(text)) return;  // it was JSON
    w_init(&w, &m, SIZE_MAX / 2);
    template_variables(&w, text);
    MUST(w_err(&w) == MCP_OK);
    MUST(json_parse(&m, w_str(&w), &names, NULL, NULL) == MCP_OK);
    for (mcp_json v = mcp_first(json_root(names)); mcp_exists(v);
         v = mcp_next(v))
        MUST(template_has(text, mcp_view(v)) != NULL);
    if (json_parse(&m, json, &values, NULL, NULL) == MCP_OK) {
        buf_init(&out, &m, SIZE_MAX / 2);
        template_expand(&out, text, json_root(values));
        MUST(!out.err);
        buf_free(&out);
    }
    json_free(values);
    json_free(names);
    w_free(&w);
}

// A line with the schema of a form, then what a person filled in. What fits is
// completed by defaults, and that fits and needs no more.
static void fuzz_form(str in) {
    mem m = fuzz_mem();
    mcp_doc *schema = NULL, *content = NULL, *sent = NULL;
    mcp_writer first, second;
    str text, json;
    diag d;

    str_cut(in, '\n', &text, &json);
    diag_init(&d, &m, NULL);
    w_init(&first, &m, SIZE_MAX / 2);
    w_init(&second, &m, SIZE_MAX / 2);
    if (json_parse(&m, text, &schema, NULL, NULL) == MCP_OK &&
        json_parse(&m, json, &content, NULL, NULL) == MCP_OK &&
        !form_refusal(json_root(schema)) &&
        form_fits(json_root(schema), json_root(content), &d)) {
        form_write(&first, json_root(schema), json_root(content));
        MUST(w_err(&first) == MCP_OK);
        MUST(json_parse(&m, w_str(&first), &sent, NULL, NULL) == MCP_OK);
        MUST(form_fits(json_root(schema), json_root(sent), &d));
        form_write(&second, json_root(schema), json_root(sent));
        MUST(str_eq(w_str(&first), w_str(&second)));
    }
    w_free(&first);
    w_free(&second);
    diag_free(&d);
    json_free(schema);
    json_free(content);
    json_free(sent);
}

//-----------------------------------------------------------------------------
// A whole exchange: what a server may answer, on every connection anew

enum { FUZZ_FD = 1000000 };  // no descriptor of the system

typedef struct fuzz_peer {
    str in;
    size_t at, cut;
} fuzz_peer;

static os_result fuzz_connect(os *o, const os_addr *a, os_fd *out) {
    fuzz_peer *p = o->user;
    (void)a;
    p->at = 0;
    *out = FUZZ_FD;
    return OS_OK;
}

static os_result fuzz_connected(os *o, os_fd fd, char *why, size_t cap) {
    (void)o, (void)fd, (void)why, (void)cap;
    return OS_OK;
}

static ptrdiff_t fuzz_send(os *o, os_fd fd, const void *from, size_t n) {
    (void)o, (void)fd, (void)from;
    return (ptrdiff_t)n;
}

static ptrdiff_t fuzz_read(os *o, os_fd fd, void *to, size_t n) {
    fuzz_peer *p = o->user;
    size_t end = p->at < p->cut ? p->cut : p->in.len;

    if (fd != FUZZ_FD) return IO_AGAIN;  // the self-pipe
    if (p->at == p->in.len) return IO_END;
    if (n > end - p->at) n = end - p->at;
    memcpy(to, p->in.ptr + p->at, n);
    p->at += n;
    return (ptrdiff_t)n;
}

static int fuzz_wait(os *o, mcp_fd *fds, uint32_t n, int ms) {
    int ready = 0;
    (void)o, (void)ms;
    for (uint32_t i = 0; i < n; i++)
        if (fds[i].fd == FUZZ_FD && fds[i].want) {
            fds[i].got = fds[i].want;
            ready++;
        }
    return ready;
}

static bool fuzz_quiet(os *o, os_fd fd) {
    (void)o, (void)fd;
    return false;
}

static void fuzz_shut(os *o, os_fd fd) {
    (void)o;
    if (fd != FUZZ_FD) close(fd);
}

static http_state fuzz_exchange(str in, size_t cut, mcp_code *code, buf *out) {
    fuzz_peer peer = {in, 0, cut};
    http_ask how;
    http_state now;
    http_xchg *x;
    sse_event e;
    mcp *m;
    url u;

    MUST(mcp_open(&m, NULL) == MCP_OK);
    m->os.user = &peer;
    m->os.connect = fuzz_connect;
    m->os.connected = fuzz_connected;
    m->os.send = fuzz_send;
    m->os.read = fuzz_read;
    m->os.wait = fuzz_wait;
    m->os.quiet = fuzz_quiet;
    m->os.close = fuzz_shut;
    MUST(url_parse(&m->mem, S("http://127.0.0.1/"), &u) == MCP_OK);
    memset(&how, 0, sizeof how);
    how.method = "POST";
    how.url = &u;
    how.max_body = 512;
    how.deadline = NEVER;
    x = http_start(m, &how, NULL);
    MUST(x != NULL);
    for (int i = 0; i < 10000 && http_now(x) < HTTP_DONE; i++) {
        loop_turn(m, m->loop.now);
        while (http_event(x, &e)) {
            buf_add(out, e.data);
            buf_byte(out, 0);
        }
    }
    now = http_now(x);
    MUST(now == HTTP_DONE || now == HTTP_FAILED);
    *code = http_failure(x)->code;
    MUST((now == HTTP_FAILED) == (*code != MCP_OK));
    MUST(http_body(x).len <= how.max_body);
    if (now == HTTP_DONE) buf_add(out, http_body(x));
    http_end(m, x);
    url_free(&m->mem, &u);
    mcp_close(m);
    return now;
}

static void fuzz_answer(str in) {
    mem m = fuzz_mem();
    http_state now;
    mcp_code a, b;
    buf one, two;

    buf_init(&one, &m, SIZE_MAX / 2);
    buf_init(&two, &m, SIZE_MAX / 2);
    now = fuzz_exchange(in, in.len, &a, &one);
    MUST(fuzz_exchange(in, fuzz_cut(in), &b, &two) == now);
    MUST(a == b && str_eq(buf_str(&one), buf_str(&two)));
    buf_free(&one);
    buf_free(&two);
}

//-----------------------------------------------------------------------------
// Search, snapshot

// A list of tools as a server might send it: each that is taken can be told of,
// and mirrors its arguments only where nothing is wrong with the annotations.
static void fuzz_tools(str in) {
    fuzz_host h;
    mcp_doc *doc = NULL;
    server *s;
    catalog *c;

    fuzz_open(&h);
    s = server_find(h.m, S("s"));
    c = catalog_new(s, LIST_TOOLS);
    MUST(c != NULL);
    if (json_parse(&h.m->mem, in, &doc, NULL, NULL) == MCP_OK &&
        mcp_length(json_root(doc)) < 1000) {
        MUST(catalog_page_add(c, doc, json_root(doc)) == MCP_OK);
        MUST(catalog_build(c, (uint32_t)mcp_length(json_root(doc)), false) ==
             MCP_OK);
        for (uint32_t i = 0; i < catalog_count(c); i++) {
            bool any = false;
            item it;
            MUST(catalog_item(c, i, &it) && it.description.len);
            MUST(fuzz_is_utf8(it.title) && fuzz_is_utf8(it.description));
            MUST(!mirror_fault(c->entries[i].v, &any) || !any);
            MUST(it.mirrors == any);
        }
        doc = NULL;  // the page has it
    }
    json_free(doc);
    catalog_free(c);
    mcp_close(h.m);
}

#if USE_SEARCH

static catalog *fuzz_catalog(mcp *m) {
    server *s = server_find(m, S("s"));
    catalog *c = s ? catalog_new(s, LIST_TOOLS) : NULL;
    MUST(c != NULL);
    return c;
}

// A block as section 21 makes it, to begin with.
static void fuzz_segment_seed(buf *out) {
    static const char text[] =
        "{\"tools\":[{\"name\":\"read_file\",\"description\":\"Read a file\","
        "\"inputSchema\":{\"type\":\"object\",\"properties\":{\"path\":{"
        "\"type\":\"string\",\"description\":\"where it is\"}}}},{\"name\":"
        "\"sendMail\",\"description\":\"Send words to people\"}]}";
    fuzz_host h;
    mcp_doc *doc = NULL;
    catalog *c;
    mcp_json list;

    fuzz_open(&h);
    c = fuzz_catalog(h.m);
    MUST(json_parse(&h.m->mem, S(text), &doc, NULL, NULL) == MCP_OK);
    list = json_get(json_root(doc), S("tools"));
    MUST(catalog_page_add(c, doc, list) == MCP_OK);
    MUST(catalog_build(c, 2, false) == MCP_OK);
    MUST(seg_make(h.m, c) == MCP_OK);
    buf_add(out, c->index);
    catalog_free(c);
    mcp_close(h.m);
}

// A file whose head and digest are right, and whose rest is anything. What
// the loader lets through is searched.
static void fuzz_segment(str in) {
    static const char *const queries[] = {"file", "read mail x", "s.read_file",
                                          "reed", "p"};
    fuzz_host h;
    index_head head;
    catalog *c;
    char *block;
    hit hits[5];
    uint32_t n;

    if (in.len < sizeof head) return;
    fuzz_open(&h);
    block = mem_new(&h.m->mem, in.len);
    memcpy(block, in.ptr, in.len);
    memcpy(&head, block, sizeof head);
    head.magic = INDEX_MAGIC;
    head.version = INDEX_VERSION;
    head.kind = LIST_TOOLS;
    head.digest = 1;
    memcpy(block, &head, sizeof head);
    head.check = catalog_hash(str_make(block + offsetof(index_head, digest),
                                       in.len - offsetof(index_head, digest)));
    memcpy(block, &head, sizeof head);
    c = fuzz_catalog(h.m);
    c->index = str_make(block, in.len);
    c->index_own = block;
    c->digest = head.digest;
    c->json_size = head.json_size;
    if (index_ok(c->index, c->kind, c->digest, c->json_size) &&
        seg_ok(c->index) && catalog_room(c, head.docs) == MCP_OK) {
        c->n = c->entries_cap;
        for (size_t i = 0; i < COUNT(queries) && c->index.len; i++)
            search_run(h.m, &c, 1, str_of(queries[i]), ~0u, COUNT(hits), hits,
                       &n);
    }
    catalog_free(c);
    mcp_close(h.m);
}

#endif

static void fuzz_snapshot(str in) {
    mem m = fuzz_mem();
    char *text = mem_text(&m, in);
    mcp_result *told = NULL, *now = NULL;
    fuzz_host h;
    mcp_code rc;

    fuzz_open(&h);
    rc = mcp_restore(h.m, text, &told);
    MUST((rc == MCP_OK) == (told != NULL));
    MUST(mcp_snapshot(h.m, &now) == MCP_OK);  // of nothing: none can be had
    mcp_free(told);
    rc = mcp_restore(h.m, mcp_text(now), &told);
    MUST(rc == MCP_OK && !mcp_is_error(told));
    mcp_free(told);
    mcp_free(now);
    mcp_close(h.m);
    mem_text_free(&m, text);
}

//-----------------------------------------------------------------------------

static const struct {
    const char *name;
    void (*run)(str in);
    const char *seed;
    void (*make)(buf *out);  // instead of `seed`
} fuzzers[] = {
    {"json", fuzz_json,
     "{\"a\":[1,-2.5e3,true,null,\"\\u00e4\\ud83d\\ude00\"],\"b\":{}}", NULL},
    {"text", fuzz_text, "a \x1B[31mred\x1B[0m \xE2\x80\xAE \xC2\x9B" "1m *",
     NULL},
    {"base64", fuzz_base64, "any bytes", NULL},
    {"url", fuzz_url, "https://[::1]:8443/a/../%7eb?c=d", NULL},
    {"head", fuzz_head,
     "HTTP/1.1 100 Go on\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n"
     "Connection: close\r\n\r\nhello", NULL},
    {"tunnel", fuzz_tunnel,
     "HTTP/1.1 407 No\r\nProxy-Authenticate: Basic realm=x\r\n\r\n", NULL},
    {"proxy", fuzz_proxy, "http://u:p%41@[::1]:81,.a.example:81 10.0.0.0/8",
     NULL},
    {"chunked", fuzz_chunked, "5;x=y\r\nhello\r\n0\r\nTrailer: x\r\n\r\n",
     NULL},
    {"sse", fuzz_sse,
     ": hello\r\nid: 1\nretry: 5\revent: x\ndata: a\ndata: b\n\n", NULL},
    {"answer", fuzz_answer,
     "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
     "Transfer-Encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n0\r\n\r\n",
     NULL},
    {"dns", fuzz_dns, NULL, fuzz_dns_seed},
#if USE_TLS
    {"der", fuzz_der, NULL, fuzz_der_seed},
    {"pem", fuzz_pem, fuzz_cert, NULL},
#endif
#if USE_OAUTH
    {"record", fuzz_record,
     "{\"parts\":2,\"set\":\"a\",\"size\":3,\"digest\":\"x\"}\n"
     "{\"version\":1,\"url\":\"https://h/\",\"current\":\"i\",\"grants\":{\"i\""
     ":{\"access\":\"t\",\"expires\":9,\"dpop\":true}}}", NULL},
    {"challenge", fuzz_challenge,
     "Basic realm=\"x, y\", Bearer scope=\"a b\", error=invalid_token\n"
     "Negotiate abc==, DPoP resource_metadata=\"https://h/\\\"x\"", NULL},
    {"prm", fuzz_prm,
     "{\"resource\":\"https://h/mcp\",\"authorization_servers\":[\"https://a\""
     "],\"scopes_supported\":[\"a\"]}", NULL},
    {"as", fuzz_as,
     "{\"issuer\":\"https://a/t\",\"authorization_endpoint\":\"https://a/x\","
     "\"token_endpoint\":\"https://a/y\",\"registration_endpoint\":\"https:/"
     "/a/z\",\"code_challenge_methods_supported\":[\"S256\"]}", NULL},
    {"callback", fuzz_callback,
     "?code=c%20d&state=S&iss=https%3A%2F%2Fa&error_description=x+y", NULL},
    {"token", fuzz_token,
     "{\"access_token\":\"t\",\"token_type\":\"Bearer\",\"expires_in\":\"60\","
     "\"refresh_token\":\"r\",\"scope\":\"a b\"}", NULL},
    {"registration", fuzz_registration,
     "{\"client_id\":\"i\",\"client_secret\":\"s\",\"client_secret_expires_at"
     "\":9,\"token_endpoint_auth_method\":\"client_secret_post\"}", NULL},
    {"key", fuzz_key,
     "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n"
     "-----END EC PARAMETERS-----\n-----BEGIN EC PRIVATE KEY-----\n"
     "MHcCAQEEINkJbPNsUVgPKlsYByUIA2uo3NCX7EcQvdesCjgbHHAMoAoGCCqGSM49\n"
     "AwEHoUQDQgAEj27I2lVwseubuhbSTUojn3/BS2NR08r5u7UsXeJ1nhmb+7cTYjWk\n"
     "l5MDnPLWBFmilRt0hE10xqf437NZ2Cghrg==\n"
     "-----END EC PRIVATE KEY-----\n", NULL},
    {"listener", fuzz_listener,
     "GET /callback?code=c&state=S HTTP/1.1\r\nHost: 127.0.0.1:7\r\n\r\n",
     NULL},
#endif
    {"config", fuzz_config,
     "{\"mcpServers\":{\"a\":{\"command\":\"x\",\"args\":[\"${HOME}\"]},\"b\":"
     "{\"url\":\"https://h/\",\"headers\":{\"X\":\"${V:-y}\"}},\"c\":{"
     "\"url\":\"https://h\",\"oauthGrant\":\"enterprise\",\"oauthClientId\":"
     "\"i\",\"oauthClientSecret\":\"$$!\",\"oauthIdToken\":\"!t\","
     "\"oauthIdpTokenUrl\":\"https://i\",\"oauthIdpClientId\":\"c\"},"
     "},} // z",
     NULL},
    {"tools", fuzz_tools,
     "[{\"name\":\"t\",\"title\":\"T\",\"inputSchema\":{\"properties\":{\"p\":"
     "{\"type\":\"string\",\"x-mcp-header\":\"A\"},\"o\":{\"properties\":{"
     "\"n\":{\"type\":\"integer\",\"x-mcp-header\":\"B\"}}}},"
     "\"anyOf\":[{\"items\":"
     "[{\"not\":{}}]}]}}]", NULL},
    {"quote", fuzz_quote, "call \"a b\" {\"c\": \"d\"} e\\ f='g' \"\"", NULL},
    {"template", fuzz_template,
     "x://{a}/{+b}{?c,d*}{#e}\n{\"a\":\"1\",\"b\":\"/\",\"c\":[\"2\",\"3\"]}",
     NULL},
    {"form", fuzz_form,
     "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"string\","
     "\"format\":\"date-time\",\"maxLength\":30},\"b\":{\"type\":\"array\","
     "\"items\":{\"enum\":[\"x\"]},\"default\":[\"x\"]},\"c\":{\"anyOf\":["
     "{\"type\":\"integer\",\"minimum\":1e0},{\"type\":\"null\"}]}},"
     "\"required\":[\"b\"]}\n{\"a\":\"2024-02-29T10:00:00Z\",\"c\":3}", NULL},
#if USE_SEARCH
    {"segment", fuzz_segment, NULL, fuzz_segment_seed},
#endif
    {"snapshot", fuzz_snapshot,
     "{\"version\":1,\"tools\":[{\"server\":\"s\",\"tool\":\"t\"}]}", NULL},
};

// MCP_FUZZ names the parser; else the first byte of the input chooses one.
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    const char *only = getenv("MCP_FUZZ");
    str in = str_make((const char *)data, size);
    size_t which = 0;
    char *copy;

    if (only) {
        while (which < COUNT(fuzzers) && strcmp(only, fuzzers[which].name))
            which++;
        MUST(which < COUNT(fuzzers));
    } else {
        if (!size) return 0;
        which = data[0] % COUNT(fuzzers);
        in = str_skip(in, 1);
    }
    copy = malloc(in.len ? in.len : 1);
    if (!copy) return 0;
    if (in.len) memcpy(copy, in.ptr, in.len);
    fuzzers[which].run(str_make(copy, in.len));
    free(copy);
    return 0;
}

static void fuzz_write_seeds(const char *dir) {
    mem m = fuzz_mem();

    mkdir(dir, 0777);
    for (size_t i = 0; i < COUNT(fuzzers); i++) {
        char path[1000];
        buf seed;
        FILE *f;
        buf_init(&seed, &m, SIZE_MAX / 2);
        if (fuzzers[i].make) fuzzers[i].make(&seed);
        else buf_add(&seed, str_of(fuzzers[i].seed));
        snprintf(path, sizeof path, "%s/%s", dir, fuzzers[i].name);
        mkdir(path, 0777);
        snprintf(path, sizeof path, "%s/%s/seed", dir, fuzzers[i].name);
        f = fopen(path, "wb");
        if (f) fwrite(seed.ptr, 1, seed.len, f);
        if (f) fclose(f);
        buf_free(&seed);
    }
}

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerInitialize(int *argc, char ***argv) {
    const char *first = *argc > 1 ? (*argv)[1] : "";

    if (strcmp(first, "--list") == 0) {
        for (size_t i = 0; i < COUNT(fuzzers); i++) puts(fuzzers[i].name);
        exit(0);
    }
    if (strcmp(first, "--seed") == 0 && *argc > 2) {
        fuzz_write_seeds((*argv)[2]);
        exit(0);
    }
    return 0;
}

#ifdef FUZZ_MAIN

int main(int argc, char **argv) {
    mem m = fuzz_mem();

    LLVMFuzzerInitialize(&argc, &argv);
    for (int i = 1; i < argc; i++) {
        FILE *f = fopen(argv[i], "rb");
        char part[4096];
        size_t n;
        buf in;
        buf_init(&in, &m, SIZE_MAX / 2);
        while (f && (n = fread(part, 1, sizeof part, f)) > 0)
            buf_add(&in, str_make(part, n));
        if (f) fclose(f);
        else fprintf(stderr, "fuzz: cannot read %s\n", argv[i]);
        LLVMFuzzerTestOneInput((const uint8_t *)buf_z(&in), in.len);
        buf_free(&in);
    }
    printf("%d inputs\n", argc - 1);
    return 0;
}

#endif  // FUZZ_MAIN
