// Every token's distance from the one before, and every first token's from its request, against
// the targets: one logarithmic scale, the same minute as the lanes above.

import { WINDOW_MS } from "./lanes.js";
import { byId, colours, context } from "./util.js";

const LOW = 1;
const HIGH = 20_000;
const TOP = 8;
const BOTTOM = 8;

export class Pace {
  constructor(canvas, lanes) {
    this.canvas = canvas;
    this.lanes = lanes;
  }

  draw() {
    const { drawing, width, height } = context(this.canvas);
    const now = this.lanes.now();
    const edge = now - WINDOW_MS;
    const x = (time) => ((time - edge) / WINDOW_MS) * width;
    const span = Math.log(HIGH / LOW);
    const y = (ms) => height - BOTTOM - (Math.log(Math.min(HIGH, Math.max(LOW, ms)) / LOW) / span) * (height - TOP - BOTTOM);
    const { target, ttftTarget } = this.lanes;
    byId("legend-target").hidden = !target && !ttftTarget;
    drawing.fillStyle = colours.decode;
    drawing.globalAlpha = 0.55;
    for (const { tokens } of this.lanes.byId.values()) {
      for (let i = 1; i < tokens.length; i += 1) {
        if (tokens[i] > edge) drawing.fillRect(x(tokens[i]) - 1, y(tokens[i] - tokens[i - 1]) - 1, 2.5, 2.5);
      }
    }
    drawing.globalAlpha = 1;
    drawing.fillStyle = colours.prefill;
    for (const { tokens, begin } of this.lanes.byId.values()) {
      if (!tokens.length || tokens[0] < edge) continue;
      diamond(drawing, x(tokens[0]), y(tokens[0] - begin), 5);
    }
    drawGrid(drawing, width, y);
    drawTarget(drawing, width, y, target, colours.decode);
    drawTarget(drawing, width, y, ttftTarget, colours.prefill);
  }
}

function drawGrid(drawing, width, y) {
  drawing.font = "12px system-ui, sans-serif";
  drawing.lineWidth = 1;
  for (const [ms, label] of [[10, "10 ms"], [100, "100 ms"], [1000, "1 s"], [10_000, "10 s"]]) {
    const at = Math.round(y(ms)) + 0.5;
    drawing.strokeStyle = colours.line;
    drawing.beginPath();
    drawing.moveTo(0, at);
    drawing.lineTo(width, at);
    drawing.stroke();
    // On a rim of the ground, so that it can be read between the points.
    drawing.strokeStyle = colours.ground;
    drawing.lineWidth = 4;
    drawing.strokeText(label, 0, at - 3);
    drawing.lineWidth = 1;
    drawing.fillStyle = colours.soft;
    drawing.fillText(label, 0, at - 3);
  }
}

function drawTarget(drawing, width, y, ms, colour) {
  if (!ms) return;
  drawing.strokeStyle = colour;
  drawing.setLineDash([6, 5]);
  drawing.lineWidth = 1.5;
  drawing.beginPath();
  drawing.moveTo(0, y(ms));
  drawing.lineTo(width, y(ms));
  drawing.stroke();
  drawing.setLineDash([]);
}

function diamond(drawing, x, y, r) {
  drawing.beginPath();
  drawing.moveTo(x, y - r), drawing.lineTo(x + r, y), drawing.lineTo(x, y + r), drawing.lineTo(x - r, y);
  drawing.fill();
}
