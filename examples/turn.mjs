// One whole turn over the protocol, in plain Node with no dependency. Uses nothing but docs/protocol.md.
//
//   node examples/turn.mjs PROJECT [COMMAND-THAT-SERVES...]
//
// Changes a.txt and makes notes.txt in PROJECT's workspace, commits a.txt alone, and drops the rest.

import assert from 'node:assert/strict'
import { spawn } from 'node:child_process'
import { createInterface } from 'node:readline'

const [project, ...serve] = process.argv.slice(2)
const [program, ...args] = serve.length ? serve : ['deltabox', 'serve']
const child = spawn(program, args, { stdio: ['pipe', 'pipe', 'inherit'] })
const ended = new Promise((resolve) => child.on('exit', resolve))

// ---- the client: a line is a message, an answer has its request's id, the rest are notifications

const waiting = new Map()
const listeners = new Set()
let lastId = 0

createInterface({ input: child.stdout }).on('line', (line) => {
  const message = JSON.parse(line)
  if ('method' in message) {
    for (const listener of listeners) listener(message.method, message.params)
    return
  }
  const { resolve, reject } = waiting.get(message.id)
  waiting.delete(message.id)
  if (message.error) reject(Object.assign(new Error(message.error.message), message.error))
  else resolve(message.result)
})

const send = (message) => child.stdin.write(JSON.stringify({ jsonrpc: '2.0', ...message }) + '\n')

function request(method, params) {
  const id = ++lastId
  const answer = new Promise((resolve, reject) => waiting.set(id, { resolve, reject }))
  send({ id, method, params })
  return Object.assign(answer, { id })
}

const bytes = ({ data, encoding }) => Buffer.from(data, encoding === 'base64' ? 'base64' : 'utf8')

// A streaming command: resolves to its exit and its output when it has ended.
function stream(session, params) {
  const execId = `turn-${++lastId}`
  const output = { stdout: [], stderr: [] }
  const exit = new Promise((resolve) => {
    listeners.add(function listen(method, what) {
      if (what.execId !== execId) return
      if (method === 'exec.output') output[what.channel].push(bytes(what))
      if (method !== 'exec.exit') return
      listeners.delete(listen)
      resolve({ ...what, stdout: Buffer.concat(output.stdout).toString() })
    })
  })
  const started = request('session.exec', { session, execId, stream: true, ...params })
  return { execId, started, exit }
}

// ---- the turn

const hello = await request('initialize', {
  protocolVersion: '1',
  clientInfo: { name: 'turn.mjs', version: '1' },
})
assert.equal(hello.protocolVersion, '1')

const { session, generation, logicalRoot } = await request('session.start', { projectRoot: project })
console.log(`session ${session} on ${logicalRoot}`)

// Files: read, edit under the version that was read, write, find.
const before = await request('fs.read', { session, path: 'a.txt' })
await request('fs.edit', {
  session, path: 'a.txt', oldText: 'one', newText: 'ONE', expectedVersion: before.version,
})
await request('fs.write', { session, path: 'notes.txt', data: 'remember ONE\n' })
const found = await request('fs.glob', { session, pattern: '*.txt' })
assert.deepEqual(found.paths.map((hit) => hit.path).sort(), ['a.txt', 'notes.txt'])
const hits = await request('fs.grep', { session, pattern: 'ONE' })
assert.equal(hits.matches.length, 2)

// A version that is no longer there: refused before anything is written.
const stale = { session, path: 'a.txt', data: 'lost', expectedVersion: before.version }
await assert.rejects(request('fs.write', stale), (error) => error.data.code === 'FS_STALE_VERSION')

// A command that talks back: its output as it comes, its input as we like.
const cat = stream(session, { command: 'echo ready; sed s/ONE/TWO/ a.txt -', stdin: 'pipe' })
await cat.started
await request('exec.write', { session, execId: cat.execId, data: 'ONE more\n', close: true })
const told = await cat.exit
assert.equal(told.code, 0)
assert.equal(told.stdout, 'ready\nTWO\ntwo\nTWO more\n')

// A command nobody waits for: cancelled by the id of its request, it still tells how it went.
const sleeping = request('session.exec', { session, command: 'sleep 1000' })
send({ method: '$/cancel', params: { id: sleeping.id } })
const cut = await sleeping.then((done) => done.cancelled, (error) => error.data.code === 'CANCELLED')
assert.equal(cut, true)

// The review: look, take one file of two, see that older handles are stale, drop the rest.
const review = await request('review.diff', { session })
console.log(review.files.map((f) => `${f.kind} ${f.display} +${f.added} -${f.removed}`).join('\n'))
assert.equal(review.files.length, 2)
const commit = await request('review.commit', { session, paths: ['a.txt'], digest: review.digest })
assert.deepEqual(commit.committed.map((file) => file.path), ['a.txt'])
await assert.rejects(
  request('session.exec', { session, command: 'true', generation }),
  (error) => error.data.code === 'FS_STALE_VERSION',
)
const dropped = await request('review.abort', { session })
assert.equal(dropped.discarded, 1)

await request('session.stop', { session })
child.stdin.end() // end of file is the graceful stop
assert.equal(await ended, 0)
console.log('the turn is done')
