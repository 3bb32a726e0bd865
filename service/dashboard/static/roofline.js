// The roofline: operations a second against operations per byte, both logarithmic. Under the slope
// the memory is the limit, under the flat the arithmetic; how far below is what the host takes.

import { byId, svgElement } from "./util.js";

const LEFT = 64;
const RIGHT = 12;
const TOP = 14;
const FOOT = 38;
const WORDS = { decode: "Decode", prefill: "Prefill", mixed: "Both in one step" };

export class Roofline {
  constructor(svg) {
    this.svg = svg;
    this.clear();
  }

  clear() {
    this.plot = null;
    this.svg.replaceChildren();
  }

  get empty() {
    return !this.plot;
  }

  show(plot) {
    this.plot = plot;
    byId("roofline-section").hidden = false;
    this.draw();
  }

  draw() {
    if (!this.plot) return;
    const { machine, phases, steps } = this.plot;
    const width = this.svg.clientWidth;
    const height = this.svg.clientHeight;
    if (!width) return;
    // Steps are told in operations per nanosecond: 10⁹ a second.
    const points = steps.map(([kind, intensity, gflops, tokens]) => ({ kind, intensity, gflops, tokens }));
    const known = machine.peak_flops_per_s !== null;
    const peak = known ? machine.peak_flops_per_s / 1e9 : Math.max(...points.map((point) => point.gflops));
    const intensities = points.map((point) => point.intensity).filter((value) => value > 0);
    const ridge = known ? machine.ridge_intensity : 1;
    const xs = [Math.min(ridge / 8, ...intensities) / 1.5, Math.max(ridge * 8, ...intensities) * 1.5];
    const ys = [Math.min(peak / 100, ...points.map((point) => point.gflops).filter((value) => value > 0)) / 1.3, peak * 1.8];
    const x = scale(xs, LEFT, width - RIGHT);
    const y = scale(ys, height - FOOT, TOP);
    this.svg.replaceChildren();
    this.drawGrid(xs, ys, x, y, width, height);
    if (known) {
      const slope = machine.peak_bytes_per_s / 1e9;
      const roof = `M${x(xs[0])} ${y(slope * xs[0])}L${x(ridge)} ${y(peak)}H${width - RIGHT}`;
      this.svg.append(svgElement("path", { class: "roof", d: roof }));
    }
    for (const point of points) {
      if (point.intensity <= 0 || point.gflops <= 0) continue;
      const place = { cx: x(point.intensity), cy: y(point.gflops), r: 3.2 };
      this.svg.append(svgElement("circle", { class: `step k-${point.kind}`, ...place }));
    }
    const shown = phases.filter((phase) => phase.steps && phase.intensity > 0 && phase.flops_per_s > 0);
    for (const phase of shown) {
      const [cx, cy] = [x(phase.intensity), y(phase.flops_per_s / 1e9)];
      this.svg.append(svgElement("circle", { class: `phase k-${phase.kind}`, cx, cy, r: 8 }));
    }
    byId("roofline-note").textContent = describe(machine, shown);
  }

  drawGrid(xs, ys, x, y, width, height) {
    for (const value of decades(ys)) {
      const at = y(value);
      this.svg.append(svgElement("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
      const label = value >= 1000 ? `${value / 1000} T` : `${value} G`;
      this.svg.append(svgElement("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, label));
    }
    for (const value of decades(xs)) {
      const at = x(value);
      this.svg.append(svgElement("line", { class: "axis", x1: at, x2: at, y1: TOP, y2: height - FOOT }));
      this.svg.append(svgElement("text", { x: at, y: height - FOOT + 16, "text-anchor": "middle" }, String(value)));
    }
    this.svg.append(svgElement("text", { x: width - RIGHT, y: height - 4, "text-anchor": "end" }, "operations per byte"));
    this.svg.append(svgElement("text", { x: 0, y: height - 4 }, "operations a second, upward"));
  }
}

function describe(machine, phases) {
  const verdicts = phases.map((phase) => {
    const used = `${percent(phase.mbu)} of the bandwidth, ${percent(phase.mfu)} of the arithmetic`;
    return `${WORDS[phase.kind]}: ${phase.verdict}, ${used}; the host took ${percent(phase.host_share)} of the time.`;
  });
  if (machine.peak_flops_per_s === null) verdicts.push("This machine's peaks are not known, so there is no roof.");
  return [...verdicts, "Small points are the last steps, large ones all since the start."].join("\n");
}

const percent = (share) => `${(100 * share).toFixed(0)} %`;

function scale([low, high], from, to) {
  return (value) => from + ((to - from) * Math.log(value / low)) / Math.log(high / low);
}

function decades([low, high]) {
  const found = [];
  for (let power = Math.ceil(Math.log10(low)); 10 ** power <= high; power += 1) found.push(Number((10 ** power).toPrecision(1)));
  return found;
}
