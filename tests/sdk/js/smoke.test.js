// The official E2B SDK for JavaScript, unmodified, against a running node.
import assert from 'node:assert/strict'
import { after, before, test } from 'node:test'
import { CommandExitError, NotFoundError, Sandbox, TimeoutError } from 'e2b'

let sandbox

before(async () => {
  sandbox = await Sandbox.create({ timeoutMs: 240_000, metadata: { suite: 'js' }, envs: { FROM_CREATE: 'yes' } })
})
after(async () => {
  await sandbox?.kill()
})

test('commands have output and exit codes', async () => {
  const result = await sandbox.commands.run('echo $FROM_CREATE; echo err >&2')
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ['yes\n', 'err\n', 0])
  await assert.rejects(sandbox.commands.run('exit 9'), (error) => error instanceof CommandExitError && error.exitCode === 9)
})

test('output streams, and stdin arrives', async () => {
  let first
  const ready = new Promise((resolve) => (first = resolve))
  const handle = await sandbox.commands.run('echo ready; read line; echo got $line', {
    background: true,
    stdin: true,
    onStdout: (data) => first(data),
  })
  assert.equal(await ready, 'ready\n')
  await sandbox.commands.sendStdin(handle.pid, 'it\n')
  assert.equal((await handle.wait()).stdout, 'ready\ngot it\n')
})

test('background commands are listed and killed', async () => {
  const handle = await sandbox.commands.run('sleep 300', { background: true })
  assert.ok((await sandbox.commands.list()).some((process) => process.pid === handle.pid))
  assert.equal(await sandbox.commands.kill(handle.pid), true)
  await assert.rejects(handle.wait())
})

test('a timeout is a timeout', async () => {
  await assert.rejects(sandbox.commands.run('sleep 30', { timeoutMs: 2000 }), TimeoutError)
})

test('terminals have a size', async () => {
  let output = ''
  const terminal = await sandbox.pty.create({ cols: 91, rows: 20, onData: (data) => (output += Buffer.from(data)) })
  await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('tput cols; exit\n'))
  await terminal.wait()
  assert.match(output, /91/)
})

test('files are written, read, listed, renamed and removed', async () => {
  await sandbox.files.write('/tmp/js/a.txt', 'hällo')
  assert.equal(await sandbox.files.read('/tmp/js/a.txt'), 'hällo')
  assert.deepEqual((await sandbox.files.list('/tmp/js')).map((entry) => entry.name), ['a.txt'])
  await sandbox.files.rename('/tmp/js/a.txt', '/tmp/js/b.txt')
  assert.equal(await sandbox.files.exists('/tmp/js/a.txt'), false)
  await sandbox.files.remove('/tmp/js')
  await assert.rejects(sandbox.files.read('/tmp/js/b.txt'), NotFoundError)
})

test('sandboxes are listed, found and killed', async () => {
  const found = await Sandbox.list().nextItems()
  const mine = found.find((item) => item.sandboxId === sandbox.sandboxId)
  assert.deepEqual(mine.metadata, { suite: 'js' })
  const short = await Sandbox.create({ timeoutMs: 60_000 })
  assert.equal(await short.isRunning(), true)
  assert.equal(await short.kill(), true)
  assert.equal(await short.isRunning(), false)
  assert.equal(await Sandbox.kill(short.sandboxId), false)
})
