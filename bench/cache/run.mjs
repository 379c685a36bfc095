// Runs http-cache-tests against a cache, as the suite's own command does, but for an end to each request: a cache that
// never answers one would hold up the run for ever.
// In: the suite's folder, the cache's address, a test's id or nothing. Out: results as JSON.
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'

const [suite, base, id] = process.argv.slice(2)
const load = path => import(pathToFileURL(`${suite}/${path}`).href)
const nodeFetch = createRequire(`${suite}/cli.mjs`)('node-fetch')
const suites = (await load('tests/index.mjs')).default
suites.push((await load('tests/surrogate-control.mjs')).default)
const { runTests, getResults } = await load('client/runner.mjs')

const wanted = suites.map(one => ({
  ...one,
  tests: one.tests.filter(test => !id || test.id === id).map(test => (id ? { ...test, dump: true } : test))
}))
await runTests(wanted.filter(one => one.tests.length), (url, options) => nodeFetch(url, { timeout: 10000, ...options }), false, base)
console.log(JSON.stringify(getResults(), null, 1))
process.exit(0)
