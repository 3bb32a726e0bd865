// Small things every part of the page uses. Text from the server is only ever set as text.

export const byId = (id) => document.getElementById(id);

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

const SVG = "http://www.w3.org/2000/svg";

export function svgElement(tag, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text) made.textContent = text;
  return made;
}

export const endpoint = (path) => new URL(path, document.baseURI);

const KEY = "headwater-key";

// Kept for this tab alone; sent in headers, never in a URL.
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export function headers(extra = {}) {
  return apiKey() ? { authorization: `Bearer ${apiKey()}`, ...extra } : extra;
}

export function quantile(sorted, q) {
  return sorted[Math.min(sorted.length - 1, Math.floor(q * sorted.length))];
}

export const count = (number) => Math.round(number).toLocaleString("en");

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}

export function duration(ms) {
  if (ms >= 10_000) return [(ms / 1000).toFixed(0), "s"];
  if (ms >= 1000) return [(ms / 1000).toFixed(1), "s"];
  return [ms >= 10 ? ms.toFixed(0) : ms.toFixed(1), "ms"];
}

export const durationText = (ms) => duration(ms).join(" ");

// The colours of the style sheet, for what is painted; they change with the colour scheme.
export const colours = {};
const names = ["ink", "soft", "line", "queue", "cached", "prefill", "decode", "mixed", "stall", "target", "ground"];

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  for (const name of names) colours[name] = style.getPropertyValue(`--${name}`).trim();
}

const calm = matchMedia("(prefers-reduced-motion: reduce)");
export const wantsCalm = () => calm.matches;

// A canvas sized to its box in device pixels; drawing units are CSS pixels.
export function context(canvas) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const drawing = canvas.getContext("2d");
  drawing.setTransform(ratio, 0, 0, ratio, 0, 0);
  drawing.clearRect(0, 0, width, height);
  return { drawing, width, height };
}
