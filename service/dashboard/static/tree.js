// The radix tree as a river: prefixes flow from the source on the left, each branch as thick as
// the pages that hang on it, hot where requests have just ended, with a current where they run.
// What was evicted to disk goes on underground, hatched, where it hangs.

import { byId, count, endpoint, headers, plural, svgElement } from "./util.js";

const PAGE = 0;
const PARENT = 1;
const START = 2;
const TOKENS = 3;
const PAGES = 4;
const REFERENCED = 5;
const LEASED = 6;
const SUBTREE_PAGES = 7;
const SUBTREE_NODES = 8;
const AGE = 9;
const LABEL = 10;
const DISK = 11;

const LEFT = 4;
const SOURCE = 56;
const MOUTH = 0.4;
const FOOT = 22;
const BEND = 30;
const GAP = 3;
const THINNEST = 1;
const TALLEST = 380;
const TALLEST_NARROW = 300;
const PAGE_HEIGHT = 11;
const TIP = 46;
const UNDERGROUND = 72;

export class Tree {
  constructor(svg) {
    this.svg = svg;
    this.layers = ["rest", "branches", "strands", "flows", "words"].map((name) => svgElement("g", { class: name }));
    svg.append(hatching(), ...this.layers);
    this.clear();
    svg.addEventListener("keydown", (event) => this.onKey(event));
    svg.addEventListener("click", (event) => this.onClick(event));
  }

  clear() {
    this.tree = null;
    this.chosen = null;
    this.paths = new Map();
    for (const layer of this.layers) layer.replaceChildren();
    byId("node").hidden = true;
    byId("tree-empty").hidden = false;
    this.svg.toggleAttribute("hidden", true);
  }

  reset() {
    this.clear();
  }

  show(tree) {
    this.tree = tree;
    this.draw();
  }

  draw() {
    const { tree } = this;
    if (!tree) return;
    const onDisk = tree.nodes.reduce((sum, row) => sum + row[DISK], 0);
    const empty = tree.num_nodes + onDisk === 0;
    byId("legend-disk").hidden = onDisk === 0;
    byId("tree-empty").hidden = !empty;
    this.svg.toggleAttribute("hidden", empty);
    const [rest, , strands, flows, words] = this.layers;
    for (const layer of [rest, strands, flows, words]) layer.replaceChildren();
    if (empty) return;
    this.width = this.svg.clientWidth;
    // A small tree is a brook, not a flood: no page is thicker than it is worth.
    const tallest = this.width < 560 ? TALLEST_NARROW : TALLEST;
    this.height = Math.min(tallest, Math.max(48, (tree.num_pages + onDisk) * PAGE_HEIGHT));
    this.svg.style.height = `${this.height + FOOT}px`;
    this.nodes = place(tree.nodes, this.width, this.height);
    const kept = new Set();
    for (const node of this.nodes) {
      if (node.data[PAGE] >= 0 && node.bottom - node.top >= THINNEST) kept.add(this.drawBranch(node));
      this.drawTail(node, node.rest, "rest", TIP);
      this.drawTail(node, node.disk, "disk", UNDERGROUND);
    }
    for (const [page, path] of this.paths) {
      if (kept.has(page)) continue;
      path.remove();
      this.paths.delete(page);
    }
    this.drawNames();
    this.drawAxis();
    this.keepOneTabStop();
    const shown = kept.size;
    byId("tree-note").textContent =
      `${plural(tree.num_nodes, "branch").replace("branchs", "branches")} of ${plural(tree.num_pages, "page")}` +
      (shown < tree.num_nodes ? `, the ${count(shown)} largest drawn` : "") +
      (onDisk ? `, and ${plural(onDisk, "page")} on disk` : "") +
      ". Prefixes flow from left to right; thickness is pages.";
  }

  drawBranch(node) {
    const { data } = node;
    const page = data[PAGE];
    let path = this.paths.get(page);
    if (!path) {
      path = svgElement("path", { role: "button", tabindex: "-1" });
      path.dataset.page = page;
      this.paths.set(page, path);
      this.layers[1].append(path);
    }
    path.setAttribute("d", ribbon(node));
    const heat = Math.round(100 / (1 + data[AGE] / 6));
    path.style.fill = `color-mix(in oklab, var(--hot) ${heat}%, var(--cold))`;
    path.setAttribute("class", `branch${data[LEASED] ? " leased" : ""}${page === this.chosen ? " chosen" : ""}`);
    path.setAttribute("aria-label", describe(data));
    this.drawStrands(node);
    if (data[REFERENCED]) this.layers[3].append(svgElement("path", { class: "flow", d: current(node) }));
    return page;
  }

