// Requests over the last minute, one lane each: waiting, what the cache gave, prefill chunks,
// tokens as ticks, stalls as outlines.

import { byId, colours, context, count, durationText, plural, quantile, wantsCalm } from "./util.js";

export const WINDOW_MS = 60_000;
const ROW = 20;
const BAR = 13;
const MAX_ROWS = 16;
const AXIS = 20;
const UNTOLD_MS = 500;

export class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.tip = byId("lane-tip");
    this.clear();
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
  }

  clear() {
    this.byId = new Map();
    this.offset = 0;
    this.target = 0;
    this.ttftTarget = 0;
    this.drawn = [];
  }

  reset(hello) {
    this.clear();
    this.target = hello.itl_target_ms;
    this.ttftTarget = hello.ttft_target_ms;
  }

  take(message) {
    // The server's clock as seen here; a message that was long on its way must not move it back.
    const offset = message.now - performance.now();
    this.offset = message.type === "hello" ? offset : Math.max(this.offset, offset);
    for (const news of message.lanes ?? []) {
      const lane = this.byId.get(news.id) ?? { tokens: [], phases: [], row: -1 };
      const { tokens, phases, ...facts } = news;
      const first = phases.length ? phases[0][1] : Infinity;
      lane.phases = [...lane.phases.filter((phase) => phase[1] < first), ...phases];
      lane.tokens.push(...tokens);
      this.byId.set(news.id, Object.assign(lane, facts));
    }
    const oldest = this.now() - WINDOW_MS - 5000;
    for (const [id, lane] of this.byId) {
      if (lane.end !== null && lane.end < oldest) this.byId.delete(id);
    }
  }

  now() {
    return performance.now() + this.offset;
  }

  live() {
    return [...this.byId.values()].filter((lane) => lane.end === null);
  }

  moves() {
    if (wantsCalm() || document.hidden) return false;
    const edge = this.now() - WINDOW_MS;
    return [...this.byId.values()].some((lane) => lane.end === null || lane.end > edge);
  }

  // A gap that a reader notices: twice the target, else three times the lane's usual one.
  stallMs(lane) {
    if (this.target) return 2 * this.target;
    if (lane.usualOf !== lane.tokens.length) {
      const gaps = lane.tokens.slice(-65).map((time, i, all) => (i ? time - all[i - 1] : 0)).slice(1);
      lane.usual = gaps.length > 3 ? quantile(gaps.sort((a, b) => a - b), 0.5) : 1000;
      lane.usualOf = lane.tokens.length;
    }
    return 3 * lane.usual + 40;
  }

  // Each lane keeps its row; a row is taken again when the lane in it is over.
  arrange(edge) {
    const shown = [...this.byId.values()].filter((lane) => (lane.end ?? Infinity) > edge);
    shown.sort((a, b) => a.begin - b.begin);
    const free = [];
    for (const lane of shown) if (lane.row >= 0) free[lane.row] = Math.max(free[lane.row] ?? 0, lane.end ?? Infinity);
    for (const lane of shown) {
      if (lane.row >= 0) continue;
      let row = 0;
      while ((free[row] ?? -Infinity) > lane.begin - 300) row += 1;
      lane.row = row;
      free[row] = lane.end ?? Infinity;
    }
    return shown;
  }

  draw() {
    const now = this.now();
    const edge = now - WINDOW_MS;
    const shown = this.arrange(edge);
    byId("lanes-empty").hidden = shown.length > 0;
    this.canvas.hidden = shown.length === 0;
    this.describe();
    if (!shown.length) return;
    const rows = Math.min(MAX_ROWS, 1 + Math.max(...shown.map((lane) => lane.row)));
    const height = `${rows * ROW + AXIS}px`;
    if (this.canvas.style.height !== height) this.canvas.style.height = height;
    const { drawing, width } = context(this.canvas);
    const x = (time) => ((time - edge) / WINDOW_MS) * width;
    drawAxis(drawing, width, rows * ROW, x, now);
    this.drawn = [];
    let hidden = 0;
    for (const lane of shown) {
      if (lane.row >= MAX_ROWS) hidden += 1;
      else this.drawLane(drawing, lane, lane.row * ROW + 3, x, now);
    }
    if (hidden) {
      drawing.fillStyle = colours.soft;
      drawing.fillText(`${plural(hidden, "more lane")}`, 4, rows * ROW + 15);
    }
  }

  drawLane(drawing, lane, top, x, now) {
    const end = lane.end ?? now;
    const middle = top + BAR / 2;
    this.drawn.push({ lane, left: x(lane.begin), right: x(end), top });
    const bar = (from, to, height, colour) => {
      drawing.fillStyle = colour;
      drawing.fillRect(x(from), middle - height / 2, Math.max(1, x(to) - x(from)), height);
    };
    bar(lane.begin, end, 2, colours.line);
    for (const [name, from, to] of lane.phases) this.drawPhase(bar, name, from, to);
    if (lane.end === null) {
      const waits = lane.status === "waiting" || lane.status === "preempted";
      const name = waits ? "queue" : lane.tokens.length ? "decode" : "prefill";
      this.drawPhase(bar, name, lane.since, now);
    }
    this.drawTokens(drawing, lane, middle, x, now);
    const matched = lane.phases.find((phase) => phase[0] === "prefix_match" && phase[3] > 0);
    if (matched) {
      drawing.fillStyle = colours.cached;
      drawing.beginPath();
      drawing.arc(x(matched[2]), middle, 2 + 5 * Math.sqrt(lane.cached / Math.max(1, lane.prompt)), 0, 7);
      drawing.fill();
    }
    if (lane.end !== null && lane.status !== "stop" && lane.status !== "length") {
      drawing.strokeStyle = colours.stall;
      drawing.lineWidth = 2;
      const at = x(end) + 3;
      drawing.beginPath();
      drawing.moveTo(at - 3, middle - 4), drawing.lineTo(at + 4, middle + 4);
      drawing.moveTo(at + 4, middle - 4), drawing.lineTo(at - 3, middle + 4);
      drawing.stroke();
    }
  }

  drawPhase(bar, name, from, to) {
    if (name === "queue") bar(from, to, 3, colours.queue);
    // A hair of a gap between chunks, so that each can be seen.
    else if (name === "prefill") bar(from, to - Math.min(60, (to - from) * 0.12), BAR, colours.prefill);
    else if (name === "decode") bar(from, to, 3, colours.decode);
  }

  drawTokens(drawing, lane, middle, x, now) {
    const { tokens } = lane;
    if (!tokens.length) return;
    const stall = this.stallMs(lane);
    drawing.fillStyle = colours.decode;
    let drawnAt = -1;
    for (const time of tokens) {
      const at = Math.round(x(time) * 2) / 2;
      if (at >= 0 && at !== drawnAt) drawing.fillRect(at, middle - BAR / 2, 1, BAR);
      drawnAt = at;
    }
    drawing.strokeStyle = colours.stall;
    drawing.fillStyle = colours.stall;
    drawing.lineWidth = 1.5;
    const stalled = (from, to) => {
      const [left, width] = [x(from), x(to) - x(from)];
      if (to - from <= stall || left + width < 0) return;
      if (width > 6) drawing.strokeRect(left + 1, middle - BAR / 2 + 1, width - 2, BAR - 2);
      else drawing.fillRect(left, middle + BAR / 2, Math.max(1, width), 2.5);
    };
    for (let i = 1; i < tokens.length; i += 1) stalled(tokens[i - 1], tokens[i]);
    // What was made just now is not told yet.
    const last = tokens[tokens.length - 1];
    if (lane.end === null && now - last > stall + UNTOLD_MS) stalled(last, now);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const [px, py] = [event.clientX - box.left, event.clientY - box.top];
    const hit = this.drawn.find((d) => py >= d.top - 3 && py < d.top + ROW - 3 && px >= d.left - 4 && px <= d.right + 8);
    this.tip.hidden = !hit;
    if (!hit) return;
    this.tip.textContent = tell(hit.lane, this.now());
    const left = Math.min(px + 14, Math.max(0, box.width - 296));
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${hit.top + ROW}px`;
  }

  describe() {
    const live = this.live();
    const waiting = live.filter((lane) => lane.status === "waiting" || lane.status === "preempted").length;
    const text = live.length
      ? `${plural(live.length - waiting, "request")} running, ${count(waiting)} waiting.`
      : "No request is running.";
    const label = byId("lanes-text");
    if (label.textContent !== text) label.textContent = text;
  }
}

function tell(lane, now) {
  const lines = [
    `${lane.operation} · ${lane.status} · ${durationText((lane.end ?? now) - lane.begin)}`,
    `prompt ${count(lane.prompt)} tokens, ${count(lane.cached)} from cache`,
    `${plural(lane.tokens.length, "token")} out`,
  ];
  if (lane.tokens.length) lines[2] += `, the first after ${durationText(lane.tokens[0] - lane.begin)}`;
  if (lane.tenant !== "public") lines.push(`tenant ${lane.tenant}`);
  return lines.join("\n");
}

export function drawAxis(drawing, width, height, x, now) {
  drawing.font = "12px system-ui, sans-serif";
  drawing.fillStyle = colours.soft;
  drawing.strokeStyle = colours.line;
  drawing.lineWidth = 1;
  for (let ago = 0; ago < WINDOW_MS; ago += 10_000) {
    const at = Math.round(x(now - ago)) - 0.5;
    drawing.beginPath();
    drawing.moveTo(at, 0);
    drawing.lineTo(at, height);
    drawing.stroke();
    if (ago % 20_000 && width < 600) continue;
    const label = ago ? `${ago / 1000} s ago` : "now";
    drawing.textAlign = ago ? "center" : "right";
    drawing.fillText(label, at, height + 15);
  }
  drawing.textAlign = "left";
}
