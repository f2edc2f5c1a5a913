// sdk-auth.mjs - an MCP server on the official SDK that lets nobody in without a
// token of the SDK's own authorization router and demo provider. It listens on a
// free loopback port and prints its URL.
import { createServer } from 'node:http';
import express from 'express';
import { z } from 'zod';
import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import { getOAuthProtectedResourceMetadataUrl, mcpAuthRouter } from '@modelcontextprotocol/sdk/server/auth/router.js';
import { requireBearerAuth } from '@modelcontextprotocol/sdk/server/auth/middleware/bearerAuth.js';
import { DemoInMemoryAuthProvider } from '@modelcontextprotocol/sdk/examples/server/demoInMemoryOAuthProvider.js';

const app = express(), listener = createServer(app);
await new Promise(done => listener.listen(0, '127.0.0.1', done));
const origin = new URL(`http://127.0.0.1:${listener.address().port}`), resource = new URL('/mcp', origin);
const provider = new DemoInMemoryAuthProvider(asked => asked?.href === resource.href);

app.use(mcpAuthRouter({ provider, issuerUrl: origin, resourceServerUrl: resource, scopesSupported: ['mcp:tools'] }));
app.post('/mcp', requireBearerAuth({ verifier: provider, requiredScopes: ['mcp:tools'], resourceMetadataUrl: getOAuthProtectedResourceMetadataUrl(resource) }),
    express.json(), async (req, res) => {
        const server = new McpServer({ name: 'sdk', version: '1.0.0' });
        server.registerTool('greet', { description: 'Say hello', inputSchema: { name: z.string() } },
            async ({ name }) => ({ content: [{ type: 'text', text: `Hello, ${name}` }] }));
        const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined });
        res.on('close', () => { transport.close(); server.close(); });
        await server.connect(transport);
        await transport.handleRequest(req, res, req.body);
    });
app.all('/mcp', (req, res) => { res.status(405).end(); });
console.log(resource.href);
