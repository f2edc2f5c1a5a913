// as.mjs [CERT KEY] - what .ci/oauth signs in to: an MCP server that wants a
// token, two authorization servers and an identity provider, in one process on
// loopback, over HTTPS if a certificate is given. No dependencies.
//
// It prints one line of JSON with its addresses. It is strict: whatever a client
// does against the rules is kept in /state as a breach, and everything is
// counted there. /set?name=value turns a switch (see `defaults`), /reset brings
// the defaults back and forgets counts, /kill?what=access|refresh|clients forgets
// all of that kind, /secrets lists every secret that was on the wire.
import crypto from 'node:crypto';
import fs from 'node:fs';
import http from 'node:http';
import https from 'node:https';

const defaults = {
    issuer: 'a',        // whom the protected resource names, and whose tokens it takes
    named: 1,           // the challenge names the metadata
    prm: 1,             // there is protected resource metadata
    meta: 1,            // there is authorization server metadata
    scope: '',          // of the challenge of a 401
    lifetime: 3600,     // of an access token, in seconds
    told: 1,            // expires_in is told
    refresh: 1,         // refresh tokens are given
    rotate: 1,          // and used once
    refuse: 0,          // this many good tokens are refused with 401
    broken: 0,          // this many token requests answer 503
    slow: 0,            // milliseconds a token request takes
    revocation: 'ok',   // ok, absent, fails, hangs
    register: 1,        // there is a registration endpoint
    methods: 'none',    // client authentication at the token endpoint
    forgetful: 0,       // seconds after which a client's secret has expired
    document: 0,        // client id metadata documents are taken
    pkce: 1,            // S256 is announced
    iss: 1,             // RFC 9207
    deny: 0,            // the person says no
    dpop: 0,            // tokens are bound to a key
    nonce: 0,           // and proofs need a nonce; 2: no nonce is ever good
    sse: 0,             // answers are event streams
    challenge: '',      // instead of ours; RS is our address
    away: '',           // metadata requests are redirected there
    unruly: '',         // one endpoint answers with what nobody expects: "token html"
};
const set = { ...defaults };
let count = {}, breaches = [];
const secrets = new Set(), clients = new Map(), codes = new Map(), access = new Map(), refresh = new Map();
const jtis = new Set(), idJags = new Map(), sessions = new Set();
const nonces = { rs: 'nonce-rs-1', a: 'nonce-a-1', b: 'nonce-b-1' };
const base = {};
let clientNo = 0;
// Clients that are known without registration; the public half of a key pair the
// script made for private_key_jwt is given in KEY_PEM.
clients.set('known', { issuer: 'a', method: 'none', redirects: null });
clients.set('machine', { issuer: 'a', secret: 'canary-machine secret+%', method: 'client_secret_basic' });
clients.set('poster', { issuer: 'a', secret: 'canary-poster', method: 'client_secret_post' });
clients.set('signer', { issuer: 'a', method: 'private_key_jwt', key: process.env.KEY_PEM && crypto.createPublicKey(process.env.KEY_PEM) });
for (const c of clients.values()) if (c.secret) secrets.add(c.secret);
secrets.add('canary-id-token').add('canary-workload');

const add = name => { count[name] = (count[name] ?? 0) + 1; };
const breach = text => { breaches.push(text); return false; };
const made = kind => { const s = `canary-${kind}-${crypto.randomBytes(15).toString('base64url')}`; secrets.add(s); return s; };
const sha = s => crypto.createHash('sha256').update(s).digest('base64url');
const json = (res, status, body, headers = {}) => res.writeHead(status, { 'Content-Type': 'application/json', 'Cache-Control': 'no-store', ...headers }).end(JSON.stringify(body));
const body = req => new Promise(done => { let b = ''; req.on('data', d => b += d).on('end', () => done(b)); });
const later = ms => new Promise(done => setTimeout(done, ms));
const b64json = s => JSON.parse(Buffer.from(s, 'base64url').toString());
const resource = path => base.rs + path;

