// The five numbers at the top.

import { WINDOW_MS } from "./lanes.js";
import { byId, count, duration, durationText, element, plural, quantile } from "./util.js";

const RATE_MS = 3000;

export class Figures {
  constructor(lanes) {
    this.lanes = lanes;
    this.reset({});
  }

  reset(hello) {
    this.history = [];
    this.stats = null;
    this.targets = { itl: hello.itl_target_ms, ttft: hello.ttft_target_ms };
  }

  take({ now, stats }) {
    this.stats = stats;
    this.history.push({ now, output: stats.output, computed: stats.computed });
    while (this.history.length > 2 && this.history[1].now < now - RATE_MS) this.history.shift();
  }

  draw() {
    const { stats } = this;
    if (!stats) return;
    set("fig-running", [count(stats.running), ""]);
    byId("fig-waiting").textContent = `${count(stats.waiting)} waiting${stats.paused ? `, ${count(stats.paused)} paused` : ""}`;
    this.drawRate(stats);
    this.drawTimes();
    const share = stats.queried ? (100 * stats.cached) / stats.queried : null;
    set("fig-cache", share === null ? ["–", ""] : [share.toFixed(0), "%"]);
    byId("fig-cache-note").textContent = stats.queried ? `of ${plural(stats.queried, "token")} since the start` : "";
  }

  drawRate(stats) {
    const first = this.history[0];
    const last = this.history[this.history.length - 1];
    const seconds = (last.now - first.now) / 1000;
    const stale = this.lanes.now() - last.now > RATE_MS;
    const busy = seconds > 0 && !stale && stats.running > 0;
    const rate = busy ? (last.output - first.output) / seconds : 0;
    const all = busy ? (last.computed - first.computed) / seconds : 0;
    set("fig-rate", [count(rate), ""]);
    byId("fig-prefill").textContent = busy ? `${count(Math.max(0, all - rate))} of prompts` : `${count(stats.output)} since the start`;
  }

  drawTimes() {
    const edge = this.lanes.now() - WINDOW_MS;
    const gaps = [];
    const firsts = [];
    for (const { tokens, begin } of this.lanes.byId.values()) {
      for (let i = 1; i < tokens.length; i += 1) if (tokens[i] > edge) gaps.push(tokens[i] - tokens[i - 1]);
      if (tokens.length && tokens[0] > edge) firsts.push(tokens[0] - begin);
    }
    show("itl", gaps, this.targets.itl);
    show("ttft", firsts, this.targets.ttft);
  }
}

function show(name, times, target) {
  times.sort((a, b) => a - b);
  const middle = times.length ? quantile(times, 0.5) : null;
  const high = times.length ? quantile(times, 0.99) : null;
  set(`fig-${name}`, middle === null ? ["–", ""] : duration(middle), Boolean(target) && middle > target);
  const parts = [];
  if (high !== null) parts.push(`p99 ${durationText(high)}`);
  if (target) parts.push(`target ${durationText(target)}`);
  byId(`fig-${name}-note`).textContent = parts.join(" · ");
}

function set(id, [number, unit], over = false) {
  const place = byId(id);
  place.classList.toggle("over", over);
  if (place.dataset.shown === number + unit) return;
  place.dataset.shown = number + unit;
  place.replaceChildren(number, ...(unit ? [element("small", "", unit)] : []));
}