  // Where branches will part is drawn through all that they share.
  drawStrands(node) {
    const tall = node.bottom - node.top;
    for (const child of node.children) {
      const at = (child.slotTop - node.top) / tall;
      if (at < 0.01 || child.slotBottom - child.slotTop < 5) continue;
      const from = node.slotTop + at * (node.slotBottom - node.slotTop);
      this.layers[2].append(svgElement("path", { class: "strand", d: line(node, from, child.slotTop) }));
    }
  }

  // What hangs on a branch and is not drawn by itself: too small, or on disk.
  drawTail(node, slot, kind, length) {
    if (!slot || slot.bottom - slot.top < THINNEST) return;
    const right = Math.min(this.width - LEFT, node.right + length);
    const left = Math.min(slot.left ?? node.right, right);
    const shape = { left, right, bend: Math.min(BEND, right - left), ...slot };
    const tail = svgElement("path", { class: kind, d: ribbon(shape) });
    if (kind === "disk" && node.data[PAGE] >= 0) tail.dataset.page = node.data[PAGE];
    this.layers[0].append(tail);
  }

  drawNames() {
    const roots = this.nodes.filter((node) => node.data[PARENT] < 0);
    if (roots.length < 2) return;
    for (const root of roots) {
      if (root.bottom - root.top < 16) continue;
      this.layers[4].append(svgElement("text", { class: "name", x: LEFT + 4, y: root.top + 14 }, root.data[LABEL]));
    }
  }

  drawAxis() {
    const end = this.nodes.end;
    let last = -100;
    for (const tokens of [0, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]) {
      if (tokens > end) break;
      const x = this.nodes.x(tokens);
      if (x - last < 64 || x > this.width - 40) continue;
      last = x;
      const y = this.height + 16;
      this.layers[4].append(svgElement("text", { x, y }, tokens ? count(tokens) : "0 tokens"));
    }
  }

  keepOneTabStop() {
    const paths = [...this.paths.values()];
    const current = paths.find((path) => path.getAttribute("tabindex") === "0");
    if (!current && paths.length) paths[0].setAttribute("tabindex", "0");
  }

  onClick(event) {
    const page = event.target.dataset?.page;
    if (page !== undefined) this.choose(Number(page));
  }

  // Right goes downstream, left upstream, up and down to the branches beside.
  onKey(event) {
    const page = Number(event.target.dataset?.page ?? -1);
    const here = this.nodes?.find((node) => node.data[PAGE] === page);
    if (!here) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.choose(page);
      return;
    }
    const siblings = this.nodes.filter((node) => this.paths.has(node.data[PAGE]));
    const same = siblings.filter((node) => node.data[PARENT] === here.data[PARENT]);
    const at = same.indexOf(here);
    const next = {
      ArrowRight: siblings.find((node) => node.data[PARENT] === here.index),
      ArrowLeft: siblings.find((node) => node.index === here.data[PARENT]),
      ArrowDown: same[at + 1] ?? siblings.find((node) => node.top >= here.bottom && node.left <= here.left),
      ArrowUp: same[at - 1] ?? siblings.findLast((node) => node.bottom <= here.top && node.left <= here.left),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    for (const path of this.paths.values()) path.setAttribute("tabindex", "-1");
    const path = this.paths.get(next.data[PAGE]);
    path.setAttribute("tabindex", "0");
    path.focus();
  }

  async choose(page) {
    this.chosen = page;
    for (const [id, path] of this.paths) path.classList.toggle("chosen", id === page);
    const answer = await fetch(endpoint(`admin/tree/${page}`), { headers: headers(), cache: "no-store" });
    if (this.chosen !== page) return;
    byId("node").hidden = false;
    const text = byId("node-text");
    text.hidden = !answer.ok;
    if (!answer.ok) {
      byId("node-facts").textContent = "This branch has left the cache.";
      return;
    }
    const node = await answer.json();
    const facts = [
      `tokens ${count(node.start)} to ${count(node.start + node.tokens)}`,
      plural(node.pages, "page"),
      node.referenced_pages ? `${count(node.referenced_pages)} in use` : used(node.requests_since_use),
    ];
    if (node.leased_pages) facts.push(`${count(node.leased_pages)} leased`);
    const onDisk = this.nodes?.find(({ data }) => data[PAGE] === page)?.data[DISK];
    if (onDisk) facts.push(`${plural(onDisk, "page")} on disk from here`);
    if (node.children) facts.push(`${plural(node.children, "branch").replace("branchs", "branches")} from here`);
    facts.push(`tenant ${node.tenant}${node.cache_salt ? `, salt ${node.cache_salt}` : ""}`);
    byId("node-facts").textContent = facts.join(" · ");
    text.textContent = node.text + (node.text_is_whole ? "" : " …");
  }
}

const used = (age) => (age > 0 ? `used ${plural(age, "request")} ago` : "used last");

