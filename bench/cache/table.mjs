// Results of http-cache-tests as a table: how many of each kind pass, and which required ones do not.
// In: the suite's folder, where to write, NAME=RESULTS.json of each cache. Out: JSON there, a table on standard output.
import { readFileSync, writeFileSync } from 'node:fs'
import { pathToFileURL } from 'node:url'

const [suite, output, ...contenders] = process.argv.slice(2)
const url = path => pathToFileURL(`${suite}/${path}`).href
const suites = (await import(url('tests/index.mjs'))).default
suites.push((await import(url('tests/surrogate-control.mjs'))).default)
const tests = suites.flatMap(one => one.tests).filter(test => !test.browser_only)
const kindOf = test => test.kind ?? 'required'

// As the suite's own display judges: a test whose dependency fails says nothing.
function judge (test, results) {
  const result = results[test.id]
  if (result === undefined) return 'untested'
  for (const id of test.depends_on ?? []) {
    if (judge(tests.find(other => other.id === id), results) !== 'pass') return 'dependency'
  }
  if (result === true) return 'pass'
  return result[0] === 'Setup' ? (result[1] === 'retry' ? 'retry' : 'setup') : 'fail'
}

const table = {}
for (const contender of contenders) {
  const [name, path] = contender.split('=')
  const results = JSON.parse(readFileSync(path))
  const row = { pass: {}, of: {}, required: {} }
  for (const test of tests) {
    const kind = kindOf(test)
    const judged = judge(test, results)
    row.of[kind] = (row.of[kind] ?? 0) + 1
    row.pass[kind] = (row.pass[kind] ?? 0) + (judged === 'pass' ? 1 : 0)
    if (kind === 'required' && judged !== 'pass') {
      row.required[test.id] = `${judged}: ${results[test.id] === true ? 'passes by itself' : results[test.id]?.[1]}`
    }
    if (kind === 'optimal' && judged !== 'pass') {
      (row.optimal ??= {})[test.id] = `${judged}: ${results[test.id] === true ? 'passes by itself' : results[test.id]?.[1]}`
    }
  }
  table[name] = row
}
if (output !== '-') writeFileSync(output, JSON.stringify(table, null, 1) + '\n')
console.log('| cache | required | optimal | asked (no right or wrong) |\n|---|---|---|---|')
for (const [name, row] of Object.entries(table)) {
  const cell = kind => `${row.pass[kind]} of ${row.of[kind]}`
  console.log(`| ${name} | ${cell('required')} | ${cell('optimal')} | ${cell('check')} |`)
}
for (const [name, row] of Object.entries(table)) {
  console.log(`\nRequired, and not passed by ${name}:`)
  for (const [id, why] of Object.entries(row.required)) console.log(`  ${id}: ${why}`)
}