// One proof as RFC 9449 section 4.3 wants it; the thumbprint of its key, or
// false.
function proof(req, where, nonceOf, token) {
    const lines = req.rawHeaders.filter((h, i) => i % 2 === 0 && h.toLowerCase() === 'dpop').length;
    if (lines !== 1) return breach(`${lines} DPoP headers`);
    let head, claims, ok;
    const parts = req.headers.dpop.split('.');
    try {
        head = b64json(parts[0]); claims = b64json(parts[1]);
        ok = crypto.verify('sha256', Buffer.from(parts[0] + '.' + parts[1]),
            { key: crypto.createPublicKey({ key: head.jwk, format: 'jwk' }), dsaEncoding: 'ieee-p1363' }, Buffer.from(parts[2], 'base64url'));
    } catch (e) { return breach('proof: ' + e.message); }
    if (!ok || head.typ !== 'dpop+jwt' || head.alg !== 'ES256' || head.jwk.d) return breach('proof: head or signature');
    if (claims.htm !== req.method || claims.htu !== where) return breach(`proof: ${claims.htm} ${claims.htu} for ${req.method} ${where}`);
    if (Math.abs(claims.iat - Date.now() / 1000) > 300 || !claims.jti || jtis.has(claims.jti)) return breach('proof: iat or jti');
    if (token && claims.ath !== sha(token)) return breach('proof: ath');
    jtis.add(claims.jti);
    if (set.nonce && (set.nonce > 1 || claims.nonce !== nonces[nonceOf])) return 'nonce';
    const { crv, kty, x, y } = head.jwk;
    return sha(JSON.stringify({ crv, kty, x, y }));
}

// What an endpoint can answer instead of what it should; true: it did.
const strange = {
    html: res => res.writeHead(200, { 'Content-Type': 'text/html' }).end('<h1>welcome</h1>'),
    empty: res => res.writeHead(200).end(),
    array: res => json(res, 200, []),
    null: res => json(res, 200, null),
    types: res => json(res, 200, { resource: 1, authorization_servers: 'x', issuer: [], authorization_endpoint: {}, token_endpoint: 7, client_id: {}, access_token: [], token_type: 3, expires_in: 'never' }),
    nothing: res => json(res, 200, { resource: '', authorization_servers: [], issuer: '', token_endpoint: '', client_id: '', access_token: '', token_type: '' }),
    controls: res => json(res, 200, { resource: base.rs, authorization_servers: ['http://x\r\nX: y/'], issuer: base.a, authorization_endpoint: 'javascript:alert(1)', token_endpoint: 'file:///etc/passwd',
        code_challenge_methods_supported: ['S256'], client_id: 'a\r\nb', access_token: 'a\r\nX-Evil: b', token_type: 'Bearer' }),
    huge: res => res.writeHead(200, { 'Content-Type': 'application/json' }).end(`{"x":"${'y'.repeat(5e6)}"}`),
    deep: res => res.writeHead(200, { 'Content-Type': 'application/json' }).end('['.repeat(5e4)),
    redirect: res => res.writeHead(307, { Location: `${base.b}/elsewhere` }).end(),
    error: res => json(res, 400, { error: 'a\u001b]0;x\u0007\n"' + 'z'.repeat(5000), error_description: ['x'] }),
    500: res => res.writeHead(500).end('\0\xff'),
    cut: res => { res.writeHead(200, { 'Content-Length': 500 }); res.write('{"issuer":'); setTimeout(() => res.destroy(), 20); },
    drop: res => res.destroy(),
};
function unruly(name, res) {
    const [where, how] = set.unruly.split(' ');
    if (where !== name) return false;
    add('unruly');
    strange[how](res);
    return true;
}

//------------------------------------------------------------------------------
// The protected MCP server: /modern speaks 2026-07-28, /legacy 2025-11-25.

