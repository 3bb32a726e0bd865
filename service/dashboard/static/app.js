// Puts the page together: the feed's messages go to the parts, each of which draws itself.

import { Feed } from "./feed.js";
import { Figures } from "./figures.js";
import { Lanes } from "./lanes.js";
import { Pace } from "./pace.js";
import { Pages } from "./pages.js";
import { Playground } from "./playground.js";
import { Roofline } from "./roofline.js";
import { Tree } from "./tree.js";
import { apiKey, byId, keepKey, readColours } from "./util.js";

const lanes = new Lanes(byId("lanes"));
const pace = new Pace(byId("pace"), lanes);
const figures = new Figures(lanes);
const tree = new Tree(byId("tree"));
const pages = new Pages();
const roofline = new Roofline(byId("roofline"));
const playground = new Playground();

const WORDS = { connecting: "connecting", lost: "reconnecting", locked: "needs a key", wrong: "wrong key", tenant: "playground only" };

const BARRED = {
  locked: "This server has keys: enter one to ask, an admin key to see everything.",
  wrong: "This server does not know this key. Was it copied whole?",
  tenant: "This key opens the playground. The live view shows everybody's requests, so it needs an admin key.",
};

function showState(state, text) {
  byId("state").dataset.state = state;
  byId("state-text").textContent = text ?? WORDS[state] ?? state;
  const barred = state in BARRED;
  for (const section of document.querySelectorAll("section.live")) section.hidden = barred;
  byId("roofline-section").hidden = barred || roofline.empty;
  byId("banner").hidden = !barred;
  byId("banner-text").textContent = BARRED[state] ?? "";
}

function take(message) {
  const busy = message.stats && message.stats.running + message.stats.waiting > 0;
  if (message.engine) {
    const running = message.engine === "running";
    showState(running && busy ? "busy" : message.engine, running ? (busy ? "busy" : "idle") : undefined);
  }
  if (message.type === "hello") {
    byId("model").textContent = `${message.model} · ${message.backend}, ${message.numeric_mode}`;
    lanes.reset(message);
    figures.reset(message);
    tree.reset(message);
    pages.reset(message);
  }
  lanes.take(message);
  if (message.tree) tree.show(message.tree);
  if (message.stats) {
    figures.take(message);
    pages.show(message.stats);
  }
  if (message.roofline) roofline.show(message.roofline);
  paint();
}

// Time moves while something is in the window; else nothing is drawn and nothing wakes the machine.
let pending = 0;
let lastPaint = 0;

function paint() {
  if (!pending) pending = requestAnimationFrame(frame);
}

function frame(time) {
  pending = 0;
  if (time - lastPaint >= 30 || !lanes.moves()) {
    lastPaint = time;
    lanes.draw();
    pace.draw();
    figures.draw();
  }
  if (lanes.moves()) paint();
}

const feed = new Feed(take, showState);

function redraw() {
  readColours();
  tree.draw();
  roofline.draw();
  paint();
}

const dialog = byId("key-dialog");
for (const id of ["key-open", "banner-key"]) {
  byId(id).addEventListener("click", () => {
    byId("key").value = apiKey();
    dialog.returnValue = "";
    dialog.showModal();
  });
}
dialog.addEventListener("close", () => {
  const choice = dialog.returnValue;
  const key = byId("key").value.trim();
  byId("key").value = "";
  if (choice !== "use" && choice !== "forget") return;
  keepKey(choice === "use" ? key : "");
  for (const part of [lanes, tree, roofline]) part.clear();
  playground.reset();
  feed.start();
});

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
let width = 0;
new ResizeObserver(() => {
  if (innerWidth !== width) {
    width = innerWidth;
    redraw();
  }
}).observe(document.body);
readColours();
if (!document.hidden) feed.start();
