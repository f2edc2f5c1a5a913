// modern.mjs - a server on the official SDK for the interop run.
//   node modern.mjs stdio|http [modern|dual]
// With http it listens on a free loopback port and prints its URL. "modern"
// refuses the 2025 handshake, so only protocol 2026-07-28 can reach it.
import { createServer } from 'node:http';
import { McpServer, ResourceTemplate, createMcpHandler, inputRequired } from '@modelcontextprotocol/server';
import { serveStdio } from '@modelcontextprotocol/server/stdio';
import { localhostHostValidation, toNodeHandler } from '@modelcontextprotocol/node';
import { z } from 'zod';

const tables = ['events', 'orders', 'users'];
const legacy = process.argv[3] === 'modern' ? 'reject' : undefined;

function server() {
    const s = new McpServer({ name: 'modern', version: '1.0.0' });
    s.registerTool('add', {
        description: 'Add two numbers',
        inputSchema: z.object({ a: z.number(), b: z.number() }),
    }, async ({ a, b }) => ({ content: [{ type: 'text', text: `sum ${a + b}` }], structuredContent: { sum: a + b } }));
    s.registerTool('warehouse_report', {
        description: 'Describe a table of the warehouse in words',
        inputSchema: z.object({ table: z.string() }),
    }, async ({ table }) => tables.includes(table)
        ? { content: [{ type: 'text', text: `table ${table} has 3 columns` }] }
        : { isError: true, content: [{ type: 'text', text: `no table ${table}` }] });
    s.registerTool('werkzeug_ü', { description: 'A name that is not ASCII', inputSchema: z.object({}) },
        async () => ({ content: [{ type: 'text', text: 'grüße' }] }));
    s.registerTool('workplace', { description: 'Say where this client may work', inputSchema: z.object({}) },
        async (_, ctx) => {
            const told = ctx.mcpReq.inputResponses?.place?.roots;
            return told ? { content: [{ type: 'text', text: `work in ${told.map(r => r.uri).join(' ')}, state ${ctx.mcpReq.requestState?.()}` }] }
                : inputRequired({ inputRequests: { place: inputRequired.listRoots() }, requestState: 'a"\\\u00e9/\u2028' });
        });
    s.registerResource('motd', 'note://motd', { description: 'Message of the day', mimeType: 'text/plain' },
        async uri => ({ contents: [{ uri: uri.href, text: 'hello from the SDK' }] }));
    s.registerResource('table', new ResourceTemplate('schema://tables/{table}', {
        list: undefined,
        complete: { table: value => tables.filter(t => t.startsWith(value)) },
    }), { description: 'Columns of a table', mimeType: 'application/json' },
        async (uri, { table }) => ({ contents: [{ uri: uri.href, text: JSON.stringify({ table, columns: ['id'] }) }] }));
    return s;
}

if (process.argv[2] === 'stdio') {
    serveStdio(() => server(), legacy ? { legacy } : {});
} else {
    const handler = toNodeHandler(createMcpHandler(() => server(), legacy ? { legacy } : {}));
    const guard = localhostHostValidation();
    const http = createServer((req, res) => { if (guard(req, res)) handler(req, res); });
    http.listen(0, '127.0.0.1', () => console.log(`http://127.0.0.1:${http.address().port}/mcp`));
}