const schema = { type: 'object', properties: { text: { type: 'string' } } };
const tools = [{ name: 'echo', description: 'says it again', inputSchema: schema }, { name: 'write', description: 'needs files:write', inputSchema: schema },
    { name: 'remove', description: 'needs files:write and files:remove', inputSchema: schema }];
const needs = { write: ['files:write'], remove: ['files:write', 'files:remove'] };

function challenge(res, path, status, more = {}) {
    const params = { ...more };
    if (set.named && set.prm) params.resource_metadata = `${base.rs}/.well-known/oauth-protected-resource${path}`;
    if (status === 401 && set.scope) params.scope = set.scope;
    const text = Object.entries(params).map(([k, v]) => `${k}="${v}"`).join(', ');
    const head = { 'WWW-Authenticate': set.challenge ? set.challenge.replaceAll('RS', base.rs) : `${set.dpop ? 'DPoP' : 'Bearer'} ${text}` };
    if (set.dpop && set.nonce) head['DPoP-Nonce'] = nonces.rs;
    add(status === 401 ? '401' : '403');
    json(res, status, { error: more.error ?? 'unauthorized' }, head);
}

// The token's record, or null after the refusal has been sent.
function let_in(req, res, path) {
    const [scheme, token] = (req.headers.authorization ?? '').split(' ');
    if (!token) return challenge(res, path, 401), null;
    const t = access.get(token);
    if (!t || t.until < Date.now() || t.issuer !== set.issuer) { add('stale'); return challenge(res, path, 401, { error: 'invalid_token' }), null; }
    if (t.resource !== resource(path)) { breach(`a token for ${t.resource} came to ${path}`); return challenge(res, path, 401, { error: 'invalid_token' }), null; }
    if (set.refuse > 0) { set.refuse--; return challenge(res, path, 401, { error: 'invalid_token' }), null; }
    if (!t.key && scheme !== 'Bearer') breach(`scheme ${scheme}`);
    if (t.key) {
        const p = scheme === 'DPoP' && proof(req, base.rs + path, 'rs', token);
        if (p === 'nonce') { add('rs_nonce'); return challenge(res, path, 401, { error: 'use_dpop_nonce' }), null; }
        if (p !== t.key) { breach('a proof of another key'); return challenge(res, path, 401, { error: 'invalid_dpop_proof' }), null; }
    }
    return t;
}

function act(m, t, req, res, path) {
    const modern = path === '/modern', complete = modern ? { resultType: 'complete' } : {}, cache = modern ? { ttlMs: 60000, cacheScope: 'private' } : {};
    if (modern && m.method === 'server/discover') return { ...complete, ...cache, supportedVersions: ['2026-07-28'], capabilities: { tools: {} }, _meta: { 'io.modelcontextprotocol/serverInfo': { name: 'guarded', version: '1' } } };
    if (!modern && m.method === 'initialize') return { protocolVersion: '2025-11-25', capabilities: { tools: {} }, serverInfo: { name: 'guarded', version: '1' } };
    if (m.method === 'tools/list') return { ...complete, ...cache, tools };
    if (m.method !== 'tools/call') return undefined;
    const missing = (needs[m.params.name] ?? []).filter(s => !t.scopes.includes(s));
    if (missing.length) { challenge(res, path, 403, { error: 'insufficient_scope', scope: missing.join(' ') }); return null; }
    add('done');
    return { ...complete, content: [{ type: 'text', text: `${m.params.name}: ${m.params.arguments?.text ?? ''} for ${t.client} with [${t.scopes.join(' ')}]` }] };
}

