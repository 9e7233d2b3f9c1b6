// Runs inference-lab on the configuration given as JSON on standard input, in the package directory given as argument.
// Prints the CPU time of the simulation alone and the requests it drew, in their order of completion, as JSON.
import { readFileSync } from 'node:fs'
import { pathToFileURL } from 'node:url'

const dir = process.argv[2]
const { initSync, run_simulation } = await import(pathToFileURL(`${dir}/inference_lab.js`))
initSync({ module: readFileSync(`${dir}/inference_lab_bg.wasm`) })

process.on('uncaughtException', (error) => {
  console.error(String(error))
  process.exit(1)
})

const config = readFileSync(0, 'utf8')
const before = process.cpuUsage()
const { metrics, distributions, latency_samples: samples } = run_simulation(config)
const used = process.cpuUsage(before)

console.log(JSON.stringify({
  version: JSON.parse(readFileSync(`${dir}/package.json`)).version,
  simulation_cpu_s: (used.user + used.system) / 1e6,
  simulated_s: metrics.total_time,
  arrivals_s: Array.from(samples.e2e_timestamps, (end, i) => end - samples.e2e_samples[i] / 1000),
  prompts: distributions.input_lengths,
  outputs: distributions.output_lengths,
}))