function describe(data) {
  const parts = [
    `tokens ${data[START]} to ${data[START] + data[TOKENS]}`,
    `${plural(data[PAGES], "page")}, ${count(data[SUBTREE_PAGES])} with all that follows`,
    data[REFERENCED] ? "in use" : used(data[AGE]),
  ];
  if (data[LEASED]) parts.push("leased");
  if (data[DISK]) parts.push(`${plural(data[DISK], "page")} on disk from here`);
  return parts.join(", ");
}

// Where each branch lies: along by token position (square root, so that short prefixes are seen),
// across by the pages of its subtree within its parent's width.
function place(rows, width, height) {
  const end = Math.max(1, ...rows.map((row) => row[START] + row[TOKENS]));
  const x = (tokens) => SOURCE + (width - SOURCE - LEFT) * Math.sqrt(tokens / end);
  const nodes = rows.map((data, index) => ({ data, index, children: [], weight: data[SUBTREE_PAGES] + data[DISK] }));
  const roots = [];
  for (const node of nodes) (nodes[node.data[PARENT]]?.children ?? roots).push(node);
  // A parent stands before its children.
  for (const node of nodes.toReversed()) for (const child of node.children) node.weight += child.weight - child.data[SUBTREE_PAGES];
  const spread = (children, top, bottom, total) => {
    let at = top;
    for (const child of children) {
      const share = ((bottom - top) * child.weight) / total;
      lay(child, at, at + share);
      at += share;
    }
    return at;
  };
  // The first branches rise from one source, narrower than they run.
  const rise = (node, root) => {
    const middle = (root.top + root.bottom) / 2;
    node.slotTop = middle + (node.slotTop - middle) * MOUTH;
    node.slotBottom = middle + (node.slotBottom - middle) * MOUTH;
    node.left = LEFT;
    node.bend = SOURCE - LEFT + Math.min(BEND, Math.max(0, node.right - SOURCE));
  };
  const riseTail = (root) => {
    const middle = (root.top + root.bottom) / 2;
    const { disk } = root;
    disk.slotTop = middle + (disk.slotTop - middle) * MOUTH;
    disk.slotBottom = middle + (disk.slotBottom - middle) * MOUTH;
    disk.left = LEFT;
    disk.bend = SOURCE - LEFT + BEND;
  };
  const lay = (node, top, bottom) => {
    const { data } = node;
    const gap = data[PARENT] < 0 ? 0 : Math.min(GAP, (bottom - top) / 5);
    Object.assign(node, { slotTop: top, slotBottom: bottom, top: top + gap, bottom: bottom - gap });
    node.left = x(data[START]);
    node.right = x(data[START] + data[TOKENS]);
    node.bend = Math.min(BEND, Math.max(0, node.right - node.left));
    if (nodes[data[PARENT]]?.data[PARENT] < 0) rise(node, nodes[data[PARENT]]);
    const below = node.weight - data[PAGES];
    if (below <= 0) return;
    const at = spread(node.children, node.top, node.bottom, below);
    const bed = node.bottom - ((node.bottom - node.top) * data[DISK]) / below;
    if (bed - at > 0.5) node.rest = { slotTop: at, slotBottom: bed, top: at + gap, bottom: bed - gap };
    if (data[DISK]) node.disk = { slotTop: bed, slotBottom: node.bottom, top: bed + gap, bottom: node.bottom - gap };
    if (data[DISK] && data[PARENT] < 0) riseTail(node);
  };
  spread(roots, 2, height - 2, roots.reduce((sum, root) => sum + root.weight, 0) || 1);
  // Sizes counted at different moments may not add up; nothing is laid outside what holds it.
  return Object.assign(nodes.filter((node) => node.top !== undefined), { end, x });
}

function hatching() {
  const pattern = svgElement("pattern", {
    id: "hatching",
    width: 6,
    height: 6,
    patternUnits: "userSpaceOnUse",
    patternTransform: "rotate(45)",
  });
  pattern.append(svgElement("path", { class: "hatch", d: "M0 0V6" }));
  const kept = svgElement("defs");
  kept.append(pattern);
  return kept;
}

function ribbon({ left, right, bend, slotTop, slotBottom, top, bottom }) {
  const [mid, start] = [left + bend / 2, left + bend];
  const round = Math.min(4, (bottom - top) / 2, Math.max(0, right - start));
  return (
    `M${left} ${slotTop}C${mid} ${slotTop} ${mid} ${top} ${start} ${top}H${right - round}` +
    `Q${right} ${top} ${right} ${top + round}V${bottom - round}Q${right} ${bottom} ${right - round} ${bottom}` +
    `H${start}C${mid} ${bottom} ${mid} ${slotBottom} ${left} ${slotBottom}Z`
  );
}

function current(node) {
  return line(node, (node.slotTop + node.slotBottom) / 2, (node.top + node.bottom) / 2);
}

function line({ left, right, bend }, from, to) {
  const mid = left + bend / 2;
  return `M${left} ${from}C${mid} ${from} ${mid} ${to} ${left + bend} ${to}H${right}`;
}