async function mcp(req, res, path) {
    if (req.method === 'DELETE') return res.writeHead(204).end();
    if (req.method !== 'POST') return res.writeHead(405).end();
    const m = JSON.parse(await body(req));
    add('sent'); add(`sent ${m.method}`);
    const t = let_in(req, res, path);
    if (!t) return;
    if (path === '/modern' && req.headers['mcp-protocol-version'] !== '2026-07-28') breach('no protocol version');
    if (path === '/legacy' && m.method !== 'initialize' && !sessions.has(req.headers['mcp-session-id'])) return json(res, 404, {});
    if (m.id === undefined) return res.writeHead(202).end();
    const result = act(m, t, req, res, path), head = {};
    if (result === null) return;
    if (m.method === 'initialize') { head['Mcp-Session-Id'] = crypto.randomUUID(); sessions.add(head['Mcp-Session-Id']); }
    if (set.dpop && set.nonce) head['DPoP-Nonce'] = nonces.rs = `nonce-${crypto.randomUUID()}`;
    const answer = { jsonrpc: '2.0', id: m.id, ...(result ? { result } : { error: { code: -32601, message: 'no such method' } }) };
    if (set.sse) res.writeHead(200, { 'Content-Type': 'text/event-stream', ...head }).end(`event: message\ndata: ${JSON.stringify(answer)}\n\n`);
    else json(res, result ? 200 : 404, answer, head);
}

//------------------------------------------------------------------------------
// Authorization servers a and b. b lives below a path, /tenant.

const path_of = who => who === 'b' ? '/tenant' : '';
function metadata(who) {
    const at = base[who] + path_of(who);
    return {
        issuer: at, authorization_endpoint: `${at}/authorize`, token_endpoint: `${at}/token`,
        ...(set.register ? { registration_endpoint: `${at}/register` } : {}),
        ...(set.revocation !== 'absent' ? { revocation_endpoint: `${at}/revoke` } : {}),
        response_types_supported: ['code'], grant_types_supported: ['authorization_code', 'refresh_token', 'client_credentials', 'urn:ietf:params:oauth:grant-type:jwt-bearer'],
        token_endpoint_auth_methods_supported: set.methods.split(' '),
        ...(set.pkce ? { code_challenge_methods_supported: ['S256'] } : {}),
        ...(set.iss ? { authorization_response_iss_parameter_supported: true } : {}),
        ...(set.document ? { client_id_metadata_document_supported: true } : {}),
        ...(set.dpop ? { dpop_signing_alg_values_supported: ['ES256'] } : {}),
        scopes_supported: ['files:read', 'files:write', 'files:remove', 'offline_access'],
    };
}

async function register(who, req, res) {
    add('register');
    const m = JSON.parse(await body(req));
    if (req.headers.authorization) breach('a registration with credentials');
    if (m.application_type !== 'native') breach(`application_type ${m.application_type}`);
    if (!m.redirect_uris?.every(u => /^http:\/\/(127\.0\.0\.1|localhost):\d+\//.test(u))) breach(`redirect_uris ${m.redirect_uris}`);
    if (!m.grant_types?.includes('refresh_token')) breach('no refresh_token among the grant types');
    const method = set.methods.split(' ')[0], id = `client-${++clientNo}-${who}`;
    const c = { issuer: who, method, redirects: m.redirect_uris };
    if (method !== 'none') c.secret = made('client-secret');
    if (set.forgetful) c.until = Date.now() + set.forgetful * 1000;
    clients.set(id, c);
    json(res, 201, { ...m, client_id: id, token_endpoint_auth_method: method, ...(c.secret ? { client_secret: c.secret, client_secret_expires_at: set.forgetful ? Math.floor(Date.now() / 1000) + set.forgetful : 0 } : {}) });
}

function authorize(who, q, res) {
    add('authorize');
    const id = q.get('client_id'), c = clients.get(id) ?? (set.document && id?.startsWith('https://') ? { issuer: who, method: 'none', redirects: null } : null);
    if (!c && /^client-.*-/.test(id) && id.endsWith(who)) return add('unknown_client'), res.writeHead(400).end('unknown client');
    if (!c || c.issuer !== who) return breach(`client ${id} at ${who}`), res.writeHead(400).end('unknown client');
    const redirect = q.get('redirect_uri');
    if (c.redirects ? !c.redirects.includes(redirect) : !/^http:\/\/127\.0\.0\.1:\d+\//.test(redirect)) return breach(`redirect ${redirect}`), res.writeHead(400).end('bad redirect');
    if (q.get('response_type') !== 'code') breach('response_type');
    if (q.get('code_challenge_method') !== 'S256' || q.get('code_challenge')?.length !== 43) breach('no PKCE');
    if ((q.get('state') ?? '').length < 22) breach('a short state');
    if (!q.get('resource')?.startsWith(base.rs)) breach(`resource ${q.get('resource')}`);
    secrets.add(q.get('state'));
    const back = new URL(redirect), code = made('code');
    back.searchParams.set('state', q.get('state'));
    if (set.iss) back.searchParams.set('iss', metadata(who).issuer);
    if (set.deny) back.searchParams.set('error', 'access_denied');
    else {
        back.searchParams.set('code', code);
        codes.set(code, { who, client: id, redirect, challenge: q.get('code_challenge'), resource: q.get('resource'), scopes: (q.get('scope') ?? '').split(' ').filter(Boolean) });
    }
    if (q.get('scope') !== null) count.scope = q.get('scope');
    res.writeHead(302, { Location: back.href }).end();
}

// Who asks at the token endpoint, by the method that was agreed, or null.
function client_of(who, req, f) {
    const [scheme, basic] = (req.headers.authorization ?? '').split(' ');
    const pair = scheme === 'Basic' ? Buffer.from(basic, 'base64').toString().split(':').map(s => decodeURIComponent(s.replaceAll('+', ' '))) : [];
    const id = pair[0] ?? f.get('client_id'), c = clients.get(id) ?? (set.document && id?.startsWith('https://') ? { issuer: who, method: 'none' } : null);
    const used = pair.length ? 'client_secret_basic' : f.has('client_secret') ? 'client_secret_post' : f.has('client_assertion') ? 'private_key_jwt' : 'none';
    if (!c && /^client-.*-/.test(id) && id.endsWith(who)) return add('unknown_client'), null;
    if (!c || c.issuer !== who) return breach(`client ${id} at ${who}`), null;
    if (c.until < Date.now()) return add('expired_client'), null;
    if (used !== c.method) return breach(`${id} used ${used}, not ${c.method}`), null;
    if (pair.length && pair[1] !== c.secret || f.has('client_secret') && f.get('client_secret') !== c.secret) return breach('a wrong client secret'), null;
    if (used === 'private_key_jwt') {
        const parts = f.get('client_assertion').split('.'), head = b64json(parts[0]), claims = b64json(parts[1]);
        secrets.add(f.get('client_assertion'));
        const ok = crypto.verify('sha256', Buffer.from(parts[0] + '.' + parts[1]), { key: c.key, dsaEncoding: 'ieee-p1363' }, Buffer.from(parts[2], 'base64url'));
        if (!ok || head.alg !== 'ES256' || claims.iss !== id || claims.sub !== id || ![].concat(claims.aud).includes(metadata(who).issuer) ||
            claims.exp < Date.now() / 1000 || jtis.has(claims.jti) || f.get('client_assertion_type') !== 'urn:ietf:params:oauth:client-assertion-type:jwt-bearer')
            return breach(`assertion ${JSON.stringify(head)} ${JSON.stringify(claims)}`), null;
        jtis.add(claims.jti);
    }
    return { id, ...c };
}

function grant(res, who, client, scopes, resourceOf, key, kind) {
    const token = made('access'), answer = { access_token: token, token_type: key ? 'DPoP' : 'Bearer' };
    access.set(token, { issuer: who, client, scopes, resource: resourceOf, until: Date.now() + set.lifetime * 1000, key });
    if (set.told) answer.expires_in = set.lifetime;
    if (scopes.length) answer.scope = scopes.join(' ');
    if (set.refresh && kind) {
        answer.refresh_token = made('refresh');
        refresh.set(answer.refresh_token, { who, client, scopes, resource: resourceOf, key });
    }
    json(res, 200, answer);
}

async function token(who, req, res) {
    const f = new URLSearchParams(await body(req)), kind = f.get('grant_type'), no = error => json(res, error === 'invalid_client' ? 401 : 400, { error, error_description: 'no\u001b[31m way' });
    add('token'); add(`token ${kind.replace(/.*:/, '')}`);
    for (const k of f.keys()) if (f.getAll(k).length > 1) breach(`${k} twice`);
    if (set.slow) await later(set.slow);
    if (set.broken > 0) { set.broken--; add('token_503'); return res.writeHead(503).end('busy'); }
    const c = client_of(who, req, f);
    if (!c) return no('invalid_client');
    let key;
    if (req.headers.dpop) {
        key = proof(req, metadata(who).token_endpoint, who);
        if (key === 'nonce') { add('as_nonce'); return json(res, 400, { error: 'use_dpop_nonce' }, { 'DPoP-Nonce': nonces[who] }); }
        if (!key) return no('invalid_dpop_proof');
    } else if (set.dpop) breach('a token request without a proof');
    if (!f.get('resource')?.startsWith(base.rs)) breach(`token request for resource ${f.get('resource')}`);
    if (kind === 'authorization_code') {
        const k = codes.get(f.get('code'));
        codes.delete(f.get('code'));
        secrets.add(f.get('code_verifier'));
        if (!k) return breach('a code that is not there, or was used'), no('invalid_grant');
        if (k.who !== who || k.client !== c.id || k.redirect !== f.get('redirect_uri') || k.resource !== f.get('resource') || k.challenge !== sha(f.get('code_verifier') ?? '')) return breach('the code is not for this'), no('invalid_grant');
        return grant(res, who, c.id, k.scopes, k.resource, key, 1);
    }
    if (kind === 'refresh_token') {
        const r = refresh.get(f.get('refresh_token'));
        if (!r) { add('refresh_unknown'); return no('invalid_grant'); }
        if (r.used) return breach('a refresh token used twice'), no('invalid_grant');
        if (r.who !== who || r.client !== c.id || r.resource !== f.get('resource') || r.key !== key) return breach('the refresh token is not for this'), no('invalid_grant');
        if (set.rotate) r.used = true;
        return grant(res, who, c.id, r.scopes, r.resource, key, set.rotate);
    }
    const scopes = (f.get('scope') ?? '').split(' ').filter(Boolean);
    if (kind === 'client_credentials') return c.method === 'none' ? (breach('client_credentials of a public client'), no('unauthorized_client')) : grant(res, who, c.id, scopes, f.get('resource'), key, 0);
    if (kind === 'urn:ietf:params:oauth:grant-type:jwt-bearer') {
        const jag = idJags.get(f.get('assertion'));
        if (f.get('assertion') !== 'canary-workload' && (!jag || jag.audience !== metadata(who).issuer || jag.resource !== f.get('resource'))) return breach('a foreign assertion'), no('invalid_grant');
        return grant(res, who, c.id, scopes, f.get('resource'), key, 0);
    }
    no('unsupported_grant_type');
}

async function revoke(who, req, res) {
    const f = new URLSearchParams(await body(req)), t = f.get('token'), hint = f.get('token_type_hint');
    add(`revoke ${hint}`);
    if (set.revocation === 'fails') return res.writeHead(503).end();
    if (set.revocation === 'hangs') return;
    if (!client_of(who, req, f)) return json(res, 401, { error: 'invalid_client' });
    if (hint === 'refresh_token' ? !refresh.delete(t) : !access.delete(t)) add('revoked_unknown');
    res.writeHead(200).end();
}

// Enterprise-managed authorization: an id token against an ID-JAG.
async function exchange(req, res) {
    const f = new URLSearchParams(await body(req));
    add('exchange');
    const want = { grant_type: 'urn:ietf:params:oauth:grant-type:token-exchange', requested_token_type: 'urn:ietf:params:oauth:token-type:id-jag',
        subject_token: 'canary-id-token', subject_token_type: 'urn:ietf:params:oauth:token-type:id_token', client_id: 'idp-client' };
    for (const [k, v] of Object.entries(want)) if (f.get(k) !== v) breach(`exchange: ${k} is ${f.get(k)}`);
    const jag = made('id-jag');
    idJags.set(jag, { audience: f.get('audience'), resource: f.get('resource') });
    json(res, 200, { access_token: jag, issued_token_type: want.requested_token_type, token_type: 'N_A', expires_in: 300 });
}

async function authority(who, req, res, url) {
    const below = path_of(who), at = url.pathname;
    if (at === `/.well-known/oauth-authorization-server${below}`) {
        add(`meta ${who}`);
        if (req.headers.authorization) breach('a token came to a metadata endpoint');
        if (unruly('meta', res)) return;
        if (set.away) return res.writeHead(302, { Location: set.away }).end();
        return set.meta ? json(res, 200, metadata(who)) : json(res, 404, {});
    }
    if (at === `${below}/authorize`) return authorize(who, url.searchParams, res);
    if (at === '/idp/token') return exchange(req, res);
    if (req.method !== 'POST') return res.writeHead(404).end();
    if (unruly(at.replace(/.*\//, ''), res)) return;
    if (at === `${below}/register` && set.register) return register(who, req, res);
    if (at === `${below}/token`) return token(who, req, res);
    if (at === `${below}/revoke` && set.revocation !== 'absent') return revoke(who, req, res);
    res.writeHead(404).end();
}

function control(url, res) {
    const q = url.searchParams;
    if (url.pathname === '/set') for (const [k, v] of q) { if (!(k in defaults)) return json(res, 400, k); set[k] = typeof defaults[k] === 'number' ? Number(v) : v; }
    if (url.pathname === '/reset') { Object.assign(set, defaults); count = {}; breaches = []; }
    if (url.pathname === '/kill') ({ access, refresh })[q.get('what')]?.clear();
    // As an authorization server that kept its registrations in memory.
    if (url.pathname === '/kill' && q.get('what') === 'clients') for (const id of clients.keys()) if (id.startsWith('client-')) clients.delete(id);
    if (url.pathname === '/secrets') return json(res, 200, [...secrets]);
    json(res, 200, { count, breaches, set });
}

function guarded(req, res, url) {
    const at = url.pathname, path = at.replace('/.well-known/oauth-protected-resource', '');
    if ((at === '/modern' || at === '/legacy') && unruly('mcp', res)) return;
    if (at === '/modern' || at === '/legacy') return mcp(req, res, at);
    if (/^\/(set|reset|kill|secrets|state)$/.test(at)) return control(url, res);
    if (at.startsWith('/.well-known/oauth-protected-resource')) {
        add('prm');
        if (req.headers.authorization) breach('a token came to a metadata endpoint');
        if (unruly('prm', res)) return;
        if (set.prm && (path === '/modern' || path === '/legacy')) return json(res, 200, { resource: resource(path), authorization_servers: [metadata(set.issuer).issuer] });
        return res.writeHead(404).end();
    }
    // As in 2025-03-26: without that metadata the server's own origin answers.
    return set.prm ? res.writeHead(404).end() : authority('a', req, res, url);
}

const [cert, key] = process.argv.slice(2);
const start = (name, handler) => new Promise(done => {
    const on = (req, res) => Promise.resolve(handler(req, res, new URL(req.url, 'http://x'))).catch(e => { breach(`${name} ${req.url.split('?')[0]}: ${e.stack}`); res.writeHead(500).end(); });
    const server = cert ? https.createServer({ cert: fs.readFileSync(cert), key: fs.readFileSync(key) }, on) : http.createServer(on);
    server.listen(0, '127.0.0.1', () => { base[name] = `${cert ? 'https' : 'http'}://127.0.0.1:${server.address().port}`; done(); });
});
await start('rs', guarded);
await start('a', (...x) => authority('a', ...x));
await start('b', (...x) => authority('b', ...x));
console.log(JSON.stringify(base));
